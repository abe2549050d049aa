"""Fills this rank's tensors from a checkpoint. Everything is compared before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.state.chunks import ChunkedTensor, chunked
from fsdp_core.state.dtypes import dtype_name
from fsdp_core.state.saved_tensor import SavedTensor

__all__ = ["KeyDifferences", "fill", "fill_all"]

_MOST_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class KeyDifferences:
    """Names that exist on one side only.

    Attributes:
        missing: Names of targets that the checkpoint lacks.
        unexpected: Names in the checkpoint without a target.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def fill(target: ChunkedTensor | Tensor, source: SavedTensor | Tensor, *, cast: bool = False) -> None:
    """Write this rank's part of ``source`` into ``target``, in place.

    Args:
        target: Chunks, a DTensor, or a plain tensor.
        source: The full tensor: in memory, or in a checkpoint, from which only the required part is read.
        cast: Whether the dtypes may differ.

    Raises:
        CheckpointMismatchError: The shapes differ, or the dtypes without ``cast``; nothing was written.

    Example:
        >>> weight = torch.zeros(3)
        >>> fill(weight, torch.tensor([1.0, 2.0, 3.0]))
        >>> weight.tolist()
        [1.0, 2.0, 3.0]
    """
    name = source.key if isinstance(source, SavedTensor) else "the tensor"
    if (fault := _difference(target, source, cast=cast)) is not None:
        raise CheckpointMismatchError(f"can't fill {name!r}: {fault}")
    with torch.no_grad():
        for chunk in chunked(target).chunks:
            if isinstance(source, SavedTensor):
                source.read_into(chunk)
            else:
                assert isinstance(chunk.data, Tensor)
                box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.data.shape, strict=True))
                chunk.data.copy_(source.detach()[box])


def fill_all(
    targets: Mapping[str, ChunkedTensor | Tensor],
    sources: Mapping[str, SavedTensor | Tensor],
    *,
    strict: bool = True,
    cast: bool = False,
    source_name: str = "the checkpoint",
    check_only: bool = False,
) -> KeyDifferences:
    """Fill tensors by name. All of them are compared first: either all match, or none is changed.

    Args:
        targets: This rank's tensors by name.
        sources: The checkpoint's tensors by name.
        strict: Whether both must have the same names.
        cast: Whether dtypes may differ.
        source_name: The name of the source in an error.
        check_only: Whether to compare only, and write nothing.

    Returns:
        The names that exist on one side only; none if ``strict``.

    Raises:
        CheckpointMismatchError: Names (if ``strict``), shapes or dtypes (without ``cast``) differ. The message groups
            them, and shows at most 20 of each; nothing was written.
    """
    differences = KeyDifferences(
        missing=tuple(name for name in targets if name not in sources),
        unexpected=tuple(name for name in sources if name not in targets),
    )
    common_names = [name for name in targets if name in sources]
    fault_by_name = {name: _difference(targets[name], sources[name], cast=cast) for name in common_names}
    mismatches = [f"{name}: {fault}" for name, fault in fault_by_name.items() if fault is not None]
    groups: list[tuple[str, list[str]]] = [("differ", mismatches)]
    if strict:
        groups += [("are missing in it", list(differences.missing)), ("are only in it", list(differences.unexpected))]
    if any(names for _, names in groups):
        lines = [f"{source_name} does not fit, so nothing was loaded from it:"]
        for title, names in groups:
            if names:
                lines.append(f"  {len(names)} {title}:")
                lines += [f"    {name}" for name in names[:_MOST_SHOWN]]
                lines += [f"    … and {len(names) - _MOST_SHOWN} more"] if len(names) > _MOST_SHOWN else []
        if mismatches:
            lines.append("Load it into the model that it was saved from, at its precision.")
            if all(" dtype " in fault for fault in mismatches):
                lines.append(
                    "To convert it, pass strict=False, or in a LightningModule set self.strict_loading = False; "
                    "names that don't match are then skipped."
                )
        else:
            lines.append(
                "Load it into the model that it was saved from; or load only the names that both have: pass "
                "strict=False, or in a LightningModule set self.strict_loading = False."
            )
        raise CheckpointMismatchError("\n".join(lines))
    if not check_only:
        for name in common_names:
            fill(targets[name], sources[name], cast=cast)
    return differences


def _difference(target: ChunkedTensor | Tensor, source: SavedTensor | Tensor, *, cast: bool) -> str | None:
    if isinstance(source, ChunkedTensor | DTensor):
        return "it is one rank's shard, not a full tensor: save a checkpoint and load that, or pass full tensors"
    target_shape, source_shape = tuple(target.shape), tuple(source.shape)
    if target_shape != source_shape:
        return f"its shape is {source_shape} in the checkpoint, and {target_shape} here"
    if target.dtype != source.dtype and not cast:
        return f"its dtype is {dtype_name(source.dtype)} in the checkpoint, and {dtype_name(target.dtype)} here"
    return None
