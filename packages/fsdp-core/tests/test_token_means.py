"""token_mean without our strategies: in one process, by hand, and under Lightning's own strategies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core import token_mean
from fsdp_core.errors import ShardingError
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import Trained
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import copied_state
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.suite.numerics.token_means import (
    ACCUMULATE,
    MAX_NORM,
    MICRO_BATCHES,
    LitTokens,
    LitTokensByHand,
    train_unsharded,
)
from fsdp_core.testing.training import loader, losses_of, new_fabric, new_trainer

LOSSES = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
MASK = torch.tensor([[True, False], [True, False]])


@pytest.fixture(autouse=True)
def steps_end() -> Any:
    """Let no test find gradients of another waiting."""
    yield
    p = nn.Parameter(torch.zeros(()))
    torch.optim.SGD([p]).step()


@pytest.mark.parametrize(
    ("loss", "count", "mean"),
    [
        (LOSSES, MASK, 2.0),
        (LOSSES, MASK.long(), 2.0),
        (LOSSES, torch.tensor([[0.5, 0.0], [0.0, 1.5]]), 4.75),
        (LOSSES.masked_fill(~MASK, torch.nan), MASK, 2.0),
        (LOSSES.masked_fill(~MASK, torch.inf), MASK.float(), 2.0),
        (LOSSES[MASK], 2, 2.0),
        (LOSSES.sum(), 4.0, 3.0),
        (LOSSES.sum(), torch.tensor(4), 3.0),
        (LOSSES.sum(), MASK, 6.0),
        (LOSSES.sum().bfloat16(), 4, 3.0),
        (LOSSES.sum().double(), torch.tensor([4]), 3.0),
        (LOSSES.sum() * 0, 0, 0.0),
        (LOSSES[:0], MASK[:0], 0.0),
    ],
)
def test_one_process_has_the_mean(loss: Tensor, count: Any, mean: float) -> None:
    loss = loss.clone().requires_grad_()
    result = token_mean(loss, count)
    assert result.item() == mean
    assert result.dtype == torch.promote_types(loss.dtype, torch.float32)
    result.backward()
    assert loss.grad is not None
    assert loss.grad.dtype == loss.dtype
    assert loss.grad.isfinite().all()
    with torch.no_grad():
        assert token_mean(loss, count).item() == mean


@pytest.mark.parametrize(
    ("loss", "count", "words"),
    [
        (LOSSES.long(), 2, "a tensor of torch.int64 as the loss"),
        (LOSSES > 1, 2, "a tensor of torch.bool"),
        (3.0, 2, "a float as the loss"),
        (LOSSES, None, "was given None as the count"),
        (LOSSES, True, "was given True as the count"),
        (LOSSES, "2", "was given '2' as the count"),
        (LOSSES, -1, "was given -1 as the count"),
        (LOSSES, float("nan"), "was given nan as the count"),
        (LOSSES, float("inf"), "was given inf as the count"),
        (LOSSES, torch.tensor(-2), "was given -2 as the count"),
        (LOSSES, torch.tensor(torch.nan), "was given nan as the count"),
        (LOSSES, torch.tensor([[5, -100], [7, -100]]), "a mask that holds -100"),
        (LOSSES, MASK[0], "a mask of shape (2,)"),
        (LOSSES, MASK[:, None], "a mask of shape (2, 1, 2)"),
        (LOSSES, torch.tensor(2 + 0j), "torch.complex64"),
        (LOSSES, LOSSES.clone().requires_grad_(), "requires gradients"),
    ],
)
def test_bad_input_is_refused_in_words(loss: Any, count: Any, words: str) -> None:
    assert_says(refusal(ShardingError, lambda: token_mean(loss, count)), "fsdp_core.token_mean()", words)


def test_a_sum_over_no_token_that_is_not_zero_is_not_hidden() -> None:
    loss = torch.ones((), requires_grad=True)
    assert token_mean(loss, 0) == torch.inf


def test_it_can_be_differentiated_twice() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: token_mean(x.exp(), x.detach() > 1.5), x)
    assert torch.autograd.gradgradcheck(lambda x: token_mean(x.exp(), x.detach() > 1.5), x)


class Weight:
    """One parameter, of which a step's gradient is looked at."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.tensor(1.0))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)

    def loss(self, total: float, count: object, accumulated: bool | None = None) -> Tensor:
        return token_mean(self.parameter * total, count, accumulated=accumulated)  # type: ignore[arg-type]

    @property
    def gradient(self) -> float:
        assert self.parameter.grad is not None
        return float(self.parameter.grad)


def test_micro_batches_by_hand_are_brought_to_one_mean() -> None:
    weight = Weight()
    for _ in range(2):  # the second step has nothing of the first
        for total, count, gradient in ((6, 2, 3), (0, 0, 3), (3, 4, 9 / 6), (1, 4, 1)):
            weight.loss(total, count, accumulated=True).backward()
            assert weight.gradient == pytest.approx(gradient)
        weight.optimizer.step()
        weight.optimizer.zero_grad()


@pytest.mark.parametrize("first", [(0, 0), (0.0, torch.tensor(False))])
def test_a_step_may_begin_without_a_token(first: Any) -> None:
    weight = Weight()
    weight.loss(*first, accumulated=True).backward()
    assert weight.gradient == 0
    weight.loss(6, 3, accumulated=True).backward()
    weight.loss(2, 1, accumulated=True).backward()
    assert weight.gradient == 2


