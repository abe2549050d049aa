"""Data loaders among the objects that Fabric saves and loads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.utils.data import DataLoader

from fsdp_core.checkpoint.collective import gather_to_first
from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.lightning.loaders.loader_states import (
    describe_loader,
    explain_unknown_order,
    follow_loader,
    has_state,
    is_finished,
    own_state,
    saved_entry,
    states_in,
)
from fsdp_core.lightning.loaders.position import position_of, sampler_of
from fsdp_core.lightning.loaders.split_batches import split_in_fabric
from fsdp_core.runtime import Runtime

__all__ = ["follow_in_fabric", "is_left_out", "is_loader", "load_loader", "loader_state"]

#: Loaders that were already reported as left out.
_warned_loaders: WeakSet[object] = WeakSet()


class FabricEpochs:
    """The epochs of a sampler under Fabric, which numbers them from 0 in each process.

    Args:
        sampler: Its ``set_epoch`` is replaced by :meth:`set`.
    """

    def __init__(self, sampler: Any) -> None:
        self._set_sampler_epoch = sampler.set_epoch
        self._epoch_offset = self._next_epoch = 0
        self.current = 0
        sampler.set_epoch = self.set

    def set(self, epoch: int) -> None:
        """Set the sampler's epoch: ``epoch`` as Fabric counts it, plus the offset from :meth:`resume`."""
        self._next_epoch = epoch + 1
        self.current = epoch + self._epoch_offset
        self._set_sampler_epoch(self.current)

    def resume(self, epoch: int) -> None:
        """Make ``epoch`` the one that Fabric's next epoch sets."""
        self._epoch_offset = epoch - self._next_epoch
        self._set_sampler_epoch(epoch)


def follow_in_fabric(loader: object, split: Callable[[Any], Any] | None) -> None:
    """Track a loader that Fabric has set up, if it has a state.

    Args:
        loader: The loader, changed in place.
        split: From a batch to this rank's part, which the loader is to yield; ``None`` for whole batches.
    """
    if isinstance(loader, DataLoader) and hasattr(loader, "state_dict"):
        follow_loader(loader)
        sampler = sampler_of(loader)
        if hasattr(sampler, "set_epoch") and _epochs_of(loader) is None:
            FabricEpochs(sampler)
    if split is not None:
        split_in_fabric(loader, split)


def _epochs_of(loader: Any) -> FabricEpochs | None:
    sampler = sampler_of(loader) if isinstance(loader, DataLoader) else None
    epochs = getattr(getattr(sampler, "set_epoch", None), "__self__", None)
    return epochs if isinstance(epochs, FabricEpochs) else None


def is_loader(obj: object) -> bool:
    """Whether an object under Fabric is a data loader, of which each rank has another state."""
    return isinstance(obj, DataLoader) or (
        has_state(obj) and isinstance(obj, Iterable) and not isinstance(obj, nn.Module)
    )


def is_left_out(key: str, obj: object, runtime: Runtime) -> bool:
    """Whether an object is a data loader without a position, which checkpoints leave out.

    A warning is given once for each loader.

    Args:
        key: The user's name for it.
        obj: An object in the user's state.
        runtime: The ranks; rank 0 warns.
    """
    if not isinstance(obj, DataLoader) or has_state(obj):
        return False
    if runtime.rank == 0 and obj not in _warned_loaders:
        warnings.warn(
            f"{key!r} is left out of checkpoints: under Fabric a {type(obj).__name__} does not know its position, so "
            "a run that resumes starts its epoch over.\nUse torchdata's StatefulDataLoader; or save the number of "
            "batches, and skip as many.",
            stacklevel=2,
        )
        _warned_loaders.add(obj)
    return True


def loader_state(key: str, loader: Any, runtime: Runtime) -> dict[str, Any]:
    """Return the position of a loader under Fabric: on rank 0, which writes it, that of all ranks; elsewhere its own.

    All ranks must call it.

    Args:
        key: The user's name for it, for error messages.
        loader: The loader, which is not left out.
        runtime: The ranks.
    """
    own_states: list[Any] = []

    def read() -> Any:
        own_states.append(loader.state_dict())
        return own_states[0]

    states = gather_to_first(runtime, f"reading the position of {key!r}", read)
    epochs = _epochs_of(loader)
    saved = saved_entry(
        describe_loader(loader), own_states if states is None else runtime.by_data_parallel_rank(states)
    )
    if epochs is not None:
        saved["epoch"] = epochs.current
    return {"world_size": runtime.data_parallel_world_size, "loaders": [saved]}


def load_loader(loader: Any, saved: Any, runtime: Runtime, *, check_only: bool = False) -> None:
    """Restore the position of a loader under Fabric.

    Args:
        loader: The loader.
        saved: What :func:`loader_state` returned, or the state of a loader in one process.
        runtime: The ranks.
        check_only: Whether only to check, without changing anything.

    Raises:
        CheckpointMismatchError: The position can't be divided over this number of ranks, or is of another dataset; or
            the loader can't restore a position.
    """
    if not has_state(loader):
        raise CheckpointMismatchError(
            f"the checkpoint holds a loader's position, which a {type(loader).__name__} can't restore under Fabric.\n"
            "Use torchdata's StatefulDataLoader; or leave the loader out of what is loaded, and start its epoch over."
        )
    if not (isinstance(saved, Mapping) and saved.keys() == {"world_size", "loaders"}):
        saved = {"world_size": 1, "loaders": [{"loader": describe_loader(loader), "ranks": [saved]}]}
    world_size = saved["world_size"]
    (saved_loader,) = saved["loaders"]
    all_finished = all(map(is_finished, states_in(saved_loader)))
    can_be_divided = "all" in saved_loader or world_size == runtime.data_parallel_world_size
    position = position_of(loader)
    epochs = _epochs_of(loader)
    state = None if all_finished and not can_be_divided else own_state(saved_loader, world_size, runtime)
    if position is not None and state is not None and not all_finished:
        position.check(state)
    if check_only:
        return
    if epochs is not None and "epoch" in saved_loader:
        epochs.resume(saved_loader["epoch"] + (1 if all_finished else 0))
    if position is not None and all_finished:
        position.restart()
    elif state is not None:  # otherwise an epoch was at its end, on another number of ranks, and the next one begins
        loader.load_state_dict(state)
        explanation = None if all_finished or runtime.rank else explain_unknown_order(loader)
        if explanation is not None:
            warnings.warn(f"The checkpoint was saved within an epoch. {explanation}", stacklevel=2)
