"""The whole suite over the names that fix options of ``fsdp_native``: ``nox -s conformance``."""

from __future__ import annotations

from typing import ClassVar

import test_conformance
from fsdp_core.testing.suite import StrategySuite

ASKS = test_conformance.ASKS
FAILURES = test_conformance.TestNative.expected_failures
NOT_IN_PAIRS = test_conformance.TestNative.not_in_pairs


class TestNativeWithOffload(StrategySuite):
    strategy = "fsdp_native_full_shard_offload"
    preset_of = "fsdp_native"
    asks: ClassVar = ASKS
    drawn_pairs = 20
    not_in_pairs: ClassVar = {**NOT_IN_PAIRS, "sync_each_batch=True": "refused together with offloading"}
    expected_failures: ClassVar = {
        **FAILURES,
        "test_module_sharded_on_other_terms[cpu_offload=True]": "it offloads from the start, so this asks for the same",
        **dict.fromkeys(
            (
                "test_accumulation_equals_plain[sync_each_batch]",
                "test_accumulation_skips_the_reduction[sync_each_batch]",
                "test_accumulated_gradients[{'options': {'sync_each_batch': True}}]",
                "test_on_another_number_of_ranks[2 to 3, sync_each_batch]",
            ),
            "FSDP1 can't reduce each micro-batch and offload: it would replace gradients; the combination is refused",
        ),
    }


class TestFairscalesName(StrategySuite):
    strategy = "ddp_fully_sharded"
    asks: ClassVar = ASKS
    drawn_pairs = 20
    not_in_pairs = NOT_IN_PAIRS
    # the second one is about parameters that keep their shapes, which are flat by default under this name
    refused_pairs = test_conformance.TestNative.refused_pairs[:1]
    expected_failures: ClassVar = FAILURES
