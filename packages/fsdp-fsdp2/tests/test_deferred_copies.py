"""An async save copies shards behind the next forward and backward pass, unless hooks may write to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from fsdp_core.checkpoint import async_save, compare, staging
from fsdp_core.errors import CheckpointError
from fsdp_core.lightning.checkpoints import deferred_copies
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.training import Lit, loader, new_trainer


class Watching(Lit):
    """Records in each forward pass how many tensors of the last save are still to be copied."""

    def __init__(self) -> None:
        super().__init__("adamw_groups")
        self.net.norm = nn.BatchNorm1d(6)
        self.pending: list[int] = []
        self.moments = 0  # how many tensors of the optimizer's are among them

    def forward(self, x: Tensor) -> Any:
        strategy = cast("Any", self.trainer.strategy)
        if strategy.async_saves is not None:
            deferred = strategy.async_saves._staging._deferred
            self.pending.append(len(deferred))
            self.moments = max(self.moments, sum("exp_avg" in one.name for one in deferred))
        return self.net(self.net.norm(x))  # whose statistics a forward pass changes


class Hooked(Watching):
    """Has a hook that may write to its parameters, after a checkpoint was requested."""

    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.parameters():
            parameter.data.mul_(0.9)


class WritesBetween(Watching):
    """Writes at the moments around a step at which no hook of a batch does."""

    def _write(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.mul_(0.9)

    def on_train_start(self) -> None:
        self._write()  # a callback has saved before

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._write()  # the save of another callback is not copied yet

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(self._write)  # called before the closure
        return optimizer


class Teaching(Watching):
    """Averages a teacher in its training step, through ``.data``, which counts no writes."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = oracle.new_net().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for kept, now in zip(self.teacher.blocks.parameters(), self.net.blocks.parameters(), strict=True):
            kept.data.lerp_(now.data, 0.5)
        return super().training_step(batch, batch_idx)


class AtStart(pl.Callback):
    """Saves before the first step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


#: What writes to a model while a save is copied.
KINDS = {"nothing": Watching, "hooks": Hooked, "a step, to a teacher": Teaching}


@contextmanager
def copied_late() -> Iterator[None]:
    """A context in which what is saved is copied, however small it is, when somebody waits for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_save, "_SECONDS_BEFORE_JOB", 1e6)
        patch.setattr(deferred_copies, "_SMALL", 0)
        yield


def folder_of(tmp: str | Path, asynchronous: bool) -> Path:
    return Path(tmp) / ("async" if asynchronous else "sync")


def assert_saved_alike(tmp: Path, *names: str) -> None:
    """Assert that checkpoints of an asynchronous run hold what those of a synchronous one do."""
    for name in names:
        assert not compare(folder_of(tmp, False) / name, folder_of(tmp, True) / name), name


