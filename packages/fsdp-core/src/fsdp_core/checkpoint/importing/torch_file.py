"""Reads what :func:`torch.save` has written, a whole file or a part of one, leaving its tensors in the file."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable
from typing import Any

import torch

from fsdp_core.checkpoint.importing.files import FileWindow, SourceFile
from fsdp_core.checkpoint.importing.memory_budget import current_budget
from fsdp_core.checkpoint.importing.plain import Make, PlainReader, Storage
from fsdp_core.checkpoint.importing.tensors import StridedTensor
from fsdp_core.checkpoint.importing.unpickling import MAX_PICKLE_BYTES, RecordedName, unpickle
from fsdp_core.errors import CheckpointFormatError, CheckpointValueError
from fsdp_core.state.boxes import is_shape
from fsdp_core.state.dtypes import SAFETENSORS_NAMES, dtype_name

__all__ = ["TorchFile", "is_torch_file"]

_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}


_MAX_EXPANSION = 16  # of expanded tensors, which have more elements than their storage
_DIRECTORY_FACTOR = 13  # the bytes of memory that zipfile takes for each byte of a directory of the shortest entries
_SPARE_BYTES = 16 * 2**20


class TorchFile:
    """A zip archive that :func:`torch.save` has written.

    Args:
        file: The file that contains it.
        start: Its first byte in the file.
        end: The byte after its last; the end of the file when ``None``.

    Attributes:
        content: What was saved, as records; :meth:`reader` converts them to plain data and tensors.

    Raises:
        CheckpointFormatError: It is not such an archive, or can't be read without running code.
    """

    def __init__(self, file: SourceFile, start: int = 0, end: int | None = None) -> None:
        self.file = file
        self._start = start
        stop = file.size if end is None else end
        # A whole file may hold a few expanded tensors, however small it is; a range of a file may not.
        self._tensor_bytes_left = (stop - start) * _MAX_EXPANSION + (_SPARE_BYTES if end is None else 0)
        self._charged_tensors: set[tuple[Any, ...]] = set()
        stream = io.BufferedReader(_ChargedDirectory(file, start, stop))
        try:
            with zipfile.ZipFile(stream) as archive:
                self._entries = {info.filename: info for info in archive.infolist()}
        except CheckpointFormatError:
            raise
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
            raise CheckpointFormatError(
                f"{file} can't be read as a file of torch.save: {error}. Restore it from a backup; load and save a "
                "file of torch before 1.6 with a newer torch."
            ) from error
        roots = [name.removesuffix("/data.pkl") for name in self._entries if name.endswith("/data.pkl")]
        self._root = min(roots, key=len, default="")
        if not roots or f"{self._root}/constants.pkl" in self._entries:
            raise CheckpointFormatError(
                f"{file} holds no data of torch.save: "
                + ("it is a TorchScript program. " if roots else "it is another kind of zip archive. ")
                + "Save the model's state_dict() with torch.save, and import that."
            )
        if self._read_entry("byteorder", b"little") != b"little":
            raise CheckpointFormatError(
                f"{file} was saved on a big-endian machine: load it there, and save it as safetensors."
            )
        self.content = unpickle(self._read_entry("data.pkl", None), str(file), self._resolve_storage)

    def reader(self, drop: Iterable[str] = ()) -> PlainReader:
        """A reader that converts :attr:`content` to plain data and tensors, without the paths in ``drop``."""
        return PlainReader(
            {**self._tensor_makers(), "torch._tensor._rebuild_from_type_v2": self._rebuild_from_type}, drop
        )

    def _read_entry(self, name: str, default: bytes | None) -> bytes:
        info = self._entries.get(f"{self._root}/{name}")
        if info is None and default is not None:
            return default
        start, size = self._find_entry(name)
        if size > MAX_PICKLE_BYTES:
            raise CheckpointFormatError(f"{self.file} holds {name} of {size} bytes, which is too large for plain data")
        return self.file.read(start, start + size)

    def _find_entry(self, name: str) -> tuple[int, int]:
        """The first byte and the size of an entry, which must be stored uncompressed."""
        info = self._entries.get(f"{self._root}/{name}")
        if info is None:
            raise CheckpointFormatError(f"{self.file} lacks {name!r}: it is damaged. Restore it from a backup.")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise CheckpointFormatError(f"{self.file} is compressed or encrypted: unpack it, and zip it with neither.")
        header = self._start + info.header_offset
        local = self.file.read(header, header + 30)
        start = header + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        if start + info.file_size > self.file.size:
            raise CheckpointFormatError(f"{self.file} is truncated: {name!r} extends beyond its end")
        return start, info.file_size

    def _resolve_storage(self, pid: Any) -> Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], RecordedName)):
            raise CheckpointFormatError(
                f"{self.file} refers to a {type(pid).__name__} outside of its pickle that is not a tensor's storage"
            )
        _, storage_class, key, _, count = pid
        name = storage_class.name.rpartition(".")[2]
        if name != "UntypedStorage" and name not in _STORAGES:
            raise CheckpointFormatError(f"{self.file} holds a storage of unknown type {name!r}")
        if not isinstance(key, str) or type(count) is not int or count < 0:
            raise CheckpointFormatError(f"{self.file} holds a storage {key!r} of {count!r} elements")
        dtype = _STORAGES.get(name)
        return Storage(key=key, dtype=dtype, nbytes=count * (1 if dtype is None else dtype.itemsize))

    def _tensor_makers(self) -> dict[str, Make]:
        # The first four arguments are always the storage, the index of the first element, the shape and the strides.
        return {
            "torch._utils._rebuild_tensor": lambda args, _: self._make_tensor(*args[:4]),
            "torch._utils._rebuild_tensor_v2": lambda args, _: self._make_tensor(*args[:4], marks=args[6:]),
            "torch._utils._rebuild_tensor_v3": lambda args, _: self._make_tensor(
                *args[:4], dtype=args[6], marks=args[7:]
            ),
            "torch._utils._rebuild_parameter": lambda args, _: args[0],
            "torch._utils._rebuild_parameter_with_state": lambda args, _: args[0],
            "torch._utils._rebuild_device_tensor_from_cpu_tensor": lambda args, _: args[0],
        }

    def _rebuild_from_type(self, args: tuple[Any, ...], state: Any) -> Any:
        """A tensor with attributes, or of a subclass."""
        make, tensor_class, inner = args[:3]
        if tensor_class.name not in (
            "torch.Tensor",
            "torch._tensor.Tensor",
            "torch.nn.parameter.Parameter",
            "torch.nn.parameter.Buffer",
        ):
            raise CheckpointValueError(f"{tensor_class.name}, not a plain tensor; save the plain tensors in it instead")
        return self._tensor_makers()[make.name](inner, None)

    def _make_tensor(
        self, storage: Any, first: Any, shape: Any, stride: Any, *, dtype: Any = None, marks: tuple[Any, ...] = ()
    ) -> StridedTensor:
        """Describe a tensor; ``marks`` are torch's, such as that elements are to be conjugated when they are read."""
        if not isinstance(storage, Storage):
            raise CheckpointValueError("a tensor without a storage")
        dtype = dtype or storage.dtype
        if dtype not in SAFETENSORS_NAMES:
            raise CheckpointValueError(f"a tensor of {dtype_name(dtype)}, a dtype that safetensors lacks; convert it")
        if any(marks):
            raise CheckpointValueError(f"a tensor marked as {marks[0]}; save tensor.resolve_conj().resolve_neg()")
        numbers = (first, *shape, *stride)
        if (
            len(shape) != len(stride)
            or any(type(n) is not int or not 0 <= n < 2**60 for n in numbers)
            or not is_shape(shape)
        ):
            raise CheckpointFormatError(f"a tensor of shape {tuple(shape)} and strides {tuple(stride)}")
        last = first + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        start, size = self._find_entry(f"data/{storage.key}")
        if math.prod(shape) and (last + 1) * dtype.itemsize > min(size, storage.nbytes):
            raise CheckpointFormatError(
                f"a tensor of shape {tuple(shape)} beyond the {min(size, storage.nbytes)} bytes of its storage"
            )
        self._charge_tensor(start + first * dtype.itemsize, tuple(shape), tuple(stride), dtype)
        return StridedTensor(
            file=self.file,
            start=start + first * dtype.itemsize,
            shape=tuple(shape),
            stride=tuple(stride),
            dtype=dtype,
        )

    def _charge_tensor(self, start: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        """Refuse tensors whose elements would take far more bytes than the file stores."""
        if (start, shape, stride, dtype) in self._charged_tensors:  # a tied tensor, which is saved once
            return
        self._charged_tensors.add((start, shape, stride, dtype))
        self._tensor_bytes_left -= math.prod(shape) * dtype.itemsize
        if self._tensor_bytes_left < 0:
            raise CheckpointFormatError(
                f"a tensor of shape {shape} and strides {stride} in {self.file}, whose tensors would take more than "
                f"{_MAX_EXPANSION} times their stored bytes; save tensor.contiguous()"
            )


class _ChargedDirectory(FileWindow):
    """A stream of a zip archive whose directory is to be read, which charges for what zipfile makes of it."""

    def __init__(self, file: SourceFile, start: int, end: int) -> None:
        super().__init__(file, start, end)
        self._uncharged = 2 * io.DEFAULT_BUFFER_SIZE  # zipfile first looks for the end of the directory

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        current_budget().charge(_DIRECTORY_FACTOR * max(0, min(len(buffer), self.left) - self._uncharged))
        self._uncharged = max(0, self._uncharged - len(buffer))
        return super().readinto(buffer)


def is_torch_file(file: SourceFile) -> bool:
    """Whether a file begins like a zip archive."""
    return file.size >= 4 and file.read(0, 4) == b"PK\x03\x04"
