"""torch dtypes and their names in a manifest and in a safetensors header."""

from __future__ import annotations

import torch

from fsdp_core.state.dtype_names import STORED_NAMES

__all__ = ["DTYPES", "SAFETENSORS_NAMES", "dtype_name"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module: ``float32``, ``bfloat16``.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in STORED_NAMES}
"""The dtypes that a checkpoint can hold, by their name in a manifest."""

SAFETENSORS_NAMES: dict[torch.dtype, str] = {DTYPES[name]: stored for name, stored in STORED_NAMES.items()}
"""The names of these dtypes in a safetensors header."""
