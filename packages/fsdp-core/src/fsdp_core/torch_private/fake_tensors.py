"""Fake tensors, which have shapes and no values, and what a rehearsal on them needs of torch's operators and groups."""

from __future__ import annotations

import importlib
import re
from contextlib import suppress
from typing import Any

import torch

# Which mode is on; torch has no public name for it.
from torch._guards import active_fake_mode

# No public module has them.
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

# FSDP1 asks whether memory is allocated by its address; a fake tensor has none.
from torch.distributed.fsdp import _flat_param as flat_param

# It cuts gradients into a view for each rank.
from torch.distributed.fsdp import _runtime_utils as fsdp_runtime

# Functional collectives name their group; no public function finds it.
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]  # isort: skip

# On which devices optimizers compute with lists of tensors; no public name says it.
from torch.utils import _foreach_utils as foreach_utils

# Without it, what a rehearsal computes for real would be made fake.
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "CTC_LOSS",
    "GROUPED_MM",
    "ITEM",
    "PACK_PADDED",
    "UNIQUE",
    "DynamicOutputShapeException",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "active_fake_mode",
    "flat_param",
    "foreach_utils",
    "fsdp_runtime",
    "group_named",
    "is_mutable",
    "no_dispatch",
    "operator_name",
    "operator_without_fake",
    "register_fake_backend",
    "tree_leaves",
    "tree_map_only",
]

#: The operators of ``tensor.item()``, ``tensor.unique()``, products of matrices in groups, ``pack_padded_sequence()``
#: and ``ctc_loss()``.
ITEM, UNIQUE = torch.ops.aten._local_scalar_dense.default, torch.ops.aten._unique2.default
GROUPED_MM = torch.ops.aten._grouped_mm.default
PACK_PADDED = torch.ops.aten._pack_padded_sequence.default
CTC_LOSS = torch.ops.aten._ctc_loss.Tensor


def operator_name(func: Any) -> str:
    """The name of an operator without its namespace and overload."""
    return str(func._schema.name.partition("::")[2])


def is_mutable(func: Any) -> bool:
    """Whether an operator writes to one of its arguments."""
    return bool(func._schema.is_mutable)


def operator_without_fake(error: BaseException) -> str | None:
    """The operator for whose lack of shapes an error was raised, such as ``"mine::scale"``; ``None`` for other errors.

    Args:
        error: What was raised under a fake mode.
    """
    if isinstance(error, UnsupportedOperatorException):
        operator: str = error.func._schema.name
        return operator
    match = re.search(r"no fake impl registered for <CustomOpDef\(([\w:.]+)\)>", str(error))
    return match[1] if match else None


def group_named(name: str) -> Any:
    """The process group of a name; ``None`` if there is none."""
    with suppress(Exception):
        return _resolve_process_group(name)  # type: ignore[arg-type]
    return None


def register_fake_backend() -> None:
    """Register torch's process group that communicates nothing, which torch has for tests of its own."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
