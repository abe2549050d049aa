"""What pytest needs to know of the suite. A package that runs it says so in its ``conftest.py``.

Example:
    .. code-block:: python

        pytest_plugins = ["fsdp_core.testing.pytest_plugin"]
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdp_core.testing import RankPool

__all__ = ["ranks"]

pytest.register_assert_rewrite("fsdp_core.testing.suite")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Ranks that live through the session."""
    with RankPool() as pool:
        yield pool
