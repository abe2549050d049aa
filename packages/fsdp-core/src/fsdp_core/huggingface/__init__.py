"""Folders of Hugging Face's libraries, written from shards and read into them: no rank holds the whole model.

:func:`save_pretrained` and :func:`save_adapter` write what ``from_pretrained`` of transformers and PEFT reads;
:func:`load_pretrained` reads such a folder. All ranks call them. :func:`consolidate_pretrained` writes a folder from a
checkpoint, in one process.

Neither transformers nor PEFT is imported before a model of theirs is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_core.lazy_names import lazy_names

if TYPE_CHECKING:
    from fsdp_core.huggingface.adapters import save_adapter
    from fsdp_core.huggingface.loading import LoadedFolder, load_pretrained
    from fsdp_core.huggingface.offline import consolidate_pretrained
    from fsdp_core.huggingface.saving import SavedFolder, save_pretrained

__all__ = [
    "LoadedFolder",
    "SavedFolder",
    "consolidate_pretrained",
    "load_pretrained",
    "save_adapter",
    "save_pretrained",
]

_HOMES = {
    "LoadedFolder": "fsdp_core.huggingface.loading",
    "SavedFolder": "fsdp_core.huggingface.saving",
    "consolidate_pretrained": "fsdp_core.huggingface.offline",
    "load_pretrained": "fsdp_core.huggingface.loading",
    "save_adapter": "fsdp_core.huggingface.adapters",
    "save_pretrained": "fsdp_core.huggingface.saving",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
