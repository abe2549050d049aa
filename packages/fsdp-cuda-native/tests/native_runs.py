"""What the tests of ``fsdp_native`` share: options by which it shards otherwise, and short runs with it."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from fsdp_core.sharding.units.wrap_policy import describe_policy
from fsdp_core.testing import short_runs
from fsdp_core.testing.oracle import Block

FLAT: dict[str, Any] = {"use_orig_params": False, "auto_wrap_policy": {Block, nn.Linear}}  # one kind of them in a unit
WHOLE: dict[str, Any] = {"sharding_strategy": "NO_SHARD"}
SHARD_GRAD_OP: dict[str, Any] = {"sharding_strategy": "SHARD_GRAD_OP"}
HYBRID: dict[str, Any] = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}

set_up = partial(short_runs.set_up, "fsdp_native")


def show_parameter(value: Any) -> str:
    """How pytest shows a parameter of a test."""
    if isinstance(value, dict):
        return ",".join(f"{key}={describe_policy(option)}" for key, option in value.items())
    return "" if isinstance(value, (list, tuple)) else str(value)
