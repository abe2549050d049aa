"""Where the front ends split batches along the sequence, for context parallelism: each batch once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule

from fsdp_core.errors import UnsupportedCapabilityError

__all__ = ["refuse_loader_steps", "split_in_fabric"]

#: The attribute of a loader that splits its batches.
_SPLIT = "_fsdp_core_split"

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def split_in_fabric(loader: Any, split: Callable[[Any], Any]) -> Any:
    """Make a loader yield parts of its batches. It stays the object that it was, so that its position can be saved.

    Args:
        loader: The loader, changed in place. The split of an earlier strategy is replaced.
        split: From a batch to this rank's part.
    """
    loader_class = type(loader)
    if _SPLIT not in vars(loader):
        # The class's own method is called, since LoaderPosition relies on it.
        @wraps(loader_class.__iter__)
        def split_batches(self: Any) -> Iterator[Any]:
            return map(vars(self)[_SPLIT], loader_class.__iter__(self))

        loader.__class__ = type(loader_class.__name__, (loader_class,), {"__iter__": split_batches})
    vars(loader)[_SPLIT] = split
    return loader


def refuse_loader_steps(module: LightningModule, strategy: str) -> None:
    """Refuse steps that take the dataloader's iterator, since batches that they draw from it are not split.

    Raises:
        UnsupportedCapabilityError: There is such a step.
    """
    for name in _STEPS:
        if "dataloader_iter" in inspect.signature(getattr(module, name)).parameters:
            raise UnsupportedCapabilityError(
                f"{name}(dataloader_iter) takes batches from the loader itself, which strategy={strategy!r} could not "
                "split along the sequence, as context_parallel_size asks.\n"
                f"Write {name}(batch, batch_idx), or leave context_parallel_size out."
            )
