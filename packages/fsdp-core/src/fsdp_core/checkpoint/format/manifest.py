"""`manifest.json`: a checkpoint's content, files and origin. A folder without it is not a checkpoint."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from fsdp_core.checkpoint.format.base_tensors import Base, BaseTensor
from fsdp_core.checkpoint.format.chunks import StoredChunk
from fsdp_core.checkpoint.format.json_text import check_text, integer, json_list, parse_text, string, strings
from fsdp_core.checkpoint.format.pattern_reading import PatternedFiles, read_pattern
from fsdp_core.checkpoint.format.patterns import Pattern, PatternedChunks
from fsdp_core.checkpoint.format.places import PlaceOfRanks
from fsdp_core.errors import CheckpointValueError
from fsdp_core.state.boxes import is_shape, overlap
from fsdp_core.state.coverage import Box, find_fault
from fsdp_core.state.dtype_names import ITEM_BYTES

if TYPE_CHECKING:
    import torch

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "MANIFEST",
    "FileEntry",
    "Manifest",
    "StoredChunk",
    "StoredTensor",
    "check_name",
    "content_checksum",
    "parse_object",
]

MANIFEST = "manifest.json"
FORMAT = "fsdp-checkpoint"
FORMAT_VERSION = 3
"""The newest version. Version 2 has patterns, and version 3 a base; each is written only where that is needed."""
MAX_INTEGER = 2**53 - 1
"""The largest number in a manifest: the largest integer that every JSON reader represents exactly."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor, and the chunks that cover it exactly.

    Attributes:
        shape: Its shape.
        dtype_name: The name of its dtype, such as ``"float32"``.
        chunks: Its chunks. Those of a pattern are made when somebody looks at them.
    """

    shape: tuple[int, ...]
    dtype_name: str
    chunks: tuple[StoredChunk, ...] | PatternedChunks

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        from fsdp_core.state.dtypes import DTYPES

        return DTYPES[self.dtype_name]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype_name]

    def __post_init__(self) -> None:
        if self.dtype_name not in ITEM_BYTES:
            raise ValueError(f"{self.dtype_name!r} is not a dtype of this format")
        if not is_shape(self.shape):
            raise ValueError(f"no tensor has the shape {list(self.shape)}")
        if isinstance(self.chunks, PatternedChunks):  # the pieces of a pattern always cover the pattern's shape
            if self.chunks.pattern.shape != self.shape:
                raise ValueError(f"its pieces do not cover the shape {list(self.shape)}")
            return
        fault = find_fault(self.shape, [(chunk.offsets, chunk.lengths) for chunk in self.chunks])
        if fault is not None:
            raise ValueError(fault)

    def overlapping(self, box: Box) -> Iterator[StoredChunk]:
        """Yield the chunks that overlap a box of the tensor."""
        if isinstance(self.chunks, PatternedChunks):
            yield from self.chunks.overlapping(box)
            return
        for chunk in self.chunks:
            if overlap((chunk.offsets, chunk.lengths), box) is not None:
                yield chunk

    def file_names(self) -> set[str]:
        """Return the names of the files that hold the tensor."""
        if isinstance(self.chunks, PatternedChunks):
            return self.chunks.file_names()
        return {chunk.file for chunk in self.chunks}


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file of the checkpoint.

    Attributes:
        size: Its size in bytes.
        checksum: ``xxh3:`` and the 16 hexadecimal digits of its 64-bit xxh3 hash.
    """

    size: int
    checksum: str

    def __post_init__(self) -> None:
        if not 0 <= self.size <= MAX_INTEGER or not re.fullmatch(r"xxh3:[0-9a-f]{16}", self.checksum):
            raise ValueError(f"{self} is not a valid size with a checksum")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of ``manifest.json``.

    Attributes:
        save_id: Twelve hexadecimal digits in the names of this save's files.
        created: When it was committed, ISO 8601 in UTC.
        strategy: The name of the strategy that wrote it.
        versions: The versions of the packages that wrote it.
        world_size: The number of ranks that wrote it.
        kinds: ``"model"`` or ``"optimizer"`` for each part of the state that belongs to one, by its path in the state.
        state_file: The JSON file with the plain data.
        state_tensors: The safetensors file with the tensors that the plain data refers to, if there are any.
        tensors: Every chunked tensor by its key, such as ``model/lm_head.weight``.
        aliases: Additional names of tied parameters, each with the key under which the tensor is stored.
        files: Every file by its relative name, except the manifest itself.
        places: Where the ranks of a scattered save have written; empty if all files were written beside the manifest.
        base: The tensors that are left out; ``None`` if there are none.
    """

    save_id: str
    created: str
    strategy: str
    versions: Mapping[str, str]
    world_size: int
    kinds: Mapping[str, str]
    state_file: str
    state_tensors: str | None
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    aliases: Mapping[str, str]
    files: Mapping[str, FileEntry] = field(repr=False)
    places: tuple[PlaceOfRanks, ...] = field(default=(), repr=False)
    base: Base | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{12}", self.save_id) or self.world_size < 1:
            raise ValueError(f"no save has the id {self.save_id!r} and the world size {self.world_size}")
        for name in self.files:
            check_name(name)
        self._refuse_if_missing(self.state_file, "the state")
        if self.state_tensors is not None:
            self._refuse_if_missing(self.state_tensors, "the state")
        patterned = PatternedFiles(self.files)
        for key, tensor in self.tensors.items():
            if isinstance(tensor.chunks, PatternedChunks):
                missing_file = patterned.missing_file(tensor.chunks)
                if missing_file is not None:
                    self._refuse_if_missing(missing_file, f"tensor {key!r}")
                continue
            for chunk in tensor.chunks:
                self._refuse_if_missing(chunk.file, f"tensor {key!r}")
        for key in self.left_out:
            if key in self.tensors:
                raise ValueError(f"tensor {key!r} is in it, and is left out as well")
        for alias, key in self.aliases.items():
            if not self.has_tensor(key):
                raise ValueError(f"alias {alias!r} refers to {key!r}, which is not among the tensors")
        for path, kind in self.kinds.items():
            if kind not in ("model", "optimizer"):
                raise ValueError(f"{path!r} is of kind {kind!r}, which is neither 'model' nor 'optimizer'")

    def _refuse_if_missing(self, name: str, content: str) -> None:
        if name not in self.files:
            raise ValueError(f"{content} is in {name!r}, which is not among the files")

    @property
    def left_out(self) -> Mapping[str, BaseTensor]:
        """The tensors that are left out, by key."""
        return {} if self.base is None else self.base.tensors

    def has_tensor(self, key: str) -> bool:
        """Whether a key is that of a tensor, which may be left out."""
        return key in self.tensors or key in self.left_out

    @property
    def format_version(self) -> int:
        """The version in which the manifest is written: 3 with a base, 2 if chunks are in a pattern, otherwise 1."""
        if self.base is not None:
            return 3
        return 2 if any(isinstance(tensor.chunks, PatternedChunks) for tensor in self.tensors.values()) else 1

    def to_json(self) -> str:
        """Return the manifest as readable text: one line per chunk or pattern, and per file.

        Raises:
            CheckpointValueError: It would be larger than readers accept.
        """
        head = {
            "format": FORMAT,
            "format_version": self.format_version,
            "save_id": self.save_id,
            "created": self.created,
            "strategy": self.strategy,
            "versions": dict(self.versions),
            "world_size": self.world_size,
            "kinds": dict(self.kinds),
            "state": {"json": self.state_file, "tensors": self.state_tensors},
        }
        if self.places:
            head["places"] = [place.to_json() for place in self.places]
        tensors = {
            key: {
                "shape": tensor.shape,
                "dtype": tensor.dtype_name,
                "chunks": _chunks_to_json(tensor.chunks),
            }
            for key, tensor in self.tensors.items()
        }
        files = {name: {"size": entry.size, "checksum": entry.checksum} for name, entry in self.files.items()}
        content = head | {"tensors": tensors, "aliases": dict(self.aliases), "files": files}
        base = None if self.base is None else self.base.to_json()
        if base is not None:
            content["base"] = base
        lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        lines += _block_lines("tensors", tensors, chunked=True) + _block_lines("aliases", dict(self.aliases))
        if base is not None:
            lines += [f' "base": {{"source": {json.dumps(base["source"])},']
            lines += [*_block_lines("tensors", base["tensors"])[:-1], " }},"]
        lines += [*_block_lines("files", files), f' "checksum": "{content_checksum(content)}"']
        text = "\n".join(["{", *lines, "}"]) + "\n"
        try:
            check_text(text.encode())
        except ValueError as error:
            chunks = sum(len(tensor.chunks) for tensor in self.tensors.values())
            raise CheckpointValueError(
                f"can't save a checkpoint of {chunks} chunks, because readers would refuse its manifest: {error}.\n"
                "Save with fewer processes, or fewer and larger tensors."
            ) from error
        return text

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse and check the output of :meth:`to_json`.

        Raises:
            ValueError: It is not a manifest that this version can read.
        """
        content = parse_object(text if isinstance(text, bytes) else text.encode())
        if not isinstance(content, dict) or next(iter(content.items()), None) != ("format", FORMAT):
            raise ValueError(f'it does not begin with "format": "{FORMAT}", so it is not one of ours')
        version = content.get("format_version")
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            is_newer = isinstance(version, int) and version > FORMAT_VERSION
            raise ValueError(
                f"it has format version {version!r}, and this fsdp-core reads version 1 to {FORMAT_VERSION}"
                + (": pip install --upgrade fsdp-core" if is_newer else "")
            )
        recorded = content.pop("checksum", None)
        try:
            computed = content_checksum(content)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if recorded != computed:
            raise ValueError(f"its content has the checksum {computed}, but it records {recorded}: it was changed")
        shared_patterns: dict[str, Pattern] | None = {} if version >= 2 else None  # filled as tensors are parsed
        try:
            return cls(
                **strings({key: content[key] for key in ("save_id", "created", "strategy")}),
                world_size=integer(content["world_size"]),
                versions=strings(content["versions"]),
                kinds=strings(content["kinds"]),
                state_file=string(content["state"]["json"]),
                state_tensors=None if content["state"]["tensors"] is None else string(content["state"]["tensors"]),
                tensors={key: _parse_tensor(key, entry, shared_patterns) for key, entry in content["tensors"].items()},
                aliases=strings(content["aliases"]),
                files={
                    name: FileEntry(size=integer(entry["size"]), checksum=string(entry["checksum"]))
                    for name, entry in content["files"].items()
                },
                places=tuple(
                    PlaceOfRanks.from_json(place, integer(content["world_size"]))
                    for place in json_list(content.get("places", []))
                ),
                base=Base.from_json(content["base"]) if version >= 3 else None,
            )
        except KeyError as error:
            raise ValueError(f"it lacks {error}") from error
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"a value in it is of the wrong type: {error}") from error


