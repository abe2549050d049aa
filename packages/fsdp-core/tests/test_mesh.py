"""The mesh as plain data: coordinates, peers and groups, against torch's own arrangement of ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fsdp_core import ProcessGroupRuntime
from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.sharding import DATA_AXES, MESH_AXES, Mesh
from fsdp_core.testing.refusals import assert_says, refusal

SIZES = list(itertools.product((1, 2), (1, 3), (1, 2), (1, 2)))


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks_are_numbered_row_by_row(sizes: tuple[int, ...]) -> None:
    mesh = Mesh(**dict(zip(MESH_AXES, sizes, strict=True)))
    ranks = torch.arange(mesh.world_size).view(sizes)
    for index, axis in enumerate(MESH_AXES):
        rows = ranks.movedim(index, -1).reshape(-1, sizes[index]).tolist()
        assert sorted(mesh.groups((axis,))) == sorted(map(tuple, rows))
    data = ranks.permute(2, 3, 0, 1).reshape(-1, mesh.size(DATA_AXES))
    for rank in range(mesh.world_size):
        (row,) = [row for row in data.tolist() if rank in row]
        assert mesh.peers(rank, DATA_AXES) == tuple(row)
        assert mesh.coordinate(rank, DATA_AXES) == row.index(rank)


@pytest.mark.parametrize(
    ("world_size", "asked", "words"),
    [
        (4, {"tensor_parallel_size": 3}, ["tensor_parallel_size=3 does not divide 4 ranks", "tensor_parallel_size=2"]),
        (6, {"data_parallel_size": 4}, ["data_parallel_size=4 is for 4 ranks", "there are 6", "start 4 ranks"]),
        (1, {"data_parallel_size": 2}, ["for 2 ranks", "there is 1", "data_parallel_size=1"]),
        (4, {"data_parallel_size": 3, "tensor_parallel_size": 3}, ["are for 9 ranks", "product is 4"]),
        (4, {"context_parallel_size": "all"}, ["context_parallel_size='all'", "positive integer, or 'auto'"]),
    ],
)
def test_sizes_that_do_not_fit(world_size: int, asked: dict[str, Any], words: list[str]) -> None:
    assert_says(refusal(UnsupportedCapabilityError, lambda: Mesh.of(world_size, **asked)), *words)


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({}, (1, 8, 1, 1)),
        ({"data_parallel_size": 8}, (1, 8, 1, 1)),
        ({"tensor_parallel_size": 2, "data_parallel_replicate_size": 2}, (2, 2, 1, 2)),
        ({"data_parallel_size": 4, "data_parallel_replicate_size": 2}, (2, 4, 1, 1)),
    ],
)
def test_auto_is_what_remains(asked: dict[str, Any], sizes: tuple[int, ...]) -> None:
    assert Mesh.of(8, **asked) == Mesh(**dict(zip(MESH_AXES, sizes, strict=True)))


def test_a_world_without_a_mesh_is_data_parallel() -> None:
    runtime = ProcessGroupRuntime()
    assert (runtime.mesh, runtime.data_parallel_rank, runtime.data_parallel_world_size) == (Mesh(), 0, 1)
    assert runtime.data is runtime
    assert runtime.by_data_parallel_rank(["state"]) == ["state"]
