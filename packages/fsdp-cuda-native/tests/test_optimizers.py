"""Optimizers that are older or younger than the shards."""

from fsdp_core.testing.suite.optimizers import OptimizersSuite


class TestOptimizers(OptimizersSuite):
    strategy = "fsdp_native"
