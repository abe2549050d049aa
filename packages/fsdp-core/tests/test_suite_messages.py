"""Clauses of the suite say what they have compared: its users see `assert 5 < 5` and have not written it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp_core.testing.suite
from fsdp_core.testing.launching.calls import RankError
from fsdp_core.testing.launching.process_ranks import RankPool

SUITE = Path(fsdp_core.testing.suite.__file__).parent


def is_number(node: ast.expr) -> bool:
    """Whether it is one, or a length, so that a failed comparison shows nothing else."""
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    if isinstance(node, ast.BinOp):  # and not [1, 2] * 3
        sides = [node.left, node.right]
        return any(map(is_number, sides)) and not any(isinstance(side, ast.List | ast.Tuple) for side in sides)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("len", "sum", "max", "min")
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def mute(source: str) -> Iterator[ast.Assert]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert) and node.msg is None and isinstance(node.test, ast.Compare):
            orders = any(isinstance(one, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for one in node.test.ops)
            if orders or any(map(is_number, [node.test.left, *node.test.comparators])):
                yield node


@pytest.mark.parametrize("file", sorted(SUITE.rglob("*.py")), ids=lambda file: file.stem)
def test_a_comparison_of_numbers_says_what_they_are(file: Path) -> None:
    found = [f"{file.name}:{node.lineno}: {ast.unparse(node)}" for node in mute(file.read_text(encoding="utf-8"))]
    assert not found, 'give them messages: assert call < 1.8, f"the call took {call} s"\n' + "\n".join(found)


def test_mute_comparisons_are_seen() -> None:
    lines = [
        "a < b",
        "len(a) == len(b)",
        "a == 3",
        "a == 3, 'said'",
        "a == b",
        "a == 'b'",
        "a == [1] * 2",
        "a == b // 2",
    ]
    source = "".join(f"assert {line}\n" for line in lines)
    assert [node.lineno for node in mute(source)] == [1, 2, 3, 8]


def fail_without_a_word() -> None:
    trained = [1]
    assert not trained


def test_what_a_rank_has_asserted_is_told() -> None:
    with RankPool() as ranks, pytest.raises(RankError, match=r"^AssertionError: assert not trained\n"):
        ranks.run(1, fail_without_a_word)
