"""Separates what a Trainer's plain data says of the run itself from its content: ids, folders, seconds. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fsdp_core.checkpoint.format.state_paths import escape, split_path

__all__ = ["without_run_facts"]

_CALLBACK = r"(trainer/callbacks/[^/]+)/"
_FACT = re.compile(rf"trainer/fsdp_core/attempts/\d+/id|{_CALLBACK}(dirpath|time_elapsed/[^/]+)")
_IN_CALLBACK = re.compile(_CALLBACK)
_BEST = "best_k_models"
_VERSION = re.compile(r"-v\d+(?=(\.[^./\\]*)?$)")  # which ModelCheckpoint adds where a file of that name exists


def without_run_facts(leaves: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the facts of a run, which differ between runs that compute the same, from the rest of its plain data.

    Facts are the ids of fits, the folder of a ``ModelCheckpoint`` and the seconds of a ``Timer``. What
    ``ModelCheckpoint`` knows of its files is content; their paths become names in that folder.

    Args:
        leaves: The plain data by path.

    Returns:
        The content, and the facts, by path.

    Example:
        >>> state = {"dirpath": "/runs/a", "best_model_path": "/runs/a/epoch=1-v1.ckpt"}
        >>> content, facts = without_run_facts({f"trainer/callbacks/M/{key}": value for key, value in state.items()})
        >>> content, facts
        ({'trainer/callbacks/M/best_model_path': 'epoch=1.ckpt'}, {'trainer/callbacks/M/dirpath': '/runs/a'})
    """
    facts = {path: node for path, node in leaves.items() if _FACT.fullmatch(path)}
    folders = {
        path.removesuffix("/dirpath"): node
        for path, node in facts.items()
        if path.endswith("/dirpath") and isinstance(node, str) and node
    }
    by_callback: dict[str, dict[str, Any]] = {callback: {} for callback in folders}
    for path, node in leaves.items():
        if (match := _IN_CALLBACK.match(path)) and match[1] in folders:
            by_callback[match[1]][path[match.end() :]] = node
    content = {}
    renamed = {callback: _rename_paths(state, folders[callback]) for callback, state in by_callback.items()}
    for path, node in leaves.items():
        if path in facts:
            continue
        match = _IN_CALLBACK.match(path)
        if match is None or match[1] not in folders:
            content[path] = node
            continue
        new_names = renamed[match[1]]
        key, _, file = path[match.end() :].partition("/")
        if key == _BEST and file:
            (file_path,) = split_path(file) if "/" not in file else ("",)
            path = f"{match[1]}/{key}/{escape(new_names[file_path])}" if file_path in new_names else path
        content[path] = new_names.get(node, node) if isinstance(node, str) else node
    return content, facts


def _rename_paths(state: Mapping[str, Any], folder: str) -> dict[str, str]:
    """The names in a folder of the files that a callback's state names, by their paths."""
    paths = {node for node in state.values() if isinstance(node, str)}
    paths |= {path for key in state if key.startswith(f"{_BEST}/") for path in split_path(key)[1:]}
    names = {path: _name_in(path, folder) or path for path in paths}
    short = {path: _VERSION.sub("", name) if name != path else path for path, name in names.items()}
    return next(
        (candidate for candidate in (short, names) if len(set(candidate.values())) == len(paths)), {}
    )  # no two become one


def _name_in(path: str, folder: str) -> str | None:
    folder = folder.rstrip("/\\")
    return path[len(folder) :].lstrip("/\\") if path.startswith((f"{folder}/", f"{folder}\\")) else None
