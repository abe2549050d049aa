"""Everything that one machine with a card can show, in a few minutes: is it right there, how fast, how much memory.

    python tests-integration/gpu/run.py --minutes 8 --out build/gpu-run        # on a machine with a card
    python tests-integration/gpu/run.py --minutes 5 --out build/gpu-run        # elsewhere: a rehearsal, in tiny sizes

Parts run one after the other, most valuable first. Each has a time limit, and what an early one leaves over is shared
by those after it; one that fails or runs over does not stop the next. Where ``pack.py`` has left wheels in
``build/gpu``, they are installed into a temporary folder first, without an index.

``--out`` then has ``records.jsonl``, a line for each check and figure, written as they come; ``log.txt``; and
``table.md``, which is also printed. The status is 1 if a check has failed or a part has not ended well, 3 if all is
right and a figure does not meet its bar.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
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
    """

    name: str
    script: Path
    seconds: float


PARTS = tuple(
    Part(name=name, script=HERE / f"{name}.py", seconds=seconds)
    for name, seconds in (
        ("facts", 20),
        ("one_card", 60),
        ("several_ranks", 150),
        ("checkpoints", 60),
        ("speed", 160),
        ("memory", 45),
    )
)


def install_wheels(wheels: Path, target: Path) -> dict[str, str]:
    """Install the packed wheels into a folder, without an index and without what they need.

    Args:
        wheels: The folder that :mod:`pack` has filled.
        target: An empty folder.

    Returns:
        The environment variables under which an interpreter finds them first.
    """
    files = [str(path) for path in sorted(wheels.glob("*.whl"))]
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-cache-dir")
    subprocess.run([*pip, "--no-index", "--no-deps", "--target", str(target), *files], check=True)
    return {"PYTHONPATH": os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])}


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, wherever these have moved to: ranks may lead sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
        parent.terminate()
        psutil.wait_procs([parent], timeout=GRACE)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


def gather_logs(part: Part, out: Path) -> None:
    """Append the files that a part has written for itself to ``log.txt``: few files are easier to bring home.

    Args:
        part: The part, by whose name its files begin.
        out: The folder of the run.
    """
    with (out / "log.txt").open("ab") as log:
        for path in sorted(out.glob(f"{part.name}-*")):
            log.write(f"\n--- {path.name}\n".encode() + path.read_bytes())
            path.unlink()


def run_part(
    part: Part, out: Path, limit: float, arguments: Sequence[str] = (), variables: dict[str, str] | None = None
) -> bool:
    """Run one part within a time limit, and record how it ended.

    Args:
        part: The part.
        out: The folder of the run.
        limit: Seconds after which it is ended.
        arguments: Further words of its command line.
        variables: Environment variables, besides this process's.

    Returns:
        Whether it ended by itself with status 0.
    """
    records = Records(out / RECORDS, part.name)
    command = [sys.executable, str(part.script), "--out", str(out), "--seconds", f"{limit - GRACE:.1f}", *arguments]
    began = time.monotonic()
    with (out / "log.txt").open("ab") as log:
        log.write(f"\n=== {part.name}, at most {limit:.0f} s\n".encode())
        log.flush()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(variables or {})}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            status = process.wait(timeout=limit)
            reason = f"it ended with status {status}: see log.txt" if status else ""
        except subprocess.TimeoutExpired:
            reason = f"it had not ended after {limit:.0f} s, and was killed; what it had found by then is recorded"
        finally:
            end_process(process)
    gather_logs(part, out)
    details = {"seconds": time.monotonic() - began} | ({"reason": reason} if reason else {})
    records.outcome("the part ends", "failed" if reason else "passed", **details)
    return not reason


