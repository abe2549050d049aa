"""Reading while another run saves there: the manifest is read again, and the read begins anew."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from fsdp_core.checkpoint.storage.folder import Folder, open_folder
from fsdp_core.checkpoint.storage.recognition import fingerprint, manifest_bytes
from fsdp_core.errors import CheckpointFormatError

__all__ = ["ATTEMPTS", "anew", "begins_anew", "pause", "seen", "too_often"]

P = ParamSpec("P")
T = TypeVar("T")

ATTEMPTS = 20
"""How often a read begins before it is given up."""

_SECONDS = 0.01


class _ReplacedTooOften(CheckpointFormatError):
    """A read was given up, which nothing around it is to begin anew."""


def begins_anew(*parameters: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function that reads checkpoints from beginning to end begin anew if one was replaced meanwhile.

    Args:
        *parameters: Those that take the checkpoints' paths.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def reading(*args: P.args, **kwargs: P.kwargs) -> T:
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            folders = [open_folder(given[name]) for name in parameters]
            return anew(folders, lambda: function(*args, **kwargs))

        return reading

    return decorate


def anew(folders: list[Folder], read: Callable[[], T], *, is_right: Callable[[T], bool] = lambda _: True) -> T:
    """Read until nothing is wrong, or what is wrong is no other save's doing.

    A save removes files only after its manifest has taken the place of the one that names them. So whatever is wrong
    while the manifest is the same is wrong with the checkpoint.

    Args:
        folders: The checkpoints that are read.
        read: Reads them from the beginning.
        is_right: Whether nothing is wrong with what was read, where ``read`` does not raise it.

    Returns:
        What ``read`` gives.

    Raises:
        CheckpointFormatError: They are replaced faster than they are read.
    """
    for attempt in range(ATTEMPTS):
        before = [seen(folder) for folder in folders]
        try:
            result = read()
        except _ReplacedTooOften:
            raise
        except (CheckpointFormatError, OSError):
            if [seen(folder) for folder in folders] == before:
                raise
        else:
            if is_right(result) or [seen(folder) for folder in folders] == before:
                return result
        pause(attempt)
    raise too_often(folders)


def seen(folder: Folder) -> str | None:
    """The manifest that is there now, by its fingerprint; ``None`` if there is none that can be read."""
    try:
        return fingerprint(manifest_bytes(folder))
    except Exception:  # the clients of object stores have errors of their own; the read itself will say it
        return None


def pause(attempt: int) -> None:
    """Wait before the next attempt, the longer the more there were."""
    time.sleep(_SECONDS * attempt)


def too_often(folders: list[Folder]) -> CheckpointFormatError:
    """What to raise after the last attempt."""
    return _ReplacedTooOften(
        f"{' or '.join(map(str, folders))} was replaced {ATTEMPTS} times while it was read, each time before it had "
        "been read to its end. Nothing is known to be wrong with it: read it when no run saves to it."
    )
