"""The whole suite, as a class for a strategy and a class for a preset of one."""

from __future__ import annotations

from fsdp_core.testing.suite.checkpoints.async_saves import DeferredCopiesSuite
from fsdp_core.testing.suite.checkpoints.fabric_checkpoints import FabricCheckpointsSuite
from fsdp_core.testing.suite.checkpoints.frozen_parameters import FrozenParametersSuite
from fsdp_core.testing.suite.checkpoints.late_param_groups import LateParamGroupsSuite
from fsdp_core.testing.suite.checkpoints.resuming import ExactResumeSuite
from fsdp_core.testing.suite.checkpoints.trainer_checkpoints import CheckpointsSuite
from fsdp_core.testing.suite.interface.capabilities import CapabilitiesSuite
from fsdp_core.testing.suite.interface.contract import ContractSuite
from fsdp_core.testing.suite.interface.listing import ListingSuite
from fsdp_core.testing.suite.interface.presets import PresetClauses
from fsdp_core.testing.suite.modules.outside_steps import OutsideStepsSuite
from fsdp_core.testing.suite.modules.parameters import ParametersSuite
from fsdp_core.testing.suite.modules.sharded_init import BuiltInPartsSuite
from fsdp_core.testing.suite.modules.sharded_modules import ShardedModulesSuite
from fsdp_core.testing.suite.modules.shards import ShardsSuite
from fsdp_core.testing.suite.numerics.clipping import ClippingSuite
from fsdp_core.testing.suite.numerics.forward_backward_order import PassesSuite
from fsdp_core.testing.suite.numerics.many_passes import ManyPassesSuite
from fsdp_core.testing.suite.numerics.pairs import PairsSuite
from fsdp_core.testing.suite.numerics.parity import NumbersSuite
from fsdp_core.testing.suite.numerics.precision import PrecisionSuite
from fsdp_core.testing.suite.numerics.random_steps import RandomStepsSuite
from fsdp_core.testing.suite.numerics.token_means import TokenMeansSuite
from fsdp_core.testing.suite.numerics.unused_parameters import BranchesSuite
from fsdp_core.testing.suite.refusals.bad_checkpoints import BadCheckpointsSuite
from fsdp_core.testing.suite.refusals.bad_modules import BadModulesSuite
from fsdp_core.testing.suite.training.exceptions import ExceptionsSuite
from fsdp_core.testing.suite.training.lightning_regressions import BrokenElsewhereSuite
from fsdp_core.testing.suite.training.loops import LoopsSuite
from fsdp_core.testing.suite.training.optimizers import OptimizersSuite
from fsdp_core.testing.suite.training.resource_leaks import LeftoversSuite
from fsdp_core.testing.suite.training.whole_matrices import WholeMatricesSuite

__all__ = ["PresetSuite", "StrategySuite"]


class StrategySuite(
    ListingSuite,
    ContractSuite,
    NumbersSuite,
    TokenMeansSuite,
    ClippingSuite,
    PairsSuite,
    CapabilitiesSuite,
    ShardsSuite,
    BuiltInPartsSuite,
    ParametersSuite,
    BranchesSuite,
    PassesSuite,
    ManyPassesSuite,
    RandomStepsSuite,
    PrecisionSuite,
    OptimizersSuite,
    WholeMatricesSuite,
    LoopsSuite,
    ExceptionsSuite,
    OutsideStepsSuite,
    CheckpointsSuite,
    FabricCheckpointsSuite,
    ExactResumeSuite,
    LateParamGroupsSuite,
    FrozenParametersSuite,
    DeferredCopiesSuite,
    LeftoversSuite,
    BadModulesSuite,
    ShardedModulesSuite,
    BadCheckpointsSuite,
    BrokenElsewhereSuite,
):
    """All requirements of a strategy, on real ranks, under Trainer and Fabric.

    Behaviour that all strategies inherit from core is tested by core's own tests.

    Example:
        .. code-block:: python

            class TestMine(StrategySuite):
                strategy = "theirs"
    """


class PresetSuite(ListingSuite, ContractSuite, CapabilitiesSuite, LeftoversSuite, PresetClauses):
    """The tests for a preset, which only fixes options of a strategy that the whole suite tests.

    They check that it is listed and implements the contracts, trains as the oracle does, saves and resumes, declares
    what it can do, and leaves nothing behind.

    Example:
        .. code-block:: python

            class TestTheirsOffloaded(PresetSuite):
                strategy = "theirs_offloaded"
                preset_of = "theirs"
    """
