"""``strategy="fsdp_auto"`` trains by the strategy that it has chosen as if that had been written."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from lightning.fabric import Fabric

import auto_fits
from forked_scripts import run_forked
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError

SCRIPT = Path(auto_fits.__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("auto")


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[str]:
    """What two ranks have written of the script's three fits."""
    return run_forked(SCRIPT, folder=folder).splitlines()


def test_ranks_train_by_what_the_first_has_chosen(lines: list[str]) -> None:
    fits = sorted(json.loads(line) for line in lines if line.startswith("["))
    names = [[name for rank, name, _ in fits if rank == which] for which in (0, 1)]
    assert sorted(names[0]) == sorted(names[1]) == ["DDPStrategy", "FSDP2Strategy", "FSDP2Strategy"]
    for which in (0, 1):
        losses = [losses for rank, name, losses in fits if rank == which and name == "FSDP2Strategy"]
        assert losses[0] == losses[1]  # chosen, and by its name
        assert len(losses[0]) == 4


def test_it_says_what_and_why_once(lines: list[str]) -> None:
    assert [line for line in lines if line.startswith("fsdp_auto: ")] == [
        'fsdp_auto: strategy="fsdp2", on 2 devices.',
        'fsdp_auto: strategy="ddp", on 2 devices.',
    ]
    why = [line for line in lines if line.startswith("Why: ")]
    assert "by DDP, would need" in why[0]
    assert len(why) == 2


def test_a_resume_on_another_number_of_devices_chooses_anew_and_says_so(
    lines: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = auto_fits.new_trainer("fsdp_auto", devices=1, epochs=2)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        trainer.fit(auto_fits.Net(), auto_fits.new_loader(), ckpt_path=folder / "auto.ckpt")
    assert trainer.global_step == 4 + 8
    assert 'the checkpoint was written on 2 devices by strategy="fsdp2"' in caplog.text
    assert "FSDP_AUTO_CHOICE" not in os.environ


def test_what_it_can_not_choose_for_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"Call trainer\.fit\(\) first"):
        auto_fits.new_trainer("fsdp_auto", devices=1).validate(auto_fits.Net(), auto_fits.new_loader())
    with pytest.raises(UnsupportedCapabilityError, match="has no class for lightning"):
        Fabric(accelerator="cpu", devices=1, strategy="fsdp_auto")
    small = auto_fits.AutoStrategy(memory=1000)
    with pytest.raises(ShardingError, match="nothing fits 1000 B a device with a tenth to spare"):
        auto_fits.new_trainer(small, devices=1).fit(auto_fits.Net(), auto_fits.new_loader())
