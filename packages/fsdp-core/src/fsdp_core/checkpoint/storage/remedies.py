"""Remedies for errors of a disk or an object store."""

from __future__ import annotations

import errno

from fsdp_core.errors import CheckpointFormatError

__all__ = ["remedy", "unreadable"]

_NO_ROOM = "There is no space left: free some, or use another path."
_NOT_ALLOWED = "This user lacks permission for that: request it, or use another path."
_A_FILE = "A file exists where a folder must be: move it away, or use another path."
_NOT_THERE = "Check the path; a bucket or a container must already exist."

_BY_NUMBER = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EFBIG: "The file system, or a limit of this process (ulimit -f), allows no larger file: raise the limit, or "
    "use another path.",
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: "It is mounted read-only: use another path.",
    errno.ENOTDIR: _A_FILE,
    errno.EEXIST: _A_FILE,
    errno.ENAMETOOLONG: "The name is too long for this file system: use a shorter one.",
    errno.ENOENT: _NOT_THERE,
}
_BY_CLASS = {PermissionError: _NOT_ALLOWED, FileNotFoundError: _NOT_THERE, FileExistsError: _A_FILE}


def remedy(error: Exception) -> str:
    """Return the remedy for ``error``; an empty string if there is none.

    Example:
        >>> remedy(OSError(errno.ENOSPC, "No space left on device"))
        'There is no space left: free some, or use another path.'
        >>> remedy(PermissionError("Access Denied"))
        'This user lacks permission for that: request it, or use another path.'
        >>> remedy(KeyError("x"))
        ''
    """
    if not isinstance(error, OSError):
        return ""
    if error.errno in _BY_NUMBER:
        return _BY_NUMBER[error.errno]
    remedies = (text for error_class, text in _BY_CLASS.items() if isinstance(error, error_class))
    return next(remedies, "Check the disk or the connection, and try again.")


def unreadable(path: str, error: OSError) -> CheckpointFormatError:
    """Return the error for a file that can't be accessed, so that it is not mistaken for missing or damaged."""
    return CheckpointFormatError(f"can't read {path}: {type(error).__name__}: {error}. {remedy(error)}".rstrip())
