"""The indexes of a large model on 64 ranks, as the benchmark makes them; what a rank sends does not grow with them."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "benchmarks"))

from index_bytes import SHARDINGS, measure

measured = cache(measure)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_sixty_four_ranks_send_little_and_the_manifest_lists_no_chunk(sharding: str) -> None:
    found = measured(sharding, 64)
    assert found["chunks one by one"] == 0
    assert found["chunks"] > 30_000
    assert found["first save"]["most bytes of a rank"] < 1000
    assert found["second save"]["most bytes of a rank"] < 200
    assert found["first save"]["peak memory of the last rank"] < 10e6
    assert found["first save"]["bytes of the manifest"] == found["second save"]["bytes of the manifest"] < 800_000


def test_what_a_rank_sends_does_not_grow() -> None:
    small, large = (measured("fsdp2", ranks) for ranks in (8, 64))
    for save, digits in (("first save", 40), ("second save", 0)):
        assert large[save]["most bytes of a rank"] <= small[save]["most bytes of a rank"] + digits
