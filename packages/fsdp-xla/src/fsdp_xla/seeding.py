"""``torch.manual_seed``, and so ``seed_everything``, for XLA's random numbers too.

torch seeds the generators of all devices that it knows, but XLA has its own generators.

``torch.manual_seed`` is replaced when a rank starts, once per process. torch has no hook for it, and XLA's generators
would otherwise ignore seeds that are set in a rank. Code that does not run as a rank is not affected.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

__all__ = ["follow_manual_seed", "follow_seed_from_before"]

#: ``seed_device`` of this thread's rank, and its ``process`` id, which differs in a forked dataloader worker.
_rank_of_thread = threading.local()
_install_lock = threading.Lock()
_is_installed = False
#: The torch seed that was last applied to the device.
_last_seed: int | None = None


def follow_seed_from_before(seed_device: Callable[[int], None]) -> None:
    """Seed this process's device with the seed that was set before XLA started, instead of XLA's constant.

    Args:
        seed_device: Called with the seed, unless it was called with the same one before.
    """
    global _last_seed
    seed = torch.initial_seed()
    if seed != _last_seed:
        _last_seed = seed
        seed_device(seed % 2**63)


def follow_manual_seed(seed_device: Callable[[int], None]) -> None:
    """Let ``torch.manual_seed``, called in this thread from now on, seed the device of its rank too.

    torch has no hook for it: its function is replaced once, for the lifetime of the process. In other threads and in
    forked processes its behavior is unchanged.

    Args:
        seed_device: Called with the seed, which is not negative.
    """
    global _is_installed
    _rank_of_thread.process, _rank_of_thread.seed_device = os.getpid(), seed_device
    with _install_lock:
        if not _is_installed:
            torch.manual_seed = torch.random.manual_seed = _with_xla_seed(torch.manual_seed)
            _is_installed = True


def _with_xla_seed(manual_seed: Callable[[Any], torch.Generator]) -> Any:
    @wraps(manual_seed)
    def manual_seed_with_xla(seed: Any) -> torch.Generator:
        global _last_seed
        generator = manual_seed(seed)
        if getattr(_rank_of_thread, "process", None) == os.getpid():
            _last_seed = torch.initial_seed()
            _rank_of_thread.seed_device(int(seed) % 2**63)
        return generator

    return manual_seed_with_xla
