"""Names and sizes of the dtypes that a checkpoint can hold, available without importing torch."""

from __future__ import annotations

__all__ = ["ITEM_BYTES", "STORED_NAMES"]

_KNOWN = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("C64", 8),
}

STORED_NAMES: dict[str, str] = {name: stored for name, (stored, _) in _KNOWN.items()}
"""The name of a dtype in a safetensors header, by its name in a manifest (which is torch's)."""

ITEM_BYTES: dict[str, int] = {name: size for name, (_, size) in _KNOWN.items()}
"""The size of an element in bytes, by the dtype's name in a manifest."""
