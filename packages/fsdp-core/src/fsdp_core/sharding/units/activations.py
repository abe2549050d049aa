"""What modules keep of their activations: the results of some operations, or copies in host memory."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsdp_core.errors import UnsupportedCapabilityError

__all__ = ["SavedOps", "check_saved_ops", "offload_activations", "recompute_all_but"]

#: Operations whose results are kept instead of recomputed: operators of ``torch.ops``, or their names, such as
#: ``"aten.mm"``; or one of torch's policies, ``(context, op, *args, **kwargs) -> CheckpointPolicy``.
SavedOps = Collection[Any] | Callable[..., Any]

_PACKET, _OVERLOAD = type(torch.ops.aten.mm), type(torch.ops.aten.mm.default)
_HOW_TO = (
    "Write a list of operators, such as ['aten.mm', 'aten.addmm'], or a function "
    "(context, op, *args, **kwargs) -> torch.utils.checkpoint.CheckpointPolicy."
)


def check_saved_ops(saved: object, option: str) -> SavedOps:
    """Read which operations keep their results.

    Args:
        saved: See :data:`SavedOps`.
        option: The name of the option that says so, for messages.

    Returns:
        torch's operators, each with its overload, or the policy function.

    Raises:
        UnsupportedCapabilityError: It is neither, or torch has no such operator.

    Example:
        >>> check_saved_ops(["aten.mm.default"], "saves")
        [<OpOverload(op='aten.mm', overload='default')>]
    """
    if isinstance(saved, Collection) and not isinstance(saved, str | bytes) and saved:
        return [overload for op in saved for overload in _overloads(op, option)]
    if callable(saved) and not isinstance(saved, type | _PACKET | _OVERLOAD):
        return saved
    raise UnsupportedCapabilityError(f"{option}={saved!r} names no operations.\n{_HOW_TO}")


def _overloads(op: object, option: str) -> list[Any]:
    if isinstance(op, _OVERLOAD):
        return [op]
    if isinstance(op, _PACKET):
        packet: Any = op
        return [getattr(packet, overload) for overload in packet.overloads()]
    names = op.removeprefix("torch.ops.").split(".") if isinstance(op, str) else []
    if len(names) in (2, 3):  # such as aten.mm, or aten.mm.default
        operation: Any = torch.ops
        for name in names:
            operation = getattr(operation, name, None)
        if isinstance(operation, _OVERLOAD | _PACKET):
            return _overloads(operation, option)
    close = difflib.get_close_matches(names[1], dir(torch.ops.aten), 3) if len(names) > 1 else []
    hint = f"Did you mean {' or '.join(repr(f'aten.{name}') for name in close)}? " if close else ""
    raise UnsupportedCapabilityError(f"{option} holds {op!r}, which is no operator of torch.ops.\n{hint}{_HOW_TO}")


def recompute_all_but(saved: SavedOps | None) -> Callable[..., Any] | None:
    """How :func:`~fsdp_core.sharding.checkpoint_activations` recomputes, so that the results of ``saved`` are kept.

    Args:
        saved: What :func:`check_saved_ops` returned; ``None`` to recompute everything.
    """
    if saved is None:
        return None
    contexts = partial(create_selective_checkpoint_contexts, saved)
    return partial(checkpoint, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)


def offload_activations(modules: Iterable[nn.Module], *, pin_memory: bool) -> None:
    """Keep in host memory what modules save for their backward pass, by torch's ``save_on_cpu``. In place, idempotent.

    Parameters stay where they are: torch would copy them as well, since it saves them for the backward pass, and the
    sharding library frees and gathers them by itself. Names and classes of modules don't change.

    Args:
        modules: The modules.
        pin_memory: Whether the copies are page-locked, so that copying does not block the host.
    """
    for module in modules:
        if "_fsdp_core_offloaded" not in module.__dict__:
            module.__dict__["_fsdp_core_offloaded"] = True
            module.forward = partial(_forward_with_offload, module, pin_memory, module.forward)


def _forward_with_offload(
    module: nn.Module, pin_memory: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    copies = save_on_cpu(pin_memory=pin_memory)
    parameter_storages = {_storage_address(parameter) for parameter in module.parameters()}

    def pack(tensor: Tensor) -> Any:
        if _storage_address(tensor) in parameter_storages:
            return tensor
        if isinstance(tensor, DTensor):  # which can't be on another device than its mesh, so its local tensor is copied
            local = copies.pack_hook(tensor.to_local())
            return partial(_as_dtensor, local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        return copies.pack_hook(tensor)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return packed(copies.unpack_hook) if isinstance(packed, partial) else copies.unpack_hook(packed)

    with saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


def _storage_address(tensor: Tensor) -> int:
    """The address of a tensor's storage, the same for a parameter and a view of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()


def _as_dtensor(
    local: Any, mesh: Any, placements: Any, shape: Any, stride: Any, unpack: Callable[[Any], Tensor]
) -> DTensor:
    return DTensor.from_local(unpack(local), mesh, placements, run_check=False, shape=shape, stride=stride)
