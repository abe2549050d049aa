"""A chunk of a stored tensor, and the names of chunks in files."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_core.state.coverage import Box

__all__ = ["StoredChunk", "chunk_name"]


@dataclass(frozen=True, kw_only=True)
class StoredChunk:
    """A box of a tensor, and the location of its bytes.

    Attributes:
        file: The safetensors file, relative to the checkpoint.
        key: The box's name in that file.
        offsets: Where the box begins in the tensor.
        lengths: Its shape.
    """

    file: str
    key: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def chunk_name(key: str, shape: tuple[int, ...], box: Box) -> str:
    """Return the name of a chunk in its file: the tensor's key, and the chunk's offsets if it isn't the full tensor.

    A key with an ``@`` always gets the offsets, so that no two chunks share a name.

    Example:
        >>> chunk_name("model/wte.weight", (4, 2), ((2, 0), (2, 2)))
        'model/wte.weight@2,0'
    """
    offsets, lengths = box
    return key if lengths == shape and "@" not in key else f"{key}@{','.join(map(str, offsets))}"
