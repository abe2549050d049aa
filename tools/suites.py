"""Runs the tests of packages and of folders by pytest, on two cores."""

from __future__ import annotations

import argparse
import os
from functools import partial
from itertools import takewhile
from pathlib import Path

import nox

from tools import environments as envs
from tools import steps
from tools.environments import PACKAGES, PINNED_APART, ROOT, SHARING, Package

__all__ = [
    "CLAUSES_ON_DEVICE",
    "CLAUSES_SIDE_BY_SIDE",
    "CORE",
    "SEED",
    "SMOKE",
    "choose_packages",
    "rehearse_run_on_card",
    "run_clauses",
    "run_folder",
    "run_on_device",
    "run_package",
    "run_random_steps",
]

# Core's tests mostly run in one process, or start interpreters and wait for them; those of a file may share what takes
# long to make. The ranks of backends use the cores by themselves: a worker more would cost its imports, those of the
# process that its ranks are forked from, and a tenth of the CPU seconds. Where all of a suite is run, it pays: clauses
# of a file share nothing, but XLA's ranks, which are threads of one process and keep what they compile, are a class's.
# A worker that a test has ended is not replaced: pytest-xdist gives the same file to the new one, without end.
TWO = ("--numprocesses=2", "--max-worker-restart=0")
FILES_SIDE_BY_SIDE = (*TWO, "--dist=loadfile", "--no-loadscope-reorder")  # see tools/costs.py
CLAUSES_SIDE_BY_SIDE = (*TWO, "--dist=worksteal")
CLASSES_SIDE_BY_SIDE = (*TWO, "--dist=loadscope", "--no-loadscope-reorder")

#: Whose turn it is, where tools/selection.py and others draw.
SEED = os.environ.get("FSDP_PAIRS_SEED", "17")

#: What other versions run of the conformance suite: numbers, checkpoints and what private names are used for.
CORE = (
    "it_is_listed or equals_plain or saved_on_n_loaded_on_m or resume_is_exact or accumulated_gradients"
    " or stages_in_any_order or manual_optimization or optimizers_hold_a_share or full_state_dict or gathered"
    " or calls_outside_of_steps or tied_parameters or dtypes_under or meta_init or options_leave_numbers_alone"
)
#: What CI runs of it on the fake device: numbers, what a step may do, and what is copied beside computation.
CLAUSES_ON_DEVICE = {
    "fsdp-fsdp2": (
        "(trainer_equals_plain and 2-sgd) or clamped or averages_and_codebooks or every_optimizer_of_torch"
        " or model_built_empty or (saved_on_n_loaded_on_m and 2-sharded-momentum)"
        " or async_save or offload or dtypes_under"
    ),
    "fsdp-cuda-native": "offload",
}
#: And this, which takes longest, of one of them in turn.
IN_TURN_ON_DEVICE = "(steps_of_many_passes and fabric)"
#: What CI runs of the conformance suite with other versions.
SMOKE = "it_is_listed or (trainer_equals_plain and 2-sgd) or (saved_on_n_loaded_on_m and 2-sharded-momentum)"


def choose_packages(session: nox.Session) -> tuple[list[Package], list[str]]:
    """The packages that the words after ``--`` name, or that hold the files that they name, and the other words.

    Args:
        session: The session, which fails if the words begin with something else.

    Returns:
        The packages, all if none is named, in the order in which they are tested; and the words for pytest.
    """
    words = [word for word in session.posargs if word not in PACKAGES]
    for word in takewhile(lambda word: not word.startswith("-"), session.posargs):
        if word not in PACKAGES and not _file_of(word).exists():
            session.error(
                f"{word!r} is no package and no file here. The packages are {', '.join(PACKAGES)}; "
                "to choose tests by their names, type -k before words of them"
            )
    named = [package for name, package in PACKAGES.items() if name in session.posargs]
    holding = [package for package in PACKAGES.values() if any(_is_of(package, word) for word in words)]
    chosen = named or holding or list(PACKAGES.values())
    # First those whose tests have one worker: of two, both would compile what the first process of all imports.
    return sorted(chosen, key=lambda package: not package.strategies), words


def _file_of(word: str) -> Path:
    return Path(word.split("::")[0])


def _is_of(package: Package, word: str) -> bool:
    return _file_of(word).exists() and _file_of(word).resolve().is_relative_to(ROOT / package.path)


def run_folder(session: nox.Session, python: str, name: str, *words: str) -> None:
    """Run the tests that the words name, one by one, or only those that the words after ``--`` name by path.

    Without words after ``--``, of what is marked ``drawn`` a part is run: see :mod:`tools.selection`.

    Args:
        session: The session.
        python: The interpreter.
        name: Of the run, as :func:`tools.steps.show_costs` takes it.
        *words: Arguments of pytest.
    """
    names_tests = any(_file_of(word).exists() for word in session.posargs)
    chosen = () if names_tests else words
    steps.run_pytest(session, python, name, *chosen, *(session.posargs or ["--part=drawn"]))


def run_clauses(session: nox.Session, python: str, clauses: str, *words: str) -> None:
    """Run some clauses of the conformance suite of every package that shares the pins.

    Args:
        session: The session.
        python: The interpreter, which has these packages.
        clauses: What they are called, as pytest's ``-k`` takes it.
        *words: More arguments of pytest.
    """
    words += tuple(word for word in session.posargs if not word.startswith("torch=="))
    for package in SHARING:
        if package.strategies:
            session.run(python, "-m", "pytest", "-k", clauses, *words, f"{package.path}/tests/test_conformance.py")


