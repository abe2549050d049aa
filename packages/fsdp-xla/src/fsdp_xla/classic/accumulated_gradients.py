"""Accumulated gradients under classic XlaFSDP, which keeps unreduced ones at the full parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from fsdp_core import CheckpointMismatchError, Runtime
from fsdp_core.state import HeldGradients, Layout, SavedTensor, fill
from fsdp_xla.classic.host_state import flat_on_host
from fsdp_xla.classic.unflattened import named_members
from fsdp_xla.torch_xla_private.devices import on_host
from fsdp_xla.torch_xla_private.units import set_unreduced_gradients, units_of, unreduced_gradients

__all__ = ["forget_in_units", "held_by_units", "restore_to_units"]


def held_by_units(root: nn.Module, layout: Layout) -> HeldGradients:
    """This rank's part of the gradients, copied to host memory."""
    gradients = HeldGradients()
    name_of = {(id(member.owner), member.attribute): name for name, member in named_members(root)}
    for unit in units_of(root):
        for owner, attribute, grad in unreduced_gradients(unit):
            gradients.own[name_of[id(owner), attribute]] = on_host(grad)
    for shard, parts in layout.items():
        if shard.grad is not None:
            flat = flat_on_host(shard.grad)
            for part in parts:
                gradients.reduced[part.name] = part.of(flat)
    return gradients


def forget_in_units(root: nn.Module, names: Collection[str]) -> None:
    """Zero this rank's unreduced gradients of these parameters."""
    name_of = {(id(member.owner), member.attribute): name for name, member in named_members(root)}
    for unit in units_of(root):
        for owner, attribute, grad in unreduced_gradients(unit):
            if name_of[id(owner), attribute] in names:
                grad.zero_()


def restore_to_units(
    root: nn.Module,
    layout: Layout,
    own: Mapping[str, Callable[[], Tensor]],
    reduced: Mapping[str, Tensor | SavedTensor],
    runtime: Runtime,
) -> None:
    """Restore gradients that :func:`held_by_units` returned, replacing existing ones. All ranks must call it.

    Raises:
        CheckpointMismatchError: A gradient belongs to no parameter of the module, or has another shape.
    """
    places = {name: (member.owner, member.attribute) for name, member in named_members(root)}
    for name in (*own, *reduced):
        if name not in places:
            raise CheckpointMismatchError(
                f"the checkpoint holds an accumulated gradient of {name!r}, which is not a parameter of this model.\n"
                "Load it into the model that it was saved from, or load the weights alone."
            )
    for shard, parts in layout.items():
        shard.grad = None
        if any(part.name in reduced for part in parts):
            flat = torch.zeros(shard.numel(), dtype=shard.dtype)
            for part in parts:
                if part.name in reduced:
                    fill(part.of(flat), reduced[part.name], cast=True)
            shard.grad = flat.view(shard.shape).to(shard.device)
    if any(runtime.gather_objects(bool(own))):  # they are set on gathered parameters, which all ranks must gather
        by_place = {(id(places[name][0]), places[name][1]): read for name, read in own.items()}
        for unit in units_of(root):
            set_unreduced_gradients(unit, by_place)
