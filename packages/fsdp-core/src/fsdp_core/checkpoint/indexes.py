"""What a rank tells rank 0 about the boxes and files that it has written, in few bytes.

Layers repeat, and moments have the boxes of their weights. So a message holds each distinct set of boxes once, and for
each tensor the number of its set. What rank 0 has already is left out: the table of keys, shapes and dtypes if it
equals rank 0's, and everything but the files if the plan is that of an earlier save.
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

from fsdp_core.checkpoint.format.file_names import SECTIONS, Section, file_name
from fsdp_core.checkpoint.format.manifest import FileEntry
from fsdp_core.errors import CheckpointError
from fsdp_core.runtime import Runtime
from fsdp_core.state.coverage import Box

if TYPE_CHECKING:
    from fsdp_core.checkpoint.merging import Merged

__all__ = [
    "FirstRankSummary",
    "Index",
    "Memory",
    "Message",
    "PackedBoxes",
    "RankBoxes",
    "Remembered",
    "TensorSpec",
    "boxes_of_ranks",
    "memory_of",
    "packed",
    "table_digest",
]

_FILE = struct.Struct("<BQQ")


class TensorSpec(NamedTuple):
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

    tensors: list[TensorSpec] = field(default_factory=list)
    boxes: list[tuple[Box, ...]] = field(default_factory=list)
    files: dict[Section, FileEntry] = field(default_factory=dict)


class FirstRankSummary(NamedTuple):
    """What rank 0 has before a save, so that the other ranks need not send it.

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
        box_set_ids: For each tensor, the number of its set of boxes.
        box_sets: The sets of boxes in JSON.
    """

    table: bytes
    box_set_ids: bytes
    box_sets: bytes


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
            name = file_name(SECTIONS[section], save_id, rank)
            yield name, FileEntry(size=size, checksum=f"xxh3:{checksum:016x}")


class RankBoxes(NamedTuple):
    """The boxes of one rank, as they were sent.

    Attributes:
        table: Its tensors; ``None`` if they are those of rank 0.
        box_set_ids: For each tensor, the number of its set of boxes, as bytes of an array of 32-bit numbers.
        box_sets: The sets of boxes.
    """

    table: list[TensorSpec] | None
    box_set_ids: bytes
    box_sets: list[tuple[Box, ...]]

    @classmethod
    def unpacked(cls, packed: PackedBoxes) -> RankBoxes:
        """Read :attr:`Message.boxes`."""
        table, box_set_ids, box_sets = map(zlib.decompress, packed)
        return cls(
            [TensorSpec(key, tuple(shape), dtype) for key, shape, dtype in json.loads(table)] if table else None,
            box_set_ids,
            [tuple((tuple(offsets), tuple(lengths)) for offsets, lengths in boxes) for boxes in json.loads(box_sets)],
        )


def table_digest(tensors: Sequence[TensorSpec]) -> bytes:
    """Return a digest that is equal for equal tables."""
    return xxhash.xxh3_128_digest(_json(tensors))


def packed(index: Index, first_rank: FirstRankSummary, last: Remembered | None) -> Message:
    """Return what this rank sends.

    Args:
        index: What this rank has written.
        first_rank: What rank 0 has already.
        last: What this rank remembers.
    """
    number_of_set: dict[tuple[tuple[int, ...], tuple[Box, ...]], int] = {}
    set_numbers = array("I")
    for tensor, boxes in zip(index.tensors, index.boxes, strict=True):
        set_numbers.append(number_of_set.setdefault((tensor.shape, boxes), len(number_of_set)))
    table = _json(index.tensors)
    box_set_ids = set_numbers.tobytes()
    box_sets = _json([boxes for _, boxes in number_of_set])
    plan = xxhash.xxh3_128_digest(table + box_set_ids + box_sets)
    files = b"".join(
        _FILE.pack(SECTIONS.index(section), entry.size, int(entry.checksum.removeprefix("xxh3:"), 16))
        for section, entry in index.files.items()
    )
    if last is not None and (last.save_id, last.plan) == (first_rank.last, plan):
        return Message(plan, None, files)
    if xxhash.xxh3_128_digest(table) == first_rank.table:
        table = b""
    return Message(plan, PackedBoxes(*map(zlib.compress, (table, box_set_ids, box_sets))), files)


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
    sent_before: Mapping[int, tuple[bytes, PackedBoxes]] = {}
    if last is not None and last.merged is not None:
        sent_before = last.merged.sent
    boxes = []
    for rank, message in enumerate(messages):
        if message.boxes is not None:
            boxes.append(message.boxes)
        elif rank in sent_before and sent_before[rank][0] == message.plan:
            boxes.append(sent_before[rank][1])
        else:
            raise CheckpointError(
                f"rank {rank} refers to a plan that rank 0 does not have.\n"
                "Save again; if that fails too, please report it."
            )
    return boxes
