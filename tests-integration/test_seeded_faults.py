"""A vendor's backend that is wrong does not pass: each seeded fault is found by a clause, for its reason."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fsdp_core.testing.reporting.inner_session import Outcome
from seeded.changes import DECLARED, EXAMPLES
from seeded.numbers import OF_NUMBERS
from seeded.running import run
from seeded.state import AFTERWARDS, OF_STATE

FAULTS = OF_NUMBERS | OF_STATE | AFTERWARDS

#: What an example is called that is seeded with nothing, but declares what a clause of the table needs.
SOUND = "sound"

CHANGES = {(strategy, name): fault.changes for name, fault in FAULTS.items() for strategy in EXAMPLES}
CHANGES |= {(strategy, SOUND): (DECLARED,) for strategy in EXAMPLES}

CLAUSES = sorted({fault.clause for fault in FAULTS.values()})


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[str, str], Outcome]:
    """The clauses that this session has chosen from the table, for what is wrong and for what is not."""
    chosen: set[tuple[str, str]] = set()
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            of: dict[str, str] = item.callspec.params
            fault = of.get("fault", SOUND)
            clause = of["clause"] if fault == SOUND else FAULTS[fault].clause
            chosen.add((f"{of['strategy']}_{fault}", clause))
    return run(tmp_path_factory.mktemp("session"), CHANGES, chosen)


@pytest.mark.drawn
@pytest.mark.cpu_limit(150)  # the first of these tests waits for all the clauses
@pytest.mark.parametrize("strategy", EXAMPLES)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(outcomes: Mapping[tuple[str, str], Outcome], fault: str, strategy: str) -> None:
    seeded = FAULTS[fault]
    found = outcomes[f"{strategy}_{fault}", seeded.clause]
    assert found.result == "failed", f"passed, although {seeded.is_wrong}"
    assert seeded.says in found.failing_lines


@pytest.mark.drawn
@pytest.mark.cpu_limit(150)
@pytest.mark.parametrize("strategy", EXAMPLES)
@pytest.mark.parametrize("clause", CLAUSES)
def test_example_without_a_fault_passes(
    outcomes: Mapping[tuple[str, str], Outcome], clause: str, strategy: str
) -> None:
    found = outcomes[f"{strategy}_{SOUND}", clause]
    assert found.result == "passed", found.failing_lines


def test_there_are_as_many_as_the_page_says() -> None:
    assert len(OF_NUMBERS | OF_STATE) == 25
