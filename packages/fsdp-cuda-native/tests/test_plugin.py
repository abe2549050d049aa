"""What the plugin says of itself."""

from fsdp_core.testing.suite.listing import ListingSuite


class TestListing(ListingSuite):
    strategy = "fsdp_native"


class TestListingWithOffload(ListingSuite):
    strategy = "fsdp_native_full_shard_offload"


class TestListingForFairscale(ListingSuite):
    strategy = "ddp_fully_sharded"
