"""What stands in a state to save for a tensor that the checkpoint leaves out: its base has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["LeftOut"]


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A tensor that is not saved, because the base that its module was built with has it.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        digest: The digest of its values (see :mod:`fsdp_core.state.digests`).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: str
