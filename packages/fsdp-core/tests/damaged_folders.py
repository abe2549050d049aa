"""A small checkpoint, and the ways in which tests damage it."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from fsdp_core.checkpoint import load, save
from fsdp_core.errors import CheckpointFormatError
from fsdp_core.runtime import ProcessGroupRuntime

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(6.0).reshape(3, 2), "b": torch.ones(3)},
    "callbacks": {"best": torch.tensor(0.5), "seen": 3},
}


KINDS = {"model": "model", "optimizer/0": "optimizer"}


def save_alone(
    path: Path | str, state: Mapping[str, Any], kinds: Mapping[str, str] | None = None, **options: Any
) -> None:
    """Save in one process, or on a rank; of which kind a model and an optimizer are, their keys say."""
    own_kinds = {part: kind for part, kind in KINDS.items() if part.split("/")[0] in state}
    options = {"runtime": ProcessGroupRuntime(), "strategy": "test", **options}
    save(path, state, kinds=own_kinds if kinds is None else kinds, **options)


def save_small(path: Path, state: dict[str, Any] | None = None) -> Path:
    """Save :data:`STATE` in one process."""
    save_alone(path, state or STATE)
    return path


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as somebody would who knows the format, its checksum included."""
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    content.pop("checksum", None)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    content["checksum"] = "xxh3:" + xxhash.xxh3_64_hexdigest(canonical)
    (folder / "manifest.json").write_text(json.dumps(content))


def reseal(folder: Path, path: Path) -> None:
    """Give the manifest a changed file's size and checksum."""
    entry = {"size": path.stat().st_size, "checksum": "xxh3:" + xxhash.xxh3_64_hexdigest(path.read_bytes())}
    rewrite(folder, lambda content: content["files"].update({str(path.relative_to(folder)): entry}))


def chunk_of(content: dict[str, Any], key: str = "model/w") -> Any:
    """The first chunk of a tensor in a manifest."""
    return content["tensors"][key]["chunks"][0]


def model_file(folder: Path) -> Path:
    """The file with the model's chunks."""
    (path,) = (folder / "model").iterdir()
    return path


def state_file(folder: Path) -> Path:
    """The file with the plain data."""
    (path,) = folder.glob("state-*.json")
    return path


def flip(path: Path, position: int = -1) -> None:
    """Change a bit of a byte."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(bytes(data))


class Payload:
    """Makes a file wherever it is unpickled freely."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """No file of this process may become larger than ``size`` bytes: writing on fails with EFBIG, as on a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))  # Python ignores the signal that goes with it
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


Errors = type[Exception] | tuple[type[Exception], ...]


def refused(
    folder: Any, message: str, error: Errors = CheckpointFormatError, *, by: Callable[[Any], object] = load
) -> None:
    """A load says this, or another reader."""
    with pytest.raises(error, match=message):
        by(folder)


def import_refused(source: Path, message: str, error: Errors = CheckpointFormatError, **options: Any) -> None:
    """An import says this, and writes nothing."""
    from fsdp_core.checkpoint.importing import import_checkpoint  # scripts that import this file need it not

    new = source.with_name("new")
    with pytest.raises(error, match=message):
        import_checkpoint(source, new, **options)
    assert not new.exists()
