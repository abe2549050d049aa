"""What the plugin says of itself agrees with the classes that it names."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import fsdp_core
from fsdp_core import registry
from fsdp_core.strategy_info import FrontEnd
from fsdp_fsdp2.plugin import fsdp_strategies, why_not_here

NAMES = ["fsdp2", "fsdp2_cpu_offload"]


def test_it_is_found_under_its_two_names() -> None:
    assert [info.name for info in fsdp_strategies()] == NAMES
    for name in NAMES:
        assert registry.provider(name).name == "fsdp-fsdp2"
        assert registry.unavailable(name) is None
        assert registry.FIRST_PARTY[name] == "fsdp-fsdp2"
    assert fsdp_core.describe("fsdp2").presets == {}
    assert fsdp_core.describe("fsdp2_cpu_offload").presets == {"cpu_offload": True}


@pytest.mark.parametrize(("front_end", "foreign"), [("trainer", "precision"), ("fabric", "precision_plugin")])
def test_the_options_are_the_constructors_arguments(front_end: FrontEnd, foreign: str) -> None:
    strategy = fsdp_core.resolve("fsdp2", front_end)
    declared = {option.name: option.default for option in fsdp_core.describe("fsdp2").options}
    del declared[foreign]
    taken = inspect.signature(strategy).parameters
    own = {name: each.default for name, each in taken.items() if each.kind is not inspect.Parameter.VAR_KEYWORD}
    assert own == declared


def test_the_plugin_imports_neither_torch_nor_lightning() -> None:
    code = (
        "import sys; from fsdp_core import registry; registry.unavailable('fsdp2')\n"
        "import fsdp_fsdp2; print(fsdp_fsdp2.__version__, {'torch', 'lightning', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith(" set()\n")


def test_a_platform_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_here() is None
    monkeypatch.setattr(sys, "platform", "emscripten")
    assert why_not_here() == (
        "torch has no gloo on the platform 'emscripten', and fsdp2 needs it; use Linux, macOS or Windows"
    )
