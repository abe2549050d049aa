"""What core promises to plugins, read from the sources; ``python contract_record.py`` records it anew."""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fsdp_core import CONTRACT_VERSION

PACKAGE = Path(__file__).parent.parent
SOURCES = PACKAGE / "src/fsdp_core"
FILE = Path(__file__).with_name("contract.json")
COMMAND = "python packages/fsdp-core/tests/contract_record.py"

# Of these modules, all that __all__ names.
WHOLE = (
    *("errors", "hookspecs", "strategy_info", "contract"),
    *("backend", "runtime", "precision", "wrapping", "marking", "parts", "gradients", "clipping", "fqn"),
    *("accumulated_gradients", "backward", "materialize", "random_state", "replicated"),
    "testing",
)
# Of these, what a backend or a strategy class needs.
CHOSEN = {
    "checkpoint.chunks": ("Chunk", "ChunkedTensor", "chunked"),
    "checkpoint.loading": ("SavedTensor",),
    "checkpoint.filling": ("fill",),
    "step_gradients": ("StepGradients",),
    "built_in_parts": ("kept_as_built",),
    "registry": ("describe", "resolve", "strategies"),
    "lightning.options": ("refuse_unknown_options",),
    "testing.ranks": ("RankError", "RankPool", "Ranks"),
    "testing.one_process": ("OneProcessRanks", "answered"),
    "testing.here": ("Here", "stand_on"),
    "testing.suite.clauses": ("Clauses",),
}
# Of these, only the constructors: the rest is Lightning's, or core's own.
CONSTRUCTORS = {"lightning.trainer": "ShardedTrainerStrategy", "lightning.fabric": "ShardedFabricStrategy"}
SUITE = ("testing/suite/whole.py", ("StrategySuite", "PresetSuite"))
# What plugins write themselves: core calls it, so that an argument more is one that theirs don't take.
WRITTEN_BY_PLUGINS = ("fsdp_core.backend.Backend.", "fsdp_core.runtime.Runtime.", "fsdp_core.hookspecs.fsdp_strategies")

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
    """What is promised, by dotted name: a signature, the bases of a class, or where a name comes from."""
    found: dict[str, str] = {}
    for name in _all_of(_parsed("__init__.py")):
        found[f"fsdp_core.{name}"] = "public"
    for module in WHOLE:
        names = _all_of(_parsed(_file(module)))
        found.update(_of_module(module, names))
    for module, chosen in CHOSEN.items():
        found.update(_of_module(module, chosen))
    for module, name in CONSTRUCTORS.items():
        found.update(_only_constructor(module, name))
    found.update(_of_suite())
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
            f"That is {kind}: set CONTRACT_VERSION to {wanted} in fsdp_core/contract.py, or undo it.",
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
    return f"{path}/__init__.py" if (SOURCES / path).is_dir() else f"{path}.py"


@cache
def _parsed(file: str) -> ast.Module:
    return ast.parse((SOURCES / file).read_text(encoding="utf-8"))


def _all_of(tree: ast.Module) -> list[str]:
    (value,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return list(ast.literal_eval(value))


def _of_module(module: str, names: Any) -> Iterator[tuple[str, str]]:
    defined = dict(_definitions(_parsed(_file(module)).body))
    for name in names:
        if name in defined:  # and not imported from another module of these
            yield from _of(f"fsdp_core.{module}.{name}", defined[name])


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


def _only_constructor(module: str, name: str) -> Iterator[tuple[str, str]]:
    node = dict(_definitions(_parsed(_file(module)).body))[name]
    found = dict(_of(f"fsdp_core.{module}.{name}", node))
    for member in (f"fsdp_core.{module}.{name}", f"fsdp_core.{module}.{name}.__init__"):
        yield member, found[member]


def _of_suite() -> Iterator[tuple[str, str]]:
    """The clauses that a class inherits: expected_failures goes by their names."""
    file, names = SUITE
    classes = {
        name: node
        for path in sorted((SOURCES / "testing/suite").glob("*.py"))
        for name, node in _definitions(_parsed(f"testing/suite/{path.name}").body)
        if isinstance(node, ast.ClassDef)
    }

    def clauses(name: str) -> set[str]:
        node = classes[name]
        own = {member for member, _ in _definitions(node.body) if member.startswith("test_")}
        bases = [ast.unparse(base) for base in node.bases]
        return own.union(*(clauses(base) for base in bases if base in classes))

    defined = dict(_definitions(_parsed(file).body))
    for name in names:
        owner = f"fsdp_core.testing.suite.whole.{name}"
        yield owner, "class of clauses" if name in defined else "missing"
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
