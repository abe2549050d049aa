"""Runs a user's script up to its ``Trainer.fit``, or its set-up under Fabric, and takes what it would train."""

from __future__ import annotations

import functools
import inspect
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader

from fsdp_core.errors import ShardingError, first_line
from fsdp_core.rehearsal.fabric_loop import CaughtLoop, LoopGoesOn, LoopRehearsal
from fsdp_core.rehearsal.fit import takes_part
from fsdp_core.rehearsal.unfilled_weights import UnfilledWeights
from fsdp_core.rehearsal.users_code import line_of_call, line_of_error
from fsdp_core.state.fqn import unwrap_compiled

__all__ = ["CaughtFit", "fit_of_trainer", "run_script"]

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
        trainer_keywords: The Trainer's arguments, as the script has given them.
        seconds_for_batch: How long these batches took.
        location: The file and line of the call.
        loader: The train loader that ``fit`` was given; ``None`` if it comes of the module or the data module.
        train_loader: The train loader, wherever it comes from.
    """

    module: pl.LightningModule
    drawn: Sequence[Any]
    batches: int | None
    datamodule: pl.LightningDataModule | None
    trainer_keywords: Mapping[str, Any]
    seconds_for_batch: float
    location: str
    loader: Any = None
    train_loader: Any = None

    @property
    def precision(self) -> Any:
        """The precision that the script asks for."""
        return self.trainer_keywords.get("precision")

    @property
    def script_strategy(self) -> Any:
        """The strategy that the script gives its Trainer."""
        return self.trainer_keywords.get("strategy")

    @property
    def batch(self) -> Any:
        """The first batch."""
        return self.drawn[0]

    @property
    def trainer_arguments(self) -> dict[str, Any]:
        """Those of the Trainer's arguments that a rehearsal takes over."""
        return {name: value for name, value in self.trainer_keywords.items() if name not in _NOT_TAKEN}

    @property
    def callbacks(self) -> list[pl.Callback]:
        """The callbacks that take part in a rehearsal: those of Lightning that change what is trained, or how."""
        return [callback for callback in self.trainer_keywords["callbacks"] if takes_part(callback)]

    @property
    def loggers(self) -> int:
        """The number of loggers that the Trainer has: one if it is given none, as ``logger=True``."""
        logger = self.trainer_keywords.get("logger", True)
        return len(logger) if isinstance(logger, Sequence) else int(logger is not False)

    @property
    def left_out(self) -> list[str]:
        """What the Trainer was given beside, which does not take part in a rehearsal, by class or name."""
        without = [callback for callback in self.trainer_keywords["callbacks"] if not takes_part(callback)]
        names = [type(callback).__name__ for callback in without]
        return [*names, *(["profiler"] if self.trainer_keywords.get("profiler") else [])]


class _OwnError(BaseException):
    """Carries an error of what was done with a caught fit through the script. Its cause is that error."""


class _AllCaught(BaseException):
    """Ends a script whose fits were caught. No ``except Exception`` of the script sees it."""


