"""Runs the steps of a session one after the other, whatever fails, and ends with a table of what each took."""

from __future__ import annotations

import json
import resource
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed
from nox.sessions import _SessionQuit

from tools.cpu_time import relative_speed

__all__ = ["Step", "check_budget", "fail_if_one_has", "read_settings", "run_pytest", "run_steps", "show_costs"]

#: By how much the CPU seconds of `nox -s tests` may be above their budget.
TOLERANCE = 0.1

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a session.

    Attributes:
        name: What was run.
        passed: Whether it ended well.
        seconds: How long it took.
        cpu: CPU seconds of all processes that it has started and waited for.
    """

    name: str
    passed: bool
    seconds: float
    cpu: float


#: What this process has run, in all sessions.
_STEPS: list[Step] = []

#: CPU seconds of pytest's runs that the system does not know of: of workers that end without being waited for.
_UNKNOWN: list[float] = []


def read_settings() -> dict[str, Any]:
    """What pyproject.toml says of the parts: ``[tool.fsdp.parts]``."""
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parts: dict[str, Any] = settings["tool"]["fsdp"]["parts"]
    return parts


def run_pytest(session: nox.Session, python: str, name: str, *words: str, **options: Any) -> None:
    """Run pytest and keep what its tests have cost, for :func:`show_costs`.

    Args:
        session: The session.
        python: The interpreter.
        name: Of the run.
        *words: Arguments of pytest.
        **options: Arguments of ``session.run``.
    """
    file = costs_file(name)
    file.unlink(missing_ok=True)
    before = _cpu_of_children()
    try:
        session.run(python, "-m", "pytest", f"--costs={file}", *words, **options)
    finally:
        if file.exists():
            used: float = json.loads(file.read_text(encoding="utf-8"))["cpu"]
            _UNKNOWN.append(max(0.0, used - (_cpu_of_children() - before)))


def costs_file(name: str) -> Path:
    """The file in which pytest says what the tests of a run have cost."""
    return ROOT / ".nox" / "costs" / f"{name}.json"


def run_steps(session: nox.Session, steps: Mapping[str, Callable[[], object]]) -> list[Step]:
    """Run all steps, and print what each took, with those of earlier sessions.

    Args:
        session: The session that they are of.
        steps: What to call, by name.

    Returns:
        What each took.
    """
    done = []
    for name, run in steps.items():
        session.log(f"=== {name}")
        began, used = time.monotonic(), _cpu_of_children()
        passed = True
        try:
            run()
        except (CommandFailed, _SessionQuit):
            passed = False
        done.append(Step(name=name, passed=passed, seconds=time.monotonic() - began, cpu=_cpu_of_children() - used))
    _STEPS.extend(done)
    lines = [
        f"{step.name:<30} {'ok' if step.passed else 'FAILED':<7} {step.seconds:5.0f} s {step.cpu:7.0f} CPU s"
        for step in _STEPS
    ]
    total = f"{'total':<38} {sum(step.seconds for step in _STEPS):5.0f} s {sum(step.cpu for step in _STEPS):7.0f} CPU s"
    print("", *lines, total, sep="\n", flush=True)
    return done


def fail_if_one_has(session: nox.Session, steps: list[Step]) -> None:
    """End the session as failed if a step has failed, which :func:`run_steps` leaves to its caller."""
    if failed := [step.name for step in steps if not step.passed]:
        session.error(f"failed: {', '.join(failed)}")


def show_costs(names: list[str], *, is_whole: bool) -> int:
    """Print how many tests have run, the dearest, and what is left to `nox -s everything`.

    Args:
        names: Of the runs; one that has written nothing is left out.
        is_whole: Whether all tests of the part were run, and not some that were chosen.

    Returns:
        How many tests have run.
    """
    files = [file for file in map(costs_file, names) if file.exists()]
    costs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    tests = [test for run in costs for test in run["tests"].items() if test[1] >= 0.1]
    if dearest := sorted(tests, key=lambda test: -test[1])[:10]:
        print(
            "", "The ten dearest tests, in CPU seconds:", *(f"{used:6.1f} {test}" for test, used in dearest), sep="\n"
        )
    ran = sum(len(run["tests"]) for run in costs)
    if not is_whole:
        print(f"\n{ran} tests were run: all that were chosen, with all parameters.", flush=True)
        return ran
    print(
        f"\n{ran} tests were run, and {sum(run['left'] for run in costs)} of these "
        "packages are left to `nox -s everything`: of the further parameters of tests that need ranks it draws a "
        "third, and it runs what takes long, meshes, integration, launchers, other versions, types and pages. "
        f"It takes {read_settings()['everything-minutes']} minutes on two cores.",
        flush=True,
    )
    return ran


def check_budget(session: nox.Session, steps: list[Step]) -> None:
    """Fail a session that has used more CPU seconds than `nox -s tests` may, on a machine as fast as the reference.

    Args:
        session: The session.
        steps: What it has run.
    """
    budget = read_settings()["tests-cpu-seconds"]
    used, speed = sum(step.cpu for step in steps), relative_speed()
    print(f"{used:.0f} CPU seconds were used, of {budget} on a machine that is {speed:.2f} times as fast.", flush=True)
    if used > budget * speed * (1 + TOLERANCE):
        session.error(
            f"`nox -s tests` has used {used:.0f} CPU seconds; its budget is {budget} (times {speed:.2f} here).\n"
            "Make a test cheaper, mark one `everything`, or raise tests-cpu-seconds in pyproject.toml, with the reason."
        )


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime + sum(_UNKNOWN)
