"""The mean over all tokens where adapters have a part in it: checkpoints amid a step, several optimizers, any dtype."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import fsdp_core
from fsdp_core.errors import ShardingError
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.oracle import Trained
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.base_class import Clauses, on_ranks
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.suite.numerics.token_means import (
    ACCUMULATE,
    MAX_NORM,
    MICRO_BATCHES,
    LitTokens,
    LitTokensByHand,
    train_unsharded,
)
from fsdp_core.testing.training import Lit, loader, losses_of, new_fabric, new_trainer, own_share

__all__ = ["TokenMeansOfAdaptersSuite"]


class SavesAmidStep(pl.Callback):
    """Saves after two of the three micro-batches of the first step, the last of which has all tokens of one rank."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 1:
            trainer.save_checkpoint(self.path)


def _resume(strategy: str, tmp: str, by_hand: bool) -> tuple[Trained, Trained]:
    runs = []
    for resumes in (False, True):
        module = LitTokensByHand("momentum") if by_hand else LitTokens("momentum")
        options: dict[str, Any] = {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": MAX_NORM}
        callbacks = [] if resumes else [SavesAmidStep(f"{tmp}/amid")]
        trainer = new_trainer(tmp, strategy, 2, callbacks=callbacks, **({} if by_hand else options))
        trainer.fit(module, loader(MICRO_BATCHES, 2), ckpt_path=f"{tmp}/amid" if resumes else None)
        state = {name.removeprefix("net."): tensor for name, tensor in full_state(trainer.strategy).items()}
        runs.append((losses_of(module), state))
    return runs[0], runs[1]


def _resume_under_fabric(strategy: str, tmp: str) -> tuple[list[float], list[float]]:
    """The gradient of a step that a checkpoint has interrupted, and of that step without one."""
    fabric = new_fabric(strategy)
    gradients = []
    for resumes in (False, True):
        net: Any = nn.Linear(oracle.FEATURES, 1, bias=False)
        nn.init.ones_(net.weight)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
        state: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "gradients": fsdp_core.AccumulatedGradients(model),
        }
        if resumes:
            fabric.load(f"{tmp}/fabric", state)
        for number in range(1 if resumes else 0, 2):
            with fabric.no_backward_sync(model, enabled=number == 0):
                x, _ = own_share(fabric, oracle.global_batches(2)[number])
                counted = 1 + number + fabric.global_rank
                loss = fsdp_core.token_mean(model(x)[:counted].sum(), counted, accumulated=True)
                fabric.backward(loss)
            if number == 0:
                fabric.save(f"{tmp}/fabric", state)
        optimizer.step()
        optimizer.zero_grad()
        gradients.append((1 - full_state(fabric.strategy, fabric.strategy.sharded_of(model))["weight"]).flatten())
    return gradients[0].tolist(), gradients[1].tolist()


