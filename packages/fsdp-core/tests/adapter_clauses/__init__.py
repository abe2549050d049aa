"""What core's adapters do, whatever the backend: launching, signals, loaders, files, refusals of what users pass.

Core runs these clauses over its backend for tests; fsdp2's tests over torch's ``fully_shard``, and fsdp-xla's over one
controller, whose ranks are no processes.
"""

from adapter_clauses.async_saves import AsyncSavesSuite
from adapter_clauses.bad_checkpoints import BadCheckpointsOfAdaptersSuite
from adapter_clauses.bad_modules import BadModulesOfAdaptersSuite
from adapter_clauses.bad_options import BadOptionsSuite
from adapter_clauses.exceptions import ExceptionsOfAdaptersSuite
from adapter_clauses.fabric_checkpoints import FabricFilesSuite
from adapter_clauses.finite_gradients import FiniteGradientsSuite
from adapter_clauses.frozen_parameters import FrozenParametersOfAdaptersSuite
from adapter_clauses.launching import LaunchingSuite
from adapter_clauses.lightning_regressions import LightningToolsSuite
from adapter_clauses.loader_positions import LoaderPositionsSuite
from adapter_clauses.loops import LoopsOfAdaptersSuite
from adapter_clauses.pickled_strategies import PickledStrategiesSuite
from adapter_clauses.preemption import PreemptionSuite
from adapter_clauses.resource_leaks import LeftoversOfSavesSuite
from adapter_clauses.resume_moments import ResumeMomentsSuite
from adapter_clauses.scattered_saves import ScatteredSavesSuite
from adapter_clauses.token_means import TokenMeansOfAdaptersSuite
from adapter_clauses.trainer_checkpoints import CheckpointFilesSuite
from adapter_clauses.users_checkpoint_io import UsersCheckpointIOSuite

__all__ = ["AdapterSuite"]


class AdapterSuite(
    PickledStrategiesSuite,
    LaunchingSuite,
    PreemptionSuite,
    LoaderPositionsSuite,
    ResumeMomentsSuite,
    AsyncSavesSuite,
    ScatteredSavesSuite,
    UsersCheckpointIOSuite,
    CheckpointFilesSuite,
    FabricFilesSuite,
    FrozenParametersOfAdaptersSuite,
    FiniteGradientsSuite,
    LoopsOfAdaptersSuite,
    TokenMeansOfAdaptersSuite,
    LightningToolsSuite,
    ExceptionsOfAdaptersSuite,
    LeftoversOfSavesSuite,
    BadOptionsSuite,
    BadModulesOfAdaptersSuite,
    BadCheckpointsOfAdaptersSuite,
):
    """All of it."""
