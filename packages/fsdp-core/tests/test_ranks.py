"""The launcher that every multi-rank test stands on."""

from __future__ import annotations

import os

from fsdp_core.testing import RankPool


def leave_variables() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.environ["OMP_NUM_THREADS"] = "7"
    del os.environ["PATH"]


def variables() -> tuple[str | None, str, bool, str]:
    return os.environ.get("LEFT_BEHIND"), os.environ["OMP_NUM_THREADS"], "PATH" in os.environ, os.environ["RANK"]


def test_environment_variables_are_taken_back() -> None:
    with RankPool() as ranks:
        ranks.run(2, leave_variables)
        assert ranks.run(2, variables) == [(None, "1", True, "0"), (None, "1", True, "1")]