def _block_lines(name: str, entries: Mapping[str, Any], *, chunked: bool = False) -> list[str]:
    """Return the lines of an object, one for each entry, and one for each chunk of an entry."""
    lines = []
    for key, entry in entries.items():
        if chunked and isinstance(entry["chunks"], list) and len(entry["chunks"]) > 1:
            head = json.dumps({"shape": entry["shape"], "dtype": entry["dtype"]})[:-1]  # not closed yet
            chunks = ",\n".join(f"   {json.dumps(chunk)}" for chunk in entry["chunks"])
            lines.append(f'  {json.dumps(key)}: {head}, "chunks": [\n{chunks}]}}')
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(entry)}")
    if not lines:
        return [f' "{name}": {{}},']
    return [f' "{name}": {{', ",\n".join(lines), " },"]


def parse_object(text: bytes) -> Any:
    """Parse JSON without fractions, in which no object has two members of one name.

    Raises:
        ValueError: The text is no such JSON, or too large.
    """
    return parse_text(
        text, object_pairs_hook=_object_of_members, parse_float=_refuse_number, parse_constant=_refuse_number
    )


def content_checksum(content: Mapping[str, Any]) -> str:
    """Return the checksum of a content in RFC 8785 form: no spaces, UTF-8, keys sorted by UTF-16 code units."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    if not canonical.isascii():  # Python sorts by code points, which differs beyond U+FFFF
        canonical = json.dumps(_sort_keys(content), separators=(",", ":"), ensure_ascii=False)
    return "xxh3:" + xxhash.xxh3_64_hexdigest(canonical.encode())


def _sort_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sort_keys(value[key]) for key in sorted(value, key=lambda key: key.encode("utf-16-be"))}
    return [_sort_keys(item) for item in value] if isinstance(value, (list, tuple)) else value


def _object_of_members(members: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(members)
    if len(result) < len(members):
        duplicate = Counter(key for key, _ in members).most_common(1)[0][0]
        raise ValueError(f"{duplicate!r} occurs twice in one object")
    return result


def _refuse_number(number: str) -> None:
    raise ValueError(f"{number} is not an integer")


def _parse_tensor(key: str, entry: Any, patterns: dict[str, Pattern] | None) -> StoredTensor:
    """Read a tensor.

    Args:
        key: The tensor's key.
        entry: The tensor's entry in the manifest.
        patterns: The patterns that were read already, which tensors share; ``None`` in a version without patterns.
    """
    try:
        shape = tuple(integer(size) for size in json_list(entry["shape"]))
        chunks = entry["chunks"]
        dtype_name = string(entry["dtype"])
        if patterns is None or not isinstance(chunks, dict):
            return StoredTensor(shape=shape, dtype_name=dtype_name, chunks=_parse_chunks(chunks))
        patterned = PatternedChunks(key, string(chunks["files"]), read_pattern(shape, chunks, patterns))
        return StoredTensor(shape=shape, dtype_name=dtype_name, chunks=patterned)
    except ValueError as error:
        raise ValueError(f"tensor {key!r}: {error}") from error


def _parse_chunks(chunks: Any) -> tuple[StoredChunk, ...]:
    return tuple(
        StoredChunk(
            file=string(chunk["file"]),
            key=string(chunk["key"]),
            offsets=tuple(integer(offset) for offset in json_list(chunk["offsets"])),
            lengths=tuple(integer(length) for length in json_list(chunk["lengths"])),
        )
        for chunk in json_list(chunks)
    )


def _chunks_to_json(chunks: Sequence[StoredChunk]) -> Any:
    if isinstance(chunks, PatternedChunks):
        return {"files": chunks.files, **chunks.pattern.to_json()}
    return [
        {"file": chunk.file, "key": chunk.key, "offsets": chunk.offsets, "lengths": chunk.lengths} for chunk in chunks
    ]


def check_name(name: str) -> None:
    """Refuse a file name that could lead out of the checkpoint.

    Raises:
        ValueError: The name could lead out.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or re.search(r"[\\:\x00-\x1f]", name) or name == MANIFEST:
        raise ValueError(f"the file name {name!r} does not stay inside the checkpoint")
