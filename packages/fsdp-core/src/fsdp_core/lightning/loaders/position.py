"""The position of a data loader over a map-style dataset: one number for all ranks, from which any number can resume.

The order of an epoch's samples follows from a seed and the epoch's number, and the ranks take turns in it. So one
number, how many samples all ranks together have seen, determines what is left, on any number of ranks.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.torch_private.dataloaders import batches_yielded, is_exhausted, iterates_as_torch, watch_iterators

__all__ = [
    "POSITION",
    "LoaderPosition",
    "ResumableSampler",
    "copy_without_position",
    "position_of",
    "sampler_of",
    "track_position",
]

#: The key that distinguishes a position from the states of other loaders.
POSITION = "position"


class ResumableSampler(DistributedSampler[Any]):
    """Gives each rank the samples of torch's ``DistributedSampler``, and can resume in the middle of an epoch.

    Args:
        dataset: The dataset; only its length is used.
        num_replicas: The number of ranks that take turns.
        rank: This rank's number among them.
        shuffle: Whether the order is random.
        seed: The seed of a random order, together with the epoch.
        drop_last: Whether to drop samples that can't be divided evenly over the ranks, rather than repeat some.

    Example:
        Two ranks have seen four of eight samples, and three resume with the rest:

        >>> samplers = [ResumableSampler(range(8), 3, rank, shuffle=False) for rank in range(3)]
        >>> for sampler in samplers:
        ...     sampler.resume(epoch=0, start=4)
        >>> [list(sampler) for sampler in samplers]  # four over three: two are repeated, as at any epoch's end
        [[4, 7], [5, 0], [6, 1]]
        >>> [list(sampler) for sampler in samplers]
        [[0, 3, 6], [1, 4, 7], [2, 5, 0]]
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        # both: an epoch, and how many of its samples all ranks have seen
        self._resume_point: tuple[int, int] | None = None
        self._last_start = (0, 0)

    @property
    def size(self) -> int:
        """The number of samples in the dataset."""
        return len(cast(Sized, self.dataset))

    @property
    def last_start(self) -> tuple[int, int]:
        """The epoch of the last iteration that yielded a sample, and how many samples had been seen before it."""
        return self._last_start

    @property
    def next_start(self) -> tuple[int, int]:
        """The next iteration's epoch, and how many of its samples were seen before.

        If an iteration of the epoch has begun, and yielded nothing yet, it counts as the next one.
        """
        for epoch, start in (self._resume_point or (-1, 0), self._last_start):
            if epoch == self.epoch:
                return epoch, start
        return self.epoch, 0

    def resume(self, epoch: int, start: int) -> None:
        """Make the next iteration, if it is of this epoch, begin after ``start`` samples of all ranks."""
        self._resume_point = (epoch, start)
        self._last_start = (-1, 0)  # of no epoch

    def samples_per_rank(self, start: int) -> int:
        """How many samples each rank gets after ``start`` samples of all ranks."""
        remaining = self.size - start
        return remaining // self.num_replicas if self.drop_last else math.ceil(remaining / self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        # This is a generator, so an iterator that a loader creates but never draws from leaves the resume point alone.
        resumed_epoch, resumed_start = self._resume_point or (-1, 0)
        start = resumed_start if resumed_epoch == self.epoch else 0
        self._resume_point = None
        self._last_start = (self.epoch, start)
        if self.shuffle:
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        else:
            order = torch.arange(self.size)
        total = self.samples_per_rank(start) * self.num_replicas
        remaining = order[start : start + total]
        while len(remaining) < total:  # the first samples are repeated, as torch's sampler does
            remaining = torch.cat([remaining, order[: total - len(remaining)]])
        yield from remaining[self.rank :: self.num_replicas].tolist()


