"""Notebooks: the cells of the example in a kernel, and cells that are interrupted, fail, or whose kernel is killed."""

from __future__ import annotations

import ast
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from undisturbed import AFTERWARDS, losses_of_one_process

from fsdp_core.testing.launching.processes import fresh_environment
from fsdp_core.testing.oracle import FP32_TOLERANCE

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "notebook.py"
SECONDS = 240  # for what takes ten

#: A fit that ends by itself after minutes, and says when both ranks are in it.
ENDLESS = """
import os, pathlib, time

class Endless(Model):
    def training_step(self, batch, batch_idx):
        pathlib.Path(f"{MARKS}/{os.getpid()}").touch()
        time.sleep(0.1)
        return super().training_step(batch, batch_idx)

trainer = L.Trainer(strategy="fsdp2", accelerator="cpu", devices=2, max_epochs=1000, logger=False,
                    enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Endless(), data)
"""

FAILS = """
class Fails(Model):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == 1:
            raise RuntimeError("a rank has failed")
        return super().training_step(batch, batch_idx)

trainer = L.Trainer(strategy="fsdp2", accelerator="cpu", devices=2, max_epochs=1, logger=False,
                    enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Fails(), data)
"""

HERE = """
import os

class Here(Model):
    def on_train_start(self):
        print("process", os.getpid())

L.Trainer(strategy="fsdp2", accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
          enable_progress_bar=False).fit(Here(), data)
"""

#: Threads of the notebook's process, which a forked one lacks.
THREADS = "torch.set_num_threads(2); (torch.randn(1500, 1500) @ torch.randn(1500, 1500)).exp().sum()"


class CellError(Exception):
    """What a cell has raised, with its traceback."""


class Kernel:
    """A kernel that runs cells."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self._manager, self._client = manager, client

    def run(self, code: str) -> str:
        """Run a cell, and return what it has printed."""
        printed: list[str] = []

        def collect(message: dict[str, Any]) -> None:
            printed.append(message["content"].get("text", ""))

        reply = self._client.execute_interactive(code, timeout=SECONDS, output_hook=collect)
        _check(reply["content"])
        return "".join(printed)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._manager.provisioner.pid)

    def ranks(self) -> list[psutil.Process]:
        """What the kernel has started."""
        return self.process.children(recursive=True)

    def begin(self, code: str) -> str:
        """Begin a cell, and return the id of its message."""
        return str(self._client.execute(code))

    def end(self, message: str) -> None:
        """Wait for the end of a cell."""
        while True:
            reply = self._client.get_shell_msg(timeout=SECONDS)
            if reply["parent_header"]["msg_id"] == message:
                return _check(reply["content"])

    def interrupt(self) -> None:
        """What the button does."""
        self._manager.interrupt_kernel()


def _check(content: dict[str, Any]) -> None:
    if content["status"] != "ok":
        coloured = "\n".join(content.get("traceback", [str(content)]))
        raise CellError(re.sub(r"\x1b\[[0-9;]*m", "", coloured))


@contextmanager
def started_kernel(folder: Path) -> Iterator[Kernel]:
    manager, client = start_new_kernel(startup_timeout=SECONDS, cwd=str(folder), env=fresh_environment())
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with started_kernel(tmp_path_factory.mktemp("notebook")) as made:
        yield made


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("strategy", ["fsdp_native", "fsdp2"])  # the tests that follow see what the last has made
def test_cells_train_as_one_process(kernel: Kernel, strategy: str) -> None:
    text = EXAMPLE.read_text().replace("devices=2", 'devices=2, accelerator="cpu"').replace("fsdp2", strategy)
    first, *cells = re.split(r"^# %%.*\n", text, flags=re.MULTILINE)
    assert first.startswith('"""')
    assert len(cells) == 4
    printed = ""
    for number, cell in enumerate(cells):
        printed += kernel.run(cell)
        if number == 0:
            kernel.run(THREADS)
    assert "was lost" not in printed, "a rank that has ended as it was to is taken for a lost one"
    told = dict(re.findall(r"^((?:loss|checkpoint)[\w ]*): (.*)$", printed, flags=re.MULTILINE))
    want = losses_of_one_process(epochs=2)
    assert float(told["loss of the last step"]) == pytest.approx(want[8], abs=FP32_TOLERANCE)
    assert float(told["loss over all data"]) == pytest.approx(want[AFTERWARDS], abs=FP32_TOLERANCE)
    assert re.search(r"epoch=1-step=8(-v1)?\.ckpt$", told["checkpoint"])  # the other strategy's is there already
    assert ast.literal_eval(told["losses under Fabric"]) == pytest.approx(
        [want[step] for step in range(1, 5)], abs=FP32_TOLERANCE
    )
    assert not kernel.ranks()


