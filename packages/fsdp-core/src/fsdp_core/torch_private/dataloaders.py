"""Dataloaders and their iterators."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

__all__ = [
    "batches_yielded",
    "is_exhausted",
    "iterates_as_torch",
    "watch_iterators",
]


def iterates_as_torch(loader: DataLoader[Any]) -> bool:
    """Whether a dataloader creates its iterators with ``_get_iterator``, and they yield batches in sampler order."""
    defined_in = getattr(type(loader).__iter__, "__module__", "")
    return defined_in.startswith(("torch.utils.data.", "torchdata.")) and getattr(loader, "in_order", True)


def watch_iterators(loader: DataLoader[Any], report: Callable[[Any], None]) -> None:
    """Call ``report`` with each iterator that a dataloader creates. A plain ``DataLoader`` keeps none."""
    reference = weakref.ref(loader)

    def create_and_report() -> Any:
        own: Any = reference()
        iterator = type(own)._get_iterator(own)
        report(iterator)
        return iterator

    instance: Any = loader
    instance._get_iterator = create_and_report


def batches_yielded(iterator: Any) -> int:
    """The number of batches that a dataloader's iterator has yielded, without those that its workers have prefetched.

    No public API counts them in the main process.
    """
    return int(iterator._num_yielded)


def is_exhausted(iterator: Any) -> bool:
    """Whether a torchdata iterator has signalled that no batch is left; torch's own iterators don't record it."""
    return bool(getattr(iterator, "_finished", False))
