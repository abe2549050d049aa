"""The safetensors container, against the library of that name."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
import torch
import xxhash
from safetensors.torch import load as load_bytes
from torch import Tensor

from chunked_tensors import slices_of
from fsdp_core.checkpoint.format import safetensors_file
from fsdp_core.checkpoint.format.safetensors_file import parse_header, read_box, write_safetensors
from fsdp_core.errors import CheckpointFormatError, CheckpointValueError
from fsdp_core.state.dtypes import SAFETENSORS_NAMES


def written(tensors: dict[str, Tensor]) -> bytes:
    stream = io.BytesIO()
    size, digest = write_safetensors(stream, tensors)
    data = stream.getvalue()
    assert (size, digest) == (len(data), xxhash.xxh3_64_hexdigest(data))
    return data


def reader(data: bytes) -> Callable[[memoryview, int], None]:
    def read_into(buffer: memoryview, start: int) -> None:
        buffer[:] = data[start : start + len(buffer)]

    return read_into


def header_of(data: bytes) -> dict[str, safetensors_file.FileTensor]:
    return parse_header(lambda start, end: data[start:end], len(data), "the file")


@pytest.mark.parametrize("dtype", SAFETENSORS_NAMES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3), (2, 1, 3)], ids=str)
def test_the_library_reads_what_is_written(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    # Bytes of zeros and ones are a value of every dtype, bool included.
    count = torch.Size(shape).numel() * dtype.itemsize
    tensor = torch.randint(0, 2, (count,), dtype=torch.uint8).view(dtype).reshape(shape)
    data = written({"x": tensor, "odd": torch.ones(3, dtype=torch.uint8)})
    back = load_bytes(data)
    assert (back["x"].dtype, back["x"].shape) == (dtype, tensor.shape)
    assert back["x"].view(torch.uint8).equal(tensor.view(torch.uint8)) if shape else True
    assert back["odd"].tolist() == [1, 1, 1]
    where = header_of(data)["x"]
    assert (where.shape, where.dtype) == (shape, dtype)
    assert where.start % dtype.itemsize == 0 or not count
    out = torch.empty(shape, dtype=dtype)
    read_box(reader(data), where, (0,) * len(shape), out)
    assert out.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("staging", [8, 40, 2**20])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x,
        lambda x: x.mT,
        lambda x: x[:, ::2],
        lambda x: x[3:, 1:],
        lambda x: x[:1, :1].expand(9, 7),
        lambda x: x.reshape(3, 3, 7).permute(2, 0, 1),
        lambda x: torch.nn.Parameter(x),
        lambda x: (x + 1j).conj(),
        lambda x: (x + 1j).conj().imag,
    ],
    ids=["plain", "transposed", "strided", "offset", "expanded", "permuted", "parameter", "conjugated", "negated"],
)
def test_writes_a_tensor_as_it_looks(
    change: Callable[[Tensor], Tensor], staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "STAGING_BYTES", staging)
    tensor = change(torch.arange(63.0).reshape(9, 7))
    assert load_bytes(written({"x": tensor}))["x"].equal(tensor.detach().resolve_conj())


@pytest.mark.parametrize("staging", [8, 24, 100, 2**20])
@pytest.mark.parametrize("run", [1, 2**20], ids=["long_runs_alone", "rows_together"])
@pytest.mark.parametrize("target", ["contiguous", "strided", "other_dtype"])
def test_reads_any_box_into_any_target(target: str, run: int, staging: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "STAGING_BYTES", staging)
    monkeypatch.setattr(safetensors_file, "_DIRECT_RUN_BYTES", run)
    whole = torch.arange(5 * 4 * 3, dtype=torch.int32).reshape(5, 4, 3)
    data = written({"x": whole})
    where = header_of(data)["x"]
    for offsets, lengths in [
        ((0, 0, 0), (5, 4, 3)),
        ((2, 0, 0), (3, 4, 3)),
        ((1, 1, 0), (3, 2, 3)),
        ((0, 0, 2), (5, 4, 1)),
        ((4, 3, 2), (1, 1, 1)),
        ((1, 2, 1), (2, 1, 2)),
    ]:
        dtype = torch.float64 if target == "other_dtype" else torch.int32
        out = torch.full(lengths, -1, dtype=dtype)
        if target == "strided":
            out = torch.full((*lengths[::-1], 2), -1, dtype=dtype)[..., 0].permute(2, 1, 0)
        read_box(reader(data), where, offsets, out)
        assert out.equal(whole[slices_of(offsets, lengths)].to(dtype))


def test_a_tensor_that_has_no_place_in_a_file_is_refused_before_anything_is_written() -> None:
    stream = io.BytesIO()
    with pytest.raises(CheckpointValueError, match=r"can't save 'x': .* is not dense"):
        write_safetensors(stream, {"x": torch.zeros(2).to_sparse()})
    assert not stream.getvalue()


def made(header: object, body: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32") -> dict[str, object]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02\x00\x00",
        made(entry(), b"\0" * 7),
        made(entry(), b"\0" * 9),
        made(entry(), b"\0" * 8, length=2**63),
        made(entry(), b"\0" * 8, length=1),
        made(b"not json", b""),
        made(b"[" * 100_000, b""),
        made([], b""),
        made(b'"x"', b""),
        made({"x": 1}, b""),
        made({"x": {}}, b""),
        made(entry(dtype="Q7"), b"\0" * 8),
        made(entry(dtype=[1]), b"\0" * 8),
        made(entry(shape=[-2]), b"\0" * 8),
        made(entry(shape=[2.0]), b"\0" * 8),
        made(entry(shape=[2**62, 4]), b"\0" * 8),
        made(entry(shape=[True]), b"\0" * 8),
        made(entry(offsets=(8, 16)), b"\0" * 16),
        made(entry(offsets=(0, 2**40)), b"\0" * 8),
        made(entry(offsets=(8, 0)), b"\0" * 8),
        made(entry(offsets=(0,)), b"\0" * 8),
        made({**entry(), "y": entry()["x"]}, b"\0" * 8),
    ],
    ids=range(23),
)
def test_a_damaged_or_hostile_header_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointFormatError, match="the file is not a safetensors file"):
        header_of(data)
