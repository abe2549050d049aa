"""The private names of Lightning that the adapters use, each with its reason. Checked on Lightning 2.6.6.

Nothing else in this package imports an underscored name of Lightning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

# The dtype in which tensors are created while a context lasts; the same one that Lightning's own plugins use.
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor as convert_fp_tensor
from lightning.fabric.plugins.precision.utils import _DtypeContextManager as DtypeContext

# Forks a process per rank, which Fabric and the Trainer recognise by the class.
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher as FabricForkLauncher

# Starts the user's script once per rank. Lightning offers no public way to choose a launcher.
from lightning.fabric.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as FabricSubprocessLauncher,
)

# Fabric's `no_backward_sync` only has an effect if the strategy has an object of this class.
from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl

# Sets the epoch of a dataloader's samplers, wherever they are in it.
from lightning.fabric.utilities.data import _set_sampler_epoch as set_sampler_epoch
from lightning.fabric.utilities.data import sized_len

# Seeds a process started by Lightning's launcher as its parent was seeded.
from lightning.fabric.utilities.seed import reset_seed

# What Fabric returns of a model and an optimizer: a loop's forward passes and steps go through them.
from lightning.fabric.wrappers import _FabricModule as FabricModule
from lightning.fabric.wrappers import _FabricOptimizer as FabricOptimizer

# Holds whether a loop is restarting; the property by which the fit loop overrides it can't be set to false.
from lightning.pytorch.loops.loop import _Loop as Loop

# What a Trainer calls to start processes. Lightning offers no public way to act before them.
from lightning.pytorch.strategies.launchers.launcher import _Launcher as TrainerLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as TrainerForkLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as TrainerSubprocessLauncher,
)

__all__ = [
    "BackwardSyncControl",
    "DtypeContext",
    "FabricForkLauncher",
    "FabricModule",
    "FabricOptimizer",
    "FabricSubprocessLauncher",
    "TrainerForkLauncher",
    "TrainerLauncher",
    "TrainerSubprocessLauncher",
    "always_load_loader_states",
    "always_say_what_is_saved",
    "around_each_batch",
    "around_predictions",
    "before_each_fetch",
    "begin_an_epoch",
    "combined_loader",
    "convert_fp_tensor",
    "deciding_loader",
    "fetcher_of",
    "forget_module",
    "has_fetched_ahead",
    "has_states_to_load",
    "instead_of_signal_handlers",
    "is_accumulating",
    "lengths_of_predictions",
    "load_loader_states",
    "logs_graph",
    "note_sigterm",
    "path_to_resume_from",
    "precision_of",
    "reset_seed",
    "set_checkpoint_in_use",
    "set_sampler_epoch",
    "take_progress",
    "take_strategy",
    "wrapped_sampler",
]


def always_say_what_is_saved(trainer: Any) -> None:
    """Let ``trainer.save_checkpoint(path)`` state that it saves everything; else Lightning logs that on every rank."""
    connector = trainer._checkpoint_connector
    if "dump_checkpoint" not in vars(connector):
        connector.dump_checkpoint = partial(_dump, connector.dump_checkpoint)


def _dump(dump: Callable[[bool], Any], weights_only: bool | None = None) -> Any:
    return dump(bool(weights_only))


def instead_of_signal_handlers(trainer: Any, register: Callable[[], None]) -> None:
    """Let a function register signal handlers instead of Lightning, which does so between a stage's set-up and its run.

    Lightning restores the earlier handlers after the stage, and offers no public way to choose its own.
    """
    connector = trainer._signal_connector

    def note_and_register() -> None:
        connector.received_sigterm = False
        connector._original_handlers = connector._get_current_signal_handlers()
        register()

    connector.register_signal_handlers = note_and_register


def set_checkpoint_in_use(trainer: Any, path: str) -> None:
    """Set the path of the checkpoint that the Trainer has resumed from, which its callbacks then do not remove."""
    trainer._checkpoint_connector._ckpt_path = path


def note_sigterm(trainer: Any) -> None:
    """Make ``trainer.received_sigterm`` true, which callbacks may look at."""
    trainer._signal_connector.received_sigterm = True


def around_each_batch(trainer: Any, before: Callable[[], None], after: Callable[[bool], None]) -> None:
    """Call functions around each batch of a fit, instead of Lightning's broadcast of SIGTERM before each.

    Args:
        trainer: The Trainer.
        before: Called before a batch is fetched.
        after: Called after the batch, before a validation that is due, with whether it was the last of the epoch.
    """
    loop = trainer.fit_loop.epoch_loop

    def advance(data_fetcher: Any) -> None:
        before()
        type(loop).advance(loop, data_fetcher)

    def on_advance_end(data_fetcher: Any) -> None:
        after(bool(loop.batch_progress.is_last_batch))
        type(loop).on_advance_end(loop, data_fetcher)

    loop.advance = advance
    loop.on_advance_end = on_advance_end
    loop._broadcast_sigterm_tensor = lambda: None


def around_predictions(
    trainer: Any,
    *,
    before: Callable[[int], None] | None = None,
    after: Callable[[int, int], None] | None = None,
    end: Callable[[], None] | None = None,
) -> None:
    """Call functions while a prediction runs, in place of those of an earlier call.

    Args:
        trainer: The Trainer.
        before: Called before each batch and its hooks, with the number of its loader.
        after: Called after each batch and its hooks, before the next is fetched, with its number and its loader's.
        end: Called after the last batch, before the hooks of the end of the prediction.
    """
    loop = trainer.predict_loop
    for name in ("_predict_step", "on_run_end"):
        vars(loop).pop(name, None)

    def predict_step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        if before is not None:
            before(dataloader_idx)
        type(loop)._predict_step(loop, batch, batch_idx, dataloader_idx, dataloader_iter)
        if after is not None:
            after(batch_idx, dataloader_idx)

    def on_run_end() -> Any:
        if end is not None:
            end()
        return type(loop).on_run_end(loop)

    if before is not None or after is not None:
        loop._predict_step = predict_step
    if end is not None:
        loop.on_run_end = on_run_end


def lengths_of_predictions(trainer: Any) -> list[float]:
    """How many batches this rank predicts of each loader; infinite where a loader has no length, limited or not."""
    loop = trainer.predict_loop
    loaders = loop._combined_loader.flattened
    counts = zip(loop.max_batches, loaders, strict=True)
    return [math.inf if sized_len(loader) is None else count for count, loader in counts]


def is_accumulating(trainer: Any) -> bool:
    """Whether the next batch goes on with an accumulation that earlier ones have begun. Called between batches."""
    loop = trainer.fit_loop.epoch_loop
    return (
        bool(loop.batch_progress.current.processed)
        and not loop.batch_progress.is_last_batch
        and loop._should_accumulate()
    )


def path_to_resume_from(trainer: Any) -> str:
    """A new path for the checkpoint that ``ckpt_path="hpc"`` finds, and that is found without it under SLURM."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def logs_graph(logger: Any) -> bool:
    """Whether a logger runs the model on rank 0 to draw its graph, as ``TensorBoardLogger(log_graph=True)`` does."""
    return bool(getattr(logger, "_log_graph", False))