def run_parts(
    parts: Sequence[Part],
    out: Path,
    minutes: float,
    arguments: Sequence[str] = (),
    variables: dict[str, str] | None = None,
) -> bool:
    """Run parts one after the other, and share among those that are left the time that is left.

    Args:
        parts: The parts, most valuable first.
        out: The folder of the run.
        minutes: The time of all.
        arguments: Further words of each part's command line.
        variables: Environment variables, besides this process's.

    Returns:
        Whether all ended well.
    """
    end = time.monotonic() + 60 * minutes
    ended_well = []
    for index, part in enumerate(parts):
        share = part.seconds / sum(other.seconds for other in parts[index:])
        limit = share * (end - time.monotonic())
        if limit <= GRACE:
            Records(out / RECORDS, part.name).outcome("the part ends", "failed", reason="no time was left to begin it")
            ended_well.append(False)
            continue
        ended_well.append(run_part(part, out, limit, arguments, variables))
    return all(ended_well)


def table_lines(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The records as Markdown: a row for each part, what failed or was left out, and the figures beside their bars."""
    yield from ("| part | passed | failed | left out | seconds |", "|---|---|---|---|---|")
    for part in dict.fromkeys(record["part"] for record in records):
        checks = [record for record in records if record["part"] == part and "check" in record]
        counts = [sum(check["outcome"] == outcome for check in checks) for outcome in ("passed", "failed", "left out")]
        seconds = [check.get("seconds", 0.0) for check in checks if check["check"] == "the part ends"]
        yield f"| {part} | {' | '.join(map(str, counts))} | {sum(seconds):.0f} |"
    for outcome in ("failed", "left out"):
        checks = [record for record in records if record.get("outcome") == outcome]
        if checks:
            yield from ("", f"{outcome.capitalize()}:", "")
        for check in checks:
            reason = str(check.get("error") or check.get("reason") or check.get("traceback", "")).strip()
            yield f"- {check['part']}: {check['check']}: {(reason.splitlines() or ['no reason is recorded'])[-1][:300]}"
    figures = [record for record in records if "figure" in record]
    if figures:
        yield from ("", "| figure | measured | bar | |", "|---|---|---|---|")
    for figure in figures:
        measured = "not measured" if figure["value"] is None else f"{figure['value']:.4g}"
        verdict = {True: "met", False: "**not met**", None: ""}[figure["met"]]
        yield f"| {figure['figure']} | {measured} | {figure['bar'] or ''} | {verdict} |"


def exit_status(records: Sequence[dict[str, Any]]) -> int:
    """0 if all is right, 1 if something failed, 3 if a figure does not meet its bar."""
    if not records or any(record.get("outcome") == "failed" for record in records):
        return 1
    return 3 if any(record.get("met") is False for record in records) else 0


def main() -> None:
    """Run the parts, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="the time of all parts (default: 8)")
    parser.add_argument("--out", type=Path, required=True, help="the folder for what is found; must not have records")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="by default: all")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="what pack.py has packed (default: build/gpu)")
    parser.add_argument("--installed", action="store_true", help="use the packages that are installed, and no wheels")
    words = parser.parse_args()
    if (words.out / RECORDS).exists():
        parser.error(f"{words.out} has the records of another run. Name another folder, or remove it.")
    words.out.mkdir(parents=True, exist_ok=True)
    out = words.out.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the part that is running
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fsdp-gpu-") as site:
        packed = not words.installed and any(words.wheels.glob("*.whl"))
        variables = install_wheels(words.wheels, Path(site)) if packed else {}
        tiny = [] if has_card() else ["--tiny"]
        parts = [part for part in PARTS if not words.parts or part.name in words.parts]
        minutes_left = words.minutes - (time.monotonic() - began) / 60
        run_parts(parts, out, minutes_left, tiny, variables)
    records = read_records(out / RECORDS)
    table = "\n".join(table_lines(records))
    (out / "table.md").write_text(table + "\n", encoding="utf-8")
    print(table, flush=True)
    sys.exit(exit_status(records))


def has_card() -> bool:
    """Whether torch sees a card, asked in another process: it would keep memory of the card from the parts."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


if __name__ == "__main__":
    main()
