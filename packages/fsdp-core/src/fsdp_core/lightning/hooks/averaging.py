"""Weight averaging over shards: Lightning's callback keeps a copy of the module, which is sharded too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn

from fsdp_core.lightning.hooks.exporting import whole_state
from fsdp_core.sharding.backend import Backend

__all__ = ["shard_averages"]


def shard_averages(trainer: pl.Trainer, backend: Backend, root: nn.Module, *, full: bool) -> None:
    """Shard the copies of the module that weight-averaging callbacks keep, and let the callbacks save and load shards.

    The callback takes and restores state by calling ``state_dict`` and ``load_state_dict`` of both modules, which a
    library that shards may answer with a gathered copy, or not at all. On these instances the backend answers.

    Args:
        trainer: Whose callbacks to look at; nothing is done without an average.
        backend: Which has sharded the module.
        root: The sharded root of the module itself.
        full: Whether what is saved of an average is whole, on rank 0 alone, as of the module.
    """
    for average in _averages(trainer):
        _retie(average.module, backend.aliases(root))
        copy = backend.shard(average.module)
        _take_shards(average, backend, "module.", copy, full=full)
        _take_shards(average.module, backend, "", copy)
        _take_shards(backend.written_module(root), backend, "", root)


def _averages(trainer: pl.Trainer) -> Iterator[Any]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        average = getattr(callback, "_average_model", None) if isinstance(callback, WeightAveraging) else None
        if average is not None:
            yield average


def _retie(copy: nn.Module, tied: Mapping[str, str]) -> None:
    """Tie what the copy's move to the device has untied, as a move to an XLA device does."""
    held = dict(copy.named_parameters(remove_duplicate=False))
    for further, first in tied.items():
        if further in held and first in held and held[further] is not held[first]:
            place, _, name = further.rpartition(".")
            setattr(copy.get_submodule(place), name, held[first])


def _take_shards(module: nn.Module, backend: Backend, prefix: str, root: nn.Module, *, full: bool = False) -> None:
    """Let ``module``, which keeps what ``root`` stands for under ``prefix``, give and take sharded state."""

    def state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        own = dict(module.named_buffers(recurse=False)) if prefix else {}
        state = whole_state(backend, root) if full else backend.model_state(root)
        return {**own, **{prefix + name: value for name, value in state.items()}}

    def load_state_dict(state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        sharded = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        backend.load_model_state(root, sharded, strict)
        for name, buffer in module.named_buffers(recurse=False) if prefix else ():
            if name in state:
                buffer.copy_(state[name])

    instance: Any = module
    instance.state_dict, instance.load_state_dict = state_dict, load_state_dict