class LoaderPosition:
    """The position of a loader's last iterator, in samples of all ranks. Created by :func:`track_position`.

    Args:
        loader: The loader, which draws from ``sampler``.
        sampler: Its sampler.

    Attributes:
        restored: How many samples of the epoch had been seen when its position was restored; ``None`` from the next
            epoch on.
    """

    def __init__(self, loader: DataLoader[Any], sampler: ResumableSampler) -> None:
        batches: Any = loader.batch_sampler
        self._sampler = sampler
        self._batch_size = 1 if batches is None else int(batches.batch_size)
        self._drop_last = False if batches is None else bool(batches.drop_last)
        self._iterator: weakref.ref[Any] | None = None
        self._loader = weakref.ref(loader)
        self.restored: int | None = None
        watch_iterators(loader, self._keep_iterator)

    def _keep_iterator(self, iterator: Any) -> None:
        self._iterator = weakref.ref(iterator)

    def batches_after_samples(self, samples: int, limit: float) -> int:
        """Convert a number of samples of all ranks to the number of batches that each rank has taken of the epoch.

        Args:
            samples: How many samples all ranks together have seen.
            limit: How many batches of an epoch the Trainer uses at most.
        """
        batches = self._batches_after(0)
        if limit >= batches:
            return batches - self._batches_after(samples)
        return min(math.ceil(samples / (self._batch_size * self._sampler.num_replicas)), int(limit))

    def _batches_after(self, start: int) -> int:
        """How many batches each rank gets after ``start`` samples of all ranks."""
        batches = self._sampler.samples_per_rank(start) / self._batch_size
        return math.floor(batches) if self._drop_last else math.ceil(batches)

    def state_dict(self, unused: int = 0) -> dict[str, Any]:
        """Return the position, which :meth:`load_state_dict` takes on any number of ranks.

        Args:
            unused: How many of the last returned batches training has not used yet.
        """
        sampler = self._sampler
        iterator = self._iterator() if self._iterator is not None else None
        yielded = 0 if iterator is None else batches_yielded(iterator)
        epoch, start = sampler.last_start if yielded else sampler.next_start
        used = max(yielded - unused, 0) * self._batch_size
        samples_used = min(used, sampler.samples_per_rank(start)) * sampler.num_replicas
        return {
            POSITION: {
                "epoch": epoch,
                "seen": min(start + samples_used, sampler.size),
                "samples": sampler.size,
                "shuffle": sampler.shuffle,
                "seed": sampler.seed,
                "finished": iterator is not None and is_exhausted(iterator),
            }
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise if this state can't be loaded.

        Raises:
            CheckpointMismatchError: The state is of another dataset, or is not a position.
        """
        if POSITION not in state:
            raise CheckpointMismatchError(
                "the checkpoint holds the position of a data loader in a form that does not tell which samples were "
                "seen: another kind of loader or strategy saved it.\n"
                "Resume from a checkpoint that was saved at the end of an epoch."
            )
        samples = state[POSITION]["samples"]
        size = self._sampler.size
        if samples != size:
            raise CheckpointMismatchError(
                f"the checkpoint was saved within an epoch over {samples} samples, and the dataset now has {size}, so "
                "what is left of that epoch is unknown.\n"
                "Resume with the same dataset, or from a checkpoint that was saved at the end of an epoch."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration yield what was not seen yet, if the sampler is at the interrupted epoch.

        Args:
            state: Of a loader over the same dataset, on any number of ranks and with batches of any size.

        Raises:
            CheckpointMismatchError: The state is of another dataset, or is not a position.
        """
        if POSITION in state and state[POSITION]["epoch"] != self._sampler.epoch:
            return
        self.check(state)
        saved = state[POSITION]
        self._sampler.shuffle = saved["shuffle"]
        self._sampler.seed = saved["seed"]
        self._sampler.resume(saved["epoch"], saved["seen"])
        self._iterator = None
        self.restored = saved["seen"]
        loader: Any = self._loader()
        if hasattr(type(loader), "load_state_dict"):
            type(loader).load_state_dict(loader, {})  # torchdata's loader drops an iterator that it has created ahead

    def restart(self) -> None:
        """Forget the restored position: the next iteration is a full one."""
        self._sampler.resume(-1, 0)
        self._iterator = self.restored = None


def position_of(loader: object) -> LoaderPosition | None:
    """The position of a loader that :func:`track_position` tracks; ``None`` for other loaders."""
    position = getattr(getattr(loader, "state_dict", None), "__self__", None)
    return position if isinstance(position, LoaderPosition) else None


def copy_without_position(loader: Any) -> Any:
    """Copy a loader, so that iterating over the copy does not move the original's position.

    Args:
        loader: A loader that is iterated over in training and in validation, both within an epoch.

    Returns:
        A copy with the same dataset, and with its own sampler if :func:`track_position` has replaced the original's.
    """
    copy_of_loader = copy.copy(loader)
    for name in ("_get_iterator", "state_dict", "load_state_dict"):  # these belong to the original
        vars(copy_of_loader).pop(name, None)
    sampler = sampler_of(loader)
    if isinstance(sampler, ResumableSampler):
        own_sampler = copy.copy(sampler)
        own_sampler.resume(-1, 0)
        object.__setattr__(copy_of_loader, "sampler", own_sampler)
        if copy_of_loader.batch_sampler is not None:
            object.__setattr__(copy_of_loader, "batch_sampler", copy.copy(copy_of_loader.batch_sampler))
            copy_of_loader.batch_sampler.sampler = own_sampler
    return copy_of_loader


def sampler_of(loader: DataLoader[Any]) -> Any:
    """The sampler that a loader draws indices from."""
    return loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)


