"""Which collectives some code runs, and how large they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_core.torch_private.tensors import TorchDispatchMode, tree_flatten

__all__ = ["Communicates", "ObservedCommunication"]


class Communicates(Exception):
    """A collective where none is allowed."""


class ObservedCommunication(TorchDispatchMode):
    """A context that records the collectives in it, those that DTensors run included.

    Args:
        allowed: Whether there may be any; otherwise the first raises :class:`Communicates`, before it is run.

    Attributes:
        sizes: The number of elements that this rank passes to each collective.
    """

    def __init__(self, *, allowed: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []
        self.allowed = allowed

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # DTensor then calls operations on local tensors, which come here as well
        if "c10d" in function.namespace and not function.name().endswith("wait_tensor"):
            if not self.allowed:
                raise Communicates
            leaves = tree_flatten((args, kwargs or {}))[0]
            self.sizes.append(max((leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)), default=0))
        return function(*args, **(kwargs or {}))
