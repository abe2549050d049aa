"""One checkpoint for any hardware: a folder with a manifest and safetensors files, written by all ranks, no pickle.

:func:`save` and :func:`load` take and give a nest of dicts and lists; :func:`fill_all` writes what was loaded into the
shards of another world size. :func:`load_state_dict` gives a model's full state in one process.
"""

from fsdp_core.checkpoint.chunks import Chunk, ChunkedTensor, chunked
from fsdp_core.checkpoint.filling import KeyDifferences, fill, fill_all
from fsdp_core.checkpoint.loading import SavedTensor, load
from fsdp_core.checkpoint.manifest import FORMAT_VERSION, Manifest
from fsdp_core.checkpoint.recognition import is_checkpoint, is_folder, read_manifest
from fsdp_core.checkpoint.removal import remove
from fsdp_core.checkpoint.saving import save
from fsdp_core.checkpoint.state_dict import load_state_dict
from fsdp_core.checkpoint.verify import verify

__all__ = [
    "FORMAT_VERSION",
    "Chunk",
    "ChunkedTensor",
    "KeyDifferences",
    "Manifest",
    "SavedTensor",
    "chunked",
    "fill",
    "fill_all",
    "is_checkpoint",
    "is_folder",
    "load",
    "load_state_dict",
    "read_manifest",
    "remove",
    "save",
    "verify",
]
