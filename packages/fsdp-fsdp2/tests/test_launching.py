"""Every way to start a script: real processes, each with a time limit, and none of them left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.nn.functional import mse_loss
from torch.utils.data import DistributedSampler

SCRIPTS = Path(__file__).parent / "scripts"
SECONDS = 120  # for one start; it takes ten or so
TOKEN = "FSDP_TESTS_STARTED_THIS"
FULL = 66  # numbers in the model: 2 × 32 weights and 2 biases


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A start that has ended.

    Attributes:
        status: The exit status; negative for a signal.
        output: What its processes wrote.
        seconds: How long it took.
    """

    status: int
    output: str
    seconds: float

    @property
    def said(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]

    def reports(self, front_end: str) -> list[dict[str, Any]]:
        return sorted((one for one in self.said if one.get("front_end") == front_end), key=lambda one: one["rank"])


def started_by(token: str) -> list[psutil.Process]:
    """The processes that still run of those that a start began, at any depth."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def start(
    tmp: Path, *command: str, meanwhile: Callable[[subprocess.Popen[bytes], Path], None] | None = None, **environ: str
) -> Ended:
    """Run Python with a command line in the folder of the scripts, and see that it leaves no process behind.

    Args:
        tmp: Where its output goes: a file, for a pipe would stay open as long as a process that is left behind.
        *command: What follows ``python``.
        meanwhile: Is given the process and the file of its output while it runs.
        **environ: Environment variables.
    """
    token, began = uuid.uuid4().hex, time.monotonic()
    inherited = {k: v for k, v in os.environ.items() if k not in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "LOCAL_RANK")}
    file = tmp / f"{token}.txt"
    with file.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=SCRIPTS,
            env={**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", TOKEN: token, **environ},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        if meanwhile is not None:
            meanwhile(process, file)
        status = process.wait(timeout=SECONDS)
        seconds = time.monotonic() - began
        # a rank may end a little after the one that started it
        _, left = psutil.wait_procs(started_by(token), timeout=10)
        assert not left, f"{left} were left behind:\n{file.read_text()}"
    except subprocess.TimeoutExpired:
        pytest.fail(f"{command} did not end within {SECONDS} s:\n{file.read_text()}")
    finally:
        for one in started_by(token):
            one.kill()
        process.wait()
    return Ended(status=status, output=file.read_text(), seconds=seconds)


def val_loss(passes: int, *, shuffled: bool) -> float:
    """What one process of plain torch gets, on the batches that the ranks saw together; a row per rank and step."""
    L.seed_everything(1, verbose=False)
    layer = BoringModel().layer
    L.seed_everything(2, verbose=False)
    train = RandomDataset(32, 64)
    L.seed_everything(3, verbose=False)
    val = RandomDataset(32, 64).data[:4]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    samplers = [DistributedSampler(train, 2, rank, shuffle=shuffled, seed=2) for rank in (0, 1)]
    for epoch in range(passes):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for rows in list(zip(*samplers, strict=True))[:3]:
            optimizer.zero_grad()
            output = layer(train.data[list(rows)])
            mse_loss(output, torch.ones_like(output)).backward()
            optimizer.step()
    output = layer(val)
    return mse_loss(output, torch.ones_like(output)).item()


def assert_trained(ended: Ended, *front_ends: str, passes: int = 2, **expected: Any) -> None:
    """Both ranks held half of the model, got the oracle's loss, and went away quietly."""
    assert ended.status == 0, ended.output
    for trouble in ("Traceback", "terminate called", "Aborted", "destroy_process_group() was not called"):
        assert trouble not in ended.output, ended.output
    for front_end in front_ends:
        reports = ended.reports(front_end)
        assert [one["rank"] for one in reports] == [0, 1], ended.output
        module = "fabric" if front_end == "fabric" else "trainer"
        want = val_loss(passes, shuffled=module == "trainer")  # the Trainer shuffles what it trains on
        for one in reports:
            assert one["strategy"] == f"fsdp_fsdp2.{module}.FSDP2Strategy"
            assert one["world_size"] == 2
            assert one["held"] == FULL // 2
            assert one["val_loss"] == pytest.approx(want, abs=1e-5)
            assert {key: one[key] for key in expected} == expected


