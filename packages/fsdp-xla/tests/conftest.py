"""Ranks of XLA. They are forked from a process that has imported torch_xla too, which takes two seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fsdp_core.testing import Ranks
from fsdp_core.testing.launching import forking


def pytest_configure(config: pytest.Config) -> None:
    # threads of torch's in the tests' own process would spin for each other while ranks need the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "torch_xla" not in forking.preloads:
        forking.preloads.append("torch_xla")


@pytest.fixture(scope="session")
def launching(_rank_pools: Callable[[type[Ranks]], Ranks]) -> Any:
    """Runs functions that launch ranks, in a process that lives through the session."""
    from launching import Launching

    return _rank_pools(Launching)


@pytest.fixture
def afresh() -> Iterator[Any]:
    """The same in a process that nothing has run in, and nothing will after the test."""
    from launching import Launching

    with Launching() as pool:
        yield pool


@pytest.fixture(scope="session")
def spmd(_rank_pools: Callable[[type[Ranks]], Ranks]) -> Any:
    """Runs functions that launch SPMD, in a process that lives through the session."""
    from launching import LaunchingSPMD

    return _rank_pools(LaunchingSPMD)
