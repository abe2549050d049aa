"""The suite of fsdp-core on XLA's CPU devices: of that on ranks a part; ``slow_conformance_xla.py`` is the whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import pytest

from conformance_expected import CLASSIC, DIFFERENTIATED, SPMD
from fsdp_core.testing.suite import PresetSuite, StrategySuite
from fsdp_core.testing.suite.checkpoints.fabric_checkpoints import FabricCheckpointsSuite
from fsdp_core.testing.suite.checkpoints.resuming import ExactResumeSuite
from fsdp_core.testing.suite.checkpoints.trainer_checkpoints import CheckpointsSuite
from fsdp_core.testing.suite.interface.contract import ContractSuite
from fsdp_core.testing.suite.interface.listing import ListingSuite
from fsdp_core.testing.suite.modules.parameters import ParametersSuite
from fsdp_core.testing.suite.modules.sharded_modules import ShardedModulesSuite
from fsdp_core.testing.suite.modules.shards import ShardsSuite
from fsdp_core.testing.suite.numerics.many_passes import SETTINGS
from fsdp_core.testing.suite.numerics.parity import NumbersSuite
from fsdp_core.testing.suite.refusals.bad_modules import BadModulesSuite
from fsdp_core.testing.suite.training.exceptions import ExceptionsSuite
from fsdp_core.testing.suite.training.optimizers import OptimizersSuite
from fsdp_xla.testing import SPMDRanks, ThreadRanks

pytest.register_assert_rewrite("adapter_clauses")
sys.path.append(str(Path(__file__).parents[2] / "fsdp-core/tests"))

from adapter_clauses import AdapterSuite  # noqa: E402


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
    ShardedModulesSuite,
    CheckpointsSuite,
    FabricCheckpointsSuite,
    ExactResumeSuite,
):
    """What shows the most of training and checkpoints, and takes the least time to compile."""


_CLAUSES = [name for base in TrainsAsWritten.__mro__ for name in vars(base)]


class TestXLA(TrainsAsWritten):
    strategy = "xla_fsdp"
    rank_pool = ThreadRanks
    expected_failures: ClassVar = {name: why for name, why in CLASSIC.items() if name.split("[")[0] in _CLAUSES}


class TestXLASPMD(StrategySuite):
    strategy = "xla_fsdp_spmd"
    rank_pool = SPMDRanks
    drawn_pairs = 6  # each compiles programs of its own
    step_parts = 3  # so does each kind of step
    expected_failures = SPMD
    refused_steps: ClassVar = {name: DIFFERENTIATED for name in SETTINGS if name.startswith("activation checkpointing")}


@pytest.mark.everything
class TestAdaptersOverSPMD(AdapterSuite):
    strategy = "xla_fsdp_spmd"
    rank_pool = SPMDRanks


class TestXLAFull(PresetSuite):
    strategy = "xla_fsdp_full"
    preset_of = "xla_fsdp"
    rank_pool = ThreadRanks
    expected_failures: ClassVar = {}
