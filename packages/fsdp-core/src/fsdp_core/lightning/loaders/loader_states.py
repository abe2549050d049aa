"""What a checkpoint holds for a data loader, its entry: each rank's own state, or one position for any number of ranks.

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
from fsdp_core.lightning.loaders.position import POSITION, LoaderPosition, position_of, sampler_of, track_position
from fsdp_core.lightning.private import wrapped_sampler
from fsdp_core.runtime import Runtime

__all__ = [
    "describe_loader",
    "explain_unknown_order",
    "has_state",
    "is_at_end",
    "is_finished",
    "make_entry",
    "state_of_own_rank",
    "states_in",
    "track_loader",
]


def track_loader(loader: object) -> LoaderPosition | None:
    """Track the position of a loader that Lightning has prepared, if the order of its samples is known.

    Args:
        loader: Changed in place; see :func:`fsdp_core.lightning.loaders.position.track_position`.
    """
    if not isinstance(loader, DataLoader):
        return None
    sampler = sampler_of(loader)
    if type(sampler) is DistributedSamplerWrapper and _is_plain_shuffle(wrapped_sampler(sampler)):
        # torchdata's own shuffle takes a seed that each process draws anew, so it is replaced by torch's sampler.
        sampler = DistributedSampler(
            loader.dataset, sampler.num_replicas, sampler.rank, seed=sampler.seed, drop_last=sampler.drop_last
        )
    return track_position(loader, sampler)


def _is_plain_shuffle(sampler: Any) -> bool:
    """Whether a sampler is that of torchdata's loader for ``shuffle=True``, which Lightning doesn't know."""
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


def explain_unknown_order(loader: object) -> str | None:
    """Explain why a loader with a state may resume with other samples: its sampler has no state.

    To resume, torchdata's loader skips as many samples of the sampler as were used. The samples after them are those
    that were left only if the sampler yields the same order in a new process. That is so if the order follows from
    torch's own random numbers, which are restored, or from ``set_epoch``.

    Args:
        loader: A loader.

    Returns:
        The explanation with what to do; ``None`` if there is no such sampler.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or position_of(loader):
        return None
    own_state_dict = getattr(type(loader), "state_dict", None)
    if own_state_dict is None or not own_state_dict.__module__.startswith("torchdata."):
        return None  # a class of the user's, whose state may hold the order
    sampler = sampler_of(loader)
    advice = "give it"
    if type(sampler) is DistributedSamplerWrapper:  # Lightning's wrapper passes neither epochs nor states on
        candidates = [wrapped_sampler(sampler)]
        advice = "pass use_distributed_sampler=False, let it draw this rank's samples alone, and give it"
    elif has_state(loader.batch_sampler) or callable(getattr(sampler, "set_epoch", None)):
        return None
    else:
        candidates = [s for s in (loader.batch_sampler, sampler) if s is not None and not has_state(s)]
    unrestored = next((candidate for candidate in candidates if not _repeats_with_torch(candidate)), None)
    if unrestored is None:
        return None
    return (
        f"{type(unrestored).__name__}, the sampler of {describe_loader(loader)}, has no state that restores "
        "its order within an epoch: as many samples as were used are skipped of those that it yields now, and "
        f"others are left if it draws another order.\nTo resume exactly, {advice} state_dict() and "
        "load_state_dict(), or a set_epoch(epoch) that its order follows from; or resume from "
        "a checkpoint of the end of an epoch."
    )


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


def make_entry(name: str, states: Sequence[Any]) -> dict[str, Any]:
    """Return the entry of a loader in a checkpoint.

    Args:
        name: The loader's description, from :func:`describe_loader`.
        states: The loader's states on all ranks.
    """
    first_state = states[0]
    is_shared = (
        isinstance(first_state, Mapping)
        and first_state.keys() == {POSITION}
        and all(state == first_state for state in states)
    )
    if is_shared:
        return {"loader": name, "all": first_state}
    return {"loader": name, "ranks": list(states)}


def states_in(entry: Mapping[str, Any]) -> Sequence[Any]:
    """Return the states in the entry of a loader."""
    states: Sequence[Any] = entry["ranks"] if "ranks" in entry else [entry["all"]]
    return states


def state_of_own_rank(entry: Mapping[str, Any], world_size: int, runtime: Runtime) -> Any:
    """This rank's state of a loader.

    Args:
        entry: What :func:`make_entry` returned.
        world_size: The number of data-parallel ranks that saved it.
        runtime: The current ranks.

    Raises:
        CheckpointMismatchError: The entry has no state for this number of ranks.
    """
    if "all" in entry:
        return entry["all"]
    if world_size == runtime.data_parallel_world_size:
        return entry["ranks"][runtime.data_parallel_rank]
    raise CheckpointMismatchError(
        f"can't divide what is left of an epoch over {runtime.data_parallel_world_size} ranks: the checkpoint was "
        f"saved within it with the states of {entry['loader']} on {world_size}, and only a loader over a map-style "
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
