"""The files of a checkpoint: each header is parsed once, and boxes of tensors are read when needed."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from typing import TYPE_CHECKING, BinaryIO

from fsdp_core.checkpoint.format.manifest import Manifest
from fsdp_core.checkpoint.format.safetensors_header import FileTensor, parse_header
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder
from fsdp_core.checkpoint.storage.recognition import read_manifest
from fsdp_core.checkpoint.storage.remedies import remedy
from fsdp_core.errors import CheckpointFormatError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["StoredFiles"]

_REMOTE_BLOCK_BYTES = 32 * 2**20
_MAX_OPEN = 64  # a checkpoint of many ranks has more files than a process may hold open


class StoredFiles:
    """Reads the safetensors files of a checkpoint. Thread-safe.

    Args:
        folder: The checkpoint's folder.
        manifest: The checkpoint's manifest.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._headers: dict[str, dict[str, FileTensor]] = {}
        self._streams: dict[str, BinaryIO] = {}  # by file name, the open ones, the least recently read first
        self._lock = threading.Lock()

    def header(self, name: str) -> dict[str, FileTensor]:
        """Return where the bytes of each tensor are in a file.

        Raises:
            CheckpointFormatError: It is not a safetensors file of the size in the manifest.
        """
        if name not in self._headers:
            size = self.manifest.files[name].size
            self._headers[name] = parse_header(
                lambda start, end: self.read_bytes(name, start, end), size, self.folder.path(name)
            )
        return self._headers[name]

    def forget(self, name: str) -> None:
        """Forget what was read of a file, which is to be read from another place."""
        with self._lock:
            self._headers.pop(name, None)
            stream = self._streams.pop(name, None)
            if stream is not None:
                stream.close()

    def read_bytes(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of a file from ``start`` to ``end``, or to the end of the file.

        Raises:
            CheckpointFormatError: The file can no longer be read.
        """
        try:
            if name not in self._streams:
                return self.folder.read(name, start, end)
            buffer = bytearray(end - start)
            return bytes(buffer[: self._fill(name, memoryview(buffer), start)])
        except OSError as error:
            raise self._unreadable(name, error) from error

    def read(self, name: str, key: str, offsets: tuple[int, ...], out: Tensor) -> None:
        """Read a box of a tensor in a file into ``out``, whatever its dtype, device and strides.

        Raises:
            CheckpointFormatError: The file has changed since the load began.
        """
        from fsdp_core.checkpoint.format.safetensors_file import read_box

        read_box(lambda buffer, start: self.fill(name, key, buffer, start), self.locate(name, key), offsets, out)

    def locate(self, name: str, key: str) -> FileTensor:
        """Return where the bytes of a tensor are in a file.

        Raises:
            CheckpointFormatError: The file no longer holds it.
        """
        source = self.header(name).get(key)
        if source is None:
            raise CheckpointFormatError(self._explain_change(name, f"it holds no {key!r}"))
        return source

    def fill(self, name: str, key: str, buffer: memoryview, start: int) -> None:
        """Fill a buffer with the bytes of a file from ``start`` on, for the tensor ``key``.

        Raises:
            CheckpointFormatError: The file has become shorter since the load began, or can no longer be read.
        """
        try:
            filled = self._fill(name, buffer, start)
        except OSError as error:
            raise self._unreadable(name, error) from error
        if filled != len(buffer):
            raise CheckpointFormatError(
                self._explain_change(name, f"it ended before byte {start + len(buffer)} while {key!r} was read")
            )

    def _unreadable(self, name: str, error: OSError) -> CheckpointFormatError:
        if isinstance(error, FileNotFoundError) or error.errno == errno.ESTALE:
            return CheckpointFormatError(self._explain_change(name, "it is gone"))
        reason = f"{type(error).__name__}: {error}. {remedy(error)}".rstrip()
        return CheckpointFormatError(f"can't read {self.folder.path(name)}: {reason}")

    def _explain_change(self, name: str, fault: str) -> str:
        try:
            is_replaced = read_manifest(self.folder).save_id != self.manifest.save_id
        except CheckpointFormatError:
            is_replaced = True
        if is_replaced:
            return (
                f"another run has replaced or removed {self.folder} since the load began ({fault}), so tensors may be "
                "partly filled. Load again."
            )
        return (
            f"{self.folder.path(name)}: {fault}; it was changed since the load began, so tensors may be partly "
            "filled. Load again, or load an earlier checkpoint."
        )

    def keep_open(self) -> None:
        """Keep the files open for the lifetime of this object, so that their content outlives a removal.

        Only local POSIX filesystems support this. A process may not hold many files open: nothing is kept open for a
        checkpoint of more than 64 files, or if the process reaches its limit.
        """
        names = [name for name in self.manifest.files if name.endswith(".safetensors")]
        if self.folder.local and os.name == "posix" and len(names) <= _MAX_OPEN:
            with self._lock:
                try:
                    for name in names:
                        self._stream(name)
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        raise
                    while self._streams:  # they are opened again when needed
                        self._streams.popitem()[1].close()

    def _fill(self, name: str, buffer: memoryview, start: int) -> int:
        filled = 0
        if not self.folder.local:
            while filled < len(buffer):
                end = min(start + len(buffer), start + filled + _REMOTE_BLOCK_BYTES)
                data = self.folder.read(name, start + filled, end)
                buffer[filled : filled + len(data)] = data
                filled += len(data)
                if not data:
                    break
            return filled
        with self._lock:
            stream = self._stream(name)
            stream.seek(start)
            # One read call returns at most 2 GiB.
            while filled < len(buffer) and (count := stream.readinto(buffer[filled:])):  # type: ignore[attr-defined]
                filled += count
        return filled

    def _stream(self, name: str) -> BinaryIO:
        stream = self._streams.pop(name, None)
        if stream is None:
            if len(self._streams) >= _MAX_OPEN:
                self._streams.pop(next(iter(self._streams))).close()  # the least recently read
            stream = open(self.folder.path(name), "rb", buffering=0)  # noqa: SIM115 (closed above or below)
            weakref.finalize(self, stream.close)
        self._streams[name] = stream
        return stream
