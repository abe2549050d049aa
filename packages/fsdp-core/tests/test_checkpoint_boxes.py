"""Bytes of boxes: copied into one another, and read from chunks of every layout, as torch has them."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_checkpoints import in_pieces
from damaged_folders import save_alone
from fsdp_core.checkpoint import Chunk, ChunkedTensor
from fsdp_core.checkpoint.storage.tensor_bytes import TensorBytes, open_files
from fsdp_core.state.boxes import copy_into, cut, overlap


def bytes_of(tensor: torch.Tensor) -> bytearray:
    return bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_a_box_goes_where_torch_would_put_it(dtype: torch.dtype) -> None:
    source = random.Random(0)
    for _ in range(500):
        shape = [source.randint(1, 6) for _ in range(source.randint(0, 4))]
        lengths = [source.randint(1, size) for size in shape]
        offsets = [source.randint(0, size - length) for size, length in zip(shape, lengths, strict=True)]
        box = torch.randint(1, 100, lengths).to(dtype)
        expected = torch.zeros(shape, dtype=dtype)
        expected[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] = box
        target = bytearray(math.prod(shape) * dtype.itemsize)
        copy_into(memoryview(target), shape, offsets, memoryview(bytes_of(box)), dtype.itemsize, lengths)
        assert target == bytes_of(expected), (shape, offsets, lengths)


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (2, 3, 4), (1, 1, 7), (0, 3)], ids=str)
@pytest.mark.parametrize("most", [1, 8, 24, 1000])
def test_boxes_follow_one_another(shape: tuple[int, ...], most: int) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    boxes = list(cut(shape, 4, most))
    parts = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in boxes]
    assert torch.cat(parts).tolist() == list(range(math.prod(shape))) if parts else 0 in shape
    assert all(part.numel() == 1 or part.numel() * 4 <= most for part in parts)


def test_overlaps() -> None:
    assert overlap(((), ()), ((), ())) == ((), ())
    assert overlap(((0, 4), (3, 3)), ((2, 0), (5, 5))) == ((2, 4), (1, 1))
    assert overlap(((0, 4), (2, 3)), ((2, 0), (5, 5))) is None


WHOLE = torch.arange(6 * 5 * 4).reshape(6, 5, 4)


def grid() -> ChunkedTensor:
    edges = [range(0, 6, 4), range(0, 5, 2), range(0, 4, 3)]
    sizes = [4, 2, 3]
    return ChunkedTensor(
        shape=(6, 5, 4),
        dtype=torch.int64,
        chunks=tuple(
            Chunk(offsets=at, data=WHOLE[tuple(slice(o, o + n) for o, n in zip(at, sizes, strict=True))])
            for at in itertools.product(*edges)
        ),
    )


LAYOUTS: dict[str, Any] = {
    "whole": WHOLE,
    "rows": in_pieces(WHOLE, 0, 1, 4),
    "middle": in_pieces(WHOLE, 1, 3),
    "last": in_pieces(WHOLE, 2, 1, 2),
    "grid": grid(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_box_of_any_layout_is_read(tmp_path: Path, layout: str) -> None:
    save_alone(tmp_path / "a", {"model": {"w": LAYOUTS[layout]}})
    reader, source = TensorBytes(open_files(tmp_path / "a")), random.Random(1)
    for _ in range(100):
        lengths = [source.randint(1, size) for size in (6, 5, 4)]
        offsets = [source.randint(0, size - length) for size, length in zip((6, 5, 4), lengths, strict=True)]
        expected = WHOLE[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        assert reader.read("model/w", offsets, lengths) == bytes_of(expected), (offsets, lengths)
    reader.block_bytes = 48
    blocks = list(reader.source("model/w", (1, 5)).blocks())
    assert all(len(block) <= 48 for block in blocks)
    assert bytearray().join(blocks) == bytes_of(WHOLE[1:5])
