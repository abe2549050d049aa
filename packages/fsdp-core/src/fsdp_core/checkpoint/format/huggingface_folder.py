"""The files of a folder that ``from_pretrained`` reads: their names, and which tensor is in which. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from fsdp_core.errors import CheckpointFormatError, CheckpointValueError

__all__ = ["INDEX", "OWN_FILES", "WEIGHTS", "index_text", "parse_index", "split_into_files"]

WEIGHTS = "model.safetensors"
"""The file of a model that fits into one."""

INDEX = "model.safetensors.index.json"
"""The file that says which of several files holds a tensor."""

OWN_FILES = r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json"
"""A regular expression for the names of the files of such a folder."""

#: Finds what is no name of a file in a folder: separators, control characters, and names of dots alone.
_NOT_IN_FOLDER = re.compile(r"[/\\:\x00-\x1f]|^\.*$")


def split_into_files(sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """Choose the file of each tensor, as ``save_pretrained`` of transformers does.

    Args:
        sizes: The size of each tensor in bytes, by name, in the order of the model.
        max_bytes: The maximum number of bytes of tensors in a file; a larger tensor gets a file of its own.

    Returns:
        The names of the tensors in each file.

    Raises:
        CheckpointValueError: ``max_bytes`` is not positive.

    Example:
        >>> list(split_into_files({"a": 6, "b": 6, "c": 2}, 8).items())
        [('model-00001-of-00002.safetensors', ['a']), ('model-00002-of-00002.safetensors', ['b', 'c'])]
    """
    if max_bytes < 1:
        raise CheckpointValueError(
            f"a file can't hold {max_bytes} bytes of tensors; pass a max_shard_size of 1 or more"
        )
    groups: list[list[str]] = []
    group: list[str] = []
    group_bytes = 0
    for name, size in sizes.items():
        if size > max_bytes:  # it gets a file of its own, and the current group goes on with the next tensor
            groups.append([name])
            continue
        if group_bytes + size > max_bytes:
            groups.append(group)
            group = []
            group_bytes = 0
        group.append(name)
        group_bytes += size
    if group or not groups:
        groups.append(group)
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def index_text(files: Mapping[str, list[str]], total_size: int, total_parameters: int | None = None) -> bytes:
    """The content of the index of several files.

    Args:
        files: The names of the tensors in each file.
        total_size: The size of all tensors in bytes.
        total_parameters: The number of elements of the model's parameters, if it is known.
    """
    metadata = {"total_size": total_size}
    if total_parameters is not None:
        metadata["total_parameters"] = total_parameters
    file_of_tensor = {tensor: name for name, tensors in files.items() for tensor in tensors}
    index = {"metadata": metadata, "weight_map": file_of_tensor}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def parse_index(text: bytes, where: str) -> dict[str, str]:
    """Read the index of several files.

    Args:
        text: Its content.
        where: Its path, for errors.

    Returns:
        The name of the file of each tensor. It is a name of a file in the folder itself.

    Raises:
        CheckpointFormatError: It is no index, or names files elsewhere.
    """
    try:
        file_of_tensor = json.loads(text)["weight_map"]
        if not isinstance(file_of_tensor, dict) or not all(isinstance(name, str) for name in file_of_tensor.values()):
            raise ValueError("its weight_map does not map names to files")
        outside = [name for name in file_of_tensor.values() if _NOT_IN_FOLDER.search(name)]
        if outside:
            raise ValueError(f"it names a file {outside[0]!r} outside of the folder")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointFormatError(f"{where} is not an index of safetensors files: {error}") from error
    return file_of_tensor
