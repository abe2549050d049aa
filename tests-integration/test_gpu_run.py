"""The run on a card, without a card: what a part that fails or hangs leaves, and what the run says of it."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from forked_scripts import run_forked

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


@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_part_that_fails_or_hangs_does_not_stop_the_others(
    run: ModuleType, tmp_path: Path, side_by_side: bool
) -> None:
    parts = [
        run.Part(name=name, script=write_part(tmp_path, name, body), seconds=1.0 if name == "hanging" else 0.5)
        for name, body in PARTS.items()
    ]
    turns = run.in_turn(parts, side_by_side=side_by_side)
    assert len(turns) == (1 if side_by_side else len(parts))
    assert not run.run_parts(turns, tmp_path, minutes=0.1)

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


def test_parts_that_no_time_is_left_for_are_said_to_have_failed(run: ModuleType, tmp_path: Path) -> None:
    part = run.Part(name="right", script=write_part(tmp_path, "right", PARTS["right"]), seconds=1.0)
    assert not run.run_parts([[part]], tmp_path, minutes=0.0)
    (record,) = run.read_records(tmp_path / run.RECORDS)
    assert record["outcome"] == "failed"
    assert record["reason"] == "no time was left to begin it: give the run more --minutes"


@pytest.mark.parametrize(
    ("records", "status"),
    [
        ([], 1),
        ([{"check": "a", "outcome": "passed"}], 0),
        ([{"check": "a", "outcome": "left out"}], 1),
        ([{"check": "a", "outcome": "passed"}, {"check": "b", "outcome": "left out"}], 0),
        ([{"check": "a", "outcome": "passed"}, {"check": "b", "outcome": "no time"}], 3),
        ([{"check": "a", "outcome": "passed"}, {"check": "b", "outcome": "crashed"}], 1),
        ([{"check": "a", "outcome": "passed"}, {"figure": "b", "met": False}], 3),
        ([{"check": "a", "outcome": "failed"}, {"figure": "b", "met": False}], 1),
    ],
)
def test_the_status_says_what_went_wrong(run: ModuleType, records: list[dict[str, object]], status: int) -> None:
    assert run.exit_status(records) == status


def test_a_folder_with_files_is_not_mixed_with_another_runs(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        run.main()
    assert "is not empty, and may have the records of another run. Name a new folder." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_lines_that_a_kill_cut_off(run: ModuleType, tmp_path: Path) -> None:
    records = tmp_path / run.RECORDS
    check = '{"part": "speed", "check": "a", "outcome": "passed"}\n'
    records.write_text(f'{check}{{"part": "speed", "che\n{check}{{"part": "sp')
    first, cut_off, second = run.read_records(records)
    assert first == second
    assert cut_off["outcome"] == "failed"
    assert run.exit_status([first, cut_off, second]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "nan"], "nan is no number of minutes; write such as 8"),
        (["--minutes", "-1"], "-1 is no number of minutes"),
        (["--speed", "eagerly"], "invalid choice: 'eagerly'"),
        (["--clauses-from", "test_nothing"], "invalid choice: 'test_nothing'"),
        (["--wheels", "nowhere"], "nowhere has no wheels. Run pack.py, or add --installed"),
    ],
)
def test_words_that_mean_nothing_are_refused(words: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, str(GPU / "run.py"), "--out", str(tmp_path / "out"), *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert message in run.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", ["", "raise ImportError\n"])
def test_wheels_of_other_sources_are_refused(run: ModuleType, tmp_path: Path, line: str) -> None:
    name = "fsdp_core/errors.py"
    source = (GPU.parents[1] / "packages/fsdp-core/src" / name).read_text()
    with zipfile.ZipFile(tmp_path / "fsdp_core-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(name, line + source)
    nothing = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    words = f"has another {name} than this checkout. Run pack.py again" if line else "can't be imported from the wheels"
    with pytest.raises(SystemExit, match=re.escape(words)):
        run.check_packages(tmp_path, {**nothing, "PYTHONNOUSERSITE": "1", "PYTHONHOME": str(tmp_path)})


def test_packages_that_are_nowhere_are_missed_before_anything_runs(run: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"are not installed here\. Run pack\.py where there is a package index"):
        run.check_packages(None, {"PYTHONHOME": str(tmp_path)})  # an interpreter that finds no package at all


def test_a_part_sees_no_launcher_and_its_asserts_count(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = {"RANK": "1", "SLURM_NTASKS": "4", "PYTEST_ADDOPTS": "-x", "PYTHONOPTIMIZE": "1"}
    foreign["OMPI_COMM_WORLD_RANK"] = "1"
    for name, value in {**foreign, "OMPI_MCA_plm": "isolated"}.items():  # the last one is the machine's
        monkeypatch.setenv(name, value)
    body = """
        import os, tempfile
        with records.check("no launcher") as details:
            assert __debug__
            details["names"] = sorted(os.environ)
        open(os.path.join(tempfile.mkdtemp(), "left"), "w").close()
        records.outcome("a folder", "passed", folder=tempfile.gettempdir())
        """
    part = run.Part(name="part", script=write_part(tmp_path, "part", body), seconds=1.0)
    (tmp_path / "out").mkdir()
    assert run.run_together([part], tmp_path / "out", 30.0)
    seen, folder, _ = run.read_records(tmp_path / "out" / run.RECORDS)
    assert not set(foreign) & set(seen["names"])
    assert "OMPI_MCA_plm" in seen["names"]
    assert not Path(folder["folder"]).exists()


def test_parts_that_time_something_run_alone(run: ModuleType) -> None:
    together, *alone = run.in_turn(run.PARTS, side_by_side=True)
    assert [part.name for part in together] == ["facts", "one_card", "several_ranks", "checkpoints", "memory"]
    assert [[part.name for part in parts] for parts in alone] == [["saves"], ["speed"]]
    assert all(part.script.is_file() for part in run.PARTS)


def test_no_process_asks_mpi_for_ranks(run: ModuleType, tmp_path: Path) -> None:
    """Where mpi4py is installed, and MPI ends a process that initialises it."""
    for folder in ("installed/mpi4py", "installed/mpi4py-4.0.0.dist-info", "first"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "installed/mpi4py/__init__.py").touch()
    (tmp_path / "installed/mpi4py/MPI.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "installed/mpi4py-4.0.0.dist-info/METADATA").write_text("Name: mpi4py\nVersion: 4.0.0\n")
    (tmp_path / "first/mpi4py.py").write_text(run.NO_MPI)
    script = tmp_path / "detect.py"
    script.write_text("from lightning.fabric.plugins.environments import MPIEnvironment as E\nprint(E.detect())\n")
    installed, first = (str(tmp_path / folder) for folder in ("installed", "first"))
    assert run_forked(script, folder=tmp_path, ranks=1, finds=installed, status=3) == ""
    found = run_forked(script, folder=tmp_path, ranks=1, finds=os.pathsep.join([first, installed]))
    assert found == "False\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_and_leaves_the_table(number: signal.Signals, tmp_path: Path) -> None:
    """The run ends what its part has started, also what has outlived its parent, and says what there is."""
    body = """
        import subprocess
        start = "subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3, stderr=-3)"  # DEVNULL
        code = f"import subprocess; print({start}.pid)"
        orphan = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        records.outcome("an orphan", "passed", pid=orphan)
        print("ready", flush=True)
        import time
        time.sleep(600)
        """
    script = write_part(tmp_path, "waiting", body)
    driver = (
        f"import sys; sys.path.insert(0, {str(GPU)!r}); import run; from pathlib import Path\n"
        "run.find_card = lambda environment: ''\n"
        "run.check_packages = lambda wheels, environment: None\n"
        f"run.PARTS = (run.Part(name='waiting', script=Path({str(script)!r}), seconds=1.0),)\n"
        f"sys.argv = ['run.py', '--out', {str(tmp_path / 'out')!r}, '--installed', '--minutes', '0.8']\n"
        "run.main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True)
    log = tmp_path / "out" / "log.txt"
    while not (log.exists() and "ready" in log.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    records = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    (orphan,) = [record["pid"] for record in records if "pid" in record]
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE
    assert "| waiting | 1 | 0 | 0 | 0 | 0 |" in printed
    assert f"it was ended early (SystemExit({128 + number})); these parts did not end: waiting" in printed
    assert printed.endswith((tmp_path / "out" / "table.md").read_text())


def test_examples_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    assert doctest.testmod(importlib.import_module("records")).failed == 0
