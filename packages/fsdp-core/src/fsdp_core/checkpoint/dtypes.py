"""The names that dtypes go by in a manifest and in a safetensors header."""

from __future__ import annotations

import torch

__all__ = ["DTYPES", "SAFETENSORS_NAMES", "dtype_name"]

SAFETENSORS_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""The dtypes that a checkpoint can hold, and their names in a safetensors header."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without the module: ``float32``, ``bfloat16``.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


DTYPES: dict[str, torch.dtype] = {dtype_name(dtype): dtype for dtype in SAFETENSORS_NAMES}
"""The same dtypes by the name that a manifest gives them."""
