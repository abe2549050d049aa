"""A plugin's description of its strategy matches the classes that it names, and is cheap to load."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import fsdp_core
from fsdp_core.plugins import registry
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing.launching.forking import scaled_limit
from fsdp_core.testing.suite.base_class import Clauses

__all__ = ["ListingSuite"]


class ListingSuite(Clauses):
    """The strategy is listed, its description is correct, and listing it imports nothing heavy."""

    def test_it_is_listed_and_can_run_here(self) -> None:
        """``fsdp list`` must show the strategy, as available on this machine."""
        assert self.strategy in registry.strategies()
        assert registry.unavailable(self.strategy) is None

    @pytest.mark.parametrize(("front_end", "foreign"), [("trainer", "precision"), ("fabric", "precision_plugin")])
    def test_the_options_are_the_constructors_arguments(self, front_end: FrontEnd, foreign: str) -> None:
        """The declared options must be the constructor's keywords, with the same defaults."""
        declared = {option.name: option.default for option in fsdp_core.describe(self.strategy).options}
        constructor = self.strategy_class(front_end)
        taken = inspect.signature(constructor).parameters
        if foreign not in taken:
            declared.pop(foreign, None)
        named = [parameter for parameter in taken.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
        own = {parameter.name: parameter.default for parameter in named}
        assert own == {name: default for name, default in declared.items() if name in own}
        for name, default in declared.items():  # including those that the constructor passes on
            constructor(**{name: default})

    def test_listing_imports_neither_torch_nor_lightning(self) -> None:
        """Listing and describing the strategy must import neither torch nor Lightning nor numpy."""
        package = str(fsdp_core.describe(self.strategy).trainer).split(":")[0].split(".")[0]
        code = (
            "import sys; from fsdp_core.plugins import registry\n"
            f"name = {self.strategy!r}; registry.strategies()[name], registry.describe(name).as_dict()\n"
            "registry.provider(name), registry.unavailable(name)\n"
            f"import {package}; print({{'torch', 'lightning', 'numpy'}} & set(sys.modules))"
        )
        process = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled_limit(60), check=True
        )
        assert process.stdout == "set()\n"
