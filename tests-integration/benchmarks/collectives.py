"""The collectives of one optimizer step, counted by kind."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collectives"]

_KINDS = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "allgather_": "all-gather of a list",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv_": "receive",
}


class Collectives(TorchDispatchMode):
    """Counts the collectives of this rank while entered.

    Attributes:
        counted: How many there were of each kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if space in ("c10d", "_c10d_functional"):
            name = name.partition(".")[0]
            if name not in ("wait_tensor", "_wrap_tensor_autograd"):
                self.counted[_KINDS.get(name, name)] += 1
        return func(*args, **(kwargs or {}))
