"""Everything that one machine with a card can show, in a few minutes: is it right there, how fast, how much memory.

    python tests-integration/gpu/run.py --minutes 8 --out build/gpu-run        # on a machine with a card
    python tests-integration/gpu/run.py --minutes 5 --out build/gpu-run        # elsewhere: a rehearsal, in tiny sizes

On a card, the parts that time nothing run side by side, then the others one after another; in a rehearsal all do. Each
has a time limit, and what an early one leaves over is shared by those after it; one that fails or runs over does not
stop the next. Where ``pack.py`` has left wheels in
``build/gpu``, they are installed into a temporary folder first, without an index.

``--out``, a new or empty folder, then has ``records.jsonl``, a line for each check and figure, written as they come;
``log.txt``; and ``table.md``, which is also printed. The status is 1 if a check has failed, or a part has not ended
well or has checked nothing; 3 if all is right, and a figure does not meet its bar or the time was up for something;
else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from choices import MEASUREMENTS, clause_names
from records import RECORDS, Records, read_records

HERE = Path(__file__).parent
#: Where :mod:`pack` leaves wheels.
WHEELS = HERE.parents[1] / "build" / "gpu"
#: Seconds that a part is given to record what it has found before it is killed.
GRACE = 5.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """A script that measures.

    Attributes:
        name: Its name in records.
        script: The file.
        seconds: How long it takes on a card, by which the time of the run is shared.
        is_timed: Whether it measures time, and needs the machine for itself.
    """

    name: str
    script: Path
    seconds: float
    is_timed: bool = False


#: On one H100 with 16 slow cores, where a process imports torch and Lightning in 6 to 10 seconds.
PARTS = tuple(
    Part(name=name, script=HERE / f"{name}.py", seconds=seconds, is_timed=name in ("saves", "speed"))
    for name, seconds in (
        ("facts", 55),
        ("one_card", 75),
        ("several_ranks", 95),
        ("checkpoints", 60),
        ("memory", 60),
        ("saves", 55),
        ("speed", 150),
    )
)


#: What launchers and shells may have set, and no part may see: each part is a job of its own, and checks by asserts.
#: Settings of MPI, OMPI_MCA_*, are a machine's.
FOREIGN = (
    *("RANK", "WORLD_SIZE", "NODE_RANK", "PYTHONOPTIMIZE", "PYTHONSAFEPATH"),
    *("OMPI_UNIVERSE_SIZE", "PMIX_RANK", "PMIX_NAMESPACE"),
)
FOREIGN_PREFIXES = (
    *("LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_", "PYTEST_"),
    *("PMI_", "PMIX_SERVER_", "OMPI_COMM_WORLD_", "OMPI_APP_CTX_"),
)

#: A module mpi4py that is found first. Lightning would ask MPI for ranks where there is one, which starts MPI, and ends
#: the process if that can't start.
NO_MPI = 'raise ImportError("no process of this run is started by MPI")\n'


def clean_environment() -> dict[str, str]:
    """This process's environment variables, without those of a launcher, which are named on stderr."""
    foreign = [name for name in os.environ if name in FOREIGN or name.startswith(FOREIGN_PREFIXES)]
    if foreign:
        print(f"Parts run without {', '.join(sorted(foreign))}.", file=sys.stderr)
    return {name: value for name, value in os.environ.items() if name not in foreign}


def install_wheels(wheels: Path, target: Path) -> None:
    """Install the packed wheels into a folder, without an index and without what they need.

    Args:
        wheels: The folder that :mod:`pack` has filled.
        target: An empty folder.
    """
    files = [str(path) for path in sorted(wheels.glob("*.whl"))]
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-cache-dir",
        "--no-compile",
    )
    try:
        subprocess.run([*pip, "--no-index", "--no-deps", "--target", str(target), *files], check=True, timeout=300)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        sys.exit(f"pip can't install the wheels in {wheels} ({error}).\nPack them again, or add --installed.")


