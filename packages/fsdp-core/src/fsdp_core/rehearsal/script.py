"""Runs a user's script up to its ``Trainer.fit``, and takes what it would train: module, batch and arguments."""

from __future__ import annotations

import inspect
import os
import runpy
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from fsdp_core.errors import ShardingError
from fsdp_core.state.fqn import unwrap_compiled

__all__ = ["CaughtFit", "fits_of_script"]

#: Arguments of the Trainer that say where and beside what a run trains: a rehearsal has its own.
_NOT_TAKEN = frozenset(
    {
        *("accelerator", "strategy", "devices", "num_nodes", "precision", "logger", "callbacks", "fast_dev_run"),
        *("limit_val_batches", "limit_test_batches", "limit_predict_batches", "num_sanity_val_steps"),
        *("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"),
        *("profiler", "plugins", "sync_batchnorm", "default_root_dir", "barebones", "model_registry"),
        *("overfit_batches", "max_time", "min_epochs", "min_steps", "reload_dataloaders_every_n_epochs", "benchmark"),
    }
)


@dataclass(frozen=True, kw_only=True)
class CaughtFit:
    """A call of ``Trainer.fit`` in a user's script.

    Attributes:
        module: The module, on the CPU, as it was given.
        drawn: The first batches of its loader, as many as were asked for, or as there are.
        batches: The number of batches of an epoch; ``None`` if the loader does not say.
        datamodule: The data module, if it was given one.
        given: The Trainer's arguments, as the script has given them.
        seconds_for_batch: How long these batches took.
        where: The file and line of the call.
    """

    module: pl.LightningModule
    drawn: Sequence[Any]
    batches: int | None
    datamodule: pl.LightningDataModule | None
    given: Mapping[str, Any]
    seconds_for_batch: float
    where: str

    @property
    def batch(self) -> Any:
        """The first batch."""
        return self.drawn[0]

    @property
    def trainer_arguments(self) -> dict[str, Any]:
        """Those of the Trainer's arguments that a rehearsal takes over."""
        return {name: value for name, value in self.given.items() if name not in _NOT_TAKEN}

    @property
    def left_out(self) -> list[str]:
        """What the Trainer was given beside, which does not take part in a rehearsal, by class or name."""
        names = [type(callback).__name__ for callback in self.given["callbacks"]]
        return [*names, *(["profiler"] if self.given.get("profiler") else [])]


@dataclass
class _Caught:
    fits: list[CaughtFit] = field(default_factory=list)
    error: BaseException | None = None


class _Enough(BaseException):
    """Ends a script whose fits were caught. No ``except Exception`` of the script sees it."""


def fits_of_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    patience: float = 60.0,
    as_module: bool = False,
    batches: int = 1,
) -> Iterator[CaughtFit]:
    """Run a script, and yield each of its calls of ``Trainer.fit`` in place of running it.

    The script goes on after a call as after a fit that has trained nothing.

    Args:
        script: The path of the script, or the name of a module.
        arguments: Its command-line arguments.
        patience: How many seconds the first batches of a loader may take.
        as_module: Whether ``script`` is the name of a module, as for ``python -m``.
        batches: How many batches are drawn of a loader, if it has as many.

    Raises:
        ShardingError: The script ends, or raises, before it has called ``Trainer.fit``; or its loader is empty, or
            takes longer.
    """
    caught = _Caught()
    with _fits_caught(caught, patience, batches), _as_main(script, arguments, as_module):
        try:
            if as_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0) and not caught.fits:
                raise ShardingError(_not_reached(script, f"ended with status {end.code}")) from end
        except ShardingError:
            raise
        except Exception as error:
            if not caught.fits:
                raise ShardingError(_not_reached(script, f"raised {type(error).__name__}: {error}")) from error
    if not caught.fits:
        raise ShardingError(_not_reached(script, "ended"))
    yield from caught.fits


def _not_reached(script: str, how: str) -> str:
    return (
        f"{script} {how} before it has called Trainer.fit().\n"
        "Give the arguments with which it trains, after the script, as in train.py --config tiny.yaml. "
        "A script whose fit() stands under `if __name__ == '__main__':` is run as if it was started by python."
    )


@contextmanager
def _as_main(script: str, arguments: Sequence[str], as_module: bool) -> Iterator[None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.getcwd() if as_module else str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextmanager
def _fits_caught(caught: _Caught, patience: float, batches: int) -> Iterator[None]:
    """A context in which Trainers are built for one CPU, and ``fit`` notes its arguments and returns."""
    build, fit = pl.Trainer.__init__, pl.Trainer.fit
    signature = inspect.signature(build)

    def __init__(self: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs).arguments
        given = {name: value for name, value in bound.items() if name != "self"}
        given.update(given.pop("kwargs", {}))
        callbacks = given.get("callbacks") or []
        # the Trainer appends its own to the list that it is given
        given["callbacks"] = list(callbacks) if isinstance(callbacks, list) else [callbacks]
        vars(self)["_given_in_script"] = dict(given)
        own = {"strategy": "auto", "accelerator": "cpu", "devices": 1, "num_nodes": 1, "precision": None}
        kept = {name: value for name, value in given.items() if name not in ("plugins", "sync_batchnorm")}
        kept["callbacks"] = list(given["callbacks"])
        build(self, **{**kept, **own})

    def fit_(
        self: pl.Trainer,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        **rest: Any,
    ) -> None:
        if isinstance(train_dataloaders, pl.LightningDataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        frame = sys._getframe(1)
        module: Any = unwrap_compiled(model)
        started = time.perf_counter()
        loader = _loader_of(self, module, train_dataloaders, datamodule)
        drawn = _first_batches(loader, batches, patience)
        caught.fits.append(
            CaughtFit(
                module=module,
                drawn=drawn,
                batches=_length(loader),
                datamodule=datamodule,
                given=vars(self)["_given_in_script"],
                seconds_for_batch=time.perf_counter() - started,
                where=f"{frame.f_code.co_filename}:{frame.f_lineno}",
            )
        )

    pl.Trainer.__init__, pl.Trainer.fit = __init__, fit_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        pl.Trainer.__init__, pl.Trainer.fit = build, fit  # type: ignore[method-assign]


def _loader_of(trainer: pl.Trainer, module: pl.LightningModule, loaders: Any, datamodule: Any) -> Any:
    """The train loader of a fit, made as Lightning makes it."""
    if loaders is not None:
        return loaders
    source = datamodule if datamodule is not None else module
    module.trainer = trainer
    if datamodule is not None:
        datamodule.trainer = trainer
    source.prepare_data()
    source.setup("fit")
    return source.train_dataloader()


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # an iterable dataset
        return None


def _first_batches(loader: Any, count: int, patience: float) -> list[Any]:
    """The first batches of a loader, which gets some time for them."""
    answer: list[Any] = []

    def take() -> None:
        try:
            answer.append(list(islice(loader, count)) if isinstance(loader, Iterable) else [loader])
        except BaseException as error:
            answer.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(patience)
    if not answer:
        what = "no batch" if count == 1 else f"not the {count} batches that are needed"
        raise ShardingError(
            f"the train loader has given {what} in {patience:g} s.\n"
            "Let it wait longer, by --patience 600; or take a loader over a few samples."
        )
    drawn = answer[0]
    if isinstance(drawn, BaseException):
        raise drawn
    if not drawn:
        raise ShardingError(
            "the train loader is empty, so there is nothing to train a step with.\n"
            "Give the script the data that it trains on, or a few samples of the same shapes."
        )
    batches: list[Any] = drawn
    return batches
