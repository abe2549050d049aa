"""Draws configurations that together cover all possible pairs of values of different dimensions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice

from fsdp_core.testing.pairs.dimensions import Configuration, Dimension

__all__ = ["Pair", "Rule", "coverage", "draw", "forbids", "pairs_of"]

#: Two labels, each with its dimension.
Pair = frozenset[tuple[str, str]]

#: Labels by dimension that can't occur together; several of one dimension as a tuple.
Rule = Mapping[str, str | tuple[str, ...]]

#: Attempts to complete a pair before it is taken to be impossible.
_ATTEMPTS = 60


def forbids(rule: Rule, configuration: Configuration) -> bool:
    """Whether a rule forbids a configuration, which may be a part of one.

    Example:
        >>> forbids({"a": "1", "b": ("x", "y")}, {"a": "1", "b": "x", "c": "2"}), forbids({"a": "1"}, {"b": "x"})
        (True, False)
    """
    return all(
        name in configuration and configuration[name] in ((labels,) if isinstance(labels, str) else labels)
        for name, labels in rule.items()
    )


def pairs_of(configuration: Configuration) -> set[Pair]:
    """The pairs of values that a configuration combines."""
    return {frozenset(items) for items in combinations(configuration.items(), 2)}


def draw(dimensions: Sequence[Dimension], rules: Sequence[Rule], seed: int) -> Iterator[dict[str, str]]:
    """Draw configurations without end: first such that they cover all possible pairs, then any.

    Each begins with a pair that no configuration has covered yet. The other values are chosen one by one, each such
    that it covers the most of the remaining pairs.

    Args:
        dimensions: What is combined.
        rules: Combinations that are impossible.
        seed: The seed of the draw; the same seed gives the same configurations.

    Yields:
        One label for each dimension.

    Example:
        >>> a, b = (Dimension(name=name, values=dict.fromkeys("123")) for name in "ab")
        >>> drawn = draw([a, b], [{"a": "1", "b": "2"}], 0)
        >>> len({tuple(next(drawn).values()) for _ in range(8)})  # all that can be, each once
        8
    """
    rng = random.Random(seed)
    labels = {dimension.name: list(dimension.values) for dimension in dimensions}
    open_pairs = sorted(_all_pairs(labels), key=sorted)
    rng.shuffle(open_pairs)
    covered: set[Pair] = set()
    for pair in open_pairs:
        if pair in covered:
            continue
        drawn = _complete(dict(pair), labels, rules, covered, rng)
        if drawn is not None:
            covered |= pairs_of(drawn)
            yield drawn
    while True:
        name = rng.choice(list(labels))
        drawn = _complete({name: rng.choice(labels[name])}, labels, rules, None, rng)
        if drawn is not None:
            yield drawn


def coverage(drawn: Sequence[Configuration], dimensions: Sequence[Dimension], rules: Sequence[Rule]) -> tuple[int, int]:
    """Return how many pairs the configurations cover, and how many are possible."""
    labels = {dimension.name: list(dimension.values) for dimension in dimensions}
    rng = random.Random(0)
    covered = set[Pair]().union(*map(pairs_of, drawn)) if drawn else set()
    possible_pairs = covered | {
        pair for pair in _all_pairs(labels) - covered if _complete(dict(pair), labels, rules, None, rng) is not None
    }
    return len(covered), len(possible_pairs)


def _all_pairs(labels: Mapping[str, Sequence[str]]) -> set[Pair]:
    return {
        frozenset({(first_name, a), (second_name, b)})
        for first_name, second_name in combinations(labels, 2)
        for a in labels[first_name]
        for b in labels[second_name]
    }


def _complete(
    fixed_labels: dict[str, str],
    labels: Mapping[str, Sequence[str]],
    rules: Sequence[Rule],
    covered: set[Pair] | None,
    rng: random.Random,
) -> dict[str, str] | None:
    """Add the missing dimensions, in any order; ``None`` if no attempt gives an allowed configuration."""
    if any(forbids(rule, fixed_labels) for rule in rules):
        return None
    for _ in range(_ATTEMPTS):
        drawn = dict(fixed_labels)
        missing_names = [name for name in labels if name not in fixed_labels]
        for name in rng.sample(missing_names, len(missing_names)):
            allowed_labels = [
                label
                for label in rng.sample(labels[name], len(labels[name]))
                if not any(forbids(rule, {**drawn, name: label}) for rule in rules)
            ]
            if not allowed_labels:
                break
            drawn[name] = (
                allowed_labels[0]
                if covered is None
                else max(allowed_labels, key=lambda label: _count_new_pairs(drawn, name, label, covered))
            )
        else:
            return {name: drawn[name] for name in labels}
    return None


def _count_new_pairs(drawn: Mapping[str, str], name: str, label: str, covered: set[Pair]) -> int:
    return sum(frozenset({(name, label), drawn_item}) not in covered for drawn_item in drawn.items())


def first(count: int, dimensions: Sequence[Dimension], rules: Sequence[Rule], seed: int) -> list[dict[str, str]]:
    """The first configurations of a draw."""
    return list(islice(draw(dimensions, rules, seed), count))