def check_packages(wheels: Path | None, environment: dict[str, str]) -> None:
    """End unless the packages can be imported, and the wheels are of this checkout, whose tests run.

    Args:
        wheels: The folder of wheels; ``None`` if the packages are installed.
        environment: The environment variables of the parts.
    """
    sources = HERE.parents[1] / "packages"
    for wheel in sorted(wheels.glob("fsdp_*.whl")) if wheels else ():
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                source = sources / wheel.name.split("-")[0].replace("_", "-") / "src" / name
                if name.endswith(".py") and not (source.is_file() and source.read_bytes() == archive.read(name)):
                    sys.exit(f"{wheel} has another {name} than this checkout. Run pack.py again, and bring its folder.")
    names = ("fsdp_core", "fsdp_fsdp2", "fsdp_cuda_native")
    run = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(names)}"], env=environment, timeout=120, check=False
    )
    if run.returncode:
        problem = "are not installed here" if wheels is None else f"can't be imported from the wheels in {wheels}"
        sys.exit(
            f"{', '.join(names)} {problem}. Run pack.py where there is a package index, bring its folder of wheels to "
            f"{WHEELS}, or name it: --wheels FOLDER."
        )


def adopt_orphans() -> None:
    """Let processes whose parents end become children of this one, where the kernel can do so: it will end them."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, of Linux


def end_processes(firsts: Sequence[subprocess.Popen[bytes]], before: set[psutil.Process]) -> None:
    """End processes and all that they have started: ranks may lead sessions of their own, and outlive their parents.

    Args:
        firsts: What is told to end, and given time for it.
        before: The children that this process had before, which are left alone.
    """
    family = set()
    for first in firsts:
        with contextlib.suppress(psutil.NoSuchProcess):
            family |= set(psutil.Process(first.pid).children(recursive=True))
        if first.poll() is None:
            first.terminate()
    deadline = time.monotonic() + GRACE
    for first in firsts:
        with contextlib.suppress(subprocess.TimeoutExpired):
            first.wait(timeout=max(0.0, deadline - time.monotonic()))
    family |= set(psutil.Process().children(recursive=True)) - before  # orphans that were adopted
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=GRACE)  # a driver that hangs keeps some for ever
    for first in firsts:
        first.poll()


def gather_logs(parts: Sequence[Part], out: Path) -> None:
    """Append the files that parts have written for themselves to ``log.txt``: few files are easier to bring home.

    Args:
        parts: The parts, by whose names their files begin.
        out: The folder of the run.
    """
    with (out / "log.txt").open("ab") as log:
        for part in parts:
            for path in sorted(path for path in out.glob(f"{part.name}-*") if path.is_file()):
                log.write(f"\n--- {path.name}\n".encode() + path.read_bytes())
                path.unlink()
    for path in out.iterdir():  # checkpoints of a part that was killed
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def temporary_folders() -> Iterator[dict[str, str]]:
    """A context with folders for what a part writes for a while, which go with it however it ends.

    Yields:
        The environment variables that name them.
    """
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdp-gpu-", ignore_cleanup_errors=True))
        variables = {"TMPDIR": disk}
        if os.access("/dev/shm", os.W_OK):
            memory = tempfile.TemporaryDirectory(prefix="fsdp-gpu-", dir="/dev/shm", ignore_cleanup_errors=True)
            variables["FSDP_GPU_MEMORY_FOLDER"] = stack.enter_context(memory)
        yield variables


def run_together(
    parts: Sequence[Part],
    out: Path,
    limit: float,
    arguments: Mapping[str, Sequence[str]] | None = None,
    variables: dict[str, str] | None = None,
) -> bool:
    """Run parts side by side within a time limit, and record how each ended.

    Args:
        parts: The parts.
        out: The folder of the run.
        limit: Seconds after which they are ended.
        arguments: Further words of their command lines, by name; ``""`` has those of all.
        variables: All of their environment variables; by default those of this process, without a launcher's.

    Returns:
        Whether all ended by themselves with status 0, and have checked something.
    """
    arguments = arguments or {}
    print(f"{', '.join(part.name for part in parts)}, at most {limit:.0f} s", flush=True)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    seconds: dict[str, float] = {}
    before = set(psutil.Process().children(recursive=True))
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        logs = {}
        for part in parts:
            # one alone is read as it comes; several would mix
            path = out / ("log.txt" if len(parts) == 1 else f"{part.name}-.txt")
            logs[part.name] = stack.enter_context(path.open("ab"))
            logs[part.name].write(f"\n=== {part.name}, at most {limit:.0f} s\n".encode())
            logs[part.name].flush()
        folders = {part.name: stack.enter_context(temporary_folders()) for part in parts}
        try:
            for part in parts:
                command = [sys.executable, str(HERE / "starter.py"), str(part.script), "--out", str(out)]
                command += ["--seconds", f"{limit - GRACE:.1f}", *arguments.get("", ()), *arguments.get(part.name, ())]
                environment = {**(variables or clean_environment()), **folders[part.name], "PYTHONUNBUFFERED": "1"}
                processes[part.name] = subprocess.Popen(
                    command, stdout=logs[part.name], stderr=subprocess.STDOUT, env=environment
                )
            while len(seconds) < len(parts) and time.monotonic() - began < limit:
                for name, process in processes.items():
                    if name not in seconds and process.poll() is not None:
                        seconds[name] = time.monotonic() - began
                time.sleep(0.05)
            statuses = {name: processes[name].returncode for name in seconds}
        finally:
            end_processes(list(processes.values()), before)
    gather_logs(parts, out)
    outcomes = []
    for part in parts:
        reason = f"it had not ended after {limit:.0f} s, and was killed; what it had found by then is recorded"
        if part.name in statuses:
            status = statuses[part.name]
            reason = f"it ended with status {status}: see log.txt" if status else ""
        outcomes.append(record_end(part, out, reason, seconds.get(part.name, time.monotonic() - began)))
    return all(outcome == "passed" for outcome in outcomes)


def record_end(part: Part, out: Path, reason: str, seconds: float) -> str:
    """Record how a part ended, and return its outcome.

    Args:
        part: The part.
        out: The folder of the run.
        reason: Why it has not ended well; empty if it has.
        seconds: How long it took.
    """
    checks = [record for record in read_records(out / RECORDS) if record["part"] == part.name and "check" in record]
    outcomes = {record["outcome"] for record in checks}
    outcome = "failed" if reason else "passed"
    if not reason and "passed" not in outcomes:
        outcome, reason = ("no time" if outcomes == {"no time"} else "failed"), "none of its checks has passed"
    details = {"seconds": seconds} | ({"reason": reason} if reason else {})
    Records(out / RECORDS, part.name).outcome("the part ends", outcome, **details)
    return outcome


def in_turn(parts: Sequence[Part], *, side_by_side: bool) -> list[list[Part]]:
    """Parts in the order in which they run, those together that run side by side.

    Args:
        parts: The parts, most valuable first.
        side_by_side: Whether those that time nothing do.
    """
    together = [part for part in parts if side_by_side and not part.is_timed]
    return [*filter(None, [together]), *([part] for part in parts if part not in together)]


def run_parts(
    turns: Sequence[Sequence[Part]],
    out: Path,
    minutes: float,
    arguments: Mapping[str, Sequence[str]] | None = None,
    variables: dict[str, str] | None = None,
) -> bool:
    """Run parts one turn after the other, and share among those that are left the time that is left.

    Args:
        turns: The parts, those together that run side by side.
        out: The folder of the run.
        minutes: The time of all.
        arguments: As :func:`run_together` takes it.
        variables: As :func:`run_together` takes it.

    Returns:
        Whether all ended well.
    """
    end = time.monotonic() + 60 * minutes
    shares = [max(part.seconds for part in parts) for parts in turns]
    ended_well = []
    for index, parts in enumerate(turns):
        limit = shares[index] / sum(shares[index:]) * (end - time.monotonic())
        if limit <= GRACE:
            for part in parts:
                Records(out / RECORDS, part.name).outcome(
                    "the part ends", "failed", reason="no time was left to begin it: give the run more --minutes"
                )
            ended_well.append(False)
            continue
        ended_well.append(run_together(parts, out, limit, arguments, variables))
    return all(ended_well)


#: What a check may come to. Any other word counts as a failure.
OUTCOMES = ("passed", "failed", "left out", "no time")


def first_line(record: dict[str, Any]) -> str:
    """Why a check has failed or was left out, in a line."""
    lines = str(record.get("error") or record.get("reason") or record.get("traceback", "")).strip().splitlines()
    if lines and lines[0].endswith("Traceback (most recent call last):"):
        lines = lines[-1:]
    of_pytest = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
    return ([*of_pytest, *lines] or ["no reason is recorded"])[0][:300]


def table_lines(records: Sequence[dict[str, Any]], title: str = "") -> Iterator[str]:
    """The records as Markdown: a row for each part, what failed or was left out, and the figures beside their bars.

    Args:
        records: All of the run's.
        title: What the run was on.
    """
    if title:
        yield from (title, "")
    yield from (f"| part | {' | '.join(OUTCOMES)} | seconds |", "|---|---|---|---|---|---|")
    for part in dict.fromkeys(record["part"] for record in records):
        checks = [record for record in records if record["part"] == part and "check" in record]
        counts = [sum(check["outcome"] == outcome for check in checks) for outcome in OUTCOMES]
        seconds = [check.get("seconds", 0.0) for check in checks if check["check"] == "the part ends"]
        yield f"| {part} | {' | '.join(map(str, counts))} | {sum(seconds):.0f} |"
    for outcome in dict.fromkeys([*OUTCOMES[1:], *(record.get("outcome", "failed") for record in records)]):
        checks = [record for record in records if record.get("outcome") == outcome and outcome != "passed"]
        if checks:
            yield from ("", f"{outcome.capitalize()}:", "")
        yield from (f"- {check['part']}: {check['check']}: {first_line(check)}" for check in checks)
    figures = [record for record in records if "figure" in record]
    if figures:
        yield from ("", "| figure | measured | bar | |", "|---|---|---|---|")
    for figure in figures:
        measured = "not measured" if figure["value"] is None else f"{figure['value']:.4g}"
        verdict = {True: "met", False: "**not met**", None: ""}[figure["met"]]
        yield f"| {figure['figure']} | {measured} | {figure['bar'] or ''} | {verdict} |"


def exit_status(records: Sequence[dict[str, Any]]) -> int:
    """0 if all is right; 1 if something failed; 3 if a figure does not meet its bar, or a check had no time."""
    outcomes = {record["outcome"] for record in records if "check" in record}
    if "passed" not in outcomes or outcomes - {"passed", "left out", "no time"}:
        return 1
    return 3 if "no time" in outcomes or any(record.get("met") is False for record in records) else 0


def minutes_of(text: str) -> float:
    """Read ``--minutes``: a number above 0."""
    minutes = float(text)
    if not (math.isfinite(minutes) and minutes > 0):
        raise argparse.ArgumentTypeError(f"{text} is no number of minutes; write such as 8")
    return minutes


def find_card(environment: dict[str, str]) -> str:
    """The name of the card that torch sees, asked in another process: it would keep memory of the card from the parts.

    Args:
        environment: The environment variables of the parts.

    Returns:
        The name; empty if there is no card.
    """
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    command = [sys.executable, "-c", code]
    try:
        run = subprocess.run(command, env=environment, timeout=120, check=True, stdout=subprocess.PIPE, text=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        sys.exit(f"torch can't say whether there is a card: {error}.\nTry: python -c 'import torch; torch.cuda.init()'")
    if not run.stdout.strip() and Path("/dev/nvidia0").exists():
        sys.exit(
            "There is a card (/dev/nvidia0), and torch does not see it. Look at CUDA_VISIBLE_DEVICES and `fsdp doctor`,"
            " or add --rehearse, which runs tiny sizes on the CPU."
        )
    return run.stdout.strip()


def end_on_signals() -> None:
    """Let signals end this process in order: the part that is running, then the table. Only the first one counts."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def end(number: int, frame: object) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in signals:
        signal.signal(each, end)


