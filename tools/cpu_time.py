"""CPU seconds of processes and their descendants: a busy machine takes longer, and doesn't use more of them."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

__all__ = ["relative_speed", "tree_seconds"]

_TICK = 1 / os.sysconf("SC_CLK_TCK")

#: By root, processes that are not of its tree and will not be: to read of each takes most of the time.
_STRANGERS: dict[int, set[int]] = defaultdict(set)

#: By root, when they were looked at last, and after how many seconds they are again.
_SINCE: dict[int, float] = defaultdict(float)
_RENEWED = 30.0

#: CPU seconds of :func:`_work` on the machine that the budgets in pyproject.toml are of.
_REFERENCE = 0.165


def tree_seconds(root: int) -> float:
    """CPU seconds of a process, of what it has started, and of what these have waited for.

    Args:
        root: The number of the process. Elsewhere than on Linux, only this process itself can be asked about.
    """
    if not Path("/proc/self/stat").exists():
        return sum(os.times()[:4])
    strangers = _STRANGERS[root]
    if time.monotonic() - _SINCE[root] > _RENEWED:  # a number may have been given to a process of the tree since
        strangers.clear()
        _SINCE[root] = time.monotonic()
    running = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    children: dict[int, list[int]] = defaultdict(list)
    seconds: dict[int, float] = {}
    for pid in running - strangers:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # names are any bytes
            children[int(fields[1])].append(pid)
            seconds[pid] = sum(map(int, fields[11:15])) * _TICK
    tree = [root]
    for pid in tree:
        tree += children[pid]
    strangers &= running
    strangers |= seconds.keys() - set(tree)
    return sum(seconds.get(pid, 0.0) for pid in tree)


def relative_speed() -> float:
    """How many CPU seconds this machine takes for one of the machine that the budgets are of; no less than 1."""
    return max(1.0, min(_work() for _ in range(3)) / _REFERENCE)


def _work() -> float:
    began = time.process_time()
    table: dict[str, int] = {}
    for number in range(1_600_000):
        key = str(number % 1009)
        table[key] = table.get(key, 0) + len(key)
    return time.process_time() - began
