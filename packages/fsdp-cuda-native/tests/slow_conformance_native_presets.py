"""The whole suite over the names that fix options of ``fsdp_native``: ``nox -s conformance``."""

from __future__ import annotations

import os
from typing import ClassVar

import test_conformance
from fsdp_core.testing.suite import StrategySuite

ASKS = test_conformance.ASKS
FAILURES = test_conformance.TestNative.expected_failures
ON_CPU = os.environ.get("FSDP_TESTS_ACCELERATOR", "cpu") == "cpu"
NOT_IN_PAIRS = test_conformance.TestNative.not_in_pairs


class TestNativeWithOffload(StrategySuite):
    strategy = "fsdp_native_full_shard_offload"
    preset_of = "fsdp_native"
    asks: ClassVar = ASKS
    drawn_pairs = 20
    not_in_pairs = NOT_IN_PAIRS
    expected_failures: ClassVar = {
        **FAILURES,
        **(
            {}
            if ON_CPU
            else {"test_accumulation_skips_the_reduction[as it is]": "gradients would be whole on the device"}
        ),
        "test_module_sharded_on_other_terms[cpu_offload=True]": "it offloads from the start, so this asks for the same",
    }


class TestFairscalesName(StrategySuite):
    strategy = "ddp_fully_sharded"
    asks: ClassVar = ASKS
    drawn_pairs = 20
    not_in_pairs = NOT_IN_PAIRS
    expected_failures: ClassVar = FAILURES
