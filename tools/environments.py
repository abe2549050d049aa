"""The packages of this repository, and what noxfile.py does with environments and devices beyond nox's own means.

nox makes an environment per session. Here several share one installed torch, which is large, and are made again only
when what they are made of has changed. Each is a folder of ``.nox/``, and what makes one returns its interpreter.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import nox
from filelock import FileLock  # which nox brings, through virtualenv
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PINS = ROOT / "constraints.txt"
STAMP = "installed"  # the file of an environment that says what it was made of, once it is
PRE_RELEASES = "--pre"  # the word after `--` that lets `nox -s newest` take what is not released
TESTS_NEED = ("torch", "lightning", "jsonargparse[signatures]", "psutil", "pytest", "pytest-xdist")
# What builds and installs our packages, and runs their sessions.
BUILDS_NEED = ("pip", "ruff", "nox", "build", "hatchling", "editables", "torchdata")


@dataclass(frozen=True, kw_only=True)
class Package:
    """A folder of ``packages/``. Its own pyproject may say what its tests need::

    [tool.fsdp.tests]
    requires = ["moto[server]"]           # besides what every package's tests get
    requires-apart = ["transformers"]     # likewise, in a folder that FSDP_TESTS_APART names, apart from the others
    constraints = "constraints.txt"       # pins of its own, relative to the package; it then shares no environment
    pairs = 20                            # how many configurations of options `nox -s everything` draws
    """

    name: str
    path: str
    pyproject: Path
    pins: Path
    dependencies: Sequence[str]
    strategies: Sequence[str]
    requires: Sequence[str]
    requires_apart: Sequence[str]
    pairs: int

    @property
    def editable(self) -> str:
        """The word by which pip and uv install it from here."""
        return f"--editable=./{self.path}"

    @property
    def python_variable(self) -> str:
        """The environment variable that tells tests its interpreter, such as FSDP_XLA_PYTHON."""
        return f"{self.name.replace('-', '_').upper()}_PYTHON"


def find_packages(root: Path) -> dict[str, Package]:
    """Read each ``packages/*/pyproject.toml``, so that a new package needs no edit here."""
    packages = {}
    for file in sorted(root.glob("packages/*/pyproject.toml")):
        path = file.parent.relative_to(root).as_posix()
        pyproject = nox.project.load_toml(file)
        project, tests = pyproject["project"], pyproject.get("tool", {}).get("fsdp", {}).get("tests", {})
        packages[project["name"]] = Package(
            name=project["name"],
            path=path,
            pyproject=file,
            pins=file.parent / tests["constraints"] if "constraints" in tests else root / PINS.name,
            dependencies=project.get("dependencies", []),
            strategies=list(project.get("entry-points", {}).get("fsdp.strategies", [])),
            requires=tests.get("requires", []),
            requires_apart=tests.get("requires-apart", []),
            pairs=tests.get("pairs", 12),
        )
    return packages


PACKAGES = find_packages(ROOT)
SHARING = [package for package in PACKAGES.values() if package.pins == PINS]
PINNED_APART = [package for package in PACKAGES.values() if package not in SHARING]
BUILT: list[str] = []  # the packages whose wheels this process has built
# What those that share them require besides each other, and what their conformance suites need besides.
REQUIREMENTS = sorted({x for p in SHARING for x in p.dependencies if Requirement(x).name not in PACKAGES})
SUITES_NEED = sorted({line for package in SHARING if package.strategies for line in package.requires})


def order_dependencies(package: Package, packages: dict[str, Package]) -> list[Package]:
    """The packages of this repository that ``package`` needs, each after those that it needs, and itself last."""
    ordered: list[Package] = []
    for dependency in (packages.get(Requirement(line).name) for line in package.dependencies):
        if dependency:
            ordered += [other for other in order_dependencies(dependency, packages) if other not in ordered]
    return [*ordered, package]


def read_pins(file: Path) -> dict[str, str]:
    """The versions that a file of pins has, by package."""
    return dict(re.findall(r"^([\w.-]+)==([^\s#;]+)", file.read_text(encoding="utf-8"), re.MULTILINE))


def keep_environment(
    session: nox.Session,
    name: str,
    made_of: Iterable[str | Path],
    fill: Callable[[str], None],
    interpreter: str = sys.executable,
) -> str:
    """Make an environment, unless it is there and what it is made of has not changed: words, and the bytes of files.

    It is emptied first: what is not needed any more would stay, and Lightning imports what it finds. Then ``fill``
    installs into it, given its interpreter, which has no pip of its own.
    """
    folder = ROOT / ".nox" / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = folder / STAMP
    parts = [part.read_bytes() if isinstance(part, Path) else part.encode() for part in (Path(__file__), *made_of)]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):  # sessions may run side by side, as .ci/run has some
        if not (python.exists() and stamp.exists() and stamp.read_text() == digest):
            stamp.unlink(missing_ok=True)
            session.run_install(interpreter, "-m", "venv", "--clear", "--without-pip", str(folder), external=True)
            fill(str(python))
            stamp.write_text(digest)
    return str(python)


