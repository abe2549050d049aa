"""Warnings about faults of ours, where an exception would break the import of torch or of Lightning."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn", "warn_of_fault"]


def warn_of_fault(name: str, error: Exception) -> None:
    """Warn that the registry of one of Lightning's strategy modules lacks our names."""
    warn(
        f"fsdp-core could not enter its strategy names in {name}: {type(error).__name__}: {error}\n"
        "Lightning works without them. `fsdp doctor` shows what is wrong."
    )


def warn(message: str) -> None:
    """Warn, but never raise: under ``python -W error`` an exception would fail the user's own import."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        print(f"warning: {message}", file=sys.stderr)
