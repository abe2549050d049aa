"""Scripts as users write them, and how they are started."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fsdp_core.testing.launching.processes import start

__all__ = ["start_script"]

start_script = partial(start, folder=Path(__file__).parent)
