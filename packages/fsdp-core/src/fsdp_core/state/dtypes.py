"""torch's dtypes, and the names that they go by in a manifest and in a safetensors header."""

from __future__ import annotations

import torch

from fsdp_core.state.dtype_names import STORED_NAMES

__all__ = ["DTYPES", "SAFETENSORS_NAMES", "dtype_name"]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without the module: ``float32``, ``bfloat16``.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in STORED_NAMES}
"""The dtypes that a checkpoint can hold, by the name that a manifest gives them."""

SAFETENSORS_NAMES: dict[torch.dtype, str] = {DTYPES[name]: stored for name, stored in STORED_NAMES.items()}
"""The same dtypes, with their names in a safetensors header."""
