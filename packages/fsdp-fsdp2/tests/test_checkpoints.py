"""Checkpoints under Trainer and Fabric: sharded and full, on other numbers of ranks, continued."""

from fsdp_core.testing.suite.checkpoints import CheckpointsSuite
from fsdp_core.testing.suite.fabric_checkpoints import FabricCheckpointsSuite


class TestCheckpoints(CheckpointsSuite):
    strategy = "fsdp2"


class TestFabricCheckpoints(FabricCheckpointsSuite):
    strategy = "fsdp2"
