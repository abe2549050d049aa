"""What CI runs, and what you run: ``nox -l`` lists it, ``nox -s NAME`` does it.

Packages are found on disk, so a new one needs no edit here. A package whose tests need more than pytest, torch and
Lightning, or other versions than ``constraints.txt`` pins, says so in its own pyproject::

    [tool.fsdp.tests]
    requires = ["moto[server]"]               # besides what every package's tests get
    requires-apart = ["transformers"]         # likewise, in a folder that FSDP_TESTS_APART names, apart from the others
    constraints = "constraints.txt"           # pins of its own, relative to the package; it then shares no environment
    slow = ["tests/test_x.py::test_y"]        # what `nox -s conformance` runs, and `nox -s tests` does not
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nox
from filelock import FileLock  # which nox brings, through virtualenv
from nox.command import CommandFailed
from packaging.requirements import Requirement
from packaging.version import Version

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "typecheck", "tests", "integration", "launchers", "docs"]

# Containers often forbid Python to keep what it has compiled. Torch and Lightning are 2,000 modules, which each of the
# thousands of processes that the tests start would compile again: 5 of the 8 seconds that importing them then takes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent
PINS = ROOT / "constraints.txt"
TESTS_NEED = ("torch", "lightning", "jsonargparse[signatures]", "pytest", "pytest-timeout", "pytest-xdist")
# Multi-rank tests spend much of their time starting interpreters and waiting for each other. Tests of a file may share
# what takes long to make; most of a backend's tests are clauses of one suite in one file, which share nothing.
SIDE_BY_SIDE = ("--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder")  # see conftest.py
# Where most tests wait: for a command that they have started, or for another process to write or to end.
MANY_SIDE_BY_SIDE = ("--numprocesses=3", *SIDE_BY_SIDE[1:])
CLAUSES_SIDE_BY_SIDE = ("--numprocesses=2", "--dist=worksteal")
# Where the ranks of a class live in processes that keep what they have compiled.
CLASSES_SIDE_BY_SIDE = ("--numprocesses=2", "--dist=loadscope", "--no-loadscope-reorder")


# What `minimums` and `newest` run of the conformance suite: numbers, checkpoints and what private names are used for.
CORE = (
    *("it_is_listed", "equals_plain", "saved_on_n_loaded_on_m", "resume_is_exact", "accumulated_gradients"),
    *("stages_in_any_order", "manual_optimization", "optimizers_hold_a_share", "full_state_dict", "gathered"),
    *("calls_outside_of_steps", "tied_parameters", "dtypes_under", "meta_init", "options_leave_numbers_alone"),
)
# And what `versions` does, in CI.
SMOKE = ("it_is_listed", "trainer_equals_plain[2-sgd]", "saved_on_n_loaded_on_m[2-sharded-momentum]")

# Whose optimizers docs/optimizers.md has tables of.
OPTIMIZERS = ("pytorch-optimizer", "schedulefree", "timm", "torchao", "transformers")

# What the examples of docs/transformers.md import. Not among those: transformers imports torchvision where it is, which
# timm brings, and its wheels on the package index can't be imported beside torch's build for CPUs.
TRANSFORMERS = ("accelerate", "peft", "transformers")

# What engines of docs/many-machines.md need, besides what torch and Lightning bring.
LAUNCHERS = ("boto3", "ipykernel", "moto[server]", "ray[train]", "s3fs")

# What every environment has besides, to build and install our packages and to run their sessions.
BUILDS = ("pip", "ruff", "nox", "build", "hatchling", "editables", "psutil", "torchdata")
# Lightning imports matplotlib where it is, which takes a tenth of a second of every process that the tests start.
TOOLS = ("mypy", "sphinx", "furo", "myst-parser", "matplotlib")


@dataclass(frozen=True, kw_only=True)
class Package:
    """One folder of ``packages/``."""

    name: str
    path: Path
    dependencies: tuple[str, ...]
    strategies: tuple[str, ...]
    tests_need: tuple[str, ...]
    tests_need_apart: tuple[str, ...]
    slow: tuple[str, ...]
    pairs: int
    of_meshes: tuple[str, ...]
    pins: Path

    @property
    def other_dependencies(self) -> tuple[str, ...]:
        """What it requires besides this project's packages."""
        return tuple(need for need in self.dependencies if name_of(need) not in PACKAGES)

    @property
    def modules(self) -> Path:
        return self.path / "src"


