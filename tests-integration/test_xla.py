"""One folder on XLA devices and under torch's FSDP: two environments, since torch_xla needs a torch of its own.

``python -m nox -s integration`` makes both, and says in ``FSDP_XLA_PYTHON`` where the one with torch_xla is.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
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

    def train(self, folders: list[Path], first: int, last: int, loads: Sequence[Path] = ()) -> list[list[float]]:
        """The losses of the steps from ``first`` to ``last``, and folders, on from each; see any_strategy.py."""
        for folder in folders:
            folder.mkdir(parents=True)
        words = [self.strategy, str(self.ranks), *map(str, folders), "--steps", str(first), str(last)]
        words += ["--load", *map(str, loads)] if loads else []
        if self.strategy.startswith("xla"):
            self.start_on_xla(words, folders[0])
        else:
            run_forked(SCRIPT, *words, folder=folders[0], ranks=self.ranks)
        return [json.loads((folder / "losses.json").read_text()) for folder in folders]

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
def saved(tmp_path_factory: pytest.TempPathFactory, whole: list[float]) -> Callable[[Run], Path]:
    """Where a run of some steps has saved what; each runs once."""

    @cache
    def train(writer: Run) -> Path:
        folder = tmp_path_factory.mktemp("saved") / "run"
        (losses,) = writer.train([folder], 0, STEPS)
        assert losses == pytest.approx(whole[:STEPS], abs=oracle.FP32_TOLERANCE)
        return folder / "trained"

    return train


@pytest.fixture(scope="module")
def gone_on(
    tmp_path_factory: pytest.TempPathFactory, saved: Callable[[Run], Path]
) -> Callable[[Run], dict[Run, tuple[list[float], Path]]]:
    """The losses with which a strategy goes on from what each writer has saved, and where; each is started once."""

    @cache
    def train(reader: Run) -> dict[Run, tuple[list[float], Path]]:
        folder, writers = tmp_path_factory.mktemp("on"), WRITERS[reader]
        folders = [folder / str(writer) for writer in writers]
        losses = reader.train(folders, STEPS, 2 * STEPS, [saved(writer) for writer in writers])
        return dict(zip(writers, zip(losses, folders, strict=True), strict=True))

    return train


@pytest.mark.parametrize(("writer", "reader"), PAIRS, ids=str)
def test_a_folder_moves_between_xla_and_torch(
    saved: Callable[[Run], Path],
    gone_on: Callable[[Run], dict[Run, tuple[list[float], Path]]],
    writer: Run,
    reader: Run,
    whole: list[float],
) -> None:
    """Weights and AdamW state arrive bit for bit, and training goes on with the losses that it would have had."""
    losses, folder = gone_on(reader)[writer]
    assert differences(saved(writer), folder / "loaded") == ""
    assert losses == pytest.approx(whole[STEPS:], abs=oracle.RESUME_TOLERANCE)
