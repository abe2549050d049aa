"""Short runs with ``fsdp2``."""

from __future__ import annotations

from functools import partial

from fsdp_core.testing import short_runs

set_up = partial(short_runs.set_up, "fsdp2")
