"""Forward and backward passes that don't alternate, and gradients that are discarded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import Net, Trained
from fsdp_core.testing.suite.base_class import Clauses, precisions, requires
from fsdp_core.testing.suite.numerics.parity import assert_same

__all__ = ["PassesSuite"]

STEPS = 2

#: Relative tolerance of a parameter's update: each of ten layers rounds to bf16's 8 bits, and ranks are summed.
_HALF = 0.05


class Repeating(Net):
    """Calls each block twice in a row."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x) * self.scale
        for block in self.blocks:
            x = block(block(x))
        output: Tensor = self.out(self.frozen(x))
        return output


class SkippingNet(Net):
    """Leaves out a block in some of its forward passes, as nets do that drop layers or add them while they train.

    Args:
        call: The index of the forward pass that leaves the block out.
        period: After how many forward passes that repeats.
    """

    def __init__(self, call: int, period: int) -> None:
        super().__init__()
        self.call = call
        self.period = period
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        left_out = self.blocks[1] if self.calls % self.period == self.call else None
        self.calls += 1
        x = self.inp(x) * self.scale
        for block in self.blocks:
            x = x if block is left_out else block(x)
        output: Tensor = self.out(self.frozen(x))
        return output


class Step:
    """A step that runs under Fabric and in plain torch.

    Args:
        loop: The net and its optimizer.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.batches = loop.batches(3)
        self.backward, self.unreduced = loop.backward, loop.unreduced

    def loss(self, index: int) -> Tensor:
        """The model's loss on a batch."""
        return self.loop.loss(*self.batches[index])


def _one_for_both(step: Step) -> None:
    step.backward(step.loss(0) + step.loss(1))


def _one_unused(step: Step) -> None:
    step.loss(1)  # like an evaluation without torch.no_grad()
    step.backward(step.loss(0))


def _both_before(step: Step) -> None:
    first, second = step.loss(0), step.loss(1)
    step.backward(first)
    step.backward(second)


def _from_one_output(step: Step) -> None:
    x, y = step.batches[0]
    output = step.loop.model(x)
    step.backward(mse_loss(output, y), retain_graph=True)
    step.backward(mse_loss(output, 2 * y))


def _forward_within(step: Step) -> None:
    with step.unreduced():
        step.backward(step.loss(0))
        later = step.loss(1)
    step.backward(later)


def _backward_within(step: Step) -> None:
    earlier = step.loss(0)
    with step.unreduced():
        step.backward(earlier)
    step.backward(step.loss(1))


def _reduce_before(step: Step) -> None:
    step.backward(step.loss(0))
    with step.unreduced():
        step.backward(step.loss(1))
    step.backward(step.loss(2))


def _clear_within(step: Step, zero_grad: Callable[[], None] | None = None) -> None:
    with step.unreduced():
        step.backward(step.loss(0))
        (zero_grad or step.loop.optimizer.zero_grad)()
        step.backward(step.loss(1))
    step.backward(step.loss(2))


def _all_cleared_within(step: Step) -> None:
    _clear_within(step, step.loop.model.zero_grad)


def _all_cleared(step: Step) -> None:
    step.backward(step.loss(0))
    step.loop.model.zero_grad()
    step.backward(step.loss(1))


_accumulates = requires(Capability.GRADIENT_ACCUMULATION)

#: The passes before an optimizer step.
ORDERS: dict[str, Callable[[Step], None]] = {
    "one backward pass for two forward passes": _one_for_both,
    "a forward pass that no backward pass follows": _one_unused,
    "two forward passes, then two backward passes": _both_before,
    "two backward passes from one output": _from_one_output,
    "a forward pass within no_backward_sync": _forward_within,
    "a backward pass within no_backward_sync": _backward_within,
    "no_backward_sync after a reduction": _reduce_before,
    "zero_grad within an accumulation": _clear_within,
    "the model's zero_grad within an accumulation": _all_cleared_within,
    "the model's zero_grad between two backward passes": _all_cleared,
}

