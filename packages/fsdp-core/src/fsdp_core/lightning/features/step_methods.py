"""The user's step methods, and the optimizer steps inside them, between which a step goes on with new weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.gradients.step_gradients import unguard_parameters
from fsdp_core.gradients.step_writes import StepWrites, check_writes
from fsdp_core.lightning.features.gradient_guard import GradientGuard
from fsdp_core.lightning.outside_steps.error_notes import explain_shards
from fsdp_core.lightning.outside_steps.exporting import allow_unreduced_reads, refuse_unreduced_reads
from fsdp_core.lightning.outside_steps.redirection import call_inside_forward, mend_caught
from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from fsdp_core.sharding.refusals.files_of_shards import refuse_again
from fsdp_core.sharding.sequence import use_split
from fsdp_core.state.full_tensor import check_not_gathered

if TYPE_CHECKING:
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["StepMethods"]


class StepMethods:
    """Runs the user's step methods inside the root's forward pass, where the root's shards are gathered.

    A step method may itself run backward passes and optimizer steps. Each of these ends a part of the method: what the
    part has written is checked, and the root's forward pass is suspended. The next part begins with the root's
    parameters gathered anew, with the values that the optimizer has stepped to.

    Args:
        strategy: The strategy.

    Attributes:
        gradient_guard: Refuses what users compute of pieces, between the library's own computations.
        accumulates: Whether backward passes leave gradients unreduced.
        is_before_first_step: Whether the fit has taken no training step yet.
    """

    def __init__(self, strategy: ShardedTrainerStrategy) -> None:
        self._strategy = strategy
        self.gradient_guard = GradientGuard(strategy)
        self.accumulates = self.is_before_first_step = False
        #: Whether ``training_step``, or another step method, runs now.
        self._in_training = self._in_evaluation = False
        #: Whether any step method has run.
        self._has_run = False
        #: Whether the user's code runs inside the root's forward pass now.
        self._is_inside_forward = False
        #: Whether an optimizer's step in a step method runs now that has come by way of the strategy.
        self._in_announced_step = False
        #: The optimizers that have this object's hooks.
        self._hooked_optimizers: WeakSet[Optimizer] = WeakSet()
        #: The watch over the first step's writes to gathered parameters, where these would be lost.
        self._writes: StepWrites | None = None

    @property
    def is_by_hand(self) -> bool:
        """Whether a step method itself is running a backward pass or an optimizer step, as in manual optimization."""
        return self._in_evaluation or (self._in_training and not self._is_automatic)

    @property
    def _is_automatic(self) -> bool:
        module = self._strategy.lightning_module
        return module is not None and module.automatic_optimization

    # -- whole steps -----------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step``."""
        strategy = self._strategy
        self._in_training = True
        if self.is_before_first_step:
            self._writes = strategy.sharded.watch_writes()
        self.gradient_guard.guard_parameters()
        if self.is_by_hand:
            self._hook_into_optimizers()
        try:
            output = self._run("training_step", *args, **kwargs)
            if self._is_automatic:
                strategy.sharded.end_forward()
            else:
                strategy.sharded.reshard()  # hooks write to shards from now on
            return output
        finally:
            self._in_training = self.is_before_first_step = False
            if self._writes is not None:
                self._writes.stop()
                self._writes = None
            if not self._is_automatic:  # else hooks before the backward pass, which turns the guard off, see pieces too
                self.gradient_guard.off()
                self.gradient_guard.guard_parameters(between_steps=True)

    def evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step method other than ``training_step``, though it may take optimizer steps, to adapt at test time."""
        self._in_evaluation = True
        self._hook_into_optimizers()
        try:
            output = self._run(name, *args, **kwargs)
        finally:
            self._in_evaluation = False
            self.gradient_guard.off()
        self._strategy.sharded.reshard()
        self.gradient_guard.guard_parameters()
        return output

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        strategy = self._strategy
        assert strategy.model is not None and strategy.lightning_module is not None
        self._has_run = True
        refuse_unreduced_reads()
        check_not_gathered(strategy.model, f"a {name}")

        def run_users_method() -> Any:
            if self.is_by_hand and not self._in_evaluation:
                strategy.sharded.show_gradients()
            if self._in_training:
                self.gradient_guard.guard_flat_pieces()
            output = getattr(strategy.lightning_module, name)(*args, **kwargs)
            self._check_writes(strategy.runtime)
            return output

        self._is_inside_forward = True
        try:
            with strategy.precision_plugin.forward_context():
                return call_inside_forward(strategy.model, strategy.lightning_module, run_users_method)
        finally:
            self._is_inside_forward = False

    # -- parts of steps --------------------------------------------------------------------------------------------

    def before_backward(self, loss: Tensor) -> None:
        """End the part of a step method that has computed a loss."""
        if self.is_by_hand:
            sharded = self._strategy.sharded
            self.gradient_guard.off()
            mend_caught(sharded)
            self._check_writes()
            sharded.suspend_forward(loss)

    def after_backward(self) -> None:
        """Go on after a backward pass."""
        if self.accumulates:  # not before the pass: Lightning zeroes gradients inside the context of accumulation
            self._strategy.sharded_optimizers.unreduced.add(self._strategy.sharded)
        if self.is_by_hand:
            self._strategy.sharded.resume_forward()
            self.gradient_guard.on()
        elif self.accumulates:
            self.gradient_guard.guard_parameters()  # step_optimizer(), which guards them otherwise, is not called

    def after_inner_backward(self) -> None:
        """Go on after a backward pass in a step method of which Lightning does not know."""
        if self.accumulates:
            self._strategy.sharded_optimizers.unreduced.add(self._strategy.sharded)
        if self.is_by_hand:
            self.gradient_guard.on()

    def step_optimizer(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[..., Any]) -> Any:
        """Step over shards.

        Args:
            optimizer: The optimizer.
            closure: What the optimizer evaluates: with automatic optimization, the training step and its backward pass.
            step: Makes the step with ``closure=``.
        """
        strategy, sharded = self._strategy, self._strategy.sharded
        unreduced = strategy.sharded_optimizers.unreduced
        resume = strategy.features.exact_resume
        if not self.is_by_hand:
            if not self._is_automatic:  # a hook steps; with automatic optimization, the closure turns the guard off
                self.gradient_guard.off()
            output = step(closure=closure)
            resume.after_step(optimizer)
            unreduced.clear()
            sharded.reshard()
            self.gradient_guard.guard_parameters(between_steps=True)
            return output

        def closure_inside_forward() -> Any:
            sharded.resume_forward()
            result = closure()
            self._end_part()
            sharded.suspend_forward()
            return result

        self._refuse_untrainable_step(optimizer)
        mend_caught(sharded)
        self._check_writes()
        self._in_announced_step = True
        try:
            return step(closure=closure_inside_forward)
        finally:
            self._in_announced_step = False
            unreduced.clear()
            resume.after_step(optimizer)
            self._begin_part()

    def _end_part(self) -> None:
        """End a part of a step method before an optimizer steps over the shards."""
        self.gradient_guard.off()
        self._check_writes()

    def _begin_part(self) -> None:
        """Let a step method go on with what an optimizer has stepped to."""
        self._strategy.sharded.resume_forward()
        if self._writes is not None:
            self._writes.renew()
        self.gradient_guard.on()

    def _hook_into_optimizers(self) -> None:
        """Let a step method go on with the weights that an optimizer has stepped to without a call of the strategy."""
        for optimizer in self._strategy.optimizers:
            if optimizer not in self._hooked_optimizers:
                self._hooked_optimizers.add(optimizer)
                optimizer.register_step_pre_hook(partial(_before_step_inside, ref(self)))
                optimizer.register_step_post_hook(partial(_after_step_inside, ref(self)))

    @property
    def _is_step_unannounced(self) -> bool:
        """Whether a step method runs, and an optimizer's step in it was not called by way of the strategy."""
        return self._is_inside_forward and self.is_by_hand and not self._in_announced_step

    def _refuse_untrainable_step(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer's step in ``validation_step`` and the like where gradients of the root would be lost.

        Raises:
            UnsupportedCapabilityError: The step is in such a method, and the backend has no gradients there.
        """
        if self._in_evaluation and not self._strategy.sharded.trains_in_evaluation:
            raise UnsupportedCapabilityError(
                f"{type(optimizer).__name__}.step() was called in a step method that does not train, where "
                f"{self._strategy.strategy_name!r} has no gradients of parameters that belong to no unit.\n"
                "Use a strategy whose sharded parameters are DTensors, which has them; or adapt at test time under "
                "Fabric, or in training_step() of a fit of its own."
            )

    # -- what is written -------------------------------------------------------------------------------------------

    def _check_writes(self, ranks: Runtime | None = None) -> None:
        """Keep what was written to gathered parameters, and in a fit's first step refuse what would be lost.

        Args:
            ranks: The ranks, at the end of a step method, where all of them come; ``None`` amid one.
        """
        self._strategy.sharded.keep_writes()
        if self._writes is not None:
            check_writes(self._writes, ranks)
        elif ranks is not None and self.is_before_first_step:
            self.compare_writes("training_step()")

    def compare_writes(self, by: str) -> None:
        """Refuse what ranks have written differently. All ranks must call it.

        In a fit, :class:`~fsdp_core.lightning.features.preemption.Preemption` compares after each batch.

        Args:
            by: What has written, for the message.
        """
        values = self._strategy.sharded.written_values
        runtime = self._strategy.runtime
        if isinstance(runtime, ProcessGroupRuntime) and runtime.total([bool(values)])[0]:
            values.check_same(values.take(), runtime, by)

    def follow_toggling(self) -> None:
        """Copy ``requires_grad`` from the shards to the parameters that are gathered inside a step."""
        if self._in_training:
            self._check_writes()
            self._strategy.sharded.follow_requires_grad()

    def watch_toggling(self, module: pl.LightningModule) -> None:
        """Notice when a module toggles an optimizer, which only sees the shards that it holds."""

        def wrap_toggle(toggle: Callable[..., None]) -> Callable[..., None]:
            @wraps(toggle)
            def toggle_and_follow(optimizer: Any) -> None:
                toggle(optimizer)
                # looked up now: by another Trainer the module may have one of Lightning's strategies, without this
                methods = getattr(module.trainer.strategy, "step_methods", None)
                if methods is not None:
                    methods.follow_toggling()

            return toggle_and_follow

        if "toggle_optimizer" not in module.__dict__:
            module.toggle_optimizer = wrap_toggle(module.toggle_optimizer)  # type: ignore[method-assign]
            module.untoggle_optimizer = wrap_toggle(module.untoggle_optimizer)  # type: ignore[method-assign]

    # -- stages ----------------------------------------------------------------------------------------------------

    def begin_stage(self, module: pl.LightningModule, *, fitting: bool) -> None:
        """Prepare for a stage, before its module is sharded or taken over."""
        self.is_before_first_step = fitting
        unguard_parameters(module.parameters())  # which an earlier Trainer may have guarded

    def fail(self, exception: BaseException) -> None:
        """Explain an exception that ends a stage, and end what a step may have left open."""
        sharded = self._strategy.sharded_or_none
        if sharded is not None:
            explain_shards(exception, [sharded])
            if self._has_run:
                sharded.reset()

    def end_stage(self) -> None:
        """Allow all computations again, as a stage ends."""
        if self._strategy.sharded_or_none is not None:
            self.gradient_guard.off()
        allow_unreduced_reads()
        use_split(None)
        self._strategy.token_means.end()

    def clean_up_module(self, module: pl.LightningModule) -> None:
        """Remove from a module what stages have put there, as :mod:`.callbacks_over_shards` does for callbacks."""
        for name in ("toggle_optimizer", "untoggle_optimizer", "state_dict", "load_state_dict"):
            module.__dict__.pop(name, None)
        refuse_again(module)


def _before_step_inside(reference: ref[StepMethods], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    methods = reference()
    if methods is None or not methods._is_step_unannounced:
        return
    if len(args) > 1 or kwargs.get("closure") is not None:
        raise UnsupportedCapabilityError(
            f"{type(optimizer).__name__}.step(closure) was called inside a step method, past the strategy: the closure "
            "would compute with the weights from before the step.\n"
            "Write self.optimizers().step(closure), with self.automatic_optimization = False; or leave the closure out."
        )
    methods._refuse_untrainable_step(optimizer)
    methods._end_part()


def _after_step_inside(reference: ref[StepMethods], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    methods = reference()
    if methods is not None and methods._is_step_unannounced:
        methods._begin_part()
