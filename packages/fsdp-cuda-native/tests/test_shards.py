"""What each rank holds."""

from fsdp_core.testing.suite.shards import ShardsSuite


class TestShards(ShardsSuite):
    strategy = "fsdp_native"
