"""Writes files for ``torch.load`` tensor by tensor, with at most one block of a tensor in memory."""

from __future__ import annotations

import io
import math
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pickle import Pickler
from typing import Any, BinaryIO, cast

import torch

from fsdp_core.checkpoint.storage.tensor_bytes import BytesSource
from fsdp_core.state.dtypes import DTYPES

__all__ = ["ArrayToWrite", "TensorToWrite", "TorchZip"]

_ALIGNMENT = 64  # of each tensor's first byte, as in torch.save, for torch.load(mmap=True)
_PROTOCOL = 2  # the protocol that torch.save writes and torch.load(weights_only=True) reads
_STORAGES = {
    "float64": torch.DoubleStorage,
    "float32": torch.FloatStorage,
    "float16": torch.HalfStorage,
    "bfloat16": torch.BFloat16Storage,
    "int64": torch.LongStorage,
    "int32": torch.IntStorage,
    "int16": torch.ShortStorage,
    "int8": torch.CharStorage,
    "uint8": torch.ByteStorage,
    "bool": torch.BoolStorage,
    "complex64": torch.ComplexFloatStorage,
}


@dataclass(frozen=True, kw_only=True)
class TensorToWrite:
    """Placeholder for a tensor in the value of a :class:`TorchZip`.

    Attributes:
        name: Identifies the tensor: placeholders with the same name share one tensor in the file.
        source: The source of its bytes.
    """

    name: str
    source: BytesSource = field(compare=False, repr=False)


class ArrayToWrite(TensorToWrite):
    """Placeholder for a small tensor that can also be read as a numpy array."""

    def numpy(self) -> Any:
        """Read it as a numpy array, which becomes part of the pickle instead of a tensor of the file."""
        data = bytearray().join(self.source.blocks())
        flat = torch.frombuffer(data, dtype=DTYPES[self.source.dtype_name]) if data else torch.empty(0)
        return flat.to(DTYPES[self.source.dtype_name]).reshape(self.source.shape).numpy()


class TorchZip:
    """Writes the file format of ``torch.save``.

    Args:
        value: A picklable value, with a :class:`TensorToWrite` in place of each tensor.
    """

    def __init__(self, value: Any) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(value)
        self._pickled = buffer.getvalue()
        self._tensors = list(pickler.tensors.values())

    @property
    def nbytes(self) -> int:
        """The size of its tensors in bytes."""
        return sum(tensor.source.nbytes for tensor in self._tensors)

    @property
    def tensors(self) -> int:
        """The number of its tensors."""
        return len(self._tensors)

    def write(self, stream: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        """Write the file.

        Args:
            stream: A binary stream opened for writing; it need not be seekable.
            on_bytes: Called with the number of bytes that have just been written.
        """
        with zipfile.ZipFile(cast("BinaryIO", _UnseekableStream(stream)), "w") as archive:
            _add_file(archive, "archive/data.pkl", [self._pickled])
            _add_file(archive, "archive/byteorder", [sys.byteorder.encode()])
            for number, tensor in enumerate(self._tensors):
                _add_file(archive, f"archive/data/{number}", tensor.source.blocks(), on_bytes)
            _add_file(archive, "archive/version", [b"3\n"])


class _Pickler(Pickler):
    """Replaces a tensor with a reference to its bytes, as ``torch.save`` does."""

    def __init__(self, buffer: BinaryIO) -> None:
        super().__init__(buffer, _PROTOCOL)
        self.tensors: dict[str, TensorToWrite] = {}
        self._numbers: dict[str, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        return obj.address if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, TensorToWrite):
            return NotImplemented
        self.tensors.setdefault(obj.name, obj)
        number = self._numbers.setdefault(obj.name, len(self._numbers))
        source = self.tensors[obj.name].source
        count = math.prod(source.shape)
        # An empty tensor shows how torch rebuilds a tensor of this dtype.
        rebuild, (storage, *_) = torch.empty(0, dtype=DTYPES[source.dtype_name]).__reduce_ex__(_PROTOCOL)[:2]
        is_typed = not isinstance(storage, torch.UntypedStorage)
        storage_class = _STORAGES[source.dtype_name] if is_typed else torch.UntypedStorage
        address = ("storage", storage_class, str(number), "cpu", count if is_typed else source.nbytes)
        stride = tuple(math.prod(source.shape[axis + 1 :]) for axis in range(len(source.shape)))
        hooks: OrderedDict[str, Any] = OrderedDict()
        # what torch._utils._rebuild_tensor_v2 takes: the storage, an offset, shape and strides, requires_grad, hooks
        args = _Storage(address), 0, source.shape, stride, False, hooks
        return rebuild, args if is_typed else (*args, DTYPES[source.dtype_name])


@dataclass(frozen=True)
class _Storage:
    """A tensor's bytes in the file, which the pickle refers to by the address that ``torch.load`` expects."""

    address: tuple[Any, ...]


class _UnseekableStream:
    """A stream that zipfile treats as not seekable, so that the sizes of each file are written after it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._position = 0

    def write(self, data: Any) -> int:
        self._stream.write(data)
        self._position += len(data)
        return len(data)

    def tell(self) -> int:
        return self._position

    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("seek")

    def flush(self) -> None:
        return


def _add_file(
    archive: zipfile.ZipFile, name: str, blocks: Iterable[Any], on_bytes: Callable[[int], None] | None = None
) -> None:
    entry = zipfile.ZipInfo(name)
    # A zip entry's data begins after 30 bytes, its name and its extra fields: 20 bytes that zipfile adds for large
    # files, and the 4 bytes and the padding of the field below.
    data_start = archive.fp.tell() + 30 + len(name) + 20 + 4  # type: ignore[union-attr]
    padding = -data_start % _ALIGNMENT
    entry.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(entry, "w", force_zip64=True) as member:
        for block in blocks:
            member.write(block)
            if on_bytes is not None:
                on_bytes(len(block))
