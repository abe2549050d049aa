"""The whole suite on ranks that are XLA's CPU devices: ``nox -s conformance``."""

from __future__ import annotations

from typing import ClassVar

import pytest

from conformance_expected import CLASSIC
from fsdp_core.testing.suite import StrategySuite
from fsdp_core.testing.suite.numerics.many_passes import STEPS
from fsdp_xla.testing import ThreadRanks


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests' own process asks is asked where the strategies can run."""
    monkeypatch.setenv("PJRT_DEVICE", "CPU")


CACHED = ("cached loss", "cached loss beside another", "hook that runs the net, of a loss of a block alone")
FROZEN = ("parameters frozen before the backward pass", "parameters frozen before a backward pass that is forgotten")
WRITTEN = ("optimizer's parameters written between two calls",)
BACKWARD = (
    "backward pass that is forgotten",
    "backward pass before the step's",
    "parameters frozen after a backward pass",
)
# torch_xla's wrapper frees what an earlier call needs that waits for its own backward pass
INSIDE = (
    "function that runs the net in its backward pass, beside a later call",
    "units computed again in passes of their own, and called again",
)


class TestXLA(StrategySuite):
    strategy = "xla_fsdp"
    rank_pool = ThreadRanks
    expected_failures = CLASSIC
    drawn_pairs = 6  # each compiles programs of its own
    refused_steps: ClassVar = {
        **dict.fromkeys(("automatic", "accumulated"), (*CACHED, *INSIDE, *BACKWARD, *FROZEN, *WRITTEN)),
        "by hand": (*CACHED, *INSIDE, *FROZEN, *WRITTEN),
        "by hand, with raw backward passes": STEPS,
    }
    not_in_pairs: ClassVar = {"precision=double": "XlaFullyShardedDataParallel keeps its shards in fp32; it is refused"}
