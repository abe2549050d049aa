"""The tests that every sharded strategy passes, by subject. A backend's package inherits them.

Example:
    .. code-block:: python

        # test_conformance.py
        from fsdp_core.testing.suite import StrategySuite


        class TestMine(StrategySuite):
            strategy = "theirs"

Needs ``pip install "fsdp-core[testing]"``, torch and Lightning. Each test runs real ranks, on the CPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsdp_core.testing.launching import forking

if TYPE_CHECKING:
    from fsdp_core.testing.suite.base_class import Clauses, requires
    from fsdp_core.testing.suite.strategy_suite import PresetSuite, StrategySuite

__all__ = ["Clauses", "PresetSuite", "StrategySuite", "requires"]

_HOMES = {
    "Clauses": "base_class",
    "PresetSuite": "strategy_suite",
    "StrategySuite": "strategy_suite",
    "requires": "base_class",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if forking.tests_will_run and _HOMES[name] == "strategy_suite":
        forking.prepare()  # the process from which ranks are forked imports the suite meanwhile
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
