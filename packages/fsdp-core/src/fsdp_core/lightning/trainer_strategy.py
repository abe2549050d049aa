"""The Trainer adapter of every sharded strategy. Depends on Lightning, but not on how a module is sharded."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import WeakMethod

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from fsdp_core.errors import ShardingError
from fsdp_core.lightning.features.callbacks_over_shards import check_finetuning
from fsdp_core.lightning.features.stage_features import StageFeatures
from fsdp_core.lightning.features.step_methods import StepMethods
from fsdp_core.lightning.features.token_means import TokenMeans
from fsdp_core.lightning.launchers.notebooks import TrainerForkedRanks
from fsdp_core.lightning.precision_plugins import ShardedTrainerPrecision, read_precision, shard_dtypes
from fsdp_core.lightning.private import TrainerSubprocessLauncher, always_say_what_is_saved
from fsdp_core.lightning.trainer_checkpoints import TrainerCheckpoints
from fsdp_core.lightning.trainer_hooks import TrainerHooks
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.sharding.refusals.late_parameters import refuse_late
from fsdp_core.sharding.sharded import Sharded, sharded_of

__all__ = ["ShardedTrainerStrategy"]

#: The Trainer's arguments that must be the same on all ranks, since they determine in which steps a rank communicates.
_LOOP_ARGUMENTS = (
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


class ShardedTrainerStrategy(TrainerHooks):
    """Runs a LightningModule on a :class:`~fsdp_core.sharding.Backend`.

    A backend's public strategy class inherits from it and from a :class:`~fsdp_core.lightning.ShardedStrategy` that
    names its options.

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
    creation_hint: ClassVar[str] = "Make them in __init__, setup() or configure_model(), which come before sharding."

    def __init__(self, *positional: Any, **options: Any) -> None:
        self._take_options(positional, options)
        self.num_nodes = 1
        self.features = StageFeatures(self)
        self.step_methods = StepMethods(self)
        self.token_means = TokenMeans(self)
        self.checkpoints = TrainerCheckpoints(self)
        self._trainer: pl.Trainer | None = None
        #: The path of the checkpoint that Lightning resumes from on this rank; set by :mod:`.checkpoints.patched_io`.
        self.resumes_from: str | None = None
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
        return self._reduce_to_arguments(
            is_sharded=self.sharded_or_none is not None,
            set_by_lightning=_SET_BY_LIGHTNING,
            advice="Pickle the Trainer before the first fit(), and save the model as a checkpoint.",
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = super().__deepcopy__(memo)
        copied.optimizers = copied.optimizers  # by this setter, Lightning wraps the copied optimizers anew
        return copied

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
        precision, scaler = read_precision(self, plugin)
        self._precision_plugin = ShardedTrainerPrecision(precision, self, scaler)

    def guarding_gradients(self) -> AbstractContextManager[None]:
        """The context in which the user's hooks that see gradients run."""
        return self.step_methods.gradient_guard.while_on()

    @property
    def shard_precision(self) -> ShardPrecision:
        return shard_dtypes(self._precision_plugin)

    def set_world_ranks(self) -> None:
        """Set the ranks; Lightning calls this once the devices are known."""
        self._number_ranks()

    def setup_environment(self) -> None:
        super().setup_environment()
        self._join_world()
        self.token_means.begin()

    # -- from the user's module to shards --------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        self._check_empty_init(empty_init)
        with self.backend.init_context(bool(empty_init)), self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        with self.backend.wrap_context(), warnings.catch_warnings():
            # the warning advises to use configure_model, which is what runs inside this context
            warnings.filterwarnings("ignore", message="`trainer.init_module` cannot fully support proper instantiation")
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self._trainer = trainer
        always_say_what_is_saved(trainer)
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        for feature in self.features.in_order:
            feature.setup(trainer, fitting=fitting)
        module = self.lightning_module
        self.step_methods.begin_stage(module, fitting=fitting)
        sharded = self._shard_converted(module)
        sharded.follow_inner_passes(WeakMethod(self._after_inner_backward))
        for feature in self.features.in_order:
            feature.module_sharded(trainer, sharded, fitting=fitting)
        if fitting:
            self.checkpoints.before_optimizers()
            self._reset_optimizers_and_schedulers()
            with sharded.unsharded_view():
                self.setup_optimizers(trainer)
                # checked in this context: a parameter that is added to the module here may be gone after it
                refuse_late(sharded.module, sharded.plan.names, self.optimizers, self.creation_hint)
            self.sharded_optimizers.take(self.optimizers, [sharded])
            self.checkpoints.after_optimizers()
            check_finetuning(trainer, sharded, self.strategy_name)
        if not module.automatic_optimization:
            self.step_methods.watch_toggling(module)
        self.setup_precision_plugin()
        self.step_methods.gradient_guard.add(sharded)  # hooks before the first step see pieces
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
        sharded = self.sharded_or_none
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
    def sharded_or_none(self) -> Sharded | None:
        """The sharded module; ``None`` if it is not sharded yet."""
        return None if self.model is None else sharded_of(self.model)

    @property
    def loss_divisor(self) -> int | None:
        """By what Lightning divides each loss: the number of micro-batches; ``None`` with manual optimization."""
        module = self.lightning_module
        return module.trainer.accumulate_grad_batches if module is not None and module.automatic_optimization else None

    @property
    def leaves_unreduced(self) -> bool:
        """Whether a backward pass leaves gradients unreduced now."""
        return self.step_methods.accumulates

    @property
    def trained_roots(self) -> Sequence[Sharded]:
        """The sharded module alone."""
        return [self.sharded]

    def _describe_run(self, module: nn.Module, config: Mapping[str, Any]) -> dict[str, str]:
        trainer = self._trainer
        facts = super()._describe_run(module, config)
        if trainer is None or not isinstance(module, pl.LightningModule):
            return facts
        loop = {f"Trainer's {name}": repr(getattr(trainer, name)) for name in _LOOP_ARGUMENTS}
        stage = {"stage": str(trainer.state.fn), "automatic_optimization": repr(module.automatic_optimization)}
        return {**stage, **loop, **facts}

    def model_to_device(self) -> None:
        """Nothing to do: sharding places each unit on its device."""

    def progress(self) -> str:
        return "before the first stage" if self._trainer is None else f"at step {self._trainer.global_step}"

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return self._reduce_values(tensor, group, reduce_op)

    # -- state -----------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict, of the kind that checkpoints hold. All ranks must call it.

        Returns:
            With ``state_dict_type="full"``, full tensors in host memory on rank 0, and an empty dictionary elsewhere.
            With ``"sharded"``, what this rank holds: DTensors, :class:`~fsdp_core.checkpoint.ChunkedTensor` s, or plain
            tensors that are replicated on every rank; for full tensors, see :func:`fsdp_core.full_state_dict`.
        """
        return self.checkpoints.module_state()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.checkpoints.load_module(checkpoint, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.checkpoints.optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.checkpoints.load_optimizers(checkpoint)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        self.checkpoints.save(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoints.load(checkpoint_path, weights_only)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        self.checkpoints.remove(str(filepath))

    def teardown(self) -> None:
        # If the ranks were other processes, self._trainer is None in this one.
        trainer = None if self.lightning_module is None else self._trainer
        self.step_methods.end_stage()
        for feature in self.features.in_order:
            feature.teardown(trainer)
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.lightning_module is not None and trainer is not None:
            self.step_methods.clean_up_module(self.lightning_module)
        sharded = self.sharded_or_none
        if sharded is not None:
            sharded.reshard()
            self.step_methods.gradient_guard.guard_parameters()
        self.accelerator.teardown()
        try:
            self.features.saves.close()
        finally:
            if self._checkpoint_io is not None:
                self._checkpoint_io.teardown()


# Passes Lightning's isinstance checks (distributed sampling, no inference_mode over shards, compiled modules, precision
# left to the strategy) without inheriting FSDP1's code, and without its ban on the CPU, which tests the exact class.
FSDPStrategy.register(ShardedTrainerStrategy)
