"""``fsdp_auto`` chooses what fits with a tenth to spare, and of that what costs a tenth less than others."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fsdp_core.errors import ShardingError
from fsdp_core.plugins import registry
from fsdp_core.plugins.discovery import BrokenPlugin, Provider
from fsdp_core.rehearsal.candidates import Candidate, candidates_for
from fsdp_core.rehearsal.choosing import choose
from fsdp_core.rehearsal.planning import Outcome


def planned(strategy: str, peak: int = 100, sent: int = 0, flops: int = 0, **more: Any) -> tuple[Candidate, Outcome]:
    options, error = more.get("options", {}), more.get("error")
    candidate = Candidate(strategy=strategy, options=options, ranks=more.get("ranks", 2))
    facts: dict[str, Any] = {"peak_bytes": peak, "sent_bytes": sent, "flops": flops, "error": error}
    return candidate, Outcome(code=strategy, strategy=strategy, ranks=candidate.ranks, **facts)


@pytest.mark.parametrize(
    ("memory", "others", "chosen"),
    [
        (110, [planned("b", peak=99, sent=2000)], "a"),  # a tenth to spare, to the byte
        (109, [planned("b", peak=99, sent=2000)], "b"),
        (1000, [planned("b", sent=900, flops=200)], "b"),
        (1000, [planned("b", sent=950, flops=100)], "a"),  # less than a tenth fewer
        (1000, [planned("b", sent=1050, flops=50)], "b"),  # alike in bytes: less computation
        (1000, [planned("b", sent=2000, flops=50)], "a"),
        (1000, [planned("b", sent=0, error="it fails")], "a"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_cheapest_that_fits(memory: int, others: list[tuple[Candidate, Outcome]], chosen: str) -> None:
    assert choose([planned("a", sent=1000, flops=100), *others], memory).strategy == chosen


def test_of_what_is_alike_the_one_without_options() -> None:
    plans = [planned("auto", sent=10, options={"memory": 1}), planned("ddp", sent=10)]
    assert choose(plans, 1000).strategy == "ddp"


def test_one_device_sends_nothing_to_speak_of() -> None:
    choice = choose([planned("auto", ranks=1)], 1000)
    assert (choice.ranks, choice.reason) == (1, "it needs 100 B of 1000 B a device")


def test_where_nothing_fits_the_least_is_named() -> None:
    with pytest.raises(ShardingError, match=r"The least is b, with 90 B\.\nUse more devices"):
        choose([planned("a"), planned("b", peak=90)], 95)


def test_what_can_not_be_rehearsed_is_said_once() -> None:
    plans = [planned("a", error="no shapes, at train.py:3"), planned("b", error="no shapes, at train.py:3")]
    with pytest.raises(
        ShardingError,
        match=r"nothing can be chosen: a, b: no shapes, at train\.py:3\.\nIf a run would raise this too, mend it there",
    ):
        choose(plans, 1000)


def test_what_was_left_out_is_said_with_the_choice() -> None:
    plans = [planned("ddp", error="no gradient of x"), planned("b")]
    refused = {"c": "its package failed to load"}
    choice = choose(plans, 1000, refused)
    assert choice.strategy == "b"
    assert choice.reason.endswith("in a step; left out: ddp: no gradient of x; c: its package failed to load")
    with pytest.raises(
        ShardingError, match=r"The least is b, with 100 B; left out: ddp: no gradient of x; c: its pack"
    ):
        choose(plans, 10, refused)


def test_a_package_that_does_not_load_is_no_candidate_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BrokenPlugin(name="c", provider=Provider(name="fsdp-c", version="1.0"), error=ImportError("no libc.so"))
    monkeypatch.setattr(registry, "broken", lambda: (broken,))
    _, refused = candidates_for(2, nn.Linear(2, 2))
    assert refused["c"].endswith("failed to load: ImportError: no libc.so")
