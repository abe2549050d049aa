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

#: Thread-local: what seeds the device of this thread's rank, and the process id, because dataloader workers fork.
_here = threading.local()
_installing = threading.Lock()
_installed = False
#: The torch seed that the device of this process's only rank has last followed.
_seeded_with: int | None = None


def follow_seed_from_before(seed_device: Callable[[int], None]) -> None:
    """Apply the seed from before the start to this process's device, which otherwise begins with a constant seed.

    Args:
        seed_device: Called with the seed, unless it was called with the same one before.
    """
    global _seeded_with
    seed = torch.initial_seed()
    if seed != _seeded_with:
        _seeded_with = seed
        seed_device(seed % 2**63)


def follow_manual_seed(seed_device: Callable[[int], None]) -> None:
    """Let ``torch.manual_seed``, called in this thread from now on, seed the device of its rank too.

    torch has no hook for it: its function is replaced once, for the lifetime of the process. In other threads and in
    forked processes its behavior is unchanged.

    Args:
        seed_device: Called with the seed, which is not negative.
    """
    global _installed
    _here.process, _here.seed_device = os.getpid(), seed_device
    with _installing:
        if not _installed:
            torch.manual_seed = torch.random.manual_seed = _seeding_xla(torch.manual_seed)
            _installed = True


def _seeding_xla(manual_seed: Callable[[Any], torch.Generator]) -> Any:
    @wraps(manual_seed)
    def manual_seed_of_xla_too(seed: Any) -> torch.Generator:
        global _seeded_with
        generator = manual_seed(seed)
        if getattr(_here, "process", None) == os.getpid():
            _seeded_with = torch.initial_seed()
            _here.seed_device(int(seed) % 2**63)
        return generator

    return manual_seed_of_xla_too
