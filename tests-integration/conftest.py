"""What several files of these tests use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdp_core.testing import RankPool


@pytest.fixture(scope="session")
def transformers_ranks() -> Iterator[RankPool]:
    """Ranks for tests that let them import transformers, which takes seconds, once."""
    with RankPool() as pool:
        yield pool
