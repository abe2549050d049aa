"""The steps of a loop under Fabric, of which a strategy sees forward passes, backward passes and optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakMethod, ref

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from fsdp_core.errors import ShardingError
from fsdp_core.gradients.step_gradients import unguard_parameters
from fsdp_core.lightning.features.finite_gradients import refuse_nonfinite
from fsdp_core.lightning.features.gradient_guard import GradientGuard
from fsdp_core.lightning.features.no_sync import NoSync
from fsdp_core.lightning.features.token_means import TokenMeans
from fsdp_core.lightning.outside_steps.error_notes import explain_shards, explain_uncaught_error
from fsdp_core.lightning.outside_steps.first_forwards import FirstForwards
from fsdp_core.lightning.outside_steps.forwarding import ShardedForward
from fsdp_core.lightning.outside_steps.redirection import (
    is_inside_forward,
    mend_caught,
)
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.torch_private.autograd import call_before_passes, in_backward, reaches
from fsdp_core.watch import explain_uncaught

if TYPE_CHECKING:
    from fsdp_core.lightning.fabric_strategy import ShardedFabricStrategy

__all__ = ["FabricSteps"]


class FabricSteps:
    """Follows the passes and steps of the models that were set up.

    Args:
        strategy: The strategy.

    Attributes:
        gradient_guard: Refuses what users compute of pieces, between the library's own computations.
        step_counts: How many steps each optimizer has taken.
        no_sync: Lets backward passes leave gradients unreduced.
        token_means: How many tokens gradients are of.
    """

    def __init__(self, strategy: ShardedFabricStrategy) -> None:
        self._strategy = strategy
        self.gradient_guard = GradientGuard(strategy)
        self.step_counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self.no_sync = NoSync(strategy)
        self.token_means = TokenMeans(strategy)
        self._roots: list[ref[Sharded]] = []
        self._first_forwards: list[FirstForwards] = []
        self._in_backward = False

    @property
    def roots(self) -> list[Sharded]:
        """The models that were set up, without those that were garbage-collected.

        Each rank collects garbage when it likes, so what all ranks do together must not depend on how many there are.
        """
        return [root for root in (reference() for reference in self._roots) if root is not None]

    @property
    def are_inside_forward(self) -> bool:
        """Whether a model's forward pass is running, in which a method may take whole steps."""
        return any(is_inside_forward(root.root) for root in self.roots)

    def set_up(self, module: nn.Module, shard: Callable[[nn.Module], Sharded]) -> ShardedForward:
        """Shard a module, and follow its passes."""
        unguard_parameters(module.parameters())  # the module may be sharded already, and guarded by another Fabric
        sharded = shard(module)
        # an exception in the user's loop passes through no code of ours: it is explained as the process ends
        explain_uncaught(explain_uncaught_error)
        if not any(root is sharded for root in self.roots):
            self._roots.append(ref(sharded))
            self._first_forwards.append(FirstForwards(sharded, self._note_base))
        call_before_passes(WeakMethod(self._before_pass))
        self.gradient_guard.add(sharded)
        return ShardedForward(sharded, lambda: self._in_backward)

    def _note_base(self, sharded: Sharded) -> None:
        with self.gradient_guard.while_off():
            self._strategy.frozen_parameters.note(sharded)

    def run_backward(self, loss: Tensor, run: Callable[[], None]) -> None:
        """Run a backward pass.

        Args:
            loss: The tensor that the pass begins with.
            run: Runs the pass.
        """
        roots = self.roots
        for forwards in self._first_forwards:
            forwards.check()
        self.gradient_guard.off()
        self._mend_roots([loss])
        self._in_backward = True
        try:
            with self._strategy.backward_context():
                run()
        except BaseException as error:
            if isinstance(error, RuntimeError):
                explain_shards(error, roots)
            self.gradient_guard.guard_parameters()
            raise
        finally:
            self._in_backward = False
        for root in roots:
            # a call in the backward pass may have left the root gathered; an outer backward pass may still need that
            if root.is_called_in_backward and not in_backward():
                root.is_called_in_backward = False
                root.end_call()
        self.no_sync.after_backward(roots)
        self.gradient_guard.on()

    def _before_pass(self, outputs: Sequence[Tensor | GradientEdge]) -> None:
        """Mend roots before a backward pass that Fabric does not run, such as ``torch.autograd.grad``."""
        if not self._in_backward:
            # flat parameters are let through, since the library gathers from them; those that are not gathered now
            # are refused again
            self.gradient_guard.guard_parameters()
            self.gradient_guard.guard_flat_pieces()
            self._mend_roots(outputs)

    def _mend_roots(self, outputs: Sequence[Tensor | GradientEdge]) -> None:
        """Mend roots before a backward pass from some outputs; raise only if the pass reaches a root that stays broken.

        Another model than the one that an exception has interrupted may go on.
        """
        for root in self.roots:
            try:
                mend_caught(root)
            except ShardingError:
                if reaches(outputs, [leaf for leaf in root.leaves() if leaf.requires_grad]):
                    raise

    def step_optimizer(self, optimizer: Any, closure: Callable[[], Any] | None, step: Callable[..., Any]) -> Any:
        """Step over shards.

        Args:
            optimizer: The optimizer.
            closure: The function that the optimizer evaluates; ``None`` if the user has given none.
            step: Makes the step, with ``closure=`` if there is one.
        """
        strategy, roots = self._strategy, self.roots
        self.gradient_guard.off()
        strategy.sharded_optimizers.follow_added_parameters(optimizer, roots)
        for root in roots:
            try:
                mend_caught(root)
            except ShardingError:
                optimizer_params = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
                is_of_another_model = optimizer_params.isdisjoint(map(id, root.leaves()))
                if not is_of_another_model:
                    raise
        # inside a method of theirs that takes whole steps
        roots_inside = [root for root in roots if is_inside_forward(root.root)]
        for root in roots_inside:
            root.keep_writes()
        if closure is None:
            self.check_gradients(optimizer)
            output = step()
        else:
            output = step(closure=partial(self._evaluate, closure, optimizer, roots_inside))
        self.step_counts[optimizer] = self.step_counts.get(optimizer, 0) + 1
        for forwards in self._first_forwards[:]:
            has_ended = forwards.stop()
            if has_ended:
                self._first_forwards.remove(forwards)
        self.no_sync.after_step()
        strategy.sharded_optimizers.unreduced.clear()
        for root in roots:
            if not root.is_interrupted:
                root.reshard()
        for root in roots_inside:
            root.stepped_inside()
        self.gradient_guard.on()
        return output

    def _evaluate(self, closure: Callable[[], Any], optimizer: Any, roots_inside: Iterable[Sharded]) -> Any:
        """Evaluate the user's closure, in which users compute again, between two parts of an optimizer's step."""
        for root in roots_inside:
            root.stepped_inside()
        self.gradient_guard.guard_parameters()
        result = closure()
        self.gradient_guard.off()
        for root in roots_inside:
            root.keep_writes()
        self.check_gradients(optimizer)
        return result

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Raise if gradients are not reduced, or not finite though ``error_if_nonfinite`` was given.

        A gradient scaler skips steps whose gradients are not finite: with one, they are not refused.
        """
        strategy = self._strategy
        roots = self.roots
        self.no_sync.check_reduced(optimizer, roots)
        strategy.sharded_optimizers.check_first_gradients(optimizer, roots)
        scaler = getattr(strategy.precision, "scaler", None)
        if strategy.error_if_nonfinite and not (scaler is not None and scaler.is_enabled()):
            step = f"step {self.step_counts.get(optimizer, 0) + 1} of this run"
            refuse_nonfinite(optimizer, roots, strategy.runtime, step)
