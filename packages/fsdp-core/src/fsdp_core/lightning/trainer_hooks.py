"""The hooks of a Trainer's strategy: what Lightning calls for each batch, step and loop of a stage.

A hook that does more than pass a call on calls a file of :mod:`fsdp_core.lightning.features`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from fsdp_core.lightning.features.finite_gradients import refuse_nonfinite
from fsdp_core.lightning.features.stage_features import StageFeatures
from fsdp_core.lightning.features.step_methods import StepMethods
from fsdp_core.lightning.strategy import ShardedStrategy
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.watch import explain

__all__ = ["TrainerHooks"]


class TrainerHooks(ShardedStrategy, ParallelStrategy):
    """The part of the Trainer adapter that Lightning calls while a stage runs; the rest starts and ends stages.

    Attributes:
        features: What a stage has beside its steps.
        step_methods: How steps run over shards.
    """

    features: StageFeatures
    step_methods: StepMethods

    @property
    def sharded(self) -> Sharded:
        """The sharded module."""
        raise NotImplementedError

    # -- batches ---------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        return self.features.exact_resume.prepare_loader(dataloader, self.lightning_module.trainer)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self.features.unequal_tokens.count(batch)
        return self.split_batch(super().batch_to_device(batch, device, dataloader_idx))

    # -- steps -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.features.saves.before_step()
        return self.step_methods.train(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._eval_step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._eval_step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self.features.even_batches.record_arguments(*args)
        return self._eval_step("predict_step", *args, **kwargs)

    def _eval_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.step_methods.evaluate(name, *args, **kwargs)

    def on_validation_start(self) -> None:
        self.features.even_batches.check("val")

    def on_test_start(self) -> None:
        self.features.even_batches.check("test")

    def on_predict_start(self) -> None:
        self.features.even_batches.begin_prediction()

    def on_validation_end(self) -> None:
        self.step_methods.compare_writes("validation_step()")

    def on_test_end(self) -> None:
        self.step_methods.compare_writes("test_step()")

    def on_predict_end(self) -> None:
        self.step_methods.compare_writes("predict_step()")

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self.require(Capability.GRADIENT_ACCUMULATION, "an accumulation of gradients")
        self.step_methods.accumulates = True
        try:
            with self._no_sync(self.sharded):
                yield
        finally:
            self.step_methods.accumulates = False

    def pre_backward(self, closure_loss: Tensor) -> None:
        self._check_loss()
        self.step_methods.before_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        self.features.exact_resume.after_backward(self.optimizers)
        self.step_methods.after_backward()

    def _after_inner_backward(self) -> None:
        """Go on after a backward pass that a step method has run without Lightning."""
        self.features.exact_resume.after_backward(self.optimizers)
        self.step_methods.after_inner_backward()

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        self.param_groups_added(optimizer)
        self.features.late_param_groups.check_complete(optimizer)
        closure = self.features.saves.before_optimizer_step(closure, optimizer)
        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        return self.step_methods.step_optimizer(optimizer, closure, step)

    def param_groups_added(self, optimizer: Optimizer) -> None:
        """Make an optimizer hold the shards of what it was given, and restore the state that a checkpoint has of it."""
        self.sharded_optimizers.follow_added_parameters(optimizer, [self.sharded])
        if self.features.late_param_groups.awaits(optimizer):
            with self.step_methods.gradient_guard.paused():
                self.features.late_param_groups.restore(optimizer, self.sharded)

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Raise if ``error_if_nonfinite`` was given and a gradient is not finite, unless a gradient scaler decides."""
        self.sharded_optimizers.check_first_gradients(optimizer, [self.sharded])
        self.features.unequal_tokens.compare()
        scaler = getattr(self.precision_plugin, "scaler", None)
        if self.error_if_nonfinite and not (scaler is not None and scaler.is_enabled()):
            assert self.lightning_module is not None
            step = f"step {self.lightning_module.trainer.global_step + 1}"
            refuse_nonfinite(optimizer, [self.sharded], self.runtime, step)

    @property
    def is_stepping_by_hand(self) -> bool:
        """Whether a step method itself is running a backward pass or an optimizer step, as in manual optimization."""
        return self.step_methods.is_by_hand

    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        self.step_methods.gradient_guard.off()
        self.sharded_optimizers.refuse_late(self.sharded, self.optimizers)
        for feature in self.features.in_order:
            feature.train_start(self.lightning_module.trainer, self.sharded)
        self.step_methods.gradient_guard.guard_parameters()

    def on_train_end(self) -> None:
        """Wait for pending saves, so that a failed one ends the fit like any other error."""
        if self.features.saves.writer is not None:
            self.features.saves.writer.wait()

    def on_exception(self, exception: BaseException) -> None:
        explain(exception)
        self.features.preemption.fail()
        self._let_saves_finish(exception)
        self.step_methods.fail(exception)
