"""Rank 0's check: what all ranks have written makes whole tensors, each element once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_core.checkpoint.format.manifest import FileEntry, StoredChunk, StoredTensor
from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.state.coverage import Box

if TYPE_CHECKING:
    from fsdp_core.checkpoint.planning import Plan, Section

__all__ = ["Index", "chunk_name", "file_name", "merge"]

_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Index:
    """What one rank has written.

    Attributes:
        tensors: Each tensor that it knows of: key, shape, dtype, and the boxes of it that it has written.
        files: Its files.
    """

    tensors: list[tuple[str, tuple[int, ...], str, list[Box]]]
    files: dict[str, FileEntry]


def file_name(section: Section, save_id: str, rank: int) -> str:
    """The file for one rank's chunks of a section.

    Example:
        >>> file_name("model", "0123456789ab", 3)
        'model/0123456789ab-rank-00003.safetensors'
    """
    return f"{section}/{save_id}-rank-{rank:05d}.safetensors"


def chunk_name(key: str, shape: tuple[int, ...], box: Box) -> str:
    """The name of a chunk in its file: the tensor's key, and where the chunk begins if it isn't the whole tensor.

    A key with an ``@`` always gets the second part, so that no two chunks share a name.

    Example:
        >>> chunk_name("model/wte.weight", (4, 2), ((2, 0), (2, 2)))
        'model/wte.weight@2,0'
    """
    offsets, lengths = box
    return key if lengths == shape and "@" not in key else f"{key}@{','.join(map(str, offsets))}"


def merge(plan: Plan, save_id: str, indexes: Sequence[Index]) -> dict[str, StoredTensor]:
    """Put together what the ranks have written.

    Args:
        plan: Rank 0's plan.
        save_id: What the names of the files carry.
        indexes: What each rank has written, by rank.

    Returns:
        Every tensor with its chunks, in rank 0's order.

    Raises:
        CheckpointMismatchError: Ranks disagree on a tensor, or their boxes leave a hole or overlap.
    """
    faults: dict[str, str] = {}
    boxes: dict[str, list[tuple[int, Box]]] = {key: [] for key in plan.stored}
    agreed = {key: (shape, dtype) for key, shape, dtype, _ in indexes[0].tensors}
    for rank, index in enumerate(indexes):
        for key, shape, dtype, parts in index.tensors:
            if key not in agreed:
                faults.setdefault(key, f"rank {rank} has it, and rank 0 has not")
            elif agreed[key] != (shape, dtype):
                ours = agreed[key]
                faults.setdefault(key, f"rank 0 has {ours[0]} {ours[1]}, and rank {rank} has {shape} {dtype}")
            else:
                boxes[key] += [(rank, box) for box in parts]
    tensors = {}
    for key, chunks in boxes.items():
        shape, dtype = agreed[key]
        if key in faults:
            continue
        try:
            tensors[key] = StoredTensor(
                shape=shape,
                dtype_name=dtype,
                chunks=tuple(
                    StoredChunk(
                        file=file_name(plan.section_of[key], save_id, rank),
                        key=chunk_name(key, shape, box),
                        offsets=box[0],
                        lengths=box[1],
                    )
                    for rank, box in chunks
                ),
            )
        except ValueError as error:
            faults[key] = f"{error} of the shape {list(shape)}"
    if faults:
        lines = [f"  {key!r}: {fault}" for key, fault in list(faults.items())[:_SHOWN]]
        more = [f"  … and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise CheckpointMismatchError(
            "\n".join(
                ["the ranks' chunks don't make whole tensors, so nothing was saved:", *lines, *more,
                 "Every rank must give the same keys, and the boxes of copy 0 must cover each tensor once."]
            )
        )  # fmt: skip
    return tensors
