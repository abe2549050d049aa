"""One folder on XLA devices and under torch's FSDP: two environments, since torch_xla needs a torch of its own.

``python -m nox -s integration`` makes both, and says in ``FSDP_XLA_PYTHON`` where the one with torch_xla is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

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

    def train(self, folder: Path, first: int, last: int, load: Path | None = None) -> list[float]:
        """The losses of the steps from ``first`` to ``last``, and folders; see any_strategy.py."""
        folder.mkdir(parents=True)
        is_xla = self.strategy.startswith("xla")
        environment = {n: v for n, v in fresh_environment().items() if n not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
        if is_xla:
            environment |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(self.ranks)}
        command = [xla_python() if is_xla else sys.executable, str(SCRIPT), self.strategy, str(self.ranks), str(folder)]
        command += ["--steps", str(first), str(last), *(["--load", str(load)] if load is not None else [])]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{self}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        losses: list[float] = json.loads((folder / "losses.json").read_text())
        return losses


def xla_python() -> str:
    python = os.environ.get("FSDP_XLA_PYTHON")
    assert python, "FSDP_XLA_PYTHON names no interpreter with fsdp-xla; type: python -m nox -s integration"
    return python


def differences(one: Path, other: Path) -> str:
    """What ``fsdp checkpoint diff`` says of two folders; nothing if weights and optimizer are the same bit for bit."""
    command = [sys.executable, "-m", "fsdp_core", "checkpoint", "diff", str(one), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.fixture(scope="module")
def whole() -> list[float]:
    """The losses of one unsharded process of plain torch that is never interrupted."""
    return oracle.train_plain(2 * STEPS, oracle.adamw_groups)[0]


CLASSIC, SPMD = Run("xla_fsdp", 2), Run("xla_fsdp_spmd", 4)
#: Who saves and who loads; between torch's own strategies, test_any_to_any.py shows it.
PAIRS = [
    (writer, reader) for writer in (CLASSIC, SPMD) for reader in (CLASSIC, SPMD, Run("fsdp2", 3), Run("fsdp_native", 1))
]
PAIRS += [(Run("fsdp2", 3), CLASSIC), (Run("fsdp2", 3), SPMD)]


@pytest.fixture(scope="module")
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, whole: list[float]
) -> tuple[Run, Path]:
    """A run of some steps, and where it has saved what."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    assert request.param.train(folder, 0, STEPS) == pytest.approx(whole[:STEPS], abs=oracle.FP32_TOLERANCE)
    return request.param, folder / "trained"


@pytest.mark.parametrize(("saved", "reader"), PAIRS, indirect=["saved"], ids=str)
def test_a_folder_moves_between_xla_and_torch(
    saved: tuple[Run, Path], reader: Run, tmp_path: Path, whole: list[float]
) -> None:
    """Weights and AdamW state arrive bit for bit, and training goes on with the losses that it would have had."""
    _, folder = saved
    losses = reader.train(tmp_path / "on", STEPS, 2 * STEPS, folder)
    assert differences(folder, tmp_path / "on" / "loaded") == ""
    assert losses == pytest.approx(whole[STEPS:], abs=oracle.RESUME_TOLERANCE)
