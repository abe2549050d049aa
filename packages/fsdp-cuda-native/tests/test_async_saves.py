"""Checkpoints written behind training, under Trainer and Fabric."""

from fsdp_core.testing.suite.async_saves import AsyncSavesSuite


class TestAsyncSaves(AsyncSavesSuite):
    strategy = "fsdp_native"
