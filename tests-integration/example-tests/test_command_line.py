"""Lightning's command line takes the class with its options, as those of other packages."""

from __future__ import annotations

import pytest
from fsdp_example.trainer import ZeRO1Strategy
from fsdp_zero2.trainer import ZeRO2Strategy
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel


@pytest.mark.parametrize("made", [ZeRO1Strategy, ZeRO2Strategy])
def test_the_class_is_taken_with_its_options(made: type) -> None:
    pytest.importorskip("jsonargparse")
    words = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    words += [f"--trainer.strategy={made.__module__}.{made.__name__}", "--trainer.strategy.sync_each_batch=true"]
    strategy = LightningCLI(BoringModel, run=False, args=words, save_config_callback=None).trainer.strategy
    assert isinstance(strategy, made)
    assert strategy.options.sync_each_batch  # type: ignore[attr-defined]
