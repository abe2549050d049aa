"""The private names of torch that this package uses, each with its reason. Checked on torch 2.9.0 and 2.13.0."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

__all__ = [
    "Gathering",
    "finish_backward",
    "gathered_parameters",
    "set_unreduced_gradients",
    "take_unfrozen",
    "unreduced_gradients",
]


class Gathering:
    """What gathers the parameters of some units, asked after every step whether anything still is.

    ``unit.reshard()`` finds that out too, a hundred times as slowly, which a model of many blocks notices.

    Args:
        units: The units. They are not kept alive.
    """

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        self._groups = [weakref.ref(group) for unit in units for group in _groups(unit)]

    def reshard(self) -> None:
        """Free what is gathered."""
        for ref in self._groups:
            group = ref()
            if group is not None and not group.is_sharded:
                group.reshard()


def finish_backward(root: FSDPModule) -> None:
    """Do what ``fully_shard`` does at the end of a backward pass: reduce what is left to reduce, and reshard.

    It registers this as a callback when a gradient reaches the output of a unit that it has run forward. A backward
    pass inside the root's forward pass that touches the root's own parameters alone reaches no such output, so their
    gradients would never arrive at the shards. Doing it twice does nothing the second time.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()


def take_unfrozen(unit: FSDPModule) -> None:
    """Let a unit that was frozen as a whole reduce gradients in the right dtype from now on.

    ``fully_shard`` chooses the dtype at the first forward pass, from the parameters that are trainable then; a unit
    that has none keeps no dtype, and under mixed precision its first backward pass after an unfreezing fails.
    """
    for group in _groups(unit):
        chosen = getattr(group, "_orig_dtype", None) is not None
        if not chosen and any(p.sharded_param.requires_grad for p in group.fsdp_params):
            group._init_mp_dtypes()


def gathered_parameters(unit: FSDPModule) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """What a unit's parameters have been gathered to, each with its shard. These objects live as long as the unit."""
    return ((p._unsharded_param, p.sharded_param) for p in _parameters(unit) if hasattr(p, "_unsharded_param"))


def unreduced_gradients(unit: FSDPModule) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The gradients that a unit has accumulated without reducing them, each with the shard that it is for.

    ``fully_shard`` keeps them at the gathered parameters, which nothing public leads to while they are not gathered,
    or, where it reduces in another dtype than it computes in, in tensors of its own.
    """
    for parameter in _parameters(unit):
        grad = parameter.unsharded_accumulated_grad
        if grad is None and hasattr(parameter, "_unsharded_param"):
            grad = parameter._unsharded_param.grad
        if grad is not None:
            yield parameter.sharded_param, grad


def set_unreduced_gradients(
    root: FSDPModule, unit: FSDPModule, gradients: Mapping[nn.Parameter, Callable[[], Tensor]]
) -> None:
    """Let a unit go on from gradients that :func:`unreduced_gradients` has found. All ranks must call it.

    Args:
        root: The root.
        unit: One of its units, whose gradients are replaced. It is gathered once, since there are no parameters to have
            a gradient before.
        gradients: Functions that read a gradient, by the shard that it is for.
    """
    root._get_fsdp_state()._lazy_init()
    unit.unshard()
    for parameter in _parameters(unit):
        parameter.unsharded_accumulated_grad = parameter._unsharded_param.grad = None
        read = gradients.get(parameter.sharded_param)
        if read is None:
            continue
        gathered = parameter._unsharded_param
        grad = read().to(gathered.device, copy=True).view(gathered.shape)
        if grad.dtype == gathered.dtype:
            gathered.grad = grad
        else:
            parameter.unsharded_accumulated_grad = grad.to(parameter.reduce_dtype or gathered.dtype)
    unit.reshard()


def _groups(unit: FSDPModule) -> list[Any]:
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one group before torch 2.11
    return [group for group in groups if group is not None]


def _parameters(unit: FSDPModule) -> Iterator[Any]:
    return (parameter for group in _groups(unit) for parameter in group.fsdp_params)
