"""State of a sharded module by name: boxes of tensors, how they are filled, and how flat parameters map to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_core.lazy_names import lazy_names

if TYPE_CHECKING:
    from fsdp_core.state.chunks import Chunk, ChunkedTensor, TensorSource, chunked
    from fsdp_core.state.filling import KeyDifferences, fill, fill_all
    from fsdp_core.state.fqn import aliases, clean_name, named_parameters, unwrap_compiled
    from fsdp_core.state.full_tensor import gathered_modules, running_forwards
    from fsdp_core.state.held_gradients import (
        HeldGradients,
        held_at_parameters,
        refuse_half_gradients,
        restore_at_parameters,
    )
    from fsdp_core.state.host_memory import give_back
    from fsdp_core.state.layout import FlatRange, Layout, Part, stand_in
    from fsdp_core.state.optimizer import load_optimizer_state, optimizer_state, state_by_name
    from fsdp_core.state.random_state import RandomState
    from fsdp_core.state.saved_tensor import SavedTensor

__all__ = [
    "Chunk",
    "ChunkedTensor",
    "FlatRange",
    "HeldGradients",
    "KeyDifferences",
    "Layout",
    "Part",
    "RandomState",
    "SavedTensor",
    "TensorSource",
    "aliases",
    "chunked",
    "clean_name",
    "fill",
    "fill_all",
    "gathered_modules",
    "give_back",
    "held_at_parameters",
    "load_optimizer_state",
    "named_parameters",
    "optimizer_state",
    "refuse_half_gradients",
    "restore_at_parameters",
    "running_forwards",
    "stand_in",
    "state_by_name",
    "unwrap_compiled",
]

_HOMES = {
    "Chunk": "fsdp_core.state.chunks",
    "ChunkedTensor": "fsdp_core.state.chunks",
    "FlatRange": "fsdp_core.state.layout",
    "HeldGradients": "fsdp_core.state.held_gradients",
    "KeyDifferences": "fsdp_core.state.filling",
    "Layout": "fsdp_core.state.layout",
    "Part": "fsdp_core.state.layout",
    "RandomState": "fsdp_core.state.random_state",
    "SavedTensor": "fsdp_core.state.saved_tensor",
    "TensorSource": "fsdp_core.state.chunks",
    "aliases": "fsdp_core.state.fqn",
    "chunked": "fsdp_core.state.chunks",
    "clean_name": "fsdp_core.state.fqn",
    "fill": "fsdp_core.state.filling",
    "fill_all": "fsdp_core.state.filling",
    "gathered_modules": "fsdp_core.state.full_tensor",
    "give_back": "fsdp_core.state.host_memory",
    "held_at_parameters": "fsdp_core.state.held_gradients",
    "load_optimizer_state": "fsdp_core.state.optimizer",
    "named_parameters": "fsdp_core.state.fqn",
    "optimizer_state": "fsdp_core.state.optimizer",
    "refuse_half_gradients": "fsdp_core.state.held_gradients",
    "running_forwards": "fsdp_core.state.full_tensor",
    "restore_at_parameters": "fsdp_core.state.held_gradients",
    "stand_in": "fsdp_core.state.layout",
    "state_by_name": "fsdp_core.state.optimizer",
    "unwrap_compiled": "fsdp_core.state.fqn",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
