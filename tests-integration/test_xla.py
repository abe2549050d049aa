"""One folder on XLA devices and under torch's FSDP, and LightningCLI on XLA: two environments, see xla_scripts.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from forked_scripts import run_forked
from fsdp_core.cli import fsdp
from fsdp_core.testing import oracle
from test_lightning_cli import FILES as CLI_FILES
from test_lightning_cli import SCRIPT as CLI_SCRIPT
from xla_scripts import XLAScripts

SCRIPT = Path(__file__).parent / "any_strategy.py"
STEPS = 3


class Run(NamedTuple):
    """A strategy on so many ranks, or devices."""

    strategy: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.strategy}-{self.ranks}"

    def train(self, loads: dict[Path, Path | None], xla_scripts: XLAScripts) -> None:
        """Train for some steps into each folder, on from a checkpoint if there is one; see any_strategy.py."""
        folder, *_ = loads
        for each in loads:
            each.mkdir()
        places = [f"{each}={load or ''}" for each, load in loads.items()]
        words = (self.strategy, str(self.ranks), str(STEPS), *places)
        if self.strategy.startswith("xla"):
            xla_scripts.run(SCRIPT, *words, folder=folder, devices=self.ranks)
        else:
            run_forked(SCRIPT, *words, folder=folder, ranks=self.ranks)


def differences(one: Path, other: Path) -> str:
    """What ``fsdp checkpoint diff`` says of two folders; nothing if weights and optimizer are the same bit for bit."""
    done = CliRunner().invoke(fsdp, ["checkpoint", "diff", str(one), str(other)])
    return "" if done.exit_code == 0 else f"{done.output}\n{done.exception!r}"


@pytest.fixture(scope="module")
def xla_scripts() -> Iterator[XLAScripts]:
    scripts = XLAScripts()
    yield scripts
    scripts.close()


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
def place(tmp_path_factory: pytest.TempPathFactory, xla_scripts: XLAScripts) -> Path:
    """Where each run has saved: those that write in ``WRITER``, and what goes on from them in ``WRITER-READER``."""
    place = tmp_path_factory.mktemp("saved")
    begun: dict[Path, Path | None] = {place / str(CLASSIC): None}
    for writer in (SPMD, FSDP2):
        writer.train({place / str(writer): None}, xla_scripts)
    for reader, writers in {CLASSIC: WRITERS[CLASSIC], **WRITERS}.items():  # it is to have written what others read
        loads = {place / f"{writer}-{reader}": place / str(writer) / "trained" for writer in writers}
        reader.train({**begun, **loads}, xla_scripts)
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


@pytest.mark.parametrize("name", ["xla_fsdp.yaml", "xla_fsdp_spmd.yaml"])
def test_lightning_cli_trains_with_the_files_of_its_page(tmp_path: Path, name: str, xla_scripts: XLAScripts) -> None:
    (tmp_path / name).write_text(CLI_FILES[name], encoding="utf-8")
    xla_scripts.run(CLI_SCRIPT, "fit", "--config", name, "--trainer.max_epochs=1", folder=tmp_path, devices=2)
    (checkpoint,) = (tmp_path / "lightning_logs/version_0/checkpoints").iterdir()
    assert (checkpoint / "manifest.json").is_file()
