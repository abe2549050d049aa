"""200 signals at random moments: none loses a step, none hangs.

``pytest tests-integration/launchers/slow_signals.py``; ``FSDP_SIGNALS_SEED`` chooses other moments.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from signals import runs_with_signals

from fsdp_core.testing import RankPool


@pytest.mark.cpu_limit(7200)
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp_native"])
def test_many_signals(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    seed = int(os.environ.get("FSDP_SIGNALS_SEED", "1"))
    outcome = runs_with_signals(ranks, strategy, tmp_path / "runs", signals=100, seed=seed)
    print(f"\n{strategy}, seed {seed}: {outcome}")
    assert outcome.signals == 100
    assert outcome.ended > 50, "most signals came too late to end anything: choose another latest moment"
