"""Tries the packages on the newest releases of everything, and writes a report that opens with what broke."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from xml.etree import ElementTree

import nox

from tools import steps
from tools.environments import PRE_RELEASES, ROOT, SHARING, Package, find_site_packages
from tools.suites import CLAUSES_SIDE_BY_SIDE, CORE

__all__ = ["try_newest", "write_report"]

#: What a weekly job on GitHub shows, and opens an issue with.
REPORT = ROOT / ".nox" / "newest.md"

#: Whose versions the report names.
LIBRARIES = ("torch", "lightning", "pluggy", "fsspec", "jsonargparse", "pytest")


def try_newest(session: nox.Session, python: str) -> None:
    """Look for the names of libraries that are used, and run the core of the suites, whatever of it fails.

    Args:
        session: The session. Its words go to pytest.
        python: The interpreter, which has the packages and the newest releases.
    """
    words = [word for word in session.posargs if word != PRE_RELEASES and not word.startswith("torch==")]
    clauses = () if "-k" in words else ("-k", CORE)
    packages = [package for package in SHARING if package.strategies]
    results = {package.name: ROOT / ".nox" / f"newest-{package.name}.xml" for package in packages}
    missing: list[str] = []

    def look_for_names() -> None:
        looking = (python, "tools/names_of_libraries.py", *(f"{package.path}/src" for package in SHARING))
        done = subprocess.run(looking, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            missing.extend(filter(None, done.stdout.split("\n")) if done.stdout.strip() else [done.stderr])
            session.error(f"{len(missing)} names of libraries are gone")

    def run_suite(package: Package) -> None:
        file = results[package.name]
        file.unlink(missing_ok=True)
        suite = f"{package.path}/tests/test_conformance.py"
        session.run(python, "-m", "pytest", *clauses, *CLAUSES_SIDE_BY_SIDE, f"--junitxml={file}", *words, suite)

    tried = {"names of libraries": look_for_names}
    tried |= {package.name: partial(run_suite, package) for package in packages}
    done = steps.run_steps(session, tried)
    installed = distributions(path=[find_site_packages(session, python)])
    versions = {each.name: each.version for each in installed if each.name in LIBRARIES}
    broken = [step.name for step in done if not step.passed]
    REPORT.write_text(write_report(broken, missing, results, versions), encoding="utf-8")
    session.log(f"The report is in {REPORT.relative_to(ROOT)}")
    steps.fail_if_one_has(session, done)


def write_report(
    broken: Sequence[str], missing: Sequence[str], results: Mapping[str, Path], versions: Mapping[str, str]
) -> str:
    """The report, in Markdown: what broke, and then with what.

    Args:
        broken: The steps that have failed.
        missing: The names of libraries that are gone.
        results: By package, what pytest has written of its tests; a file that is not there means that it ended before.
        versions: By library, what is installed.
    """
    lines = ["# What broke", ""]
    lines += [f"- gone: `{name}`" for name in missing]
    ran = 0
    for package, file in results.items():
        cases = list(ElementTree.parse(file).iter("testcase")) if file.exists() else []
        ran += len(cases)
        failures = [(case, case.find(kind)) for case in cases for kind in ("failure", "error")]
        for case, failure in failures:
            if failure is not None:
                message = (failure.get("message") or "").partition("\n")[0][:300]
                lines.append(f"- {package}: `{case.get('name')}`: {message}")
        if package in broken and all(failure is None for _, failure in failures):
            lines.append(f"- {package}: the run has ended without a failed test; its log says why")
    if not broken:
        lines.append("Nothing.")
    lines += ["", f"{ran} clauses of the conformance suite were run, and names of torch and Lightning looked for.", ""]
    return "\n".join([*lines, *(f"- {name} {version}" for name, version in sorted(versions.items())), ""])
