"""Lightning's launchers for ranks that are XLA devices."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_xla.lightning_private import Launcher, LaunchesXLA
from fsdp_xla.starting import run_ranks
from fsdp_xla.torch_xla_private import on_host

__all__ = ["FabricXLALauncher", "TrainerXLALauncher"]


class FabricXLALauncher(Launcher):
    """Runs the function of ``fabric.launch(function)`` on every rank.

    Args:
        ranks: How many ranks this host runs.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run_ranks(self._ranks, _call, (function, args, kwargs))


def _call(job: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> Any:
    function, args, kwargs = job
    return _to_host(function(*args, **kwargs))


class TrainerXLALauncher(Launcher):
    """Runs a stage of a Trainer on every rank, and tells the Trainer of this process how it went.

    Args:
        ranks: How many ranks this host runs.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._has_fit = False

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        if trainer is not None and self._has_fit:
            self._refuse_what_was_lost(trainer, function, args, kwargs)
        results, told = run_ranks(self._ranks, _stage, (trainer, function, args, kwargs))
        if trainer is not None and told is not None:
            self._has_fit = self._has_fit or trainer.state.fn == TrainerFn.FITTING
            trainer.state = told["state"]
            trainer.callback_metrics.update(told["callback_metrics"])
            for callback, paths in zip(trainer.checkpoint_callbacks, told["checkpoints"], strict=True):
                callback.__dict__.update(paths)
        return results

    def _refuse_what_was_lost(self, trainer: pl.Trainer, function: Any, args: Any, kwargs: Any) -> None:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        if given.get("ckpt_path") is None:
            what = {TrainerFn.FITTING: "fit", TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "predict"}.get(
                trainer.state.fn or TrainerFn.VALIDATING, "validate"
            )
            raise UnsupportedCapabilityError(
                f"trainer.{what}() was called after a fit whose ranks have ended, and their trained weights with them: "
                "the model of this process is as it was before.\n"
                f"Write trainer.{what}(model, ..., ckpt_path='best') (or 'last', or a path) to go on from a checkpoint."
            )


def _stage(job: tuple[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> tuple[Any, dict[str, Any] | None]:
    trainer, function, args, kwargs = job
    results = _to_host(function(*args, **kwargs))
    if trainer is None:
        return results, None
    names = ("best_model_path", "best_model_score", "last_model_path")
    return results, {
        "state": trainer.state,
        "callback_metrics": _to_host(dict(trainer.callback_metrics)),
        "checkpoints": [
            _to_host({name: vars(callback)[name] for name in names if name in vars(callback)})
            for callback in trainer.checkpoint_callbacks
        ],
    }


def _to_host(value: Any) -> Any:
    return apply_to_collection(value, Tensor, on_host)


LaunchesXLA.register(FabricXLALauncher)
