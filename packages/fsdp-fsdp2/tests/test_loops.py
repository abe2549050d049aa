"""What the root's parameters are between the calls of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_core.testing import RankPool
from fsdp_core.testing.suite.loops import assert_root_stays_gathered
from fsdp_core.testing.suite.numbers import assert_numbers_alone


@pytest.mark.parametrize("reshard", [None, True, False, 1, 2])
def test_reshard_after_forward_leaves_the_root_gathered(ranks: RankPool, tmp_path: Path, reshard: Any) -> None:
    assert_root_stays_gathered(ranks, tmp_path, "fsdp2", {"reshard_after_forward": reshard})


def test_resharding_the_root_too_leaves_numbers_alone(ranks: RankPool, tmp_path: Path) -> None:
    assert_numbers_alone(ranks, tmp_path, "fsdp2", {"reshard_after_forward": True})
