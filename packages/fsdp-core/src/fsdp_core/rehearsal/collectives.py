"""The collectives of a step: how many bytes each rank sends, counted where torch's operators are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_core.torch_private.fake_tensors import group_named, operator_name, tree_leaves

__all__ = ["Collective", "CollectiveName", "collective_of", "total_sent"]

CollectiveName: TypeAlias = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "broadcast", "all-to-all", "gather", "scatter", "send", "receive"
]

#: By the beginning of an operator's name, without underscores in front. Of two that fit, the first is taken.
_NAMES: tuple[tuple[str, CollectiveName], ...] = (
    ("allgather", "all-gather"),
    ("all_gather", "all-gather"),
    ("reduce_scatter", "reduce-scatter"),
    ("allreduce", "all-reduce"),
    ("all_reduce", "all-reduce"),
    ("broadcast", "broadcast"),
    ("alltoall", "all-to-all"),
    ("all_to_all", "all-to-all"),
    ("shard_dim_alltoall", "all-to-all"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("send", "send"),
    ("recv", "receive"),
)


@dataclass
class Collective:
    """One collective.

    Attributes:
        name: Which one.
        nbytes: The bytes of the whole tensor: what an all-gather returns, what a reduce-scatter takes.
        ranks: The number of ranks in its group.
        device: The kind of device of its tensors.
        received: The tensors that it writes to; empty once they were counted.
    """

    name: CollectiveName
    nbytes: int
    ranks: int
    device: str
    received: Sequence[Tensor] = ()

    @property
    def sent(self) -> int:
        """The bytes that each rank sends if no link carries anything twice, as in a ring.

        Example:
            >>> Collective("all-reduce", nbytes=100, ranks=4, device="cpu").sent
            150
        """
        if self.ranks == 1:
            return 0
        if self.name in ("broadcast", "send", "receive"):
            return self.nbytes
        share = self.nbytes * (self.ranks - 1) // self.ranks
        return 2 * share if self.name == "all-reduce" else share


def total_sent(collectives: Iterable[Collective]) -> dict[CollectiveName, tuple[int, int]]:
    """The number of calls and the bytes that each rank sends, by collective.

    Args:
        collectives: The collectives of a step.
    """
    totals: dict[CollectiveName, tuple[int, int]] = {}
    for collective in collectives:
        calls, sent = totals.get(collective.name, (0, 0))
        totals[collective.name] = calls + 1, sent + collective.sent
    return totals


def collective_of(func: Any, args: Sequence[Any], result: Any) -> Collective | None:
    """The collective that an operator is, if it is one.

    Args:
        func: The operator.
        args: Its arguments.
        result: What it has returned.
    """
    if func.namespace not in ("c10d", "_c10d_functional", "_dtensor"):
        return None
    operator = operator_name(func).lstrip("_")
    name = next((name for start, name in _NAMES if operator.startswith(start)), None)
    if name is None:  # a barrier, or a wait
        return None
    group = _group_of(args)
    if func.namespace == "c10d":
        # the tensors that it writes to come first, where there are others
        received = [tensor for tensor in tree_leaves(args[0]) if isinstance(tensor, Tensor)]
        tensors = [tensor for argument in args[:2] for tensor in tree_leaves(argument) if isinstance(tensor, Tensor)]
    else:
        received = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        tensors = [*received, *(tensor for tensor in tree_leaves(args[0]) if isinstance(tensor, Tensor))]
    if not tensors:
        return None
    sizes = [sum(tensor.nbytes for tensor in received), sum(tensor.nbytes for tensor in tensors)]
    whole_bytes = max(sizes[0], sizes[1] - sizes[0])
    ranks = (
        group.size() if group is not None else max(1, whole_bytes // max(1, min(tensor.nbytes for tensor in tensors)))
    )
    return Collective(name, whole_bytes, ranks, tensors[0].device.type, received)


def _group_of(args: Sequence[Any]) -> ProcessGroup | None:
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                group: ProcessGroup = ProcessGroup.unbox(argument)
            except RuntimeError:  # a reduction or another object
                continue
            return group
        if isinstance(argument, str):
            named: ProcessGroup | None = group_named(argument)
            if named is not None:
                return named
    return None
