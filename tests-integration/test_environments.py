"""``tools/environments.py``: packages, environments that are kept, releases of torch and of Python."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nox
import nox._options
import pytest
from filelock import FileLock
from nox.command import CommandFailed
from nox.sessions import SessionRunner, _SessionQuit
from nox.virtualenv import PassthroughEnv

from tools import environments as envs

ROOT = Path(__file__).parent.parent


def make_session(*posargs: str) -> nox.Session:
    """A real session, which runs commands where it is."""
    config = nox._options.options.namespace(posargs=list(posargs))
    unused: Any = None
    runner = SessionRunner("test", ["test"], unused, config, manifest=unused)
    runner.venv = PassthroughEnv()
    return nox.Session(runner)


def write_script(path: Path, body: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose ``.nox/`` is empty."""
    monkeypatch.setattr(envs, "ROOT", tmp_path)
    return tmp_path


# Packages


def write_package(root: Path, name: str, dependencies: Sequence[str] = (), more: str = "") -> None:
    folder = root / "packages" / name
    folder.mkdir(parents=True)
    text = f'[project]\nname = "{name}"\ndependencies = {list(dependencies)!r}\n{more}'
    (folder / "pyproject.toml").write_text(text)


def test_a_package_says_what_its_tests_need_or_has_what_all_share(tmp_path: Path) -> None:
    tables = """
    [project.entry-points."fsdp.strategies"]
    xla_fsdp = "fsdp_xla.plugin"
    [tool.fsdp.tests]
    requires = ["moto[server]"]
    requires-apart = ["transformers"]
    constraints = "own.txt"
    of-meshes = ["tests/test_z.py"]
    pairs = 20
    """
    write_package(tmp_path, "fsdp-xla", more=tables)
    write_package(tmp_path, "fsdp-core", ["torch>=2.9"])
    silent, package = (envs.find_packages(tmp_path)[name] for name in ("fsdp-core", "fsdp-xla"))
    assert package.strategies == ["xla_fsdp"]
    assert package.python_variable == "FSDP_XLA_PYTHON"
    assert package.pins == tmp_path / "packages/fsdp-xla/own.txt"
    assert (package.requires, package.requires_apart, package.pairs) == (["moto[server]"], ["transformers"], 20)
    assert (silent.path, silent.editable) == ("packages/fsdp-core", "--editable=./packages/fsdp-core")
    assert silent.pyproject == tmp_path / "packages/fsdp-core/pyproject.toml"
    assert (silent.pins, silent.dependencies) == (tmp_path / "constraints.txt", ["torch>=2.9"])
    assert (silent.strategies, silent.requires, silent.requires_apart, silent.pairs) == ([], [], [], 12)


def test_packages_of_this_repository_are_there() -> None:
    assert set(envs.PACKAGES) == {path.name for path in (ROOT / "packages").iterdir()}
    assert [package.name for package in envs.PINNED_APART] == ["fsdp-xla"]
    assert not set(envs.REQUIREMENTS) & set(envs.PACKAGES)


