"""Reading while another run saves to the same path: the manifest is read again, and the read starts again."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from fsdp_core.checkpoint.storage.joined_folder import open_places
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder
from fsdp_core.checkpoint.storage.recognition import fingerprint, manifest_bytes
from fsdp_core.errors import CheckpointFormatError

__all__ = ["ATTEMPTS", "current_fingerprint", "pause", "read_again", "replaced_too_often", "retries_if_replaced"]

P = ParamSpec("P")
T = TypeVar("T")

ATTEMPTS = 20
"""How many times a read is attempted before it fails."""

_PAUSE_SECONDS = 0.01


class _ReplacedTooOften(CheckpointFormatError):
    """A read has failed after its last attempt. An enclosing read does not start it again."""


def retries_if_replaced(*parameters: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Run a function that reads checkpoints again if one of them was replaced in the meantime.

    Args:
        *parameters: The function's parameters that take the checkpoints' paths.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def read_with_retries(*args: P.args, **kwargs: P.kwargs) -> T:
            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
            folders = [open_places(paths=arguments[name]) for name in parameters]
            return read_again(folders, lambda: function(*args, **kwargs))

        return read_with_retries

    return decorate


def read_again(folders: list[Folder], read: Callable[[], T], *, is_intact: Callable[[T], bool] = lambda _: True) -> T:
    """Call a reader again as long as it meets a fault while another save is replacing a checkpoint.

    A save removes files only after its manifest has replaced the one that names them. So a fault that occurs while the
    manifest stays the same is a fault of the checkpoint.

    Args:
        folders: The checkpoints that are read.
        read: Reads them from the beginning.
        is_intact: Whether the result has no fault, for faults that ``read`` reports in its result instead of raising.

    Returns:
        The result of ``read``.

    Raises:
        CheckpointFormatError: The checkpoints are replaced faster than they are read.
    """
    for attempt in range(ATTEMPTS):
        fingerprints_before = [current_fingerprint(folder) for folder in folders]
        try:
            result = read()
        except _ReplacedTooOften:
            raise
        except (CheckpointFormatError, OSError):
            if [current_fingerprint(folder) for folder in folders] == fingerprints_before:
                raise
        else:
            if is_intact(result) or [current_fingerprint(folder) for folder in folders] == fingerprints_before:
                return result
        pause(attempt)
    raise replaced_too_often(folders)


def current_fingerprint(folder: Folder) -> str | None:
    """Return the fingerprint of the current manifest; ``None`` if there is none that can be read."""
    try:
        return fingerprint(manifest_bytes(folder))
    except Exception:  # object store clients raise errors of their own; the read itself will report them
        return None


def pause(attempt: int) -> None:
    """Wait before the next attempt, longer after each one."""
    time.sleep(_PAUSE_SECONDS * attempt)


def replaced_too_often(folders: list[Folder]) -> CheckpointFormatError:
    """Return the error to raise after the last attempt."""
    return _ReplacedTooOften(
        f"{' or '.join(map(str, folders))} was replaced {ATTEMPTS} times while it was read, each time before the read "
        "was complete. No fault of the checkpoint is known: read it when no run saves to it."
    )
