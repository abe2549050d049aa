"""The whole suite over the names that fix options of ``fsdp_native``: ``nox -s conformance``."""

from __future__ import annotations

from typing import ClassVar

from fsdp_core import Capability
from fsdp_core.testing.suite import StrategySuite

ASKS = {Capability.RESHARD_AFTER_FORWARD: {"sharding_strategy": "SHARD_GRAD_OP"}}


class TestNativeWithOffload(StrategySuite):
    strategy = "fsdp_native_full_shard_offload"
    asks: ClassVar = ASKS


class TestFairscalesName(StrategySuite):
    strategy = "ddp_fully_sharded"
    asks: ClassVar = ASKS
