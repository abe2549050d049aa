"""Tells the memory mode where in a step a Trainer is, and what the tensors of modules and optimizers are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from fsdp_core.rehearsal.memory import MemoryMode, StepRecord
from fsdp_core.sharding.units.wrap_policy import select_units

__all__ = ["STEPS", "EnoughSteps", "StepMarks"]

#: The optimizer steps of a rehearsal. In the first, optimizers allocate their state; the second is measured.
STEPS = 2


class EnoughSteps(BaseException):
    """Ends a fit whose steps were rehearsed. No ``except Exception`` sees it."""


class StepMarks(pl.Callback):
    """Tells the memory mode where in a step the run is, and ends it after two optimizer steps.

    A batch in which several optimizers step, as one of a GAN, is one step.

    Attributes:
        steps: The number of steps that have ended.
    """

    def __init__(self, memory: MemoryMode, *, leaves_at_once: bool = False) -> None:
        """Make the callback.

        Args:
            memory: The mode.
            leaves_at_once: Whether the run ends by :class:`EnoughSteps`, without what happens at an epoch's end.
        """
        self.steps = 0
        self._memory = memory
        self._leaves_at_once = leaves_at_once
        self._handles: list[Any] = []
        self._is_between_steps = True
        self._global_step = 0

    @property
    def step(self) -> StepRecord:
        """The record of the current step."""
        return self._memory.step

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        memory = self._memory
        memory.take(module.parameters(), "parameters")
        names = {submodule: name for name, submodule in module.named_modules()}
        sharded = getattr(trainer.strategy, "sharded_or_none", None)
        unit_names = (
            sharded.plan.units if sharded is not None else [names[unit] for unit in select_units(module, "auto")]
        )
        units = {module.get_submodule(name): name for name in unit_names}
        for unit, name in units.items():
            self._handles.append(unit.register_forward_pre_hook(_entering(memory, name)))
            self._handles.append(unit.register_forward_hook(_leaving(memory), always_call=True))

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        memory = self._memory
        if self._is_between_steps:
            self._classify(trainer, module)
            memory.begin_step()
            self._is_between_steps = False
        memory.phase = "forward"

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
        self._memory.phase = "backward"

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._memory.phase, self._memory.module = "between", ""
        self._classify(trainer, module)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self._classify(trainer, module)
        self._memory.phase = "optimizer"

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._memory.phase = "between"
        self._classify(trainer, module)
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._is_between_steps = True
        self.steps += 1
        if self.steps == STEPS:
            self._memory.end_step()
            trainer.should_stop = True
            if self._leaves_at_once:
                raise EnoughSteps

    def _classify(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Say what storages hold, as far as optimizers and parameters show it now."""
        memory = self._memory
        for optimizer in trainer.optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            memory.take(parameters, "parameters")
            memory.take([p.grad for p in parameters if p.grad is not None], "gradients")
            for state in optimizer.state.values():
                memory.take([value for value in state.values() if isinstance(value, Tensor)], "optimizer state")
        memory.take(module.buffers(), "buffers")

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()


def _entering(memory: MemoryMode, name: str) -> Callable[..., None]:
    def enter(module: nn.Module, args: Any) -> None:
        memory.module = name
        memory.recomputing = memory.phase == "backward"

    return enter


def _leaving(memory: MemoryMode) -> Callable[..., None]:
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        memory.recomputing = False
        if memory.phase != "backward":
            memory.module = ""

    return leave
