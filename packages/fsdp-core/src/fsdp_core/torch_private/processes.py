"""Processes that end with their parent: torch has the system call. Checked on torch 2.13."""

from __future__ import annotations

import os
import signal

from torch import multiprocessing

__all__ = ["end_with_parent"]


def end_with_parent(parent: int) -> None:
    """Let the system end this process when the thread that has forked it ends, by whatever. It does so on Linux.

    Args:
        parent: The parent's process id.
    """
    multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    if os.getppid() != parent:  # it has ended before
        os._exit(1)
