"""Every way to start a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_core.testing.processes import start
from fsdp_core.testing.suite.launching import COMMAND, LaunchingSuite


class TestLaunching(LaunchingSuite):
    strategy = "fsdp2"

    def test_name_that_offloads(self, tmp_path: Path) -> None:
        ended = start(tmp_path, "-m", "train", "fabric", "--strategy=fsdp2_cpu_offload")
        self.assert_trained(ended, "fabric", cpu_offload=True)

    def test_command_line_takes_the_public_class_with_an_option_of_its_own(self, tmp_path: Path) -> None:
        pytest.importorskip("jsonargparse")
        options = (
            "--trainer.strategy=fsdp_fsdp2.FSDP2Strategy",
            "--trainer.strategy.reshard_after_forward=false",
            "--trainer.strategy.cpu_offload=true",
        )
        self.assert_trained(start(tmp_path, "cli.py", *COMMAND, *options), "cli", passes=1, cpu_offload=True)
