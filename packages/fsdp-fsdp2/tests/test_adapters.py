"""The adapters of core over fsdp2; core's own tests run the same over a backend for tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.register_assert_rewrite("adapter_clauses")
sys.path.append(str(Path(__file__).parents[2] / "fsdp-core/tests"))  # ranks search where this process does

from adapter_clauses import AdapterSuite  # noqa: E402

pytestmark = pytest.mark.everything


class TestAdaptersOverFSDP2(AdapterSuite):
    strategy = "fsdp2"