def test_plain_python_under_trainer_then_fabric(tmp_path: Path) -> None:
    """Started by the Trainer; ``fit`` twice, ``validate``, and Fabric in the same script."""
    assert_trained(start(tmp_path, "train.py", "trainer", "fabric"), "trainer", "fabric", cpu_offload=False)


def test_plain_python_under_fabric_with_offload(tmp_path: Path) -> None:
    """Started by Fabric, as a module, which each rank's command line repeats; and the second name."""
    ended = start(tmp_path, "-m", "train", "fabric", "--strategy=fsdp2_cpu_offload")
    assert_trained(ended, "fabric", cpu_offload=True)


def test_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    assert_trained(start(tmp_path, *torchrun, "train.py", "trainer", "fabric"), "trainer", "fabric")


def test_spawned_workers(tmp_path: Path) -> None:
    assert_trained(start(tmp_path, "spawned.py"), "trainer", "fabric")


CLI = ("fit", "--trainer.limit_train_batches=3", "--trainer.limit_val_batches=2")


def test_command_line_takes_the_name(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    ended = start(tmp_path, "-m", "cli", *CLI, "--trainer.strategy=fsdp2")
    assert_trained(ended, "cli", passes=1, cpu_offload=False)


def test_command_line_takes_the_class_with_options(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    options = (
        "--trainer.strategy=fsdp_fsdp2.FSDP2Strategy",
        "--trainer.strategy.cpu_offload=true",
        "--trainer.strategy.state_dict_type=full",
        "--trainer.strategy.auto_wrap_policy=auto",
        "--trainer.strategy.reshard_after_forward=false",
    )
    ended = start(tmp_path, "cli.py", *CLI, *options)
    assert_trained(ended, "cli", passes=1, cpu_offload=True, state_dict_type="full")


def test_without_torchs_entry_points_an_import_does_it(tmp_path: Path) -> None:
    ended = start(tmp_path, "by_hand.py", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ended.status == 0, ended.output
    (told,) = [one["before"] for one in ended.said if "before" in one]
    for message in told:
        assert message.startswith("ValueError: You selected an invalid strategy name: `strategy='fsdp2'`")
    for front_end in ("trainer", "fabric"):
        (report,) = ended.reports(front_end)
        assert (report["world_size"], report["held"]) == (1, FULL)


def test_stand_alone_packages_are_told_which_import_to_use(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    pytest.importorskip("lightning_fabric")
    ended = start(tmp_path, "stand_alone.py")
    assert ended.status == 0, ended.output
    ((trainer, fabric),) = [one["told"] for one in ended.said]
    for message in (trainer, fabric):
        assert message.startswith("StrategyUnavailableError: strategy 'fsdp2' works with the package 'lightning'")
    assert "Write `import lightning.pytorch as pl`" in trainer
    assert "Write `from lightning.fabric import Fabric`" in fabric


@pytest.mark.parametrize(("front_end", "rank"), [("trainer", 1), ("fabric", 0)])
def test_exception_on_one_rank_ends_the_run(tmp_path: Path, front_end: str, rank: int) -> None:
    ended = start(tmp_path, "train.py", front_end, f"--fails-on={rank}")
    assert ended.status != 0
    assert f"RuntimeError: rank {rank} fails" in ended.output
    assert not ended.reports(front_end)
    assert ended.seconds < 60


def test_exception_on_one_rank_ends_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    ended = start(tmp_path, *torchrun, "train.py", "trainer", "--fails-on=1")
    assert ended.status == 1
    assert "RuntimeError: rank 1 fails" in ended.output
    assert not ended.reports("trainer")


def interrupt(process: subprocess.Popen[bytes], output: Path) -> None:
    """As Ctrl-C in a terminal does, once both ranks train."""
    deadline = time.monotonic() + SECONDS
    while output.read_text().count('{"reached": "step 1"}') < 2 and process.poll() is None:
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no process groups to send SIGINT to")
def test_interrupt_ends_every_rank(tmp_path: Path) -> None:
    ended = start(tmp_path, "train.py", "trainer", "--forever", meanwhile=interrupt)
    assert ended.status == 1, ended.output
    assert "Detected KeyboardInterrupt" in ended.output
    assert "terminate called" not in ended.output
