"""The messages in which ranks tell rank 0 of the boxes and files that they have written, in few bytes.

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
    "LastSave",
    "Message",
    "PackedBoxes",
    "RankBoxes",
    "SaveMemory",
    "TensorSpec",
    "collect_boxes",
    "pack_message",
    "save_memory_of",
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
        table_digest: The digest of its table of tensors.
        last_save_id: The id of the save whose merged indexes it remembers.
    """

    table_digest: bytes
    last_save_id: str | None


class LastSave(NamedTuple):
    """What a rank keeps of its last save, for the next one.

    Attributes:
        save_id: The id of that save.
        boxes_digest: The digest of the tensors and boxes of this rank then.
        merged: The merged tensors and boxes of all ranks, on rank 0; ``None`` elsewhere.
    """

    save_id: str
    boxes_digest: bytes
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
        boxes_digest: The digest of the tensors and boxes.
        boxes: The tensors and boxes; ``None`` if they are those of the save that rank 0 remembers.
        files: The files.
    """

    boxes_digest: bytes
    boxes: PackedBoxes | None
    files: bytes

    @property
    def nbytes(self) -> int:
        """The size of the message in bytes."""
        boxes_bytes = 0 if self.boxes is None else sum(len(part) for part in self.boxes)
        return len(self.boxes_digest) + boxes_bytes + len(self.files)

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
    def from_packed(cls, packed_boxes: PackedBoxes) -> RankBoxes:
        """Read :attr:`Message.boxes`."""
        table_json = zlib.decompress(packed_boxes.table)
        table = None
        if table_json:
            table = [TensorSpec(key, tuple(shape), dtype_name) for key, shape, dtype_name in json.loads(table_json)]
        box_sets = [_boxes_from_json(boxes) for boxes in json.loads(zlib.decompress(packed_boxes.box_sets))]
        return cls(table, zlib.decompress(packed_boxes.box_set_ids), box_sets)


def _boxes_from_json(boxes: Sequence[Any]) -> tuple[Box, ...]:
    return tuple((tuple(offsets), tuple(lengths)) for offsets, lengths in boxes)


def table_digest(tensors: Sequence[TensorSpec]) -> bytes:
    """Return a digest that is equal for equal tables."""
    return xxhash.xxh3_128_digest(_json(tensors))


def pack_message(index: Index, first_rank: FirstRankSummary, last: LastSave | None) -> Message:
    """Return what this rank sends.

    Args:
        index: What this rank has written.
        first_rank: What rank 0 has already.
        last: What this rank remembers.
    """
    shapes_and_boxes = [(tensor.shape, boxes) for tensor, boxes in zip(index.tensors, index.boxes, strict=True)]
    distinct_sets = list(dict.fromkeys(shapes_and_boxes))
    id_of_set = {box_set: set_id for set_id, box_set in enumerate(distinct_sets)}
    table = _json(index.tensors)
    box_set_ids = array("I", [id_of_set[box_set] for box_set in shapes_and_boxes]).tobytes()
    box_sets = _json([boxes for _, boxes in distinct_sets])
    boxes_digest = xxhash.xxh3_128_digest(table + box_set_ids + box_sets)
    files = b"".join(
        _FILE.pack(SECTIONS.index(section), entry.size, int(entry.checksum.removeprefix("xxh3:"), 16))
        for section, entry in index.files.items()
    )
    if last is not None and last.save_id == first_rank.last_save_id and last.boxes_digest == boxes_digest:
        return Message(boxes_digest, None, files)
    if xxhash.xxh3_128_digest(table) == first_rank.table_digest:
        table = b""
    packed_boxes = PackedBoxes(zlib.compress(table), zlib.compress(box_set_ids), zlib.compress(box_sets))
    return Message(boxes_digest, packed_boxes, files)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogatepass")


class SaveMemory:
    """What a rank remembers of its runtime's last save."""

    last: LastSave | None = None


_memories: WeakKeyDictionary[Runtime, SaveMemory] = WeakKeyDictionary()
_lock = threading.Lock()  # ranks may be threads


def save_memory_of(runtime: Runtime) -> SaveMemory:
    """Return what this rank remembers; empty for a new runtime."""
    with _lock:
        return _memories.setdefault(runtime, SaveMemory())


def collect_boxes(messages: Sequence[Message], last: LastSave | None) -> list[PackedBoxes]:
    """Return the packed boxes of all ranks: those that were sent, and those that rank 0 remembers.

    Raises:
        CheckpointError: A rank has sent no boxes, and rank 0 does not remember them.
    """
    remembered_boxes: Mapping[int, tuple[bytes, PackedBoxes]] = {}
    if last is not None and last.merged is not None:
        remembered_boxes = last.merged.sent_boxes
    boxes_by_rank = []
    for rank, message in enumerate(messages):
        boxes = message.boxes
        if boxes is None and rank in remembered_boxes:
            remembered_digest, boxes_of_last_save = remembered_boxes[rank]
            if remembered_digest == message.boxes_digest:
                boxes = boxes_of_last_save
        if boxes is None:
            raise CheckpointError(
                f"rank {rank} refers to a plan that rank 0 does not have.\n"
                "Save again; if that fails too, please report it."
            )
        boxes_by_rank.append(boxes)
    return boxes_by_rank
