"""The device that the run is on: a CUDA card, or the CPU on which it is rehearsed."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from records import RECORDS, Records

__all__ = ["ACCELERATOR", "DEVICE", "HAS_CARD", "arguments", "synchronize"]

HAS_CARD = torch.cuda.is_available()
#: The first card, or the CPU: what one rank uses.
DEVICE = torch.device("cuda", 0) if HAS_CARD else torch.device("cpu")
#: Lightning's name of the accelerator.
ACCELERATOR = DEVICE.type


def synchronize() -> None:
    """Wait until the device has done all that it was given."""
    if HAS_CARD:
        torch.cuda.synchronize()


def arguments(
    part: str, description: str | None, add: Callable[[argparse.ArgumentParser], object] = lambda parser: None
) -> tuple[argparse.Namespace, Records]:
    """Read the command line of a part: ``--out``, ``--tiny`` and ``--seconds``.

    Args:
        part: The part's name.
        description: The text of ``--help``.
        add: Adds what only this part takes.

    Returns:
        The arguments, with ``deadline`` on the clock of :func:`time.monotonic`, and the records in the folder
        ``--out``.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="the folder for records and logs")
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal on a CPU")
    parser.add_argument("--seconds", type=float, default=120.0, help="what is not begun by then is left out, and said")
    add(parser)
    words = parser.parse_args()
    since_start = time.time() - psutil.Process().create_time()  # imports have taken of the time, too
    words.deadline = time.monotonic() + words.seconds - since_start
    if not HAS_CARD:
        torch.set_num_threads(1)
    gc.freeze()  # nothing that modules hold is garbage
    gc.enable()
    return words, Records(words.out / RECORDS, part, judges=not words.tiny)
