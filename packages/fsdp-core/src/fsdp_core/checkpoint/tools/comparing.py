"""Compares two checkpoints block by block, whatever strategy and world size saved them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdp_core.checkpoint.format.manifest import Manifest
from fsdp_core.checkpoint.storage.local_or_remote_folder import StrPath
from fsdp_core.checkpoint.storage.plain_json import children, leaves, read_plain, scalar, tensor_of
from fsdp_core.checkpoint.storage.rereading import retries_if_replaced
from fsdp_core.checkpoint.storage.stored_files import StoredFiles
from fsdp_core.checkpoint.storage.tensor_bytes import BLOCK_BYTES, TensorBytes, open_files
from fsdp_core.checkpoint.tools.conversion import OnProgress, counter
from fsdp_core.checkpoint.tools.run_facts import without_run_facts
from fsdp_core.checkpoint.verifying import find_damage, refuse_damage
from fsdp_core.errors import CheckpointValueError
from fsdp_core.state.boxes import cut
from fsdp_core.state.dtype_names import ITEM_BYTES

__all__ = ["MISSING", "Differences", "TensorDifference", "compare"]

MISSING = "(missing)"
"""The placeholder for plain data that one side does not have."""

_RUN_FIELDS = ("strategy", "world_size", "versions", "created")


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """The difference of two tensors of the same name.

    Attributes:
        key: Its key, such as ``model/wte.weight``.
        shapes: The two shapes.
        dtypes: The names of the two dtypes.
        count: The number of elements that differ; ``None`` if the shapes differ, so that elements can't be compared, or
            if a checkpoint leaves the tensor out, and its digest differs.
        first: The index of the first element that differs, in row-major order.
        values: The two values at that index.
        max_abs: The largest absolute difference of two elements; infinite if one is finite and the other is not.
    """

    key: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    count: int | None = None
    first: tuple[int, ...] | None = None
    values: tuple[Any, Any] | None = None
    max_abs: float | None = None


@dataclass(frozen=True, kw_only=True)
class Differences:
    """What differs between two checkpoints, A and B.

    Attributes:
        facts: Differing facts of the save and the run, which are not content: those in the manifests by their names,
            and those in the plain data by path.
        only_a: The keys of tensors that only A has.
        only_b: The keys of tensors that only B has.
        tied: Names in both that are tied to different names, with those names in A and in B.
        tensors: Tensors in both that differ.
        plain: Differing plain data: the values in A and B by path; :data:`MISSING` on a side without it.
        compared: The number of tensors in both.
    """

    facts: Mapping[str, tuple[Any, Any]]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tied: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    tensors: tuple[TensorDifference, ...]
    plain: Mapping[str, tuple[Any, Any]]
    compared: int

    def __bool__(self) -> bool:
        """Whether their content differs."""
        return bool(self.only_a or self.only_b or self.tied or self.tensors or self.plain)


@retries_if_replaced("a", "b")
def compare(
    a: StrPath, b: StrPath, *, rtol: float = 0.0, atol: float = 0.0, on_progress: OnProgress | None = None
) -> Differences:
    """Compare two checkpoints: names, shapes, dtypes and values of all tensors, tied names, and the plain data.

    Strategies and world sizes may differ: full tensors are compared, a few MiB at a time. Of a tensor that one of them
    leaves out (``save_frozen=False``) digests are compared, without tolerance. What differs between runs
    that compute the same does not count: ids of fits, the folder of a ``ModelCheckpoint``, the seconds of a ``Timer``.
    A NaN equals a NaN, and -0.0 equals 0.0. Dicts, lists and tuples in the plain data are compared by content. torch is
    imported only if the bytes of a tensor differ.

    Args:
        a: A checkpoint: a local path or an fsspec URL.
        b: The other checkpoint.
        rtol: The relative tolerance: elements, and floats in the plain data, are equal if they differ by at most
            ``atol + rtol * abs(b)``.
        atol: The absolute tolerance.
        on_progress: Called with the progress.

    Returns:
        The differences; false if the content is the same.

    Raises:
        CheckpointFormatError: A checkpoint can't be read, or a file is missing or has the wrong size.
        CheckpointValueError: A tolerance is negative.
    """
    if not (rtol >= 0 and atol >= 0):
        raise CheckpointValueError(f"tolerances can't be negative: rtol={rtol}, atol={atol}; pass 0 or more")
    side_a, side_b = _Side(open_files(a)), _Side(open_files(b))
    # A fact that only one side has is a difference of the content.
    for path in side_a.run_facts.keys() ^ side_b.run_facts.keys():
        side = side_a if path in side_a.run_facts else side_b
        side.plain[path] = side.run_facts.pop(path)
    tensors_a, tensors_b = (_compared_tensors(side.files, side.plain) for side in (side_a, side_b))
    common_names = [name for name in tensors_a if name in tensors_b]
    compared_keys = [name for name in common_names if not _is_alias_in_both(name, side_a.files, side_b.files)]
    on_bytes = counter(sum(tensors_a[key].nbytes for key in compared_keys), on_progress)
    differences = []
    for key in compared_keys:
        difference = _compare_tensors(key, tensors_a[key], tensors_b[key], rtol, atol)
        if difference is not None:
            differences.append(difference)
        on_bytes(tensors_a[key].nbytes)
    return Differences(
        facts=_differing_facts(side_a, side_b),
        only_a=tuple(key for key in tensors_a if key not in tensors_b),
        only_b=tuple(key for key in tensors_b if key not in tensors_a),
        tied=_differing_ties(side_a.files.manifest, side_b.files.manifest, common_names),
        tensors=tuple(differences),
        plain=dict(_plain_differences(side_a.plain, side_b.plain, rtol, atol)),
        compared=len(compared_keys),
    )


class _Side:
    """One of the two checkpoints: its files, its plain data by path, and what in that differs from run to run."""

    def __init__(self, files: StoredFiles) -> None:
        refuse_damage(files, find_damage(files, files.manifest.files, checksums=False))
        self.files = files
        self.plain, self.run_facts = without_run_facts(dict(leaves(read_plain(files))))


def _differing_facts(a: _Side, b: _Side) -> dict[str, tuple[Any, Any]]:
    """Return the facts that differ, from both manifests and from the same paths of both plain data."""
    differing: dict[str, tuple[Any, Any]] = {}
    for fact in _RUN_FIELDS:
        fact_of_a, fact_of_b = getattr(a.files.manifest, fact), getattr(b.files.manifest, fact)
        if fact_of_a != fact_of_b:
            differing[fact] = (fact_of_a, fact_of_b)
    for path in a.run_facts:
        if a.run_facts[path] != b.run_facts[path]:
            differing[path] = (scalar(a.run_facts[path]), scalar(b.run_facts[path]))
    return differing


def _differing_ties(
    a: Manifest, b: Manifest, common_names: Iterable[str]
) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    ties_in_a, ties_in_b = _ties(a), _ties(b)
    differing: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for name in sorted(common_names):
        tied_in_a, tied_in_b = ties_in_a.get(name, ()), ties_in_b.get(name, ())
        if tied_in_a != tied_in_b:
            differing[name] = (tied_in_a, tied_in_b)
    return differing


@dataclass(frozen=True, kw_only=True)
class _ComparedTensor:
    """A tensor to compare.

    Attributes:
        shape: Its shape.
        dtype_name: The name of its dtype.
        read: Returns the bytes of a box. It is called in row-major order; the last argument is the number of elements
            before the box.
        digest: The digest of a tensor that the checkpoint leaves out, of which nothing can be read.
    """

    shape: tuple[int, ...]
    dtype_name: str
    read: Callable[[tuple[int, ...], tuple[int, ...], int], bytearray]
    digest: str | None = None

    def compute_digest(self) -> str:
        """Return the digest, which imports torch unless the checkpoint has it."""
        if self.digest is not None:
            return self.digest
        import torch

        from fsdp_core.state.digests import box_sum, digest_text
        from fsdp_core.state.dtypes import DTYPES

        total, elements = 0, 0
        for offsets, lengths in cut(self.shape, ITEM_BYTES[self.dtype_name], BLOCK_BYTES):
            block = self.read(offsets, lengths, elements)
            elements += math.prod(lengths)
            total += int(box_sum(torch.frombuffer(block, dtype=DTYPES[self.dtype_name]).reshape(lengths), offsets))
        return digest_text(total)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype_name]


def _compared_tensors(files: StoredFiles, plain: Mapping[str, Any]) -> dict[str, _ComparedTensor]:
    manifest = files.manifest
    reader = TensorBytes(files)

    def stored_tensor(key: str) -> _ComparedTensor:
        tensor = manifest.tensors[key]
        return _ComparedTensor(
            shape=tensor.shape,
            dtype_name=tensor.dtype_name,
            read=lambda offsets, lengths, start: reader.read(key, offsets, lengths),
        )

    def left_out_tensor(key: str) -> _ComparedTensor:
        tensor = manifest.left_out[key]

        def refuse(*_: object) -> bytearray:
            raise AssertionError(f"{key!r} is left out of the checkpoint")

        return _ComparedTensor(shape=tensor.shape, dtype_name=tensor.dtype_name, read=refuse, digest=tensor.digest)

    tensors = {key: stored_tensor(key) for key in manifest.tensors}
    tensors |= {key: left_out_tensor(key) for key in manifest.left_out}
    tensors |= {alias: tensors[key] for alias, key in manifest.aliases.items()}
    for path, node in plain.items():
        tensor = tensor_of(node)
        if tensor is not None and tensor[0] == "$tensor":
            tensors[path] = _small_tensor(files, tensor[1])
    return tensors


def _small_tensor(files: StoredFiles, name: str) -> _ComparedTensor:
    assert files.manifest.state_tensors is not None
    file = files.manifest.state_tensors
    header_entry = files.locate(file, name)
    item_bytes = ITEM_BYTES[header_entry.dtype_name]

    def read(offsets: tuple[int, ...], lengths: tuple[int, ...], start: int) -> bytearray:
        block = bytearray(math.prod(lengths) * item_bytes)
        files.fill(file, name, memoryview(block), header_entry.start + start * item_bytes)
        return block

    return _ComparedTensor(shape=header_entry.shape, dtype_name=header_entry.dtype_name, read=read)


def _ties(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """Return the names that each tied name is tied to."""
    groups: dict[str, set[str]] = {}
    for alias, key in manifest.aliases.items():
        groups.setdefault(key, {key}).add(alias)
    return {name: tuple(sorted(group - {name})) for group in groups.values() for name in group}


def _is_alias_in_both(key: str, a: StoredFiles, b: StoredFiles) -> bool:
    """Return whether a name is an alias of the same key in both checkpoints, so that the key alone is compared."""
    return key in a.manifest.aliases and a.manifest.aliases[key] == b.manifest.aliases.get(key)


def _compare_tensors(
    key: str, a: _ComparedTensor, b: _ComparedTensor, rtol: float, atol: float
) -> TensorDifference | None:
    has_same_dtype = a.dtype_name == b.dtype_name
    difference = TensorDifference(key=key, shapes=(a.shape, b.shape), dtypes=(a.dtype_name, b.dtype_name))
    if a.shape != b.shape:
        return difference
    if a.digest is not None or b.digest is not None:
        return None if has_same_dtype and a.compute_digest() == b.compute_digest() else difference
    count = 0
    max_abs = 0.0
    first: tuple[int, ...] | None = None
    values: tuple[Any, Any] | None = None
    block_start = 0
    item_bytes = max(ITEM_BYTES[a.dtype_name], ITEM_BYTES[b.dtype_name])
    for offsets, lengths in cut(a.shape, item_bytes, BLOCK_BYTES):
        block_a, block_b = a.read(offsets, lengths, block_start), b.read(offsets, lengths, block_start)
        if not has_same_dtype or block_a != block_b:
            block_difference = _compare_blocks((block_a, block_b), (a.dtype_name, b.dtype_name), rtol, atol)
            if block_difference.count and first is None:
                first = _unravel_index(block_start + block_difference.first, a.shape)
                values = block_difference.values
            count += block_difference.count
            max_abs = max(max_abs, block_difference.max_abs)
        block_start += math.prod(lengths)
    if has_same_dtype and not count:
        return None
    return replace(difference, count=count, first=first, values=values, max_abs=max_abs)


@dataclass(frozen=True, kw_only=True)
class _BlockDifference:
    count: int
    first: int = 0
    values: tuple[Any, Any] | None = None
    max_abs: float = 0.0


def _compare_blocks(
    blocks: tuple[bytearray, bytearray], dtypes: tuple[str, str], rtol: float, atol: float
) -> _BlockDifference:
    import torch

    from fsdp_core.state.dtypes import DTYPES

    tensors = [torch.frombuffer(block, dtype=DTYPES[name]) for block, name in zip(blocks, dtypes, strict=True)]
    wide_dtype = torch.complex128 if any(tensor.is_complex() for tensor in tensors) else torch.float64
    x, y = (tensor.to(wide_dtype) for tensor in tensors)
    is_inexact = any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
    if is_inexact or rtol or atol:
        unequal = ~torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True)
    elif dtypes[0] == dtypes[1]:
        # float64 does not hold every int64, and torch compares unsigned integers of some widths only.
        integer_dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ITEM_BYTES[dtypes[0]]]
        unequal = tensors[0].view(integer_dtype) != tensors[1].view(integer_dtype)
    else:
        unequal = tensors[0].to(torch.int64) != tensors[1].to(torch.int64)
    count = int(unequal.sum())
    if not count:
        return _BlockDifference(count=0)
    first = int(unequal.to(torch.uint8).argmax())
    absolute_differences = (x - y).abs()[unequal].nan_to_num(nan=math.inf, posinf=math.inf)
    values = tensors[0][first].item(), tensors[1][first].item()
    return _BlockDifference(count=count, first=first, values=values, max_abs=float(absolute_differences.max()))


def _unravel_index(flat_index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat_index, position = divmod(flat_index, size)
        index.insert(0, position)
    return tuple(index)


def _plain_differences(
    a: Mapping[str, Any], b: Mapping[str, Any], rtol: float, atol: float
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for path in [*a, *(path for path in b if path not in a)]:
        if path not in a:
            yield path, (MISSING, scalar(b[path]))
        elif path not in b:
            yield path, (scalar(a[path]), MISSING)
        elif not _is_equal(a[path], b[path], rtol, atol):
            yield path, (scalar(a[path]), scalar(b[path]))


def _is_equal(a: Any, b: Any, rtol: float, atol: float) -> bool:
    if tensor_of(a) is not None and tensor_of(b) is not None:
        return True  # compared as tensors
    if children(a) == [] and children(b) == []:
        return True
    if _is_number(a) and _is_number(b):
        return bool(a == b or abs(a - b) <= atol + rtol * abs(b))
    return type(a) is type(b) and a == b


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
