"""The Fabric adapter of every sharded strategy. Depends on Lightning, but not on how a module is sharded."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import FSDPStrategy, Strategy
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_core.checkpoint.storage.joined import Paths, paths_of
from fsdp_core.errors import ShardingError
from fsdp_core.gradients.step_gradients import unguard_parameters
from fsdp_core.lightning.capabilities import check_precision
from fsdp_core.lightning.checkpoints.fabric_checkpoints import (
    load_checkpoint,
    owner_of,
    restore_unsharded,
    save_checkpoint,
)
from fsdp_core.lightning.finite_gradients import refuse_nonfinite
from fsdp_core.lightning.guarded_gradients import GuardedGradients
from fsdp_core.lightning.hooks.exporting import written_of
from fsdp_core.lightning.hooks.first_forwards import FirstForwards
from fsdp_core.lightning.hooks.forwarding import ShardedForward, sharded_in
from fsdp_core.lightning.hooks.redirection import (
    explain_shards,
    explain_uncaught_error,
    is_inside_forward,
    mend_caught,
    normal_tensors,
)
from fsdp_core.lightning.loaders.fabric_loaders import follow_in_fabric
from fsdp_core.lightning.loaders.split_batches import split_in_fabric
from fsdp_core.lightning.notebooks import FabricForkedRanks
from fsdp_core.lightning.precision_plugins import ShardedFabricPrecision, asked_precision
from fsdp_core.lightning.preemption import Signals, requeue
from fsdp_core.lightning.private import BackwardSyncControl, FabricSubprocessLauncher
from fsdp_core.lightning.strategy import ShardedStrategy
from fsdp_core.plugins.strategy_info import Capability
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.sharding.mixed_precision import ShardPrecision
from fsdp_core.sharding.sharded import Sharded, sharded_around
from fsdp_core.torch_private import call_before_passes, in_backward, reaches
from fsdp_core.watch import explain_uncaught

__all__ = ["ShardedFabricStrategy"]


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
    make_before: ClassVar[str] = "Make them before fabric.setup()."

    def __init__(self, *positional: Any, **options: Any) -> None:
        self._take_options(positional, options)
        self._roots: list[weakref.ref[Sharded]] = []
        self._first_forwards: list[FirstForwards] = []
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._gradients = GuardedGradients(
            lambda: self.optimizers,
            lambda: self.roots,
            with_parameters=True,
            gathers=lambda: True,  # nothing tells when the user calls a model next
        )
        self._signals: Signals | None = None
        self._num_nodes = 1
        self._in_backward = False
        super().__init__(
            accelerator=self.options.accelerator,
            parallel_devices=self.options.parallel_devices,
            cluster_environment=self.new_cluster_environment(),
            precision=self.options.precision,
        )
        if self.options.checkpoint_io is not None:
            self.checkpoint_io = self.options.checkpoint_io
        self._backward_sync_control: _NoSync = _NoSync(self)

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
        name, scaler = asked_precision(plugin)
        asked = ShardPrecision.named(name)
        check_precision(self.strategy_name, asked)
        precision = self.backend.effective_precision(asked)
        self._precision = ShardedFabricPrecision(precision, self, scaler)
        # Fabric keeps Lightning's plugin for fabric.autocast()
        plugin.forward_context = self._precision.forward_context  # type: ignore[method-assign]

    @property
    def shard_precision(self) -> ShardPrecision:
        plugin = self._precision
        return plugin.dtypes if isinstance(plugin, ShardedFabricPrecision) else ShardPrecision()

    @property
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._check_checkpoint_io(io)
        self._checkpoint_io = io

    def _set_world_ranks(self) -> None:
        self._number_ranks()

    def setup_environment(self) -> None:
        super().setup_environment()
        self._join_world()

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
        unguard_parameters(module.parameters())  # of one that is sharded already, maybe by another Fabric
        sharded = self._shard(module)
        explain_uncaught(explain_uncaught_error)  # between calls, no code of a strategy is around the user's
        if not any(known is sharded for known in self.roots):
            self._roots.append(weakref.ref(sharded))
            self._first_forwards.append(FirstForwards(sharded))
        call_before_passes(weakref.WeakMethod(self._before_pass))
        self._gradients.add(sharded)
        return ShardedForward(sharded, lambda: self._in_backward)

    @property
    def roots(self) -> list[Sharded]:
        """The models that were set up, without those that nobody holds any longer.

        The garbage collector decides when one of the latter leaves, on each rank for itself: what all ranks do together
        must not depend on how many there are.
        """
        return [root for one in self._roots if (root := one()) is not None]

    def sharded_of(self, module: nn.Module) -> Sharded:
        """The sharded state of a model that was set up: its shards, their layout, gradients and state.

        Args:
            module: What ``fabric.setup`` returned, or the user's module.

        Raises:
            ShardingError: The module was not set up, or is only a part of a model that was.
        """
        sharded = sharded_in(written_of(module))
        around = sharded_around(written_of(module)) if sharded is None else None
        if around is not None:
            raise ShardingError(
                f"{type(module).__name__} is a part of {around[0].plan.class_name}, which is sharded as a whole.\n"
                "Pass the model that fabric.setup() returned."
            )
        if sharded is None:
            raise ShardingError(
                f"{type(module).__name__} is not sharded.\n"
                "Write `model = fabric.setup(model)` first, and pass what that returns."
            )
        return sharded

    def _root_around(self, module: nn.Module) -> Sharded:
        """The root of a model that was set up, given the model, a part of it, or a module around it."""
        around = sharded_around(written_of(module))
        inside = (one for part in module.modules() if (one := sharded_in(part)) is not None)
        return around[0] if around is not None else next(inside, None) or self.sharded_of(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        forward = self.setup_module(module)
        with self._gradients.while_off():
            self._take_optimizers(optimizers, self.roots)
            self.optimizers.update(optimizers)
        return forward, optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        with self._gradients.while_off():
            self._take_optimizers([optimizer], self.roots)
            self.optimizers.add(optimizer)
        return optimizer

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing to do: sharding places each unit on its device."""

    def process_dataloader(self, dataloader: Any) -> Any:
        follow_in_fabric(dataloader)
        return dataloader if self.backend.sequence is None else split_in_fabric(dataloader, self.split_batch)

    # -- steps -----------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        self._check_loss()
        for forwards in self._first_forwards:
            forwards.check()
        self._gradients.off()
        self._mend_roots([tensor])
        self._in_backward = True
        try:
            with self.backward_context():
                super().backward(tensor, module, *args, **kwargs)
        except BaseException as error:
            if isinstance(error, RuntimeError):
                explain_shards(error, self.roots)
            self._gradients.guard_parameters()
            raise
        finally:
            self._in_backward = False
        for root in self.roots:
            if root.is_called_in_backward and not in_backward():  # libraries may leave it gathered
                root.is_called_in_backward = False
                root.end_call()
        self._backward_sync_control.after_backward(self.roots)
        self._gradients.on()

    def _before_pass(self, outputs: Sequence[Tensor | GradientEdge]) -> None:
        """Mend roots before a backward pass without Fabric: nothing else would before gradients are read by hand."""
        if not self._in_backward:
            self._mend_roots(outputs)

    def _mend_roots(self, outputs: Sequence[Tensor | GradientEdge]) -> None:
        for root in self.roots:
            try:
                mend_caught(root)
            except ShardingError:
                if reaches(outputs, [leaf for leaf in root.leaves() if leaf.requires_grad]):
                    raise  # another pass may belong to another model

    # the mark of a wrapper: Lightning would refuse torch.autograd.grad, which needs none of this
    backward.__wrapped__ = Strategy.backward  # type: ignore[attr-defined]

    def backward_context(self) -> AbstractContextManager[None]:
        """A context for backward passes. Override this and not ``backward``, which Lightning must take for its own."""
        return nullcontext()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if self.async_saves is not None:
            self.async_saves.step()
        self._gradients.off()
        self._follow_added_parameters(optimizer, self.roots)
        closure = kwargs.pop("closure", None)
        for root in self.roots:
            try:
                mend_caught(root)
            except ShardingError:
                stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
                if not stepped.isdisjoint(map(id, root.leaves())):
                    raise  # another model's optimizer may step
        inside = [root for root in self.roots if is_inside_forward(root.root)]  # a method that does a whole step
        for root in inside:
            root.keep_writes()
        if closure is None:
            self._check_gradients(optimizer)
        else:
            kwargs["closure"] = partial(self._evaluate, closure, optimizer, inside)
        output = super().optimizer_step(optimizer, **kwargs)
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._first_forwards = [forwards for forwards in self._first_forwards if not forwards.stop()]
        self._backward_sync_control.stepped()
        self._unreduced.clear()
        for root in self.roots:
            if not root.is_interrupted:
                root.reshard()
        for root in inside:
            root.stepped_inside()
        self._gradients.on()
        return output

    def _evaluate(self, closure: Callable[[], Any], optimizer: Any, inside: Iterable[Sharded]) -> Any:
        for root in inside:
            root.stepped_inside()
        self._gradients.guard_parameters()
        result = closure()
        self._gradients.off()
        for root in inside:
            root.keep_writes()
        self._check_gradients(optimizer)
        return result

    def _check_gradients(self, optimizer: Optimizer) -> None:
        """Raise if gradients are not reduced, or not finite though ``error_if_nonfinite`` was given.

        Where there is a gradient scaler, it decides of the latter.
        """
        self._backward_sync_control.check_reduced(optimizer, self.roots)
        self._check_first_gradients(optimizer, self.roots)
        scaler = getattr(self.precision, "scaler", None)
        if self.error_if_nonfinite and not (scaler is not None and scaler.is_enabled()):
            step = f"step {self._steps.get(optimizer, 0) + 1} of this run"
            refuse_nonfinite(optimizer, self.roots, self.runtime, step)

    def told_to_end(self) -> bool:
        """Whether any rank was told to end, by SIGTERM or the signal with which SLURM announces a requeue.

        Call it on all ranks, between two steps; save then, and leave the loop. The signals are noted from the first
        call on, which must be on the main thread: before it, SIGTERM ends the process. See :meth:`requeue`.

        Returns:
            The same on all ranks.
        """
        if self._signals is None:
            self._signals = Signals(self)
            if isinstance(self.runtime, ProcessGroupRuntime):  # ranks that are threads get no signals
                self._signals.register()
        self._signals.agree()
        return bool(self._signals.agreed)

    def requeue(self) -> None:
        """Let SLURM queue this job again if it has announced that; call it once the checkpoint is complete.

        All ranks may call it: rank 0 does it. Elsewhere than under SLURM, it does nothing.
        """
        signals = self._signals
        if (
            signals is not None
            and signals.agreed
            and signals.agreed == signals.requeue_signal()
            and self.is_global_zero
        ):
            requeue()

    def progress(self) -> str:
        return f"at step {max(self._steps.values(), default=0)}"

    @property
    def accumulating(self) -> Collection[Sharded]:
        """The roots with backward passes since the last step whose gradients are not reduced yet."""
        return self._backward_sync_control.accumulating

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
        root = self._root_around(module)
        with self._gradients.while_off():
            self.precision.unscale_gradients(optimizer)
            self._check_gradients(optimizer)  # clipping would spread what is not finite to all of them
            return root.clip_norm(parameters, float(max_norm), float(norm_type), error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        self.require(Capability.CLIP_BY_VALUE, f"clip_gradients(clip_val={clip_val})")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        root = self._root_around(module)
        with self._gradients.while_off():
            self.precision.unscale_gradients(optimizer)
            root.clip_value(parameters, float(clip_val))

    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return self._reduced(tensor, group, reduce_op)

    # -- state -----------------------------------------------------------------------------------------------------

    @normal_tensors()
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        sharded = sharded_in(module)
        return module.state_dict() if sharded is None else sharded.model_state()

    @normal_tensors()
    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        sharded = sharded_in(module)
        if sharded is None:
            restore_unsharded(module, state_dict, strict, check_only=False)
        else:
            sharded.load_model_state(state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return owner_of(optimizer, self.roots).optimizer_state(optimizer)

    @normal_tensors()
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        self._check_saving(self.roots)
        place = self.place_of(path)
        with self._gradients.while_off():
            save_checkpoint(self, place, state, storage_options, filter or {})
        if place.is_reported:
            self.wait_for_saves()

    @normal_tensors()
    def load_checkpoint(
        self,
        path: Paths,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        self.wait_for_saves()
        with self._gradients.while_off():
            return load_checkpoint(self, self.first_of(paths_of(path), "load"), state, strict, weights_only)

    def teardown(self) -> None:
        self._gradients.off()
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


class _NoSync(BackwardSyncControl):
    """Lets Fabric skip the reduction of gradients, and steps see that it was not left off.

    Attributes:
        accumulating: The roots whose gradients were not reduced in some backward pass since the last step.
    """

    def __init__(self, strategy: ShardedFabricStrategy) -> None:
        self._no_sync, self._require, self._sharded_of = strategy._no_sync, strategy.require, strategy.sharded_of
        self._unreduced = strategy._unreduced
        self.accumulating: weakref.WeakSet[Sharded] = weakref.WeakSet()
        self._off: weakref.WeakSet[Sharded] = weakref.WeakSet()  # inside the context
        self._last_was_off: weakref.WeakSet[Sharded] = weakref.WeakSet()

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        if not enabled:
            yield
            return
        self._require(Capability.GRADIENT_ACCUMULATION, "no_backward_sync()")
        sharded = self._sharded_of(module)
        self.accumulating.add(sharded)
        self._unreduced.add(sharded)
        self._off.add(sharded)
        try:
            with self._no_sync(sharded):
                yield
        finally:
            self._off.discard(sharded)

    def after_backward(self, roots: Iterable[Sharded]) -> None:
        """Note of which roots the last backward pass has left gradients unreduced."""
        if self._off or self._last_was_off:
            for root in roots:
                (self._last_was_off.add if root in self._off else self._last_was_off.discard)(root)

    def check_reduced(self, optimizer: Optimizer, roots: Iterable[Sharded]) -> None:
        """Refuse a step whose last backward pass has left gradients unreduced, which the step would not see.

        Raises:
            ShardingError: It has.
        """
        if not self._last_was_off:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for root in [root for root in roots if root in self._last_was_off]:
            names = {
                part.name
                for p, parts in root.layout().items()
                if id(p) in held and (isinstance(p, DTensor) or root.holds_part(p))
                for part in parts
            }
            left = sorted(names & root.accumulated_gradients().own.keys())
            if left:
                raise ShardingError(
                    f"a step of {type(optimizer).__name__} while gradients of {root.plan.class_name} are not reduced, "
                    f"such as that of {left[0]!r}: the last backward pass before it was inside "
                    "fabric.no_backward_sync(), so the step would leave them out.\n"
                    "Leave the context for the last backward pass before each step: `with "
                    "fabric.no_backward_sync(model, enabled=is_accumulating): ...`, and is_accumulating is False there."
                )

    def stepped(self) -> None:
        """Begin to accumulate anew."""
        self.accumulating.clear()


# See fsdp_core/lightning/trainer.py for why.
FSDPStrategy.register(ShardedFabricStrategy)
