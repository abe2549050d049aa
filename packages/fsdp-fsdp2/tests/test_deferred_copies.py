"""An async save copies shards behind the next forward and backward pass, unless hooks may write to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from fsdp_core.checkpoint import async_save
from fsdp_core.testing import RankPool
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.checkpoints.trainer_checkpoints import assert_bit_equal
from fsdp_core.testing.training import Lit, loader, new_trainer


class Watching(Lit):
    """Records in each forward pass how many tensors of the last save are still to be copied."""

    def __init__(self) -> None:
        super().__init__("adamw_groups")
        self.net.norm = nn.BatchNorm1d(6)
        self.pending: list[int] = []

    def forward(self, x: Tensor) -> Any:
        strategy = cast("Any", self.trainer.strategy)
        if strategy.async_saves is not None:
            self.pending.append(len(strategy.async_saves._staging._deferred))
        return self.net(self.net.norm(x))  # whose statistics a forward pass changes


class Hooked(Watching):
    """Has a hook that may write to its parameters, after a checkpoint was requested."""

    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.parameters():
            parameter.data.mul_(0.9)


def saved(tmp: str, hooked: bool, asynchronous: bool) -> tuple[list[int], list[dict[str, Any]]]:
    """How many tensors were to be copied in each forward pass, and what the checkpoints of three steps hold."""
    async_save._HEAD_START, kept = 1e6, async_save._HEAD_START  # the thread waits until somebody waits for it
    try:
        folder = f"{tmp}/{'async' if asynchronous else 'sync'}"
        checkpoints = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
        module = Hooked() if hooked else Watching()
        run = new_trainer(
            tmp, "fsdp2", 2, {"async_save": asynchronous}, callbacks=[checkpoints], enable_checkpointing=True
        )
        run.fit(module, loader(3, 2))
    finally:
        async_save._HEAD_START = kept
    return module.pending, [_state_of(tmp, f"{folder}/step={step}.ckpt", hooked) for step in (1, 2, 3)]


def _state_of(tmp: str, path: str, hooked: bool) -> dict[str, Any]:
    read: dict[str, Any] = {}

    class Reading(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            read["model"] = full_state(trainer.strategy)
            read["optimizer"] = full_optimizer_state(trainer.strategy, trainer.optimizers[0])
            trainer.should_stop = True

    module = Hooked() if hooked else Watching()
    new_trainer(tmp, "fsdp2", 2, callbacks=[Reading()], max_epochs=9).fit(module, loader(3, 2), ckpt_path=path)
    return read


@pytest.mark.parametrize("hooked", [False, True])
def test_a_save_waits_for_hooks_alone(ranks: RankPool, tmp_path: Path, hooked: bool) -> None:
    """Checkpoints hold what they would if saves were synchronous; buffers are never copied late."""
    want = ranks.run(2, saved, str(tmp_path), hooked, False)
    got = ranks.run(2, saved, str(tmp_path), hooked, True)
    for (pending, states), (_, synchronous) in zip(got, want, strict=True):
        first, *others = pending
        assert first == 0
        assert all(not count if hooked else count > 10 for count in others), pending
        for mine, theirs in zip(states, synchronous, strict=True):
            assert_bit_equal(mine, theirs)
