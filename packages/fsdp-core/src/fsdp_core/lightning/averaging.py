"""Weight averaging over shards: Lightning's callback copies the module unsharded, so the copy is sharded too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn

from fsdp_core.checkpoint import SavedTensor, chunked, fill

__all__ = ["averaged_models", "take_averaged_state"]


def averaged_models(trainer: pl.Trainer) -> Iterator[nn.Module]:
    """Yield the copies of the module that weight-averaging callbacks keep."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        average = getattr(callback, "_average_model", None) if isinstance(callback, WeightAveraging) else None
        if average is not None:
            yield average.module


def take_averaged_state(trainer: pl.Trainer, checkpoint: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Turn what the callback will load from a checkpoint into tensors sharded as the module's own.

    Args:
        trainer: Whose callbacks to look at; nothing is done without an average.
        checkpoint: The loaded checkpoint, changed in place.
        live: The module's state by name.
    """
    if not any(True for _ in averaged_models(trainer)):
        return
    assert isinstance(checkpoint, MutableMapping)
    for key in ("state_dict", "current_model_state"):
        if key in checkpoint:
            checkpoint[key] = {name: _as_live(value, live.get(name)) for name, value in checkpoint[key].items()}


def _as_live(value: Any, live: Any) -> Any:
    if not isinstance(value, SavedTensor | Tensor) or not isinstance(live, Tensor):
        return value
    made = torch.empty_like(live, requires_grad=False)
    fill(chunked(made), value)
    return made
