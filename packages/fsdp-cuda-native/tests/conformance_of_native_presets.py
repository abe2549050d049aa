"""The whole suite over the names that fix options of ``fsdp_native``: ``nox -s conformance``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fsdp_core import Capability
from fsdp_core.testing.suite import StrategySuite

ASKS = {Capability.RESHARD_AFTER_FORWARD: {"sharding_strategy": "SHARD_GRAD_OP"}}


ITS_CLASS = "its class is that of fsdp_native, which names itself"
FROM_THE_START = "it offloads from the start, so asking for it is asking for the same"


class TestNativeWithOffload(StrategySuite):
    strategy = "fsdp_native_full_shard_offload"
    asks: ClassVar = ASKS
    expected_failures: ClassVar[Mapping[str, str]] = {
        "test_its_class_is_an_adapter_of_cores[trainer]": ITS_CLASS,
        "test_its_class_is_an_adapter_of_cores[fabric]": ITS_CLASS,
        "test_option_that_does_not_exist[trainer]": ITS_CLASS,
        "test_option_that_does_not_exist[fabric]": ITS_CLASS,
        "test_module_sharded_on_other_terms": FROM_THE_START,
    }


class TestFairscalesName(StrategySuite):
    strategy = "ddp_fully_sharded"
    asks: ClassVar = ASKS
