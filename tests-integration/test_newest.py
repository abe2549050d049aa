"""The session that tries what is newest: what it looks for, and its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.names_of_libraries import find_missing_names, main
from tools.newest_releases import write_report

#: Sources, and the names in them that no torch has.
SOURCES: dict[str, tuple[str, list[tuple[int, str]]]] = {
    "there": ("import torch\nfrom torch.nn import Linear\ntorch.nn.functional.relu\nLinear.forward\n", []),
    "an import": ("from torch.nn import Gone, Linear\n", [(1, "torch.nn.Gone")]),
    "a module": ("import torch.gone\n", [(1, "torch.gone")]),
    "an attribute": ("import torch.nn as nn\n\nnn.functional.gone(1).real\n", [(3, "nn.functional.gone")]),
    "of a class": ("from torch.nn import Module\nModule.gone\n", [(2, "Module.gone")]),
    "of an object": ("import torch\nx = torch.ones(1)\nx.gone\n", []),
    "tried": ("try:\n    from torch import gone\nexcept ImportError:\n    gone = None\n", []),
    "assigned": ("import torch\ntorch.own = 1\n", []),
    "of others": ("from nobody_has_this import gone\n", []),
}


@pytest.mark.parametrize("case", SOURCES)
def test_names_that_are_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    text, missing = SOURCES[case]
    source = tmp_path / "source.py"
    source.write_text(text, encoding="utf-8")
    assert list(find_missing_names(source)) == missing
    assert main([str(tmp_path)]) == bool(missing)
    assert capsys.readouterr().out.split() == [word for line, name in missing for word in (f"{source}:{line}:", name)]


#: What pytest writes of a test that passed and of one that failed.
RESULTS = """<testsuites><testsuite>
<testcase name="test_right"/>
<testcase name="test_wrong[1]"><failure message="AssertionError: 1 is not 2&#10;assert 1 == 2">why</failure></testcase>
</testsuite></testsuites>
"""


def test_report_opens_with_what_broke(tmp_path: Path) -> None:
    results = {name: tmp_path / f"{name}.xml" for name in ("fsdp-a", "fsdp-b", "fsdp-c")}
    results["fsdp-a"].write_text(RESULTS, encoding="utf-8")
    results["fsdp-c"].write_text(RESULTS.replace("failure", "skipped"), encoding="utf-8")
    broken = ["names of libraries", "fsdp-a", "fsdp-b"]
    lines = write_report(broken, ["a.py:3: torch.gone"], results, {"torch": "9.9"}).split("\n")
    assert lines[:5] == [
        "# What broke",
        "",
        "- gone: `a.py:3: torch.gone`",
        "- fsdp-a: `test_wrong[1]`: AssertionError: 1 is not 2",
        "- fsdp-b: the run has ended without a failed test; its log says why",
    ]
    assert "4 clauses" in lines[6]
    assert lines[8] == "- torch 9.9"
    assert "Nothing." in write_report([], [], {}, {})
