"""State of one rank's random-number generators: reading it and restoring it."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core.devices import current_device
from fsdp_core.runtime import ProcessGroupRuntime, Runtime

__all__ = ["RandomState", "random_state", "set_random_state", "state_of_rank", "with_runtime"]


def random_state(runtime: Runtime) -> dict[str, Any]:
    """Return the state of this rank's generators: torch's for the CPU and the rank's device, Python's, numpy's global.

    Args:
        runtime: Provides the rank's device.

    Returns:
        Plain data and small tensors, for a checkpoint. numpy's state is included if numpy is imported and its global
        generator is the default Mersenne Twister.

    Example:
        >>> runtime = ProcessGroupRuntime()
        >>> before = random_state(runtime)
        >>> drawn = torch.rand(2), random.random()
        >>> set_random_state(before, runtime)
        >>> bool((drawn[0] == torch.rand(2)).all()), drawn[1] == random.random()
        (True, True)
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy_state = numpy.random.get_state(legacy=False)
        if numpy_state["bit_generator"] == "MT19937":
            state["numpy"] = {
                "words": torch.from_numpy(numpy_state["state"]["key"].astype("int64")),
                "position": int(numpy_state["state"]["pos"]),
                "has_gauss": int(numpy_state["has_gauss"]),
                "gauss": float(numpy_state["gauss"]),
            }
    device_state = runtime.device_random_state()
    if device_state is not None:
        state["device"] = {"type": runtime.device.type, "state": device_state}
    return state


def set_random_state(state: Mapping[str, Any], runtime: Runtime) -> None:
    """Restore this rank's generators to a state that :func:`random_state` returned.

    Args:
        state: The state. The device's is ignored if it is of another device type than this rank's.
        runtime: Provides the rank's device.
    """
    torch.set_rng_state(state["torch"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "numpy" in state:
        import numpy

        numpy_state = state["numpy"]
        key = numpy_state["words"].numpy().astype("uint32")
        numpy.random.set_state(
            ("MT19937", key, numpy_state["position"], numpy_state["has_gauss"], numpy_state["gauss"])
        )
    if "device" in state and state["device"]["type"] == runtime.device.type:
        runtime.set_device_random_state(state["device"]["state"])


def state_of_rank(states: list[Mapping[str, Any]], runtime: Runtime) -> Mapping[str, Any] | None:
    """Return this rank's state; ``None``, with a warning on rank 0, if the number of data-parallel ranks differs."""
    if len(states) == runtime.data_parallel_world_size:
        return states[runtime.data_parallel_rank]
    if runtime.rank == 0:
        saved_count, current_count = (
            f"{n} rank" if n == 1 else f"{n} ranks" for n in (len(states), runtime.data_parallel_world_size)
        )
        warnings.warn(
            f"the checkpoint holds the random-number state of {saved_count}, and this run has {current_count}: "
            f"dropout and shuffling continue from this run's seed.\n"
            f"To reproduce the run that was saved, resume on {saved_count}.",
            stacklevel=2,
        )
    return None


class RandomState:
    """The random-number state of every rank, for Fabric checkpoints.

    Add it to the state: ``fabric.save(path, {"model": model, "random": RandomState()})``. ``fabric.load`` into such a
    dict restores the generators of every rank to the saved state, so load right before the first step. With another
    world size, it leaves the generators unchanged and warns.

    Args:
        runtime: The ranks. If ``None``, those of the strategy with which Fabric saves and loads it; outside of Fabric,
            those of torch's default process group, if there is one.

    Example:
        >>> saved = RandomState().state_dict()
        >>> drawn = torch.rand(1)
        >>> RandomState().load_state_dict(saved)
        >>> bool(torch.rand(1) == drawn)
        True
    """

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._chosen_runtime = runtime

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks. All ranks must call it."""
        runtime = self._runtime()
        return {"ranks": runtime.by_data_parallel_rank(runtime.gather_objects(random_state(runtime)))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's generators."""
        runtime = self._runtime()
        own_state = state_of_rank(state["ranks"], runtime)
        if own_state is not None:
            set_random_state(own_state, runtime)

    def _runtime(self) -> Runtime:
        if self._chosen_runtime is not None:
            return self._chosen_runtime
        runtime = ProcessGroupRuntime()
        if dist.is_initialized():
            runtime.rank = dist.get_rank()
            runtime.world_size = dist.get_world_size()
        runtime.device = current_device()
        return runtime


def with_runtime(state: RandomState, runtime: Runtime) -> RandomState:
    """Return a random-number state over a runtime, or the given one if the user has passed it a runtime."""
    return state if state._chosen_runtime is not None else RandomState(runtime)