def test_forward_passes_may_come_before_all_backward_passes() -> None:
    weight = Weight()
    losses = [weight.loss(total, count, accumulated=True) for total, count in ((6, 2), (3, 4))]
    for loss in losses:
        loss.backward()
    assert weight.gradient == 9 / 6


def test_two_losses_by_hand_are_declared() -> None:
    weight = Weight()
    weight.loss(6, 2).backward()
    message = refusal(ShardingError, lambda: weight.loss(3, 4).backward())
    assert_says(message, "a second backward pass", "accumulated=True", "accumulated=False", "zero_grad()")
    assert weight.gradient == 3
    weight.loss(3, 4, accumulated=False).backward()
    assert weight.gradient == 3.75
    weight.optimizer.zero_grad()
    weight.loss(3, 4).backward()  # the other gradients are gone
    assert weight.gradient == 0.75


def _mixed(weight: Weight) -> Tensor:
    return weight.loss(3, 4, True) + weight.parameter


def _of_other_tokens(weight: Weight) -> Tensor:
    return weight.loss(3, 4, True) + weight.loss(3, 5, True)


def _not_linear(weight: Weight) -> Tensor:
    return weight.loss(3, 4, True).exp()


def _product(weight: Weight) -> Tensor:
    loss = weight.loss(3, 4, True)
    return loss * loss


def _plain(weight: Weight) -> Tensor:
    return weight.parameter * 3


def _undeclared(weight: Weight) -> Tensor:
    return weight.loss(3, 4)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("other", [_mixed, _of_other_tokens, _not_linear, _product, _plain, _undeclared])
def test_what_one_factor_cannot_correct_is_refused(other: Callable[[Weight], Tensor], is_first: bool) -> None:
    weight = Weight()
    losses = [lambda: weight.loss(6, 2, True), lambda: other(weight)]
    first, second = reversed(losses) if is_first else losses
    first().backward()
    message = refusal(ShardingError, lambda: second().backward())
    assert_says(message, "a step takes several backward passes with token_mean()")
    weight.optimizer.zero_grad()
    other(weight).backward()  # alone, it is right


def test_the_same_count_may_weigh_two_losses() -> None:
    weight = Weight()
    for total, tokens in ((6, 2), (3, 4)):
        count = torch.tensor(tokens)
        (weight.loss(total, count, True) + 0.5 * weight.loss(2 * tokens, count, True)).backward()
    assert weight.gradient == pytest.approx(9 / 6 + 1)


def test_a_pass_does_not_mix_declarations() -> None:
    weight = Weight()
    message = refusal(ShardingError, lambda: (weight.loss(3, 4, True) + weight.loss(3, 4)).backward())
    assert_says(message, "Write the same for all losses of one backward pass")


def _train_elsewhere(strategy: str, tmp: str, ranks: int, by_hand: bool) -> Trained:
    module = LitTokensByHand("momentum") if by_hand else LitTokens("momentum")
    options: dict[str, Any] = {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": MAX_NORM}
    trainer = new_trainer(tmp, strategy, ranks, **({} if by_hand else options))
    trainer.fit(module, loader(MICRO_BATCHES, ranks))
    state = copied_state(module)
    return losses_of(module), {name.removeprefix("net."): tensor for name, tensor in state.items()}


@pytest.mark.parametrize("by_hand", [False, True], ids=["automatic", "by hand"])
@pytest.mark.parametrize(("strategy", "world_size"), [("auto", 1), ("ddp", 2)])
def test_lightnings_own_strategies(ranks: Ranks, tmp_path: Path, strategy: str, world_size: int, by_hand: bool) -> None:
    got = ranks.run(world_size, _train_elsewhere, strategy, str(tmp_path), world_size, by_hand)
    assert_same(got, train_unsharded())


def _count_is_bad_on_a_rank(strategy: str) -> str:
    fabric = new_fabric(strategy)
    loss = torch.ones((), requires_grad=True)
    message = refusal(ShardingError, lambda: token_mean(loss, -1 if fabric.global_rank else 3))
    assert token_mean(loss, 1).item() == 1  # ranks are still together
    return message


def test_every_rank_raises_if_a_count_is_bad_on_one(ranks: Ranks) -> None:
    first, second = ranks.run(2, _count_is_bad_on_a_rank, "ddp")
    assert_says(first, "refuses the loss or the count of another rank")
    assert_says(second, "was given -1 as the count")


def _steps_of_ddp(world_size: int) -> list[float]:
    """Gradients of a Fabric loop under DDP, which knows no optimizers."""
    fabric = new_fabric("ddp", world_size)
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.0))
    gradients = []
    for _ in range(2):
        for number in range(2):
            tokens = 1 + 2 * fabric.global_rank + number
            with fabric.no_backward_sync(model, enabled=number == 0):
                output = model(torch.full((tokens, 1), float(tokens)))
                fabric.backward(fsdp_core.token_mean(output.sum(), tokens, accumulated=True))
        gradients.append(float(net.weight.grad))  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def test_a_loop_under_ddp(ranks: Ranks) -> None:
    tokens = [1, 2, 3, 4]
    assert ranks.run(2, _steps_of_ddp, 2) == [[pytest.approx(sum(n * n for n in tokens) / sum(tokens))] * 2] * 2


def test_the_oracle_is_of_many_counts() -> None:
    counted = [(y > 0).sum() for _, y in oracle.global_batches(MICRO_BATCHES)]
    assert len(set(map(int, counted))) > 1
