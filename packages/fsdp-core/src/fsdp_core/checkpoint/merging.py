"""Rank 0's check that the chunks of all ranks cover every tensor exactly once.

Tensors whose boxes are equal on every rank are merged once. So the work grows with the number of ranks times the
number of different tensors, and not with the number of boxes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_core.checkpoint.format.chunks import StoredChunk, chunk_name
from fsdp_core.checkpoint.format.file_names import file_of_rank, files_of
from fsdp_core.checkpoint.format.manifest import StoredTensor
from fsdp_core.checkpoint.format.patterns import Pattern, PatternedChunks
from fsdp_core.checkpoint.indexes import LastSave, Message, PackedBoxes, RankBoxes, TensorSpec, collect_boxes
from fsdp_core.checkpoint.recognising import pattern_of
from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.state.coverage import Box

__all__ = ["MOST_LISTED", "BoxesByRank", "Merged", "merge", "merge_messages"]

MOST_LISTED = 2**14
"""Up to this many chunks, a manifest lists each, for people and for readers of version 1. That takes 3 MB at most."""

_MOST_SHOWN = 20

BoxesByRank = list[tuple[int, tuple[Box, ...]]]
"""The ranks that hold boxes of a tensor, in order, with their boxes."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The indexes of all ranks, merged. Later saves of the same plan reuse it.

    Attributes:
        tensors: The tensors, in rank 0's order.
        layouts: For each tensor its pattern, or the boxes of each rank.
        sent_boxes: By rank, the digest of the boxes that it sent, and these boxes.
    """

    tensors: Sequence[TensorSpec]
    layouts: Sequence[Pattern | BoxesByRank]
    sent_boxes: Mapping[int, tuple[bytes, PackedBoxes]]

    def stored_tensors(self, file_pattern: Callable[[str], str]) -> dict[str, StoredTensor]:
        """Return every tensor with its chunks, in rank 0's order.

        Args:
            file_pattern: Returns the files that hold a tensor's chunks, by its key, with ``*`` for the rank.

        Raises:
            CheckpointMismatchError: The boxes of a tensor leave a hole or overlap.
        """
        tensors, faults = _stored_tensors(zip(self.tensors, self.layouts, strict=True), file_pattern)
        if faults:
            raise _mismatch(faults)
        return tensors


def _stored_tensors(
    tensors_with_layouts: Iterable[tuple[TensorSpec, Pattern | BoxesByRank]], file_pattern: Callable[[str], str]
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors whose boxes cover them, and what is wrong with the others."""
    tensors = {}
    faults = {}
    for (key, shape, dtype_name), layout in tensors_with_layouts:
        try:
            chunks = _chunks(key, shape, file_pattern(key), layout)
            tensors[key] = StoredTensor(shape=shape, dtype_name=dtype_name, chunks=chunks)
        except ValueError as error:
            faults[key] = f"{error} of shape {list(shape)}"
    return tensors, faults


def _chunks(
    key: str, shape: tuple[int, ...], files: str, layout: Pattern | BoxesByRank
) -> PatternedChunks | tuple[StoredChunk, ...]:
    if isinstance(layout, Pattern):
        return PatternedChunks(key, files, layout)
    return tuple(
        StoredChunk(file=file_of_rank(files, rank), key=chunk_name(key, shape, box), offsets=box[0], lengths=box[1])
        for rank, boxes in layout
        for box in boxes
    )


def merge_messages(tensors: Sequence[TensorSpec], messages: Sequence[Message], last: LastSave | None) -> Merged:
    """Merge the messages of all ranks; if they are those of the last save, return its result.

    Args:
        tensors: Rank 0's tensors.
        messages: What each rank has sent.
        last: What rank 0 remembers.

    Raises:
        CheckpointMismatchError: Ranks disagree on a tensor.
    """
    packed_boxes = collect_boxes(messages, last)
    if last is not None and last.merged is not None and all(message.boxes is None for message in messages):
        return last.merged
    layouts = merge(tensors, [RankBoxes.from_packed(boxes) for boxes in packed_boxes])
    digests = [message.boxes_digest for message in messages]
    sent_boxes = dict(enumerate(zip(digests, packed_boxes, strict=True)))
    return Merged(tensors=tensors, layouts=layouts, sent_boxes=sent_boxes)


def merge(tensors: Sequence[TensorSpec], boxes_by_rank: Sequence[RankBoxes]) -> list[Pattern | BoxesByRank]:
    """Merge the boxes of all ranks.

    Args:
        tensors: Rank 0's tensors.
        boxes_by_rank: The boxes that each rank has sent.

    Returns:
        Where each tensor is: in a pattern, or the boxes of each rank.

    Raises:
        CheckpointMismatchError: Ranks disagree on a tensor. The message then also lists holes and overlaps of boxes.
    """
    faults: dict[str, str] = {}
    ordered = [_reorder_boxes(tensors, rank, rank_boxes, faults) for rank, rank_boxes in enumerate(boxes_by_rank)]
    layouts = _list_boxes(ordered) if _count_boxes(ordered) <= MOST_LISTED else _find_patterns(tensors, ordered)
    if faults:
        # The tensors on which ranks agree are checked too, for the message. The names of their files don't matter.
        agreed = [pair for pair in zip(tensors, layouts, strict=True) if pair[0].key not in faults]
        _, further_faults = _stored_tensors(agreed, lambda _: files_of("state", "0" * 12))
        raise _mismatch(faults | further_faults)
    return layouts


