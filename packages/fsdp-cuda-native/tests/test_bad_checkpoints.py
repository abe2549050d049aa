"""Checkpoints that can't be loaded or saved."""

from fsdp_core.testing.suite.bad_checkpoints import BadCheckpointsSuite


class TestBadCheckpoints(BadCheckpointsSuite):
    strategy = "fsdp_native"
