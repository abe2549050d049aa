"""Finds the tensors that a checkpoint leaves out in a base that the user names: by content, whatever their names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_core.checkpoint.collective import gather_to_all, run_on_all
from fsdp_core.checkpoint.format.base_tensors import BaseSource, BaseTensor
from fsdp_core.checkpoint.storage.local_or_remote_folder import StrPath, open_folder
from fsdp_core.checkpoint.storage.recognition import holds_manifest
from fsdp_core.errors import CheckpointFormatError, CheckpointMismatchError
from fsdp_core.runtime import Runtime
from fsdp_core.state.boxes import cut
from fsdp_core.state.chunks import Chunk, TensorSource
from fsdp_core.state.digests import box_sum, digest_text
from fsdp_core.state.dtypes import DTYPES
from fsdp_core.state.saved_tensor import SavedTensor

if TYPE_CHECKING:
    from fsdp_core.checkpoint.format.manifest import Manifest

__all__ = ["BoxesOfSource", "NamedBase", "find_all", "refusal_without_base", "source_of_name"]

_BLOCK_BYTES = 16 * 2**20


def source_of_name(name: StrPath) -> BaseSource:
    """Return how a manifest records a base that is named: a folder, a file, or an id on Hugging Face's hub."""
    text = os.fspath(name)
    if "://" in text:
        return BaseSource(type="folder", name=text)
    if os.path.isdir(text):
        return BaseSource(type="folder", name=os.path.abspath(text))
    if os.path.isfile(text):
        return BaseSource(type="file", name=os.path.abspath(text))
    return BaseSource(type="hub" if text.count("/") <= 1 and not os.path.isabs(text) else "folder", name=text)


@dataclass(frozen=True, kw_only=True)
class BoxesOfSource:
    """Reads boxes of a tensor of a base, converted to the dtype that the module had.

    Attributes:
        source: The tensor in the base.
        dtype: The dtype to convert it to.
    """

    source: TensorSource
    dtype: torch.dtype

    def read_into(self, chunk: Chunk) -> None:
        """Read into a box inside the tensor, in place."""
        assert isinstance(chunk.data, Tensor)
        with torch.no_grad():
            box = self.source.read(chunk.offsets, tuple(chunk.data.shape))
            chunk.data.detach().copy_(box.to(self.dtype))

    def digest(self) -> str:
        """Compute the digest of the whole tensor, a few MiB at a time."""
        total = 0
        shape = tuple(self.source.shape)
        for offsets, lengths in cut(shape, max(self.dtype.itemsize, self.source.dtype.itemsize), _BLOCK_BYTES):
            total += int(box_sum(self.source.read(offsets, lengths).to(self.dtype), offsets))
        return digest_text(total)


class NamedBase:
    """The tensors of a base: a folder or file of weights, or a checkpoint of this format.

    Args:
        path: A folder of safetensors, a file of safetensors or ``torch.save``, any checkpoint that can be imported, or
            a checkpoint of this format.

    Raises:
        CheckpointFormatError: There is no such thing.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = os.fspath(path)
        self._sources: dict[str, TensorSource] = {}
        left_out_keys = set()
        self._digests: dict[tuple[str, torch.dtype], str] = {}
        for name, leaf in self._read_leaves():
            if isinstance(leaf, SavedTensor) and leaf.digest is not None:
                left_out_keys.add(leaf.key)
            elif isinstance(leaf, Tensor):
                self._sources[name] = _InMemory(leaf)
            else:
                self._sources[name] = leaf
        #: How many tensors it leaves out itself.
        self.left_out_count = len(left_out_keys)
        self._names_by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, source in self._sources.items():
            self._names_by_shape.setdefault(tuple(source.shape), []).append(name)

    def _read_leaves(self) -> Iterator[tuple[str, Any]]:
        if "://" not in self.path and not os.path.exists(self.path):
            raise CheckpointFormatError(
                f"the base {self.path} is neither a folder nor a file here.\n"
                "Name the folder or file that it was moved to; of an id on Hugging Face's hub, the folder that "
                "`hf download` prints."
            )
        if os.path.isdir(self.path) or "://" in self.path:
            folder = open_folder(self.path)
            if holds_manifest(folder):
                from fsdp_core.checkpoint.loading import load

                yield from _leaves(load(self.path, verify=False))
                return
        from fsdp_core.checkpoint.importing.importer import read_source

        yield from _leaves(read_source(self.path, weights_only=True).state)

    def find(self, key: str, tensor: BaseTensor) -> str | None:
        """Return the name in the base of the tensor that has the content; ``None`` if none has.

        Args:
            key: Its key in the checkpoint. A tensor with the same end of its name is looked at first.
            tensor: What the manifest says of it.
        """
        dtype = DTYPES[tensor.dtype_name]
        candidates = self._names_by_shape.get(tensor.shape, [])
        likely = self._likely_name(key)
        if likely in candidates:
            candidates = [likely, *(name for name in candidates if name != likely)]
        return next((name for name in candidates if self._digest(name, dtype) == tensor.digest), None)

    def _likely_name(self, key: str) -> str | None:
        """The longest end of a key that is a name in the base; PEFT puts ``base_layer`` into names of what it wraps."""
        steps = key.replace("/", ".").replace(".base_layer.", ".").split(".")
        ends = (".".join(steps[start:]) for start in range(len(steps)))
        return next((end for end in ends if end in self._sources), None)

    def _digest(self, name: str, dtype: torch.dtype) -> str:
        if (name, dtype) not in self._digests:
            self._digests[name, dtype] = self.boxes(name, dtype).digest()
        return self._digests[name, dtype]

    def boxes(self, name: str, dtype: torch.dtype) -> BoxesOfSource:
        """Return a reader of a tensor of the base, by its name there."""
        return BoxesOfSource(source=self._sources[name], dtype=dtype)


@dataclass(frozen=True)
class _InMemory:
    """A tensor of a base that was read already."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        return self.tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]


