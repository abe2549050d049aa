"""The position of the data loader in a checkpoint, on any number of ranks."""

from fsdp_core.testing.suite.loader_positions import LoaderPositionsSuite


class TestLoaderPositions(LoaderPositionsSuite):
    strategy = "fsdp_native"
