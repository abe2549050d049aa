"""Rehearses ``Trainer.fit``: two optimizer steps of the user's own module on fake tensors, as one rank of many."""

from __future__ import annotations

import copy
import gc
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fsdp_core.device_names import REHEARSED
from fsdp_core.errors import ShardingError
from fsdp_core.lightning.strategy import ShardedStrategy
from fsdp_core.rehearsal.cuda_rules import as_on_cuda, beside_tensors
from fsdp_core.rehearsal.imagined_ranks import ImaginedEnvironment, ImaginedRuntime, imagined_world
from fsdp_core.rehearsal.known_values import Assumption, KnownValues
from fsdp_core.rehearsal.memory import MemoryMode, StepRecord
from fsdp_core.rehearsal.modules_on_fakes import fakes_allowed
from fsdp_core.rehearsal.step_marks import EnoughSteps, StepMarks
from fsdp_core.torch_private.fake_tensors import FakeCopyMode, FakeTensorMode, tree_leaves, tree_map_only
from fsdp_core.torch_private.tensors import is_fake

__all__ = ["Rehearsal", "RehearsedRun", "quietly", "rehearse_fit", "takes_part"]

#: Lightning's callbacks that change what a step allocates.
_OF_TRAINING: tuple[type[pl.Callback], ...] = (
    *(callbacks.BaseFinetuning, callbacks.GradientAccumulationScheduler, callbacks.LambdaCallback),
    *(callbacks.ModelPruning, callbacks.StochasticWeightAveraging, callbacks.WeightAveraging),
)


def takes_part(callback: pl.Callback) -> bool:
    """Whether a callback takes part in a rehearsal: those of Lightning's do that change what is trained, or how.

    Args:
        callback: A callback of the user's Trainer.
    """
    return isinstance(callback, _OF_TRAINING)


@dataclass(frozen=True, kw_only=True)
class RehearsedRun:
    """What is rehearsed.

    Attributes:
        build: Makes the module: the user's own, with fake or real parameters.
        batch: A batch of the user's loader.
        batches: The number of batches of an epoch; ``None`` if the loader does not say.
        loader: The user's loader, whose attributes a step may ask for.
        datamodule: The user's data module, whose hooks get the batches.
        trainer_arguments: The Trainer's arguments, without strategy, devices and the like.
        strategy: The strategy, by name or as an object.
        ranks: The number of ranks.
        rank: The rank that is played.
        precision: The Trainer's ``precision``.
        loggers: The number of the Trainer's loggers, in whose places are such that log nothing.
        device: The kind of device, of ``device_names.REHEARSED``: the CPU computes as it would.
    """

    build: Callable[[], pl.LightningModule]
    batch: Any
    batches: int | None = None
    loader: Any = None
    datamodule: pl.LightningDataModule | None = None
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    strategy: str | Strategy = "auto"
    ranks: int = 1
    rank: int = 0
    precision: Any = None
    loggers: int = 0
    device: str = REHEARSED[0]


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a rehearsal has shown.

    Attributes:
        step: The second optimizer step, with all its micro-batches.
        numel: The number of the model's parameters.
        assumptions: What was assumed of values, with how often.
        seconds: The CPU time that it took.
        beside_tensors: What the device needs beside tensors, in bytes, by what it is; empty for a CPU.
    """

    step: StepRecord
    numel: int
    assumptions: Mapping[Assumption, int]
    seconds: float
    beside_tensors: Mapping[str, int] = field(default_factory=dict)


def rehearse_fit(run: RehearsedRun) -> Rehearsal:
    """Run ``Trainer.fit`` for two optimizer steps on fake tensors, in this process alone.

    Args:
        run: What is rehearsed.

    Raises:
        ShardingError: This process has a process group.
        Exception: What the user's code, Lightning or the strategy raise: the run would raise it too, or the code needs
            values that fake tensors don't have.
    """
    started = time.process_time()
    is_on_cpu = run.device == REHEARSED[0]
    memory = MemoryMode(reduces_in_a_copy=is_on_cpu)
    values = KnownValues()
    with ExitStack() as contexts:
        contexts.enter_context(quietly())
        if run.ranks > 1:
            contexts.enter_context(imagined_world(run.rank, run.ranks))
        contexts.enter_context(fakes_allowed(values))
        if not is_on_cpu:
            contexts.enter_context(as_on_cuda())
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        contexts.enter_context(fake_mode)
        contexts.enter_context(memory)
        contexts.enter_context(values)
        real_module = run.build()
        module = _with_fake_tensors(real_module, fake_mode, values)
        _follow_parameters(module, real_module)
        memory.take(module.parameters(), "parameters")
        memory.take(module.buffers(), "buffers")
        numel = sum(parameter.numel() for parameter in module.parameters())
        batches = _FakeBatches(run, fake_mode, memory, values)
        data = batches if run.datamodule is None else _with_batches(run.datamodule, batches)
        marks = StepMarks(memory, leaves_at_once=True)
        trainer = _trainer(run, marks)
        _leave_out_callbacks(module, values)
        try:
            trainer.fit(module, data)
        except EnoughSteps:  # before hooks of the epoch's end, which may write files
            pass
        finally:
            marks.detach()
    if not marks.steps:
        raise ShardingError(
            "the fit has ended without an optimizer step, so there is none to show.\n"
            "Look at the Trainer's max_steps, max_epochs and limit_train_batches, "
            "and whether training_step returns a loss."
        )
    gc.collect()
    return Rehearsal(
        step=memory.step,
        numel=numel,
        beside_tensors={} if is_on_cpu else beside_tensors(memory.step),
        assumptions=dict(values.assumptions),
        seconds=time.process_time() - started,
    )


def _trainer(run: RehearsedRun, marks: pl.Callback) -> pl.Trainer:
    arguments = {
        **run.trainer_arguments,
        "strategy": run.strategy,
        "accelerator": "cpu",
        "devices": run.ranks,
        "num_nodes": 1,
        "precision": run.precision,
        "logger": [_SilentLogger() for _ in range(run.loggers)],
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "callbacks": [*run.trainer_arguments.get("callbacks", ()), marks],
    }
    if run.ranks > 1:
        arguments["plugins"] = [*run.trainer_arguments.get("plugins", ()), ImaginedEnvironment(run.rank, run.ranks)]
    trainer = pl.Trainer(**arguments)
    strategy = trainer.strategy
    if isinstance(strategy, ShardedStrategy):
        strategy.runtime = ImaginedRuntime()
        strategy.hang_timeout = None
    return trainer


class _SilentLogger(DummyLogger):
    """A logger that logs nothing, whose ``experiment`` has all methods, which do nothing."""

    @property
    def save_dir(self) -> str:
        """Where a step looks that writes beside the logs."""
        return os.getcwd()


def _leave_out_callbacks(module: pl.LightningModule, values: KnownValues) -> None:
    """Keep only those of the module's own callbacks that take part in a rehearsal."""
    configure = module.configure_callbacks

    def configure_callbacks() -> list[pl.Callback]:
        configured = configure()
        own = list(configured) if isinstance(configured, Sequence) else [configured]
        for callback in own:
            if not takes_part(callback):
                values.assumptions[
                    Assumption(f"{type(callback).__name__} of configure_callbacks() changes nothing", "")
                ] += 1
        return [callback for callback in own if takes_part(callback)]

    if type(module).configure_callbacks is not pl.LightningModule.configure_callbacks:
        module.configure_callbacks = configure_callbacks  # type: ignore[method-assign]


