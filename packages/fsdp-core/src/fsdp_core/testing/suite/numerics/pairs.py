"""Options in pairs: whatever is combined, every gradient, weight and moment is that of one unsharded process."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fsdp_core.plugins import registry
from fsdp_core.testing import RankError, Ranks
from fsdp_core.testing.meshes import LINES, DeclaredMesh
from fsdp_core.testing.pairs.comparing import differences, differing_bits
from fsdp_core.testing.pairs.dimensions import FORBIDDEN, Configuration, Dimension, declared, options_of
from fsdp_core.testing.pairs.drawing import Rule, first
from fsdp_core.testing.pairs.running import Outcome, RunRequest, run_all
from fsdp_core.testing.pairs.unsharded_run import train_in_one_process
from fsdp_core.testing.suite.base_class import Clauses, each_ranks

__all__ = ["COUNT", "ONLY", "SEED", "PairsSuite", "assert_equals_plain"]

#: Environment variables: how many configurations are drawn, with which seed; and one configuration instead of a draw.
COUNT = "FSDP_PAIRS"
SEED = "FSDP_PAIRS_SEED"
ONLY = "FSDP_PAIRS_ONLY"

#: Configurations of one test, which share a start of the ranks.
_TOGETHER = 10
#: The time limit of one configuration. It takes 2 to 5 seconds if ranks have the processors to themselves.
_SECONDS_PER_RUN = 60.0

#: More than these are a slow run, which draws values that take seconds too.
_MANY = 100


@dataclass
class _Drawn:
    """One configuration and what became of it."""

    configuration: Configuration
    uninterrupted: list[Outcome] = field(default_factory=list)
    resumed: list[Outcome] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


class PairsSuite(Clauses):
    """Configurations that combine options are drawn such that they cover pairs of values, and trained.

    Attributes:
        meshes: The meshes that a strategy trains on, by name.
        drawn_pairs: How many configurations are drawn.
        own_dimensions: What is combined for this strategy alone.
        not_in_pairs: Values that the strategy is known not to train rightly with, ``"dimension=label"``: the reason.
        own_rules: Labels that make no sense together under this strategy, and are not drawn.
        refused_pairs: Labels that the strategy refuses together, each with :class:`UnsupportedCapabilityError`.
    """

    meshes: ClassVar[Mapping[str, DeclaredMesh]] = LINES
    drawn_pairs: ClassVar[int] = 12
    own_dimensions: ClassVar[Sequence[Dimension]] = ()
    not_in_pairs: ClassVar[Mapping[str, str]] = {}
    refused_pairs: ClassVar[Sequence[Rule]] = ()
    own_rules: ClassVar[Sequence[Rule]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Divide the drawn configurations among tests, which can run side by side."""
        if "part_of_draw" in metafunc.fixturenames:
            parts = max(1, -(-self.count() // _TOGETHER)) if ONLY not in os.environ else 1
            ids = [f"{part + 1} of {parts}" for part in range(parts)]
            metafunc.parametrize("part_of_draw", [(part, parts) for part in range(parts)], ids=ids)

    @classmethod
    def count(cls) -> int:
        """How many configurations are drawn."""
        return int(os.environ.get(COUNT, cls.drawn_pairs))

    @classmethod
    def dimensions(cls) -> tuple[Dimension, ...]:
        """What is combined for the strategy."""
        return declared(
            registry.describe(cls.strategy),
            cls.meshes,
            cls.own_dimensions,
            seldom=cls.count() > _MANY or ONLY in os.environ,
            without=cls.not_in_pairs,
        )

    @classmethod
    def rules(cls) -> list[Rule]:
        """What can't be combined, or is refused."""
        on_others: list[Rule] = [{"resume": "no", "resumed_on": tuple(cls.meshes)}]
        itself: list[Rule] = [{"mesh": name, "resumed_on": name} for name in cls.meshes]  # that is "the same"
        return [*(rule for rule, _ in FORBIDDEN), *on_others, *itself, *cls.own_rules, *cls.refused_pairs]

    @classmethod
    def completed(cls, labels: Mapping[str, str]) -> dict[str, str]:
        """A configuration with the first value of every dimension that ``labels`` leaves out."""
        return {dimension.name: next(iter(dimension.values)) for dimension in cls.dimensions()} | dict(labels)

    def test_pairs_of_options(self, ranks: Ranks, tmp_path: Path, part_of_draw: tuple[int, int]) -> None:
        """Whatever is combined, gradients, weights and moments must be those of one unsharded process in fp64."""
        seed = int(os.environ.get(SEED, "17"))
        if ONLY in os.environ:
            drawn = [self.completed(json.loads(os.environ[ONLY]))]
        else:
            part, _ = part_of_draw
            all_drawn = first(self.count(), self.dimensions(), self.rules(), seed)
            all_drawn.sort(
                key=lambda configuration: configuration["mesh"]
            )  # what a library remembers of a mesh serves all that run on it
            drawn = all_drawn[part * _TOGETHER : (part + 1) * _TOGETHER]
        _assert_all_equal(ranks, tmp_path, type(self), drawn, f"drawn with {SEED}={seed}")

    def test_pairs_that_are_refused(self, ranks: Ranks, tmp_path: Path) -> None:
        """What is declared as refused together must be refused, as unsupported, on all ranks."""
        for rule in self.refused_pairs:
            labels = {name: labels if isinstance(labels, str) else labels[0] for name, labels in rule.items()}
            drawn = _Drawn(self.completed(labels))
            _run(ranks, tmp_path, type(self), [drawn])
            is_refused = all(outcome.refused for outcome in drawn.uninterrupted)
            assert is_refused, f"{dict(rule)} was not refused: {drawn.messages}"


def assert_equals_plain(ranks: Ranks, tmp_path: Path, suite: type[PairsSuite], **labels: str) -> None:
    """Assert that one configuration trains as one unsharded process does. Backends may pass their own.

    Args:
        ranks: The ranks.
        tmp_path: An empty folder.
        suite: The class that names the strategy and its meshes.
        **labels: The configuration; what is left out has its default.
    """
    _assert_all_equal(ranks, tmp_path, suite, [suite.completed(labels)], "as it is written")


def _assert_all_equal(
    ranks: Ranks, tmp_path: Path, suite: type[PairsSuite], configurations: Sequence[Configuration], how: str
) -> None:
    every = [_Drawn(configuration) for configuration in configurations]
    try:
        _run(ranks, tmp_path / "together", suite, every)
    except RankError:  # one of them has ended the ranks: which, is known if each runs alone
        every = [_Drawn(configuration) for configuration in configurations]
        for number, drawn in enumerate(every):
            try:
                _run(ranks, tmp_path / str(number), suite, [drawn])
            except RankError as error:
                drawn.messages.append(str(error))
    for drawn in every:
        drawn.messages = drawn.messages or _judge(drawn)
    failed = [drawn for drawn in every if drawn.messages]
    assert not failed, "\n".join(
        [f"of {len(every)} configurations, {how}, {len(failed)} differ from one unsharded process:"]
        + [_describe(suite, drawn) for drawn in failed]
    )


def _run(ranks: Ranks, tmp_path: Path, suite: type[PairsSuite], every: Sequence[_Drawn]) -> None:
    """Train all of them, and resume those that are stopped.

    Runs on as many ranks share a call if they can: what libraries cache lasts as long as a process group, and most of
    the time of a first run is spent on it.
    """
    tmp_path.mkdir(parents=True, exist_ok=True)
    dimensions = list(suite.dimensions())
    first_runs: list[tuple[RunRequest, list[Outcome]]] = []
    resumed: list[tuple[RunRequest, list[Outcome], int]] = []  # with the number of ranks that save what it loads
    for number, drawn in enumerate(every):
        chosen = drawn.configuration
        mesh = suite.meshes[chosen["mesh"]]
        after = chosen.get("resumed_on", "the same")
        options = options_of(chosen, dimensions)
        path = str(tmp_path / f"checkpoint {number}") if chosen.get("resume", "no") != "no" else None

        def request(
            mesh: DeclaredMesh, chosen: Configuration = chosen, options: Any = options, **path: Any
        ) -> RunRequest:
            all_options = {prefix: {**options, **mesh.options_for(prefix)} for prefix in ("", "net.")}
            return RunRequest(
                configuration=chosen, strategy=suite.strategy, ranks=mesh.ranks, options=all_options, **path
            )

        first_runs.append((request(mesh, saves=path), drawn.uninterrupted))
        if path is not None:
            again = request(mesh if after == "the same" else suite.meshes[after], loads=path)
            resumed.append((again, drawn.resumed, mesh.ranks))

    saved: set[int] = set()
    sizes = sorted({run.ranks for run, _ in first_runs})
    for size in (*sizes, *sorted({run.ranks for run, *_ in resumed})):
        together = [] if size in saved else [(run, outcomes) for run, outcomes in first_runs if run.ranks == size]
        saved.add(size)
        ready = [
            (run, outcomes) for run, outcomes, saver in resumed if run.ranks == size and saver in saved and not outcomes
        ]
        together += ready
        if together:
            limit = _SECONDS_PER_RUN * len(together)
            results = ranks.run(size, run_all, [run for run, _ in together], str(tmp_path), timeout=limit)
            for (_, outcomes), of_ranks in zip(together, zip(*each_ranks(ranks, results), strict=True), strict=True):
                outcomes.extend(of_ranks)


def _judge(drawn: _Drawn) -> list[str]:
    """What is wrong with the runs of a configuration."""
    chosen = drawn.configuration
    for outcomes in (drawn.uninterrupted, drawn.resumed):
        failed = dict.fromkeys(outcome.failed or outcome.refused for outcome in outcomes)
        if any(failed):
            return [text for text in failed if text]
    want = train_in_one_process(chosen)
    messages = differences(drawn.uninterrupted, want, chosen)
    if drawn.resumed:
        begun = RunRequest(configuration=chosen, strategy="", ranks=0, options={}).saved_after
        resumed = differences(drawn.resumed, want, chosen, begun)
        if chosen.get("resumed_on", "the same") == "the same":
            resumed += differing_bits(drawn.resumed, drawn.uninterrupted)
        messages += [f"resumed: {difference}" for difference in resumed]
    return messages


def _describe(suite: type[PairsSuite], drawn: _Drawn) -> str:
    labels = {name: label for name, label in drawn.configuration.items() if label != suite.completed({})[name]}
    arguments = ", ".join(f"{name}={label!r}" for name, label in labels.items())
    again = f"{ONLY}={shlex.quote(json.dumps(labels))} python -m pytest -k 'test_pairs_of_options'"
    lines = "\n".join(f"    {line}" for difference in drawn.messages[:12] for line in difference.splitlines())
    more = f"\n    and {len(drawn.messages) - 12} more" * (len(drawn.messages) > 12)
    return (
        f"assert_equals_plain(ranks, tmp_path, {suite.__name__}, {arguments})\n{lines}{more}\n    to repeat it: {again}"
    )
