"""A part of the suite of fsdp-core on XLA's CPU devices; ``conformance_of_xla.py`` is the whole of it."""

from __future__ import annotations

from typing import ClassVar

import pytest

from conformance_expected import CLASSIC, SPMD
from fsdp_core.testing.suite import PresetSuite
from fsdp_core.testing.suite.bad_modules import BadModulesSuite
from fsdp_core.testing.suite.contract import ContractSuite
from fsdp_core.testing.suite.exceptions import ExceptionsSuite
from fsdp_core.testing.suite.listing import ListingSuite
from fsdp_core.testing.suite.loops import LoopsSuite
from fsdp_core.testing.suite.numbers import NumbersSuite
from fsdp_core.testing.suite.optimizers import OptimizersSuite
from fsdp_core.testing.suite.parameters import ParametersSuite
from fsdp_core.testing.suite.precision import PrecisionSuite
from fsdp_core.testing.suite.shards import ShardsSuite
from fsdp_xla.testing import SPMDRanks, ThreadRanks


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests' own process asks is asked where the strategies can run."""
    monkeypatch.setenv("PJRT_DEVICE", "CPU")


class TrainsAsWritten(
    ListingSuite,
    ContractSuite,
    NumbersSuite,
    ShardsSuite,
    ParametersSuite,
    OptimizersSuite,
    ExceptionsSuite,
    BadModulesSuite,
):
    """What takes the least time to compile, and shows the most of training."""


_CLAUSES = [name for base in TrainsAsWritten.__mro__ for name in vars(base)]


class TestXLA(TrainsAsWritten):
    strategy = "xla_fsdp"
    rank_pool = ThreadRanks
    expected_failures: ClassVar = {name: why for name, why in CLASSIC.items() if name.split("[")[0] in _CLAUSES}


class TestXLASPMD(TrainsAsWritten, PrecisionSuite, LoopsSuite):
    strategy = "xla_fsdp_spmd"
    rank_pool = SPMDRanks
    expected_failures = SPMD


class TestXLAFull(PresetSuite):
    strategy = "xla_fsdp_full"
    preset_of = "xla_fsdp"
    rank_pool = ThreadRanks
    expected_failures: ClassVar = {}
