"""Lightning's command line takes the class with its options, as those of other packages."""

from __future__ import annotations

import pytest
from fsdp_zero2.trainer import ZeRO2Strategy
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel


def test_the_class_is_taken_with_its_options() -> None:
    pytest.importorskip("jsonargparse")
    words = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    words += ["--trainer.strategy=fsdp_zero2.trainer.ZeRO2Strategy", "--trainer.strategy.sync_each_batch=true"]
    strategy = LightningCLI(BoringModel, run=False, args=words, save_config_callback=None).trainer.strategy
    assert isinstance(strategy, ZeRO2Strategy)
    assert strategy.options.sync_each_batch
