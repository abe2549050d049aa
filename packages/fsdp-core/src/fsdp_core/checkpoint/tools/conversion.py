"""Shared parts of checkpoint conversions: refusal of damaged files, progress, dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fsdp_core.checkpoint.storage.stored_files import StoredFiles
from fsdp_core.checkpoint.verifying import find_damage, refuse_damage
from fsdp_core.errors import CheckpointValueError

__all__ = ["FLOATING", "OnProgress", "check_dtype", "counter", "refuse_damaged"]

OnProgress = Callable[[int, int], None]
"""Called with the number of bytes that are done, and the total."""

FLOATING = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The dtypes that can be converted, and converted to."""


def check_dtype(dtype: str | None) -> None:
    """Refuse an unsupported dtype to convert to.

    Raises:
        CheckpointValueError: It is not one of :data:`FLOATING`.
    """
    if dtype is not None and dtype not in FLOATING:
        raise CheckpointValueError(f"can't convert to {dtype!r}; choose one of {', '.join(FLOATING)}")


def refuse_damaged(
    files: StoredFiles, names: Iterable[str], *, checksums: bool, on_bytes: Callable[[int], None]
) -> None:
    """Refuse damaged files.

    Args:
        files: The files of a checkpoint.
        names: The files to check.
        checksums: Whether to compare every byte; otherwise, sizes and headers.
        on_bytes: Called with the number of bytes that have just been compared, if every byte is.

    Raises:
        CheckpointFormatError: A file is damaged.
    """
    damage = find_damage(
        files, names, checksums=checksums, on_bytes=(lambda name, count: on_bytes(count)) if checksums else None
    )
    refuse_damage(files, damage)


def counter(total: int, on_progress: OnProgress | None) -> Callable[[int], None]:
    """Return a function that counts bytes, and calls ``on_progress`` with their sum and the total."""
    done = 0

    def count(number: int) -> None:
        nonlocal done
        done += number
        if on_progress is not None:
            on_progress(done, total)

    return count
