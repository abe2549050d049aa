"""Modules: their buffers, how they load, and what FSDP has marked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter

# The only way to intercept every operation and traverse its arguments; no public names exist.
from torch.distributed.utils import _cast_forward_inputs

# The base class of every batch norm, including SyncBatchNorm; no public name exists.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

__all__ = [
    "CALL_OF_MODULES",
    "BatchNorm",
    "buffers_of",
    "cast_inputs",
    "is_flattened",
    "is_piece_now",
    "loads_in_its_own_way",
    "not_managed",
]


#: The code by which modules call their ``forward``, whose local variable ``self`` is the module.
CALL_OF_MODULES = nn.Module._call_impl.__code__


def is_flattened(parameter: Tensor) -> bool:
    """Whether FSDP1 manages a parameter, by itself or as part of a flat one. There is no public way to check."""
    return isinstance(parameter, FlatParameter) or bool(getattr(parameter, "_fsdp_flattened", False))


def is_piece_now(flat: Tensor) -> bool:
    """Whether a flat parameter is this rank's piece at this moment, and not what FSDP1 has gathered into it."""
    piece: Tensor | None = getattr(flat, "_local_shard", None)
    return piece is None or flat.data_ptr() == piece.data_ptr()


def cast_inputs(dtype: torch.dtype, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast floating-point tensors at any depth of a module's arguments, as FSDP's roots do.

    Args:
        dtype: The dtype.
        args: Arguments by position.
        kwargs: Arguments by keyword.
    """
    cast: tuple[Any, Any] = _cast_forward_inputs(dtype, *args, **kwargs)
    return cast


def loads_in_its_own_way(module: nn.Module) -> bool:
    """Whether a module has a method of its own to load a state dict, or hooks, which no public name lists."""
    is_own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return is_own or bool(module._load_state_dict_pre_hooks)


@contextmanager
def not_managed(module: nn.Module) -> Iterator[None]:
    """A context in which no submodule is marked as managed by FSDP; other libraries check the mark.

    torch marks modules for its compiler; transformers synchronizes ranks if it finds the mark.
    """
    marked = [inner for inner in module.modules() if inner.__dict__.pop("_is_fsdp_managed_module", False)]
    try:
        yield
    finally:
        for inner in marked:
            inner.__dict__["_is_fsdp_managed_module"] = True


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The dictionary in which a module itself holds its buffers, by name; it may be changed."""
    return module._buffers
