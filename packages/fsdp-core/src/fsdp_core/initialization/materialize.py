"""Moves a module to its device with rank 0's values, and initialises tensors that were built on the meta device."""

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
    """Move the tensors that ``modules`` own directly to the device, with rank 0's values. All ranks must call it.

    Parameters that were sharded while they were built are gathered (:mod:`fsdp_core.initialization.sharded_init`).
    On devices for which torch refuses ``parameter.data = …``, the modules get other parameters, tied as before if all
    their owners are among ``modules``; pass them to :meth:`fsdp_core.Sharded.remember`.

    Args:
        modules: The modules, each without its children.
        runtime: The ranks, and the device to move to.
        init: Materialises a module that was built on the meta device, instead of :func:`materialize`.
        leave: Called with a module and a parameter of its own; returns whether to leave the parameter as it is.
    """
    if init is None:
        materialize(modules, runtime.device)
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in modules:
        if init is not None and any(p.is_meta for p in module.parameters(recurse=False)):
            init(module)
        full_tensors: list[torch.Tensor] = []
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in replaced:
                setattr(module, name, replaced[id(parameter)][1])
                continue
            if leave(module, parameter):
                continue
            kept_part = let_go_of(parameter)
            if kept_part is not None:
                moved = _with_data(parameter, kept_part.whole(runtime.device))
                del kept_part
                give_back()
            else:
                moved = _with_data(parameter, parameter.data.to(runtime.device).contiguous())
                full_tensors.append(moved)
            if moved is not parameter:
                replaced[id(parameter)] = parameter, moved  # the former is kept alive: its id must not be reused
                setattr(module, name, moved)
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(runtime.device)
        for tensor in (*full_tensors, *module.buffers(recurse=False)):
            # ranks with different seeds would shard a mixture of different models
            runtime.broadcast(tensor.data)
        _move_other_tensors(module, runtime.device)


def _with_data(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """The parameter with other data; or another one, where torch can't change the device of one that exists."""
    try:
        parameter.data = data
    except RuntimeError:  # between the CPU and devices whose tensors are of another kind, as those of PrivateUse1 are
        return nn.Parameter(data, requires_grad=parameter.requires_grad)
    return parameter


def _move_other_tensors(module: nn.Module, device: torch.device) -> None:
    """Move what a module without parameters holds besides buffers and moves itself, as torchmetrics' objects do."""
    moves_itself = type(module)._apply is not nn.Module._apply
    if moves_itself and device.type != "cpu" and next(module.parameters(), None) is None:
        module._apply(lambda tensor: tensor.to(device))


def materialize(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Allocate the parameters and buffers that ``modules`` own directly, and initialise them, in place.

    Modules built in a backend's ``init_context(empty=True)`` get the values that their constructors would have set.
    Other modules, tensors that the constructor has left unfilled, and modules that were given their own
    ``reset_parameters`` after they were built are filled by ``reset_parameters``. Tied parameters stay tied if all
    their owners are among ``modules``.

    Args:
        modules: The modules, each without its children, in the order in which they draw random numbers.
        device: The device to allocate on.

    Raises:
        ShardingError: A module owns tensors on the meta device that its constructor has not filled, but has no
            ``reset_parameters``, or one that leaves a tensor unfilled; or its model initialises its modules by itself,
            which was not recorded.
    """
    modules = list(modules)
    _fill_deferred(modules, device)
    new_parameters: dict[int, nn.Parameter] = {}
    freed_parameters: list[nn.Parameter] = []  # a freed parameter's id could be reused
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
                freed_parameters.append(parameter)
                if id(parameter) not in new_parameters:
                    empty = _unfilled_like(parameter, device)
                    new_parameters[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(module, name, new_parameters[id(parameter)])  # and not in _parameters: LSTMs keep a list, too
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

#: The class that initialises a module's parameters, where this was not recorded and can't be repeated.
_initialised_by: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def note_initialisers(root: nn.Module) -> None:
    """Record which modules on the meta device an enclosing module initialises, so that nothing else fills them.

    Units are materialised one by one, without their enclosing modules. transformers' models, and others that follow
    them, initialise their modules with ``self.apply(self._init_weights)``.
    """
    for owner in root.modules():
        if callable(getattr(type(owner), "_init_weights", None)):
            for module in owner.modules():
                tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                if any(t.is_meta and not is_deferred(t) for t in tensors):
                    _initialised_by[module] = type(owner).__name__


def _fill_deferred(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Fill the modules with the values that their constructors would have set, where those were recorded."""
    # a reset_parameters that was set on an instance is to fill it instead
    filled_modules = [module for module in modules if "reset_parameters" not in vars(module)]
    owned_tensors: list[tuple[nn.Module, dict[str, Any], str, Tensor]] = [
        (module, registry, name, tensor)
        for module in filled_modules
        for registry in (module._parameters, module._buffers, vars(module))
        for name, tensor in registry.items()
        if isinstance(tensor, Tensor) and (has_values(tensor) or (is_deferred(tensor) and not tensor.numel()))
    ]
    for module, _, name, tensor in owned_tensors:
        if was_changed(tensor):
            raise ShardingError(
                f"{name!r} of {type(module).__name__} was changed after it was built with empty_init=True, when it had "
                "no memory: that did nothing.\nChange it inside of init_module(empty_init=True), where it is noted and "
                "done when there is memory, or give the module a reset_parameters() that does it."
            )
    values = values_of([tensor for *_, tensor in owned_tensors], device)
    new_parameters: dict[int, nn.Parameter] = {}
    for (module, registry, name, tensor), value in zip(owned_tensors, values, strict=True):
        if isinstance(tensor, nn.Parameter):
            if value.is_floating_point() and bool(value.isnan().any()):
                raise ShardingError(
                    f"{name!r} of {type(module).__name__}, which was built with empty_init=True, has no values: it was "
                    "made of what could not be noted, such as a file that torch.load() has read there.\n"
                    "Read files after the set-up, with fsdp_core.load_state_dict() or ckpt_path=, or build the model "
                    "without empty_init."
                )
            parameter = new_parameters.setdefault(id(tensor), nn.Parameter(value, requires_grad=tensor.requires_grad))
            parameter.__dict__.update(tensor.__dict__)
            setattr(module, name, parameter)  # and not in the registry: LSTMs keep a list, too
        else:
            registry[name] = value


def _unfilled_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory marked as unfilled: NaN, if the dtype has it."""
    empty = torch.zeros_like(tensor, device=device)
    return empty.fill_(torch.nan) if tensor.is_floating_point() else empty
