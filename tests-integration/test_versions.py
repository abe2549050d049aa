"""docs/versions.md says what the packages require, and what they are tested with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| (\w[^|]*) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
ROWS = {name: [Version(cell) for cell in cells] for name, *cells in _ROW.findall(PAGE)}
TORCH, XLA = (next(name for name in ROWS if strategy in name) for strategy in ("`fsdp2`", "`xla_fsdp`"))


def required(package: str, of: str) -> Requirement:
    project = tomllib.loads((ROOT / f"packages/{package}/pyproject.toml").read_text(encoding="utf-8"))["project"]
    return next(one for one in map(Requirement, project["dependencies"]) if one.name == of)


def pinned(constraints: str, of: str) -> Version:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / constraints).read_text(encoding="utf-8"), re.MULTILINE))
    return Version(pins[of])


@pytest.mark.parametrize(
    ("row", "package", "of", "constraints"),
    [
        (TORCH, "fsdp-fsdp2", "torch", "constraints.txt"),
        (TORCH, "fsdp-cuda-native", "torch", "constraints.txt"),
        ("Lightning", "fsdp-fsdp2", "lightning", "constraints.txt"),
        ("Lightning", "fsdp-cuda-native", "lightning", "constraints.txt"),
        ("Lightning", "fsdp-xla", "lightning", "packages/fsdp-xla/constraints.txt"),
        (XLA, "fsdp-xla", "torch", "packages/fsdp-xla/constraints.txt"),
        (XLA, "fsdp-xla", "torch_xla", "packages/fsdp-xla/constraints.txt"),
    ],
)
def test_the_page_says_what_is_required_and_pinned(row: str, package: str, of: str, constraints: str) -> None:
    oldest, tested, newest = ROWS[row]
    allowed = required(package, of).specifier
    (bound,) = [Version(one.version.removesuffix(".*")) for one in allowed if one.operator in (">=", "==")]
    assert oldest.release[: len(bound.release)] == bound.release
    assert tested == pinned(constraints, of)
    assert oldest <= tested <= newest
    assert all(version in allowed for version in (oldest, tested, newest))
