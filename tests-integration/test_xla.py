"""One folder on XLA devices and under torch's FSDP: two environments, since torch_xla needs a torch of its own.

``python -m nox -s integration`` makes both, and says in ``FSDP_XLA_PYTHON`` where the one with torch_xla is.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from forked_scripts import run_forked
from fsdp_core.cli import fsdp
from fsdp_core.testing import oracle
from fsdp_core.testing.processes import fresh_environment

SCRIPT = Path(__file__).parent / "any_strategy.py"
STEPS = 3


class Run(NamedTuple):
    """A strategy on so many ranks, or devices."""

    strategy: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.strategy}-{self.ranks}"

    def train(self, loads: dict[Path, Path | None]) -> None:
        """Train for some steps into each folder, on from a checkpoint if there is one; see any_strategy.py."""
        folder, *_ = loads
        for each in loads:
            each.mkdir()
        places = [f"{each}={load or ''}" for each, load in loads.items()]
        words = [self.strategy, str(self.ranks), str(STEPS), *places]
        if self.strategy.startswith("xla"):
            self.start_on_xla(words, folder)
        else:
            run_forked(SCRIPT, *words, folder=folder, ranks=self.ranks)

    def start_on_xla(self, words: list[str], folder: Path) -> None:
        environment = {n: v for n, v in fresh_environment().items() if n not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
        environment |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(self.ranks)}
        command = [xla_python(), str(SCRIPT), *words]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{self}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


def xla_python() -> str:
    python = os.environ.get("FSDP_XLA_PYTHON")
    assert python, "FSDP_XLA_PYTHON names no interpreter with fsdp-xla; type: python -m nox -s integration"
    return python


def differences(one: Path, other: Path) -> str:
    """What ``fsdp checkpoint diff`` says of two folders; nothing if weights and optimizer are the same bit for bit."""
    done = CliRunner().invoke(fsdp, ["checkpoint", "diff", str(one), str(other)])
    return "" if done.exit_code == 0 else f"{done.output}\n{done.exception!r}"


@pytest.fixture(scope="module")
def whole() -> list[float]:
    """The losses of one unsharded process of plain torch that is never interrupted."""
    return oracle.train_plain(2 * STEPS, oracle.adamw_groups)[0]


CLASSIC, SPMD, FSDP2, NATIVE = Run("xla_fsdp", 2), Run("xla_fsdp_spmd", 4), Run("fsdp2", 3), Run("fsdp_native", 1)
#: Who loads what whom has saved; between torch's own strategies, test_any_to_any.py shows it.
WRITERS = {reader: [CLASSIC, SPMD] for reader in (FSDP2, NATIVE)} | {
    reader: [CLASSIC, SPMD, FSDP2] for reader in (CLASSIC, SPMD)
}
PAIRS = [(writer, reader) for reader, writers in WRITERS.items() for writer in writers]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each run has saved: those that write in ``WRITER``, and what goes on from them in ``WRITER-READER``."""
    place = tmp_path_factory.mktemp("saved")
    begun: dict[Path, Path | None] = {place / str(CLASSIC): None}
    for writer in (SPMD, FSDP2):
        writer.train({place / str(writer): None})
    for reader, writers in {CLASSIC: WRITERS[CLASSIC], **WRITERS}.items():  # it is to have written what others read
        reader.train(begun | {place / f"{writer}-{reader}": place / str(writer) / "trained" for writer in writers})
        begun = {}
    return place


def losses(folder: Path) -> list[float]:
    told: list[float] = json.loads((folder / "losses.json").read_text())
    return told


@pytest.mark.parametrize(("writer", "reader"), PAIRS, ids=str)
def test_a_folder_moves_between_xla_and_torch(writer: Run, reader: Run, place: Path, whole: list[float]) -> None:
    """Weights and AdamW state arrive bit for bit, and training goes on with the losses that it would have had."""
    saved, gone_on = place / str(writer), place / f"{writer}-{reader}"
    assert losses(saved) == pytest.approx(whole[:STEPS], abs=oracle.FP32_TOLERANCE)
    assert differences(saved / "trained", gone_on / "loaded") == ""
    assert losses(gone_on) == pytest.approx(whole[STEPS:], abs=oracle.RESUME_TOLERANCE)
