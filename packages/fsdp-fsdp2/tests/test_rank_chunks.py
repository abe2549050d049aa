"""Chunks that are made when they are used, beside torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from fsdp_fsdp2.torch_private.rank_chunks import Chunks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize("shape", [(0, 2), (1, 3), (2,), (5, 3), (12, 2), (3, 7, 2)])
def test_chunks_are_those_of_torch(shape: tuple[int, ...], ranks: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for dim in range(tensor.dim()):
        chunks = Chunks(tensor, ranks, dim)
        for rank, expected in enumerate(_chunk_with_empty(tensor, ranks, dim)):
            torch.testing.assert_close(chunks[rank], expected)
            assert not expected.numel() or chunks[rank].data_ptr() == expected.data_ptr()