GRAPHS: dict[str, tuple[dict[str, list[str]], list[str]]] = {
    "alone": ({"a": []}, ["a"]),
    "third party": ({"a": ["torch"]}, ["a"]),
    "one": ({"a": ["z"], "z": []}, ["z", "a"]),
    "chain": ({"a": ["b[extra]>=1,<2; python_version > '3'"], "b": ["c~=1.0"], "c": []}, ["c", "b", "a"]),
    "diamond": ({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}, ["d", "b", "c", "a"]),
    "named twice": ({"a": ["d", "b"], "b": ["d"], "d": [], "other": ["a"]}, ["d", "b", "a"]),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_dependencies_come_before_what_needs_them(tmp_path: Path, graph: str) -> None:
    dependencies, ordered = GRAPHS[graph]
    for name, lines in dependencies.items():
        write_package(tmp_path, name, lines)
    packages = envs.find_packages(tmp_path)
    assert [package.name for package in envs.order_dependencies(packages["a"], packages)] == ordered


def test_pins_are_read(tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text("# torch==1.0\n\ntorch==2.13.0+cpu  # the CPU's\nnumpy==2.4.6; python_version > '3'\nclick>=8\n")
    assert envs.read_pins(file) == {"torch": "2.13.0+cpu", "numpy": "2.4.6"}
    file.write_text("")
    assert envs.read_pins(file) == {}


# Environments that are kept


class Maker:
    """Makes one environment again and again, with a stand-in for ``python -m venv``."""

    def __init__(self, root: Path) -> None:
        self.folder = root / ".nox/env"
        self.source = root / "constraints.txt"
        self.source.write_text("torch==1")
        self.words = ["torch"]
        self.fills = 0
        script = '[ "$3" = --clear ] && rm -rf "$5"; mkdir -p "$5/bin"; : > "$5/bin/python"'
        self.interpreter = write_script(root / "venv", script)  # -m venv --clear --without-pip FOLDER

    def make(self, fill: Callable[[str], None] = lambda python: None) -> str:
        def count_and_fill(python: str) -> None:
            self.fills += 1
            fill(python)

        made_of: list[str | Path] = [self.source, *self.words]
        return envs.keep_environment(make_session(), "env", made_of, count_and_fill, self.interpreter)


@pytest.fixture
def maker(root: Path) -> Maker:
    return Maker(root)


def fail(python: str) -> None:
    raise RuntimeError(python)


def test_a_kept_environment_is_not_made_again(maker: Maker) -> None:
    pythons = {maker.make(), maker.make()}
    maker.source.touch()
    assert pythons == {maker.make()} == {str(maker.folder / "bin/python")}
    assert maker.fills == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda maker: maker.source.write_text("torch==2"),
        lambda maker: maker.words.append("numpy"),
        lambda maker: maker.words.clear(),
        lambda maker: maker.words.__setitem__(slice(None), ["to", "rch"]),
        lambda maker: (maker.folder / "installed").unlink(),
        lambda maker: (maker.folder / "installed").write_text(""),
        lambda maker: (maker.folder / "bin/python").unlink(),
    ],
    ids=[
        "a file",
        "a word more",
        "a word less",
        "words cut elsewhere",
        "half made",
        "half stamped",
        "its Python is gone",
    ],
)
def test_it_is_made_again_and_emptied(maker: Maker, change: Callable[[Maker], object]) -> None:
    maker.make()
    (maker.folder / "left.over").touch()
    change(maker)
    maker.make()
    assert maker.fills == 2
    assert not (maker.folder / "left.over").exists()
    maker.make()
    assert maker.fills == 2


@pytest.mark.parametrize("failure", ["installing", "emptying"])
def test_it_is_made_again_when_making_it_has_failed(maker: Maker, failure: str) -> None:
    """Also if what it is made of is again what it was before."""
    maker.make()
    maker.source.write_text("torch==2")
    interpreter = maker.interpreter
    if failure == "emptying":
        maker.interpreter = write_script(maker.folder.parent / "killed", "exit 1")
    with pytest.raises(RuntimeError if failure == "installing" else CommandFailed):
        maker.make(fail)
    maker.source.write_text("torch==1")
    maker.interpreter = interpreter
    fills = maker.fills
    maker.make()
    assert maker.fills == fills + 1


def test_processes_wait_for_the_one_that_makes_it(maker: Maker) -> None:
    log = maker.source.with_name("log")
    log.touch()

    def write_to_log(python: str) -> None:
        with log.open("a") as file:
            print("filled", file=file)

    maker.folder.parent.mkdir()
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=maker.make, args=(write_to_log,)) for _ in range(2)]
    with FileLock(f"{maker.folder}.lock"):
        for process in processes:
            process.start()
        time.sleep(0.1)
        assert log.read_text() == ""
        assert all(process.is_alive() for process in processes)
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert log.read_text() == "filled\n"


def test_it_is_a_virtual_environment_without_pip(root: Path) -> None:
    python = envs.keep_environment(make_session(), "env", [], lambda python: None)
    assert envs.find_site_packages(make_session(), python).startswith(str(root / ".nox/env"))
    assert not list((root / ".nox/env").glob("**/pip"))


