"""The run on a card, without a card: what a part that fails or hangs leaves, and what the run says of it."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

GPU = Path(__file__).parent / "gpu"

PARTS = {
    "right": """
        with records.check("one plus one") as details:
            details["sum"] = 1 + 1
        records.figure("seconds of a sum", 0.25, at_most=1.0)
        records.figure("share of a peak", 0.25, at_least=0.45)
        records.figure("clocks", None, reason="there is no card")
        Path(sys.argv[sys.argv.index("--out") + 1], "right-profile.txt").write_text("calls of a step")
        """,
    "wrong": """
        with records.check("one plus one is three"):
            assert 1 + 1 == 3, "it is two"
        records.outcome("two plus two", "left out", reason="nobody asked")
        raise SystemExit(7)
        """,
    "hanging": """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        records.outcome("a rank in a session of its own", "passed", pid=child.pid)
        child.wait()
        """,
    "late": """
        records.outcome("what comes after", "passed")
        """,
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(GPU))
    spec = importlib.util.spec_from_file_location("gpu_run", GPU / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_run", module)  # in which dataclasses look for annotations
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "GRACE", 0.2)
    return module


def write_part(folder: Path, name: str, body: str) -> Path:
    """A part that knows the records, and imports nothing that takes long."""
    script = folder / f"{name}.py"
    indented = "\n".join(line[8:] for line in body.splitlines())
    script.write_text(
        f"import sys\nfrom pathlib import Path\nsys.path.insert(0, {str(GPU)!r})\n"
        "from records import RECORDS, Records\n"
        f"records = Records(Path(sys.argv[sys.argv.index('--out') + 1]) / RECORDS, {name!r})\n{indented}\n"
    )
    return script


@pytest.mark.timeout(60)
def test_a_part_that_fails_or_hangs_does_not_stop_the_next(run: ModuleType, tmp_path: Path) -> None:
    parts = [
        run.Part(name=name, script=write_part(tmp_path, name, body), seconds=1.0 if name == "hanging" else 0.5)
        for name, body in PARTS.items()
    ]
    assert not run.run_parts(parts, tmp_path, minutes=0.1)

    records = run.read_records(tmp_path / run.RECORDS)
    outcomes = {(record["part"], record["check"]): record["outcome"] for record in records if "check" in record}
    assert outcomes == {
        ("right", "one plus one"): "passed",
        ("right", "the part ends"): "passed",
        ("wrong", "one plus one is three"): "failed",
        ("wrong", "two plus two"): "left out",
        ("wrong", "the part ends"): "failed",
        ("hanging", "a rank in a session of its own"): "passed",
        ("hanging", "the part ends"): "failed",
        ("late", "what comes after"): "passed",
        ("late", "the part ends"): "passed",
    }
    (child,) = [record["pid"] for record in records if "pid" in record]
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert run.exit_status(records) == 1

    table = "\n".join(run.table_lines(records))
    for line in (
        "- wrong: one plus one is three: AssertionError: it is two",
        "- wrong: the part ends: it ended with status 7: see log.txt",
        "- hanging: the part ends: it had not ended after",
        "- wrong: two plus two: nobody asked",
        "| seconds of a sum | 0.25 | ≤ 1 | met |",
        "| share of a peak | 0.25 | ≥ 0.45 | **not met** |",
        "| clocks | not measured |  |  |",
    ):
        assert line in table
    assert not (tmp_path / "right-profile.txt").exists()
    log = (tmp_path / "log.txt").read_text()
    assert (
        log.index("=== right")
        < log.index("--- right-profile.txt\ncalls of a step")
        < log.index("it is two")
        < log.index("=== hanging")
        < log.index("=== late")
    )


@pytest.mark.timeout(60)
def test_parts_that_no_time_is_left_for_are_said_to_have_failed(run: ModuleType, tmp_path: Path) -> None:
    part = run.Part(name="right", script=write_part(tmp_path, "right", PARTS["right"]), seconds=1.0)
    assert not run.run_parts([part], tmp_path, minutes=0.0)
    (record,) = run.read_records(tmp_path / run.RECORDS)
    assert (record["outcome"], record["reason"]) == ("failed", "no time was left to begin it")


@pytest.mark.parametrize(
    ("records", "status"),
    [
        ([], 1),
        ([{"check": "a", "outcome": "passed"}], 0),
        ([{"check": "a", "outcome": "left out"}], 0),
        ([{"check": "a", "outcome": "passed"}, {"figure": "b", "met": False}], 3),
        ([{"check": "a", "outcome": "failed"}, {"figure": "b", "met": False}], 1),
    ],
)
def test_the_status_says_what_went_wrong(run: ModuleType, records: list[dict[str, object]], status: int) -> None:
    assert run.exit_status(records) == status


def test_a_folder_with_records_is_not_mixed_with_another_runs(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / run.RECORDS).write_text("")
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        run.main()
    assert "has the records of another run. Name another folder, or remove it." in capsys.readouterr().err


def test_a_line_that_a_kill_cut_off_is_left_out(run: ModuleType, tmp_path: Path) -> None:
    records = tmp_path / run.RECORDS
    records.write_text('{"part": "speed", "check": "a", "outcome": "passed"}\n{"part": "speed", "che')
    assert [record["check"] for record in run.read_records(records)] == ["a"]


def test_examples_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    assert doctest.testmod(importlib.import_module("records")).failed == 0