def track_position(loader: DataLoader[Any], order: Any) -> LoaderPosition | None:
    """Track a loader's position: give it a ``state_dict`` and a ``load_state_dict`` that hold it.

    Args:
        loader: The loader. Its sampler is replaced by one that yields the samples of ``order``.
        order: The ``DistributedSampler`` that determines which rank gets which samples.

    Returns:
        The position; ``None`` if it doesn't follow from the number of returned batches: for the user's own sampler or
        batch sampler, an iterable dataset, or a dataset or loader with its own state.
    """
    earlier_position = position_of(loader)
    if earlier_position is not None:
        earlier_position.restart()
        return earlier_position
    dataset: Any = loader.dataset
    is_known_order = _is_exactly(order, (DistributedSampler, ResumableSampler), "StatefulDistributedSampler")
    batch_sampler = loader.batch_sampler
    is_known_batching = batch_sampler is None or _is_exactly(batch_sampler, (BatchSampler,), "BatchSampler")
    if isinstance(dataset, IterableDataset) or not is_known_order or not is_known_batching:
        return None
    sampler = ResumableSampler(
        dataset, order.num_replicas, order.rank, shuffle=order.shuffle, seed=order.seed, drop_last=order.drop_last
    )
    sampler.set_epoch(order.epoch)
    # torch forbids setting the sampler of a loader, whose batch sampler would keep the old one. Here both are set.
    object.__setattr__(loader, "sampler", sampler)
    if loader.batch_sampler is not None:
        loader.batch_sampler.sampler = sampler  # type: ignore[attr-defined]
    own_state_dict = getattr(type(loader), "state_dict", None)
    has_users_state = own_state_dict is not None and not own_state_dict.__module__.startswith("torchdata.")
    if has_users_state or callable(getattr(dataset, "state_dict", None)) or not iterates_as_torch(loader):
        return None
    position = LoaderPosition(loader, sampler)
    instance: Any = loader
    instance.state_dict, instance.load_state_dict = position.state_dict, position.load_state_dict
    return position


def _is_exactly(obj: object, classes: tuple[type, ...], torchdata_name: str) -> bool:
    """Whether an object is of exactly one of the classes, or of torchdata's class of that name."""
    obj_class = type(obj)
    return obj_class in classes or (
        obj_class.__name__ == torchdata_name and obj_class.__module__.startswith("torchdata.")
    )
