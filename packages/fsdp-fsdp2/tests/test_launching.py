"""Ways to start a script that are fsdp2's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_core.testing.processes import start
from fsdp_core.testing.suite.training.launching import COMMAND

pytestmark = pytest.mark.everything


def test_name_that_offloads(tmp_path: Path) -> None:
    ended = start(tmp_path, "-m", "train", "fabric", "--strategy=fsdp2_cpu_offload")
    assert ended.status == 0, ended.output
    assert [(one["rank"], one["cpu_offload"]) for one in ended.reports("fabric")] == [(0, True), (1, True)]


def test_command_line_takes_the_public_class_with_an_option_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    options = (
        "--trainer.strategy=fsdp_fsdp2.FSDP2Strategy",
        "--trainer.strategy.reshard_after_forward=false",
        "--trainer.strategy.cpu_offload=true",
    )
    ended = start(tmp_path, "cli.py", *COMMAND, *options)
    assert ended.status == 0, ended.output
    assert [(one["rank"], one["cpu_offload"]) for one in ended.reports("cli 0")] == [(0, True), (1, True)]