def begin_records(parser: argparse.ArgumentParser, out: Path) -> None:
    """Make the folder of the run and its file of records, which no other run may use.

    Args:
        parser: Says what is wrong.
        out: The folder.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            parser.error(f"{out} is not empty, and may have the records of another run. Name a new folder.")
        (out / RECORDS).open("x").close()
    except OSError as error:
        parser.error(f"--out {out} can't be used: {error}. Name a new folder.")


def main() -> None:
    """Run the parts, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=minutes_of, default=8.0, help="the time of all parts (default: 8)")
    parser.add_argument("--out", type=Path, required=True, help="a new or empty folder for what is found")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="by default: all")
    parser.add_argument("--turn", type=int, help="of the parts but facts, a third: three numbers in a row have all")
    parser.add_argument("--speed", nargs="+", choices=MEASUREMENTS, help="what speed measures, in this order")
    parser.add_argument(
        "--clauses-from", metavar="CLAUSE", choices=clause_names(), help="the clause that several_ranks begins with"
    )
    parser.add_argument("--wheels", type=Path, help="what pack.py has packed (default: build/gpu, if it is there)")
    parser.add_argument("--installed", action="store_true", help="use the packages that are installed, and no wheels")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, also where there is a card")
    words = parser.parse_args()
    wheels = None if words.installed else words.wheels or (WHEELS if any(WHEELS.glob("*.whl")) else None)
    if wheels is not None and not any(wheels.glob("*.whl")):
        parser.error(f"{wheels} has no wheels. Run pack.py, or add --installed to use the packages that are installed.")
    out = words.out.resolve()
    begin_records(parser, out)
    end_on_signals()
    adopt_orphans()
    began = time.monotonic()
    environment = clean_environment()
    card = "" if words.rehearse else find_card(environment)
    if words.rehearse:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if not card:  # threads that wait for each other by spinning take most of the CPU
        environment["OMP_NUM_THREADS"] = "1"
    title = card or "A rehearsal on the CPU, in tiny sizes: nothing here is of a card."
    print(title, flush=True)
    parts = [part for part in PARTS if not words.parts or part.name in words.parts]
    if words.turn is not None:
        parts = [part for part in parts if part.name == "facts" or PARTS.index(part) % 3 == words.turn % 3]
    arguments = {
        "": [] if card else ["--tiny"],
        "speed": ["--measure", *words.speed] if words.speed else [],
        "several_ranks": ["--from", words.clauses_from] if words.clauses_from else [],
    }
    records = Records(out / RECORDS, "run")
    try:
        with tempfile.TemporaryDirectory(prefix="fsdp-gpu-wheels-") as site:
            if wheels is not None:
                install_wheels(wheels, Path(site))
            (Path(site) / "mpi4py.py").write_text(NO_MPI, encoding="utf-8")
            environment["PYTHONPATH"] = os.pathsep.join([site, *filter(None, [os.environ.get("PYTHONPATH")])])
            names = [path.name for path in sorted(wheels.glob("*.whl"))] if wheels else "those that are installed"
            check_packages(wheels, environment)
            records.outcome("device and packages", "passed", device=title, packages=names)
            minutes_left = words.minutes - (time.monotonic() - began) / 60
            run_parts(in_turn(parts, side_by_side=bool(card)), out, minutes_left, arguments, environment)
        records.outcome("the run ends", "passed")
    except BaseException as error:
        ended = {record["part"] for record in read_records(out / RECORDS) if record.get("check") == "the part ends"}
        names = [part.name for part in parts if part.name not in ended]
        reason = f"it was ended early ({error!r}); these parts did not end: {', '.join(names) or 'none'}"
        records.outcome("the run ends", "failed", reason=reason)
        raise
    finally:
        lines = read_records(out / RECORDS)
        table = "\n".join(table_lines(lines, title))
        (out / "table.md").write_text(table + "\n", encoding="utf-8")
        with contextlib.suppress(OSError):  # nobody reads any more
            print(table, flush=True)
    sys.exit(exit_status(lines))


if __name__ == "__main__":
    main()
