"""One checkpoint for any hardware: a folder with a manifest and safetensors files, written by all ranks, no pickle.

:func:`save` and :func:`load` take and give a nest of dicts and lists; :func:`fill_all` writes what was loaded into the
shards of another world size. :func:`load_state_dict` gives a model's full state in one process.

Importing this package imports no torch: what needs it is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsdp_core.checkpoint.manifest import FORMAT_VERSION, Manifest
from fsdp_core.checkpoint.recognition import is_checkpoint, is_folder, read_manifest
from fsdp_core.checkpoint.removal import remove

# At once, for the module has the function's name, and would take its place here when it is imported later.
from fsdp_core.checkpoint.verify import verify

if TYPE_CHECKING:
    from fsdp_core.checkpoint.chunks import Chunk, ChunkedTensor, chunked
    from fsdp_core.checkpoint.comparing import Differences, TensorDifference, compare
    from fsdp_core.checkpoint.consolidation import Consolidated, consolidate_huggingface, consolidate_safetensors
    from fsdp_core.checkpoint.describing import describe
    from fsdp_core.checkpoint.filling import KeyDifferences, fill, fill_all
    from fsdp_core.checkpoint.loading import SavedTensor, load
    from fsdp_core.checkpoint.rewriting import reshard
    from fsdp_core.checkpoint.saving import save
    from fsdp_core.checkpoint.state_dict import load_state_dict

__all__ = [
    "FORMAT_VERSION",
    "Chunk",
    "ChunkedTensor",
    "Consolidated",
    "Differences",
    "KeyDifferences",
    "Manifest",
    "SavedTensor",
    "TensorDifference",
    "chunked",
    "compare",
    "consolidate_huggingface",
    "consolidate_safetensors",
    "describe",
    "fill",
    "fill_all",
    "is_checkpoint",
    "is_folder",
    "load",
    "load_state_dict",
    "read_manifest",
    "remove",
    "reshard",
    "save",
    "verify",
]

_HOMES = {
    "Chunk": "chunks",
    "ChunkedTensor": "chunks",
    "Consolidated": "consolidation",
    "Differences": "comparing",
    "KeyDifferences": "filling",
    "SavedTensor": "loading",
    "TensorDifference": "comparing",
    "chunked": "chunks",
    "compare": "comparing",
    "consolidate_huggingface": "consolidation",
    "consolidate_safetensors": "consolidation",
    "describe": "describing",
    "fill": "filling",
    "fill_all": "filling",
    "load": "loading",
    "load_state_dict": "state_dict",
    "reshard": "rewriting",
    "save": "saving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
