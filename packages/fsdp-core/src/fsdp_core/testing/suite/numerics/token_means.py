"""The mean over all tokens: of ranks that have different numbers of them, and of the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import Trained
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.base_class import Clauses, requires
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.training import Lit, loader, losses_of, new_fabric, new_trainer

__all__ = [
    "ACCUMULATE",
    "MAX_NORM",
    "MICRO_BATCHES",
    "LitTokens",
    "LitTokensByHand",
    "TokenMeansSuite",
    "train_unsharded",
]

#: Micro-batches of a step, and of the run, whose last step takes fewer.
ACCUMULATE, MICRO_BATCHES = 3, 5

#: Between the norms of the two steps, 0.51 and 0.54: the weights tell how long a gradient was, and which was clipped.
MAX_NORM = 0.52


def _tokens_that_count(number: int, x: Tensor, y: Tensor) -> Tensor:
    """A mask of a micro-batch's elements: of the second, only elements of the first row; of the third, none."""
    if number == 1:
        first_row = oracle.global_batches(2)[1][0][0].to(x.device)
        return (x == first_row).all(1, keepdim=True) & (y == y)
    return y > (0.0, 0.0, 99.0, 0.7, -0.4)[number]


def _losses(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square()


def train_unsharded() -> Trained:
    """Train on all micro-batches of a step at once, in one process, without token_mean()."""
    net, means = oracle.new_net(), []
    optimizer = oracle.momentum(net)
    batches = oracle.global_batches(MICRO_BATCHES)
    for first in range(0, MICRO_BATCHES, ACCUMULATE):
        total, count = torch.zeros(()), 0
        for number in range(first, min(first + ACCUMULATE, MICRO_BATCHES)):
            x, y = batches[number]
            counted = _losses(net(x), y)[_tokens_that_count(number, x, y)]
            means.append(float(counted.detach().mean()) if counted.numel() else 0.0)
            total, count = total + counted.sum(), count + counted.numel()
        (total / count).backward()
        nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return means, net.state_dict()


class LitTokens(Lit):
    """Logs the mean over all tokens, and returns it as its loss."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.mean_of(batch, batch_idx)

    def mean_of(self, batch: tuple[Tensor, Tensor], number: int, accumulated: bool | None = None) -> Tensor:
        """The mean of a micro-batch."""
        x, y = batch
        mask = _tokens_that_count(number, x, y)
        loss = fsdp_core.token_mean(_losses(self(x), y), mask, accumulated=accumulated)
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss


class LitTokensByHand(LitTokens):
    """Takes its steps itself."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.mean_of(batch, batch_idx, accumulated=True))
        if (batch_idx + 1) % ACCUMULATE == 0 or batch_idx + 1 == MICRO_BATCHES:
            self.clip_gradients(optimizer, gradient_clip_val=MAX_NORM, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


def _fit(strategy: str, tmp: str, world_size: int, module: LitTokens, **trainer: Any) -> Trained:
    run = new_trainer(tmp, strategy, world_size, **trainer)
    run.fit(module, loader(MICRO_BATCHES, world_size))
    state = full_state(run.strategy)
    return losses_of(module), {name.removeprefix("net."): tensor for name, tensor in state.items()}


def _train_by_trainer(strategy: str, tmp: str, world_size: int) -> Trained:
    options = {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": MAX_NORM}
    return _fit(strategy, tmp, world_size, LitTokens("momentum"), **options)


def _train_by_hand(strategy: str, tmp: str, world_size: int) -> Trained:
    return _fit(strategy, tmp, world_size, LitTokensByHand("momentum"))


def _train_by_fabric(strategy: str, tmp: str, world_size: int) -> Trained:
    fabric = new_fabric(strategy, world_size)
    net: Any = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    means = []
    for number, (x, y) in enumerate(fabric.setup_dataloaders(loader(MICRO_BATCHES, world_size))):
        is_last = (number + 1) % ACCUMULATE == 0 or number + 1 == MICRO_BATCHES
        with fabric.no_backward_sync(model, enabled=not is_last):
            mask = _tokens_that_count(number, x, y)
            loss = fsdp_core.token_mean((_losses(model(x), y) * mask).sum(), mask.sum(), accumulated=True)
            means.append(loss.detach())
            fabric.backward(loss)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return [mean.item() for mean in means], full_state(fabric.strategy)


def _two_losses(net: Any, x: Tensor, y: Tensor, mean: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Two losses over different tokens, a function of one, and a mean over elements, of which ranks have as many."""
    output = net(x)
    first, second = mean(_losses(output, y), y > 0.5), mean(output.abs(), x > 0.8)
    loss: Tensor = first + 0.5 * second + first.sqrt() + 0.1 * output.square().mean()
    return loss


def _step_on_two_losses(strategy: str, world_size: int) -> Trained:
    fabric = new_fabric(strategy, world_size)
    net: Any = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    for x, y in fabric.setup_dataloaders(loader(1, world_size)):
        fabric.backward(_two_losses(model, x, y, fsdp_core.token_mean))
        optimizer.step()
    return [], full_state(fabric.strategy)


class TokenMeansSuite(Clauses):
    """``fsdp_core.token_mean`` gives the loss and the gradient that one process has of the whole global batch."""

    @requires(Capability.GRADIENT_ACCUMULATION, Capability.CLIP_BY_NORM)
    @pytest.mark.parametrize(
        ("train", "world_size"),
        [(_train_by_trainer, 2), (_train_by_hand, 2), (_train_by_fabric, 2), (_train_by_trainer, 3)],
        ids=["trainer", "by hand", "fabric", "trainer-3"],
    )
    def test_mean_over_all_tokens_of_a_step(self, ranks: Ranks, tmp_path: Any, train: Any, world_size: int) -> None:
        """The step must take the mean over the tokens of all ranks and micro-batches, and clipping must see it."""
        got = ranks.run(world_size, train, self.strategy, str(tmp_path), world_size)
        assert_same(got, train_unsharded())

    def test_means_over_different_tokens_are_added(self, ranks: Ranks) -> None:
        """Losses over different tokens, functions of them, and plain means must add up as in one process."""
        net = oracle.new_net()
        optimizer = oracle.momentum(net)
        x, y = oracle.global_batches(1)[0]
        _two_losses(net, x, y, lambda losses, mask: losses[mask].mean()).backward()
        optimizer.step()
        assert_same(ranks.run(2, _step_on_two_losses, self.strategy, 2), ([], net.state_dict()))
