"""What the root's parameters are between the calls of a step."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fsdp_core
from fsdp_core.errors import ShardingError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import FEATURES
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.numerics.parity import assert_numbers_alone
from fsdp_core.testing.suite.training.loops import assert_root_stays_gathered
from fsdp_core.testing.training import loader, new_fabric, new_trainer


@pytest.mark.parametrize("reshard", [None, True, False, 1, 2])
def test_reshard_after_forward_leaves_the_root_gathered(ranks: RankPool, tmp_path: Path, reshard: Any) -> None:
    assert_root_stays_gathered(ranks, tmp_path, "fsdp2", {"reshard_after_forward": reshard})


def test_resharding_the_root_too_leaves_numbers_alone(ranks: RankPool, tmp_path: Path) -> None:
    assert_numbers_alone(ranks, tmp_path, "fsdp2", {"reshard_after_forward": True})


class ByHand(pl.LightningModule):
    """Rank 0 alone uses parameters of the root, in a step by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with oracle.seeded(1):
            self.layer, self.head = nn.Sequential(nn.Linear(FEATURES, FEATURES)), nn.Linear(FEATURES, FEATURES)
        fsdp_core.wrap(self.layer)

    def loss(self, x: Tensor, y: Tensor, rank: int) -> Tensor:
        """That of a rank."""
        hidden = self.layer(x)
        return mse_loss(self.head(hidden) if rank == 0 else hidden, y)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One step."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch, self.global_rank))
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return oracle.momentum(self)


def _by_hand(tmp: str) -> dict[str, Tensor]:
    trainer = new_trainer(tmp, "fsdp2", 2)
    trainer.fit(ByHand(), loader(3, 2))
    return full_state(trainer.strategy)


def test_ranks_may_differ_in_using_the_root_in_a_step_by_hand(ranks: RankPool, tmp_path: Path) -> None:
    module = ByHand()
    optimizer = oracle.momentum(module)
    for x, y in oracle.global_batches(3):
        optimizer.zero_grad()
        torch.stack([module.loss(x[rank::2], y[rank::2], rank) for rank in range(2)]).mean().backward()
        optimizer.step()
    for state in ranks.run(2, _by_hand, str(tmp_path), timeout=60):
        for name, want in module.state_dict().items():
            torch.testing.assert_close(state[name], want)


class WithoutElements(pl.LightningModule):
    """Has a parameter without elements, as a layer of no classes has, which ``fully_shard`` can't take."""

    def __init__(self) -> None:
        super().__init__()
        with oracle.seeded(1):
            self.head = nn.Linear(FEATURES, FEATURES)
        self.none = nn.Parameter(torch.empty(0, FEATURES))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """That of a rank."""
        return mse_loss(self.head(x), y) + self.none.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One step."""
        return self.loss(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return oracle.momentum(self)


def _without_elements(tmp: str) -> dict[str, Tensor]:
    first = new_trainer(tmp, "fsdp2", 2)
    first.fit(WithoutElements(), loader(2, 2))
    first.save_checkpoint(f"{tmp}/two.ckpt")
    trainer = new_trainer(tmp, "fsdp2", 2, max_epochs=2)
    trainer.fit(WithoutElements(), loader(2, 2), ckpt_path=f"{tmp}/two.ckpt")
    return full_state(trainer.strategy)


def test_a_parameter_without_elements_is_trained_and_saved_with_the_rest(ranks: RankPool, tmp_path: Path) -> None:
    module = WithoutElements()
    optimizer = oracle.momentum(module)
    for x, y in [*oracle.global_batches(2)] * 2:
        optimizer.zero_grad()
        module.loss(x, y).backward()
        optimizer.step()
    for state in ranks.run(2, _without_elements, str(tmp_path), timeout=60):
        assert state["none"].shape == (0, FEATURES)
        for name, want in module.state_dict().items():
            torch.testing.assert_close(state[name], want)


def _added_on_one_rank() -> str:
    fabric = new_fabric("fsdp2")
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.blocks[0].parameters(), lr=0.1))
    used: Any = fabric.strategy
    used.runtime.patience = timedelta(seconds=1)
    (x, y), *_ = oracle.global_batches(1)
    fabric.backward(mse_loss(model(x), y))
    if fabric.global_rank != 0:
        return ""  # its step would wait for rank 0, to compare what both hold whole
    optimizer.add_param_group({"params": list(net.blocks[1].parameters())})
    return refusal(ShardingError, optimizer.step)


def test_parameters_that_one_rank_adds_are_refused_there(ranks: RankPool) -> None:
    """The others would train without them, or take part in other collectives."""
    added, _ = ranks.run(2, _added_on_one_rank)
    assert_says(added, "a change of the parameters of SGD", "rank 1 did not do", "All ranks must do it")


class Reading(ByHand):
    """Reads the largest weight of a unit, or writes a gradient to what is gathered.

    Args:
        hook: Where it reads, or the name of what it writes to.
    """

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.bias, self.scale = nn.Parameter(torch.zeros(FEATURES)), nn.Parameter(torch.ones(1))
        self.hook = hook
        self.message = ""

    def call(self, hook: str) -> None:
        """Read it, in the hook that was chosen."""
        if hook == self.hook:
            self.message = refusal(ShardingError, lambda: self.layer[0].weight.max().item())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Read it before a step, and after its backward pass."""
        self.call("training_step")
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(mse_loss(self.head(self.layer(batch[0])) * self.scale + self.bias, batch[1]))
        for name, parameter in self.named_parameters():
            if name == self.hook:
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
        optimizer.step()

    def on_train_batch_start(self, *_: Any) -> None:
        """Read it."""
        self.call("on_train_batch_start")

    def on_train_batch_end(self, *_: Any) -> None:
        """Read it."""
        self.call("on_train_batch_end")


def read(tmp: str, hook: str) -> str:
    module = Reading(hook)
    new_trainer(tmp, "fsdp2", 2).fit(module, loader(2, 2))
    return module.message


@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_start", "on_train_batch_end"])
def test_what_a_rank_computed_of_its_shards_is_not_read(ranks: RankPool, tmp_path: Path, hook: str) -> None:
    for message in ranks.run(2, read, str(tmp_path), hook):
        assert_says(message, "this rank computed from its shards alone", "Write float(value.full_tensor())")


def notes_of_a_write(tmp: str, name: str) -> str:
    with pytest.raises((AssertionError, RuntimeError)) as raised:
        new_trainer(tmp, "fsdp2", 2).fit(Reading(name), loader(2, 2))
    return "\n".join(raised.value.__notes__)


@pytest.mark.parametrize("name", ["bias", "scale"])
def test_a_gradient_written_to_what_is_gathered_is_explained(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """torch raises an AssertionError without a word for what has one element."""
    for notes in ranks.run(2, notes_of_a_write, str(tmp_path), name):
        assert_says(notes, "were mixed in a write", "optimizer.param_groups[0]['params']")
