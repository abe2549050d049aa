"""The suite of fsdp-core, as every backend's package runs it."""

from __future__ import annotations

from typing import ClassVar

from fsdp_core import Capability
from fsdp_core.testing.suite import PresetSuite, StrategySuite

# FSDP1's own option for what is reshard_after_forward elsewhere
ASKS = {Capability.RESHARD_AFTER_FORWARD: {"sharding_strategy": "SHARD_GRAD_OP"}}


class TestNative(StrategySuite):
    strategy = "fsdp_native"
    asks: ClassVar = ASKS


class TestNativeWithOffload(PresetSuite):
    strategy = "fsdp_native_full_shard_offload"
    preset_of = "fsdp_native"
    asks: ClassVar = ASKS


class TestFairscalesName(PresetSuite):
    strategy = "ddp_fully_sharded"
    preset_of = "fsdp_native"
