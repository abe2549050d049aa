"""Counts the collectives that a rank takes part in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["count_collectives"]


def count_collectives(work: Callable[[], object], name: str) -> int:
    """The number of collectives of one kind during ``work``, on process groups.

    Args:
        work: What this rank does.
        name: What torch's name of the collective contains, such as ``"allgather"``.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    profiler: Any = profile.profiler
    names = [event.name() for event in profiler.kineto_results.events()]  # key_averages() would take far longer
    return sum("c10d::" in one and name in one for one in names)
