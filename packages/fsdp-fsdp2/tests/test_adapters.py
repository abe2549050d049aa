"""The adapters of core over fsdp2; core's own tests run the same over a backend for tests."""

from __future__ import annotations

import pytest

from fsdp_core.testing.suite import AdapterSuite

pytestmark = pytest.mark.everything


class TestAdaptersOverFSDP2(AdapterSuite):
    strategy = "fsdp2"
