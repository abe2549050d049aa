"""Rank 0's check that the chunks of all ranks cover every tensor exactly once."""

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
    """The tensors and files that one rank has written.

    Attributes:
        tensors: The key, shape and dtype of each tensor of the state, and the boxes of it that this rank has written.
        files: The rank's files.
    """

    tensors: list[tuple[str, tuple[int, ...], str, list[Box]]]
    files: dict[str, FileEntry]


def file_name(section: Section, save_id: str, rank: int) -> str:
    """Return the name of the file for one rank's chunks of a section.

    Example:
        >>> file_name("model", "0123456789ab", 3)
        'model/0123456789ab-rank-00003.safetensors'
    """
    return f"{section}/{save_id}-rank-{rank:05d}.safetensors"


def chunk_name(key: str, shape: tuple[int, ...], box: Box) -> str:
    """Return the name of a chunk in its file: the tensor's key, and the chunk's offsets if it isn't the full tensor.

    A key with an ``@`` always gets the offsets, so that no two chunks share a name.

    Example:
        >>> chunk_name("model/wte.weight", (4, 2), ((2, 0), (2, 2)))
        'model/wte.weight@2,0'
    """
    offsets, lengths = box
    return key if lengths == shape and "@" not in key else f"{key}@{','.join(map(str, offsets))}"


def merge(plan: Plan, save_id: str, indexes: Sequence[Index]) -> dict[str, StoredTensor]:
    """Merge the indexes of all ranks.

    Args:
        plan: Rank 0's plan.
        save_id: The save id in the names of the files.
        indexes: The indexes by rank.

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
                faults.setdefault(key, f"rank {rank} has it, and rank 0 does not")
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
            faults[key] = f"{error} of shape {list(shape)}"
    if faults:
        lines = [f"  {key!r}: {fault}" for key, fault in list(faults.items())[:_SHOWN]]
        more = [f"  … and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise CheckpointMismatchError(
            "\n".join(
                ["the ranks' chunks don't form full tensors, so nothing was saved:", *lines, *more,
                 "Every rank must pass the same keys, and the boxes of copy 0 must cover each tensor exactly once."]
            )
        )  # fmt: skip
    return tensors