def run_on_device(session: nox.Session, kind: str, *words: str, in_short: bool = False) -> None:
    """Run the conformance suites on a kind of device that torch knows, and try what the device provides.

    Args:
        session: The session.
        kind: The kind of the devices. ``"fake"`` is that of `packages/fsdp-fake-device`, whose streams are held back in
            turns; for another, its vendor's package is installed beforehand: `pip --python .nox/device install ...`.
        *words: More arguments of pytest.
        in_short: Whether only ``CLAUSES_ON_DEVICE`` are run.
    """
    python = envs.make_layer(session, "device", SHARING)
    environment = {"FSDP_TESTS_ACCELERATOR": kind}
    if kind == "fake":
        held = ("all", "side", "default")[int(SEED) % 3]
        environment |= {"FSDP_TESTS_FORK": "1", "FSDP_FAKE_DEVICES": "4"}
        environment |= {"FSDP_FAKE_DEVICE_DELAY": "300", "FSDP_FAKE_DEVICE_HELD": held}
    session.run(python, "-m", "fsdp_core", "doctor", "--device", kind, env=environment)
    for turn, (name, clauses) in enumerate(CLAUSES_ON_DEVICE.items()):
        if int(SEED) % len(CLAUSES_ON_DEVICE) == turn:
            clauses = f"{clauses} or {IN_TURN_ON_DEVICE}"
        chosen = ("-k", clauses) if in_short else ()
        suite = f"{PACKAGES[name].path}/tests/test_conformance.py"
        steps.run_pytest(
            session, python, f"device-{kind}-{name}", "--part=tests", *chosen, *words, suite, env=environment
        )


def run_package(session: nox.Session, package: Package, part: str, *words: str, pairs: int) -> None:
    """Run a part of a package's tests and doctests, without the packages that it does not need.

    Args:
        session: The session.
        package: The package.
        part: Which of its tests, see :mod:`tools.selection`.
        *words: More arguments of pytest.
        pairs: How many pairs of options the conformance suite draws.
    """
    python = envs.make_tests_environment(session, package)
    side_by_side: tuple[str, ...]
    if part == "everything" or (part == "tests" and package.strategies):
        side_by_side = ()
    elif not package.strategies:
        side_by_side = FILES_SIDE_BY_SIDE
    else:
        side_by_side = CLASSES_SIDE_BY_SIDE if package in PINNED_APART else CLAUSES_SIDE_BY_SIDE
    environment = {"FSDP_PAIRS": str(pairs), "FSDP_PAIRS_SEED": SEED}
    if package.requires_apart:
        folder = envs.make_folder_apart(session, f"{package.name}-apart", *package.requires_apart)
        environment["FSDP_TESTS_APART"] = folder
    parts = (f"--part={part}", f"--pairs-seed={SEED}")
    # no doctest needs ranks, so none is left to `everything`
    found_in = (f"{package.path}/tests",) if part == "everything" else ("--doctest-modules", package.path)
    tests = [word for word in words if _is_of(package, word)]
    options = [word for word in words if not any(_is_of(each, word) for each in PACKAGES.values())]
    arguments = (*side_by_side, *parts, *options, *(("--doctest-modules", *tests) if tests else found_in))
    codes = [0, 5] if words else [0]  # 5: -k has chosen another package's
    steps.run_pytest(session, python, f"{package.name}-{part}", *arguments, env=environment, success_codes=codes)


def rehearse_run_on_card(session: nox.Session, *words: str) -> None:
    """Run what `hardware -- cuda` does, in tiny sizes on the CPU, with what a machine with a card is expected to have.

    Args:
        session: The session.
        *words: Arguments of the run.
    """
    pins = ROOT / "tests-integration/gpu/constraints.txt"
    interpreter = envs.find_python(session, "3.12")
    wanted = ("pip", *envs.read_pins(pins))  # the run installs by pip
    python = envs.make_environment(session, "card", [], *wanted, pins=pins, interpreter=interpreter)
    session.run(envs.make_third_party(session), "tests-integration/gpu/pack.py")
    without_index = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": None, "HF_HUB_OFFLINE": "1"}
    out = ("--out", envs.name_new_folder("gpu-rehearsal"))
    session.run(python, "tests-integration/gpu/run.py", "--minutes", "30", *out, *words, env=without_index)


def run_random_steps(session: nox.Session) -> None:
    """Run the clause of steps that are composed at random, of each strategy that the words after ``--`` name.

    ``--seed`` is multiplied by a thousand, so that two days, or two numbers, have no step in common; ``--count`` is of
    all front ends together.
    """
    names = [name for package in PACKAGES.values() for name in package.strategies]
    parser = argparse.ArgumentParser(prog="nox -s steps --", description="Strategies, and how many steps of a seed.")
    parser.add_argument("strategies", nargs="*", default=["fsdp2", "fsdp_native"], metavar="strategy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    chosen = parser.parse_args(session.posargs)
    if unknown := set(chosen.strategies) - set(names):
        session.error(f"{', '.join(sorted(unknown))} is no strategy here; these are: {', '.join(names)}")
    settings = {"FSDP_STEPS": str(-(-chosen.count // 3)), "FSDP_STEPS_SEED": str(1000 * chosen.seed)}
    run = {}
    for package in PACKAGES.values():
        if named := [name for name in chosen.strategies if name in package.strategies]:
            python = envs.make_tests_environment(session, package)
            files = [f"{package.path}/tests/test_conformance.py"]
            files += map(str, sorted(ROOT.glob(f"{package.path}/tests/slow_conformance_*.py")))
            words = ("-m", "pytest", "-k", "test_random_steps", f"--strategies={','.join(named)}", *files)
            run[package.name] = partial(session.run, python, *words, env=settings)
    steps.fail_if_one_has(session, steps.run_steps(session, run))