def forget_module(strategy: Any) -> None:
    """Remove the module from a strategy of Lightning, which gets it before ``connect`` is called."""
    strategy._lightning_module = None


def wrapped_sampler(wrapper: Any) -> Any:
    """The user's sampler in Lightning's ``DistributedSamplerWrapper``."""
    return wrapper.dataset._sampler


def combined_loader(fit_loop: Any) -> Any | None:
    """The fit's combined loader; ``None`` before the loaders are set up. The public property returns them nested."""
    return fit_loop._combined_loader


def deciding_loader(combined: Any) -> Any:
    """The combined loader that determines the number of batches of an epoch."""
    longest_or_shortest = max if combined._mode.startswith("max") else min
    index = longest_or_shortest(range(len(combined.limits)), key=combined.limits.__getitem__)
    return combined.flattened[index]


def has_states_to_load(fit_loop: Any) -> bool:
    """Whether the loop still holds states for its loaders, which were created before the checkpoint was read."""
    return bool(fit_loop._combined_loader_states_to_load)


def load_loader_states(fit_loop: Any, states: list[Any] | None = None) -> None:
    """Load these states, or those that the loop holds, into the training loaders."""
    combined = combined_loader(fit_loop)
    states = fit_loop._combined_loader_states_to_load if states is None else states
    if combined is not None and states:
        combined._load_state_dicts(states)
        fit_loop._combined_loader_states_to_load = []


def take_progress(fit_loop: Any, state: Mapping[str, Any]) -> None:
    """Give a fit's loop the progress of a loop that ran in another process, without the states of its loaders."""
    fit_loop.load_state_dict({**state, "state_dict": {}})


def always_load_loader_states(fit_loop: Any) -> None:
    """Load states whenever loaders are created. Lightning does not at the beginning of an epoch."""
    fit_loop._load_combined_loader_states = partial(load_loader_states, fit_loop)


def begin_an_epoch(fit_loop: Any) -> None:
    """Make the loop begin an epoch. With ``max_steps``, Lightning would take any checkpoint for a mid-epoch one."""
    Loop.restarting.fset(fit_loop, False)  # type: ignore[attr-defined]


def fetcher_of(fit_loop: Any) -> Any | None:
    """The data fetcher of a fit, which fetches batches of the training loaders; ``iter()`` of it begins an epoch."""
    return fit_loop._data_fetcher


def has_fetched_ahead(fit_loop: Any) -> bool:
    """Whether a batch was prefetched that training has not seen. Lightning prefetches if loaders have no length."""
    return bool(getattr(fit_loop._data_fetcher, "batches", ()))


def before_each_fetch(fit_loop: Any, call: Callable[[], None]) -> None:
    """Call ``call`` before each batch is fetched from the training loaders, where the profiler is notified."""
    epoch_loop = fit_loop.epoch_loop
    tell_profiler = type(epoch_loop)._on_before_fetch

    def on_before_fetch() -> None:
        call()
        tell_profiler(epoch_loop)

    epoch_loop._on_before_fetch = on_before_fetch


def precision_of(trainer: Any) -> dict[str, Any]:
    """The arguments by which a Trainer was given its precision: ``precision``, or ``plugins``."""
    connector = trainer._accelerator_connector
    if connector._precision_plugin_flag is not None:
        return {"plugins": [connector._precision_plugin_flag]}
    return {"precision": connector._precision_flag}


def take_strategy(trainer: Any, strategy: Any, module: Any) -> Any:
    """Give a Trainer another strategy, before anything was set up, as if it had been built with that.

    Args:
        trainer: The Trainer.
        strategy: The strategy, by name or as an object; ``"auto"`` is what Lightning chooses.
        module: What the Trainer is about to run.

    Returns:
        The strategy.
    """
    connector = trainer._accelerator_connector
    connector._strategy_flag = connector._choose_strategy() if strategy == "auto" else strategy
    connector._check_strategy_and_fallback()
    connector._init_strategy()
    connector.precision_plugin = connector._check_and_init_precision()
    connector._lazy_init_strategy()
    connector.strategy._lightning_module = module  # as Trainer.fit does
    return connector.strategy