#: The orders that need no_backward_sync.
ACCUMULATED = {order for order in ORDERS if "no_backward_sync" in order or "accumulation" in order}


def _train(
    strategy: str | None, order: str, precision: Any = None, new_net: Callable[[], nn.Module] = oracle.new_net
) -> Trained:
    loop = Loop(strategy, oracle.momentum, new_net(), precision=precision)
    step = Step(loop)
    for _ in range(STEPS):
        ORDERS[order](step)
        loop.step()
    return [], loop.state()


def _repeating() -> Repeating:
    with oracle.seeded(1):
        return Repeating()


def _new_skipping_net(call: int, period: int) -> SkippingNet:
    with oracle.seeded(1):
        return SkippingNet(call, period)


def _assert_same_updates(results: list[Trained], want: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> None:
    """Assert that parameters have changed as in plain torch, as far as half precision allows."""
    for _, got in results:
        for name, initial_value in initial.items():
            expected = want[name] - initial_value
            update = got[name] - initial_value
            assert (update - expected).norm() <= _HALF * expected.norm(), f"{name}: the update is wrong"


def _train_repeating(strategy: str | None) -> Trained:
    loop = Loop(strategy, oracle.momentum, _repeating())
    _, state = loop.train(loop.batches(STEPS))
    return [], state


class PassesSuite(Clauses):
    """Gradients accumulate as in plain torch, in any order of passes."""

    @pytest.mark.parametrize(
        "order", [pytest.param(order, marks=_accumulates if order in ACCUMULATED else []) for order in ORDERS]
    )
    def test_order_of_passes(self, ranks: Ranks, order: str) -> None:
        """Weights must equal plain torch's in any order of forward and backward passes."""
        assert_same(ranks.run(2, _train, self.strategy, order), _train(None, order))

    @precisions("bf16-mixed")
    @pytest.mark.parametrize(
        "order", ["one backward pass for two forward passes", "a forward pass that no backward pass follows"]
    )
    def test_order_of_passes_in_mixed_precision(self, ranks: Ranks, precision: str, order: str) -> None:
        """The same must hold in mixed precision, where each unshard creates a new low-precision tensor."""
        initial = oracle.new_net().state_dict()
        _, want = _train(None, order)
        _assert_same_updates(ranks.run(2, _train, self.strategy, order, precision), want, initial)

    @requires(Capability.GRADIENT_ACCUMULATION)
    @precisions("bf16-mixed")
    def test_a_unit_that_the_first_micro_batch_leaves_out(self, ranks: Ranks, precision: str) -> None:
        """A unit that was never called before an accumulation must be trained by its later micro-batches."""
        order = "a forward pass within no_backward_sync"
        new_net = partial(_new_skipping_net, 0, period=2 * STEPS)
        _, want = _train(None, order, None, new_net)
        got = ranks.run(2, _train, self.strategy, order, precision, new_net)
        _assert_same_updates(got, want, new_net().state_dict())

    @requires(Capability.GRADIENT_ACCUMULATION)
    @pytest.mark.parametrize(
        ("order", "batches"), [("a forward pass within no_backward_sync", 2), ("no_backward_sync after a reduction", 3)]
    )
    def test_a_unit_that_the_last_micro_batch_leaves_out(self, ranks: Ranks, order: str, batches: int) -> None:
        """Gradients must not be lost if the backward pass that reduces them does not visit their unit."""
        new_net = partial(_new_skipping_net, batches - 1, period=batches)
        got = ranks.run(2, _train, self.strategy, order, None, new_net)
        assert_same(got, _train(None, order, None, new_net))

    def test_a_unit_that_is_called_twice(self, ranks: Ranks) -> None:
        """A unit that is called twice in one forward pass must be trained as in plain torch."""
        assert_same(ranks.run(2, _train_repeating, self.strategy), _train_repeating(None))
