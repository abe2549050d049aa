"""Rank 0's check that the chunks of all ranks cover every tensor exactly once.

Tensors that are alike on every rank are merged once. So the work grows with the number of ranks times the number of
different tensors, and not with the number of boxes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_core.checkpoint.format.chunks import StoredChunk, chunk_name, file_of_rank, files_of
from fsdp_core.checkpoint.format.manifest import StoredTensor
from fsdp_core.checkpoint.format.patterns import Pattern, PatternedChunks
from fsdp_core.checkpoint.indexes import Message, PackedBoxes, RankBoxes, Remembered, TensorKind, boxes_of_ranks
from fsdp_core.checkpoint.recognising import pattern_of
from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.state.coverage import Box

__all__ = ["MOST_LISTED", "Held", "Merged", "merge", "merged_from"]

MOST_LISTED = 2**14
"""Up to how many chunks a manifest lists each by itself, for people and for readers of version 1: 3 MB."""

_SHOWN = 20

Held = list[tuple[int, tuple[Box, ...]]]
"""The ranks that hold boxes of a tensor, in order, with their boxes."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The indexes of all ranks, merged; nothing in it is about one save.

    Attributes:
        tensors: The tensors, in rank 0's order.
        layouts: Where each is.
        sent: By rank, the digest of the boxes that it sent, and these.
    """

    tensors: Sequence[TensorKind]
    layouts: Sequence[Pattern | Held]
    sent: Mapping[int, tuple[bytes, PackedBoxes]]

    def stored(self, named: Callable[[str], str]) -> dict[str, StoredTensor]:
        """Return every tensor with its chunks, in rank 0's order.

        Args:
            named: Returns the files that hold a tensor's chunks, by its key, with ``*`` for the rank.

        Raises:
            CheckpointMismatchError: The boxes of a tensor leave a hole or overlap.
        """
        found, faults = _stored(zip(self.tensors, self.layouts, strict=True), named)
        if faults:
            raise _mismatch(faults)
        return found


def _stored(
    placed: Iterable[tuple[TensorKind, Pattern | Held]], named: Callable[[str], str]
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors whose boxes cover them, and what is wrong with the others."""
    found, faults = {}, {}
    for (key, shape, dtype_name), layout in placed:
        try:
            chunks = _chunks(key, shape, named(key), layout)
            found[key] = StoredTensor(shape=shape, dtype_name=dtype_name, chunks=chunks)
        except ValueError as error:
            faults[key] = f"{error} of shape {list(shape)}"
    return found, faults


def _chunks(
    key: str, shape: tuple[int, ...], files: str, layout: Pattern | Held
) -> PatternedChunks | tuple[StoredChunk, ...]:
    if isinstance(layout, Pattern):
        return PatternedChunks(key, files, layout)
    return tuple(
        StoredChunk(file=file_of_rank(files, rank), key=chunk_name(key, shape, box), offsets=box[0], lengths=box[1])
        for rank, boxes in layout
        for box in boxes
    )


def merged_from(tensors: Sequence[TensorKind], messages: Sequence[Message], last: Remembered | None) -> Merged:
    """Merge what all ranks have sent, or return what was made of the same before.

    Args:
        tensors: Rank 0's tensors.
        messages: What each rank has sent.
        last: What rank 0 remembers.

    Raises:
        CheckpointMismatchError: Ranks disagree on a tensor.
    """
    packed = boxes_of_ranks(messages, last)
    if last is not None and last.merged is not None and all(message.boxes is None for message in messages):
        return last.merged
    layouts = merge(tensors, [RankBoxes.unpacked(boxes) for boxes in packed])
    sent = {rank: (message.plan, boxes) for rank, (message, boxes) in enumerate(zip(messages, packed, strict=True))}
    return Merged(tensors=tensors, layouts=layouts, sent=sent)


def merge(tensors: Sequence[TensorKind], by_rank: Sequence[RankBoxes]) -> list[Pattern | Held]:
    """Merge the boxes of all ranks.

    Args:
        tensors: Rank 0's tensors.
        by_rank: The boxes by rank.

    Returns:
        Where each tensor is: in a pattern, or the boxes of each rank.

    Raises:
        CheckpointMismatchError: Ranks disagree on a tensor, or, if they do, boxes leave a hole or overlap.
    """
    faults: dict[str, str] = {}
    ordered = [_in_order_of(tensors, rank, one, faults) for rank, one in enumerate(by_rank)]
    layouts = _listed(ordered) if _count(ordered) <= MOST_LISTED else _recognised(tensors, ordered)
    if faults:
        sound = (one for one in zip(tensors, layouts, strict=True) if one[0].key not in faults)
        raise _mismatch(faults | _stored(sound, lambda _: files_of("state", "0" * 12))[1])
    return layouts