def run_script(
    script: str,
    arguments: Sequence[str],
    on_fit: Callable[[CaughtFit | CaughtLoop], None],
    *,
    ranks: int = 1,
    fits: int = 1,
    batches: int = 1,
    patience: float = 60.0,
    as_module: bool = False,
) -> str | None:
    """Run a script in which calls of ``Trainer.fit``, or the first of ``fabric.setup``, call a function instead.

    The script ends with the last call that is asked for, so that it writes nowhere what was not trained. Until then it
    goes on after a call as after a fit that has trained nothing, and its other runs of a Trainer do nothing.

    Args:
        script: The path of the script, or the name of a module.
        arguments: Its command-line arguments.
        on_fit: Is called with each fit, while the script waits. With a loop under Fabric, the script ends.
        ranks: What ``fabric.world_size`` is.
        fits: After how many calls the script ends.
        batches: How many batches are drawn of a loader, if it has as many.
        patience: How many seconds the first batches of a loader may take.
        as_module: Whether ``script`` is the name of a module, as for ``python -m``.

    Returns:
        How the script has failed after a fit, in words; ``None`` if it has not.

    Raises:
        ShardingError: There is no such script; it ends, or raises, before it has called ``Trainer.fit``; its loader is
            empty, or takes longer.
    """
    if not as_module and not Path(script).is_file():
        raise ShardingError(f"there is no script {script!r}.\nGive its path; or the name of a module, after -m.")
    caught = 0
    weights = UnfilledWeights()

    def count(fit: CaughtFit | CaughtLoop) -> None:
        nonlocal caught
        caught += 1
        try:
            with weights.filled():
                on_fit(fit)
        except Exception as error:
            raise _OwnError from error  # which is none of the script's, nor for its handlers
        if caught == fits or isinstance(fit, CaughtLoop):
            raise _AllCaught

    failure: str | None = None
    cause: BaseException | None = None
    with (
        _fits_caught(count, batches, patience, ranks) as going_on,
        _as_main(script, arguments, as_module),
        weights,
    ):
        try:
            try:
                if as_module:
                    runpy.run_module(script, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(script, run_name="__main__")
            except BaseException as error:
                for rehearsal in going_on:
                    rehearsal.end_by(error)
                raise
            for rehearsal in going_on:
                rehearsal.end_by(SystemExit())
        except _AllCaught:
            pass
        except _OwnError as error:
            assert error.__cause__ is not None
            raise error.__cause__ from None
        except SystemExit as end:
            if end.code not in (None, 0):
                failure, cause = f"ended with status {end.code}", end
        except ShardingError:
            raise
        except Exception as error:
            failure, cause = f"raised {type(error).__name__}: {first_line(error)}{line_of_error(error)}", error
    if not caught:
        raise ShardingError(_not_reached(script, failure or "ended")) from cause
    return failure


def _not_reached(script: str, how: str) -> str:
    return (
        f"{script} {how} before it has called Trainer.fit(), or setup() of a Fabric.\n"
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
def _fits_caught(
    on_fit: Callable[[CaughtFit | CaughtLoop], None], count: int, patience: float, ranks: int
) -> Iterator[list[LoopRehearsal]]:
    """A context in which Trainers and Fabrics are built for one CPU, and hand over what they would train.

    Yields:
        In a fork in which a loop goes on: its rehearsal. Else nothing.
    """
    build, fit, build_fabric = pl.Trainer.__init__, pl.Trainer.fit, Fabric.__init__
    going_on: list[LoopRehearsal] = []
    signature = inspect.signature(build)

    @functools.wraps(build)  # LightningCLI reads the signature
    def __init__(self: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs).arguments
        keywords = {name: value for name, value in bound.items() if name != "self"}
        keywords.update(keywords.pop("kwargs", {}))
        callbacks = keywords.get("callbacks") or []
        # the Trainer appends its own to the list that it is given
        keywords["callbacks"] = list(callbacks) if isinstance(callbacks, list) else [callbacks]
        vars(self)["_given_in_script"] = dict(keywords)
        own = {"strategy": "auto", "accelerator": "cpu", "devices": 1, "num_nodes": 1, "precision": None}
        own_keywords = {name: value for name, value in keywords.items() if name not in ("plugins", "sync_batchnorm")}
        own_keywords["callbacks"] = list(keywords["callbacks"])
        build(self, **{**own_keywords, **own})

    @functools.wraps(fit)
    def fit_(
        self: pl.Trainer,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if isinstance(train_dataloaders, pl.LightningDataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        module: Any = unwrap_compiled(model)
        started = time.perf_counter()
        train_loader = _loader_of(self, module, train_dataloaders, datamodule)
        loader = _combined(train_loader)
        drawn = _first_batches(loader, count, patience)
        caught = CaughtFit(
            module=module,
            drawn=drawn,
            batches=_length(loader),
            datamodule=datamodule,
            trainer_keywords=vars(self)["_given_in_script"],
            seconds_for_batch=time.perf_counter() - started,
            location=line_of_call(),
            loader=train_dataloaders,
            train_loader=train_loader,
        )
        set_methods(originals)  # a rehearsal fits
        try:
            on_fit(caught)
        finally:
            set_methods(replacements)

    def set_methods(methods: Sequence[tuple[type, str, Any]]) -> None:
        for owner, name, method in methods:
            setattr(owner, name, method)

    def run_nothing(self: pl.Trainer, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    @functools.wraps(build_fabric)
    def init_fabric(self: Fabric, **keywords: Any) -> None:
        vars(self)["_given_in_script"] = keywords
        loggers: Any = [DummyLogger()] if keywords.get("loggers") else None
        build_fabric(self, accelerator="cpu", devices=1, precision=keywords.get("precision"), loggers=loggers)

    def catching(set_up: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(set_up)
        def catch(self: Fabric, module: Any, *args: Any, **kwargs: Any) -> Any:
            keywords = vars(self)["_given_in_script"]
            loop = CaughtLoop(module=unwrap_compiled(module), fabric_keywords=keywords, location=line_of_call())
            set_methods(originals)
            try:
                on_fit(loop)
            except LoopGoesOn as fork:
                going_on.append(fork.rehearsal)
                fork.rehearsal.begin(self)
                return fork.rehearsal.set_up(set_up, self, module, *args, **kwargs)
            raise AssertionError("a script does not go on after its loop was caught")

        return catch

    replacements: list[tuple[type, str, Any]] = [(pl.Trainer, "__init__", __init__), (pl.Trainer, "fit", fit_)]
    replacements += [
        (pl.Trainer, name, functools.wraps(getattr(pl.Trainer, name))(run_nothing)) for name in _OTHER_RUNS
    ]
    replacements += [(Fabric, "__init__", init_fabric), (Fabric, "world_size", property(lambda fabric: ranks))]
    replacements += [(Fabric, name, catching(vars(Fabric)[name])) for name in ("setup", "setup_module")]
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in replacements]
    set_methods(replacements)
    try:
        yield going_on
    finally:
        set_methods(originals)


#: A Trainer's runs that are not planned.
_OTHER_RUNS = ("validate", "test", "predict")


def _loader_of(trainer: pl.Trainer, module: pl.LightningModule, loaders: Any, datamodule: Any) -> Any:
    """The train loader of a fit, made as Lightning makes it."""
    if loaders is not None:
        return loaders
    source = datamodule if datamodule is not None else module
    module.trainer = trainer
    if datamodule is not None:
        datamodule.trainer = trainer
    source.prepare_data()
    source.setup(TrainerFn.FITTING)
    return source.train_dataloader()


def _combined(loaders: Any) -> CombinedLoader:
    """A loader that draws a batch of each, as Lightning combines several in a dict or a list."""
    return loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")


def _length(loader: CombinedLoader) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # an iterable dataset
        return None


def _first_batches(loader: CombinedLoader, count: int, patience: float | None) -> list[Any]:
    """The first batches of a loader, which gets some seconds for them, or as long as it takes."""
    answer: list[Any] = []

    def take() -> None:
        try:
            answer.append([batch for batch, _, _ in islice(loader, count)])
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


def fit_of_trainer(
    trainer: pl.Trainer, module: Any, loaders: Any, datamodule: Any, precision: Mapping[str, Any]
) -> CaughtFit:
    """The fit that a Trainer has begun, with the first batch of its loader.

    Args:
        trainer: The Trainer.
        module: Its module.
        loaders: The train loaders that it was given, or a data module; ``None`` if the others have them.
        datamodule: The data module, if it was given one by name.
        precision: The arguments by which the Trainer was given its precision.

    Raises:
        ShardingError: The loader is empty.
    """
    if isinstance(loaders, pl.LightningDataModule):  # given by position
        loaders, datamodule = None, loaders
    module = unwrap_compiled(module)
    started = time.perf_counter()
    train_loader = _loader_of(trainer, module, loaders, datamodule)
    loader = _combined(train_loader)
    drawn = _first_batches(loader, 1, None)  # the run waits for it too
    keywords: dict[str, Any] = {name: getattr(trainer, name) for name in _KEPT_BY_TRAINERS}
    keywords |= {**precision, "logger": trainer.loggers, "callbacks": list(vars(trainer)["callbacks"])}
    return CaughtFit(
        module=module,
        drawn=drawn,
        batches=_length(loader),
        datamodule=datamodule,
        trainer_keywords=keywords,
        seconds_for_batch=time.perf_counter() - started,
        location=line_of_call(),
        train_loader=train_loader,
    )


#: Arguments of the Trainer that change what a step allocates, which it keeps as attributes.
_KEPT_BY_TRAINERS = (
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "max_epochs", "max_steps"),
    *("limit_train_batches", "log_every_n_steps"),
)
