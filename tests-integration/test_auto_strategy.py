"""``strategy="fsdp_auto"`` trains by the strategy that it has chosen as if that had been written."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric import Fabric

import auto_fits
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.testing import RankPool
from fsdp_core.testing.launching.forking import allow_children
from fsdp_core.testing.refusals import assert_says


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("auto")


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[str]:
    """What two ranks have written of the script's three fits, on fake devices with memory for shards alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}  # of tests before
    memory = {"FSDP_FAKE_DEVICES": "2", "FSDP_FAKE_DEVICE_MEMORY": str(auto_fits.MEMORY_FOR_SHARDS)}
    run = subprocess.run(
        [sys.executable, auto_fits.__file__],
        cwd=folder,
        env={**kept, **memory},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [*run.stdout.splitlines(), *run.stderr.splitlines()]


def test_ranks_train_by_what_the_first_has_chosen(lines: list[str]) -> None:
    said = [json.loads(line) for line in lines if line.startswith("{")]
    for rank in (0, 1):
        chosen, by_name, again = (each for each in said if each["rank"] == rank)
        assert chosen["strategy"] == "FSDP2Strategy"
        assert chosen["losses"] == by_name["losses"]
        assert len(chosen["losses"]) == 4
        assert "this process has run a backward pass" in again["refused"]  # torch forks no more on accelerators


def test_it_says_what_and_why_once_and_what_it_needed(lines: list[str]) -> None:
    said = [line for line in lines if line.startswith(("fsdp_auto: strategy", "Why: "))]
    assert said[0] == 'fsdp_auto: strategy="fsdp2", on 2 devices.'
    assert "whole parameters on each, by DDP" not in said[1]  # DDP knows Lightning's devices alone
    assert len(said) == 2
    (expected,) = [line for line in lines if "were expected at the peak" in line]
    assert 0.95 < float(expected.split()[-3]) < 1.05


def fit_twice() -> list[str]:
    allow_children()  # as processes have whom a launcher starts
    names = []
    for memory in (auto_fits.MEMORY_FOR_SHARDS, 2**30):  # the second time, there is a process group to ask by
        trainer = auto_fits.new_trainer(auto_fits.AutoStrategy(memory=memory), devices=2)
        trainer.fit(auto_fits.Net(), auto_fits.new_loader())
        names.append(type(trainer.strategy).__name__)
    return names


def fit_with_a_fault() -> str:
    """What a rank raises if the first can't plan: its process is one that may have no children."""
    with pytest.raises(ShardingError) as raised:
        auto_fits.new_trainer("fsdp_auto", devices=2).fit(auto_fits.Net(), auto_fits.new_loader())
    return str(raised.value)


def test_ranks_that_a_launcher_has_started_agree() -> None:
    with RankPool() as ranks:
        messages = ranks.run(2, fit_with_a_fault, timeout=100)  # each is told, and none waits
        assert ["daemonic processes are not allowed to have children" in message for message in messages] == [True] * 2
        assert ranks.run(2, fit_twice, timeout=200) == [["FSDP2Strategy", "DDPStrategy"]] * 2


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return auto_fits.new_loader()


def test_a_resume_on_another_number_of_devices_chooses_anew_and_says_so(
    lines: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = auto_fits.new_trainer("fsdp_auto", devices=1, epochs=2)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        trainer.fit(auto_fits.Net(), Data(), ckpt_path=folder / "auto.ckpt")
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


@pytest.mark.parametrize("memory", ["80GiB", 0, True])
def test_memory_is_a_number_of_bytes(memory: Any) -> None:
    with pytest.raises(ShardingError, match=r"is no number of bytes\.\nWrite one, such as memory=80 \* 2\*\*30"):
        auto_fits.AutoStrategy(memory=memory)
    assert auto_fits.AutoStrategy(memory=8e9).memory == 8_000_000_000


def test_a_choice_for_other_ranks_is_left_for_their_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that fits on one device and then on two: the second rank runs both."""
    choice = json.dumps({"strategy": "fsdp2", "ranks": 2})
    for name, value in {"LOCAL_RANK": "1", "FSDP_AUTO_CHOICE": choice}.items():
        monkeypatch.setenv(name, value)
    trainer = auto_fits.new_trainer("fsdp_auto", devices=1)
    trainer.fit(auto_fits.Net(), auto_fits.new_loader())
    assert type(trainer.strategy).__name__ == "SingleDeviceStrategy"
    assert os.environ["FSDP_AUTO_CHOICE"] == choice
    monkeypatch.setenv("FSDP_AUTO_CHOICE", "fsdp2")
    with pytest.raises(ShardingError, match="'fsdp2', which is no choice of fsdp_auto"):
        auto_fits.new_trainer("fsdp_auto", devices=1).fit(auto_fits.Net(), auto_fits.new_loader())


class WithAnError(auto_fits.Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[:, 1:], batch_idx)


class WithoutData(pl.LightningDataModule):
    def setup(self, stage: str) -> None:
        raise FileNotFoundError("no data here")


def test_an_error_of_the_users_is_said_with_its_line() -> None:
    with pytest.raises(ShardingError) as raised:
        auto_fits.new_trainer("fsdp_auto", devices=1).fit(WithAnError(), auto_fits.new_loader())
    assert_says(str(raised.value), "auto_fits.py:", "If a run would raise this too, mend it there")
    with pytest.raises(ShardingError) as raised:
        auto_fits.new_trainer("fsdp_auto", devices=1).fit(auto_fits.Net(), WithoutData())
    assert_says(str(raised.value), "no data here (", "test_auto_strategy.py:", "mend it there")