def saved(tmp: str, kind: str, asynchronous: bool) -> list[int]:
    """Save after each of three steps; how many tensors were to be copied in each forward pass."""
    checkpoints = ModelCheckpoint(folder_of(tmp, asynchronous), "{step}", save_top_k=-1, every_n_train_steps=1)
    module = KINDS[kind]()
    with copied_late():
        run = new_trainer(
            tmp, "fsdp2", 2, {"async_save": asynchronous}, callbacks=[checkpoints], enable_checkpointing=True
        )
        run.fit(module, loader(3, 2))
    assert (module.moments > 20) == (asynchronous and kind != "hooks"), module.moments
    return module.pending


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_waits_for_hooks_alone(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """Checkpoints hold what they would if saves were synchronous; buffers and teachers are never copied late."""
    ranks.run(2, saved, str(tmp_path), kind, False)
    for first, *others in ranks.run(2, saved, str(tmp_path), kind, True):
        assert first == 0
        assert all(not count if kind == "hooks" else count > 10 for count in others), others
    assert_saved_alike(tmp_path, *(f"step={step}.ckpt" for step in (1, 2, 3)))


def saved_between(tmp: str, asynchronous: bool) -> list[int]:
    """The same for a module that writes between hooks, with two callbacks that save, and one at the start."""
    folder = folder_of(tmp, asynchronous)
    every: dict[str, Any] = {"save_top_k": -1, "every_n_train_steps": 1}
    twice = [
        ModelCheckpoint(folder / name, "{step}", monitor=by, mode="max", **every)
        for name, by in (("first", None), ("second", "step"))
    ]
    callbacks = [AtStart(str(folder / "start")), *twice]
    module = WritesBetween()
    with copied_late():
        run = new_trainer(tmp, "fsdp2", 2, {"async_save": asynchronous}, callbacks=callbacks, enable_checkpointing=True)
        run.fit(module, loader(3, 2))
    return module.pending


def test_what_is_written_between_hooks_is_not_in_an_earlier_save(ranks: RankPool, tmp_path: Path) -> None:
    """Before the first step, before an optimizer calls its closure, and while a further checkpoint is put together."""
    ranks.run(2, saved_between, str(tmp_path), False)
    for at_start, *later in ranks.run(2, saved_between, str(tmp_path), True):
        assert at_start == 0
        assert not any(later)  # the hook before the step was known
    assert_saved_alike(tmp_path, "start", "first/step=1.ckpt", "second/step=1.ckpt")


class WritesInItsStep(Watching):
    """Writes to a shard, or to a moment of it, in its training step, before its unit is gathered.

    Args:
        through: ``"the parameter"``, as momentum encoders do; ``".data"``, which counts no writes; ``"exp_avg"``; or a
            key of ``TO_PARTS``.
    """

    def __init__(self, through: str) -> None:
        super().__init__()
        self.through = through
        self.waiting = 0  # how many tensors of the last save are to be copied when a step begins

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.net.blocks[1].up.weight
        saves = cast("Any", self.trainer.strategy).async_saves
        self.waiting = len(saves._staging._deferred) if saves is not None else 0
        if not batch_idx:
            with torch.no_grad():
                self.view = weight.to_local()[1:2]  # before the save
        elif self.through == "a view from before":
            self.view.fill_(3.0)
        elif self.through in TO_PARTS:
            with torch.no_grad():
                TO_PARTS[self.through](self, weight)
        elif self.through == "the parameter":
            with torch.no_grad():
                weight.mul_(0.9)
        elif self.through == ".data":
            weight.data.mul_(0.9)
        else:
            self.trainer.optimizers[0].state[weight][self.through].data.mul_(0.9)
        return super().training_step(batch, batch_idx)


def _moment(module: WritesInItsStep, weight: Any) -> Any:
    return module.trainer.optimizers[0].state[weight]["exp_avg"]


def _step_fused(_: Any, weight: Any) -> None:
    part = torch.nn.Parameter(weight.to_local().detach())  # of the same memory
    part.grad = torch.ones_like(part)
    torch.optim.SGD([part], lr=0.5, fused=True).step()


@torch.library.custom_op("fsdp_tests::halve", mutates_args=("part",))
def _halve(part: Tensor) -> None:
    part.numpy()[:] *= 0.5  # as an operator in C++ writes that declares it


#: Writes to the part that this rank holds. The copy is made when it is asked for.
TO_PARTS: dict[str, Callable[[WritesInItsStep, Any], Any]] = {
    "rows": lambda _, weight: weight.to_local()[1:2].fill_(3.0),
    "assigned rows": lambda _, weight: weight.to_local().__setitem__(slice(1, 2), 3.0),
    "index_put_": lambda _, weight: weight.to_local().index_put_((torch.tensor([1]),), torch.tensor(3.0)),
    "foreach": lambda _, weight: torch._foreach_mul_([weight.to_local()[1:2]], 0.5),
    "numpy": lambda _, weight: weight.to_local().numpy().__setitem__(1, 3.0),
    "detached": lambda _, weight: weight.detach().to_local()[1:2].fill_(3.0),
    ".data, rows": lambda _, weight: weight.data.to_local()[1:2].fill_(3.0),
    "exp_avg, rows": lambda module, weight: _moment(module, weight).to_local()[1:2].fill_(3.0),
    "set_": lambda _, weight: weight.to_local().set_(weight.to_local().clone()),
    "a fused step": _step_fused,
    "an operator of one's own": lambda _, weight: _halve(weight.detach().to_local()[1:2]),
}


def written_in_a_step(tmp: str, through: str) -> str:
    with copied_late(), pytest.MonkeyPatch.context() as patch:
        if through == "a view from before":
            patch.setattr(staging, "differing", lambda *_: [])  # as if these were none of the elements that are noted
        saves = ModelCheckpoint(f"{tmp}/{through}", "{step}", every_n_train_steps=1)
        run = new_trainer(tmp, "fsdp2", 2, {"async_save": True}, callbacks=[saves], enable_checkpointing=True)
        return refusal(CheckpointError, lambda: run.fit(WritesInItsStep(through), loader(3, 2)))


@pytest.mark.parametrize(
    ("through", "name"),
    [
        ("the parameter", "model/net.blocks.1.up.weight"),
        (".data", "model/net.blocks.1.up.weight"),
        ("exp_avg", "net.blocks.1.up.weight"),
        ("a view from before", "net.blocks.1.up.weight"),
    ],
)
def test_a_step_that_writes_to_shards_makes_the_save_fail(
    ranks: RankPool, tmp_path: Path, through: str, name: str
) -> None:
    for told in ranks.run(2, written_in_a_step, str(tmp_path), through):
        assert_says(told, f"{name}", "was written to while it was being copied", "on_train_batch_end")
        assert ("exp_avg" in told) == (through == "exp_avg")


def saved_before_a_write(tmp: str, through: str, asynchronous: bool) -> None:
    """Save after the first step. The second writes."""
    with copied_late(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "differing", lambda *_: [])  # as if these were none of the elements that are noted
        saves = ModelCheckpoint(folder_of(tmp, asynchronous), "{step}", save_top_k=-1, every_n_train_steps=1)
        run = new_trainer(tmp, "fsdp2", 2, {"async_save": asynchronous}, callbacks=[saves], enable_checkpointing=True)
        module = WritesInItsStep(through)
        run.fit(module, loader(3, 2))
        assert (module.waiting > 10) == asynchronous


@pytest.mark.parametrize("through", TO_PARTS)
def test_a_save_holds_what_was_before_a_write_to_a_part(ranks: RankPool, tmp_path: Path, through: str) -> None:
    for asynchronous in (False, True):
        ranks.run(2, saved_before_a_write, str(tmp_path), through, asynchronous)
    assert_saved_alike(tmp_path, "step=1.ckpt")
