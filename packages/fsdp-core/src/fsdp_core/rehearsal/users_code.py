"""Finds the lines of a user's on stacks that libraries share with them."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

__all__ = ["is_users", "line_of_call", "line_of_error"]

#: Where the standard library and this package are, and what is not in a file.
_NOT_USERS = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<")


def is_users(file: str) -> bool:
    """Whether a file of code is the user's, and none of a library.

    Args:
        file: Its path, as code objects have it.
    """
    return "site-packages" not in file and "/src/fsdp_" not in file and not file.startswith(_NOT_USERS)


def line_of_error(error: BaseException) -> str:
    """The innermost line of the user's in an error's stack, in brackets; empty if there is none.

    Args:
        error: What was raised.
    """
    users = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f" ({users[-1].filename}:{users[-1].lineno})" if users else ""


def line_of_call() -> str:
    """The innermost line of the user's on the stack."""
    users = [frame for frame in traceback.extract_stack() if is_users(frame.filename)]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else "the script"
