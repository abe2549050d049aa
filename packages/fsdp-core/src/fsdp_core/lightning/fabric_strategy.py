"""The Fabric adapter of every sharded strategy. Depends on Lightning, but not on how a module is sharded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import FSDPStrategy, Strategy
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_core.lightning.fabric_checkpoints import (
    load_checkpoint,
    load_module,
    module_state,
    owner_of,
    save_checkpoint,
)
from fsdp_core.lightning.features.fabric_steps import FabricSteps
from fsdp_core.lightning.features.preemption import Signals
from fsdp_core.lightning.launchers.notebooks import FabricForkedRanks
from fsdp_core.lightning.loaders.fabric_loaders import track_in_fabric
from fsdp_core.lightning.outside_steps.forwarding import root_around, set_up_model
from fsdp_core.lightning.precision_plugins import ShardedFabricPrecision, read_precision, shard_dtypes
from fsdp_core.lightning.private import FabricSubprocessLauncher
from fsdp_core.lightning.strategy import ShardedStrategy
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.sharding.sharded import Sharded

__all__ = ["ShardedFabricStrategy"]

#: Attributes that Lightning sets after the constructor, from the arguments of Fabric.
_SET_BY_LIGHTNING = {
    *("_accelerator", "_checkpoint_io", "_launcher", "_precision", "_parallel_devices", "_num_nodes"),
    "cluster_environment",
}


class ShardedFabricStrategy(ShardedStrategy, ParallelStrategy):
    """Runs modules on a :class:`~fsdp_core.sharding.Backend` under Fabric.

    A backend's public strategy class inherits from it and from a :class:`ShardedStrategy` that names its options.

    Raises:
        UnsupportedCapabilityError: An option does not work with shards, is not declared by the strategy, or does
            not exist.
    """

    launcher_class: ClassVar[Any] = FabricSubprocessLauncher
    _fork_launcher_class: ClassVar[Any] = FabricForkedRanks
    log: ClassVar[logging.Logger] = logging.getLogger("lightning.fabric.utilities.rank_zero")
    positional: ClassVar[Sequence[str]] = (
        *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision"),
    )
    left_out: ClassVar[Collection[str]] = ("precision_plugin",)
    creation_hint: ClassVar[str] = "Make them before fabric.setup()."

    def __init__(self, *positional: Any, **options: Any) -> None:
        self._take_options(positional, options)
        self.optimizers: WeakSet[Optimizer] = WeakSet()
        self.steps = FabricSteps(self)
        self.token_means = self.steps.token_means
        self._signals = Signals(self)
        self._num_nodes = 1
        super().__init__(
            accelerator=self.options.accelerator,
            parallel_devices=self.options.parallel_devices,
            cluster_environment=self.new_cluster_environment(),
            precision=self.options.precision,
        )
        if self.options.checkpoint_io is not None:
            self.checkpoint_io = self.options.checkpoint_io
        self._backward_sync_control = self.steps.no_sync

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the constructor's arguments and what Lightning has set since; what belongs to a run is made anew.

        Raises:
            ShardingError: A module is sharded already.
        """
        return self._reduce_to_arguments(
            is_sharded=bool(self.roots),
            set_by_lightning=_SET_BY_LIGHTNING,
            advice="Pickle the strategy before fabric.setup(), and save the model as a checkpoint.",
        )

    # -- where we run ----------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """The number of hosts."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def precision(self) -> Precision:
        return super().precision

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        if plugin is None or isinstance(plugin, ShardedFabricPrecision):
            self._precision = plugin
            return
        precision, scaler = read_precision(self, plugin)
        self._precision = ShardedFabricPrecision(precision, self, scaler)
        # Fabric keeps Lightning's plugin for fabric.autocast()
        plugin.forward_context = self._precision.forward_context  # type: ignore[method-assign]

    @property
    def shard_precision(self) -> ShardPrecision:
        return shard_dtypes(self._precision)

    def _set_world_ranks(self) -> None:
        self._number_ranks()

    def setup_environment(self) -> None:
        super().setup_environment()
        self._join_world()
        self.token_means.begin()

    # -- from the user's module to shards --------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        self._check_empty_init(empty_init)
        stack = ExitStack()
        stack.enter_context(self.backend.init_context(bool(empty_init)))
        stack.enter_context(self.precision.module_init_context())
        stack.enter_context(self.backend.wrap_context())
        return stack

    def module_sharded_context(self) -> AbstractContextManager[Any]:
        """A context in which torch's ``wrap`` marks units; a backend that can do so shards them as they are built."""
        return self.backend.wrap_context()

    def setup_module(self, module: nn.Module) -> nn.Module:
        return self.steps.set_up(module, self._shard)

    @property
    def roots(self) -> list[Sharded]:
        """The models that were set up, without those that nobody holds any longer."""
        return self.steps.roots

    trained_roots = roots

    #: By what losses are divided: steps are by hand.
    loss_divisor: ClassVar[None] = None

    @property
    def leaves_unreduced(self) -> bool:
        """Whether a backward pass leaves gradients unreduced now."""
        return self.steps.no_sync.is_inside

    @property
    def is_stepping_by_hand(self) -> bool:
        """Whether a method that takes whole steps is running inside of a model's forward pass."""
        return self.steps.are_inside_forward

    def sharded_of(self, module: nn.Module) -> Sharded:
        """The sharded state of a model that was set up: its shards, their layout, gradients and state.

        Args:
            module: What ``fabric.setup`` returned, or the user's module.

        Raises:
            ShardingError: The module was not set up, or is only a part of a model that was.
        """
        return set_up_model(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        forward = self.setup_module(module)
        with self.steps.gradient_guard.while_off():
            self.sharded_optimizers.take(optimizers, self.roots)
            self.optimizers.update(optimizers)
        return forward, optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        with self.steps.gradient_guard.while_off():
            self.sharded_optimizers.take([optimizer], self.roots)
            self.optimizers.add(optimizer)
        return optimizer

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing to do: sharding places each unit on its device."""

    def process_dataloader(self, dataloader: Any) -> Any:
        track_in_fabric(dataloader, None if self.backend.sequence is None else self.split_batch)
        return dataloader

    # -- steps -----------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        self._check_loss()
        self.token_means.begin()  # another Fabric may have been set up since
        self.steps.run_backward(tensor, partial(super().backward, tensor, module, *args, **kwargs))

    # With this mark, Lightning does not take the method for an override: with one, it refuses torch.autograd.grad.
    backward.__wrapped__ = Strategy.backward  # type: ignore[attr-defined]

    def backward_context(self) -> AbstractContextManager[None]:
        """A context for backward passes. Override this and not ``backward``, which Lightning must take for its own."""
        return nullcontext()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if self.async_saves is not None:
            self.async_saves.step()
        closure = kwargs.pop("closure", None)
        return self.steps.step_optimizer(optimizer, closure, partial(super().optimizer_step, optimizer, **kwargs))

    def told_to_end(self) -> bool:
        """Whether any rank was told to end, by SIGTERM or the signal with which SLURM announces a requeue.

        Call it on all ranks, between two steps; save then, and leave the loop. The signals are noted from the first
        call on, which must be on the main thread: before it, SIGTERM ends the process. See :meth:`requeue`.

        Returns:
            The same on all ranks.
        """
        return self._signals.told_to_end()

    def requeue(self) -> None:
        """Let SLURM queue this job again if it has announced that; call it once the checkpoint is complete.

        All ranks may call it: rank 0 does it. Elsewhere than under SLURM, it does nothing.
        """
        self._signals.requeue_agreed()

    def progress(self) -> str:
        return f"at step {max(self.steps.step_counts.values(), default=0)}"

    @property
    def accumulating(self) -> Collection[Sharded]:
        """The roots with backward passes since the last step whose gradients are not reduced yet."""
        return self.steps.no_sync.accumulating

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self.require(Capability.CLIP_BY_NORM, f"clip_gradients(max_norm={max_norm})")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        root = root_around(module)
        with self.steps.gradient_guard.while_off():
            self.precision.unscale_gradients(optimizer)
            self.steps.check_gradients(optimizer)  # clipping would spread what is not finite to all of them
            return root.clip_norm(parameters, float(max_norm), float(norm_type), error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        self.require(Capability.CLIP_BY_VALUE, f"clip_gradients(clip_val={clip_val})")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        root = root_around(module)
        with self.steps.gradient_guard.while_off():
            self.precision.unscale_gradients(optimizer)
            root.clip_value(parameters, float(clip_val))

    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return self._reduce_values(tensor, group, reduce_op)

    # -- state -----------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return module_state(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        load_module(module, state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return owner_of(optimizer, self.roots).optimizer_state(optimizer)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        save_checkpoint(self, path, state, storage_options, filter or {})

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return load_checkpoint(self, path, state, strict, weights_only)

    def teardown(self) -> None:
        self.steps.gradient_guard.off()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision.teardown()
        self.accelerator.teardown()
        try:
            if self.async_saves is not None:
                self.async_saves.close()
        finally:
            if self._checkpoint_io is not None:
                self._checkpoint_io.teardown()


# See fsdp_core/lightning/trainer_strategy.py for why.
FSDPStrategy.register(ShardedFabricStrategy)
