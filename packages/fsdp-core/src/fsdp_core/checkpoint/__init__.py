"""One checkpoint for any hardware: a folder with a manifest and safetensors files, written by all ranks, no pickle.

:func:`save` takes, and :func:`load` returns, nested dicts and lists. :func:`fill_all` writes loaded tensors into the
shards of another world size. :func:`load_state_dict` returns a model's full state dict in one process.

Importing this package does not import torch: modules that need it are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_core.checkpoint.format.manifest import FORMAT_VERSION, Manifest
from fsdp_core.checkpoint.storage.recognition import is_checkpoint, is_folder, read_manifest
from fsdp_core.checkpoint.storage.removal import remove
from fsdp_core.checkpoint.verifying import verify
from fsdp_core.lazy_names import lazy_names

if TYPE_CHECKING:
    from fsdp_core.checkpoint.collective import gather_to_all, gather_to_first, run_on_all, run_on_first
    from fsdp_core.checkpoint.loading import load
    from fsdp_core.checkpoint.saving import save
    from fsdp_core.checkpoint.state_dict import load_state_dict
    from fsdp_core.checkpoint.tools.comparing import Differences, TensorDifference, compare
    from fsdp_core.checkpoint.tools.consolidation import Consolidated, consolidate_huggingface, consolidate_safetensors
    from fsdp_core.checkpoint.tools.describing import describe
    from fsdp_core.checkpoint.tools.gathering import Gathered, gather
    from fsdp_core.checkpoint.tools.resharding import reshard
    from fsdp_core.state.chunks import Chunk, ChunkedTensor, chunked
    from fsdp_core.state.filling import KeyDifferences, fill, fill_all
    from fsdp_core.state.saved_tensor import SavedTensor

__all__ = [
    "FORMAT_VERSION",
    "Chunk",
    "ChunkedTensor",
    "Consolidated",
    "Differences",
    "Gathered",
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
    "gather",
    "gather_to_all",
    "gather_to_first",
    "is_checkpoint",
    "is_folder",
    "load",
    "load_state_dict",
    "read_manifest",
    "remove",
    "reshard",
    "run_on_all",
    "run_on_first",
    "save",
    "verify",
]

_HOMES = {
    "Chunk": "fsdp_core.state.chunks",
    "ChunkedTensor": "fsdp_core.state.chunks",
    "Consolidated": "fsdp_core.checkpoint.tools.consolidation",
    "Differences": "fsdp_core.checkpoint.tools.comparing",
    "Gathered": "fsdp_core.checkpoint.tools.gathering",
    "KeyDifferences": "fsdp_core.state.filling",
    "SavedTensor": "fsdp_core.state.saved_tensor",
    "TensorDifference": "fsdp_core.checkpoint.tools.comparing",
    "chunked": "fsdp_core.state.chunks",
    "compare": "fsdp_core.checkpoint.tools.comparing",
    "consolidate_huggingface": "fsdp_core.checkpoint.tools.consolidation",
    "consolidate_safetensors": "fsdp_core.checkpoint.tools.consolidation",
    "describe": "fsdp_core.checkpoint.tools.describing",
    "fill": "fsdp_core.state.filling",
    "fill_all": "fsdp_core.state.filling",
    "gather": "fsdp_core.checkpoint.tools.gathering",
    "load": "fsdp_core.checkpoint.loading",
    "load_state_dict": "fsdp_core.checkpoint.state_dict",
    "reshard": "fsdp_core.checkpoint.tools.resharding",
    "save": "fsdp_core.checkpoint.saving",
    "gather_to_all": "fsdp_core.checkpoint.collective",
    "run_on_all": "fsdp_core.checkpoint.collective",
    "run_on_first": "fsdp_core.checkpoint.collective",
    "gather_to_first": "fsdp_core.checkpoint.collective",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
