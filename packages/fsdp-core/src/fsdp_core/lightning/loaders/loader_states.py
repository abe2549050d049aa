"""What a checkpoint holds for a data loader: each rank's own state, or one position for any number of ranks.

::

    {"world_size": 2, "loaders": [{"loader": "…", "all": {"position": {"epoch": 1, "seen": 48, …}}},
                                  {"loader": "…", "ranks": [state of rank 0, state of rank 1]}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.lightning.loaders.position import POSITION, LoaderPosition, follow, position_of, sampler_of
from fsdp_core.lightning.private import wrapped_sampler
from fsdp_core.runtime import Runtime

__all__ = [
    "describe_loader",
    "entry",
    "follow_loader",
    "has_state",
    "is_at_end",
    "is_finished",
    "of_unknown_order",
    "own_state",
    "states_in",
]


def follow_loader(loader: object) -> LoaderPosition | None:
    """Track the position of a loader that Lightning has prepared, if its order is known.

    Args:
        loader: Changed in place; see :func:`fsdp_core.lightning.loaders.position.follow`.
    """
    if not isinstance(loader, DataLoader):
        return None
    order = sampler_of(loader)
    if type(order) is DistributedSamplerWrapper and _is_plain_shuffle(wrapped_sampler(order)):
        # Each rank would shuffle with its own seed, which each process draws again.
        order = DistributedSampler(
            loader.dataset, order.num_replicas, order.rank, seed=order.seed, drop_last=order.drop_last
        )
    return follow(loader, order)


def _is_plain_shuffle(sampler: Any) -> bool:
    """Whether it is the sampler of torchdata's loader for ``shuffle=True``, which Lightning doesn't know."""
    sampler_class = type(sampler)
    return (
        sampler_class.__name__ == "RandomSampler"
        and sampler_class.__module__.startswith("torchdata.")
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )


def has_state(obj: object) -> bool:
    """Whether an object can return and load its state."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def of_unknown_order(loader: object) -> str | None:
    """Why samples may come in another order after a resume, though the loader has a state: a sampler that has none.

    torchdata's loader then takes as many samples from the sampler as were used, and yields those after them. They are
    those that were left only if the sampler's order is the same in a new process. It is if it follows from torch's own
    random numbers, which are restored, or from ``set_epoch``.

    Args:
        loader: A loader.

    Returns:
        What to tell the user; ``None`` if there is no such sampler.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or position_of(loader):
        return None
    state_of_its_own = getattr(type(loader), "state_dict", None)
    if state_of_its_own is None or not state_of_its_own.__module__.startswith("torchdata."):
        return None  # the user's own, which may know
    sampler = sampler_of(loader)
    remedy = "give it"
    if type(sampler) is DistributedSamplerWrapper:  # neither an epoch nor a state reaches what it wraps
        unknown = [wrapped_sampler(sampler)]
        remedy = "pass use_distributed_sampler=False, let it draw this rank's samples alone, and give it"
    elif has_state(loader.batch_sampler) or callable(getattr(sampler, "set_epoch", None)):
        unknown = []
    else:
        unknown = [
            drawn_from
            for drawn_from in (loader.batch_sampler, sampler)
            if drawn_from is not None and not has_state(drawn_from)
        ]
    for drawn_from in unknown:
        if not _repeats_with_torch(drawn_from):
            return (
                f"{type(drawn_from).__name__}, the sampler of {describe_loader(loader)}, has no state that restores "
                "its order within an epoch: as many samples as were used are skipped of those that it yields now, and "
                f"others are left if it draws another order.\nTo resume exactly, {remedy} state_dict() and "
                "load_state_dict(), or a set_epoch(epoch) that its order follows from; or resume from "
                "a checkpoint of the end of an epoch."
            )
    return None


def _repeats_with_torch(sampler: object) -> bool:
    """Whether a sampler yields the same order from the same state of torch's random numbers."""
    module = type(sampler).__module__
    return module.startswith("torchdata.") or (
        module.startswith("torch.") and getattr(sampler, "generator", None) is None
    )


def describe_loader(loader: Any) -> str:
    """A loader, for messages: ``"StatefulDataLoader over Tokens"``."""
    dataset = getattr(loader, "dataset", None)
    return type(loader).__name__ + ("" if dataset is None else f" over {type(dataset).__name__}")


def entry(name: str, states: Sequence[Any]) -> dict[str, Any]:
    """What is saved for a loader.

    Args:
        name: The loader, as :func:`describe_loader`.
        states: Its states on all ranks.
    """
    first = states[0]
    shared = isinstance(first, Mapping) and first.keys() == {POSITION} and all(state == first for state in states)
    return {"loader": name, **({"all": first} if shared else {"ranks": list(states)})}


def states_in(saved: Mapping[str, Any]) -> Sequence[Any]:
    """The states in what :func:`entry` returned."""
    states: Sequence[Any] = saved["ranks"] if "ranks" in saved else [saved["all"]]
    return states


def own_state(saved: Mapping[str, Any], world_size: int, runtime: Runtime) -> Any:
    """This rank's state of a loader.

    Args:
        saved: What :func:`entry` returned.
        world_size: The number of data-parallel ranks that saved it.
        runtime: The current ranks.

    Raises:
        CheckpointMismatchError: There is none for this number of ranks.
    """
    if "all" in saved:
        return saved["all"]
    if world_size == runtime.data_parallel_world_size:
        return saved["ranks"][runtime.data_parallel_rank]
    raise CheckpointMismatchError(
        f"can't divide what is left of an epoch over {runtime.data_parallel_world_size} ranks: the checkpoint was "
        f"saved within it with the states of {saved['loader']} on {world_size}, and only a loader over a map-style "
        "dataset, with no sampler or state of its own, can be divided.\n"
        f"Resume on {world_size}, or from a checkpoint that was saved at the end of an epoch."
    )


def is_finished(state: Any) -> bool:
    """Whether all batches of an epoch have been returned, so that the next iteration is of another epoch."""
    if not isinstance(state, Mapping):
        return False
    return bool(state[POSITION]["finished"] if POSITION in state else state.get("_iterator_finished"))


def is_at_end(state: Any) -> bool:
    """Whether nothing is left of an epoch, even if its iterator is not exhausted yet."""
    if isinstance(state, Mapping) and POSITION in state:
        return bool(state[POSITION]["seen"] == state[POSITION]["samples"])
    return is_finished(state)
