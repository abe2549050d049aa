"""The private names of torch that a rehearsal uses, each with its reason. Tested with torch 2.9 and 2.13."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

# Functional collectives name their group; no public function finds it.
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

# FSDP1 asks whether memory is allocated by its address; a fake tensor has none.
from torch.distributed.fsdp import _flat_param as flat_param

__all__ = ["flat_param", "group_named", "register_fake_backend"]


def group_named(name: str) -> Any:
    """The process group of a name; ``None`` if there is none."""
    with suppress(Exception):
        return _resolve_process_group(name)  # type: ignore[arg-type]
    return None


def register_fake_backend() -> None:
    """Register torch's process group that communicates nothing, which torch has for tests of its own."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
