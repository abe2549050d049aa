"""Looks for the names of torch and Lightning that a folder's sources use, in the versions that this interpreter has.

``python tools/names_of_libraries.py FOLDER...`` prints those that are gone, one per line, as ``file:line: name``, and
exits with 1 if there are any. It reads what is imported, and attributes of imported modules and classes. Attributes of
objects, such as those of a unit's parameter group, are left to the tests.
"""

from __future__ import annotations

import ast
import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

LIBRARIES = ("torch", "lightning")


def find_missing_names(source: Path) -> Iterator[tuple[int, str]]:
    """The names of the libraries that a file uses, and that are gone.

    Args:
        source: The file.

    Yields:
        A line and a name, such as ``"torch.distributed.fsdp.gone"``.
    """
    tree = ast.parse(source.read_text(encoding="utf-8"))
    imported: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_of_library(node.module or ""):
            for alias in node.names:
                value = _find(f"{node.module}.{alias.name}")
                imported[alias.asname or alias.name] = value
                if value is _GONE and not _is_expected_to_fail(tree, node):
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_of_library(alias.name):
                    value = _find(alias.name)
                    top, _, below = alias.name.partition(".")
                    imported[alias.asname or top] = value if alias.asname or not below else _find(top)
                    if value is _GONE and not _is_expected_to_fail(tree, node):
                        yield node.lineno, alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names = _names_of(node)
            if names and (owner := imported.get(names[0], _GONE)) is not _GONE:
                for name in names[1:]:
                    if not isinstance(owner, (ModuleType, type)):
                        break
                    if not hasattr(owner, name):
                        yield node.lineno, ".".join(names)
                        break
                    owner = getattr(owner, name)


_GONE = object()


def _is_of_library(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES


def _find(name: str) -> Any:
    """A module, or what a module has by that name."""
    try:
        return importlib.import_module(name)
    except ImportError:
        owner, _, attribute = name.rpartition(".")
        if not owner:
            return _GONE
        try:
            return getattr(importlib.import_module(owner), attribute, _GONE)
        except ImportError:
            return _GONE


def _is_expected_to_fail(tree: ast.AST, statement: ast.stmt) -> bool:
    """Whether an import stands in a ``try`` that handles its failure, as where a library is optional."""
    attempts = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers]
    return any(statement is node for attempt in attempts for part in attempt.body for node in ast.walk(part))


def _names_of(node: ast.expr) -> list[str]:
    """The names of ``a.b.c``; none for what is no such chain."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (names := _names_of(node.value)):
        return [*names, node.attr]
    return []


def main(folders: list[str]) -> int:
    """Print what is gone of what the sources in some folders use.

    Args:
        folders: The folders.

    Returns:
        The exit status.
    """
    warnings.simplefilter("ignore")
    missing = []
    for folder in map(Path, folders):
        for source in sorted(folder.rglob("*.py")):
            missing += [f"{source}:{line}: {name}" for line, name in sorted(set(find_missing_names(source)))]
    print(*missing, sep="\n")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
