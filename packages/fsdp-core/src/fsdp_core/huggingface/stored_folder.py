"""The tensors of a folder that ``from_pretrained`` reads: where they are, and reading boxes of them into shards."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fsdp_core.checkpoint.format.huggingface_folder import INDEX, WEIGHTS
from fsdp_core.checkpoint.format.safetensors_file import FileTensor, read_box
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.storage.remedies import remedy, unreadable
from fsdp_core.errors import CheckpointFormatError
from fsdp_core.huggingface.views import View
from fsdp_core.state.coverage import Box

__all__ = ["RangeReader", "StoredTensor", "list_folder"]

_LOCAL_RUN_BYTES = 64
"""Runs of at least this many bytes are read from a local file by themselves, without the bytes between them."""

_REMOTE_RUN_BYTES = 256 * 2**10  # more, since each read is a request
_REMOTE_BLOCK_BYTES = 16 * 2**20
_MAX_OPEN = 32


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a folder.

    Attributes:
        file: The name of its file.
        entry: Where it is in the file.
    """

    file: str
    entry: FileTensor


class RangeReader:
    """Reads byte ranges of the files of a folder, and counts them.

    Args:
        path: The folder: a local path or an fsspec URL.

    Attributes:
        folder: The folder.
        bytes_read: The number of bytes read so far.
    """

    def __init__(self, path: StrPath) -> None:
        folder = open_folder(path)
        # The user's own path may be a link; links inside the folder must not leave it.
        self.folder: Folder = replace(folder, root=os.path.realpath(folder.root)) if folder.local else folder
        self.bytes_read = 0
        self._open: dict[str, int] = {}

    def locate(self, name: str) -> tuple[Folder, str]:
        """Return the folder that holds a file, and its name there.

        In the cache of huggingface_hub, the files of ``snapshots/COMMIT`` are links to ``blobs`` beside ``snapshots``.
        """
        if not self.folder.local:
            return self.folder, name
        for parent in Path(self.folder.root).parents:
            if parent.name == "snapshots":
                blobs = os.path.join(os.path.realpath(parent.parent), "blobs")
                real = os.path.realpath(self.folder.path(name))
                if os.path.dirname(real) == blobs and not os.path.islink(blobs):
                    return replace(self.folder, root=blobs), os.path.basename(real)
        return self.folder, name

    def size(self, name: str) -> int | None:
        """The size of a file in bytes, or ``None`` if there is none.

        Raises:
            CheckpointFormatError: A link leads elsewhere than into the hub's cache, or this user may not access it.
        """
        folder, name_in_folder = self.locate(name)
        return folder.size(name_in_folder)

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def read_view(self, stored: StoredTensor, view: View, box: Box, out: Tensor) -> None:
        """Read the part of a box of the module's tensor that lies in a view.

        Args:
            stored: The folder's tensor.
            view: The part of the module's tensor that it is.
            box: A box of the module's tensor.
            out: The memory of this box, which is filled where it lies in the view.
        """
        common = view.overlap(box)
        if common is None:
            return
        (offsets, lengths), (begin, _) = common
        starts_in_box = [offset - begin_of_box for offset, begin_of_box in zip(offsets, box[0], strict=True)]
        box_slices = tuple(slice(start, start + length) for start, length in zip(starts_in_box, lengths, strict=True))
        direct_run_bytes = _LOCAL_RUN_BYTES if self.folder.local else _REMOTE_RUN_BYTES

        def fill(buffer: memoryview, start: int) -> None:
            self.fill(stored.file, buffer, start)

        with torch.no_grad():
            read_box(
                fill, stored.entry, begin, view.as_stored(out.detach()[box_slices]), direct_run_bytes=direct_run_bytes
            )

    def fill(self, name: str, buffer: memoryview, start: int) -> None:
        """Fill a buffer with the bytes of a file from ``start`` on.

        Raises:
            CheckpointFormatError: The file ends before, or can't be read.
        """
        filled = 0
        try:
            while filled < len(buffer):
                if self.folder.local:
                    count = os.preadv(self._descriptor(name), [buffer[filled:]], start + filled)
                else:
                    end = min(start + len(buffer), start + filled + _REMOTE_BLOCK_BYTES)
                    data = self.folder.read(name, start + filled, end)
                    count = len(data)
                    buffer[filled : filled + count] = data
                if not count:
                    raise CheckpointFormatError(
                        f"{self.folder.path(name)} ends before byte {start + len(buffer)}: it is truncated. Restore it."
                    )
                filled += count
                self.bytes_read += count
        except PermissionError as error:
            raise unreadable(self.folder.path(name), error) from error
        except OSError as error:
            reason = f"{type(error).__name__}: {error}. {remedy(error)}".rstrip()
            raise CheckpointFormatError(f"can't read {self.folder.path(name)}: {reason}") from error

    def bytes_of(self, name: str) -> Callable[[int, int], bytes]:
        """A function that reads a range of a file."""

        def read(start: int, end: int) -> bytes:
            buffer = bytearray(end - start)
            self.fill(name, memoryview(buffer), start)
            return bytes(buffer)

        return read

    def _descriptor(self, name: str) -> int:
        descriptor = self._open.pop(name, None)
        if descriptor is None:
            if self.size(name) is None:  # which refuses links that lead out of the folder
                raise CheckpointFormatError(
                    f"{self.folder.path(name)} is missing here. Restore the file; all ranks must see the folder."
                )
            if len(self._open) >= _MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            descriptor = os.open(self.folder.path(name), os.O_RDONLY)
        self._open[name] = descriptor
        return descriptor

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


