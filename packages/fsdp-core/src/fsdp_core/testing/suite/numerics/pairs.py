"""Options in pairs: whatever is combined, every gradient, weight and moment is that of one unsharded process."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from fsdp_core.plugins import registry
from fsdp_core.testing import RankError, Ranks
from fsdp_core.testing.meshes import LINES, DeclaredMesh
from fsdp_core.testing.pairs.comparing import differences, differing_bits
from fsdp_core.testing.pairs.dimensions import FORBIDDEN, Configuration, Dimension, declared, options_of
from fsdp_core.testing.pairs.drawing import Rule, first
from fsdp_core.testing.pairs.oracle import train_in_one_process
from fsdp_core.testing.pairs.running import Asked, Outcome, run_all
from fsdp_core.testing.suite.base import Clauses, each_ranks

__all__ = ["COUNT", "ONLY", "SEED", "PairsSuite", "assert_equals_plain"]

#: Environment variables: how many configurations are drawn, with which seed; and one configuration instead of a draw.
COUNT, SEED, ONLY = "FSDP_PAIRS", "FSDP_PAIRS_SEED", "FSDP_PAIRS_ONLY"

#: Configurations of one test, which share a start of the ranks.
_TOGETHER = 6

#: More than these are a slow run, which draws values that take seconds too.
_MANY = 100


@dataclass
class _Drawn:
    """One configuration and what became of it."""

    configuration: Configuration
    whole: list[Outcome] = field(default_factory=list)
    resumed: list[Outcome] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


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
    drawn_pairs: ClassVar[int] = 60
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
        return {one.name: next(iter(one.values)) for one in cls.dimensions()} | dict(labels)

    def test_pairs_of_options(self, ranks: Ranks, tmp_path: Path, part_of_draw: tuple[int, int]) -> None:
        """Whatever is combined, gradients, weights and moments must be those of one unsharded process in fp64."""
        seed = int(os.environ.get(SEED, "17"))
        if ONLY in os.environ:
            drawn = [self.completed(json.loads(os.environ[ONLY]))]
        else:
            part, _ = part_of_draw
            all_drawn = first(self.count(), self.dimensions(), self.rules(), seed)
            all_drawn.sort(key=lambda one: one["mesh"])  # what a library remembers of a mesh serves all that run on it
            drawn = all_drawn[part * _TOGETHER : (part + 1) * _TOGETHER]
        _assert_all_equal(ranks, tmp_path, type(self), drawn, f"drawn with {SEED}={seed}")

    def test_pairs_that_are_refused(self, ranks: Ranks, tmp_path: Path) -> None:
        """What is declared as refused together must be refused, as unsupported, on all ranks."""
        for rule in self.refused_pairs:
            labels = {name: labels if isinstance(labels, str) else labels[0] for name, labels in rule.items()}
            one = _Drawn(self.completed(labels))
            _run(ranks, tmp_path, type(self), [one])
            assert all(outcome.refused for outcome in one.whole), f"{dict(rule)} was not refused: {one.told}"


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
    ranks: Ranks, tmp_path: Path, suite: type[PairsSuite], drawn: Sequence[Configuration], how: str
) -> None:
    every = [_Drawn(one) for one in drawn]
    try:
        _run(ranks, tmp_path / "together", suite, every)
    except RankError:  # one of them has ended the ranks: which, is known if each runs alone
        every = [_Drawn(one) for one in drawn]
        for number, one in enumerate(every):
            try:
                _run(ranks, tmp_path / str(number), suite, [one])
            except RankError as error:
                one.told.append(str(error))
    for one in every:
        if not one.told:
            one.told = _judged(one)
    failed = [one for one in every if one.told]
    assert not failed, "\n".join(
        [f"of {len(every)} configurations, {how}, {len(failed)} differ from one unsharded process:"]
        + [_shown(suite, one) for one in failed]
    )


def _run(ranks: Ranks, tmp_path: Path, suite: type[PairsSuite], every: Sequence[_Drawn]) -> None:
    """Train all of them, and then resume those that are stopped, in one call for each number of ranks."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    dimensions = {one.name: one for one in suite.dimensions()}
    for resuming in (False, True):
        by_size: dict[int, list[tuple[_Drawn, Asked]]] = {}
        for number, one in enumerate(every):
            stops = one.configuration.get("resume", "no") != "no"
            if resuming and (not stops or any(outcome.failed or outcome.refused for outcome in one.whole)):
                continue
            after = one.configuration.get("resumed_on", "the same")
            mesh = suite.meshes[after if resuming and after != "the same" else one.configuration["mesh"]]
            options = options_of(one.configuration, list(dimensions.values()))
            path = str(tmp_path / f"checkpoint {number}") if stops else None
            asked = Asked(
                configuration=one.configuration,
                strategy=suite.strategy,
                ranks=mesh.ranks,
                options={prefix: {**options, **mesh.options_for(prefix)} for prefix in ("", "net.")},
                **{"loads" if resuming else "saves": path},
            )
            by_size.setdefault(mesh.ranks, []).append((one, asked))
        for size, together in by_size.items():
            results = each_ranks(ranks, ranks.run(size, run_all, [asked for _, asked in together], str(tmp_path)))
            for (one, _), outcomes in zip(together, zip(*results, strict=True), strict=True):
                if resuming:
                    one.resumed = list(outcomes)
                else:
                    one.whole = list(outcomes)


def _judged(one: _Drawn) -> list[str]:
    """What is wrong with the runs of a configuration."""
    chosen = one.configuration
    failed = [outcome.failed or outcome.refused for outcome in (*one.whole, *one.resumed)]
    if any(failed):
        return list(dict.fromkeys(text for text in failed if text))
    want = train_in_one_process(chosen)
    told = differences(one.whole, want, chosen)
    if one.resumed:
        begun = Asked(configuration=chosen, strategy="", ranks=0, options={}).saved_after
        resumed = differences(one.resumed, want, chosen, begun)
        if chosen.get("resumed_on", "the same") == "the same":
            resumed += differing_bits(one.resumed, one.whole)
        told += [f"resumed: {difference}" for difference in resumed]
    return told


def _shown(suite: type[PairsSuite], one: _Drawn) -> str:
    labels = {name: label for name, label in one.configuration.items() if label != suite.completed({})[name]}
    written = ", ".join(f"{name}={label!r}" for name, label in labels.items())
    again = f"{ONLY}={shlex.quote(json.dumps(labels))} python -m pytest -k 'test_pairs_of_options'"
    found = "\n".join(f"    {line}" for difference in one.told[:12] for line in difference.splitlines())
    more = f"\n    and {len(one.told) - 12} more" * (len(one.told) > 12)
    return (
        f"assert_equals_plain(ranks, tmp_path, {suite.__name__}, {written})\n{found}{more}\n    to repeat it: {again}"
    )
