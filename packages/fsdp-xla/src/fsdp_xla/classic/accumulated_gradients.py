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

__all__ = ["copy_gradients", "restore_gradients", "zero_unreduced"]


def copy_gradients(root: nn.Module, layout: Layout) -> HeldGradients:
    """Copy this rank's part of the gradients to host memory."""
    gradients = HeldGradients()
    name_of_member = {(id(member.owner), member.attribute): name for name, member in named_members(root)}
    for unit in units_of(root):
        for owner, attribute, grad in unreduced_gradients(unit):
            gradients.own[name_of_member[id(owner), attribute]] = on_host(grad)
    for shard, parts in layout.items():
        if shard.grad is not None:
            flat = flat_on_host(shard.grad)
            for part in parts:
                gradients.reduced[part.name] = part.of(flat)
    return gradients


def zero_unreduced(root: nn.Module, names: Collection[str]) -> None:
    """Zero this rank's unreduced gradients of these parameters."""
    name_of_member = {(id(member.owner), member.attribute): name for name, member in named_members(root)}
    for unit in units_of(root):
        for owner, attribute, grad in unreduced_gradients(unit):
            if name_of_member[id(owner), attribute] in names:
                grad.zero_()


def restore_gradients(
    root: nn.Module,
    layout: Layout,
    own: Mapping[str, Callable[[], Tensor]],
    reduced: Mapping[str, Tensor | SavedTensor],
    runtime: Runtime,
) -> None:
    """Restore gradients that :func:`copy_gradients` returned, replacing existing ones. All ranks must call it.

    Raises:
        CheckpointMismatchError: A gradient belongs to no parameter of the module, or has another shape.
    """
    keys = {name: (id(member.owner), member.attribute) for name, member in named_members(root)}
    for name in (*own, *reduced):
        if name not in keys:
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
    # Unreduced gradients are set on full parameters, for which all ranks must gather if one rank has such gradients.
    if any(runtime.gather_objects(bool(own))):
        readers = {keys[name]: read_gradient for name, read_gradient in own.items()}
        for unit in units_of(root):
            set_unreduced_gradients(unit, readers)
