"""What the Trainer that started ranks is told of how they went: they ran with copies of it, which end with them.

Weights end with the ranks. They are not brought back into the module of the script, which would be a full copy; an
error says to go on from a checkpoint. What is small is brought back: metrics, counters, the best checkpoints, and
which version a logger wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fsdp_xla.lightning.private import BaseProgress, Loop
from fsdp_xla.torch_xla_private.devices import on_host

__all__ = ["bring_back", "to_host", "what_to_bring_back"]

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_OF_CHECKPOINTS = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "dirpath",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)
#: Where loggers keep which run it is that they write.
_OF_LOGGERS = ("_version", "_run_id", "_id")
#: And what of Lightning's CSVLogger writes: another would begin by removing what this one has written.
_WRITER = ("_experiment",)


def what_to_bring_back(trainer: pl.Trainer) -> dict[str, Any]:
    """What a rank's Trainer knows when a stage has ended: plain data, and tensors in host memory."""
    told = {
        "metrics": {name: dict(getattr(trainer, name)) for name in _METRICS},
        "checkpoints": [_of(callback, _OF_CHECKPOINTS) for callback in trainer.checkpoint_callbacks],
        "loggers": [_of(logger, _OF_LOGGERS + _WRITER * isinstance(logger, CSVLogger)) for logger in trainer.loggers],
        "loops": [_progress(loop) for loop in _loops(trainer.fit_loop)],
    }
    return {"state": trainer.state, **to_host(told)}


def bring_back(trainer: pl.Trainer, told: dict[str, Any]) -> None:
    """Let a Trainer know what :func:`what_to_bring_back` found in the copy of it that a rank had."""
    trainer.state = told["state"]
    for name, metrics in told["metrics"].items():
        getattr(trainer, name).update(metrics)
    pairs = [
        *zip(trainer.checkpoint_callbacks, told["checkpoints"], strict=True),
        *zip(trainer.loggers, told["loggers"], strict=True),
        *zip(_loops(trainer.fit_loop), told["loops"], strict=True),
    ]
    for one, attributes in pairs:
        vars(one).update(attributes)


def to_host(value: Any) -> Any:
    """A nest of values, with its tensors in host memory."""
    return apply_to_collection(value, Tensor, on_host)


def _of(one: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: vars(one)[name] for name in names if name in vars(one)}


def _loops(loop: Any) -> Iterator[Any]:
    """A loop, and those in it."""
    yield loop
    for inner in vars(loop).values():
        if isinstance(inner, Loop):
            yield from _loops(inner)


def _progress(loop: Any) -> dict[str, Any]:
    """How far a loop has come: ``trainer.global_step`` and ``current_epoch`` are read from it."""
    counted = {name: value for name, value in vars(loop).items() if isinstance(value, BaseProgress)}
    return {**counted, **_of(loop, ("_batches_that_stepped",))}
