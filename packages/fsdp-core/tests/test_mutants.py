"""Every fault that a mutant has is found by the clause that is meant for it, which the sound backend passes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fsdp_core.testing.reporting.inner_session import Outcome
from mutants.faults import CAUGHT
from mutants.plugin import CHANGES
from mutants.running import SOUND, run

pytest.register_assert_rewrite("adapter_clauses")

from adapter_clauses import AdapterSuite  # noqa: E402

pytestmark = pytest.mark.cpu_limit(400)  # the first of these tests waits for all the clauses

#: Faults that core makes up for, by a clause that shows it.
MADE_UP_FOR = {
    ("sync_left_off_by_exceptions", "test_an_exception_leaves_reduction_on[trainer]"),
    ("sync_left_off_by_exceptions", "test_an_exception_leaves_reduction_on[fabric]"),
}

#: Faults whose clauses are not for the backend as it is, which declares something else.
DECLARED_OTHERWISE = {fault for fault, changes in CHANGES.items() if "capabilities" in changes}

#: What the sound backend must pass here. Clauses of adapters it must pass in test_adapters.py.
SOUND_CLAUSES = {
    clause
    for fault, (clause, _) in CAUGHT.items()
    if fault not in DECLARED_OTHERWISE and not hasattr(AdapterSuite, clause.partition("[")[0])
}


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[str, str], Outcome]:
    """The clauses of this session's tests, each for the mutant that it is meant for, or for what that was."""
    chosen = set()
    for item in request.session.items:
        parameters = getattr(item, "callspec", None)
        if item.path == request.path and parameters is not None:
            fault = parameters.params.get("fault")
            clause = parameters.params.get("clause") or CAUGHT[fault][0]
            chosen.add((SOUND if fault is None else f"{SOUND}_{fault}", clause))
    return run(tmp_path_factory.mktemp("session"), chosen)


@pytest.mark.parametrize("fault", CAUGHT)
def test_fault_is_found(outcomes: Mapping[tuple[str, str], Outcome], fault: str) -> None:
    clause, words = CAUGHT[fault]
    found = outcomes[f"{SOUND}_{fault}", clause]
    assert found.result == "failed"
    assert words in found.failing_lines


@pytest.mark.everything
@pytest.mark.drawn
@pytest.mark.parametrize("clause", sorted(SOUND_CLAUSES))
def test_sound_backend_passes(outcomes: Mapping[tuple[str, str], Outcome], clause: str) -> None:
    found = outcomes[SOUND, clause]
    assert found.result == "passed", found.failing_lines


@pytest.mark.parametrize(("fault", "clause"), sorted(MADE_UP_FOR))
def test_core_makes_up_for_a_fault(outcomes: Mapping[tuple[str, str], Outcome], fault: str, clause: str) -> None:
    found = outcomes[f"{SOUND}_{fault}", clause]
    assert found.result == "passed", found.failing_lines
