"""Describes a checkpoint's content without reading tensors or importing torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_core.checkpoint.format.base_tensors import Base
from fsdp_core.checkpoint.format.manifest import Manifest
from fsdp_core.checkpoint.format.state_paths import join_path, split_path
from fsdp_core.checkpoint.storage.joined_folder import Paths
from fsdp_core.checkpoint.storage.plain_json import children, part_at, read_plain, scalar, tensor_of
from fsdp_core.checkpoint.storage.rereading import retries_if_replaced
from fsdp_core.checkpoint.storage.tensor_bytes import open_files

__all__ = ["PartFinder", "describe"]

_MAX_LENGTH = 200


@retries_if_replaced("path")
def describe(path: Paths) -> dict[str, Any]:
    """Describe a checkpoint without reading tensors: its origin, tensors, files and plain data.

    Args:
        path: A local path or an fsspec URL; or several, the places of a scattered save.

    Returns:
        Plain data, as printed by ``fsdp checkpoint inspect --json``, whose documentation lists the keys.

    Raises:
        CheckpointFormatError: There is no readable checkpoint.
    """
    files = open_files(path)
    manifest = files.manifest
    return {
        "path": str(files.folder),
        "format_version": manifest.format_version,
        "save_id": manifest.save_id,
        "created": manifest.created,
        "strategy": manifest.strategy,
        "world_size": manifest.world_size,
        "versions": dict(manifest.versions),
        "places": [{"host": place.host, "path": place.path, "ranks": place.shown_ranks} for place in manifest.places],
        "base": None if manifest.base is None else _base(manifest.base),
        "bytes": sum(entry.size for entry in manifest.files.values()),
        "parts": _parts(manifest),
        "tensors": {
            key: {
                "shape": list(tensor.shape),
                "dtype": tensor.dtype_name,
                "bytes": tensor.nbytes,
                "chunks": len(tensor.chunks),
            }
            for key, tensor in manifest.tensors.items()
        },
        "aliases": dict(manifest.aliases),
        "plain": list(_plain_entries(read_plain(files), manifest.kinds)),
        "files": {name: {"bytes": entry.size, "checksum": entry.checksum} for name, entry in manifest.files.items()},
    }


def _base(base: Base) -> dict[str, Any]:
    return {
        "source": None if base.source is None else {"type": base.source.type, "name": base.source.name},
        "tensors": {
            key: {
                "shape": list(tensor.shape),
                "dtype": tensor.dtype_name,
                "bytes": tensor.nbytes,
                "digest": tensor.digest,
            }
            for key, tensor in base.tensors.items()
        },
    }


class PartFinder:
    """Finds the models and optimizers that tensors belong to, without comparing each tensor with each of them.

    Args:
        kinds: Which parts of the state are a model's or an optimizer's, by path.

    Example:
        >>> PartFinder({"model": "model", "optimizer/0": "optimizer"}).part_of("optimizer/0/weight/exp_avg")
        'optimizer/0'
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._kinds = kinds
        self._depths = sorted({path.count("/") + 1 for path in kinds})

    def part_of(self, key: str) -> str | None:
        """Return the path of the model or optimizer that a tensor belongs to, if there is one."""
        for depth in self._depths:
            path = "/".join(key.split("/")[:depth])
            if path in self._kinds:
                return path
        return None


def _parts(manifest: Manifest) -> list[dict[str, Any]]:
    parts: dict[str | None, dict[str, Any]] = {
        path: {"path": "/".join(split_path(path)), "kind": kind, "tensors": 0, "elements": 0, "bytes": 0, "dtypes": {}}
        for path, kind in manifest.kinds.items()
    }
    finder = PartFinder(manifest.kinds)
    for key, tensor in manifest.tensors.items():
        part = parts.setdefault(
            finder.part_of(key),
            {"path": None, "kind": "state", "tensors": 0, "elements": 0, "bytes": 0, "dtypes": {}},
        )
        elements = math.prod(tensor.shape)
        part["tensors"] += 1
        part["elements"] += elements
        part["bytes"] += tensor.nbytes
        part["dtypes"][tensor.dtype_name] = part["dtypes"].get(tensor.dtype_name, 0) + elements
    return list(parts.values())


def _plain_entries(state: Any, kinds: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield an entry for each value at the first two levels outside of models and optimizers, and each param group."""
    parents: set[str] = set()  # the paths at the first two levels that hold a model or an optimizer
    for path in kinds:
        parent_keys = path.split("/")[:-1]
        if parent_keys:
            parents |= {parent_keys[0], "/".join(parent_keys[:2])}
    for name, node in children(state) or []:
        path = join_path(name)
        entries_of_node = children(node)
        if path in kinds:
            continue
        if entries_of_node is None or (isinstance(node, list) and path not in parents):
            yield _entry(path, node)
            continue
        for item_name, item in entries_of_node:
            item_path = f"{path}/{join_path(item_name)}"
            if item_path not in kinds and item_path not in parents:
                yield _entry(item_path, item)
    for path in (path for path, kind in kinds.items() if kind == "optimizer"):
        groups = children(part_at(state, [*split_path(path), "param_groups"])) or []
        yield from (_group_entry(f"{path}/param_groups/{index}", group) for index, group in groups)


def _group_entry(path: str, group: Any) -> dict[str, Any]:
    options = dict(children(group) or [])
    count = len(children(options.pop("params", None)) or [])
    facts = [
        f"{name} {scalar(value)}"
        for name, value in options.items()
        if isinstance(scalar(value), (int, float)) and not isinstance(value, bool)
    ]
    return {"path": path, "value": ", ".join([f"{count} parameter{'s' if count != 1 else ''}", *facts])}


def _entry(path: str, node: Any) -> dict[str, Any]:
    entries = children(node)
    tensor = tensor_of(node)
    if tensor is not None:
        return {"path": path, "tensor": tensor[1]}
    if entries is None:
        value = scalar(node)
        return {"path": path, "value": value if not isinstance(value, str) else value[:_MAX_LENGTH]}
    return {"path": path, "entries": len(entries), "names": [name for name, _ in entries][:_MAX_LENGTH]}
