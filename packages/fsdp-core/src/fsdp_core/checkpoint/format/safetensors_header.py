"""The header of a safetensors file, written and read without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_core.errors import CheckpointFormatError, CheckpointValueError
from fsdp_core.state.boxes import is_shape
from fsdp_core.state.dtype_names import ITEM_BYTES, STORED_NAMES

if TYPE_CHECKING:
    import torch

__all__ = ["HEADER_KEY", "MAX_HEADER_BYTES", "FileTensor", "build_header", "parse_header"]

HEADER_KEY = "__metadata__"
"""The only key of a safetensors header that is not a tensor."""

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

_DTYPE_NAMES = {stored_name: dtype_name for dtype_name, stored_name in STORED_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """The place of a tensor in a safetensors file.

    Attributes:
        shape: Its shape.
        dtype_name: The name of its dtype, such as ``"float32"``.
        start: The offset of its first byte in the file.
    """

    shape: tuple[int, ...]
    dtype_name: str
    start: int

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        from fsdp_core.state.dtypes import DTYPES

        return DTYPES[self.dtype_name]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype_name]


def build_header(
    tensors: Mapping[str, tuple[tuple[int, ...], str]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """Build the header of a safetensors file.

    Args:
        tensors: The shape and dtype name of each tensor, by its name in the file.
        metadata: Strings to store in it, in addition to the format, which is ``pt``.

    Returns:
        The first bytes of the file, and the order in which the tensors' bytes follow.

    Raises:
        CheckpointValueError: The header would be longer than readers accept.

    Example:
        >>> build_header({"a": ((2,), "int8"), "b": ((), "float32")})[1]
        ['b', 'a']
    """
    header: dict[str, Any] = {HEADER_KEY: {"format": "pt", **(metadata or {})}}
    # Widest dtypes first, so that every tensor begins at a multiple of its own item size.
    names = sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name][1]])
    end = 0
    for name in names:
        shape, dtype = tensors[name]
        begin = end
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": STORED_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    while len(text) % 8 != 0:
        text += b" "
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointValueError(
            f"{len(tensors)} tensors make a safetensors header of {len(text)} bytes, but readers accept at most "
            f"{MAX_HEADER_BYTES}: save fewer or shorter-named tensors per file"
        )
    return len(text).to_bytes(8, "little") + text, names


def parse_header(read: Callable[[int, int], bytes], size: int, where: str) -> dict[str, FileTensor]:
    """Read and check the header of a safetensors file.

    Args:
        read: Returns the bytes from a start to an end.
        size: The size of the file in bytes.
        where: The file's name in errors.

    Returns:
        The place of each tensor.

    Raises:
        CheckpointFormatError: It is not the header of a safetensors file of this size.
    """
    try:
        if size < 8:
            raise ValueError(f"a file of {size} bytes is too short for a header")
        length = int.from_bytes(read(0, 8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes does not fit a file of {size} bytes")
        header = json.loads(read(8, 8 + length))
        header.pop(HEADER_KEY, None)
        tensors = {}
        spans = []
        for name, entry in header.items():
            begin, end = (_as_count(number) for number in entry["data_offsets"])
            shape = tuple(_as_count(number) for number in entry["shape"])
            if not is_shape(shape):
                raise ValueError(f"{name!r} has a shape that no tensor has")
            tensor = FileTensor(
                shape=shape,
                dtype_name=_DTYPE_NAMES[entry["dtype"]],
                start=8 + length + begin,
            )
            if end - begin != tensor.nbytes:
                raise ValueError(f"{name!r} has {end - begin} bytes, which does not match its shape and dtype")
            spans.append((begin, end))
            tensors[name] = tensor
        position = 0
        for begin, end in sorted(spans):
            if begin != position:
                raise ValueError(f"a tensor begins at byte {begin} of the data, but {position} was expected")
            position = end
        if position != size - 8 - length:
            raise ValueError(f"its tensors have {position} bytes, but the file has room for {size - 8 - length}")
    except CheckpointFormatError:  # raised by read(), which names the file already
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointFormatError(f"{where} is not a safetensors file: {error}. Restore it from a backup.") from error
    return tensors


def _as_count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"{number!r} is not an integer in range")
    return number
