"""The Trainer adapter of every sharded strategy. Depends on Lightning, but not on how a module is sharded."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import WeakMethod, WeakSet, ref

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import FSDPStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.migration import migrate_checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_core import checkpoint as checkpoints
from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.checkpoint.collective import together_each
from fsdp_core.checkpoint.storage.joined import Paths, paths_of
from fsdp_core.checkpoint.storage.recognition import holds_ours
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.gradients.step_gradients import unguard_parameters
from fsdp_core.gradients.step_writes import StepWrites, check_writes
from fsdp_core.lightning.capabilities import check_loop, check_precision
from fsdp_core.lightning.checkpoints.deferred_copies import copied_after
from fsdp_core.lightning.checkpoints.exact_resume import KEY, ExactResume
from fsdp_core.lightning.checkpoints.hyper_parameters import check_hyper_parameters
from fsdp_core.lightning.checkpoints.late_param_groups import LateParamGroups
from fsdp_core.lightning.checkpoints.model_checkpoint import treat_pending_saves_as_done
from fsdp_core.lightning.checkpoints.patched_io import checkpoint_at
from fsdp_core.lightning.checkpoints.sharded_or_full import io_for, own_exceptions, users_io
from fsdp_core.lightning.checkpoints.shared_disk import check_all_resume, check_folders_of
from fsdp_core.lightning.checkpoints.trainer_checkpoints import load_checkpoint, load_optimizers, save_checkpoint
from fsdp_core.lightning.finite_gradients import refuse_nonfinite
from fsdp_core.lightning.guarded_gradients import GuardedGradients
from fsdp_core.lightning.hooks.callbacks import check_finetuning, check_pruning, shard_averages, show_written_shapes
from fsdp_core.lightning.hooks.exporting import refuse_values_of_parts, whole_state
from fsdp_core.lightning.hooks.metrics import gather_metrics_over_data
from fsdp_core.lightning.hooks.redirection import call_inside_forward, explain_shards, mend_caught, normal_tensors
from fsdp_core.lightning.loaders.even_batches import RepeatedPredictions, check_same_batches
from fsdp_core.lightning.loaders.split_batches import refuse_loader_steps
from fsdp_core.lightning.loaders.trainer_loaders import TrainingLoaders
from fsdp_core.lightning.notebooks import TrainerForkedRanks
from fsdp_core.lightning.precision_plugins import ShardedTrainerPrecision, asked_precision
from fsdp_core.lightning.preemption import Preemption
from fsdp_core.lightning.private import TrainerSubprocessLauncher, always_say_what_is_saved, resume_from
from fsdp_core.lightning.ray_train import check_reports
from fsdp_core.lightning.setup_checks import check_loggers
from fsdp_core.lightning.strategy import ShardedStrategy
from fsdp_core.plugins.strategy_info import Capability
from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from fsdp_core.sharding.late_parameters import refuse_late
from fsdp_core.sharding.local_pieces import refuse_again
from fsdp_core.sharding.mixed_precision import ShardPrecision
from fsdp_core.sharding.sequence import use_split
from fsdp_core.sharding.sharded import Sharded, sharded_of
from fsdp_core.state.full_tensor import check_not_gathered
from fsdp_core.watch import explain

__all__ = ["ShardedTrainerStrategy"]

#: The Trainer's arguments that determine in which steps a rank runs collectives.
_SAME_IN_LOOPS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "max_epochs",
    "max_steps",
    "check_val_every_n_epoch",
    "val_check_interval",
    "num_sanity_val_steps",
)


#: Attributes that Lightning sets after the constructor, from the arguments of the Trainer or of Fabric.
_SET_BY_LIGHTNING = {
    *("_accelerator", "_checkpoint_io", "_precision_plugin", "_layer_sync", "_launcher", "_lightning_module"),
    *("_parallel_devices", "cluster_environment", "num_nodes"),
}


def _rebuilt(
    cls: type[ShardedTrainerStrategy], args: tuple[Any, ...], options: dict[str, Any]
) -> ShardedTrainerStrategy:
    return cls(*args, **options)


class ShardedTrainerStrategy(ShardedStrategy, ParallelStrategy):
    """Runs a LightningModule on a :class:`~fsdp_core.sharding.Backend`.

    A backend's public strategy class inherits from it and from a :class:`ShardedStrategy` that names its options.

    Raises:
        UnsupportedCapabilityError: An option does not work with shards, is not declared by the strategy, or does
            not exist.
    """

    launcher_class: ClassVar[Any] = TrainerSubprocessLauncher
    _fork_launcher_class: ClassVar[Any] = TrainerForkedRanks
    log: ClassVar[logging.Logger] = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    positional: ClassVar[Sequence[str]] = (
        *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    )
    left_out: ClassVar[Collection[str]] = ("precision",)
    make_before: ClassVar[str] = "Make them in __init__, setup() or configure_model(), which come before sharding."

    def __init__(self, *positional: Any, **options: Any) -> None:
        self._take_options(positional, options)
        self.num_nodes = 1
        self._training_loaders = TrainingLoaders()
        self._exact_resume = ExactResume(self.runtime)
        self._preemption = Preemption(self)
        self._repeated_predictions = RepeatedPredictions(self.strategy_name, self.runtime, self.predict_step)
        #: Saved state of param groups that the optimizers do not hold yet.
        self.late_param_groups = LateParamGroups()
        self._in_step = self._in_eval_step = self._blocking = False
        self._is_inside = self._steps_optimizer = False
        self._followed_steps: WeakSet[Optimizer] = WeakSet()
        self._has_stepped = False
        self._is_first_step = False
        self._writes: StepWrites | None = None
        self._gradients = self._new_gradients()
        self._trainer: pl.Trainer | None = None
        self._fitting = False
        #: What the optimizers of the next fit are to be restored from.
        self._awaited_optimizer_states: Sequence[Mapping[str, Any]] | None = None
        self._has_set_up_optimizers = False
        #: The checkpoint that this rank has chosen to go on from.
        self.resumes_from: str | None = None
        #: By path, whether a checkpoint exists once all pending saves are done.
        self.async_saved: dict[str, bool] = {}
        super().__init__(
            accelerator=self.options.accelerator,
            parallel_devices=self.options.parallel_devices,
            cluster_environment=self.new_cluster_environment(),
            precision_plugin=self.options.precision_plugin or self.options.precision,
        )
        if self.options.checkpoint_io is not None:
            self.checkpoint_io = self.options.checkpoint_io

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the constructor's arguments and what Lightning has set since; what belongs to a run is made anew.

        Tools that start the run elsewhere pickle a Trainer.

        Raises:
            ShardingError: A module is sharded already.
        """
        if self._sharded_or_none is not None:
            raise ShardingError(
                f"strategy={self.strategy_name!r} can't be pickled once it has sharded a module: shards, process "
                "groups and hooks belong to this process.\n"
                "Pickle the Trainer before the first fit(), and save the model as a checkpoint."
            )
        args, options = self._built_with
        kept = {name: value for name, value in vars(self).items() if name in _SET_BY_LIGHTNING}
        return _rebuilt, (type(self), args, options), kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        args, options = self._built_with
        copied = type(self).__new__(type(self), *args, **options)
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo))
        copied.optimizers = copied.optimizers  # Lightning's wrappers of them are made anew
        copied._gradients = copied._new_gradients()
        return copied

    def _new_gradients(self) -> GuardedGradients:
        return GuardedGradients(
            lambda: self.optimizers,
            lambda: [self.sharded],
            with_parameters=True,
            gathers=lambda: self.is_stepping_by_hand,
        )

    # -- where we run ----------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is None or isinstance(plugin, ShardedTrainerPrecision):
            self._precision_plugin = plugin
            return
        name, scaler = asked_precision(plugin)
        asked = ShardPrecision.named(name)
        check_precision(self.strategy_name, asked)
        precision = self.backend.effective_precision(asked)
        self._precision_plugin = ShardedTrainerPrecision(precision, self, scaler, self._guarding_gradients)

    def _guarding_gradients(self) -> AbstractContextManager[Any]:  # a method, which is pickled by its name
        return self._gradients.while_on()

    @property
    def shard_precision(self) -> ShardPrecision:
        plugin = self._precision_plugin
        return plugin.dtypes if isinstance(plugin, ShardedTrainerPrecision) else ShardPrecision()

    @property
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._check_checkpoint_io(io)
        self._checkpoint_io = io

    def set_world_ranks(self) -> None:
        """Set the ranks; Lightning calls this once the devices are known."""
        self._number_ranks()

    def setup_environment(self) -> None:
        super().setup_environment()
        self._join_world()

    # -- from the user's module to shards --------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        self._check_empty_init(empty_init)
        with self.backend.init_context(bool(empty_init)), self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        with self.backend.wrap_context(), warnings.catch_warnings():
            # its advice is to use configure_model, which runs inside this context
            warnings.filterwarnings("ignore", message="`trainer.init_module` cannot fully support proper instantiation")
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self._trainer = trainer
        always_say_what_is_saved(trainer)
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._preemption.follow(trainer, fitting=fitting)
        self._fitting = self._is_first_step = fitting
        if fitting and (self.async_saves is not None or self.scattered_save):
            treat_pending_saves_as_done(trainer.checkpoint_callbacks)
        module = self.lightning_module
        if fitting:
            check_loop(self.strategy_name, self.state_dict_type, trainer, module)
            check_pruning(trainer, self.strategy_name)
            check_loggers(self.strategy_name, trainer, module)
            if self.async_saves is not None:
                check_reports(trainer.callbacks, self.strategy_name)  # type: ignore[attr-defined]
            check_all_resume(self.resumes_from, self.runtime)
        if self.backend.sequence is not None:
            refuse_loader_steps(module, self.strategy_name)
        if fitting and trainer.checkpoint_callbacks and self.state_dict_type == "sharded":
            # fail now rather than at the first checkpoint, which may be hours away
            check_hyper_parameters(module, "hyper_parameters")
            datamodule = getattr(trainer, "datamodule", None)
            if datamodule is not None:
                check_hyper_parameters(datamodule, "datamodule_hyper_parameters")
            if self.num_nodes > 1 and not self.scattered_save:
                check_folders_of(trainer, self.runtime)
        unguard_parameters(module.parameters())  # of one that is sharded already
        sharded = self._shard_converted(module)
        sharded.follow_inner_passes(WeakMethod(self._note_inner_pass))
        gather_metrics_over_data(module, self.runtime)
        shard_averages(trainer, sharded, full=self.state_dict_type == "full")
        show_written_shapes(trainer, sharded)
        if fitting:
            self._exact_resume.follow(trainer)
            self.late_param_groups.clear()
            self._has_set_up_optimizers = False
            self._reset_optimizers_and_schedulers()
            with sharded.as_written():
                self.setup_optimizers(trainer)
                # check here: what was added to the module in this context may be gone after it
                refuse_late(sharded.written, sharded.plan.names, self.optimizers, self.make_before)
            self._take_optimizers(self.optimizers, [sharded])
            if self._awaited_optimizer_states is not None:
                load_optimizers(self, self._awaited_optimizer_states, check_only=False)
            self._has_set_up_optimizers, self._awaited_optimizer_states = True, None
            check_finetuning(trainer, sharded, self.strategy_name)
        if not module.automatic_optimization:
            _watch_toggling(self.lightning_module)
        self.setup_precision_plugin()
        self.barrier()

    def _shard_converted(self, module: pl.LightningModule) -> Sharded:
        """Shard the module, in the dtype of its shards, or take over one that is sharded already."""
        if sharded_of(module) is None:
            converted: Any = self.precision_plugin.convert_module(module)
            if self._layer_sync is not None:
                converted = self._layer_sync.apply(converted)
            module = converted
        sharded = self._shard(module)
        self.model = sharded.root
        return sharded

    @property
    def sharded(self) -> Sharded:
        """The sharded module: its shards, their layout, gradients and state.

        Raises:
            ShardingError: The module is not sharded yet: the Trainer does that at the beginning of each stage.
        """
        sharded = self._sharded_or_none
        if sharded is None:
            if isinstance(self._launcher, TrainerForkedRanks) and self._launcher.has_fitted:
                raise ShardingError(
                    f"the ranks of strategy={self.strategy_name!r} that held the shards and the optimizers have ended "
                    "with the call of this notebook, so no checkpoint can be saved any more.\n"
                    "The weights are here: torch.save(model.state_dict(), 'weights.pt'). For checkpoints to resume "
                    "from, give the Trainer a ModelCheckpoint(save_last=True), which saves before they end."
                )
            raise ShardingError(
                f"strategy={self.strategy_name!r} has not sharded a module yet.\n"
                "Access it in a hook after setup() and configure_model(), such as on_fit_start(), or after the stage."
            )
        return sharded

    @property
    def _sharded_or_none(self) -> Sharded | None:
        return None if self.model is None else sharded_of(self.model)

    def _describe_run(self, module: nn.Module, config: Mapping[str, Any]) -> dict[str, str]:
        trainer, facts = self._trainer, super()._describe_run(module, config)
        if trainer is None or not isinstance(module, pl.LightningModule):
            return facts
        loop = {f"Trainer's {name}": repr(getattr(trainer, name)) for name in _SAME_IN_LOOPS}
        stage = {"stage": str(trainer.state.fn), "automatic_optimization": repr(module.automatic_optimization)}
        return {**stage, **loop, **facts}

    def follow_toggling(self) -> None:
        """Copy ``requires_grad`` from the shards to the parameters that are gathered inside a step."""
        if self._in_step:
            self._check_writes()
            self.sharded.follow_requires_grad()

    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        if self.lightning_module.trainer.training:
            dataloader = self._training_loaders.prepare(dataloader, self.lightning_module.trainer)
            self._exact_resume.before_iterators()
            return dataloader
        return self._training_loaders.apart(dataloader)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return self.split_batch(super().batch_to_device(batch, device, dataloader_idx))

    def model_to_device(self) -> None:
        """Nothing to do: sharding places each unit on its device."""

    # -- steps -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.fit_saves is not None:
            self.fit_saves.step()
        self._in_step = True
        if self._is_first_step:
            self._writes = self.sharded.watch_writes()
        self._gradients.guard_parameters()
        if self.is_stepping_by_hand:
            for optimizer in self.optimizers:
                self._follow_steps(optimizer)
        try:
            output = self._step("training_step", *args, **kwargs)
            assert self.lightning_module is not None
            if not self.lightning_module.automatic_optimization:
                self.sharded.reshard()  # hooks write to shards from now on
            return output
        finally:
            self._in_step = self._is_first_step = False
            if self._writes is not None:
                self._writes.stop()
                self._writes = None
            self._gradients.off()
            if not self._is_automatic:
                self._gradients.guard_parameters()  # hooks come next

    def _check_writes(self, ranks: Runtime | None = None) -> None:
        self.sharded.keep_writes()
        if self._writes is not None:
            check_writes(self._writes, ranks)
        elif ranks is not None and self._is_first_step:
            self._compare_writes("training_step()")

    def _compare_writes(self, by: str) -> None:
        """Refuse what ranks have written differently. All ranks must call it. In a fit, they do after each batch."""
        values = self.sharded.written_values
        if isinstance(self.runtime, ProcessGroupRuntime) and self.runtime.total([bool(values)])[0]:
            values.check_same(values.take(), self.runtime, by)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._eval_step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._eval_step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._repeated_predictions.note(*args)
        return self._eval_step("predict_step", *args, **kwargs)

    def on_validation_start(self) -> None:
        self._check_batches("val", lambda trainer: trainer.num_val_batches)

    def on_test_start(self) -> None:
        self._check_batches("test", lambda trainer: trainer.num_test_batches)

    def on_validation_end(self) -> None:
        self._compare_writes("validation_step()")

    def on_test_end(self) -> None:
        self._compare_writes("test_step()")

    def on_predict_end(self) -> None:
        self._compare_writes("predict_step()")

    def on_predict_start(self) -> None:
        assert self.lightning_module is not None
        self._repeated_predictions.follow(self.lightning_module.trainer)

    def _check_batches(self, stage: str, of: Callable[[pl.Trainer], Sequence[float]]) -> None:
        assert self.lightning_module is not None
        check_same_batches(self.strategy_name, self.runtime, stage, of(self.lightning_module.trainer))

    def _step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run one of the user's step methods inside the root's forward pass, where the root's shards are gathered."""
        assert self.model is not None and self.lightning_module is not None
        self._has_stepped = True
        refuse_values_of_parts(False)
        check_not_gathered(self.model, f"a {name}")

        def step() -> Any:
            if self.is_stepping_by_hand and not self._in_eval_step:
                self.sharded.show_gradients()
            output = getattr(self.lightning_module, name)(*args, **kwargs)
            self._check_writes(self.runtime)
            return output

        self._is_inside = True
        try:
            with self.precision_plugin.forward_context():
                return call_inside_forward(self.model, self.lightning_module, step)
        finally:
            self._is_inside = False

    def _eval_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._in_eval_step = True
        for optimizer in self.optimizers:
            self._follow_steps(optimizer)
        try:
            output = self._step(name, *args, **kwargs)
        finally:
            self._in_eval_step = False
            self._gradients.off()
        self.sharded.reshard()
        self._gradients.guard_parameters()
        return output

    def _follow_steps(self, optimizer: Optimizer) -> None:
        """Let a step method go on with the weights that an optimizer has stepped to without a call of the strategy."""
        if optimizer not in self._followed_steps:
            self._followed_steps.add(optimizer)
            optimizer.register_step_pre_hook(partial(_before_step_inside, ref(self)))
            optimizer.register_step_post_hook(partial(_after_step_inside, ref(self)))

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self.require(Capability.GRADIENT_ACCUMULATION, "an accumulation of gradients")
        self._blocking = True
        try:
            with self._no_sync(self.sharded):
                yield
        finally:
            self._blocking = False

    def pre_backward(self, closure_loss: Tensor) -> None:
        self._check_loss()
        if self.is_stepping_by_hand:
            self._gradients.off()
            mend_caught(self.sharded)
            self._check_writes()
            self.sharded.suspend_forward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        self._exact_resume.on_backward(self.optimizers)
        if self._blocking:  # not earlier: Lightning zeroes gradients inside the context
            self._unreduced.add(self.sharded)
        if self.is_stepping_by_hand:
            self.sharded.resume_forward()
            self._gradients.on()
        elif self._blocking:
            self._gradients.guard_parameters()  # no optimizer steps before the hooks

    def _note_inner_pass(self) -> None:
        """Note a backward pass in a step method of which Lightning does not know."""
        self._exact_resume.on_backward(self.optimizers)
        if self._blocking:
            self._unreduced.add(self.sharded)
        if self.is_stepping_by_hand:
            self._gradients.on()

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        sharded = self.sharded
        self.param_groups_added(optimizer)
        self.late_param_groups.check_complete(optimizer)
        if self.fit_saves is not None:
            closure = copied_after(closure, self.fit_saves, optimizer)
        if not self.is_stepping_by_hand:
            if not self._is_automatic:
                self._gradients.off()  # a hook steps; otherwise the closure runs a training step, which ends so
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
            self._exact_resume.on_step(optimizer)
            self._unreduced.clear()
            sharded.reshard()
            self._gradients.guard_parameters()
            return output

        def closure_inside_forward() -> Any:
            sharded.resume_forward()
            result = closure()
            self._gradients.off()
            self._check_writes()
            sharded.suspend_forward()
            return result

        self.check_steps_here(optimizer)
        mend_caught(sharded)
        self._check_writes()
        self._steps_optimizer = True
        try:
            return super().optimizer_step(optimizer, closure_inside_forward, model, **kwargs)
        finally:
            self._steps_optimizer = False
            self._unreduced.clear()
            self._exact_resume.on_step(optimizer)
            sharded.resume_forward()
            if self._writes is not None:
                self._writes.renew()
            self._gradients.on()

    @property
    def is_stepped_past(self) -> bool:
        """Whether an optimizer's step that runs is inside a step method, and was not called by way of the strategy."""
        return self._is_inside and self.is_stepping_by_hand and not self._steps_optimizer

    def check_steps_here(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer's step in ``validation_step`` and the like where gradients of the root would be lost.

        Raises:
            UnsupportedCapabilityError: They would.
        """
        if self._in_eval_step and not self.sharded.trains_in_evaluation:
            raise UnsupportedCapabilityError(
                f"{type(optimizer).__name__}.step() was called in a step method that does not train, where "
                f"{self.strategy_name!r} has no gradients of parameters that belong to no unit.\n"
                "Use a strategy whose sharded parameters are DTensors, which has them; or adapt at test time under "
                "Fabric, or in training_step() of a fit of its own."
            )

    def end_part_of_step(self) -> None:
        """End a part of a step method before an optimizer steps over the shards."""
        self._gradients.off()
        self._check_writes()

    def begin_part_of_step(self) -> None:
        """Let a step method go on with what an optimizer has stepped to."""
        self.sharded.resume_forward()
        if self._writes is not None:
            self._writes.renew()
        self._gradients.on()

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Raise if ``error_if_nonfinite`` was given and a gradient is not finite, unless a gradient scaler decides."""
        self._check_first_gradients(optimizer, [self.sharded])
        scaler = getattr(self.precision_plugin, "scaler", None)
        if self.error_if_nonfinite and not (scaler is not None and scaler.is_enabled()):
            assert self.lightning_module is not None
            step = f"step {self.lightning_module.trainer.global_step + 1}"
            refuse_nonfinite(optimizer, [self.sharded], self.runtime, step)

    @property
    def is_stepping_by_hand(self) -> bool:
        """Whether a step method itself is running a backward pass or an optimizer step, as in manual optimization."""
        assert self.lightning_module is not None
        return self._in_eval_step or (self._in_step and not self.lightning_module.automatic_optimization)

    @property
    def _is_automatic(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.automatic_optimization

    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        gather_metrics_over_data(self.lightning_module, self.runtime)  # its own hook may have made some
        self._refuse_late(self.sharded, self.optimizers)
        self._exact_resume.restore_gradients(self.sharded, self.optimizers)
        self._exact_resume.before_iterators()
        self._training_loaders.start(self.lightning_module.trainer)
        self._exact_resume.before_first_batch(self.lightning_module.trainer)
        self._exact_resume.attempts.begin(self.lightning_module.trainer)
        self._gradients.guard_parameters()

    def on_train_end(self) -> None:
        """Wait for pending saves, so that a failed one ends the fit like any other error."""
        if self.fit_saves is not None:
            self.fit_saves.wait()

    def progress(self) -> str:
        return "before the first stage" if self._trainer is None else f"at step {self._trainer.global_step}"

    def on_exception(self, exception: BaseException) -> None:
        explain(exception)
        self._preemption.fail()
        self._let_saves_finish(exception)
        sharded = self._sharded_or_none
        if sharded is not None:
            explain_shards(exception, [sharded])
            if self._has_stepped:
                sharded.reset()

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return self._reduced(tensor, group, reduce_op)

    # -- state -----------------------------------------------------------------------------------------------------

    @normal_tensors()
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict, of the kind that checkpoints hold. All ranks must call it.

        Returns:
            With ``state_dict_type="full"``, full tensors in host memory on rank 0, and an empty dictionary elsewhere.
            With ``"sharded"``, what this rank holds: DTensors, :class:`~fsdp_core.checkpoint.ChunkedTensor` s, or plain
            tensors that are replicated on every rank; for full tensors, see :func:`fsdp_core.full_state_dict`.
        """
        sharded = self.sharded
        self._check_saving([sharded])
        if self.fit_saves is not None:
            self.fit_saves.finish_copying()  # of the last save: on_save_checkpoint() of this one may write to shards
        if self.state_dict_type == "full":
            with self._gradients.paused():
                return whole_state(sharded)
        refuse_values_of_parts(True)  # in hooks, until the checkpoint is saved or a step begins
        with self._gradients.paused():
            return sharded.model_state()

    @normal_tensors()
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING and "optimizer_states" in checkpoint:
            doing = "comparing the checkpoint with the model"
            together_each(self.runtime, doing, lambda: self._compare(checkpoint, strict))
        elif strict and (other := self._other_dtypes(checkpoint["state_dict"])):
            name, saved, here = other[0]
            rank_zero_warn(
                f"{self.strategy_name}: {len(other)} tensors of the checkpoint are cast as they are loaded, such as "
                f"{name!r} from {saved} to {here}, because the run that saved it had another precision than "
                f"{self.precision_plugin.precision!r}.",
                stacklevel=2,
            )
            strict = False  # the names are the same
        with self._gradients.paused():
            self.sharded.load_model_state(checkpoint["state_dict"], strict)

    def _other_dtypes(self, saved: Mapping[str, Any]) -> list[tuple[str, torch.dtype, torch.dtype]]:
        """Tensors that have another dtype in a checkpoint, if names are the same: their names, saved dtypes and own."""
        live = self.sharded.model_state()
        if live.keys() != saved.keys():
            return []  # which is told when it is loaded
        dtypes = {name: (saved[name].dtype, one.dtype) for name, one in live.items() if hasattr(saved[name], "dtype")}
        other = [(name, before, now) for name, (before, now) in dtypes.items() if before != now]
        return other if all(before.is_floating_point and now.is_floating_point for _, before, now in other) else []

    def _compare(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Refuse a checkpoint that does not fit the model or an optimizer, before either is changed."""
        self.sharded.load_model_state(checkpoint["state_dict"], strict, check_only=True)
        load_optimizers(self, checkpoint["optimizer_states"], check_only=True)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        with self._gradients.paused():
            return self.sharded.optimizer_state(plain)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers; or, before a fit has set them up, do so as soon as it has."""
        if not self._has_set_up_optimizers:
            self._awaited_optimizer_states = checkpoint["optimizer_states"]
            return
        with self._gradients.paused():
            load_optimizers(self, checkpoint["optimizer_states"], check_only=False)
        assert self.lightning_module is not None
        self._training_loaders.progress_restored(self.lightning_module.trainer)
        self._exact_resume.take(checkpoint.get(KEY))

    def param_groups_added(self, optimizer: Optimizer) -> None:
        """Make an optimizer hold the shards of what it was given, and restore the state that a checkpoint has of it."""
        self._follow_added_parameters(optimizer, [self.sharded])
        if self.late_param_groups.awaits(optimizer):
            with self._gradients.paused():
                self.late_param_groups.restore(optimizer, self.sharded)

    @property
    def fit_saves(self) -> AsyncSaves | None:
        """Writes in the background of a fit; ``None`` without training, where a save returns once all is written."""
        return self.async_saves if self._fitting else None

    @property
    def has_trained(self) -> bool:
        """Whether the fit has taken a training step: hooks of its beginning, which may write to shards, are past."""
        return not self._is_first_step

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        refuse_values_of_parts(False)
        self._check_saving(filter(None, [self._sharded_or_none]))
        if "optimizer_states" in checkpoint:
            self.late_param_groups.check_saving()
        place = self.place_of(filepath)
        if self.fit_saves is not None:
            self.fit_saves.wait()  # before memory is allocated for this one
            self.async_saved = {place.path: True}
        with self._gradients.paused():
            save_checkpoint(self, place, checkpoint, storage_options, self._training_loaders, self._exact_resume)
        if place.is_reported:
            self.wait_for_saves()

    def load_checkpoint(self, checkpoint_path: Paths, weights_only: bool | None = None) -> dict[str, Any]:
        self.wait_for_saves()
        path = self.first_of(paths_of(checkpoint_at(checkpoint_path)), "load")
        saved = load_checkpoint(self, path, weights_only, self._training_loaders)
        if not isinstance(checkpoint_path, str | os.PathLike):  # a list, of which Lightning can do neither
            assert self._trainer is not None
            resume_from(self._trainer, path if isinstance(path, str) else path[0])
            saved, _ = migrate_checkpoint(saved)
        return saved

    def remove_checkpoint(self, filepath: str | Path) -> None:
        path = str(filepath)

        def remove() -> None:
            if (io := io_for(self, path)) is not None:
                io.remove_checkpoint(path)
            elif self.local_rank == 0 or not self.scattered_save or holds_ours(path):
                checkpoints.remove(path)

        with own_exceptions(users_io(self)):
            self.in_order(f"removing {path}", remove, {path: False})

    def in_order(self, doing: str, job: Callable[[], None], saved: Mapping[str, bool]) -> None:
        """Run a job on rank 0, after all pending saves. All ranks must call it.

        Of scattered saves, every rank runs it: the first of each host, and then the others, which may see others.

        Args:
            doing: What the job does, for error messages.
            job: The job.
            saved: By path, whether a checkpoint exists afterwards.
        """

        def run(ranks: Runtime) -> None:
            is_first = (ranks.local_rank if self.scattered_save else ranks.rank) == 0
            together_each(ranks, doing, lambda: job() if is_first else None)
            if self.scattered_save:
                together_each(ranks, doing, lambda: None if is_first else job())

        if self.fit_saves is None:
            run(self.runtime)
        else:
            self.async_saved.update(saved)
            self.fit_saves.run(doing, run)

    def teardown(self) -> None:
        if self._sharded_or_none is not None:
            self._gradients.off()
        refuse_values_of_parts(False)
        use_split(None)
        self._preemption.finish()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.lightning_module is not None and self._trainer is not None:  # else the ranks ran elsewhere
            self._training_loaders.finish(self._trainer)
            self._exact_resume.leave()
            for name in ("toggle_optimizer", "untoggle_optimizer", "state_dict", "load_state_dict"):
                self.lightning_module.__dict__.pop(name, None)  # see _watch_toggling, shard_averages
            refuse_again(self.lightning_module)
        sharded = self._sharded_or_none
        if sharded is not None:
            sharded.reshard()
            self._gradients.guard_parameters()
        self.accelerator.teardown()
        async_saves, self._fitting = self.fit_saves, False
        try:
            if async_saves is not None:
                async_saves.close()
        finally:
            if self._checkpoint_io is not None:
                self._checkpoint_io.teardown()


def _before_step_inside(of: ref[ShardedTrainerStrategy], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    strategy = of()
    if strategy is None or not strategy.is_stepped_past:
        return
    if len(args) > 1 or kwargs.get("closure") is not None:
        raise UnsupportedCapabilityError(
            f"{type(optimizer).__name__}.step(closure) was called inside a step method, past the strategy: the closure "
            "would compute with the weights from before the step.\n"
            "Write self.optimizers().step(closure), with self.automatic_optimization = False; or leave the closure out."
        )
    strategy.check_steps_here(optimizer)
    strategy.end_part_of_step()


def _after_step_inside(of: ref[ShardedTrainerStrategy], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    strategy = of()
    if strategy is not None and strategy.is_stepped_past:
        strategy.begin_part_of_step()


def _watch_toggling(module: pl.LightningModule) -> None:
    """Notify the strategy when a module toggles an optimizer, which only sees the shards that it holds.

    The strategy is looked up then, since another Trainer's may have replaced this one: one of Lightning's, for example,
    which has no ``follow_toggling``.
    """

    def followed(toggle: Callable[..., None]) -> Callable[..., None]:
        @wraps(toggle)
        def toggle_and_follow(optimizer: Any) -> None:
            toggle(optimizer)
            follow = getattr(module.trainer.strategy, "follow_toggling", None)
            if follow is not None:
                follow()

        return toggle_and_follow

    if "toggle_optimizer" not in module.__dict__:
        module.toggle_optimizer = followed(module.toggle_optimizer)  # type: ignore[method-assign]
        module.untoggle_optimizer = followed(module.untoggle_optimizer)  # type: ignore[method-assign]


# Passes Lightning's isinstance checks (distributed sampling, no inference_mode over shards, compiled modules, precision
# left to the strategy) without inheriting FSDP1's code, and without its ban on the CPU, which tests the exact class.
FSDPStrategy.register(ShardedTrainerStrategy)
