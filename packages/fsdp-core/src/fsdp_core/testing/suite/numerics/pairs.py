"""Options in pairs: whatever is combined, every gradient, weight and moment is that of one unsharded process."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from operator import itemgetter
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

#: The number of configurations in one test: the ranks are started once for all of them.
_CONFIGURATIONS_PER_TEST = 10
#: The time limit of one configuration. It takes 2 to 5 seconds if nothing else uses the processors.
_SECONDS_PER_RUN = 60.0

#: If more configurations are drawn than this, so are values of which each takes seconds.
_SLOW_VALUES_ABOVE = 100


@dataclass
class _Drawn:
    """One drawn configuration, its ranks' outcomes, and what is wrong with them."""

    configuration: Configuration
    uninterrupted: list[Outcome] = field(default_factory=list)
    resumed: list[Outcome] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


class PairsSuite(Clauses):
    """Configurations that combine options are drawn such that they cover pairs of values, and trained.

    Attributes:
        meshes: The meshes that a strategy trains on, by name.
        drawn_pairs: How many configurations are drawn.
        own_dimensions: Dimensions of this strategy alone.
        not_in_pairs: By ``"dimension=label"``, the reason why a value is not drawn: the strategy trains wrongly with
            it.
        own_rules: Combinations of labels that make no sense under this strategy, and are not drawn.
        refused_pairs: Combinations of labels that the strategy refuses with :class:`UnsupportedCapabilityError`.
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
            parts = 1 if ONLY in os.environ else max(1, ceil(self.count() / _CONFIGURATIONS_PER_TEST))
            ids = [f"{part + 1} of {parts}" for part in range(parts)]
            metafunc.parametrize("part_of_draw", [(part, parts) for part in range(parts)], ids=ids)

    @classmethod
    def count(cls) -> int:
        """How many configurations are drawn."""
        return int(os.environ.get(COUNT, cls.drawn_pairs))

    @classmethod
    def dimensions(cls) -> tuple[Dimension, ...]:
        """The dimensions that are combined for the strategy."""
        return declared(
            registry.describe(cls.strategy),
            cls.meshes,
            cls.own_dimensions,
            seldom=cls.count() > _SLOW_VALUES_ABOVE or ONLY in os.environ,
            without=cls.not_in_pairs,
        )

    @classmethod
    def rules(cls) -> list[Rule]:
        """Combinations that are not drawn: they make no sense, or are refused."""
        not_resumed: Rule = {"resume": "no", "resumed_on": tuple(cls.meshes)}
        same_mesh: list[Rule] = [{"mesh": name, "resumed_on": name} for name in cls.meshes]  # called "the same"
        return [*(rule for rule, _ in FORBIDDEN), not_resumed, *same_mesh, *cls.own_rules, *cls.refused_pairs]

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
            all_drawn.sort(key=itemgetter("mesh"))  # runs on the same mesh profit from what libraries cache for it
            drawn = all_drawn[part * _CONFIGURATIONS_PER_TEST : (part + 1) * _CONFIGURATIONS_PER_TEST]
        _assert_all_equal(ranks, tmp_path, type(self), drawn, f"drawn with {SEED}={seed}")

    def test_pairs_that_are_refused(self, ranks: Ranks, tmp_path: Path) -> None:
        """Each of ``refused_pairs`` must be refused, as unsupported, on all ranks."""
        for rule in self.refused_pairs:
            labels = {name: labels if isinstance(labels, str) else labels[0] for name, labels in rule.items()}
            drawn = _Drawn(self.completed(labels))
            _run(ranks, tmp_path, type(self), [drawn])
            is_refused = all(outcome.refused for outcome in drawn.uninterrupted)
            assert is_refused, f"{dict(rule)} was not refused: {drawn.messages}"


def assert_equals_plain(ranks: Ranks, tmp_path: Path, suite: type[PairsSuite], **labels: str) -> None:
    """Assert that one configuration trains as one unsharded process does, for tests of a backend's own.

    Args:
        ranks: The ranks.
        tmp_path: An empty folder.
        suite: The class that names the strategy and its meshes.
        **labels: The configuration; dimensions that are left out have their first value.
    """
    _assert_all_equal(ranks, tmp_path, suite, [suite.completed(labels)], "as it is written")


def _assert_all_equal(
    ranks: Ranks, tmp_path: Path, suite: type[PairsSuite], configurations: Sequence[Configuration], origin: str
) -> None:
    all_drawn = [_Drawn(configuration) for configuration in configurations]
    try:
        _run(ranks, tmp_path / "together", suite, all_drawn)
    except RankError:  # one configuration has ended the ranks: run each alone, to find out which
        all_drawn = [_Drawn(configuration) for configuration in configurations]
        for number, drawn in enumerate(all_drawn):
            try:
                _run(ranks, tmp_path / str(number), suite, [drawn])
            except RankError as error:
                drawn.messages.append(str(error))
    for drawn in all_drawn:
        drawn.messages = drawn.messages or _find_faults(drawn)
    failed = [drawn for drawn in all_drawn if drawn.messages]
    assert not failed, "\n".join(
        [f"of {len(all_drawn)} configurations, {origin}, {len(failed)} differ from one unsharded process:"]
        + [_describe(suite, drawn) for drawn in failed]
    )


def _run(ranks: Ranks, tmp_path: Path, suite: type[PairsSuite], all_drawn: Sequence[_Drawn]) -> None:
    """Train all configurations, and resume those that are stopped.

    Runs on the same number of ranks share a call if they can. What libraries cache lasts as long as a process group,
    and a first run spends most of its time on it.
    """
    tmp_path.mkdir(parents=True, exist_ok=True)
    dimensions = list(suite.dimensions())
    first_runs: list[tuple[RunRequest, list[Outcome]]] = []
    resumed_runs: list[tuple[RunRequest, list[Outcome], int]] = []  # with the number of ranks that save the checkpoint
    for number, drawn in enumerate(all_drawn):
        configuration = drawn.configuration
        mesh = suite.meshes[configuration["mesh"]]
        resumed_on = configuration.get("resumed_on", "the same")
        options = options_of(configuration, dimensions)
        path = str(tmp_path / f"checkpoint {number}") if configuration.get("resume", "no") != "no" else None

        def request(
            mesh: DeclaredMesh, configuration: Configuration = configuration, options: Any = options, **path: Any
        ) -> RunRequest:
            all_options = {prefix: {**options, **mesh.options_for(prefix)} for prefix in ("", "net.")}
            return RunRequest(
                configuration=configuration, strategy=suite.strategy, ranks=mesh.ranks, options=all_options, **path
            )

        first_runs.append((request(mesh, saves=path), drawn.uninterrupted))
        if path is not None:
            resumed_run = request(mesh if resumed_on == "the same" else suite.meshes[resumed_on], loads=path)
            resumed_runs.append((resumed_run, drawn.resumed, mesh.ranks))

    sizes_that_saved: set[int] = set()
    sizes = sorted({run.ranks for run, _ in first_runs})
    for size in (*sizes, *sorted({run.ranks for run, *_ in resumed_runs})):
        runs: list[tuple[RunRequest, list[Outcome]]] = []
        if size not in sizes_that_saved:
            runs += [(run, outcomes) for run, outcomes in first_runs if run.ranks == size]
        sizes_that_saved.add(size)
        for run, outcomes, saving_size in resumed_runs:
            if run.ranks == size and saving_size in sizes_that_saved and not outcomes:
                runs.append((run, outcomes))
        if runs:
            limit = _SECONDS_PER_RUN * len(runs)
            results = ranks.run(size, run_all, [run for run, _ in runs], str(tmp_path), timeout=limit)
            outcomes_by_run = zip(*each_ranks(ranks, results), strict=True)
            for (_, outcomes), outcomes_of_ranks in zip(runs, outcomes_by_run, strict=True):
                outcomes.extend(outcomes_of_ranks)


def _find_faults(drawn: _Drawn) -> list[str]:
    """Describe what is wrong with the runs of a configuration."""
    configuration = drawn.configuration
    for outcomes in (drawn.uninterrupted, drawn.resumed):
        failed = dict.fromkeys(outcome.failed or outcome.refused for outcome in outcomes)
        if any(failed):
            return [text for text in failed if text]
    expected = train_in_one_process(configuration)
    messages = differences(drawn.uninterrupted, expected, configuration)
    if drawn.resumed:
        first_batch = RunRequest(configuration=configuration, strategy="", ranks=0, options={}).saved_after
        resumed = differences(drawn.resumed, expected, configuration, first_batch)
        if configuration.get("resumed_on", "the same") == "the same":
            resumed += differing_bits(drawn.resumed, drawn.uninterrupted)
        messages += [f"resumed: {difference}" for difference in resumed]
    return messages


def _describe(suite: type[PairsSuite], drawn: _Drawn) -> str:
    labels = {name: label for name, label in drawn.configuration.items() if label != suite.completed({})[name]}
    arguments = ", ".join(f"{name}={label!r}" for name, label in labels.items())
    command = f"{ONLY}={shlex.quote(json.dumps(labels))} python -m pytest -k 'test_pairs_of_options'"
    lines = "\n".join(f"    {line}" for difference in drawn.messages[:12] for line in difference.splitlines())
    more = f"\n    and {len(drawn.messages) - 12} more" if len(drawn.messages) > 12 else ""
    call = f"assert_equals_plain(ranks, tmp_path, {suite.__name__}, {arguments})"
    return f"{call}\n{lines}{more}\n    to repeat it: {command}"
