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
from typing import TYPE_CHECKING, NamedTuple
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
    "Memory",
    "Message",
    "RankBoxes",
    "Remembered",
    "TensorKind",
    "Told",
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


class Told(NamedTuple):
    """What rank 0 tells the other ranks before a save: what they need not send.

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


class Message(NamedTuple):
    """What one rank sends to rank 0, all of it bytes.

    Attributes:
        plan: The digest of ``boxes``.
        boxes: The compressed tensors and boxes; ``None`` if they are those of the save that rank 0 remembers.
        files: The files.
    """

    plan: bytes
    boxes: bytes | None
    files: bytes

    @property
    def nbytes(self) -> int:
        """How many bytes that are."""
        return len(self.plan) + len(self.boxes or b"") + len(self.files)

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
    def unpacked(cls, data: bytes) -> RankBoxes:
        """Read :attr:`Message.boxes`."""
        table, alike, numbers = _parts(zlib.decompress(data), 3)
        tensors = [TensorKind(key, tuple(shape), dtype) for key, shape, dtype in json.loads(table)] if table else None
        return cls(tensors, alike, _boxes_in(_numbers(numbers)))


def table_digest(tensors: Sequence[TensorKind]) -> bytes:
    """Return a digest that is equal for equal tables."""
    return xxhash.xxh3_128_digest(_table(tensors))


def packed(index: Index, told: Told, last: Remembered | None) -> Message:
    """Return what this rank sends.

    Args:
        index: What this rank has written.
        told: What rank 0 has told.
        last: What this rank remembers.
    """
    kinds: dict[tuple[tuple[int, ...], tuple[Box, ...]], int] = {}
    alike = array("I")
    for tensor, held in zip(index.tensors, index.boxes, strict=True):
        alike.append(kinds.setdefault((tensor.shape, held), len(kinds)))
    numbers = array("q")
    for shape, held in kinds:
        numbers.extend((len(shape), len(held)))
        for offsets, lengths in held:
            numbers.extend((*offsets, *lengths))
    table = _table(index.tensors)
    whole = _joined(table, alike.tobytes(), numbers.tobytes())
    plan = xxhash.xxh3_128_digest(whole)
    files = b"".join(
        _FILE.pack(_SECTIONS.index(section), entry.size, int(entry.checksum.removeprefix("xxh3:"), 16))
        for section, entry in index.files.items()
    )
    if last is not None and (last.save_id, last.plan) == (told.last, plan):
        return Message(plan, None, files)
    if xxhash.xxh3_128_digest(table) == told.table:
        whole = _joined(b"", alike.tobytes(), numbers.tobytes())
    return Message(plan, zlib.compress(whole), files)


def _table(tensors: Sequence[TensorKind]) -> bytes:
    return json.dumps(tensors, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _joined(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def _parts(data: bytes, count: int) -> Iterator[bytes]:
    at = 0
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data, at)
        yield data[at + 8 : at + 8 + length]
        at += 8 + length


def _numbers(data: bytes) -> list[int]:
    numbers = array("q")
    numbers.frombytes(data)
    return numbers.tolist()


def _boxes_in(numbers: Sequence[int]) -> list[tuple[Box, ...]]:
    kinds, at = [], 0
    while at < len(numbers):
        dimensions, count = numbers[at], numbers[at + 1]
        at += 2
        held = []
        for _ in range(count):
            middle = at + dimensions
            held.append((tuple(numbers[at:middle]), tuple(numbers[middle : middle + dimensions])))
            at = middle + dimensions
        kinds.append(tuple(held))
    return kinds


class Memory:
    """What the ranks of one runtime remember of their last save together."""

    last: Remembered | None = None


_memories: WeakKeyDictionary[Runtime, Memory] = WeakKeyDictionary()
_lock = threading.Lock()  # ranks may be threads


def memory_of(runtime: Runtime) -> Memory:
    """Return what this rank remembers; empty for a new runtime."""
    with _lock:
        return _memories.setdefault(runtime, Memory())


def boxes_of_ranks(messages: Sequence[Message], last: Remembered | None) -> list[bytes]:
    """Return the packed boxes of all ranks: those that were sent, and those that rank 0 remembers.

    Raises:
        CheckpointError: A rank refers to a save that rank 0 does not remember so.
    """
    before: Mapping[int, tuple[bytes, bytes]] = {} if last is None or last.merged is None else last.merged.sent
    found = []
    for rank, message in enumerate(messages):
        if message.boxes is not None:
            found.append(message.boxes)
            continue
        plan, data = before.get(rank, (b"", b""))
        if plan != message.plan:
            raise CheckpointError(
                f"rank {rank} refers to a plan that rank 0 does not have.\n"
                "Save again; if that fails too, please report it."
            )
        found.append(data)
    return found
