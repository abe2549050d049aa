"""Losses and weights equal those of one unsharded process."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_core.testing import RankPool
from fsdp_core.testing.suite.numbers import NumbersSuite


class TestNumbers(NumbersSuite):
    strategy = "fsdp2"

    @pytest.mark.parametrize("reshard", [False, True])
    def test_reshard_after_forward_leaves_numbers_alone(self, ranks: RankPool, tmp_path: Path, reshard: bool) -> None:
        self.assert_numbers_alone(ranks, tmp_path, {"reshard_after_forward": reshard})
