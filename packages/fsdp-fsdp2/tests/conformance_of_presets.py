"""The whole suite over the name that fixes an option of ``fsdp2``: ``nox -s conformance``."""

from __future__ import annotations

from fsdp_core.testing.suite import StrategySuite


class TestFSDP2WithOffload(StrategySuite):
    strategy = "fsdp2_cpu_offload"