def test_a_layer_imports_what_is_below_and_is_made_again_when_that_was(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, requirements, installs = make_session(), ["torch"], []

    def make_below(session: nox.Session) -> str:
        return envs.keep_environment(session, "below", requirements, lambda python: None)

    monkeypatch.setattr(envs, "make_third_party", make_below)
    monkeypatch.setattr(envs, "install_with_uv", lambda session, python, *words: installs.append(words))
    package, below = envs.PACKAGES["fsdp-core"], Path(envs.find_site_packages(session, make_below(session)))
    (below / "torch_of_ours-2.13.0+cpu.dist-info").mkdir()
    (below / "torch_of_ours-2.13.0+cpu.dist-info/METADATA").write_text("Name: torch-of-ours\nVersion: 2.13.0+cpu\n")
    python = envs.make_layer(session, "layer", [package], "numpy")
    assert envs.make_layer(session, "layer", [package], "numpy") == python
    excludes = root / ".nox/layer/below.txt"
    assert installs == [(f"--excludes={excludes}", "numpy"), ("--no-deps", "--no-build-isolation", package.editable)]
    assert excludes.read_text() == "torch-of-ours\n"

    (below / "torch_stand_in.py").touch()
    assert subprocess.run([python, "-c", "import torch_stand_in"], check=False).returncode == 0

    requirements.append("lightning")
    envs.make_layer(session, "layer", [package], "numpy")
    assert len(installs) == 4


@pytest.mark.parametrize(
    "settings",
    [{}, {"INDEX_URL": ""}, {"INDEX_URL": "https://a", "EXTRA_INDEX_URL": "https://b"}, {"FIND_LINKS": "/wheels"}],
    ids=["none", "empty", "indexes", "a folder"],
)
def test_uv_looks_where_pip_does(root: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]) -> None:
    names = ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS")
    for name in names:
        monkeypatch.delenv(f"PIP_{name}", raising=False)
        monkeypatch.delenv(f"UV_{name}", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    uv = write_script(root / "uv", f'env > {root}/environment; echo "$@" > {root}/words')
    monkeypatch.setattr(envs, "keep_environment", lambda session, *others: uv)
    envs.install_with_uv(make_session(), "/python", "torch", pins=root / "pins.txt")
    environment = dict(line.split("=", 1) for line in (root / "environment").read_text().splitlines() if "=" in line)
    found = {name: environment[f"UV_{name}"] for name in names if f"UV_{name}" in environment}
    assert found == {name: value for name, value in settings.items() if value}
    words = f"-m uv pip install --quiet --python /python --constraint {root}/pins.txt torch\n"
    assert (root / "words").read_text() == words


# Releases


@pytest.fixture
def list_releases(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a stand-in for pip that finds some releases of torch."""

    def write_pip(versions: str) -> None:
        listing = ", ".join(f'"{version}"' for version in versions.split())
        python = write_script(root / "python", f"echo noise >&2; echo '{{\"versions\": [{listing}]}}'")
        monkeypatch.setattr(envs, "make_third_party", lambda session: python)
        monkeypatch.setattr(envs, "REQUIREMENTS", ["click>=8", "torch>=2.9,<3"])

    return write_pip


RELEASES = {
    "no CPU builds": ("2.13.0 2.9.1 2.9.0 2.8.0", "2.9.0", "2.13.0"),
    "CPU builds": ("3.0.0 2.13.0+cpu 2.13.0 2.9.0 2.9.0+cpu 2.8.0+cpu", "2.9.0+cpu", "2.13.0+cpu"),
    "an older CPU build": ("2.13.0 2.12.0+cpu 2.9.0", "2.9.0", "2.12.0+cpu"),
    "CUDA builds": ("2.13.0+cu130 2.13.0+cpu 2.9.0+cu130", "2.9.0+cu130", "2.13.0+cpu"),
    "only one": ("2.10.0+cpu", "2.10.0+cpu", "2.10.0+cpu"),
    "no text order": ("2.9.0 2.10.0", "2.9.0", "2.10.0"),
}


@pytest.mark.parametrize("case", RELEASES)
def test_torch_is_the_oldest_or_newest_that_is_allowed(list_releases: Callable[[str], None], case: str) -> None:
    versions, oldest, newest = RELEASES[case]
    list_releases(versions)
    assert str(envs.choose_torch(make_session(), min)) == oldest
    assert str(envs.choose_torch(make_session(), max)) == newest


def test_a_newer_torch_without_a_cpu_build_is_named(
    list_releases: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    list_releases("2.13.0 2.12.0+cpu 2.9.0")
    with caplog.at_level(logging.WARNING, logger="nox"):
        envs.choose_torch(make_session(), min)
        assert not caplog.messages
        envs.choose_torch(make_session(), max)
    assert caplog.messages == [
        "torch 2.13.0 is out, and the newest CPU build here is 2.12.0+cpu. Type: -- torch==2.13.0"
    ]


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What uv is asked to install into environments that are never kept."""
    recorded: list[tuple[str, ...]] = []

    def fill_always(session: nox.Session, name: str, made_of: object, fill: Callable[[str], None]) -> str:
        fill(name)
        return name

    monkeypatch.setattr(envs, "keep_environment", fill_always)
    monkeypatch.setattr(envs, "install_with_uv", lambda session, python, *words, pins: recorded.append(words))
    monkeypatch.setattr(envs, "choose_torch", lambda session, choose: choose(["2.09", "2.13"]))
    monkeypatch.setattr(envs, "REQUIREMENTS", ["click>=8", "torch>=2.9"])
    monkeypatch.setattr(envs, "TESTS_NEED", ("torch", "jsonargparse[signatures]"))
    monkeypatch.setattr(envs, "SUITES_NEED", ["psutil"])
    return recorded


def test_the_oldest_has_pinned_tools_and_lowest_requirements(installs: list[tuple[str, ...]]) -> None:
    envs.make_oldest(make_session())
    pins = envs.read_pins(ROOT / "constraints.txt")
    tools = (f"jsonargparse[signatures]=={pins['jsonargparse']}", f"psutil=={pins['psutil']}")
    assert installs[0] == ("--resolution", "lowest-direct", "click>=8", "torch>=2.9", *tools, "torch==2.09")
    assert installs[1] == ("--no-deps", *(package.editable for package in envs.SHARING))


@pytest.mark.parametrize(
    ("posargs", "torch"), [([], "torch==2.13"), (["-k", "x"], "torch==2.13"), (["torch==2.14", "-x"], "torch==2.14")]
)
def test_the_newest_is_looked_for_or_typed(installs: list[tuple[str, ...]], posargs: list[str], torch: str) -> None:
    envs.make_newest(make_session(*posargs))
    assert installs[0][0] == "--upgrade"
    assert [word for word in installs[0] if word.startswith("torch==")] == [torch]
    assert "--prerelease" not in installs[0]
    envs.make_newest(make_session("--pre", *posargs))
    assert installs[2][:3] == ("--upgrade", "--prerelease", "allow")


OLDER, NEWER = "pyenv/versions/3.12.1/bin/python", "pyenv/versions/3.12.4/bin/python"

#: Interpreters with their exit statuses, and the one that is chosen.
PYTHONS: dict[str, tuple[dict[str, int], str | None]] = {
    "on the path": ({"bin/python3.12": 0, OLDER: 0}, "bin/python3.12"),
    "pyenv's command fails": ({"bin/python3.12": 1, OLDER: 0}, OLDER),
    "one without ssl": ({OLDER: 1, NEWER: 0}, NEWER),
    "other releases": ({"bin/python3.1": 0, "pyenv/versions/3.13.1/bin/python": 0}, None),
    "none that works": ({"bin/python3.12": 1}, None),
    "none": ({}, None),
}


@pytest.mark.parametrize("case", PYTHONS)
def test_another_python_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    scripts, chosen = PYTHONS[case]
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    for path, status in scripts.items():
        write_script(tmp_path / path, f"exit {status}")
    if chosen:
        assert envs.find_python(make_session(), "3.12") == str(tmp_path / chosen)
    else:
        with pytest.raises(_SessionQuit, match=r"Install it, and put python3\.12 on the path"):
            envs.find_python(make_session(), "3.12")


# Devices, and where nox is typed


@pytest.mark.parametrize(
    ("listing", "gpus"),
    [("GPU 0: H100 (UUID: GPU-1)\nGPU 1: H100 (UUID: GPU-2)", 2), ("No devices were found", 0), (None, 0)],
)
def test_gpus_are_those_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: str | None, gpus: int
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if listing:
        write_script(tmp_path / "nvidia-smi", f"echo '{listing}'")
    if gpus:
        assert envs.count_gpus(make_session()) == gpus
    else:
        with pytest.raises(_SessionQuit, match="no CUDA device here"):
            envs.count_gpus(make_session())


def test_nox_lists_sessions_from_a_folder_with_a_module_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("raise RuntimeError\n")
    command = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-l"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NOX")}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "* tests -> Run all that is fast" in run.stdout