def name_of(requirement: str) -> str:
    """The package that a requirement is about."""
    return re.split(r"[^\w.-]", requirement)[0]


def found_packages() -> dict[str, Package]:
    packages = {}
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        pyproject: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
        own = pyproject.get("tool", {}).get("fsdp", {}).get("tests", {})
        project = pyproject["project"]
        packages[project["name"]] = Package(
            name=project["name"],
            path=file.parent.relative_to(ROOT),
            dependencies=tuple(project.get("dependencies", ())),
            strategies=tuple(project.get("entry-points", {}).get("fsdp.strategies", ())),
            tests_need=tuple(own.get("requires", ())),
            slow=tuple(own.get("slow", ())),
            pairs=own.get("pairs", 0),
            of_meshes=tuple(own.get("of-meshes", ())),
            tests_need_apart=tuple(own.get("requires-apart", ())),
            pins=file.parent / own["constraints"] if "constraints" in own else PINS,
        )
    return packages


PACKAGES = found_packages()
SHARING = [package for package in PACKAGES.values() if package.pins == PINS]


def with_dependencies(package: Package) -> list[Package]:
    """The first-party packages that ``package`` needs, and itself last."""
    needed: dict[str, Package] = {}
    for name in map(name_of, package.dependencies):
        if name in PACKAGES:
            needed |= {each.name: each for each in with_dependencies(PACKAGES[name])}
    return [*needed.values(), package]