_Ordered = tuple[bytes, list[tuple[Box, ...]]]
"""For each of rank 0's tensors the number of its kind, as bytes, and the boxes of each kind."""


def _in_order_of(tensors: Sequence[TensorKind], rank: int, one: RankBoxes, faults: dict[str, str]) -> _Ordered:
    """Bring a rank's boxes into the order of rank 0's tensors, and note where the two disagree."""
    if one.table is None:
        return one.alike, one.kinds
    agreed = {tensor.key: tensor for tensor in tensors}
    numbers = _alike(one.alike)
    kind_of: dict[str, int] = {}
    for tensor, number in zip(one.table, numbers, strict=True):
        ours = agreed.get(tensor.key)
        if ours is None:
            faults.setdefault(tensor.key, f"rank {rank} has it, and rank 0 does not")
        elif ours != tensor:
            here, there = f"{ours.shape} {ours.dtype_name}", f"{tensor.shape} {tensor.dtype_name}"
            faults.setdefault(tensor.key, f"rank 0 has {here}, and rank {rank} has {there}")
        else:
            kind_of[tensor.key] = number
    none = len(one.kinds)
    return array("I", [kind_of.get(tensor.key, none) for tensor in tensors]).tobytes(), [*one.kinds, ()]


def _alike(data: bytes) -> array[int]:
    numbers = array("I")
    numbers.frombytes(data)
    return numbers


def _count(ordered: Sequence[_Ordered]) -> int:
    """The number of boxes of all tensors on all ranks."""
    used: dict[bytes, Counter[int]] = {}
    total = 0
    for alike, kinds in ordered:
        if alike not in used:
            used[alike] = Counter(_alike(alike))
        total += sum(len(kinds[number]) * count for number, count in used[alike].items())
    return total


def _listed(ordered: Sequence[_Ordered]) -> list[Pattern | Held]:
    tables = [(_alike(alike), kinds) for alike, kinds in ordered]
    count = len(tables[0][0])
    return [
        [(rank, held) for rank, (numbers, kinds) in enumerate(tables) if (held := kinds[numbers[at]])]
        for at in range(count)
    ]


def _recognised(tensors: Sequence[TensorKind], ordered: Sequence[_Ordered]) -> list[Pattern | Held]:
    """Find a pattern for tensors that are alike on every rank, once for all of them."""
    groups: dict[bytes, list[int]] = {}
    for rank, (alike, _) in enumerate(ordered):
        groups.setdefault(alike, []).append(rank)
    tables = {alike: _alike(alike) for alike in groups}
    everywhere = [0] * len(tensors)  # which tensors are alike under all groups that were looked at
    for numbers in tables.values():
        seen: dict[tuple[int, int], int] = {}
        everywhere = [seen.setdefault(both, len(seen)) for both in zip(everywhere, numbers, strict=True)]
    layouts: dict[int, Pattern | Held] = {}
    for at, (tensor, kind) in enumerate(zip(tensors, everywhere, strict=True)):
        if kind in layouts:
            continue
        boxes_by_rank: Held = []
        for alike, ranks in groups.items():
            number = tables[alike][at]
            boxes_by_rank += [(rank, boxes) for rank in ranks if (boxes := ordered[rank][1][number])]
        boxes_by_rank.sort(key=lambda rank_and_boxes: rank_and_boxes[0])
        layouts[kind] = pattern_of(tensor.shape, boxes_by_rank) or boxes_by_rank
    return [layouts[kind] for kind in everywhere]


def _mismatch(faults: Mapping[str, str]) -> CheckpointMismatchError:
    lines = [f"  {key!r}: {fault}" for key, fault in list(faults.items())[:_SHOWN]]
    more = [f"  … and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
    return CheckpointMismatchError(
        "\n".join(
            ["the ranks' chunks don't form full tensors, so nothing was saved:", *lines, *more,
             "Every rank must pass the same keys, and the boxes of copy 0 must cover each tensor exactly once."]
        )
    )  # fmt: skip
