"""Ranks that are threads of one process, on XLA's CPU client. Never active on a TPU."""

from __future__ import annotations

import os

__all__ = ["uses_cpu_devices"]


def uses_cpu_devices() -> bool:
    """Whether ``PJRT_DEVICE`` makes XLA run on the CPU."""
    return os.environ.get("PJRT_DEVICE", "").upper() == "CPU"
