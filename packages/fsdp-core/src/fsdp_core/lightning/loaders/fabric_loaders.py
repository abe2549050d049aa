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
    has_state,
    is_finished,
    make_entry,
    state_of_own_rank,
    states_in,
    track_loader,
)
from fsdp_core.lightning.loaders.position import position_of, sampler_of
from fsdp_core.lightning.loaders.split_batches import split_in_fabric
from fsdp_core.runtime import Runtime

__all__ = ["is_left_out", "is_loader", "load_loader", "loader_state", "track_in_fabric"]

#: Loaders that were already reported as left out.
_warned_loaders: WeakSet[object] = WeakSet()


class FabricEpochs:
    """The epochs of a sampler under Fabric, which numbers them from 0 in each process.

    Args:
        sampler: The sampler, whose ``set_epoch`` is replaced by :meth:`set_epoch`.

    Attributes:
        current: The epoch that the sampler is set to.
    """

    def __init__(self, sampler: Any) -> None:
        self._set_sampler_epoch = sampler.set_epoch
        self._epoch_offset = self._next_epoch = 0
        self.current = 0
        sampler.set_epoch = self.set_epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the sampler's epoch: ``epoch`` as Fabric counts it, plus the offset from :meth:`resume`."""
        self._next_epoch = epoch + 1
        self.current = epoch + self._epoch_offset
        self._set_sampler_epoch(self.current)

    def resume(self, epoch: int) -> None:
        """Make Fabric's next call of ``set_epoch``, whatever it counts, set this epoch."""
        self._epoch_offset = epoch - self._next_epoch
        self._set_sampler_epoch(epoch)


def track_in_fabric(loader: object, split: Callable[[Any], Any] | None) -> None:
    """Track a loader that Fabric has set up, if it has a state.

    Args:
        loader: The loader, changed in place.
        split: From a batch to this rank's part, which the loader is to yield; ``None`` for whole batches.
    """
    if isinstance(loader, DataLoader) and hasattr(loader, "state_dict"):
        track_loader(loader)
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
        key: The object's key in the user's state.
        obj: The object.
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
        key: The loader's key in the user's state, for error messages.
        loader: The loader, which is not left out.
        runtime: The ranks.
    """
    own_state: Any = None

    def read_own_state() -> Any:
        nonlocal own_state
        own_state = loader.state_dict()
        return own_state

    states_by_rank = gather_to_first(runtime, f"reading the position of {key!r}", read_own_state)
    states = [own_state] if states_by_rank is None else runtime.by_data_parallel_rank(states_by_rank)
    epochs = _epochs_of(loader)
    saved = make_entry(describe_loader(loader), states)
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
    is_from_plain_fabric = not (isinstance(saved, Mapping) and saved.keys() == {"world_size", "loaders"})
    if is_from_plain_fabric:
        saved = {"world_size": 1, "loaders": [{"loader": describe_loader(loader), "ranks": [saved]}]}
    world_size = saved["world_size"]
    (entry,) = saved["loaders"]
    is_epoch_over = all(map(is_finished, states_in(entry)))
    can_be_divided = "all" in entry or world_size == runtime.data_parallel_world_size
    position = position_of(loader)
    epochs = _epochs_of(loader)
    # at the end of an epoch, nothing is left to divide over another number of ranks: the next epoch begins
    state = None if is_epoch_over and not can_be_divided else state_of_own_rank(entry, world_size, runtime)
    if position is not None and state is not None and not is_epoch_over:
        position.check(state)
    if check_only:
        return
    if epochs is not None and "epoch" in entry:
        epochs.resume(entry["epoch"] + (1 if is_epoch_over else 0))
    if position is not None and is_epoch_over:
        position.restart()
    elif state is not None:
        loader.load_state_dict(state)
        explanation = None if is_epoch_over or runtime.rank else explain_unknown_order(loader)
        if explanation is not None:
            warnings.warn(f"The checkpoint was saved within an epoch. {explanation}", stacklevel=2)
