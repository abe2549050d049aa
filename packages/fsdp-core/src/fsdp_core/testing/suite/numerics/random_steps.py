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

#: Programs of one test, which share a start of the ranks: the first test is run with every change.
_FIRST, _TOGETHER = 3, 7

_FRONTS: tuple[Front, ...] = ("fabric", "automatic", "by hand")


def _parts() -> list[Any]:
    """Which programs are run together, for each front end."""
    count, first = int(os.environ.get(COUNT, "10")), int(os.environ.get(SEED, "0"))
    bounds = sorted({0, *range(_FIRST, count, _TOGETHER), count})
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

    @pytest.mark.parametrize(("front", "programs"), _parts())
    def test_random_steps(self, ranks: Ranks, tmp_path: Path, front: Front, programs: list[Program]) -> None:
        """Losses and weights must be those of one process to 1e-5, or the step be refused in words: no rank crashes."""
        messages = _train(ranks, self.strategy, tmp_path, front, programs)
        failed = [
            f"{program}\n# {front}, {SEED}={program.seed}: {message}\n"
            for program, message in zip(programs, messages, strict=True)
            if message is not None
        ]
        assert not failed, f"{len(failed)} of {len(programs)} steps:\n\n" + "\n".join(failed)


def _train(ranks: Ranks, strategy: str, tmp_path: Path, front: Front, programs: Sequence[Program]) -> list[str | None]:
    """What is wrong with each program; ``None`` where nothing is."""
    limit = _SECONDS_PER_PROGRAM * len(programs)
    try:
        results = ranks.run(2, run_all, strategy, str(tmp_path), front, programs, timeout=limit)
    except RankError as error:  # one of them has ended the ranks: which, is known if each runs alone
        if len(programs) == 1:
            return [f"the ranks have ended: {error}"]
        return [_train(ranks, strategy, tmp_path, front, [program])[0] for program in programs]
    wanted = [train_in_one_process(program, front, shares_of(ranks, 2)) for program in programs]
    by_program = zip(*each_ranks(ranks, results), strict=True)
    return [_judge(of_ranks, want) for of_ranks, want in zip(by_program, wanted, strict=True)]


def _judge(of_ranks: Sequence[Trained | Raised], want: Outcome) -> str | None:
    """What is wrong with what a program came to on each rank."""
    raised = [outcome[1] for outcome in of_ranks if isinstance(outcome[0], bool)]
    if raised and len(raised) < len(of_ranks):
        return f"some ranks have raised, and others have not: {raised[0]}"
    if raised:
        is_fine = isinstance(want, str) or all(outcome[0] for outcome in of_ranks)
        return None if is_fine else f"neither right nor refused in words: {raised[0]}"
    if isinstance(want, str):
        return f"plain torch raises, and the ranks have not: {want}"
    return next((message for outcome in of_ranks if (message := _differences(outcome, want))), None)


def _differences(got: Trained | Raised, want: Trained) -> str | None:
    losses, weights = got
    assert not isinstance(losses, bool) and not isinstance(weights, str)
    off = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, want[0], strict=True)]
    of_weights = {
        name: float((weights[name].cpu() - tensor).abs().max()) / max(1.0, float(tensor.abs().max()))
        for name, tensor in want[1].items()
    }
    wrong = [name for name, difference in of_weights.items() if not difference <= FP32_TOLERANCE]
    if all(difference <= FP32_TOLERANCE for difference in off) and not wrong:  # NaN is not
        return None
    return f"losses are {losses}, and {want[0]} in one process; weights that differ: {', '.join(wrong) or 'none'}"
