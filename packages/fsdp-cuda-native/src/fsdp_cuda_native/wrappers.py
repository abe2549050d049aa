"""Preparing modules for FSDP1: the module to wrap, new parameters instead of the user's, and casts of inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision

from fsdp_core.sharding import KeptPart, OutsideAttributes, cast_inputs, detach_part
from fsdp_core.state import gathered_modules

__all__ = ["WrappedUnit", "cast_inputs_of_calls", "module_to_wrap", "renew_parameters"]


class WrappedUnit(OutsideAttributes, FSDP):
    """FSDP1's wrapper of a unit, or of the root, whose modules and parameters have the user's names.

    FSDP1 puts ``_fsdp_wrapped_module`` into the names that ``named_modules`` and what is built on it return, and
    libraries select parameters by name. FSDP1 strips that itself wherever it compares names.
    """

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for wrapped in self.children():  # without the name of the child
            yield from wrapped.named_modules(memo, prefix, remove_duplicate)


def module_to_wrap(root: nn.Module, module: nn.Module) -> nn.Module:
    """The module inside ``root`` to wrap for ``module``: itself, or its compiled version by :func:`torch.compile`.

    A compiled module calls its original directly, and would bypass a wrapper that replaced the original.
    """
    compiled = [parent for parent in root.modules() if dict(parent.named_children()).get("_orig_mod") is module]
    return module_to_wrap(root, compiled[0]) if compiled else module


def renew_parameters(
    modules: Iterable[nn.Module], replicated: Sequence[nn.Parameter], device: torch.device
) -> dict[nn.Parameter, KeptPart]:
    """Replace the parameters that modules own with new ones of the same data and attributes.

    FSDP1 would turn the old parameters into shards in place, and an optimizer that has stepped would continue with
    state of the old shapes. With new parameters it must be rebound, which is refused if it has stepped.

    Args:
        modules: The modules, each without its children.
        replicated: Parameters to leave as they are.
        device: The device of the units.

    Returns:
        By new parameter its part, for parameters that were sharded while they were built. They have no memory yet.
    """
    # by the id of the old one, and of the new one, which a further name of a tied parameter may hold already
    renewed: dict[int, nn.Parameter] = {id(p): p for p in replicated}
    parts: dict[nn.Parameter, KeptPart] = {}
    for module in modules:
        for name, old in list(module.named_parameters(recurse=False)):
            if id(old) not in renewed:
                part = detach_part(old)
                data = old.data if part is None else _without_memory(part, device)
                new = nn.Parameter(data, requires_grad=old.requires_grad)
                new.__dict__.update(old.__dict__)
                renewed[id(old)] = renewed[id(new)] = new
                if part is not None:
                    parts[new] = part
                # free the memory of the old one, but keep its shape: an optimizer holds it until it is rebound
                old.data = old.data.new_empty(()).expand(old.shape)
            module._parameters[name] = renewed[id(old)]
    return parts


def _without_memory(part: KeptPart, device: torch.device) -> torch.Tensor:
    """A tensor of the parameter's full shape, whose memory is freed."""
    tensor = part.part.new_empty(part.shape, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def cast_inputs_of_calls(module: nn.Module, policy: MixedPrecision) -> None:
    """Cast the arguments of the user's module in each call, as FSDP1 casts those of the root.

    Under the Trainer the root is called with the step's arguments, and the step calls the module.

    Args:
        module: The module that the root wraps.
        policy: The dtype, and whether to cast at all.
    """
    dtype = policy.param_dtype
    if dtype is None or not policy.cast_root_forward_inputs:
        return

    def cast_all(called: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if called in gathered_modules:
            return None  # its parameters are in the dtype of the shards
        return cast_inputs(dtype, args, kwargs)

    module.register_forward_pre_hook(cast_all, with_kwargs=True, prepend=True)
