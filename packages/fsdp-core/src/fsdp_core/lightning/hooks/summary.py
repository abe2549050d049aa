"""Lightning's model summary over shards: counted with the shapes that the user wrote."""

from __future__ import annotations

from functools import wraps
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from torch import nn

from fsdp_core.sharding.backend import Backend

__all__ = ["show_written_shapes"]


def show_written_shapes(trainer: pl.Trainer, backend: Backend, root: nn.Module) -> None:
    """Let the summary callbacks of ``trainer`` look at the module as it was written.

    It is sharded already when they do, and they would count shards. An ``example_input_array`` finds sizes only:
    where the parameters have to be stood for, what goes through the module has no meaning.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary):
            _look_as_written(callback, backend, root)


def _look_as_written(callback: ModelSummary, backend: Backend, root: nn.Module) -> None:
    look = type(callback).on_fit_start

    @wraps(look)
    def on_fit_start(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.strategy.model is not root:  # the callback has moved on to another Trainer
            return look(callback, trainer, pl_module)
        with backend.as_written(root):
            return look(callback, trainer, pl_module)

    instance: Any = callback
    instance.on_fit_start = on_fit_start
