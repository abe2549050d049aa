"""Ranks for the tests of this folder."""

from collections.abc import Iterator

import pytest

from fsdp_core.testing import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool
