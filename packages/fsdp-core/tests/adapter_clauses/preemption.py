"""A run that a scheduler ends: a signal to any rank ends all of them at one step, after a checkpoint to go on from."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

from fsdp_core.errors import ShardingError
from fsdp_core.testing import Ranks
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.oracle import BATCH, FP32_TOLERANCE, dataset, new_net
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.base_class import Clauses, on_ranks
from fsdp_core.testing.training import Lit, loader, means, new_fabric, new_trainer

__all__ = ["PreemptionSuite"]

STEPS = 8

#: What a stub of SLURM's command writes down: the job, and whether the checkpoint was complete by then.
_SCONTROL = """#!/bin/sh
echo "$@" $(ls "{root}"/hpc_ckpt_1.ckpt/manifest.json 2>/dev/null) >> "{root}/requeued"
"""


class _Told(Lit):
    """Sends a signal to its own process in a step."""

    def __init__(self, signum: int | None, rank: int, step: int) -> None:
        super().__init__("momentum")
        self.signum, self.at = signum, (rank, step)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if self.signum is not None and (rank_context().rank, batch_idx) == self.at:
            os.kill(os.getpid(), self.signum)
            os.kill(os.getpid(), self.signum)
        return super().training_step(batch, batch_idx)


@contextmanager
def _slurm(tmp: str) -> Iterator[None]:
    """A context in which this rank is a task of SLURM's, whose command writes down what it was asked."""
    rank = str(rank_context().rank)
    names = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "PROCID": rank, "LOCALID": rank, "NODEID": "0", "JOB_ID": "17"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "JOB_NAME": "train"}.items():
            patch.setenv(f"SLURM_{name}", value)
        patch.setenv("PATH", f"{tmp}:{os.environ['PATH']}")
        yield


def _fit(
    strategy: str, tmp: str, signum: int | None, at: tuple[int, int], resume: str | None, kind: str
) -> dict[str, Any]:
    """Fit, and return how it ended, after which step, with which losses, and what the model is then."""
    module, code = _Told(signum, *at), None
    asked: dict[str, Any] = {"enable_checkpointing": True, "max_steps": STEPS}
    if kind == "callback":
        asked["callbacks"] = [OnExceptionCheckpoint(tmp)]
    with _slurm(tmp) if kind == "slurm" else nullcontext():
        if kind == "slurm":
            asked["plugins"] = [SLURMEnvironment()]
        run = new_trainer(tmp, strategy, 2, {"async_save": True} if kind == "callback" else None, **asked)
        before = signal.getsignal(signal.SIGTERM)
        try:
            run.fit(module, loader(STEPS, 2), ckpt_path=resume)
        except SystemExit as ended:
            code = ended.code
        assert signal.getsignal(signal.SIGTERM) is before
    state = full_state(run.strategy) if code is None else {}
    told = run.received_sigterm
    return {"code": code, "step": run.global_step, "losses": means(module.losses), "state": state, "told": told}


#: What finds the checkpoint, by how it was saved.
_RESUMES = {"plain": "hpc", "callback": None, "slurm": None}


def _loop(strategy: str, folder: str, signum: int | None, at: tuple[int, int], resume: bool) -> dict[str, Any]:
    """Take steps under Fabric until the ranks are told to end; the step after which they were, and the model."""
    before = signal.getsignal(signal.SIGTERM)
    fabric = new_fabric(strategy, 2)
    used: Any = fabric.strategy
    torch.manual_seed(0)
    net = new_net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if resume:
        fabric.load(folder, state)
    try:
        for step, batch in list(enumerate(loader(STEPS, 2)))[state["step"] :]:
            fabric.backward(mse_loss(model(fabric.to_device(batch[0])), fabric.to_device(batch[1])))
            optimizer.step()
            optimizer.zero_grad()
            if signum is not None and (rank_context().rank, step) == at:
                os.kill(os.getpid(), signum)
            state["step"] = step + 1
            if used.told_to_end():
                fabric.save(folder, state)
                used.requeue()  # not a job of SLURM's
                break
    finally:
        signal.signal(signal.SIGTERM, before)
    return {"step": state["step"], "state": full_state(fabric.strategy)}


class _FewerOnOneRank(IterableDataset[Any]):
    """Samples of which nobody knows how many there are before they have come."""

    def __iter__(self) -> Iterator[Any]:
        data = dataset(BATCH * STEPS)
        yield from (data[row] for row in range(8 if rank_context().rank == 1 else 12))


def _end_apart(strategy: str, tmp: str) -> str:
    run = new_trainer(tmp, strategy, 2, max_epochs=1, max_steps=-1)
    return refusal(ShardingError, lambda: run.fit(Lit(), DataLoader(_FewerOnOneRank(), batch_size=2)))