def test_weights_that_come_back_are_those_of_the_checkpoint(kernel: Kernel) -> None:
    told = kernel.run(
        "loaded = Model.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)\n"
        "print(all(bool((a == b).all()) for a, b in zip(model.parameters(), loaded.parameters(), strict=True)))"
    )
    assert told.splitlines()[-1] == "True"


def test_what_a_trainer_knows_and_refuses_after_its_fit(kernel: Kernel) -> None:
    assert kernel.run("print(trainer.global_step, trainer.current_epoch)").split() == ["8", "2"]
    with pytest.raises(CellError, match=r"have ended with the call of this notebook(.|\n)*ModelCheckpoint"):
        kernel.run("trainer.save_checkpoint('late.ckpt')")
    with pytest.raises(CellError, match=r"has fitted in this notebook before(.|\n)*build a Trainer"):
        kernel.run("trainer.fit(model, data)")


def test_an_error_of_a_rank_is_the_cells(kernel: Kernel) -> None:
    with pytest.raises(CellError, match="RuntimeError: a rank has failed"):
        kernel.run(FAILS)
    assert not kernel.ranks()


def test_several_hosts_are_refused(kernel: Kernel) -> None:
    with pytest.raises(CellError, match="num_nodes=2 in a notebook: 'fsdp2' can start ranks on its own host"):
        kernel.run("L.Trainer(strategy='fsdp2', accelerator='cpu', devices=2, num_nodes=2)")


def test_an_interrupted_cell_leaves_no_ranks(kernel: Kernel, tmp_path: Path) -> None:
    message = kernel.begin(f"MARKS = {str(tmp_path)!r}\n{ENDLESS}")
    wait_for(lambda: len(os.listdir(tmp_path)) == 2)
    ranks = [psutil.Process(int(pid)) for pid in os.listdir(tmp_path)]
    kernel.interrupt()
    with pytest.raises(CellError):
        kernel.end(message)
    assert psutil.wait_procs(ranks, timeout=30)[1] == []
    assert not kernel.ranks()
    assert kernel.run("print(1 + 1)").strip() == "2", "the kernel does not go on"


def test_ranks_end_with_a_killed_kernel(kernel: Kernel, tmp_path: Path) -> None:
    kernel.begin(f"MARKS = {str(tmp_path)!r}\n{ENDLESS}")
    wait_for(lambda: len(os.listdir(tmp_path)) == 2)
    ranks = [psutil.Process(int(pid)) for pid in os.listdir(tmp_path)]
    kernel.process.kill()  # and not its group, which a restart kills
    assert psutil.wait_procs(ranks, timeout=60)[1] == []


def test_one_device_needs_no_process(tmp_path: Path) -> None:
    with started_kernel(tmp_path) as kernel:
        kernel.run(re.split(r"^# %%.*\n", EXAMPLE.read_text(), flags=re.MULTILINE)[1])
        told = kernel.run(HERE)
        assert f"process {kernel.process.pid}" in told
        with pytest.raises(CellError, match=r"has created a process group in its process(.|\n)*Restart the kernel"):
            kernel.run(FAILS)
