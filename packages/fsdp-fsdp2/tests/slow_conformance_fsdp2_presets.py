"""The whole suite over the name that fixes an option of ``fsdp2``: ``nox -s conformance``."""

from __future__ import annotations

from typing import ClassVar

from fsdp_core.testing.suite import StrategySuite


class TestFSDP2WithOffload(StrategySuite):
    strategy = "fsdp2_cpu_offload"
    preset_of = "fsdp2"
    expected_failures: ClassVar = {
        "test_module_sharded_on_other_terms[cpu_offload=True]": "it offloads from the start, so this asks for the same",
    }
    refused_steps: ClassVar = dict.fromkeys(  # on an accelerator: the module is in host memory
        ("fabric", "automatic", "accumulated", "by hand", "by hand, with raw backward passes"),
        ("module converted to the device that it is on",),
    )
