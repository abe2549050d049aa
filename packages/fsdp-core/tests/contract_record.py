"""What core promises to plugins, read from the sources; ``python contract_record.py`` records it anew."""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fsdp_core import CONTRACT_VERSION

PACKAGE = Path(__file__).parent.parent
SOURCES = PACKAGE / "src/fsdp_core"
FILE = Path(__file__).with_name("contract.json")
COMMAND = "python packages/fsdp-core/tests/contract_record.py"

# What plugins import, and nothing below: all that __all__ names, each recorded where it stands first.
PUBLIC = ("plugins", "state", "sharding", "checkpoint", "lightning", "testing", "testing.suite", "")
# Of these, only the constructors: the rest is Lightning's, or core's own.
CONSTRUCTORS = ("fsdp_core.lightning.ShardedTrainerStrategy", "fsdp_core.lightning.ShardedFabricStrategy")
# Of this, what a package's class sets or overrides: the rest is core's own.
SET_BY_PACKAGES = {
    "fsdp_core.lightning.ShardedStrategy": (
        *("strategy_name", "options_class", "backend_class", "positional", "left_out", "migration_hints"),
        *("accepted_noops", "options", "backend", "runtime", "new_backend", "new_runtime", "new_cluster_environment"),
    ),
}
# Of these, the names of their clauses, by which expected_failures goes.
SUITE = ("PresetSuite", "StrategySuite")
# What plugins write themselves: core calls it, so that an argument more is one that theirs don't take.
WRITTEN_BY_PLUGINS = (
    "fsdp_core.sharding.Backend.",
    "fsdp_core.sharding.Sharded.",
    "fsdp_core.Runtime.",
    "fsdp_core.plugins.fsdp_strategies",
)

_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference between the record and the sources."""

    kind: Literal["addition", "break"]
    member: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.member} {self.what}"


def members() -> dict[str, str]:
    """What is promised, by dotted name: a signature, the bases of a class, or where a name is recorded."""
    found: dict[str, str] = {}
    first: dict[tuple[str, str], str] = {}
    for package in PUBLIC:
        for name, home in _homes(package).items():
            public = ".".join(filter(None, ("fsdp_core", package, name)))
            if (known := first.setdefault((home, name), public)) != public:
                found[public] = f"is {known}"
            elif package == "testing.suite" and name in SUITE:
                found.update(_of_suite(name))
            else:
                of_it = dict(_of(public, _definition(home, name)))
                kept: Iterable[str] = (public, f"{public}.__init__") if public in CONSTRUCTORS else of_it
                if public in SET_BY_PACKAGES:
                    for base, its_home in _bases(home, name):
                        of_it = {**dict(_of(public, _definition(its_home, base))), **of_it}
                    of_it[public] = "class ()"  # what it inherits from is core's own too
                    kept = (public, *(f"{public}.{member}" for member in SET_BY_PACKAGES[public]))
                found.update((member, of_it[member]) for member in kept)
    return dict(sorted(found.items()))


def compare(recorded: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """What has changed, what breaks plugins first."""
    changes = [
        Change(kind="break", member=name, what=f"is gone; it was: {was}")
        for name, was in recorded.items()
        if name not in now
    ]
    for name, text in now.items():
        if name not in recorded:
            owner = name.rpartition(".")[0]
            needed = owner in recorded and (
                text.startswith("@abstractmethod") or _is_needed_field(recorded[owner], text)
            )
            why = ", and plugins that were written before lack it" if needed else ""
            changes.append(Change(kind="break" if needed else "addition", member=name, what=f"is new{why}: {text}"))
        elif recorded[name] != text:
            harmless = not name.startswith(WRITTEN_BY_PLUGINS) and takes_as_before(recorded[name], text)
            what = f"was: {recorded[name]}\n{' ' * 8}and is: {text}"
            changes.append(Change(kind="addition" if harmless else "break", member=name, what=what))
    return sorted(changes, key=lambda change: (change.kind != "break", change.member))


def takes_as_before(was: str, now: str) -> bool:
    """Whether the new signature takes and gives all that the recorded one does: it only has more optional arguments."""
    try:
        (before,), (after,) = (ast.parse(f"def f{text}: ...").body for text in (was, now))
    except SyntaxError:  # no signatures
        return False
    assert isinstance(before, ast.FunctionDef)
    assert isinstance(after, ast.FunctionDef)
    if ast.dump(before.returns or ast.Pass()) != ast.dump(after.returns or ast.Pass()):
        return False
    old, new = _arguments(before.args), _arguments(after.args)
    positional = [(name, text) for name, (kind, text) in old.items() if kind == "positional"]
    positional_now = [(name, text) for name, (kind, text) in new.items() if kind == "positional"]
    kept = all(new.get(name) == argument for name, argument in old.items())
    added = [text for name, (_, text) in new.items() if name not in old]
    return kept and positional_now[: len(positional)] == positional and all("=" in text for text in added)


def record(path: Path = FILE, *, unreleased: bool = False) -> str:
    """Write the record, and say what has changed.

    Args:
        path: The file.
        unreleased: Whether no release has the recorded contract yet, so that its version may stay.
    """
    now, series = members(), _series()
    old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"members": {}}
    changes = compare(old["members"], now)
    if path.exists() and not unreleased:
        refusal = _refusal(changes, tuple(map(int, old["contract"].split("."))), old["fsdp-core"], series)
        if refusal:
            raise SystemExit(refusal)
    version = ".".join(map(str, CONTRACT_VERSION))
    path.write_text(json.dumps({"contract": version, "fsdp-core": series, "members": now}, indent=1) + "\n", "utf-8")
    return "\n".join([*map(str, changes), f"{len(now)} members recorded, {len(changes)} changes."])


def _refusal(changes: list[Change], was: tuple[int, ...], series_was: str, series: str) -> str | None:
    breaks = any(change.kind == "break" for change in changes)
    wanted = (was[0] + 1, 0) if breaks else (was[0], was[1] + 1)
    if not changes or wanted <= CONTRACT_VERSION:
        if CONTRACT_VERSION[0] == was[0] or series != series_was:
            return None
        return f"A new contract needs a new series of fsdp-core: raise {series} in packages/fsdp-core/pyproject.toml."
    kind = "a break" if breaks else "an addition"
    return "\n".join(
        [
            *map(str, changes),
            f"That is {kind}: set CONTRACT_VERSION to {wanted} in fsdp_core/plugins/contract.py, or undo it.",
            f"If no release has contract {was[0]}.{was[1]} yet, type: {COMMAND} --unreleased",
        ]
    )


def _series() -> str:
    """The part of fsdp-core's version that a new contract raises: 0.1 of 0.1.2, 1 of 1.2.3."""
    pyproject = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))
    major, minor, *_ = pyproject["project"]["version"].split(".")
    return f"0.{minor}" if major == "0" else str(major)


