"""The suite of fsdp-core, as every backend's package runs it."""

from __future__ import annotations

from typing import ClassVar

from fsdp_core import Capability
from fsdp_core.testing.suite import PresetSuite, StrategySuite


class TestNative(StrategySuite):
    strategy = "fsdp_native"
    asks: ClassVar = {Capability.RESHARD_AFTER_FORWARD: {"sharding_strategy": "SHARD_GRAD_OP"}}


class TestNativeWithOffload(PresetSuite):
    strategy = "fsdp_native_full_shard_offload"
    preset_of = "fsdp_native"


class TestFairscalesName(PresetSuite):
    strategy = "ddp_fully_sharded"
    preset_of = "fsdp_native"
