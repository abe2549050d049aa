"""Bringing a module to its device with rank 0's values, and giving what was built on the meta device its first ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.errors import ShardingError
from fsdp_core.initialization.deferred_init import has_values, is_deferred, values_of, was_changed
from fsdp_core.initialization.sharded_init import let_go_of
from fsdp_core.runtime import Runtime
from fsdp_core.state.host_memory import give_back

__all__ = ["materialize", "note_initialisers", "place"]


def place(
    modules: Sequence[nn.Module],
    runtime: Runtime,
    init: Callable[[nn.Module], object] | None = None,
    *,
    leave: Callable[[nn.Module, nn.Parameter], bool] = lambda module, parameter: False,
) -> None:
    """Bring what ``modules`` own directly to the runtime's device, with rank 0's values. All ranks must call it.

    What was sharded as it was built is put together again (:mod:`fsdp_core.initialization.sharded_init`).

    Args:
        modules: The modules, each taken without its children.
        runtime: The ranks, and the device to bring them to.
        init: Gives a module that was built on the meta device memory and values, instead of :func:`materialize`.
        leave: Which parameters to leave as they are, of a module's own.
    """
    if init is None:
        materialize(modules, runtime.device)
    for module in modules:
        if init is not None and any(p.is_meta for p in module.parameters(recurse=False)):
            init(module)
        whole: list[torch.Tensor] = []
        for parameter in module.parameters(recurse=False):
            if leave(module, parameter):
                continue
            kept = let_go_of(parameter)
            if kept is not None:
                parameter.data = kept.whole(runtime.device)
                del kept
                give_back()
            else:
                parameter.data = parameter.data.to(runtime.device).contiguous()
                whole.append(parameter)
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(runtime.device)
        for tensor in (*whole, *module.buffers(recurse=False)):
            # ranks seeded differently would shard a model that no rank ever had
            runtime.broadcast(tensor.data)


def materialize(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Allocate the parameters and buffers that ``modules`` own directly, and initialise them, in place.

    What was built in a backend's ``init_context(empty=True)`` gets the values that its constructor would have given
    it. What was not, or what the constructor has left unfilled, is filled by ``reset_parameters``, and so is a module
    that was given one of its own after it was built. Tied parameters stay tied as long as all their owners are among
    ``modules``.

    Args:
        modules: The modules, each taken without its children, in the order in which they draw from the random
            generator.
        device: Where to allocate.

    Raises:
        ShardingError: A module owns tensors on the meta device that its constructor has not filled, but has no
            ``reset_parameters``, or one that leaves a tensor unfilled; or its model initialises its modules by itself,
            which was not noted.
    """
    modules = list(modules)
    _fill_deferred(modules, device)
    made: dict[int, nn.Parameter] = {}
    kept: list[nn.Parameter] = []  # a freed parameter's id could be given to another
    for module in modules:
        if not any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            continue
        if module in _initialised_by:
            raise ShardingError(
                f"{type(module).__name__} was built under torch.device('meta'), where _init_weights() of "
                f"{_initialised_by[module]} has done nothing, and reset_parameters() would give it other values.\n"
                f"Build the model with {_EMPTY_INIT}, which does it all when the model gets memory; or without "
                "torch.device('meta')."
            )
        # torch's own MultiheadAttention and Transformer spell it with an underscore
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if not callable(reset):
            raise ShardingError(
                f"{type(module).__name__} was built on the meta device, but has no reset_parameters() to fill it.\n"
                f"Write that method, or build the model with {_EMPTY_INIT}, which does as the constructor would have "
                "done, or without torch.device('meta')."
            )
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                kept.append(parameter)
                if id(parameter) not in made:
                    empty = _unfilled_like(parameter, device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(module, name, made[id(parameter)])  # LSTMs note it in a list
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                module._buffers[name] = _unfilled_like(buffer, device)
        reset()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
                raise ShardingError(
                    f"{type(module).__name__} was built on the meta device, and its reset_parameters() left {name!r} "
                    "unfilled.\nFill it there, or build the model without empty_init / torch.device('meta')."
                )


_EMPTY_INIT = "fabric.init_module(empty_init=True) or trainer.init_module(empty_init=True)"

#: The class that initialises a module's parameters, where that was not noted and can't be done again.
_initialised_by: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def note_initialisers(root: nn.Module) -> None:
    """Note which modules without memory are initialised by a module around them, so that they are not filled otherwise.

    Units get memory one after another, without what is around them. transformers' models initialise themselves so, and
    others after their example: ``self.apply(self._init_weights)``.
    """
    for owner in root.modules():
        if callable(getattr(type(owner), "_init_weights", None)):
            for module in owner.modules():
                tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                if any(t.is_meta and not is_deferred(t) for t in tensors):
                    _initialised_by[module] = type(owner).__name__


def _fill_deferred(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Give the modules the values that their constructors would have given them, where those were noted."""
    owned: list[tuple[nn.Module, dict[str, Any], str, Tensor]] = [
        (module, kept, name, tensor)
        for module in modules
        for kept in (module._parameters, module._buffers, vars(module))
        for name, tensor in kept.items()
        if isinstance(tensor, Tensor) and (has_values(tensor) or (is_deferred(tensor) and not tensor.numel()))
        # given to this very module, to fill it when it gets memory
        if "reset_parameters" not in vars(module)
    ]
    for module, _, name, tensor in owned:
        if was_changed(tensor):
            raise ShardingError(
                f"{name!r} of {type(module).__name__} was changed after it was built with empty_init=True, when it had "
                "no memory: that did nothing.\nChange it inside of init_module(empty_init=True), where it is noted and "
                "done when there is memory, or give the module a reset_parameters() that does it."
            )
    values = values_of([tensor for *_, tensor in owned], device)
    made: dict[int, nn.Parameter] = {}
    for (module, kept, name, tensor), value in zip(owned, values, strict=True):
        if isinstance(tensor, nn.Parameter):
            if value.is_floating_point() and bool(value.isnan().any()):
                raise ShardingError(
                    f"{name!r} of {type(module).__name__}, which was built with empty_init=True, has no values: it was "
                    "made of what could not be noted, such as a file that torch.load() has read there.\n"
                    "Read files after the set-up, with fsdp_core.load_state_dict() or ckpt_path=, or build the model "
                    "without empty_init."
                )
            parameter = made.setdefault(id(tensor), nn.Parameter(value, requires_grad=tensor.requires_grad))
            parameter.__dict__.update(tensor.__dict__)
            setattr(module, name, parameter)  # LSTMs note it in a list
        else:
            kept[name] = value


def _unfilled_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory marked as not yet given a value: NaN, where the dtype has it."""
    empty = torch.zeros_like(tensor, device=device)
    return empty.fill_(torch.nan) if tensor.is_floating_point() else empty
