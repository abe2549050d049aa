"""A handle to a tensor in a checkpoint, from which shards are filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.state.chunks import Chunk

__all__ = ["SavedTensor", "StoredBoxes"]


class StoredBoxes(Protocol):
    """Reads the boxes of one saved tensor."""

    def read_into(self, chunk: Chunk) -> None:
        """Read into a box inside the tensor, in place."""


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor in a checkpoint. Its bytes are not read until they are needed.

    Attributes:
        key: Its key in the manifest, such as ``model/wte.weight``.
        shape: Its shape.
        dtype: Its dtype.
        digest: The digest of its values, if the checkpoint leaves it out: its base has it. ``None`` for any other.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: str | None = None
    _boxes: StoredBoxes = field(repr=False)

    if not TYPE_CHECKING:  # type checkers see the declared attributes only

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # looked up by copy and the like
                raise AttributeError(name)
            raise AttributeError(
                f".{name} is not supported by a SavedTensor, whose values are still in the checkpoint.\nCall "
                "value.full() for the full tensor, also in a hook such as on_load_checkpoint(), and store the result."
            )

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read a box.

        Args:
            offsets: Where the box begins, one number per dimension.
            lengths: Its shape.

        Returns:
            A new CPU tensor of shape ``lengths``.
        """
        out = torch.empty(tuple(lengths), dtype=self.dtype)
        self.read_into(Chunk(offsets=tuple(offsets), data=out))
        return out

    def full(self) -> Tensor:
        """Read the full tensor into a new CPU tensor."""
        return self.read((0,) * len(self.shape), self.shape)

    def read_into(self, chunk: Chunk) -> None:
        """Read into a box, in place. Values are converted if its dtype or device differs.

        Args:
            chunk: The box: where it begins in this tensor, and the memory to fill.

        Raises:
            CheckpointMismatchError: The box does not lie inside this tensor.
            CheckpointFormatError: The file has changed since the load began.
        """
        assert isinstance(chunk.data, Tensor)
        box = tuple(chunk.data.shape)
        if not len(box) == len(chunk.offsets) == len(self.shape) or any(
            offset < 0 or offset + length > size
            for offset, length, size in zip(chunk.offsets, box, self.shape, strict=True)
        ):
            raise CheckpointMismatchError(
                f"{self.key!r} has shape {self.shape}, so it has no box of shape {box} at {tuple(chunk.offsets)}"
            )
        self._boxes.read_into(chunk)
