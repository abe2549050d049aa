"""A model of transformers inside a sharded module: where it is, this rank's chunks of it, and their names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_core import devices
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from fsdp_core.sharding.sharded import Sharded, StateTensor, sharded_around
from fsdp_core.state.chunks import ChunkedTensor, chunked
from fsdp_core.state.fqn import aliases, clean_name, unwrap_compiled
from fsdp_core.state.full_tensor import check_not_gathered, running_forwards

__all__ = ["HeldModel", "find_model", "find_part", "is_adapted", "is_model"]


@dataclass(frozen=True, kw_only=True)
class HeldModel:
    """A model, as the user wrote it, and its position in a sharded root.

    Attributes:
        module: The model itself, or a library's wrapper around it.
        sharded: The root that it is in, or is; ``None`` if nothing is sharded.
        prefix: The prefix of its names in the root, such as ``"model."``.
        runtime: The ranks.
    """

    module: nn.Module = field(repr=False)
    sharded: Sharded | None = field(repr=False)
    prefix: str
    runtime: Runtime = field(repr=False)

    @contextmanager
    def unsharded_view(self) -> Iterator[nn.Module]:
        """A context in which the model has the classes, names and shapes that the user wrote; yields it."""
        if self.sharded is None:
            yield unwrap_compiled(self.module)
            return
        with self.sharded.unsharded_view():
            model = unwrap_compiled(self.sharded.module)
            for part in self.prefix.split(".")[:-1]:
                model = unwrap_compiled(getattr(model, part))
            with _without_library_classes(model):
                yield model

    def state(self) -> dict[str, ChunkedTensor]:
        """Return this rank's chunks of the model's state by name; tied parameters are under each of their names.

        Raises:
            UnsupportedCapabilityError: There is state that is not a tensor.
        """
        state = {}
        for name, value in self.values().items():
            if not isinstance(value, StateTensor):
                raise UnsupportedCapabilityError(
                    f"{name!r} is not a tensor but extra state of a module ({type(value).__name__}), for which a "
                    "folder of Hugging Face's has no place.\nSave a checkpoint, which holds it."
                )
            state[name] = chunked(value, rank=self.runtime.rank)
        return state

    def values(self) -> dict[str, Any]:
        """Return what this rank holds of the model's state by name: tensors in any form, and extra state."""
        if self.sharded is None:
            return {clean_name(name): value for name, value in self.module.state_dict().items()}
        root_state = self.sharded.model_state().items()
        return {name.removeprefix(self.prefix): value for name, value in root_state if name.startswith(self.prefix)}

    def first_names(self) -> dict[str, str]:
        """Return the first name of each tied parameter, by each of its other names in the model."""
        aliases_of_root = aliases(unwrap_compiled(self.module)) if self.sharded is None else self.sharded.aliases()
        aliases_in_model = {name: first for name, first in aliases_of_root.items() if name.startswith(self.prefix)}
        first_names: dict[str, str] = {}
        replacements: dict[str, str] = {}  # for first names outside of the model: the first within it
        for name, first in aliases_in_model.items():
            first_in_model = first if first.startswith(self.prefix) else replacements.setdefault(first, name)
            if first_in_model != name:
                first_names[name.removeprefix(self.prefix)] = first_in_model.removeprefix(self.prefix)
        return first_names

    def load(self, state: Mapping[str, Any]) -> None:
        """Fill what this rank holds, in place.

        Args:
            state: Handles to saved tensors, by names in the model. Names may be left out.
        """
        if self.sharded is not None:
            prefixed_state = {f"{self.prefix}{name}": handle for name, handle in state.items()}
            self.sharded.load_model_state(prefixed_state, strict=False)
            return
        own_state = self.state()
        for name, handle in state.items():
            for chunk in own_state[name].chunks:
                handle.read_into(chunk)


def find_model(module: nn.Module, action: str) -> HeldModel:
    """Find the model in a module, sharded or not.

    Args:
        module: A model; a module inside a sharded one; a LightningModule that holds one model; what ``fabric.setup``
            returned.
        action: What is done, for errors.

    Raises:
        ShardingError: It holds several models; or its parameters are gathered at the moment.
    """
    inner = getattr(module, "module", None)
    if sharded_around(module) is None and isinstance(inner, nn.Module):  # Fabric's wrapper, or DDP's
        return find_model(inner, action)
    if not is_model(module):
        model_names = [name for name, child in module.named_children() if is_model(child)]
        if len(model_names) > 1:
            alternatives = " or ".join(f"module.{name}" for name in model_names)
            raise ShardingError(
                f"{action} was called with a {type(module).__name__}, which holds {len(model_names)} models.\n"
                f"Pass one of them: {alternatives}."
            )
        if model_names:
            return find_model(getattr(module, model_names[0]), action)
    return find_part(module, action)


def find_part(module: nn.Module, action: str) -> HeldModel:
    """Find a module in the sharded root that it is in, or is, if there is one.

    Args:
        module: Any module.
        action: What is done, for errors.

    Raises:
        ShardingError: Its parameters are gathered at the moment; or another rank does not do the same.
    """
    root_and_prefix = sharded_around(module)
    if root_and_prefix is None:
        return HeldModel(module=module, sharded=None, prefix="", runtime=_default_runtime())
    sharded, prefix = root_and_prefix
    check_not_gathered(sharded.root, action)
    if sharded.root in running_forwards:
        raise ShardingError(
            f"{action} was called inside a step, whose forward pass needs the gathered parameters.\n"
            "Call it in a hook before or after it, such as on_train_batch_end() or on_train_end()."
        )
    sharded.runtime.rendezvous(f"{action}, of which all ranks do a part,")
    return HeldModel(module=module, sharded=sharded, prefix=prefix, runtime=sharded.runtime)


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT has put adapters into a model."""
    return isinstance(getattr(module, "peft_config", None), Mapping)


@contextmanager
def _without_library_classes(model: nn.Module) -> Iterator[None]:
    """A context in which modules have the classes that FSDP2 replaced, by whose names transformers looks things up."""
    sharded_classes: dict[nn.Module, type] = {
        module: type(module) for module in model.modules() if isinstance(module, FSDPModule)
    }
    for module, cls in sharded_classes.items():
        own_class: Any = next(own_cls for own_cls in cls.__mro__ if not issubclass(own_cls, FSDPModule))
        module.__class__ = own_class
    try:
        yield
    finally:
        for module, cls in sharded_classes.items():
            module.__class__ = cls


def is_model(module: nn.Module) -> bool:
    """Whether a module is a model as those of transformers: with a configuration, and a method that writes it."""
    return all(hasattr(module, name) for name in ("config", "save_pretrained"))


def _default_runtime() -> Runtime:
    """Return the ranks of a module that is not sharded: those of torch's process group, if there is one."""
    runtime = ProcessGroupRuntime()
    if dist.is_available() and dist.is_initialized():
        ranks: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        # not get_backend(): it is "undefined" where init_process_group() has chosen one for each kind of device
        backends = {entry.rpartition(":")[2] for entry in dist.get_backend_config().split(",")}
        device = torch.device("cpu") if backends == {"gloo"} else devices.current_device(initialize=True)
        runtime.start(**ranks, local_rank=local_rank, device=device, address="", port=0)
    return runtime