def pip_install(session: nox.Session, python: str, *what: str, pins: Path = PINS) -> None:
    """Install into an interpreter's environment, with the pins.

    Nothing is compiled: of the files of torch, Lightning and their like most are never imported, and the others are
    compiled then.
    """
    pip = (python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile")
    session.run_install(*pip, "--constraint", str(pins), *what, external=True)


def uv_install(session: nox.Session, python: str, *what: str, pins: Path | None = PINS) -> None:
    """Install much, and the same as :func:`pip_install`: uv links files from its cache, and unpacks no wheel twice.

    Not into :func:`layered` environments: uv does not see what is installed below, and would install it again. Where
    pip has been told by its environment variables to look for packages, uv looks too.
    """

    def fill(python: str) -> None:
        pip_install(session, python, "uv")

    uv = (kept_environment(session, "uv", [PINS], fill), "-m", "uv", "pip", "install", "--quiet")
    settings = {
        f"UV_{name}": os.environ[f"PIP_{name}"]
        for name in ("FIND_LINKS", "INDEX_URL", "EXTRA_INDEX_URL")
        if os.environ.get(f"PIP_{name}")
    }
    environment = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NO_CONFIG": "1", **settings}
    words = ("--python", python, *(() if pins is None else ("--constraint", str(pins))))
    session.run_install(*uv, *words, *what, env=environment, external=True)


def kept_environment(
    session: nox.Session,
    name: str,
    sources: list[Path],
    fill: Callable[[str], None],
    *,
    with_pip: bool = True,
    interpreter: str = sys.executable,
) -> str:
    """The interpreter of ``.nox/NAME``, which is made again when one of the sources, or this file, has changed.

    Not filled again: what is not needed any more would stay, and Lightning imports what it finds.

    Args:
        session: The session that needs it.
        name: The folder's name.
        sources: The files that say what is in it.
        fill: Installs, given the interpreter.
        with_pip: Whether it needs a pip of its own: not if it sees another's, nor for uv.
        interpreter: The Python that it is made with.
    """
    place = ROOT / ".nox" / name
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    state = hashlib.sha256(b"".join(path.read_bytes() for path in (Path(__file__), *sources))).hexdigest()
    stamp = place / "installed"
    place.parent.mkdir(exist_ok=True)
    with FileLock(f"{place}.lock"):  # sessions may run side by side, as .ci/run has some
        if python.exists() and stamp.exists() and stamp.read_text() == state:
            return str(python)
        stamp.unlink(missing_ok=True)
        words = ("--clear", *([] if with_pip else ["--without-pip"]))
        session.run_install(interpreter, "-m", "venv", *words, str(place), external=True)
        fill(str(python))
        stamp.write_text(state)
    return str(python)


def third_party(session: nox.Session) -> str:
    """The interpreter with what all packages need that share the pins, and with none of them.

    Torch is large: it is installed once, and :func:`layered` environments see it.
    """
    needs = {need for package in SHARING for need in package.other_dependencies}

    def fill(python: str) -> None:
        uv_install(session, python, *sorted({*TESTS_NEED, *BUILDS, *needs}))

    return kept_environment(session, "third-party", [PINS, *pyprojects(SHARING)], fill, with_pip=False)


def layered(session: nox.Session, name: str, packages: list[Package], *needs: str) -> str:
    """The interpreter of an environment with some of our packages, editable, over what is installed for all.

    So a package's tests run without those that it does not depend on.
    """
    below = third_party(session)

    def fill(python: str) -> None:
        see_installed(session, python, below)
        if needs:
            pip_install(session, python, *needs)
        editable = [word for package in packages for word in ("--editable", f"./{package.path.as_posix()}")]
        if editable:
            pip_install(session, python, "--no-deps", "--no-build-isolation", *editable)

    return kept_environment(session, name, [PINS, *pyprojects(SHARING)], fill, with_pip=False)


def apart(session: nox.Session, name: str, needs: tuple[str, ...], sources: list[Path]) -> str:
    """A folder with what some tests import, and no other process is to find.

    Lightning imports transformers where it is, which takes most of a second of every process that the tests start.
    """
    below = third_party(session)

    def fill(python: str) -> None:
        see_installed(session, python, below)
        pip_install(session, python, *needs)

    return site_packages(session, kept_environment(session, name, [PINS, *sources], fill, with_pip=False))


def see_installed(session: nox.Session, python: str, below: str) -> None:
    """Let an environment import what is installed in another one."""
    (Path(site_packages(session, python)) / "below.pth").write_text(f"{site_packages(session, below)}\n")


def site_packages(session: nox.Session, python: str) -> str:
    """Where an interpreter's environment has its packages."""
    asks = ("-c", "import sysconfig; print(sysconfig.get_path('purelib'), end='')")
    return str(session.run(python, *asks, silent=True, external=True))


def pyprojects(packages: list[Package]) -> list[Path]:
    return [ROOT / package.path / "pyproject.toml" for package in packages]


def shared_python(session: nox.Session) -> str:
    """The interpreter with every package that shares the pins, for the sessions that run them."""
    return layered(session, "dev", SHARING)


def tools_python(session: nox.Session) -> str:
    """The same with the tools of the sessions that look at sources, write pages or draw."""
    return layered(session, "tools", SHARING, *TOOLS)


def own_python(session: nox.Session, package: Package, *more: str, name: str = "") -> str:
    """The interpreter of a package with pins of its own."""

    def fill(python: str) -> None:
        editable = [word for one in with_dependencies(package) for word in ("--editable", f"./{one.path.as_posix()}")]
        uv_install(session, python, *TESTS_NEED, *package.tests_need, *more, *editable, pins=package.pins)

    sources = [package.pins, *pyprojects(with_dependencies(package))]
    return kept_environment(session, name or package.name, sources, fill, with_pip=False)


def wheels(session: nox.Session, *kinds: str) -> list[str]:
    """Build every package into ``dist/``; the paths of the wheels that can be installed beside each other."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    build = (third_party(session), "-m", "build", "--no-isolation", *kinds, "--outdir", "dist")
    for package in PACKAGES.values():
        session.run(*build, str(package.path), silent=True, external=True)
    sharing = {package.name.replace("-", "_") for package in SHARING}
    return [str(path) for path in sorted(ROOT.glob("dist/*.whl")) if path.name.split("-")[0] in sharing]


def run_pytest(
    session: nox.Session, *everything: str, python: str, side_by_side: tuple[str, ...] = SIDE_BY_SIDE
) -> None:
    """Run all of a session's tests, or those that the words after ``--`` name by path."""
    named = any(Path(word.split("::")[0]).exists() for word in session.posargs)
    words = (*(() if named else (*side_by_side, *everything)), *session.posargs)
    session.run(python, "-m", "pytest", *words, external=True)


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """Ruff: style, imports, docstrings, format. `-- --fix` mends what it can."""
    ruff = (third_party(session), "-m", "ruff")
    fix = "--fix" in session.posargs
    session.run(*ruff, "check", *(["--fix"] if fix else []), external=True)
    session.run(*ruff, "format", *([] if fix else ["--check", "--diff"]), external=True)


@nox.session(python=False)
def typecheck(session: nox.Session) -> None:
    """Mypy, strict, over every package's sources."""
    python = tools_python(session)
    modules = [str(package.modules) for package in PACKAGES.values()]
    session.run(python, "-m", "mypy", *modules, *session.posargs, external=True)


@nox.session(python=False)
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def tests(session: nox.Session, package: str) -> None:
    """Each package's tests and doctests, without those that it does not need. Words after `--` go to pytest."""
    chosen = PACKAGES[package]
    places = (str(chosen.modules), str(chosen.path / "tests"))
    if chosen in SHARING:
        python = layered(session, f"tests-{chosen.name}", with_dependencies(chosen), *chosen.tests_need)
        side_by_side = CLAUSES_SIDE_BY_SIDE if chosen.strategies else MANY_SIDE_BY_SIDE
        if chosen.tests_need_apart:
            needs, sources = chosen.tests_need_apart, pyprojects([chosen])
            session.env["FSDP_TESTS_APART"] = apart(session, f"tests-{chosen.name}-apart", needs, sources)
    else:
        python, side_by_side = own_python(session, chosen), CLASSES_SIDE_BY_SIDE
    elsewhere = [f"--ignore={chosen.path.as_posix()}/{test}" for test in chosen.of_meshes if "::" not in test]
    without = (*left_out(chosen), *elsewhere)
    run_pytest(session, "--doctest-modules", *without, *places, side_by_side=side_by_side, python=python)


def left_out(package: Package) -> list[str]:
    """The words that leave out what is for the slow run."""
    return [f"--deselect={package.path.as_posix()}/{test}" for test in package.slow]


@nox.session(python=False)
def meshes(session: nox.Session) -> None:
    """What needs meshes of several axes, and more pairs of options than `tests`. Words after `--` go to pytest."""
    for chosen in PACKAGES.values():
        if chosen.pairs:
            python = layered(session, f"tests-{chosen.name}", with_dependencies(chosen), *chosen.tests_need)
            session.env["FSDP_PAIRS"] = str(chosen.pairs)
            chosen_tests = [f"{chosen.path.as_posix()}/{test}" for test in chosen.of_meshes]
            run_pytest(session, *left_out(chosen), *chosen_tests, side_by_side=CLAUSES_SIDE_BY_SIDE, python=python)


@nox.session(python=False)
def dev(session: nox.Session) -> None:
    """Make `.nox/dev`, which has every package that shares the pins, editable: to work by hand."""
    session.log(shared_python(session))


@nox.session(python=False)
def conformance(session: nox.Session) -> None:
    """The whole suite over what `tests` runs a part of it over. Half an hour, and as much for XLA.

    `-- -k xla` and the like choose. Words after `--` go to pytest.
    """

    chosen_none = 5  # of a package's files: -k may have meant another's
    failed: list[str] = []
    for package in PACKAGES.values():  # one after the other, for files of several have one name
        files = [file.as_posix() for file in sorted(package.path.glob("tests/slow_conformance_*.py"))]
        files += [f"{package.path.as_posix()}/{test}" for test in package.slow]
        if files:
            python = shared_python(session) if package in SHARING else own_python(session, package)
            command = (python, "-m", "pytest", *CLAUSES_SIDE_BY_SIDE, *files, *session.posargs)
            try:
                session.run(*command, external=True, success_codes=[0, chosen_none])
            except CommandFailed:  # the other packages' are run all the same
                failed.append(package.name)
    if failed:
        session.error(f"clauses have failed of: {', '.join(failed)}")


@nox.session(python=False)
def minimums(session: nox.Session) -> None:
    """The core of the conformance suite on the oldest torch, Lightning and others that the packages allow."""
    run_core(session, oldest_python(session), CORE)


@nox.session(python=False)
def newest(session: nox.Session) -> None:
    """The same on the newest. `-- torch==X` takes that torch where CPU builds stop earlier."""
    run_core(session, newest_python(session), CORE)


@nox.session(python=False)
def versions(session: nox.Session) -> None:
    """A few clauses of it on the oldest, and on the newest."""
    for python in (oldest_python(session), newest_python(session)):
        run_core(session, python, SMOKE, side_by_side=())  # workers would take longer to start than their clauses


def run_core(
    session: nox.Session, python: str, clauses: tuple[str, ...], side_by_side: tuple[str, ...] = CLAUSES_SIDE_BY_SIDE
) -> None:
    """Run clauses, whose names hold these words, of every package that shares the pins."""
    words = (*side_by_side, "-k", " or ".join(map(worded, clauses)))
    for package in SHARING:
        if package.strategies:
            suite = str(package.path / "tests/test_conformance.py")
            named = [word for word in session.posargs if not word.startswith("torch==")]
            session.run(python, "-m", "pytest", *words, *named, suite, external=True)


def worded(clause: str) -> str:
    """A clause as `-k` takes it, which knows no brackets."""
    name, _, case = clause.partition("[")
    return f"({name} and {case.rstrip(']')})" if case else name


def oldest_python(session: nox.Session) -> str:
    """An interpreter with the oldest releases that the packages that share the pins allow; tests' tools are pinned."""

    def fill(python: str) -> None:
        tools = [pinned(need) for need in (*TESTS_NEED, *tests_need()) if name_of(need) not in map(name_of, needs())]
        torch = torch_release(session, min)
        words = ("--resolution", "lowest-direct", *needs(), *tools, f"torch=={torch}")
        uv_install(session, python, *words, pins=None)
        uv_install(session, python, "--no-deps", *editable(), pins=None)

    return kept_environment(session, "minimums", [PINS, *pyprojects(SHARING)], fill, with_pip=False)


def newest_python(session: nox.Session) -> str:
    """An interpreter with the newest releases of everything, which are looked for each time."""
    python = kept_environment(session, "newest", pyprojects(SHARING), lambda python: None, with_pip=False)
    asked = [word for word in session.posargs if word.startswith("torch==")]
    torch = asked or [f"torch=={torch_release(session, max)}"]
    uv_install(session, python, "--upgrade", *needs(), *TESTS_NEED, *tests_need(), *torch, pins=None)
    uv_install(session, python, "--no-deps", *editable(), pins=None)
    return python


def needs() -> list[str]:
    """What the packages that share the pins require besides each other."""
    return sorted({need for package in SHARING for need in package.other_dependencies})


def tests_need() -> list[str]:
    """What their tests need besides."""
    return sorted({need for package in SHARING for need in package.tests_need if package.strategies})


def editable() -> list[str]:
    """The words that install them from here."""
    return [word for package in SHARING for word in ("--editable", f"./{package.path.as_posix()}")]


def pinned(need: str) -> str:
    """A requirement with the version that ``constraints.txt`` has of it."""
    pins = dict(line.split("==") for line in PINS.read_text(encoding="utf-8").splitlines() if "==" in line)
    return f"{need}=={pins[name_of(need)]}"


def torch_release(session: nox.Session, first: Callable[[list[Version]], Version]) -> Version:
    """The oldest or newest torch that the packages allow, as a CPU build if there is one where pip looks.

    PyPI's builds for Linux need gigabytes of CUDA to be imported at all. So where there are CPU builds, the newest is
    the newest of these, and a message says what that leaves out.
    """
    pip = (third_party(session), "-m", "pip", "index", "versions", "--json", "torch")
    told = json.loads(str(session.run(*pip, silent=True, external=True, stderr=subprocess.DEVNULL)))
    allowed = [Requirement(need).specifier for need in needs() if name_of(need) == "torch"]
    found = [one for one in map(Version, told["versions"]) if all(one in each for each in allowed)]
    chosen = first(found)
    for_cpu = [one for one in found if one.local == "cpu" and (first is max or one.public == chosen.public)]
    if for_cpu and first(for_cpu).public != chosen.public:
        session.warn(
            f"torch {chosen} is out, and the newest CPU build here is {first(for_cpu)}. Type: -- torch=={chosen}"
        )
    return first(for_cpu or found)


@nox.session(python=False)
def integration(session: nox.Session) -> None:
    """The packages as users get them, built and installed as wheels: `tests-integration/`."""
    python = layered(session, "integration", [], "safetensors")  # to read what is consolidated
    pip_install(session, python, "--no-deps", "--force-reinstall", *wheels(session, "--wheel"))
    for package in PACKAGES.values():
        if package not in SHARING:  # such as FSDP_XLA_PYTHON
            session.env[f"{package.name.replace('-', '_').upper()}_PYTHON"] = own_python(session, package)
    session.env["FSDP_TESTS_APART"] = apart(session, "integration-apart", OPTIMIZERS, [])
    session.env["FSDP_TESTS_TRANSFORMERS"] = apart(session, "integration-transformers", TRANSFORMERS, [])
    run_pytest(session, "tests-integration", "--ignore=tests-integration/launchers", python=python)


@nox.session(python=False)
def launchers(session: nox.Session) -> None:
    """The scripts of docs/many-machines.md under the engines that launch them: `tests-integration/launchers/`."""
    python = layered(session, "launchers", [], *LAUNCHERS)
    pip_install(session, python, "--no-deps", "--force-reinstall", *wheels(session, "--wheel"))
    run_pytest(session, "tests-integration/launchers", python=python)


@nox.session(python=False)
def example(session: nox.Session) -> None:
    """The stranger's package, `tests-integration/example-backend/`: the whole conformance suite over it."""
    place = "tests-integration/example-backend"
    python = layered(session, "example", [PACKAGES["fsdp-core"]])
    pip_install(session, python, "--no-deps", "--no-build-isolation", "--editable", f"./{place}")
    session.run(python, "-m", "pytest", *CLAUSES_SIDE_BY_SIDE, f"{place}/tests", *session.posargs, external=True)


@nox.session(python=False)
def hardware(session: nox.Session) -> None:
    """Tests on real devices: `-- xla` on a TPU VM, `-- cuda` on a machine with a GPU or more. CI has neither."""
    kinds = [word for word in session.posargs if word in ("xla", "cuda")]
    if len(kinds) != 1:
        session.error(
            "type `python -m nox -s hardware -- xla` on a TPU VM, or `-- cuda` on a machine with a GPU or more"
        )
    words = [word for word in session.posargs if word not in kinds]
    if kinds == ["xla"]:
        hardware_xla(session, words)
    else:
        hardware_cuda(session, words)


def hardware_xla(session: nox.Session, words: list[str]) -> None:
    """The tests of fsdp-xla that hold on any device, on TPUs. The words go to pytest."""
    package = PACKAGES["fsdp-xla"]
    if not tpu_chips():
        session.error(
            "no TPU is attached to this machine (no PCI device of Google's). On a TPU VM, type\n"
            "    python -m nox -s hardware -- xla\n"
            "and here, where XLA's CPU devices stand in for chips,\n"
            '    python -m nox -s "tests(fsdp-xla)"'
        )
    python = own_python(session, package, "torch_xla[tpu]", name="fsdp-xla-tpu")
    tests = str(package.path / "tests/test_everywhere.py")
    environment: dict[str, str | None] = {"PJRT_DEVICE": "TPU", "FSDP_XLA_TESTS_ON": "TPU", "CPU_NUM_DEVICES": None}
    session.run(python, "-m", "pytest", tests, *words, env=environment, external=True)


#: The suites start up to so many ranks, each on a GPU of its own.
GPUS_OF_SUITES = 4


def hardware_cuda(session: nox.Session, words: list[str]) -> None:
    """The prepared run on GPUs, `tests-integration/gpu/`, and the whole suites where each rank can have one.

    The words go to the run; `--minutes 8` and `--out build/gpu-run` are its defaults.
    """
    count = gpus()
    if not count:
        session.error(
            "no CUDA device here (by nvidia-smi). On a machine with a GPU or more, type\n"
            "    python -m nox -s hardware -- cuda\n"
            "and here, where ranks are processes on the CPU,\n"
            '    python -m nox -s "tests(fsdp-fsdp2)" "tests(fsdp-cuda-native)"\n'
            "    python -m nox -s card    # a rehearsal of that run"
        )
    out = [] if "--out" in words else ["--out", fresh_folder("gpu-run")]
    python = layered(session, "hardware", SHARING, "torchao", *TRANSFORMERS)
    session.run(python, "tests-integration/gpu/run.py", "--installed", *out, *words, external=True)
    if count < GPUS_OF_SUITES:
        session.log(f"The whole suites need {GPUS_OF_SUITES} GPUs, and {count} are here: ranks have shared them")
        return
    for name in ("fsdp-fsdp2", "fsdp-cuda-native"):  # one after the other, for the files have one name
        suite = f"packages/{name}/tests/test_conformance.py"
        session.run(python, "-m", "pytest", suite, env={"FSDP_TESTS_ACCELERATOR": "cuda"}, external=True)


def fresh_folder(name: str) -> str:
    """A folder in ``build/`` that is not there yet."""
    path = ROOT / "build" / name
    shutil.rmtree(path, ignore_errors=True)
    return str(path)


#: What a machine with a card is expected to have, and its releases.
CARD_PINS = ROOT / "tests-integration/gpu/constraints.txt"


@nox.session(python=False)
def card(session: nox.Session) -> None:
    """Rehearse the run on a GPU, on the CPU: packed, Python 3.12, torch 2.11. Words after `--` go to the run."""

    def fill(python: str) -> None:
        names = [line.split("==")[0] for line in CARD_PINS.read_text(encoding="utf-8").splitlines() if "==" in line]
        uv_install(session, python, *names, pins=CARD_PINS)

    python = kept_environment(session, "card", [CARD_PINS], fill, interpreter=other_python(session, "3.12"))
    session.run(third_party(session), "tests-integration/gpu/pack.py", external=True)
    words = ("--minutes", "8", "--out", fresh_folder("gpu-rehearsal"), *session.posargs)
    without_index = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": None, "HF_HUB_OFFLINE": "1"}
    session.run(python, "tests-integration/gpu/run.py", *words, env=without_index, external=True)


def other_python(session: nox.Session, version: str) -> str:
    """An interpreter of another release of Python: the one on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    on_path = [path for path in [shutil.which(f"python{version}")] if path]
    for candidate in (*on_path, *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))):
        if subprocess.run([candidate, "-c", "import ssl, venv"], capture_output=True, check=False).returncode == 0:
            return candidate  # pyenv's own commands fail for a release that is not chosen
    session.error(f"Python {version} is not here. Install it, and put python{version} on the path")


def tpu_chips() -> int:
    """How many PCI devices of Google's there are, by which torch_xla finds its chips."""
    return sum(vendor.read_text().strip() == "0x1ae0" for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"))


def gpus() -> int:
    """How many CUDA devices the driver lists."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


@nox.session(python=False)
def docs(session: nox.Session) -> None:
    """Sphinx: the pages into `docs/_build/html`, warnings are errors. What must be there is, and examples run."""
    python = tools_python(session)
    sphinx = (python, "-m", "sphinx", "--fresh-env", "--fail-on-warning", "--keep-going", "--quiet")
    session.run(*sphinx, "--builder", "html", "docs", "docs/_build/html", external=True)
    # Rather than Sphinx's own doctest builder. Those of the sources are run with each package's tests.
    examples = ("--doctest-glob=*.md", "--ignore=docs/examples", "--ignore=docs/_build")
    session.run(python, "-m", "pytest", "--quiet", *examples, "docs", external=True)
    session.log(f"Open {ROOT / 'docs/_build/html/index.html'}")


@nox.session(python=False)
def demo(session: nox.Session) -> None:
    """Train on real text on two CPU processes, resume on one, draw it. `-- --quick` takes less time.

    `-- --strategy xla_fsdp_spmd` (or `xla_fsdp`) trains on XLA's CPU devices and resumes under fsdp2.
    """
    python = tools_python(session)
    chosen = {name for name in session.posargs if not name.startswith("-")}
    for package in PACKAGES.values():
        if package not in SHARING and any(name.startswith(prefix) for name in chosen for prefix in package.strategies):
            session.env[f"{package.name.replace('-', '_').upper()}_PYTHON"] = own_python(session, package)
    session.run(python, "docs/examples/demo.py", *session.posargs, external=True)


@nox.session(python=False)
def bench(session: nox.Session) -> None:
    """Time and memory beside hand-written loops, as a table. `-- --xla` measures fsdp-xla, in its own environment."""
    script, python = "run.py", shared_python(session)
    if "--xla" in session.posargs:
        script, python = "xla.py", own_python(session, PACKAGES["fsdp-xla"])
    session.run(python, f"tests-integration/benchmarks/{script}", *session.posargs, external=True)


@nox.session(reuse_venv=False)
def build(session: nox.Session) -> None:
    """Wheels and sdists into `dist/`; then a clean environment installs them and lists the names."""
    built = wheels(session)
    pip_install(session, "python", *(wheel for wheel in built if "fsdp_core-" in wheel))
    session.log("fsdp-core alone: no torch, no strategy, and the command says what to install")
    session.run("fsdp", "list")
    pip_install(session, "python", "torch")
    pip_install(session, "python", "lightning", *built)
    session.run("fsdp", "list")
    listed = {row["name"] for row in json.loads(str(session.run("fsdp", "list", "--json", silent=True)))["strategies"]}
    missing = {name for package in SHARING for name in package.strategies} - listed
    if missing:
        session.error(f"the wheels are installed, but `fsdp list` does not name {', '.join(sorted(missing))}")
