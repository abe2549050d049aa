"""The laws of the design (docs/architecture.md) that can be read off the sources."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {path.parent.name: path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
PLUGINS = {name: path for name, path in PACKAGES.items() if name != "fsdp-core"}
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))

CORE = ROOT / "packages/fsdp-core/src/fsdp_core"
LIGHT = [
    *(CORE / f"{name}.py" for name in ("__init__", "hookspecs", "registry", "strategy_info", "errors", "autoload")),
    *(CORE / f"{name}.py" for name in ("availability", "contract", "discovery", "side_effects")),
    *sorted(CORE.glob("cli/**/*.py")),
    *sorted(CORE.glob("doctor/*.py")),
    *sorted(ROOT.glob("packages/*/src/*/plugin.py")),
]
HEAVY = ("torch", "torch_xla", "lightning", "lightning_fabric", "pytorch_lightning", "numpy")
LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning", "lightning_utilities")


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_for_types_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def statements(path: Path, *, types: bool, nested: bool) -> Iterator[ast.AST]:
    """The nodes of a file, with or without what only type checkers read and what runs only in a function."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        yield node
        if not nested and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt) and is_for_types_only(child) and not types:
                assert isinstance(child, ast.If)
                waiting.extend(child.orelse)
            else:
                waiting.append(child)


def imported(path: Path, *, types: bool = True, nested: bool = True) -> set[str]:
    """Full dotted names that a file imports: ``from a.b import c`` gives ``a.b.c``."""
    names: set[str] = set()
    for node in statements(path, types=types, nested=nested):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(names: set[str], *roots: str) -> set[str]:
    return {name for name in names if any(name == root or name.startswith(f"{root}.") for root in roots)}


def import_name(package: str) -> str:
    return package.replace("-", "_")


def private_names(path: Path) -> set[str]:
    """Names with a leading underscore that a file takes from torch, Lightning or torch_xla."""
    taken = within(imported(path), "torch", "torch_xla", *LIGHTNING)
    for node in statements(path, types=True, nested=True):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if re.fullmatch(r"(torch|dist|torch_xla|lightning|pl)(\.\w+)+", dotted):
                taken.add(dotted)
    return {name for name in taken if any(re.match(r"_(?!_)", part) for part in name.split(".")[1:])}


def test_the_sources_are_found() -> None:
    assert {"fsdp-core", "fsdp-fsdp2"} <= PACKAGES.keys()
    assert len(SOURCES) > 15
    assert all(path.is_file() for path in LIGHT), [shown(path) for path in LIGHT if not path.is_file()]


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=shown)
def test_core_imports_no_plugin(path: Path) -> None:
    assert not within(imported(path), *map(import_name, PLUGINS))


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_import_core_and_not_each_other(name: str) -> None:
    others = [import_name(other) for other in PLUGINS if other != name]
    files = sorted((PLUGINS[name] / "src").rglob("*.py"))
    assert any(within(imported(path), "fsdp_core") for path in files)
    assert {shown(path): found for path in files if (found := within(imported(path), *others))} == {}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name in ("backend.py", "spmd.py")], ids=shown)
def test_backends_import_no_lightning(path: Path) -> None:
    assert not within(imported(path), *LIGHTNING, "fsdp_core.lightning")


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name in ("fabric.py", "trainer.py")], ids=shown)
def test_adapters_and_strategies_import_no_fsdp_class(path: Path) -> None:
    sharding = ("torch.distributed.fsdp", "torch.distributed._composable", "torch_xla")
    assert not within(imported(path, types=False), *sharding)


@pytest.mark.parametrize("path", [p for p in SOURCES if "fsdp-xla" not in p.parts], ids=shown)
def test_only_fsdp_xla_imports_torch_xla(path: Path) -> None:
    assert not within(imported(path), "torch_xla")


@pytest.mark.parametrize("path", LIGHT, ids=shown)
def test_listing_names_imports_nothing_heavy(path: Path) -> None:
    assert not within(imported(path, types=False, nested=False), *HEAVY)


@pytest.mark.parametrize("name", PACKAGES)
def test_private_names_of_a_library_are_taken_in_one_file(name: str) -> None:
    files: dict[str, set[str]] = defaultdict(set)
    for path in sorted((PACKAGES[name] / "src").rglob("*.py")):
        for private in private_names(path):
            library = private.split(".")[0]
            library = "lightning" if library in (*LIGHTNING, "pl") else "torch" if library == "dist" else library
            files[library].add(shown(path))
    assert {library: found for library, found in files.items() if len(found) > 1} == {}


@pytest.mark.parametrize("path", SOURCES, ids=shown)
def test_files_are_named_for_what_they_hold(path: Path) -> None:
    assert path.stem not in {"utils", "util", "common", "helpers", "base", "misc"}


#: Messages between the ranks of one run, as in torch.distributed; no checkpoint goes through it.
UNPICKLES_MESSAGES = "packages/fsdp-xla/src/fsdp_xla/messages.py"


@pytest.mark.parametrize("path", [p for p in SOURCES if shown(p) != UNPICKLES_MESSAGES], ids=shown)
def test_nothing_is_unpickled(path: Path) -> None:
    writing = {"pickle.Pickler"}  # a pickle may be written, for those who read one
    assert not within(imported(path) - writing, "pickle", "dill", "cloudpickle", "marshal", "shelve")
    for node in statements(path, types=False, nested=True):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("torch.load"):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert given.get("weights_only") not in (None, "None", "False"), f"line {node.lineno}"


@pytest.mark.parametrize("name", PACKAGES)
def test_each_package_stands_alone(name: str) -> None:
    folder = PACKAGES[name]
    pyproject = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    assert project["name"] == name
    assert (folder / "src" / import_name(name) / "py.typed").is_file()
    assert list((folder / "tests").glob("test_*.py"))
    assert len((folder / "README.md").read_text(encoding="utf-8")) > 500
    assert f"## [{project['version']}]" in (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_register_through_the_public_entry_point(name: str) -> None:
    project = tomllib.loads((PLUGINS[name] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert list(project["entry-points"]["fsdp.strategies"].values()) == [f"{import_name(name)}.plugin"]
    assert [word for word in project["dependencies"] if word.startswith("fsdp-")] != []
