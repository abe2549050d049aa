"""SLURM, by its variables and a stub of its command: signals at random moments, and the example as its tasks run it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from example import assert_as_one_process, said
from signals import runs_with_signals

from fsdp_core.testing import RankPool
from fsdp_core.testing.launching.forking import start_script
from fsdp_core.testing.launching.processes import fresh_environment


@pytest.mark.drawn
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp_native"])
def test_signals_at_random_moments(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    """Four of the 200 that ``slow_signals.py`` sends."""
    outcome = runs_with_signals(ranks, strategy, tmp_path / "runs", signals=4, seed=7)
    assert outcome.signals == 4
    assert outcome.ended


class Job:
    """The tasks of one job of SLURM's, each a process, as ``srun`` starts them."""

    def __init__(self, folder: Path, number: int, *words: str, port: int) -> None:
        self.outputs = [folder / f"job-{number}-{rank}.txt" for rank in range(2)]
        shared = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1", "NODEID": "0", "JOB_ID": "17"}
        self.tasks = []
        for rank, output in enumerate(self.outputs):
            output.touch()
            own = {**shared, "PROCID": str(rank), "LOCALID": str(rank), "JOB_NAME": "train"}
            environment = {
                **fresh_environment(),
                **{f"SLURM_{name}": value for name, value in own.items()},
                "PATH": f"{folder}:{os.environ['PATH']}",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                "GATES": "2:3",
                "GATES_IN": str(folder / str(number)),
            }
            gated = Path(__file__).parent / "gated.py"
            self.tasks.append(start_script(gated, *words, folder=folder, output=output, environment=environment))

    def until(self, words: str) -> None:
        deadline = time.monotonic() + 100
        while not all(words in output.read_text() for output in self.outputs):
            assert time.monotonic() < deadline, self.told
            time.sleep(0.05)

    @property
    def told(self) -> str:
        return "".join(output.read_text() for output in self.outputs)

    def ended(self) -> list[Any]:
        for task in self.tasks:
            task.join(timeout=100)
        return [task.exitcode for task in self.tasks]


@pytest.mark.drawn
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp_native"])
def test_a_job_is_queued_again_and_goes_on(tmp_path: Path, free_port: int, strategy: str) -> None:
    """The example, as tasks of a job that gets SIGUSR1 on its second task, and as the job that follows it."""
    stub = tmp_path / "scontrol"
    stub.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued; ls {tmp_path} >> {tmp_path}/requeued\n')
    stub.chmod(0o755)
    words = (strategy, "--folder", str(tmp_path / "runs"))
    first = Job(tmp_path, 1, *words, "--steps=100000", port=free_port)  # it ends by the signal
    first.until("waits at 2:3")
    os.kill(first.tasks[1].pid or 0, signal.SIGUSR1)
    (tmp_path / "1").mkdir()
    (tmp_path / "1/2-3").touch()
    assert first.ended() == [128 + signal.SIGUSR1, 0], first.told
    asked = (tmp_path / "requeued").read_text()
    assert asked.startswith("requeue 17\n")
    assert "hpc_ckpt_1.ckpt" in asked, "it was queued again before its checkpoint was complete"
    (tmp_path / "2").mkdir()
    (tmp_path / "2/2-3").touch()
    done = max(one["step"] for one in said(first.told, "trainer")) + 1
    assert done > 3
    second = Job(tmp_path, 2, *words, f"--steps={done + 3}", port=free_port)
    assert second.ended() == [0, 0], second.told
    assert min(one["step"] for one in said(second.told, "trainer")) == done, "the signal has cost a step"
    assert_as_one_process(said(first.told, "trainer"), range(done))
    assert_as_one_process(said(second.told, "trainer"), range(done, done + 3))