def install_with_pip(session: nox.Session, python: str, *words: str) -> None:
    """Install with the pins. Nothing is compiled: most files are never imported, and the others are compiled then."""
    pip = (python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile")
    session.run_install(*pip, "--constraint", str(PINS), *words, external=True)


def install_with_uv(session: nox.Session, python: str, *words: str, pins: Path | None = PINS) -> None:
    """Install the same as pip, for a fifth of its CPU seconds: uv links files from its cache, and unpacks none twice.

    Where pip has been told by its environment variables to look for packages, uv looks too.
    """

    def install_uv(python: str) -> None:
        session.run_install(python, "-m", "ensurepip", silent=True, external=True)
        install_with_pip(session, python, "uv")

    uv = (keep_environment(session, "uv", [PINS], install_uv), "-m", "uv", "pip", "install", "--quiet")
    indexes = [name for name in ("FIND_LINKS", "INDEX_URL", "EXTRA_INDEX_URL") if os.environ.get(f"PIP_{name}")]
    settings = {f"UV_{name}": os.environ[f"PIP_{name}"] for name in indexes}
    settings |= {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NO_CONFIG": "1"}
    constraint = ("--constraint", str(pins)) if pins else ()
    session.run_install(*uv, "--python", python, *constraint, *words, env=settings, external=True)


def find_site_packages(session: nox.Session, python: str) -> str:
    """Where an interpreter's environment has its packages."""
    script = "import sysconfig; print(sysconfig.get_path('purelib'), end='')"
    return str(session.run(python, "-c", script, silent=True, external=True))


def make_environment(
    session: nox.Session,
    name: str,
    packages: Sequence[Package],
    *requirements: str,
    pins: Path = PINS,
    interpreter: str = sys.executable,
) -> str:
    """An environment of its own, with some of our packages, editable."""
    words = (*requirements, *(package.editable for package in packages))

    def fill(python: str) -> None:
        install_with_uv(session, python, *words, pins=pins)

    made_of: list[str | Path] = [pins, *(package.pyproject for package in packages), *words]
    return keep_environment(session, name, made_of, fill, interpreter)


def make_third_party(session: nox.Session) -> str:
    """The environment with what all packages need that share the pins, and with none of them. Layers see it."""
    return make_environment(session, "third-party", [], *TESTS_NEED, *BUILDS_NEED, *REQUIREMENTS)


def make_layer(session: nox.Session, name: str, packages: Sequence[Package], *requirements: str) -> str:
    """An environment over that one, with some of our packages: their tests run without what they don't depend on."""
    third_party = make_third_party(session)
    editable = [package.editable for package in packages]

    def fill(python: str) -> None:
        below = find_site_packages(session, third_party)
        (Path(find_site_packages(session, python)) / "below.pth").write_text(f"{below}\n")
        # uv does not see what is installed below, and would install it again.
        excluded = Path(python).parents[1] / "below.txt"
        names = {str(each.name) for each in distributions(path=[below])}
        excluded.write_text("".join(f"{name}\n" for name in sorted(names)))
        if requirements:
            install_with_uv(session, python, f"--excludes={excluded}", *requirements)
        if editable:
            install_with_uv(session, python, "--no-deps", "--no-build-isolation", *editable)

    made_of = [Path(third_party).parents[1] / STAMP, *(package.pyproject for package in packages)]
    return keep_environment(session, name, [*made_of, *editable, *requirements], fill)


def make_folder_apart(session: nox.Session, name: str, *requirements: str) -> str:
    """A folder with what some tests import, and no other process is to find.

    Lightning imports transformers where it is, which takes most of a second of every process that the tests start.
    """
    return find_site_packages(session, make_layer(session, name, [], *requirements))


def make_tests_environment(session: nox.Session, package: Package, *more: str, name: str | None = None) -> str:
    """The environment of a package's tests: a layer, or apart from all others if it has pins of its own."""
    packages = order_dependencies(package, PACKAGES)
    if package in SHARING:
        return make_layer(session, name or f"tests-{package.name}", packages, *package.requires, *more)
    requirements = (*TESTS_NEED, *package.requires, *more)
    return make_environment(session, name or package.name, packages, *requirements, pins=package.pins)


def make_oldest(session: nox.Session) -> str:
    """The environment with the oldest releases that the packages allow that share the pins. Tests' tools are pinned."""
    pins = read_pins(PINS)
    tools = {tool: Requirement(tool).name for tool in (*TESTS_NEED, *SUITES_NEED)}
    required = {Requirement(line).name for line in REQUIREMENTS}
    pinned = [f"{tool}=={pins[name]}" for tool, name in tools.items() if name not in required]

    def fill(python: str) -> None:
        torch = f"torch=={choose_torch(session, min)}"
        install_with_uv(session, python, "--resolution", "lowest-direct", *REQUIREMENTS, *pinned, torch, pins=None)
        install_with_uv(session, python, "--no-deps", *(package.editable for package in SHARING), pins=None)

    return keep_environment(session, "minimums", [*pinned, *(package.pyproject for package in SHARING)], fill)


def make_newest(session: nox.Session) -> str:
    """The environment with the newest releases of everything, which are looked for each time; `--pre`: not released."""
    name = "newest-pre" if PRE_RELEASES in session.posargs else "newest"
    python = keep_environment(session, name, [package.pyproject for package in SHARING], lambda python: None)
    torch = [word for word in session.posargs if word.startswith("torch==")] or [f"torch=={choose_torch(session, max)}"]
    allowed = ("--prerelease", "allow") if PRE_RELEASES in session.posargs else ()
    words = ("--upgrade", *allowed, *REQUIREMENTS, *TESTS_NEED, *SUITES_NEED, *torch)
    install_with_uv(session, python, *words, pins=None)
    install_with_uv(session, python, "--no-deps", *(package.editable for package in SHARING), pins=None)
    return python


def choose_torch(session: nox.Session, choose: Callable[[list[Version]], Version]) -> Version:
    """The oldest (`min`) or newest (`max`) torch that the packages allow, as a CPU build if pip finds one.

    PyPI's builds for Linux need gigabytes of CUDA to be imported at all. So where there are CPU builds, the newest is
    the newest of these, and a message says what that leaves out.
    """
    allowed = ("--pre",) if PRE_RELEASES in session.posargs else ()
    pip = (make_third_party(session), "-m", "pip", "index", "versions", *allowed, "--json", "torch")
    report = json.loads(str(session.run(*pip, silent=True, external=True, stderr=subprocess.DEVNULL)))
    specifiers = [Requirement(line).specifier for line in REQUIREMENTS if Requirement(line).name == "torch"]
    releases = [
        release
        for release in map(Version, report["versions"])
        if all(spec.contains(release, prereleases=bool(allowed)) for spec in specifiers)
    ]
    release = choose(releases)
    cpu_builds = [build for build in releases if build.local == "cpu"]
    if choose is not max:
        cpu_builds = [build for build in cpu_builds if build.public == release.public]
    build = choose(cpu_builds or releases)
    if build.public != release.public:
        session.warn(f"torch {release} is out, and the newest CPU build here is {build}. Type: -- torch=={release}")
    return build


def find_python(session: nox.Session, version: str) -> str:
    """An interpreter of another release of Python: the one on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = (shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python"))))
    for python in filter(None, candidates):  # pyenv's own commands, on the path, fail for a release that is not chosen
        if subprocess.run([python, "-c", "import ssl, venv"], capture_output=True, check=False).returncode == 0:
            return python
    session.error(f"Python {version} is not here. Install it, and put python{version} on the path")


def build_wheels(session: nox.Session) -> list[str]:
    """Build every package into ``dist/``, once in a run; the paths of wheels that can be installed beside each other.

    Wheels are built from the source distributions that are made before, as those of a release are.
    """
    if not BUILT:
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        build = (make_third_party(session), "-m", "build", "--no-isolation", "--outdir", "dist")
        for package in PACKAGES.values():
            session.run(*build, package.path, silent=True, external=True)
        BUILT.extend(PACKAGES)
    names = {package.name.replace("-", "_") for package in SHARING}
    return [str(path) for path in sorted(ROOT.glob("dist/*.whl")) if path.name.split("-")[0] in names]


def make_clean(session: nox.Session, name: str) -> str:
    """An environment with nothing in it, made again each time."""
    folder = ROOT / ".nox" / name
    session.run_install(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder), external=True)
    return str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def make_layer_of_wheels(session: nox.Session, name: str, *requirements: str) -> str:
    """A layer with our packages as users get them, built and installed each time."""
    python = make_layer(session, name, [], *requirements)
    install_with_uv(session, python, "--no-deps", "--reinstall", *build_wheels(session))
    return python


def name_new_folder(name: str) -> str:
    """A folder in ``build/`` that is not there yet."""
    shutil.rmtree(ROOT / "build" / name, ignore_errors=True)
    return str(ROOT / "build" / name)


def check_tpus(session: nox.Session) -> None:
    """End the session where no PCI device is Google's, by which torch_xla finds its chips."""
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    if not any(vendor.read_text().strip() == "0x1ae0" for vendor in vendors):
        session.error(
            "no TPU is attached to this machine (no PCI device of Google's). On a TPU VM, type\n"
            "    python -m nox -s hardware -- xla\n"
            "and here, where XLA's CPU devices stand in for chips,\n    python -m nox -s tests -- fsdp-xla"
        )


def count_gpus(session: nox.Session) -> int:
    """How many CUDA devices the driver lists. The session ends where there are none."""
    gpus = 0
    if shutil.which("nvidia-smi"):
        listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False).stdout
        gpus = sum(line.startswith("GPU ") for line in listing.splitlines())
    if not gpus:
        session.error(
            "no CUDA device here (by nvidia-smi). On a machine with a GPU or more, type\n"
            "    python -m nox -s hardware -- cuda\n"
            "and here, where ranks are processes on the CPU,\n"
            "    python -m nox -s tests -- fsdp-fsdp2 fsdp-cuda-native\n"
            "    python -m nox -s card    # a rehearsal of that run"
        )
    return gpus
