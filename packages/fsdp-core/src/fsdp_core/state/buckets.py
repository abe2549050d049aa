"""Gathers full tensors within a budget of memory: several small ones by one collective, and a large one by several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_core.runtime import Runtime
from fsdp_core.state.boxes import boxes
from fsdp_core.state.chunks import ChunkedTensor
from fsdp_core.state.coverage import Box

__all__ = ["MIN_RUN_BYTES", "Bucket", "BucketedTensor", "exchange", "fill_from", "plan_buckets", "run_bytes_within"]

#: What a rank sends in a bucket at least, whatever the budget: less would take longer to announce than to send.
MIN_RUN_BYTES = 4096
#: How much of a larger budget is used in host memory. Larger blocks are slower: glibc gives those of more than 32 MiB
#: back to the system when they are freed, and gets the next ones page by page.
_MAX_HOST_BYTES = 64 * 2**20
#: Where a tensor may begin in a run of bytes, so that it can be viewed in any dtype.
_ALIGNMENT = 16


class BucketedTensor(NamedTuple):
    """A tensor to gather.

    Attributes:
        shape: Its shape.
        dtype: The dtype that it is gathered in.
        boxes_by_rank: By rank, which copy of the tensor its boxes belong to, and the boxes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes_by_rank: Sequence[tuple[int, Sequence[Box]]]

    @property
    def is_on_every_rank(self) -> bool:
        """Whether each rank holds the full tensor, so that there is nothing to gather."""
        full_box = ((0,) * len(self.shape), self.shape)
        return 0 in self.shape or all(list(rank_boxes) == [full_box] for _, rank_boxes in self.boxes_by_rank)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Consecutive elements of a box, which one rank sends."""

    rank: int
    box: Box
    start: int
    length: int
    position: int  # of its first byte in what the rank sends


@dataclass(kw_only=True)
class Bucket:
    """What one collective gathers.

    Attributes:
        pieces: By tensor, the pieces that ranks send of it; none if each rank has the full tensor.
        completed: The tensors of which this bucket holds the last piece.
        run_bytes: How many bytes each rank sends.
    """

    pieces: dict[str, list[_Piece]] = field(default_factory=dict)
    completed: set[str] = field(default_factory=set)
    run_bytes: int = 0


def run_bytes_within(budget: int, world_size: int, device: torch.device) -> int:
    """How many bytes each rank may send at a time, so that gathering takes no more memory than ``budget``.

    The budget covers what the rank sends, what it receives from all ranks, and as much once more: gloo, and NCCL for
    lists of tensors, receive into memory of their own; later, it is for the tensor that the caller got last.
    """
    if device.type == "cpu":
        budget = min(budget, _MAX_HOST_BYTES)
    return max(MIN_RUN_BYTES, budget // (2 * world_size + 1) // _ALIGNMENT * _ALIGNMENT)


def plan_buckets(tensors: Mapping[str, BucketedTensor], world_size: int, max_run_bytes: int) -> list[Bucket]:
    """Divide tensors into buckets, in their order. All ranks plan the same.

    Ranks that hold the same box each send a part of it, so that replicas don't send zeros.

    Args:
        tensors: The tensors by name, each covered exactly once by the boxes of copy 0.
        world_size: The number of ranks.
        max_run_bytes: How many bytes a rank may send at a time.
    """
    buckets = [Bucket()]
    bytes_by_rank = [0] * world_size

    def begin_bucket() -> None:
        buckets.append(Bucket())
        bytes_by_rank[:] = [0] * world_size

    def append(name: str, piece: _Piece) -> None:
        bucket = buckets[-1]
        bucket.pieces[name].append(replace(piece, position=bytes_by_rank[piece.rank]))
        bytes_by_rank[piece.rank] += _aligned(piece.length * tensors[name].dtype.itemsize)
        bucket.run_bytes = max(bucket.run_bytes, bytes_by_rank[piece.rank])

    for name, tensor in tensors.items():
        pieces = [] if tensor.is_on_every_rank else list(_shares(tensor))
        needed_bytes = [0] * world_size
        for piece in pieces:
            needed_bytes[piece.rank] += _aligned(piece.length * tensor.dtype.itemsize)
        if buckets[-1].pieces and max(map(add, bytes_by_rank, needed_bytes)) > max_run_bytes:
            begin_bucket()
        buckets[-1].pieces[name] = []
        if max(needed_bytes) <= max_run_bytes:
            for piece in pieces:
                append(name, piece)
        else:
            for number, round_pieces in enumerate(_rounds(pieces, tensor.dtype.itemsize, max_run_bytes)):
                if number:
                    begin_bucket()
                    buckets[-1].pieces[name] = []
                for piece in round_pieces:
                    append(name, piece)
        buckets[-1].completed.add(name)
    return buckets


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _shares(tensor: BucketedTensor) -> Iterator[_Piece]:
    """Yield the elements that each rank sends of a tensor: ranks that hold the same box divide it among them."""
    owners: dict[Box, list[int]] = {}
    for rank, (_, rank_boxes) in enumerate(tensor.boxes_by_rank):
        for box in rank_boxes:
            owners.setdefault(box, []).append(rank)
    for replica, rank_boxes in tensor.boxes_by_rank:
        for box in rank_boxes if replica == 0 else ():
            elements = prod(box[1])
            share = -(-elements // len(owners[box]))
            for index, rank in enumerate(owners[box]):
                length = min(share, elements - index * share)
                if length > 0:
                    yield _Piece(rank=rank, box=box, start=index * share, length=length, position=0)


def _rounds(pieces: Sequence[_Piece], item_bytes: int, max_run_bytes: int) -> Iterator[list[_Piece]]:
    """Divide the pieces of a large tensor, so that no rank sends more than ``max_run_bytes`` in a round."""
    max_elements = max_run_bytes // item_bytes
    remaining: dict[int, list[_Piece]] = {}
    for piece in pieces:
        remaining.setdefault(piece.rank, []).append(piece)
    while remaining:
        round_pieces = []
        for rank in list(remaining):
            room = max_elements
            while room > 0 and remaining[rank]:
                piece = remaining[rank].pop(0)
                length = min(room, piece.length)
                round_pieces.append(replace(piece, length=length))
                if length < piece.length:
                    rest = replace(piece, start=piece.start + length, length=piece.length - length)
                    remaining[rank].insert(0, rest)
                room -= _aligned(length * item_bytes) // item_bytes
            if not remaining[rank]:
                del remaining[rank]
        yield round_pieces


@torch.no_grad()
def exchange(
    bucket: Bucket,
    tensors: Mapping[str, BucketedTensor],
    own: Mapping[str, ChunkedTensor],
    runtime: Runtime,
    flag: bool,
) -> tuple[Tensor, bool]:
    """Send what this rank holds of a bucket, and receive what all ranks hold. All ranks must call it.

    Args:
        bucket: The bucket.
        tensors: All tensors by name.
        own: What this rank holds of them.
        runtime: The ranks.
        flag: A bit to send along.

    Returns:
        The bytes of each rank, and whether any rank has sent the bit.
    """
    run = torch.empty(bucket.run_bytes + _ALIGNMENT, dtype=torch.uint8, device=runtime.device)
    run[-_ALIGNMENT:] = int(flag)
    for name, pieces in bucket.pieces.items():
        dtype = tensors[name].dtype
        data_by_box = {(tuple(chunk.offsets), tuple(chunk.data.shape)): chunk.data for chunk in own[name].chunks}
        for piece in pieces:
            if piece.rank != runtime.rank:
                continue
            data = data_by_box[piece.box]
            assert isinstance(data, Tensor)  # a rank's shards of a model are in memory
            for offsets, lengths, position in boxes(piece.box[1], piece.start, piece.length):
                begin = piece.position + position * dtype.itemsize
                target = run[begin : begin + prod(lengths) * dtype.itemsize].view(dtype).view(lengths)
                target.copy_(data[_slices(offsets, lengths)])
    gathered = runtime.all_gather(run)
    return gathered, bool(gathered[:, -1].any())


@torch.no_grad()
def fill_from(gathered: Tensor, pieces: Sequence[_Piece], full: Tensor) -> None:
    """Copy the pieces of a tensor from what :func:`exchange` has returned."""
    item_bytes = full.dtype.itemsize
    for piece in pieces:
        for offsets, lengths, position in boxes(piece.box[1], piece.start, piece.length):
            begin = piece.position + position * item_bytes
            source = gathered[piece.rank, begin : begin + prod(lengths) * item_bytes].view(full.dtype).view(lengths)
            full[_slices(tuple(map(add, piece.box[0], offsets)), lengths)] = source


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))
