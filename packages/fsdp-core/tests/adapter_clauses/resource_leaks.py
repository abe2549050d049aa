"""Saves and loads of every kind leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import Ranks
from fsdp_core.testing.suite.base_class import Clauses, on_ranks
from fsdp_core.testing.suite.training.resource_leaks import NOTHING, left_behind

__all__ = ["LeftoversOfSavesSuite"]


class LeftoversOfSavesSuite(Clauses):
    """Saves and loads leave nothing behind but checkpoints."""

    @on_ranks("processes", "one controller")  # threads share what this looks at
    @pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["at once", "async_save"])
    @pytest.mark.parametrize("front_end", ["trainer", "fabric"])
    def test_checkpoints_leave_nothing_else_behind(
        self, ranks: Ranks, tmp_path: Path, front_end: FrontEnd, options: dict[str, Any]
    ) -> None:
        """A run that saves and resumes must leave nothing behind but its checkpoints."""
        for left in ranks.run(2, left_behind, self.strategy, str(tmp_path), front_end, True, options):
            assert left == NOTHING
        kept = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(("cwd", "tmp")))
        assert kept == ["first", "second"]
