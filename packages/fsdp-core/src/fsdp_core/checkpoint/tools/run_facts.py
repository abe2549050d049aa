"""Separates the facts of a run in a Trainer's plain data (ids, folders, seconds) from its content. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fsdp_core.checkpoint.format.state_paths import escape, split_path

__all__ = ["without_run_facts"]

_CALLBACK = r"(trainer/callbacks/[^/]+)/"
_FACT_PATH = re.compile(rf"trainer/fsdp_core/attempts/\d+/id|{_CALLBACK}(dirpath|time_elapsed/[^/]+)")
_CALLBACK_PATH = re.compile(_CALLBACK)
_BEST_MODELS = "best_k_models"
_VERSION = re.compile(r"-v\d+(?=(\.[^./\\]*)?$)")  # ModelCheckpoint adds it if a file of that name exists


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
    facts = {path: node for path, node in leaves.items() if _FACT_PATH.fullmatch(path)}
    folders = {
        path.removesuffix("/dirpath"): node
        for path, node in facts.items()
        if path.endswith("/dirpath") and isinstance(node, str) and node
    }
    by_callback: dict[str, dict[str, Any]] = {callback: {} for callback in folders}
    for path, node in leaves.items():
        match = _CALLBACK_PATH.match(path)
        if match is not None and match[1] in folders:
            by_callback[match[1]][path[match.end() :]] = node
    content = {}
    renamed = {callback: _rename_paths(state, folders[callback]) for callback, state in by_callback.items()}
    for path, node in leaves.items():
        if path in facts:
            continue
        match = _CALLBACK_PATH.match(path)
        if match is None or match[1] not in folders:
            content[path] = node
            continue
        new_names = renamed[match[1]]
        key, _, escaped_file = path[match.end() :].partition("/")
        if key == _BEST_MODELS and escaped_file and "/" not in escaped_file:
            (file_path,) = split_path(escaped_file)
            if file_path in new_names:
                path = f"{match[1]}/{key}/{escape(new_names[file_path])}"
        content[path] = new_names.get(node, node) if isinstance(node, str) else node
    return content, facts


def _rename_paths(state: Mapping[str, Any], folder: str) -> dict[str, str]:
    """Return the names, relative to a folder, of the files that a callback's state names, by their paths."""
    paths = {node for node in state.values() if isinstance(node, str)}
    for key in state:
        if key.startswith(f"{_BEST_MODELS}/"):
            paths.update(split_path(key)[1:])
    names_in_folder = {path: name for path in paths if (name := _name_in(path, folder))}
    names = {path: names_in_folder.get(path, path) for path in paths}
    short_names = names | {path: _VERSION.sub("", name) for path, name in names_in_folder.items()}
    for candidate_names in (short_names, names):
        if len(set(candidate_names.values())) == len(paths):  # all names are still distinct
            return candidate_names
    return {}


def _name_in(path: str, folder: str) -> str | None:
    folder = folder.rstrip("/\\")
    return path[len(folder) :].lstrip("/\\") if path.startswith((f"{folder}/", f"{folder}\\")) else None