class _OrderedBoxes(NamedTuple):
    """The boxes of one rank, in the order of rank 0's tensors.

    Attributes:
        packed_ids: For each of rank 0's tensors the index of its set of boxes, as bytes of an array of 32-bit numbers.
        box_sets: The sets of boxes.
    """

    packed_ids: bytes
    box_sets: list[tuple[Box, ...]]


def _reorder_boxes(
    tensors: Sequence[TensorSpec], rank: int, rank_boxes: RankBoxes, faults: dict[str, str]
) -> _OrderedBoxes:
    """Bring a rank's boxes into the order of rank 0's tensors, and note where the two disagree."""
    if rank_boxes.table is None:
        return _OrderedBoxes(rank_boxes.box_set_ids, rank_boxes.box_sets)
    tensors_of_first = {tensor.key: tensor for tensor in tensors}
    id_of_key: dict[str, int] = {}
    for tensor, set_id in zip(rank_boxes.table, _unpack_ids(rank_boxes.box_set_ids), strict=True):
        tensor_of_first = tensors_of_first.get(tensor.key)
        if tensor_of_first is None:
            faults.setdefault(tensor.key, f"rank {rank} has it, and rank 0 does not")
        elif tensor_of_first != tensor:
            spec_on_first = f"{tensor_of_first.shape} {tensor_of_first.dtype_name}"
            spec_on_rank = f"{tensor.shape} {tensor.dtype_name}"
            faults.setdefault(tensor.key, f"rank 0 has {spec_on_first}, and rank {rank} has {spec_on_rank}")
        else:
            id_of_key[tensor.key] = set_id
    id_of_empty_set = len(rank_boxes.box_sets)  # of the set that is appended below
    ids = array("I", [id_of_key.get(tensor.key, id_of_empty_set) for tensor in tensors])
    return _OrderedBoxes(ids.tobytes(), [*rank_boxes.box_sets, ()])


def _unpack_ids(packed_ids: bytes) -> array[int]:
    ids = array("I")
    ids.frombytes(packed_ids)
    return ids


def _count_boxes(ordered: Sequence[_OrderedBoxes]) -> int:
    """The number of boxes of all tensors on all ranks."""
    id_counts: dict[bytes, Counter[int]] = {}  # counted once for all ranks with equal ids
    total = 0
    for packed_ids, box_sets in ordered:
        if packed_ids not in id_counts:
            id_counts[packed_ids] = Counter(_unpack_ids(packed_ids))
        total += sum(len(box_sets[set_id]) * count for set_id, count in id_counts[packed_ids].items())
    return total


def _list_boxes(ordered: Sequence[_OrderedBoxes]) -> list[Pattern | BoxesByRank]:
    """Return the boxes of each tensor, as every rank lists them."""
    boxes_of_ranks = [
        [rank_boxes.box_sets[set_id] for set_id in _unpack_ids(rank_boxes.packed_ids)] for rank_boxes in ordered
    ]
    return [
        [(rank, boxes) for rank, boxes in enumerate(boxes_of_tensor) if boxes]
        for boxes_of_tensor in zip(*boxes_of_ranks, strict=True)
    ]


def _find_patterns(tensors: Sequence[TensorSpec], ordered: Sequence[_OrderedBoxes]) -> list[Pattern | BoxesByRank]:
    """Find a pattern for tensors that have equal boxes on every rank, once for all of them."""
    # Most ranks have equal ids, which are unpacked once.
    ids_by_packed = {packed_ids: _unpack_ids(packed_ids) for packed_ids, _ in ordered}
    # Tensors of one class have equal boxes on all ranks. Each distinct array of ids divides the classes further.
    classes = [0] * len(tensors)
    for ids in ids_by_packed.values():
        class_of_pair: dict[tuple[int, int], int] = {}
        classes = [class_of_pair.setdefault(pair, len(class_of_pair)) for pair in zip(classes, ids, strict=True)]
    layout_of_class: dict[int, Pattern | BoxesByRank] = {}
    for index, (tensor, tensor_class) in enumerate(zip(tensors, classes, strict=True)):
        if tensor_class in layout_of_class:
            continue
        boxes_by_rank: BoxesByRank = []
        for rank, (packed_ids, box_sets) in enumerate(ordered):
            boxes = box_sets[ids_by_packed[packed_ids][index]]
            if boxes:
                boxes_by_rank.append((rank, boxes))
        layout_of_class[tensor_class] = pattern_of(tensor.shape, boxes_by_rank) or boxes_by_rank
    return [layout_of_class[tensor_class] for tensor_class in classes]


def _mismatch(faults: Mapping[str, str]) -> CheckpointMismatchError:
    lines = [f"  {key!r}: {fault}" for key, fault in list(faults.items())[:_MOST_SHOWN]]
    more = [f"  … and {len(faults) - _MOST_SHOWN} more"] if len(faults) > _MOST_SHOWN else []
    return CheckpointMismatchError(
        "\n".join(
            ["the ranks' chunks don't form full tensors, so nothing was saved:", *lines, *more,
             "Every rank must pass the same keys, and the boxes of copy 0 must cover each tensor exactly once."]
        )
    )  # fmt: skip
