"""Chooses the tests of a run: those of ``nox -s tests``, or of ``nox -s everything``, which are the others.

A run with ``--part=tests`` has every test that needs no ranks, and the first set of parameters of each that does. With
``--part=everything`` it has what is left, of which a third is drawn: that a clause of the conformance suite holds for
a set of parameters and for a strategy is a pair, and each set is run with a third of the strategies. They take turns,
which a seed begins, so that three seeds in a row have every pair.

A run with ``--part=drawn`` leaves out nothing but what is marked ``drawn``: of the sets of parameters of such a test,
it has a third, and one at least, as ``--part=everything`` has. Three seeds in a row have all of them.
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal, get_args

import pytest

__all__ = ["Part", "draw_in_turn", "is_drawn", "split"]

Part = Literal["tests", "everything", "drawn", "all"]

#: The environment variable that names the seed, and the seed of a run that names none.
SEED, DEFAULT_SEED = "FSDP_PAIRS_SEED", "17"

#: Which third of the pairs a strategy takes. What three strategies run of one suite, they run between them.
_THIRDS = {"fsdp2": 0, "fsdp_native": 1, "xla_fsdp": 2, "xla_fsdp_spmd": 2}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parts", "the parts of this project's tests")
    group.addoption("--part", choices=get_args(Part), default="all", help="what `nox -s tests` runs, or the others")
    group.addoption("--strategies", default="", help="runs the classes of these strategies alone, joined by commas")
    group.addoption(
        "--pairs-seed",
        type=_seed,
        default=os.environ.get(SEED, DEFAULT_SEED),
        help=f"draws what `--part=everything` and `--part=drawn` run of many parameters; otherwise {SEED} does",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "everything: a test that takes long, left to `nox -s everything`")
    config.addinivalue_line(
        "markers", "drawn: of its sets of parameters, `--part=drawn` and `--part=everything` run a third"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = split(items, config.getoption("--part"), config.getoption("--pairs-seed"))
    if strategies := config.getoption("--strategies"):
        selected = [item for item in selected if _strategy(item) in strategies.split(",")]
    dropped = set(items) - set(selected)
    if dropped:
        items[:] = selected
        config.hook.pytest_deselected(items=list(dropped))


def split(items: Iterable[pytest.Item], part: Part, seed: int) -> list[pytest.Item]:
    """The tests of a part, in their order.

    Args:
        items: All tests.
        part: Which of them; ``"all"`` leaves nothing out.
        seed: Draws which sets of parameters ``"everything"`` runs with a strategy, and ``"drawn"`` of a test.
    """
    if part == "all":
        return list(items)
    if part == "drawn":
        return draw_in_turn(items, seed)
    positions: dict[str, int] = defaultdict(int)
    selected = []
    for item in items:
        position = positions[_function(item)]
        positions[_function(item)] += 1
        is_further = _needs_ranks(item) and _is_parametrized(item) and position > 0
        is_left = is_further or item.get_closest_marker("everything") is not None or _starts_scripts(item)
        if part == "tests":
            keeps = not is_left
        else:
            keeps = is_left and (not (_needs_ranks(item) or _starts_scripts(item)) or is_drawn(item, position, seed))
        if keeps:
            selected.append(item)
    return selected if part == "tests" else draw_in_turn(selected, seed)


def draw_in_turn(items: Iterable[pytest.Item], seed: int) -> list[pytest.Item]:
    """All tests, but of each that is marked ``drawn`` the sets of parameters whose turn it is with a seed.

    Args:
        items: All tests, those of a function in one order always.
        seed: Whose turn it is. Functions differ in what they begin with, or one seed had the same strategy in all.
    """
    items = list(items)
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("drawn") is not None:
            functions[_function(item)].append(item)
    left_out: set[pytest.Item] = set()
    for function, sets in functions.items():
        turns = min(3, len(sets))
        turn = (seed + zlib.crc32(function.encode())) % turns
        left_out |= set(sets) - set(sets[turn::turns])
    return [item for item in items if item not in left_out]


def is_drawn(item: pytest.Item, position: int, seed: int) -> bool:
    """Whether it is the turn of a test that needs ranks.

    Args:
        item: The test.
        position: Which of its function's sets of parameters it has, counted from 0.
        seed: Moves the turns by one.
    """
    strategy = _strategy(item)
    clause = getattr(item, "originalname", item.name) if strategy else _function(item)
    turn = seed + position + zlib.crc32(clause.encode())
    is_of_adapters = getattr(getattr(item, "cls", None), "__name__", "").startswith("TestAdapters")
    if is_of_adapters and strategy == "loopback":  # they are core's, and its ranks are the cheapest
        return turn % 6 != _THIRDS["fsdp2"]
    parts = 6 if is_of_adapters and _loopback_runs(item) else 3
    return turn % parts == _THIRDS.get(strategy, zlib.crc32(strategy.encode()) % 3)


def _loopback_runs(item: pytest.Item) -> bool:
    """Whether core's backend for tests declares what a clause needs."""
    from fsdp_core.testing.loopback.plugin import LOOPBACK

    declared = {*LOOPBACK.capabilities, *(option.name for option in LOOPBACK.options)}
    return all(need in declared for mark in item.iter_markers("fsdp_requires") for need in mark.args)


def _strategy(item: pytest.Item) -> str:
    return str(getattr(getattr(item, "cls", None), "strategy", ""))


def _seed(word: str) -> int:
    if not word.isdigit():
        raise argparse.ArgumentTypeError(f"{word!r} is no seed. Set {SEED} to a whole number, such as {SEED}=5")
    return int(word)


def _function(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


def _is_parametrized(item: Any) -> bool:
    return hasattr(item, "callspec")


def _needs_ranks(item: Any) -> bool:
    return "_rank_pools" in getattr(item, "fixturenames", ())


def _starts_scripts(item: pytest.Item) -> bool:
    return item.get_closest_marker("fsdp_scripts") is not None
