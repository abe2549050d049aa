"""What a module keeps between steps beside parameters: buffers, and attributes that hold plain values."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

__all__ = ["BATCH_NORMS", "impose_state", "is_same_value", "read_state"]

#: What normalises over the rows of a batch.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

#: How much two values may differ, relative to them.
_TOLERANCE = 1e-9


def read_state(module: nn.Module) -> dict[str, Any]:
    """Copies of buffers and plain attributes, by name, without those of batch norms.

    Args:
        module: The module, and whatever it holds.
    """
    of_libraries = vars(pl.LightningModule()).keys()
    state: dict[str, Any] = {}
    for prefix, submodule in module.named_modules():
        if isinstance(submodule, BATCH_NORMS):
            continue
        buffers = dict(submodule.named_buffers(recurse=False))
        attributes = {name: value for name, value in vars(submodule).items() if name not in of_libraries}
        for name, value in (buffers | attributes).items():
            if _is_plain(value):
                state[f"{prefix}.{name}" if prefix else name] = _copy(value)
    return state


def impose_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Set buffers and attributes.

    Args:
        module: The module.
        state: Values, by name.
    """
    for path, value in state.items():
        prefix, _, name = path.rpartition(".")
        setattr(module.get_submodule(prefix), name, _copy(value))


def is_same_value(first: Any, second: Any) -> bool:
    """Whether two plain values are the same but for rounding.

    Args:
        first: A value of a state.
        second: Another one.

    Example:
        >>> is_same_value({"a": [0.1 + 0.2]}, {"a": [0.3]})
        True
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        is_alike = first.shape == second.shape and first.dtype == second.dtype
        return is_alike and torch.allclose(first, second, rtol=_TOLERANCE, atol=0.0, equal_nan=True)
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_same_value(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(is_same_value, first, second))
    if isinstance(first, float):
        return math.isclose(first, second, rel_tol=_TOLERANCE) or (math.isnan(first) and math.isnan(second))
    return bool(first == second)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if type(value) is dict:
        return all(isinstance(key, str | int) for key in value) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in (int, float, bool, str, type(None))


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copy, value))
    return copy.copy(value)
