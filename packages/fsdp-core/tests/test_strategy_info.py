from __future__ import annotations

import json
import pickle
import re
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from fsdp_core import Capability, Option, StrategyInfo
from fsdp_core.errors import StrategyInfoError
from fsdp_core.lightning.capability_checks import capability_of
from fsdp_core.testing.refusals import refusal

GOOD: dict[str, Any] = {
    "name": "my_fsdp",
    "summary": "Shards.",
    "trainer": "my_fsdp.trainer:Mine",
    "accelerators": ["cpu"],
    "capabilities": ["clip_by_norm", Capability.CPU_OFFLOAD],
    "options": [Option(name="level", default=1)],
    "presets": {"level": 2},
}


def test_collections_are_made_immutable() -> None:
    presets = {"level": 2}
    info = StrategyInfo(**{**GOOD, "presets": presets})
    presets["level"] = 3
    assert (info.presets, info.accelerators) == ({"level": 2}, ("cpu",))
    assert info.capabilities == {Capability.CLIP_BY_NORM, Capability.CPU_OFFLOAD}
    assert info.options == (Option(name="level", default=1),)
    with pytest.raises(FrozenInstanceError):
        info.name = "other"  # type: ignore[misc]


def test_it_is_plain_data() -> None:
    info = StrategyInfo(**GOOD)
    assert pickle.loads(pickle.dumps(info)) == info
    assert hash(replace(info)) == hash(info)
    assert json.loads(json.dumps(info.as_dict())) == {
        "name": "my_fsdp",
        "summary": "Shards.",
        "trainer": "my_fsdp.trainer:Mine",
        "fabric": None,
        "accelerators": ["cpu"],
        "capabilities": ["clip_by_norm", "cpu_offload"],
        "options": [{"name": "level", "default": 1, "help": ""}],
        "presets": {"level": 2},
        "requires": [],
    }


@pytest.mark.parametrize("name", ["a", "fsdp2", "my-fsdp", "x.y_z2"])
def test_good_names(name: str) -> None:
    assert StrategyInfo(**{**GOOD, "name": name}).name == name


@pytest.mark.parametrize("name", ["", "FSDP", "2fsdp", "my fsdp", "_x", "fsdp\n", "é", None, 5])
def test_bad_names(name: Any) -> None:
    assert refusal(StrategyInfoError, lambda: StrategyInfo(**{**GOOD, "name": name})) == (
        f"a strategy can't be called {name!r}.\n"
        "Use a lower-case letter, then lower-case letters, digits, '_', '-' or '.', such as 'my_fsdp'."
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"trainer": "my.module.Class"},
            "trainer is 'my.module.Class'.\nWrite it as a string, 'package.module:attribute'.",
        ),
        ({"fabric": object}, "fabric is <class 'object'>.\nWrite it as a string, 'package.module:attribute'."),
        ({"probe": "here"}, "probe is 'here'.\nWrite it as a string, 'package.module:attribute'."),
        ({"trainer": None}, "it has neither a Trainer nor a Fabric class.\nGive trainer=, fabric= or both."),
        ({"accelerators": "cpu"}, "accelerators is a string.\nGive a tuple: accelerators=('cpu',)."),
        ({"requires": "torch>=2.9"}, "requires is a string.\nGive a tuple: requires=('torch>=2.9',)."),
        ({"accelerators": ()}, "accelerators is empty.\nName what it runs on, such as accelerators=('any', 'cpu')."),
        (
            {"options": [Option(name="b"), Option(name="a"), Option(name="b", default=1), Option(name="level")]},
            "options name b more than once.\nKeep one Option of each name.",
        ),
        (
            {"presets": {"levle": 2}},
            "presets name levle, which is not an option.\nList it in options, with its default.",
        ),
    ],
)
def test_bad_fields(change: dict[str, Any], message: str) -> None:
    told = refusal(StrategyInfoError, lambda: StrategyInfo(**{**GOOD, **change}))
    assert told == f"strategy 'my_fsdp' has an invalid description: {message}"


def test_an_unknown_capability() -> None:
    first, second = refusal(StrategyInfoError, lambda: StrategyInfo(**{**GOOD, "capabilities": ["fly"]})).split("\n")
    assert first == "strategy 'my_fsdp' has an invalid description: 'fly' is not a valid Capability."
    assert second.startswith("The capabilities are: activation_checkpointing, clip_by_norm, ")


def test_bad_options() -> None:
    assert refusal(StrategyInfoError, lambda: Option(name="cpu-offload")) == (
        "an option can't be called 'cpu-offload': it isn't a Python identifier.\n"
        "Write the name of the constructor's keyword argument."
    )
    assert refusal(StrategyInfoError, lambda: Option(name="policy", default=object())) == (  # type: ignore[arg-type]
        "option 'policy' has a default of type object, which isn't plain data.\n"
        "Write None, a bool, a number or a string."
    )


@pytest.mark.parametrize("capability", Capability)
def test_capabilities_say_what_they_are_and_what_asks_for_them(capability: Capability) -> None:
    assert re.fullmatch(r"[A-Z].*\.", capability.text)
    assert capability.asked_by
    assert capability.option is None or capability.asked_by.startswith(f"{capability.option}=")
    if capability.option:
        value = capability.asked_by.partition("=")[2].strip("'")
        assert capability_of(capability.option, value) is capability
    assert pickle.loads(pickle.dumps(capability)) is capability
