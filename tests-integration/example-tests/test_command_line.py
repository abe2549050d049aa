"""Lightning's command line takes the class with its options, as those of other packages."""

from __future__ import annotations

import pytest
from both_examples import of_both
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import fsdp_core


@of_both
def test_the_class_is_taken_with_its_options(strategy: str) -> None:
    pytest.importorskip("jsonargparse")
    strategy_class = fsdp_core.resolve(strategy, "trainer")
    words = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    words += [f"--trainer.strategy={strategy_class.__module__}.{strategy_class.__name__}"]
    words += ["--trainer.strategy.sync_each_batch=true"]
    command_line = LightningCLI(BoringModel, run=False, args=words, save_config_callback=None)
    used = command_line.trainer.strategy
    assert isinstance(used, strategy_class)
    assert used.options.sync_each_batch
