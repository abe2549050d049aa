"""Fits that a scheduler's signals end at random moments, and that go on until they are done: nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from fsdp_core.testing import RankPool
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import Lit, loader, means, new_trainer

__all__ = ["Outcome", "runs_with_signals"]

STEPS, RANKS = 24, 2
SECONDS = 120  # for one fit of less than a second: more is a hang

_SCONTROL = """#!/bin/sh
ls -d "{root}"/hpc_ckpt_*.ckpt/manifest.json 2>/dev/null | wc -l >> "{root}/requeued"
"""


@dataclass(frozen=True, kw_only=True)
class Send:
    """One signal, or two.

    Attributes:
        ranks: Who gets it.
        after: Seconds after the fit has begun to train.
        signum: Which signal.
        times: How often.
    """

    ranks: tuple[int, ...]
    after: float
    signum: int
    times: int


@dataclass(kw_only=True)
class Outcome:
    """What has come of many signals."""

    signals: int = 0  # that were sent while a fit trained
    ended: int = 0  # fits that one of them has ended
    too_late: int = 0  # that came in the last batches
    requeued: int = 0
    runs: int = 0  # that were done in the end


class Watched(Lit):
    """Notes the steps that it trains, and sends itself a signal from another thread."""

    def __init__(self, send: Send | None) -> None:
        super().__init__("momentum")
        self.steps: list[int] = []
        self._send, self._lock, self._over = send, threading.Lock(), False
        self.sent = False
        self.began = self.seconds = 0.0

    def on_train_start(self) -> None:
        self.began = time.monotonic()
        send = self._send
        if send is not None and rank_context().rank in send.ranks:
            timer = threading.Timer(send.after, self._kill)
            timer.daemon = True
            timer.start()

    def _kill(self) -> None:
        assert self._send is not None
        with self._lock:
            self.sent = not self._over
            for _ in range(self._send.times if self.sent else 0):
                os.kill(os.getpid(), self._send.signum)

    def on_train_end(self) -> None:
        with self._lock:
            self._over = True  # what comes later is the script's own affair
            self.seconds = time.monotonic() - self.began

    def on_exception(self, exception: BaseException) -> None:
        self.on_train_end()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.steps.append(self.global_step)
        return super().training_step(batch, batch_idx)


@contextmanager
def _slurm(folder: str) -> Iterator[None]:
    """A context in which this rank is a task of SLURM's, whose command counts complete checkpoints."""
    rank = str(rank_context().rank)
    names = {"NTASKS": str(RANKS), "NTASKS_PER_NODE": str(RANKS), "NNODES": "1", "PROCID": rank, "LOCALID": rank}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "NODEID": "0", "JOB_ID": "17", "JOB_NAME": "train"}.items():
            patch.setenv(f"SLURM_{name}", value)
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield


def _fit(strategy: str, folder: str, send: Send | None, async_save: bool) -> dict[str, Any]:
    """One job: goes on from what it finds, and ends as planned or by a signal."""
    module, code = Watched(send), None
    with _slurm(folder):
        run = new_trainer(
            folder,
            strategy,
            RANKS,
            {"async_save": async_save},
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(Path(folder) / "often", every_n_train_steps=3, save_top_k=-1)],
            plugins=[SLURMEnvironment()],
            max_steps=STEPS,
            val_check_interval=5,
            limit_val_batches=2,
        )
        try:
            run.fit(module, loader(STEPS, RANKS), loader(2, RANKS))
        except SystemExit as ended:
            code = ended.code
    state = full_state(run.strategy) if code is None else {}
    return {
        "code": code,
        "step": run.global_step,
        "sent": module.sent,
        "seconds": module.seconds,
        "steps": module.steps,
        "losses": means(module.losses),
        "state": state,
    }


def runs_with_signals(pool: RankPool, strategy: str, folder: Path, signals: int, seed: int) -> Outcome:
    """Send as many signals to fits, let each go on where it was ended, and compare every one that is done.

    Args:
        pool: The ranks.
        strategy: The strategy's name.
        folder: For checkpoints.
        signals: How many are sent.
        seed: Of the moments, the ranks and the kinds of saves. A moment is at most as late as a fit is long.
    """
    draw, outcome = random.Random(seed), Outcome()
    folder.mkdir()
    whole = pool.run(RANKS, _fit, strategy, str(folder), None, False, timeout=SECONDS)
    longest = whole[0]["seconds"]
    number = 0
    while outcome.signals < signals:
        number += 1
        place = folder / str(number)
        place.mkdir()
        stub = place / "scontrol"
        stub.write_text(_SCONTROL.format(root=place))
        stub.chmod(0o755)
        history: list[list[dict[str, Any]]] = []
        expected = 0
        while not history or history[-1][0]["code"] is not None:
            send = None
            if outcome.signals < signals:
                ranks = draw.choice([(0,), (1,), (1,), (0, 1)])
                signum = draw.choice([signal.SIGUSR1, signal.SIGTERM])
                send = Send(ranks=ranks, after=draw.uniform(0, longest), signum=signum, times=draw.choice([1, 1, 2]))
            told = f"seed {seed}, run {number}, attempt {len(history)}: {send}"
            history.append(pool.run(RANKS, _fit, strategy, str(place), send, draw.random() < 0.5, timeout=SECONDS))
            first, second = history[-1]
            sent = first["sent"] or second["sent"]
            outcome.signals += sent
            assert first["step"] == second["step"], told
            if first["code"] is None:
                outcome.too_late += sent
                assert second["code"] is None, told
                continue
            assert send is not None
            assert (first["code"], second["code"]) == (128 + send.signum, 0), told
            outcome.ended += 1
            expected += send.signum == signal.SIGUSR1
        outcome.runs += 1
        lines = (place / "requeued").read_text().split() if expected else []
        assert len(lines) == expected, f"seed {seed}, run {number}: queued again {len(lines)} times, not {expected}"
        assert all(int(one) > 0 for one in lines), "it was queued again before a checkpoint was complete"
        outcome.requeued += expected
        for rank in range(RANKS):
            done = [fits[rank] for fits in history]
            assert [step for one in done for step in one["steps"]] == list(range(STEPS)), f"seed {seed}, run {number}"
            losses = [loss for one in done for loss in one["losses"]]
            assert losses == pytest.approx(whole[rank]["losses"], abs=FP32_TOLERANCE)
            torch.testing.assert_close(
                done[-1]["state"], whole[rank]["state"], rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE
            )
    return outcome
