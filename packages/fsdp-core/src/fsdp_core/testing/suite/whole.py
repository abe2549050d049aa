"""The whole of the suite under one class, and the part of it for a name that only fixes another name's options."""

from __future__ import annotations

from fsdp_core.testing.suite.async_saves import AsyncSavesSuite
from fsdp_core.testing.suite.bad_checkpoints import BadCheckpointsSuite
from fsdp_core.testing.suite.bad_modules import BadModulesSuite
from fsdp_core.testing.suite.bad_options import BadOptionsSuite
from fsdp_core.testing.suite.built_in_parts import BuiltInPartsSuite
from fsdp_core.testing.suite.capabilities import CapabilitiesSuite
from fsdp_core.testing.suite.checkpoints import CheckpointsSuite
from fsdp_core.testing.suite.contract import ContractSuite
from fsdp_core.testing.suite.exceptions import ExceptionsSuite
from fsdp_core.testing.suite.fabric_checkpoints import FabricCheckpointsSuite
from fsdp_core.testing.suite.forward_backward_order import PassesSuite
from fsdp_core.testing.suite.launching import LaunchingSuite
from fsdp_core.testing.suite.lightning_regressions import BrokenElsewhereSuite
from fsdp_core.testing.suite.listing import ListingSuite
from fsdp_core.testing.suite.loader_positions import LoaderPositionsSuite
from fsdp_core.testing.suite.loops import LoopsSuite
from fsdp_core.testing.suite.norms import NormsSuite
from fsdp_core.testing.suite.optimizers import OptimizersSuite
from fsdp_core.testing.suite.outside_steps import OutsideStepsSuite
from fsdp_core.testing.suite.parameters import ParametersSuite
from fsdp_core.testing.suite.parity import NumbersSuite
from fsdp_core.testing.suite.precision import PrecisionSuite
from fsdp_core.testing.suite.presets import PresetClauses
from fsdp_core.testing.suite.resource_leaks import LeftoversSuite
from fsdp_core.testing.suite.resuming import ExactResumeSuite
from fsdp_core.testing.suite.sharded_modules import ShardedModulesSuite
from fsdp_core.testing.suite.shards import ShardsSuite
from fsdp_core.testing.suite.unused_parameters import BranchesSuite

__all__ = ["PresetSuite", "StrategySuite"]


class StrategySuite(
    ListingSuite,
    ContractSuite,
    NumbersSuite,
    NormsSuite,
    CapabilitiesSuite,
    ShardsSuite,
    BuiltInPartsSuite,
    ParametersSuite,
    BranchesSuite,
    PassesSuite,
    PrecisionSuite,
    OptimizersSuite,
    LoopsSuite,
    ExceptionsSuite,
    OutsideStepsSuite,
    CheckpointsSuite,
    FabricCheckpointsSuite,
    ExactResumeSuite,
    LoaderPositionsSuite,
    AsyncSavesSuite,
    LaunchingSuite,
    LeftoversSuite,
    BadOptionsSuite,
    BadModulesSuite,
    ShardedModulesSuite,
    BadCheckpointsSuite,
    BrokenElsewhereSuite,
):
    """Everything that a strategy promises, on real ranks, under Trainer and Fabric.

    Example:
        .. code-block:: python

            class TestMine(StrategySuite):
                strategy = "theirs"
    """


class PresetSuite(ListingSuite, ContractSuite, CapabilitiesSuite, LeftoversSuite, PresetClauses):
    """The tests for a name that only fixes options of another strategy, for which the whole suite runs.

    They check that it is listed and implements the contracts, trains as the oracle does, saves and resumes, declares
    what it can do, and leaves nothing behind.

    Example:
        .. code-block:: python

            class TestTheirsOffloaded(PresetSuite):
                strategy = "theirs_offloaded"
                preset_of = "theirs"
    """
