"""Steps that are composed at random: forward and backward passes of parts, freezes, writes and hooks, in any order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import RankError, Ranks
from fsdp_core.testing.oracle import FP32_TOLERANCE, Trained
from fsdp_core.testing.steps.grammar import Front, Program, compose
from fsdp_core.testing.steps.running import Raised, run_all
from fsdp_core.testing.steps.unsharded_copies import Outcome, train_in_one_process
from fsdp_core.testing.suite.base_class import Clauses, each_ranks, requires, shares_of

__all__ = ["COUNT", "SEED", "RandomStepsSuite"]

#: Environment variables: how many steps are composed for each front end, and the first of their seeds.
COUNT, SEED = "FSDP_STEPS", "FSDP_STEPS_SEED"

#: The time limit of one program, which takes half a second if ranks have the processors to themselves.
_SECONDS_PER_PROGRAM = 30.0

#: The number of programs in the first test, which is run with every change, and in each of the others. The ranks are
#: started once for a test.
_PROGRAMS_IN_FIRST, _PROGRAMS_PER_TEST = 3, 7

_FRONTS: tuple[Front, ...] = ("fabric", "automatic", "by hand")


def _parameter_sets() -> list[Any]:
    """Divide the programs of each front end among tests."""
    count, first = int(os.environ.get(COUNT, "10")), int(os.environ.get(SEED, "0"))
    bounds = sorted({0, *range(_PROGRAMS_IN_FIRST, count, _PROGRAMS_PER_TEST), count})
    return [
        pytest.param(
            front,
            [compose(first + index, front) for index in range(begin, end)],
            marks=[requires(Capability.MANUAL_OPTIMIZATION)] if front == "by hand" else [],
            id=f"{front} {begin + 1} to {end}",
        )
        for front in _FRONTS
        for begin, end in pairwise(bounds)
    ]


class RandomStepsSuite(Clauses):
    """A step that is composed at random ends as in plain torch, or is refused in words."""

    @pytest.mark.parametrize(("front", "programs"), _parameter_sets())
    def test_random_steps(self, ranks: Ranks, tmp_path: Path, front: Front, programs: list[Program]) -> None:
        """Losses and weights must be those of one process to 1e-5, unless the step is refused in words on all ranks."""
        messages = _find_faults(ranks, self.strategy, tmp_path, front, programs)
        failed = [
            f"{program}\n# {front}, {SEED}={program.seed}: {message}\n"
            for program, message in zip(programs, messages, strict=True)
            if message is not None
        ]
        assert not failed, f"{len(failed)} of {len(programs)} steps:\n\n" + "\n".join(failed)


def _find_faults(
    ranks: Ranks, strategy: str, tmp_path: Path, front: Front, programs: Sequence[Program]
) -> list[str | None]:
    """Run programs, and describe what is wrong with each; ``None`` if nothing is."""
    limit = _SECONDS_PER_PROGRAM * len(programs)
    try:
        results = ranks.run(2, run_all, strategy, str(tmp_path), front, programs, timeout=limit)
    except RankError as error:  # one program has ended the ranks: run each alone, to find out which
        if len(programs) == 1:
            return [f"the ranks have ended: {error}"]
        return [_find_faults(ranks, strategy, tmp_path, front, [program])[0] for program in programs]
    expected_outcomes = [train_in_one_process(program, front, shares_of(ranks, 2)) for program in programs]
    outcomes_by_program = zip(*each_ranks(ranks, results), strict=True)
    return [_find_fault(*outcomes) for outcomes in zip(outcomes_by_program, expected_outcomes, strict=True)]


def _find_fault(rank_outcomes: Sequence[Trained | Raised], expected: Outcome) -> str | None:
    """Describe what is wrong with the ranks' outcomes of a program, if anything is."""
    # A ``Raised`` begins with a bool: whether its message is a refusal in words. A ``Trained`` begins with losses.
    raised = [outcome[1] for outcome in rank_outcomes if isinstance(outcome[0], bool)]
    if raised and len(raised) < len(rank_outcomes):
        return f"some ranks have raised, and others have not: {raised[0]}"
    if raised:
        is_right = isinstance(expected, str) or all(outcome[0] for outcome in rank_outcomes)
        return None if is_right else f"neither right nor refused in words: {raised[0]}"
    if isinstance(expected, str):
        return f"plain torch raises, and the ranks have not: {expected}"
    return next((message for outcome in rank_outcomes if (message := _differences(outcome, expected))), None)


def _differences(trained: Trained | Raised, expected: Trained) -> str | None:
    losses, weights = trained
    assert not isinstance(losses, bool) and not isinstance(weights, str)
    expected_losses, expected_weights = expected
    loss_errors = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, expected_losses, strict=True)]
    weight_errors = {
        name: float((weights[name].cpu() - tensor).abs().max()) / max(1.0, float(tensor.abs().max()))
        for name, tensor in expected_weights.items()
    }
    wrong = [name for name, error in weight_errors.items() if not error <= FP32_TOLERANCE]
    if all(error <= FP32_TOLERANCE for error in loss_errors) and not wrong:  # false for NaN
        return None
    return (
        f"losses are {losses}, and {expected_losses} in one process; weights that differ: {', '.join(wrong) or 'none'}"
    )
