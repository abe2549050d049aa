"""The whole suite over the name that fixes an option of ``fsdp2``: ``nox -s conformance``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fsdp_core.testing.suite import StrategySuite

ITS_CLASS = "its class is that of fsdp2, which names itself"
FROM_THE_START = "it offloads from the start, so asking for it is asking for the same"


class TestFSDP2WithOffload(StrategySuite):
    strategy = "fsdp2_cpu_offload"
    expected_failures: ClassVar[Mapping[str, str]] = {
        "test_its_class_is_an_adapter_of_cores[trainer]": ITS_CLASS,
        "test_its_class_is_an_adapter_of_cores[fabric]": ITS_CLASS,
        "test_option_that_does_not_exist[trainer]": ITS_CLASS,
        "test_option_that_does_not_exist[fabric]": ITS_CLASS,
        "test_module_sharded_on_other_terms": FROM_THE_START,
    }