class TwoPlayers(Lit):
    """Two networks with optimizers of their own, each of which steps for itself, or both after two batches.

    Args:
        mode: ``"alternating"``: each batch has a step of each, one after the other. ``"together"``: two batches have
            one step of both. ``"apart"``: each batch has a step of one, and two batches have one of the other.
    """

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.mode = mode
        self.net, self.other = oracle.new_net(blocks=1), oracle.new_net(blocks=1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        losses, masks = _losses_of_players(self.net, self.other, batch, batch_idx)
        if self.mode == "together":
            count = masks[0].sum()
            both = (losses[0] * masks[0]).sum() + (losses[1] * masks[0]).sum()
            self.manual_backward(fsdp_core.token_mean(both, count, accumulated=True))
            if batch_idx % 2:
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
            return
        accumulated = True if self.mode == "apart" else None
        first.zero_grad()
        self.manual_backward(fsdp_core.token_mean(losses[0], masks[0]))
        first.step()
        if accumulated is None:
            second.zero_grad()
        losses, masks = _losses_of_players(self.net, self.other, batch, batch_idx)
        self.manual_backward(fsdp_core.token_mean(losses[1], masks[1], accumulated=accumulated))
        if accumulated is None:
            second.optimizer.step()  # past Lightning
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        return oracle.momentum(self.net), torch.optim.SGD(self.other.parameters(), lr=0.1)


def _losses_of_players(net: Any, other: Any, batch: tuple[Tensor, Tensor], number: int) -> Any:
    """The losses of each player's elements, and which count."""
    x, y = batch
    output = net(x)
    return (
        ((output - y).square(), (other(x) - output.detach()).square()),
        (y > (0.5, -0.2)[number % 2], y < -0.5),
    )


def _train_two_players(strategy: str, tmp: str, mode: str) -> Trained | str:
    module = TwoPlayers(mode)
    trainer = new_trainer(tmp, strategy, 2)
    if mode == "apart":
        return refusal(ShardingError, lambda: trainer.fit(module, loader(4, 2)))
    trainer.fit(module, loader(4, 2))
    return [], full_state(trainer.strategy)


def _train_two_players_unsharded(mode: str) -> Trained:
    net, other = oracle.new_net(blocks=1), oracle.new_net(blocks=1)
    optimizers = oracle.momentum(net), torch.optim.SGD(other.parameters(), lr=0.1)
    total, count = torch.zeros(()), 0
    for number, batch in enumerate(oracle.global_batches(4)):
        if mode == "together":
            losses, masks = _losses_of_players(net, other, batch, number)
            total = total + losses[0][masks[0]].sum() + losses[1][masks[0]].sum()
            count += int(masks[0].sum())
            if number % 2:
                (total / count).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                total, count = torch.zeros(()), 0
            continue
        for player, optimizer in enumerate(optimizers):
            losses, masks = _losses_of_players(net, other, batch, number)
            losses[player][masks[player]].mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    return [], state | {f"other.{name}": tensor for name, tensor in other.state_dict().items()}


def _step_in_fp64(strategy: str) -> dict[str, Tensor]:
    fabric = new_fabric(strategy)
    net: Any = oracle.new_net()
    model, optimizer = fabric.setup(net.double(), oracle.momentum(net))
    x, y = (tensor.double() for tensor in own_share(fabric, oracle.global_batches(1)[0]))
    losses = (model(x) - y).square()
    fabric.backward(fsdp_core.token_mean(losses.sum() * (1 + fabric.global_rank), 7 + 4 * fabric.global_rank))
    optimizer.step()
    return full_state(fabric.strategy)


class MixesLosses(LitTokens):
    """Adds a mean to the mean over tokens, though the step takes several micro-batches."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0.1 * self(batch[0]).square().mean()


class BeginsWithoutTokens(LitTokens):
    """Returns a plain mean for the first micro-batch of a step."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx else self(batch[0]).square().mean()


def _refusals_amid_steps(strategy: str, tmp: str) -> list[str]:
    messages = []
    for module in (MixesLosses("momentum"), BeginsWithoutTokens("momentum")):
        trainer = new_trainer(tmp, strategy, 2, accumulate_grad_batches=ACCUMULATE)
        messages.append(refusal(ShardingError, lambda: trainer.fit(module, loader(MICRO_BATCHES, 2))))  # noqa: B023
    return messages


class LitLabels(Lit):
    """Has integer labels, of which ranks have different numbers, and a mean over a rank's own, or over all."""

    def __init__(self, is_plain: bool) -> None:
        super().__init__()
        self.is_plain = is_plain

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = cross_entropy(self(batch["x"]), batch["labels"], reduction="none")
        is_counted = batch["labels"] != -100
        return losses[is_counted].mean() if self.is_plain else fsdp_core.token_mean(losses, is_counted)


def _warnings_of_labels(strategy: str, tmp: str, is_plain: bool, ignored: int) -> list[str]:
    rows = [{"x": x, "labels": number % 6} for number, (x, _) in enumerate(oracle.dataset(oracle.BATCH * 3))]
    for number in range(1, 2 * ignored, 2):  # rows of the second rank
        rows[number]["labels"] = -100
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        share = rank_context()
        sampler: Any = DistributedSampler(rows, share.shares(2), share.rank, shuffle=False)  # type: ignore[arg-type]
        data = DataLoader(rows, batch_size=oracle.BATCH // 2, sampler=sampler)  # type: ignore[arg-type]
        new_trainer(tmp, strategy, 2).fit(LitLabels(is_plain), data)
    return [str(each.message) for each in caught if "numbers of labels" in str(each.message)]


class TokenMeansOfAdaptersSuite(Clauses):
    """What ``fsdp_core.token_mean`` needs of adapters."""

    def test_counts_are_restored_amid_a_step(self, ranks: Ranks, tmp_path: Path) -> None:
        """A run that resumes between the micro-batches of a step must weigh those before by their tokens."""
        losses, state = train_unsharded()
        for by_hand in (False, True):
            for whole, resumed in ranks.run(2, _resume, self.strategy, str(tmp_path / str(by_hand)), by_hand):
                assert_same([whole], (losses, state))
                assert_same([resumed], (losses[2:], state))

    def test_counts_are_restored_under_fabric(self, ranks: Ranks, tmp_path: Path) -> None:
        """``AccumulatedGradients`` must hold of how many tokens they are."""
        for whole, resumed in ranks.run(2, _resume_under_fabric, self.strategy, str(tmp_path)):
            torch.testing.assert_close(torch.tensor(resumed), torch.tensor(whole))

    @pytest.mark.parametrize("mode", ["alternating", "together"])
    def test_several_optimizers_take_means_over_tokens(self, ranks: Ranks, tmp_path: Path, mode: str) -> None:
        """Optimizers that step one after the other, or after the same passes, must step as in one process."""
        got = ranks.run(2, _train_two_players, self.strategy, str(tmp_path), mode)
        assert_same(got, _train_two_players_unsharded(mode))

    def test_optimizers_that_accumulate_apart_are_refused(self, ranks: Ranks, tmp_path: Path) -> None:
        """A pass of one optimizer's loss amid the passes of another's must be refused."""
        for message in ranks.run(2, _train_two_players, self.strategy, str(tmp_path), "apart"):
            assert_says(message, "optimizers step after different backward passes")

    @on_ranks("processes")
    def test_two_ranks_are_exact_in_fp64(self, ranks: Ranks) -> None:
        """With two ranks, the gradient must be that of one process to the last bit, each rank's rows added in turn."""
        net = oracle.new_net().double()
        optimizer = oracle.momentum(net)
        x, y = (tensor.double() for tensor in oracle.global_batches(1)[0])
        for rank in range(2):
            rows = slice(rank, None, 2)
            ((net(x[rows]) - y[rows]).square().sum() * (1 + rank) / (7 + 11)).backward()
        optimizer.step()
        for state in ranks.run(2, _step_in_fp64, self.strategy):
            for name, tensor in net.state_dict().items():
                assert torch.equal(state[name], tensor), name

    def test_losses_of_other_means_are_refused_amid_a_step(self, ranks: Ranks, tmp_path: Path) -> None:
        """A mean beside the mean over tokens must be refused where a step takes several micro-batches."""
        for mixed, begun in ranks.run(2, _refusals_amid_steps, self.strategy, str(tmp_path)):
            assert_says(mixed, "more than token_mean() times numbers", "accumulate_grad_batches=1")
            assert_says(begun, "a loss without token_mean()")

    @on_ranks("processes")
    @pytest.mark.parametrize(("is_plain", "ignored", "warns"), [(True, 2, True), (True, 0, False), (False, 2, False)])
    def test_unequal_labels_under_a_plain_mean_are_warned_of(
        self, ranks: Ranks, tmp_path: Path, is_plain: bool, ignored: int, warns: bool
    ) -> None:
        """One warning must say that ranks have different numbers of labels, unless the loss knows them."""
        told, other = ranks.run(2, _warnings_of_labels, self.strategy, str(tmp_path), is_plain, ignored)
        assert (len(told), other) == (int(warns), [])
        if warns:
            assert_says(told[0], "in step 1: 10 in all", "20%", "fsdp_core.token_mean", "filterwarnings")
