"""The adapters of core over the loopback backend; fsdp2's tests run the same over torch's ``fully_shard``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fsdp_core.plugins.discovery import discover

pytest.register_assert_rewrite("adapter_clauses")

from adapter_clauses import AdapterSuite  # noqa: E402

#: Where the backend is found, as an installed package is.
SITE = str(Path(__file__).parent / "loopback_site")

sys.path.append(SITE)  # ranks search where this process does
discover.cache_clear()


@pytest.fixture(autouse=True)
def found_by_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SITE, prepend=os.pathsep)


class TestAdaptersOverLoopback(AdapterSuite):
    strategy = "loopback"
