"""Ranks of a host that write one after another, from what is read only then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_ranks import ThreadRuntime, on_threads
from damaged_folders import save_alone
from fsdp_core.checkpoint import Chunk, ChunkedTensor, load_state_dict
from fsdp_core.errors import CheckpointError
from fsdp_core.testing.refusals import assert_says

ROWS = 3


class Source:
    """A rank's rows, which exist only while they are read."""

    dtype = torch.float32

    def __init__(self, rank: int, read: Callable[[int], None]) -> None:
        self.shape, self._rank, self._read = (ROWS, 2), rank, read

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        self._read(self._rank)
        return torch.full(tuple(lengths), float(self._rank))


def saved(path: Path, runtime: ThreadRuntime, hosts: int, read: Callable[[int], None]) -> None:
    runtime.local_rank = runtime.rank % (runtime.world_size // hosts)
    rows = ChunkedTensor(
        shape=(ROWS * runtime.world_size, 2),
        dtype=torch.float32,
        chunks=(Chunk(offsets=(ROWS * runtime.rank, 0), data=Source(runtime.rank, read)),),
    )
    save_alone(path, {"model": {"rows": rows}}, runtime=runtime, one_after_another=True)


@pytest.mark.parametrize(("ranks", "hosts"), [(1, 1), (3, 1), (4, 2)])
def test_ranks_of_a_host_write_in_turn_and_hosts_at_once(tmp_path: Path, ranks: int, hosts: int) -> None:
    order: list[int] = []
    together = threading.Barrier(hosts)

    def read(rank: int) -> None:
        together.wait(timeout=20)  # of each host one, or this breaks
        order.append(rank % (ranks // hosts))

    assert on_threads(ranks, lambda runtime: saved(tmp_path / "c", runtime, hosts, read)) == [None] * ranks
    assert order == sorted(order)
    want = torch.arange(ranks).repeat_interleave(ROWS).float()[:, None].expand(-1, 2)
    assert torch.equal(load_state_dict(tmp_path / "c")["rows"], want)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_after_a_rank_that_fails_none_writes_and_all_raise(tmp_path: Path, bad: int) -> None:
    asked: list[int] = []

    def read(rank: int) -> None:
        asked.append(rank)
        if rank == bad:
            raise OSError(5, "the device is gone")

    results: list[Any] = on_threads(3, lambda runtime: saved(tmp_path / "c", runtime, 1, read))
    for error in results:
        assert isinstance(error, CheckpointError)
        assert_says(str(error), "the device is gone", f"on rank {bad} of 3")
    assert asked == list(range(bad + 1))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
