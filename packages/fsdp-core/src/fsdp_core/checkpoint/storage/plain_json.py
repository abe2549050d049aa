"""Walks a checkpoint's plain data in its JSON form, without restoring Python objects. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import xxhash

from fsdp_core.checkpoint.format.json_text import MAX_JSON_BYTES, parse_text
from fsdp_core.checkpoint.format.named_code import find_named_code
from fsdp_core.checkpoint.format.plain_form import check_plain
from fsdp_core.checkpoint.format.state_paths import join_path
from fsdp_core.checkpoint.storage.remedies import remedy
from fsdp_core.checkpoint.storage.stored_files import StoredFiles
from fsdp_core.errors import CheckpointFormatError

__all__ = ["children", "leaves", "part_at", "read_plain", "scalar", "tensor_of"]

_MOST_SHOWN = 20
_DAMAGED = "It is damaged: restore it from a copy, or use an earlier checkpoint."
_MAX_PATH_CHARACTERS = 2**28
_MAPPINGS = ("$dict", "$ordered", "$counter", "$namespace")
_SEQUENCES = ("$tuple",)
_TENSORS = ("$saved", "$tensor")


def read_plain(files: StoredFiles) -> Any:
    """Read the plain data of a checkpoint, in JSON types.

    Raises:
        CheckpointFormatError: The file is damaged, is not JSON of the form that is saved, or names code that Lightning
            would run.
    """
    manifest, folder = files.manifest, files.folder

    def has_tensor(tag: str, name: str) -> bool:
        if tag == "$saved":
            return manifest.has_tensor(manifest.aliases.get(name, name))
        return manifest.state_tensors is not None  # reading the tensor shows whether that file has it

    entry = manifest.files[manifest.state_file]
    try:
        if entry.size > MAX_JSON_BYTES:
            raise ValueError(f"it has {entry.size} bytes, and the limit is {MAX_JSON_BYTES}")
        text = folder.read(manifest.state_file)
        checksum = f"xxh3:{xxhash.xxh3_64_hexdigest(text)}"
        if checksum != entry.checksum:
            raise ValueError(f"its checksum is {checksum}, which differs from the manifest's: it was changed")
        state = parse_text(text)
        check_plain(state, has_tensor)
    except (ValueError, OSError) as error:
        raise CheckpointFormatError(
            f"can't read {folder.path(manifest.state_file)}: {error}. {remedy(error) or _DAMAGED}"
        ) from error
    named_code = find_named_code(state)
    if named_code:
        lines = [f"  {'/'.join(keys)!r}: {why}." for keys, why in named_code[:_MOST_SHOWN]]
        more = [f"  … and {len(named_code) - _MOST_SHOWN} more"] if len(named_code) > _MOST_SHOWN else []
        remedy_text = (
            "Nothing was run. Load a checkpoint that you trust; if you trust this one, save it again without these."
        )
        state_path = folder.path(manifest.state_file)
        raise CheckpointFormatError(
            "\n".join([f"{state_path} names code, and is not read:", *lines, *more, remedy_text])
        )
    return state


def _tag(node: Any) -> str | None:
    return next((key for key in node if key.startswith("$")), None) if isinstance(node, dict) else None


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Return the entries of a dict, list or tuple of any type; ``None`` for other nodes.

    Example:
        >>> children({"$ordered": [["a", 1], [{"$tuple": [0, 1]}, 2]]})
        [('a', 1), ('(0, 1)', 2)]
        >>> children({"$path": "/tmp"}) is None
        True
    """
    tag = _tag(node)
    if isinstance(node, list):
        return [(str(index), item) for index, item in enumerate(node)]
    if tag is None:
        return list(node.items()) if isinstance(node, dict) else None
    content = node[tag]
    if tag == "$defaultdict":
        content = content[1]
    if tag in _MAPPINGS or tag == "$defaultdict":
        return [(_key_text(key), item) for key, item in content]
    return children(content) if tag in _SEQUENCES else None


def tensor_of(node: Any) -> tuple[str, str] | None:
    """Return the tag and the name of the tensor that a node refers to, if it refers to one."""
    tag = _tag(node)
    if tag == "$ndarray":
        return tensor_of(node[tag])
    return (tag, node[tag]) if tag in _TENSORS and isinstance(node[tag], str) else None


def scalar(node: Any) -> Any:
    """Return the value of a node without entries, in a form for display.

    Example:
        >>> scalar({"$float": "nan"}), scalar({"$path": "/data"}), scalar(3)
        ('nan', '/data', 3)
    """
    tag = _tag(node)
    if tag is None:
        return node
    return scalar(node[tag][1] if tag == "$numpy" else node[tag])


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a node and its empty containers, by path.

    Raises:
        CheckpointFormatError: Their paths would take far more memory than the plain data.

    Example:
        >>> list(leaves({"a": [1, {}], "b": {"$float": "inf"}}))
        [('a/0', 1), ('a/1', {}), ('b', {'$float': 'inf'})]
    """
    unvisited = [(path, node)]
    characters = 0
    while unvisited:
        path, node = unvisited.pop()
        entries = children(node)
        if not entries:
            yield path, node
            continue
        steps = [join_path(name) for name, _ in entries]
        characters += sum(map(len, steps)) + len(steps) * len(path)
        if characters > _MAX_PATH_CHARACTERS:
            raise CheckpointFormatError(
                f"the paths of its plain data have more than {_MAX_PATH_CHARACTERS} characters together, since the "
                "keys of many values are long. Save them under shorter keys."
            )
        paths = [f"{path}/{step}" for step in steps] if path else steps
        unvisited += zip(reversed(paths), (item for _, item in reversed(entries)), strict=True)


def part_at(node: Any, keys: list[str]) -> Any:
    """Return the node at ``keys``; ``None`` if it does not exist."""
    for key in keys:
        node = dict(children(node) or []).get(key)
    return node


def _key_text(key: Any) -> str:
    if isinstance(key, str):
        return key
    entries = children(key)
    if entries is not None:
        return "(" + ", ".join(_key_text(item) for _, item in entries) + ")"
    return str(scalar(key))