class _OwnRate(Lit):
    """Multiplies its learning rate by another number on rank 1: by half, or by one that only rounding tells apart."""

    def __init__(self, kind: str) -> None:
        super().__init__("adamw_groups")
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        # the last two have six digits each, which differ
        factors = {"scheduler": (1.0, 0.5), "rounding": (0.12345649, 0.12345651)}.get(self.kind, (1.0, 1.0))
        own = factors[rank_context().rank]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: own if step > 1 else 1.0)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_end(self, *batch: Any) -> None:
        super().on_train_batch_end(*batch)
        if self.kind == "hook" and rank_context().rank == 1 and self.trainer.global_step == 2:
            self.trainer.optimizers[0].param_groups[-1]["weight_decay"] = 0.25


def _change_apart(strategy: str, tmp: str, kind: str) -> tuple[int, str]:
    run = new_trainer(tmp, strategy, 2, max_steps=4)
    module = _OwnRate(kind)
    if kind == "rounding":
        run.fit(module, loader(4, 2))
        return run.global_step, ""
    told = refusal(ShardingError, lambda: run.fit(module, loader(4, 2)))
    return run.global_step, told


class PreemptionSuite(Clauses):
    """A signal to any rank ends a fit on all ranks at one step, and the next fit goes on from there."""

    @on_ranks("processes")
    @pytest.mark.parametrize(
        ("kind", "signum", "at"),
        [
            ("plain", signal.SIGTERM, (1, 3)),
            ("callback", signal.SIGTERM, (0, 5)),
            ("slurm", signal.SIGUSR1, (1, 2)),
        ],
        ids=["SIGTERM", "SIGTERM, a callback saves", "SLURM"],
    )
    def test_a_signal_to_one_rank(
        self, ranks: Ranks, tmp_path: Path, kind: str, signum: int, at: tuple[int, int]
    ) -> None:
        """All ranks must end after the same step, with a complete checkpoint, from which a run goes on exactly."""
        stub = tmp_path / "scontrol"
        stub.write_text(_SCONTROL.format(root=tmp_path))
        stub.chmod(0o755)
        whole = ranks.run(2, _fit, self.strategy, str(tmp_path), None, (0, 0), None, "plain")
        ended = ranks.run(2, _fit, self.strategy, str(tmp_path), signum, at, None, kind)
        assert [(one["code"], one["told"]) for one in ended] == [(128 + signum, True), (0, True)]
        (step,) = {one["step"] for one in ended}
        assert step == at[1] + 1, f"told in step {at[1]}, the fit has ended after step {step}"
        if kind == "slurm":
            job, *complete = (tmp_path / "requeued").read_text().split()[1:]
            assert job == "17"
            assert complete, "it was queued again before its checkpoint was complete"
        resumed = ranks.run(2, _fit, self.strategy, str(tmp_path), None, (0, 0), _RESUMES[kind], kind)
        for first, rest, want in zip(ended, resumed, whole, strict=True):
            assert rest["code"] is None
            assert first["losses"] + rest["losses"] == pytest.approx(want["losses"], abs=FP32_TOLERANCE)
            torch.testing.assert_close(rest["state"], want["state"], rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)

    @on_ranks("processes")
    def test_a_signal_to_one_rank_under_fabric(self, ranks: Ranks, tmp_path: Path) -> None:
        """``told_to_end()`` must say so on all ranks after the same step, and a run go on from what was saved then."""
        folder = str(tmp_path / "checkpoint")
        whole = ranks.run(2, _loop, self.strategy, f"{folder}-unused", None, (0, 0), False)
        ended = ranks.run(2, _loop, self.strategy, folder, signal.SIGTERM, (1, 3), False)
        assert [one["step"] for one in ended] == [4, 4], "the ranks were not told to end after the same step"
        resumed = ranks.run(2, _loop, self.strategy, folder, None, (0, 0), True)
        for rest, want in zip(resumed, whole, strict=True):
            assert rest["step"] == STEPS, f"the run has gone on until step {rest['step']} only"
            torch.testing.assert_close(rest["state"], want["state"], rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)

    @on_ranks("processes")
    @pytest.mark.parametrize("kind", ["scheduler", "hook", "rounding"])
    def test_a_rate_that_one_rank_changes(self, ranks: Ranks, tmp_path: Path, kind: str) -> None:
        """A learning rate or the like that differs between ranks must raise before the next step, and say where."""
        which = {
            "scheduler": ["'lr' in param group 0", "0.005 on"],
            "hook": ["'weight_decay' in param group 1", "0.25 on"],
        }
        for step, told in ranks.run(2, _change_apart, self.strategy, str(tmp_path), kind):
            if kind == "rounding":
                assert (step, told) == (4, "")
                continue
            assert step == 2, f"the fit has ended after step {step}"
            assert_says(told, "after batch 1 of epoch 0", *which[kind], "on rank 0", "on rank 1", "sync_dist=True")

    @on_ranks("processes")
    def test_an_epoch_that_ends_on_one_rank(self, ranks: Ranks, tmp_path: Path) -> None:
        """All ranks must raise at that batch, with the rank whose epoch is over, instead of waiting for each other."""
        for told in ranks.run(2, _end_apart, self.strategy, str(tmp_path)):
            assert_says(told, "the epoch is over on rank 1 after batch 3 of epoch 0", "as many batches")
