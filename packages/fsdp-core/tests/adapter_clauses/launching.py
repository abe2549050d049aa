"""Launching scripts, and how they end; tests-integration/launchers has torchrun and others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.nn.functional import mse_loss
from torch.utils.data import DistributedSampler

from adapter_clauses.scripts import start_script
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing.launching.forking import scaled_limit
from fsdp_core.testing.launching.processes import TIME_LIMIT, FinishedScript
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.suite.base_class import Clauses, starts_scripts

__all__ = ["LaunchingSuite"]

FULL = 66  # numbers in the model: 2 × 32 weights and 2 biases


def _val_loss(*, shuffled: bool) -> float:
    """The validation loss of one process of plain torch on the ranks' batches, of one row per rank."""
    L.seed_everything(1, verbose=False)
    layer = BoringModel().layer
    L.seed_everything(2, verbose=False)
    train = RandomDataset(32, 64)
    L.seed_everything(3, verbose=False)
    val = RandomDataset(32, 64).data[:4]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    samplers: list[DistributedSampler[Any]] = [
        DistributedSampler(train, 2, rank, shuffle=shuffled, seed=2) for rank in (0, 1)
    ]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for rows in list(zip(*samplers, strict=True))[:3]:
            optimizer.zero_grad()
            output = layer(train.data[list(rows)])
            mse_loss(output, torch.ones_like(output)).backward()
            optimizer.step()
    output = layer(val)
    return mse_loss(output, torch.ones_like(output)).item()


def _interrupt(process: subprocess.Popen[bytes], output: Path) -> None:
    """Send SIGINT, as Ctrl-C does, once both ranks are training."""
    deadline = time.monotonic() + scaled_limit(TIME_LIMIT)
    while output.read_text().count('{"reached": "step 1"}') < 2 and process.poll() is None:
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)


class LaunchingSuite(Clauses):
    """However a script is launched, its ranks connect, train as the oracle does, and exit.

    These clauses apply to ranks that are processes. Threads end when ``fit`` returns, and a controller starts nothing.
    """

    def assert_trained(self, ended: FinishedScript, *front_ends: str) -> None:
        """Assert that both ranks held half of the model, got the oracle's loss, and exited without errors."""
        assert ended.status == 0, ended.output
        for trouble in ("Traceback", "terminate called", "Aborted", "destroy_process_group() was not called"):
            assert trouble not in ended.output, ended.output
        for front_end in front_ends:
            reports = ended.reports(front_end)
            assert [one["rank"] for one in reports] == [0, 1], ended.output
            class_of: FrontEnd = "fabric" if front_end == "fabric" else "trainer"
            used = self.strategy_class(class_of)
            class_path = f"{used.__module__}.{used.__qualname__}"
            want = _val_loss(shuffled=class_of == "trainer")  # the Trainer shuffles training data
            for one in reports:
                assert one["strategy"] == class_path
                assert one["world_size"] == 2, f"rank {one['rank']} reports world size {one['world_size']} instead of 2"
                assert one["held"] == FULL // 2, f"rank {one['rank']} holds {one['held']} of {FULL} elements, not half"
                assert one["val_loss"] == pytest.approx(want, abs=FP32_TOLERANCE)

    @starts_scripts
    def test_plain_python_under_trainer_then_fabric(self, tmp_path: Path) -> None:
        """A script that the Trainer launches, here as a module, must fit twice, validate, and use Fabric afterwards."""
        ended = start_script(tmp_path, "-m", "train", "trainer", "fabric", f"--strategy={self.strategy}")
        self.assert_trained(ended, "trainer", "fabric")

    @starts_scripts
    def test_spawned_workers(self, tmp_path: Path) -> None:
        """Ranks spawned with ``torch.multiprocessing`` must train under Trainer and Fabric."""
        self.assert_trained(start_script(tmp_path, "spawned.py", self.strategy), "trainer", "fabric")

    @starts_scripts
    @pytest.mark.parametrize(("front_end", "rank"), [("trainer", 1), ("fabric", 0)])
    def test_exception_on_one_rank_ends_the_run(self, tmp_path: Path, front_end: str, rank: int) -> None:
        """An exception on one rank must end all ranks within a minute, with a nonzero exit status."""
        ended = start_script(tmp_path, "train.py", front_end, f"--fails-on={rank}", f"--strategy={self.strategy}")
        assert ended.status != 0, f"the script exited with status 0 although a rank failed: {ended.output}"
        assert f"RuntimeError: rank {rank} fails" in ended.output
        assert not ended.reports(front_end)
        assert ended.seconds < 60, f"the run took {ended.seconds:.0f} s to end, which should be less than 60 s"

    @starts_scripts
    @pytest.mark.skipif(sys.platform == "win32", reason="there are no process groups to send SIGINT to")
    def test_interrupt_ends_every_rank(self, tmp_path: Path) -> None:
        """An interrupt (Ctrl-C) must end every rank without a crash."""
        ended = start_script(
            tmp_path, "train.py", "trainer", "--forever", f"--strategy={self.strategy}", meanwhile=_interrupt
        )
        # Lightning kills the other ranks, and its watcher of ranks, if it looks just then, kills this one too
        was_watched = "Forcefully terminating all other processes" in ended.output
        assert ended.status == 1 or (ended.status == -signal.SIGKILL and was_watched), ended.output
        assert "Detected KeyboardInterrupt" in ended.output
        assert "terminate called" not in ended.output
