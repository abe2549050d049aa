"""What a rank tells rank 0 about the boxes and files that it has written, in few bytes.

Layers repeat, and moments have the boxes of their weights. So a message says which tensors are alike, and the boxes
once for each kind. What rank 0 knows already is left out: the table of keys, shapes and dtypes where it is rank 0's
own, and everything but the files where the plan is the one of a save before.
"""

from __future__ import annotations

import json
import struct
import threading
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import xxhash

from fsdp_core.checkpoint.format.chunks import Section, file_name
from fsdp_core.checkpoint.format.manifest import FileEntry
from fsdp_core.errors import CheckpointError
from fsdp_core.runtime import Runtime
from fsdp_core.state.coverage import Box

if TYPE_CHECKING:
    from fsdp_core.checkpoint.merging import Merged

__all__ = [
    "Index",
    "KnownToFirst",
    "Memory",
    "Message",
    "PackedBoxes",
    "RankBoxes",
    "Remembered",
    "TensorKind",
    "boxes_of_ranks",
    "memory_of",
    "packed",
    "table_digest",
]

_SECTIONS: tuple[Section, ...] = ("model", "optimizer", "state")
_FILE = struct.Struct("<BQQ")


class TensorKind(NamedTuple):
    """A tensor of the state, without its values."""

    key: str
    shape: tuple[int, ...]
    dtype_name: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """The tensors and files that one rank has written.

    Attributes:
        tensors: Each tensor of the state.
        boxes: The boxes of each that this rank has written, in the same order.
        files: The rank's files, by section.
    """

    tensors: list[TensorKind] = field(default_factory=list)
    boxes: list[tuple[Box, ...]] = field(default_factory=list)
    files: dict[Section, FileEntry] = field(default_factory=dict)


class KnownToFirst(NamedTuple):
    """What rank 0 knows before a save, so that the other ranks need not send it.

    Attributes:
        table: The digest of its table of tensors.
        last: The id of the save whose merged indexes it remembers.
    """

    table: bytes
    last: str | None


class Remembered(NamedTuple):
    """What a rank keeps of its last save, for the next one.

    Attributes:
        save_id: The id of that save.
        plan: The digest of what this rank sent then.
        merged: What was made of all ranks' plans; on rank 0.
    """

    save_id: str
    plan: bytes
    merged: Merged | None


class PackedBoxes(NamedTuple):
    """A rank's tensors and boxes, each part compressed by itself.

    Attributes:
        table: The tensors in JSON; empty if they are those of rank 0.
        alike: The numbers of their kinds.
        kinds: The boxes of each kind in JSON.
    """

    table: bytes
    alike: bytes
    kinds: bytes


class Message(NamedTuple):
    """What one rank sends to rank 0, all of it bytes.

    Attributes:
        plan: The digest of ``boxes``.
        boxes: The tensors and boxes; ``None`` if they are those of the save that rank 0 remembers.
        files: The files.
    """

    plan: bytes
    boxes: PackedBoxes | None
    files: bytes

    @property
    def nbytes(self) -> int:
        """How many bytes that are."""
        return len(self.plan) + sum(map(len, self.boxes or ())) + len(self.files)

    def entries(self, save_id: str, rank: int) -> Iterator[tuple[str, FileEntry]]:
        """Yield the names and entries of the files that a rank has written."""
        for section, size, checksum in _FILE.iter_unpack(self.files):
            name = file_name(_SECTIONS[section], save_id, rank)
            yield name, FileEntry(size=size, checksum=f"xxh3:{checksum:016x}")


class RankBoxes(NamedTuple):
    """The boxes of one rank, as they were sent.

    Attributes:
        table: Its tensors; ``None`` if they are those of rank 0.
        alike: For each tensor, the number of its kind, as bytes of an array of 32-bit numbers.
        kinds: The boxes of each kind.
    """

    table: list[TensorKind] | None
    alike: bytes
    kinds: list[tuple[Box, ...]]

    @classmethod
    def unpacked(cls, packed: PackedBoxes) -> RankBoxes:
        """Read :attr:`Message.boxes`."""
        table, alike, kinds = map(zlib.decompress, packed)
        return cls(
            [TensorKind(key, tuple(shape), dtype) for key, shape, dtype in json.loads(table)] if table else None,
            alike,
            [tuple((tuple(offsets), tuple(lengths)) for offsets, lengths in boxes) for boxes in json.loads(kinds)],
        )


def table_digest(tensors: Sequence[TensorKind]) -> bytes:
    """Return a digest that is equal for equal tables."""
    return xxhash.xxh3_128_digest(_json(tensors))


def packed(index: Index, known: KnownToFirst, last: Remembered | None) -> Message:
    """Return what this rank sends.

    Args:
        index: What this rank has written.
        known: What rank 0 knows.
        last: What this rank remembers.
    """
    kinds: dict[tuple[tuple[int, ...], tuple[Box, ...]], int] = {}
    alike = array("I")
    for tensor, boxes in zip(index.tensors, index.boxes, strict=True):
        alike.append(kinds.setdefault((tensor.shape, boxes), len(kinds)))
    table, numbers, boxes_of_kinds = _json(index.tensors), alike.tobytes(), _json([boxes for _, boxes in kinds])
    plan = xxhash.xxh3_128_digest(table + numbers + boxes_of_kinds)
    files = b"".join(
        _FILE.pack(_SECTIONS.index(section), entry.size, int(entry.checksum.removeprefix("xxh3:"), 16))
        for section, entry in index.files.items()
    )
    if last is not None and (last.save_id, last.plan) == (known.last, plan):
        return Message(plan, None, files)
    if xxhash.xxh3_128_digest(table) == known.table:
        table = b""
    return Message(plan, PackedBoxes(*map(zlib.compress, (table, numbers, boxes_of_kinds))), files)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogatepass")


class Memory:
    """What the ranks of one runtime remember of their last save together."""

    last: Remembered | None = None


_memories: WeakKeyDictionary[Runtime, Memory] = WeakKeyDictionary()
_lock = threading.Lock()  # ranks may be threads


def memory_of(runtime: Runtime) -> Memory:
    """Return what this rank remembers; empty for a new runtime."""
    with _lock:
        return _memories.setdefault(runtime, Memory())


def boxes_of_ranks(messages: Sequence[Message], last: Remembered | None) -> list[PackedBoxes]:
    """Return the packed boxes of all ranks: those that were sent, and those that rank 0 remembers.

    Raises:
        CheckpointError: A rank refers to a save that rank 0 does not remember so.
    """
    before: Mapping[int, tuple[bytes, PackedBoxes]] = {} if last is None or last.merged is None else last.merged.sent
    boxes = []
    for rank, message in enumerate(messages):
        if message.boxes is not None:
            boxes.append(message.boxes)
        elif rank in before and before[rank][0] == message.plan:
            boxes.append(before[rank][1])
        else:
            raise CheckpointError(
                f"rank {rank} refers to a plan that rank 0 does not have.\n"
                "Save again; if that fails too, please report it."
            )
    return boxes
