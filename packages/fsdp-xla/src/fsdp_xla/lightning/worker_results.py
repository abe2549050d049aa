"""Small results that ranks return to the Trainer that started them, since their own copies of it end with them.

Returned are metrics, counters, the best checkpoints, and the version that a logger wrote. Weights are not, because that
would be a full copy on the host; an error says to continue from a checkpoint.
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

__all__ = ["apply_results", "collect_results", "to_host"]

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_CHECKPOINT_ATTRIBUTES = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "dirpath",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)
#: Attributes in which loggers keep the identity of the run.
_LOGGER_ATTRIBUTES = ("_version", "_run_id", "_id")
#: The writer of Lightning's CSVLogger is returned too, because a new one would remove the files of this one.
_CSV_WRITER = ("_experiment",)


def collect_results(trainer: pl.Trainer) -> dict[str, Any]:
    """Collect the results of a rank's Trainer after a stage: plain data, and tensors in host memory."""
    results = {
        "metrics": {name: dict(getattr(trainer, name)) for name in _METRICS},
        "checkpoints": [_attributes_of(callback, _CHECKPOINT_ATTRIBUTES) for callback in trainer.checkpoint_callbacks],
        "loggers": [
            _attributes_of(logger, (*_LOGGER_ATTRIBUTES, *(_CSV_WRITER if isinstance(logger, CSVLogger) else ())))
            for logger in trainer.loggers
        ],
        "loops": [_progress(loop) for loop in _loops(trainer.fit_loop)],
    }
    return {"state": trainer.state, **to_host(results)}


def apply_results(trainer: pl.Trainer, results: dict[str, Any]) -> None:
    """Update a Trainer with the results that :func:`collect_results` collected from a rank's copy of it."""
    trainer.state = results["state"]
    for name, metrics in results["metrics"].items():
        getattr(trainer, name).update(metrics)
    pairs = [
        *zip(trainer.checkpoint_callbacks, results["checkpoints"], strict=True),
        *zip(trainer.loggers, results["loggers"], strict=True),
        *zip(_loops(trainer.fit_loop), results["loops"], strict=True),
    ]
    for target, attributes in pairs:
        vars(target).update(attributes)


def to_host(value: Any) -> Any:
    """Move the tensors in nested values to host memory."""
    return apply_to_collection(value, Tensor, on_host)


def _attributes_of(source: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: vars(source)[name] for name in names if name in vars(source)}


def _loops(loop: Any) -> Iterator[Any]:
    """A loop, and its inner loops."""
    yield loop
    for attribute in vars(loop).values():
        if isinstance(attribute, Loop):
            yield from _loops(attribute)


def _progress(loop: Any) -> dict[str, Any]:
    """The progress of a loop, from which ``trainer.global_step`` and ``current_epoch`` are read."""
    progress = {name: value for name, value in vars(loop).items() if isinstance(value, BaseProgress)}
    return {**progress, **_attributes_of(loop, ("_batches_that_stepped",))}