def _with_fake_tensors(
    module: pl.LightningModule, fake_mode: FakeTensorMode, values: KnownValues
) -> pl.LightningModule:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ShardingError(
                f"{name} has no shape yet, since lazy modules make their parameters in a first forward pass: call the "
                "module once before the fit, with a batch"
            )
    if all(is_fake(tensor) for tensor in (*module.parameters(), *module.buffers())):
        return module
    with FakeCopyMode(fake_mode):
        on_fakes = copy.deepcopy(module)
    for fake, real in zip(on_fakes.buffers(), module.buffers(), strict=True):
        values.know(fake, real)
    return on_fakes


def _follow_parameters(module: pl.LightningModule, real_module: pl.LightningModule) -> None:
    """Let optimizers that were made before, as LightningCLI makes one, hold the fake parameters of the copy."""
    configure = module.configure_optimizers
    pairs = zip(real_module.parameters(), module.parameters(), strict=True)
    fakes = {id(real): fake for real, fake in pairs if real is not fake}

    def configure_optimizers() -> Any:
        configured = configure()
        for leaf in tree_leaves(configured):
            if isinstance(leaf, Optimizer):
                for group in leaf.param_groups:
                    group["params"] = [fakes.get(id(parameter), parameter) for parameter in group["params"]]
        return configured

    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]


class _FakeBatches:
    """A loader of one batch, again and again, on fake tensors whose integers are known."""

    def __init__(self, run: RehearsedRun, fake_mode: FakeTensorMode, memory: MemoryMode, values: KnownValues) -> None:
        self._batch, self._count, self._loader = run.batch, run.batches, run.loader
        self._fake_mode, self._memory, self._values = fake_mode, memory, values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)  # such as its dataset

    def __len__(self) -> int:
        if self._count is None:
            raise TypeError("the user's loader does not say how many batches it has")
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count or 1_000_000):
            yield tree_map_only(Tensor, self._fake, self._batch)

    def _fake(self, tensor: Tensor) -> Tensor:
        # each batch has memory of its own
        fake = self._fake_mode.from_tensor(tensor, static_shapes=True).clone()
        self._values.know(fake, tensor)
        self._memory.take([fake], "batch")
        return fake


def _with_batches(datamodule: pl.LightningDataModule, batches: _FakeBatches) -> pl.LightningDataModule:
    """A copy of a data module that has been set up, whose train loader gives other batches."""
    rehearsed = copy.copy(datamodule)
    instead = {"prepare_data": lambda: None, "setup": lambda stage: None, "teardown": lambda stage: None}
    vars(rehearsed).update({**instead, "train_dataloader": lambda: batches})
    return rehearsed


@contextmanager
def quietly() -> Iterator[None]:
    """A context without what Lightning and torch say at the start of each run."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "fsdp_core")]
    loggers.append(logging.getLogger("torch._subclasses.fake_tensor"))
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
