"""The whole suite over the names that fix options of ``fsdp_native``: ``nox -s conformance``."""

from __future__ import annotations

from typing import ClassVar

from fsdp_core import Capability
from fsdp_core.testing.suite import StrategySuite

ASKS = {Capability.RESHARD_AFTER_FORWARD: {"sharding_strategy": "SHARD_GRAD_OP"}}


class TestNativeWithOffload(StrategySuite):
    strategy = "fsdp_native_full_shard_offload"
    preset_of = "fsdp_native"
    asks: ClassVar = ASKS
    expected_failures: ClassVar = {
        "test_module_sharded_on_other_terms": "it offloads from the start, so asking for it is asking for the same",
    }


class TestFairscalesName(StrategySuite):
    strategy = "ddp_fully_sharded"
    asks: ClassVar = ASKS
