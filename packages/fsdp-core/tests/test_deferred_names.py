"""A registry is filled by whoever looks into it first, in whatever way, and is what it was from then on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from fsdp_core.lightning.registration.deferred_names import fill_when_read


class Registry(dict[str, Any]):
    """As Lightning's: a dict with a few methods."""

    def register(self, name: str, value: int) -> None:
        if name in self:
            raise ValueError(name)
        self[name] = value

    def available_strategies(self) -> list[str]:
        return list(self.keys())


@pytest.fixture
def registry() -> Registry:
    registry = Registry(ddp=1)
    fill_when_read(registry, lambda: None, lambda: registry.update(fsdp2=2), never=frozenset({"single_tpu"}))
    return registry


READS: dict[str, Callable[[Registry], object]] = {
    "in": lambda registry: "fsdp2" in registry,
    "[]": lambda registry: registry["fsdp2"] == 2,
    "get": lambda registry: registry.get("fsdp2") == 2,
    "list": lambda registry: list(registry) == ["ddp", "fsdp2"],
    "len": lambda registry: len(registry) == 2,
    "dict": lambda registry: dict(registry) == {"ddp": 1, "fsdp2": 2},
    "unpacked": lambda registry: {**registry} == {"ddp": 1, "fsdp2": 2},
    "items": lambda registry: list(registry.items()) == [("ddp", 1), ("fsdp2", 2)],
    "==": lambda registry: registry == {"ddp": 1, "fsdp2": 2},
    "!=": lambda registry: registry != {"ddp": 1},
    "|": lambda registry: registry | {} == {"ddp": 1, "fsdp2": 2},
    "repr": lambda registry: "fsdp2" in repr(registry) and "fsdp2" in str(registry),
    "pickled": lambda registry: pickle.loads(pickle.dumps(registry)) == {"ddp": 1, "fsdp2": 2},
    "copied": lambda registry: copy.deepcopy(registry) == copy.copy(registry) == {"ddp": 1, "fsdp2": 2},
    "available_strategies": lambda registry: registry.available_strategies() == ["ddp", "fsdp2"],
}


@pytest.mark.parametrize("way", READS)
def test_reading_fills_it(registry: Registry, way: str) -> None:
    assert isinstance(registry, Registry)
    assert type(registry) is not Registry
    assert READS[way](registry)
    assert type(registry) is Registry


def test_what_lightning_does_while_it_is_imported_does_not(registry: Registry) -> None:
    deferred = type(registry)
    assert "single_tpu" not in registry
    registry.register("single_tpu", 3)
    registry["another"] = 4
    assert "single_tpu" in registry
    with pytest.raises(ValueError, match="ddp"):
        registry.register("ddp", 5)
    assert type(registry) is deferred
    assert list(registry) == ["ddp", "single_tpu", "another", "fsdp2"]


def test_another_object_of_its_class_is_a_plain_one(registry: Registry) -> None:
    other = type(registry)(a=1)
    assert list(other) == ["a"]
    assert type(other) is Registry


def test_what_is_to_be_entered_is_found_before_others_see_it_half_done() -> None:
    registry, seen = Registry(ddp=1), []
    deferred: list[type] = []
    fill_when_read(registry, lambda: seen.append(type(registry)), lambda: registry.update(fsdp2=2))
    deferred.append(type(registry))
    assert "fsdp2" in registry
    assert seen == deferred
