"""Checks that ranks that hold the same elements of a parameter hold the same values of them.

Replicas get the same gradients, so they stay equal, unless a step writes to them what differs by rank: random numbers
that each rank draws, or a value of its own batch. From then on, each replica would train another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_core.devices import has_addresses, has_float64
from fsdp_core.errors import ShardingError
from fsdp_core.gradients.piece_places import place_of
from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.torch_private.dtensors import data_replicas
from fsdp_core.torch_private.tensors import without_torch_function

__all__ = ["check_same_replicas"]

#: Relative to a parameter's norm. Replicas that nobody has written to have the same bits.
_ROUNDING = 1e-6


def check_same_replicas(runtime: Runtime, sharded: Sharded, named: Iterable[tuple[str, Tensor]], when: str) -> None:
    """Raise on every rank if replicas of any of these parameters differ. All ranks must call it.

    Sums of the values and of their squares are compared: two small collectives for each group of replicas. Ranks that
    are not processes of torch.distributed are not compared, nor are peers of tensor parallelism, which round gradients
    of what they all hold in their own ways.

    Args:
        runtime: The ranks.
        sharded: The model.
        named: Parameters of an optimizer, which belong to the model, by the user's names.
        when: When they are compared, in words, for the message.

    Raises:
        ShardingError: Two replicas differ. The message names the first parameter.
    """
    if not isinstance(runtime, ProcessGroupRuntime) or runtime.world_size == 1:
        return
    by_group: dict[Any, list[tuple[str, Tensor]]] = {}
    for name, parameter in named:
        if not has_addresses(parameter):
            continue
        for group in _groups_of(sharded, parameter):
            own_values = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            by_group.setdefault(group, []).append((name, own_values))
    different_names: list[str] = []
    for group, named_values in by_group.items():
        # offloaded parameters are on the host, for which a group of replicas may have no backend
        sums = torch.stack([_sums(values, runtime.device) for _, values in named_values])
        reduce = _reduction_over(runtime, group)
        spread = reduce(sums.clone(), "max") - reduce(sums.clone(), "min")
        sizes = torch.tensor([max(values.numel(), 1) for _, values in named_values]).to(sums)
        squares = sums[:, 1]
        allowed = torch.stack([_ROUNDING * (squares * sizes).sqrt(), _ROUNDING * squares], dim=1)
        is_different = (spread > allowed).any(dim=1).tolist()
        names = [name for name, _ in named_values]
        different_names += [name for name, differs in zip(names, is_different, strict=True) if differs]
    if not by_group or runtime.total([len(different_names)]) == [0]:
        return
    name = next(names[0] for names in runtime.gather_objects(different_names) if names)
    raise ShardingError(
        f"ranks that must hold the same values of {name!r} hold different ones {when}: something has written to it, or "
        "to its gradient or optimizer state, what is another value on each rank. Each replica would train another "
        "model from now on.\n"
        "Write the same on all ranks: values = strategy.broadcast(values) takes rank 0's (trainer.strategy, or "
        "fabric.broadcast(values)), and torch.randn_like(parameter) draws the same for replicas, as torch.randn(shape) "
        "does not."
    )


#: Stands for all ranks that get different batches, each of which holds a parameter as a whole.
_DATA_RANKS = "data"


def _groups_of(sharded: Sharded, parameter: Tensor) -> Iterable[Any]:
    """The groups of ranks that hold what this rank holds of a parameter."""
    if isinstance(parameter, DTensor):
        return data_replicas(parameter)
    if not sharded.holds_part(parameter):
        return [_DATA_RANKS]
    replicas = place_of(parameter).replicas
    return [] if replicas is None else [replicas]


def _reduction_over(runtime: Runtime, group: Any) -> Callable[[Tensor, str], Tensor]:
    if group == _DATA_RANKS:
        return runtime.data.all_reduce
    return lambda tensor, op: runtime.all_reduce(tensor, op, group)


def _sums(values: Tensor, device: torch.device) -> Tensor:
    """The sum of values, and that of their squares, on a device."""
    with without_torch_function(), torch.no_grad():
        flat = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
        flat = flat.reshape(-1).to(torch.float64 if has_float64(device.type) else torch.float32).nan_to_num()
        return torch.stack([flat.sum(), flat.square().sum()]).to(device)