def list_folder(reader: RangeReader) -> dict[str, StoredTensor]:
    """The tensors of a folder by name, from the headers of its files.

    Raises:
        CheckpointFormatError: It is no folder of safetensors, or is not complete.
    """
    from fsdp_core.checkpoint.format.safetensors_header import parse_header

    folder = reader.folder
    file_of_tensor = _read_index(reader)
    files = [WEIGHTS] if file_of_tensor is None else sorted(set(file_of_tensor.values()))
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        size = reader.size(name)
        if size is None:
            raise CheckpointFormatError(f"{folder.path(name)} is missing: the folder is not complete. Restore it.")
        for key, tensor in parse_header(reader.bytes_of(name), size, folder.path(name)).items():
            if file_of_tensor is None or file_of_tensor.get(key) == name:
                tensors[key] = StoredTensor(file=name, entry=tensor)
    missing = [name for name in file_of_tensor or () if name not in tensors]
    if missing:
        raise CheckpointFormatError(
            f"{folder} is not complete: {INDEX} lists {missing[0]!r} and {len(missing) - 1} more tensors that its "
            "files don't hold. Restore the files."
        )
    return tensors


def _read_index(reader: RangeReader) -> dict[str, str] | None:
    """The file of each tensor; ``None`` if the folder has a single one."""
    from fsdp_core.checkpoint.format.huggingface_folder import parse_index

    folder = reader.folder
    if folder.kind() != "folder":
        raise CheckpointFormatError(
            f"there is no folder {folder}. Check the path; a model on a hub is downloaded first, with "
            "huggingface_hub.snapshot_download(), once on each file system."
        )
    size = reader.size(INDEX)
    if size is not None:
        return parse_index(reader.bytes_of(INDEX)(0, size), folder.path(INDEX))
    if reader.size(WEIGHTS) is not None:
        return None
    file_names = [name for name in folder.files() if "/" not in name]
    torch_files = [name for name in file_names if name.endswith((".bin", ".pt", ".pth"))]
    hint = "Pass a folder that save_pretrained() has written."
    if torch_files:
        hint = f"`fsdp checkpoint import {folder} CHECKPOINT` reads files of torch's, such as {torch_files[0]}."
    listed = ", ".join(file_names[:5]) or "nothing"
    raise CheckpointFormatError(f"{folder} holds neither {WEIGHTS} nor {INDEX}; it holds {listed}.\n{hint}")
