"""XLA's ranks are forked from a process that has imported torch_xla too, which takes two seconds."""

from __future__ import annotations

import pytest

from fsdp_core.testing import forking


def pytest_configure(config: pytest.Config) -> None:
    if "torch_xla" not in forking.preloads:
        forking.preloads.append("torch_xla")
