"""Lightning's launchers for ranks that are XLA devices."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from fsdp_core import UnsupportedCapabilityError
from fsdp_xla.lightning.private import Launcher, LaunchesXLA, TunerExit, interrupt, mark_as_reported
from fsdp_xla.lightning.worker_results import apply_results, collect_results, to_host
from fsdp_xla.ranks.barrier import RankLostError
from fsdp_xla.ranks.launch import run_ranks

__all__ = ["FabricXLALauncher", "TrainerXLALauncher"]


class _XLALauncher(Launcher):
    """Launches ranks on XLA devices.

    Args:
        ranks: The number of ranks on this host.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    @property
    def is_interactive_compatible(self) -> bool:
        return True


class FabricXLALauncher(_XLALauncher):
    """Runs the function of ``fabric.launch(function)`` on every rank."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run_ranks(self._ranks, _call_function, (function, args, kwargs))


def _call_function(job: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> Any:
    function, args, kwargs = job
    return to_host(function(*args, **kwargs))


class TrainerXLALauncher(_XLALauncher):
    """Runs a stage of a Trainer on every rank, and updates the Trainer of this process with the results."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        module = None
        if trainer is not None:
            _refuse_tuners(trainer)
            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
            module = arguments.get("model") or trainer.lightning_module
            if arguments.get("ckpt_path") is None and module in _fitted and _fitted[module] == _weight_versions(module):
                _refuse_lost_weights(trainer)
        try:
            results, collected = run_ranks(self._ranks, _run_stage, (trainer, function, args, kwargs))
        except RankLostError as error:
            mark_as_reported(error)  # the ranks that could report it have ended
            raise
        if trainer is not None and collected is not None:
            if trainer.state.fn == TrainerFn.FITTING and module is not None:
                _fitted[module] = _weight_versions(module)
            apply_results(trainer, collected)
        return results


#: Modules of this process whose copies were trained in ranks, with the versions of their untrained weights.
_fitted: WeakKeyDictionary[nn.Module, list[tuple[int, int]]] = WeakKeyDictionary()


def _weight_versions(module: nn.Module) -> list[tuple[int, int]]:
    """Return the ids and versions of parameters, which change when weights are loaded."""
    return [(id(parameter), parameter._version) for parameter in module.parameters()]


def _refuse_lost_weights(trainer: pl.Trainer) -> None:
    methods = {TrainerFn.FITTING: "fit", TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "predict"}
    method = "validate" if trainer.state.fn is None else methods.get(trainer.state.fn, "validate")
    raise UnsupportedCapabilityError(
        f"trainer.{method}() was called after a fit of this module, whose ranks have ended, and their trained weights "
        "with them: the module of this process is as it was before.\n"
        f"Write trainer.{method}(model, ..., ckpt_path='best') (or 'last', or a path) to continue from a checkpoint, "
        "or load one: model = MyModule.load_from_checkpoint(path). To start over, build the module again."
    )


def _refuse_tuners(trainer: pl.Trainer) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning doesn't annotate it
        if isinstance(callback, LearningRateFinder | BatchSizeFinder):
            raise UnsupportedCapabilityError(
                f"{type(callback).__name__}, also that of Tuner, can't be used with 'xla_fsdp' on several devices: its "
                "result is lost when the ranks end.\n"
                "Write devices=1 for it, or strategy='xla_fsdp_spmd'."
            )


def _run_stage(
    job: tuple[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]],
) -> tuple[Any, dict[str, Any] | None]:
    trainer, function, args, kwargs = job
    try:
        results = to_host(function(*args, **kwargs))
    except TunerExit:
        raise
    except BaseException as error:
        if trainer is not None:
            _report_in_rank(trainer, error)
        raise
    return results, None if trainer is None else collect_results(trainer)


def _report_in_rank(trainer: pl.Trainer, error: BaseException) -> None:
    """Report an error to the callbacks and the strategy of this rank, which can still save, and nowhere else."""
    try:
        interrupt(trainer, error)
        trainer.strategy.teardown()
    except BaseException as callback_error:
        error.add_note(f"Then on_exception() raised {type(callback_error).__name__}: {callback_error}")
    mark_as_reported(error)


LaunchesXLA.register(FabricXLALauncher)