def _leaves(nest: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(nest, list | tuple):
        for index, value in enumerate(nest):
            yield from _leaves(value, (*path, str(index)))
    elif isinstance(nest, Tensor | SavedTensor | TensorSource):
        yield ".".join(path[1:]), nest  # without the key of the model


def find_all(
    path: StrPath, tensors: Mapping[str, BaseTensor], runtime: Runtime | None = None
) -> dict[str, BoxesOfSource]:
    """Find tensors in a base by their content. With a runtime, the ranks divide the work, and all must call it.

    Args:
        path: The base.
        tensors: What is looked for, by key in the checkpoint.
        runtime: The ranks.

    Returns:
        A reader for each.

    Raises:
        CheckpointFormatError: The base can't be read.
        CheckpointMismatchError: It lacks one; the message names the first.
    """
    action = f"reading the base {os.fspath(path)}"
    base = run_on_all(runtime, action, lambda: NamedBase(path))
    keys = list(tensors)
    own_keys = keys if runtime is None else keys[runtime.rank :: runtime.world_size]
    names: dict[str, str | None] = {}

    def find_own() -> dict[str, str | None]:
        return {key: base.find(key, tensors[key]) for key in own_keys}

    for names_of_rank in gather_to_all(runtime, action, find_own):
        names.update(names_of_rank)
    missing = [key for key in keys if names[key] is None]
    if missing:
        raise CheckpointMismatchError(
            f"{base.path} is not the base: it has no tensor with the content of {_describe_missing(missing, tensors)}."
            + (
                f"\nIt is a checkpoint that leaves {base.left_out_count} tensors out itself: name its base."
                if base.left_out_count
                else "\nName the folder or file that the module was built from, with the values that it had."
            )
        )
    return {key: base.boxes(name, DTYPES[tensors[key].dtype_name]) for key, name in names.items() if name is not None}


def _describe_missing(keys: Iterable[str], tensors: Mapping[str, BaseTensor]) -> str:
    """Describe tensors that a base lacks: the first, and how many more."""
    first, *others = keys
    tensor = tensors[first]
    more = f", nor of {len(others)} more" if others else ""
    return f"{first!r} ({list(tensor.shape)}, {tensor.dtype_name}, {tensor.digest}){more}"


def refusal_without_base(path: str, manifest: Manifest, keys: Sequence[str], instead: str) -> CheckpointMismatchError:
    """The error for a checkpoint whose left-out tensors are needed, where nobody has named the base.

    Args:
        path: The checkpoint.
        manifest: Its manifest.
        keys: The tensors that are needed.
        instead: What to type instead.
    """
    source = None if manifest.base is None else manifest.base.source
    origin = "a base that it does not name" if source is None else f"its base, {source}"
    more = f" and {len(keys) - 1} more tensors are" if len(keys) > 1 else " is"
    return CheckpointMismatchError(
        f"{path} was saved without what was not trained: {keys[0]!r}{more} in {origin}.\n{instead}"
    )
