"""Accumulated gradients of flat parameters, by the user's names.

A unit has up to two: the *reduced* one, of which each rank has the elements of its shard, and an *unreduced* one of all
elements, this rank's own, that ``no_sync()`` has left at the flat parameter. The next reduction adds it to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import cast

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from fsdp_core import Runtime
from fsdp_core.state import HeldGradients, SavedTensor, fill
from fsdp_cuda_native.torch_private import unit_gradients
from fsdp_cuda_native.torch_private.flat_parameters.units import units_of
from fsdp_cuda_native.unflattened import local_part, named_members

__all__ = ["gradients_of_units", "restore_to_units", "zero_gradients"]


def gradients_of_units(root: FSDP, runtime: Runtime) -> HeldGradients:
    """This rank's part of the units' accumulated gradients. All ranks must call it; the root must be sharded."""
    local_gradients = {unit: unit_gradients.reduced_gradient(unit) for unit in units_of(root)}
    # a rank that holds no element of what is trained has no gradient, where others have one
    has_gradient_by_rank = runtime.gather_objects([gradient is not None for gradient in local_gradients.values()])
    has_gradient_anywhere = [any(on_ranks) for on_ranks in zip(*has_gradient_by_rank, strict=True)]
    reduced = {
        unit: unit_gradients.zero_gradient(unit) if gradient is None else gradient
        for (unit, gradient), has_gradient in zip(local_gradients.items(), has_gradient_anywhere, strict=True)
        if has_gradient
    }
    gradients = HeldGradients()
    gradients.own.update(_unreduced_by_name(root))
    for name, member in named_members(root):
        if member.unit in reduced and member.optimizer_param.requires_grad:
            gradients.reduced[name] = local_part(name, member).of(reduced[member.unit])
    return gradients


def zero_gradients(root: FSDP, names: Collection[str]) -> None:
    """Set unreduced gradients to zero, and the reduced gradients that they would be added to.

    Args:
        root: The root.
        names: The user's names of the parameters.
    """
    for name, gradient in _unreduced_by_name(root):
        if name in names:
            gradient.zero_()
    for name, member in named_members(root):
        saved = unit_gradients.saved_gradient(member.unit)
        if saved is not None and name in names:
            part = local_part(name, member).of(saved)
            tensors = [part] if isinstance(part, Tensor) else [cast("Tensor", chunk.data) for chunk in part.chunks]
            for tensor in tensors:
                tensor.zero_()


def _unreduced_by_name(root: FSDP) -> Iterator[tuple[str, Tensor]]:
    """The gradients that this rank has accumulated without reducing them, by the user's names."""
    unreduced = {unit: unit_gradients.unreduced_gradients(unit) for unit in units_of(root)}
    for name, member in named_members(root):
        gradient = unreduced[member.unit].get((member.owner, member.attribute))
        if gradient is not None and member.optimizer_param.requires_grad:
            yield name, gradient


def restore_to_units(
    root: FSDP, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor], runtime: Runtime
) -> None:
    """Restore gradients that :func:`gradients_of_units`, or another backend, returned. All ranks must call it.

    Args:
        root: The root, sharded.
        own: Functions that read this rank's unreduced gradients, by the user's names.
        reduced: Reduced gradients by the user's names. Here and in ``own``, names that no unit has flattened are
            ignored.
        runtime: The ranks.
    """
    members = dict(named_members(root))
    unreduced_somewhere = set[str]().union(*runtime.gather_objects([name for name in members if name in own]))
    for unit in units_of(root):
        unit_gradients.drop_gradients(unit)
        unit_members = {name: member for name, member in members.items() if member.unit is unit}
        if any(name in reduced for name in unit_members):
            shard = unit_gradients.zero_gradient(unit)
            for name, member in unit_members.items():
                if name in reduced:
                    fill(local_part(name, member).of(shard), reduced[name], cast=True)
            unit_gradients.set_reduced_gradient(unit, shard)
        unreduced: dict[tuple[nn.Module, str], Callable[[], Tensor]] = {
            (member.owner, member.attribute): own[name] for name, member in unit_members.items() if name in own
        }
        if not unreduced_somewhere.isdisjoint(unit_members):
            unit_gradients.set_unreduced_gradients(unit, unreduced)