def _file(module: str) -> str:
    path = module.replace(".", "/")
    return (Path(path) / "__init__.py").as_posix() if (SOURCES / path).is_dir() else f"{path}.py"


@cache
def _parsed(file: str) -> ast.Module:
    return ast.parse((SOURCES / file).read_text(encoding="utf-8"))


def _all_of(tree: ast.Module) -> list[str]:
    (value,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return list(ast.literal_eval(value))


def _homes(package: str) -> dict[str, str]:
    """The public names of a package, and the module of core's that each is defined in."""
    tree = _parsed(_file(package))
    imported = {
        alias.asname or alias.name: node.module.removeprefix("fsdp_core.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fsdp_core.")
        for alias in node.names
    }
    return {name: imported.get(name, package) for name in _all_of(tree)}


def _definition(module: str, name: str) -> ast.stmt:
    if name == "__version__":
        return ast.parse("__version__: str").body[0]
    tree = _parsed(_file(module))
    defined = dict(_definitions(tree.body))
    return defined[name] if name in defined else _definition(_homes(module)[name], name)


def _bases(module: str, name: str) -> Iterator[tuple[str, str]]:
    """The classes of core that a class inherits from, the nearest first, and their modules."""
    node = _definition(module, name)
    imported = {
        alias.name: statement.module
        for statement in _parsed(_file(module)).body
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for alias in statement.names
    }
    for base in map(ast.unparse, node.bases if isinstance(node, ast.ClassDef) else ()):
        if imported.get(base, "").startswith("fsdp_core."):
            yield base, imported[base].removeprefix("fsdp_core.")
            yield from _bases(imported[base].removeprefix("fsdp_core."), base)


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, _FUNCTION | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target), node
        elif isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0]), node


def _of(name: str, node: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, _FUNCTION):
        yield name, _decorated(node, _signature(node))
    elif isinstance(node, ast.AnnAssign):
        value = "" if node.value is None or name.isupper() else f" = {ast.unparse(node.value)}"
        yield name, f": {ast.unparse(node.annotation)}{value}"
    elif isinstance(node, ast.Assign):
        yield name, f"= {ast.unparse(node.value)}"
    elif isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, [*node.bases, *[keyword.value for keyword in node.keywords]]))
        yield name, _decorated(node, f"class ({bases})")
        for member, inner in _definitions(node.body):
            if not member.startswith("_") or member in ("__init__", "__init_subclass__"):
                yield from _of(f"{name}.{member}", inner)


def _of_suite(name: str) -> Iterator[tuple[str, str]]:
    """The clauses that a class inherits: expected_failures goes by their names."""
    classes = {
        name: node
        for path in sorted((SOURCES / "testing/suite").rglob("*.py"))
        for name, node in _definitions(_parsed(path.relative_to(SOURCES).as_posix()).body)
        if isinstance(node, ast.ClassDef)
    }

    def clauses(name: str) -> set[str]:
        node = classes[name]
        own = {member for member, _ in _definitions(node.body) if member.startswith("test_")}
        bases = [ast.unparse(base) for base in node.bases]
        return own.union(*(clauses(base) for base in bases if base in classes))

    owner = f"fsdp_core.testing.suite.{name}"
    yield owner, "class of clauses"
    yield from ((f"{owner}.{clause}", "clause") for clause in clauses(name))


def _signature(node: Any) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


def _decorated(node: Any, text: str) -> str:
    return " ".join([*(f"@{ast.unparse(one)}" for one in node.decorator_list), text])


def _arguments(args: ast.arguments) -> dict[str, tuple[str, str]]:
    """The arguments by name: how they are given, and as text."""
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(args.defaults)), *args.defaults]
    found = {}
    pairs = [("positional", *pair) for pair in zip(positional, defaults, strict=True)]
    pairs += [("keyword", *pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    for kind, argument, default in pairs:
        text = ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")
        found[argument.arg] = (kind, text)
    for star, rest in (("*", args.vararg), ("**", args.kwarg)):
        if rest is not None:
            found[f"{star}{rest.arg}"] = ("rest", f"{ast.unparse(rest)}=")
    return found


def _is_needed_field(owner: str, text: str) -> bool:
    """Whether plugins that build the dataclass must give the new field."""
    return "@dataclass" in owner and text.startswith(": ") and " = " not in text


if __name__ == "__main__":
    print(record(unreleased="--unreleased" in sys.argv[1:]))
