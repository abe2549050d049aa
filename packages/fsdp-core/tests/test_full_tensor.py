"""Whole tensors from what ranks hold. That backends gather right is the conformance suite's to show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoint_ranks import ThreadRuntime, on_threads
from fsdp_core.checkpoint import Chunk, ChunkedTensor
from fsdp_core.errors import ShardingError
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.state.full_tensor import gather_full


def held(*rows: int, replica: int = 0) -> ChunkedTensor:
    """Rows of a tensor of shape (4, 2), each a chunk."""
    chunks = tuple(Chunk(offsets=(row, 0), data=torch.full((1, 2), float(row))) for row in rows)
    return ChunkedTensor(shape=(4, 2), dtype=torch.float32, chunks=chunks, replica=replica)


@pytest.mark.parametrize(
    ("by_rank", "fault"),
    [
        ((held(0, 1), held(3)), "nothing covers [2:3, 0:2]"),
        ((held(), held()), "nothing covers [0:4, 0:2]"),
        ((held(0, 1), held(2, 3, replica=1)), "nothing covers [2:4, 0:2]"),
        ((held(0, 1, 2), held(2, 3)), "two chunks cover [2:3, 0:2]"),
    ],
)
def test_what_no_rank_holds_is_told_by_all(by_rank: tuple[ChunkedTensor, ...], fault: str) -> None:
    def gather(runtime: ThreadRuntime) -> Any:
        return gather_full(by_rank[runtime.rank], runtime, "'net.weight'")

    for told in on_threads(2, gather):
        assert isinstance(told, ShardingError)
        assert str(told).startswith(f"'net.weight' of shape [4, 2] can't be gathered: {fault}, over all ranks.\n")


def test_one_rank_may_hold_all_or_there_may_be_nothing() -> None:
    alone = ProcessGroupRuntime()
    assert torch.equal(gather_full(held(3, 0, 1, 2), alone), torch.arange(4.0)[:, None].expand(4, 2))
    assert gather_full(ChunkedTensor(shape=(0, 2), dtype=torch.float32, chunks=()), alone).shape == (0, 2)
    scalar = ChunkedTensor(shape=(), dtype=torch.float32, chunks=(Chunk(offsets=(), data=torch.tensor(5.0)),))
    assert gather_full(scalar, alone) == 5
