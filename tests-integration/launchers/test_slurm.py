"""SLURM, by its variables and a stub of its command: signals at random moments, and the example as its tasks run it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from signals import runs_with_signals
from test_torchrun import SCRIPT, assert_as_one_process, said

from fsdp_core.testing import RankPool
from fsdp_core.testing.forking import start_script
from fsdp_core.testing.processes import fresh_environment

pytestmark = pytest.mark.timeout(200)


def test_signals_at_random_moments(ranks: RankPool, tmp_path: Path) -> None:
    """Four of the 200 that ``slow_signals.py`` sends."""
    outcome = runs_with_signals(ranks, "fsdp2", tmp_path / "runs", signals=4, seed=7, longest=0.4)
    assert outcome.signals == 4
    assert outcome.ended
