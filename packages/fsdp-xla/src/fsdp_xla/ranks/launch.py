"""Starting the ranks, one per XLA device: processes on a TPU host, threads of this process on the CPU."""

from __future__ import annotations

import copy
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_core import StrategyUnavailableError
from fsdp_xla.cpu_ranks import uses_cpu_devices
from fsdp_xla.ranks.barrier import RankLostError
from fsdp_xla.ranks.communicator import ThreadCommunicator
from fsdp_xla.ranks.messages import from_bytes, to_bytes
from fsdp_xla.seeding import follow_manual_seed
from fsdp_xla.torch_xla_private import devices as xla

__all__ = ["check_cpu_devices", "run_ranks"]


def run_ranks(world_size: int, function: Callable[..., Any], arguments: Any) -> Any:
    """Call ``function`` on every rank, each with a copy of ``arguments``.

    Args:
        world_size: The number of ranks to run on this host.
        function: Called with the rank's copy. Rank 0's result must be picklable if ranks are processes.
        arguments: The arguments to copy. They are not modified.

    Returns:
        The result of this host's rank 0.

    Raises:
        StrategyUnavailableError: XLA has already been started, in an incompatible way.
    """
    if uses_cpu_devices():
        return _run_on_threads(world_size, function, arguments)
    return _run_on_processes(function, arguments)


def check_cpu_devices(world_size: int) -> None:
    """Check that XLA can have this number of CPU devices.

    Raises:
        StrategyUnavailableError: It has another number already, or ``CPU_NUM_DEVICES`` specifies another.
    """
    device_count = os.environ.get("CPU_NUM_DEVICES")
    if _device_counts and _device_counts[0] != world_size:
        raise StrategyUnavailableError(
            f"devices={world_size} was requested, and XLA has {_device_counts[0]} CPU devices since a run with "
            f"devices={_device_counts[0]} in this process (CPU_NUM_DEVICES={device_count}).\n"
            f"Write devices={_device_counts[0]}, or restart Python."
        )
    if device_count is not None and int(device_count) != world_size:
        raise StrategyUnavailableError(
            f"devices={world_size} was requested, and CPU_NUM_DEVICES={device_count} gives XLA {device_count} CPU "
            f"device{'s' * (device_count != '1')}; ranks are its devices.\n"
            f"Write devices={device_count}, or set CPU_NUM_DEVICES={world_size} before Python starts."
        )
    if device_count is None and xla.runtime_is_started() and world_size != 1:
        raise StrategyUnavailableError(
            f"devices={world_size} was requested, but XLA was already started in this process, with 1 CPU device.\n"
            f"Set CPU_NUM_DEVICES={world_size} before Python starts, and touch no XLA device before the launch."
        )


#: The number of devices with which the first run started XLA, if ``CPU_NUM_DEVICES`` did not specify it before.
_device_counts: list[int] = []


def _set_cpu_device_count(world_size: int) -> None:
    check_cpu_devices(world_size)
    if "CPU_NUM_DEVICES" not in os.environ:
        os.environ["CPU_NUM_DEVICES"] = str(world_size)
        _device_counts.append(world_size)


def _run_on_threads(world_size: int, function: Callable[..., Any], arguments: Any) -> Any:
    from fsdp_xla.cpu_ranks.lockstep import lockstep  # imported here, since only the CPU client needs it

    _check_usable()
    _set_cpu_device_count(world_size)
    communicator = ThreadCommunicator(world_size)
    results: dict[int, Any] = {}
    failures: list[BaseException] = []
    was_interrupted = False
    end_events = [threading.Event() for _ in range(world_size)]
    seed = torch.initial_seed()
    # Copied before the ranks start, since copying may draw random numbers.
    copies = [copy.deepcopy(arguments) for _ in range(world_size)]
    with lockstep(world_size, communicator.barrier) if world_size > 1 else nullcontext() as steps:

        def run_rank() -> None:
            xla.this_thread.communicator = communicator
            rank_here = xla.rank_here()
            assert rank_here is not None
            try:
                if steps is not None:
                    steps.begin(after_failure=bool(_failed_runs))
                _seed_device(seed)
                results[rank_here.rank] = function(copies[rank_here.rank])
                communicator.barrier.leave(rank_here.rank)
            except BaseException as error:
                failures.append(error)
                end_events[rank_here.rank].set()
                # Most failures occur on all ranks: give each the time to raise its own, and not a RankLostError.
                if not all(end_event.wait(_PEER_FAILURE_TIMEOUT) for end_event in end_events):
                    communicator.abort()
            finally:
                end_events[rank_here.rank].set()

        try:
            xla.run_on_threads(run_rank, (communicator.barrier.interrupt, communicator.abort))
        except KeyboardInterrupt:
            was_interrupted = True
    if failures:
        _failed_runs.append(world_size)
        if len(failures) < world_size or any(isinstance(error, RankLostError) for error in failures):
            _unusable_runs.append(world_size)
    if was_interrupted:
        raise next((error for error in failures if isinstance(error, KeyboardInterrupt)), KeyboardInterrupt())
    if failures:
        raise next((error for error in failures if not isinstance(error, RankLostError)), failures[0])
    return results[0]


def _seed_device(seed: int) -> None:
    """Seed this rank's device with torch's seed at the launch, and let it follow ``torch.manual_seed`` in the rank."""
    device = xla.default_device()
    xla.set_random_state(device, seed % 2**63)
    follow_manual_seed(partial(xla.set_random_state, device))


#: How long a failed rank waits for the failures of other ranks.
_PEER_FAILURE_TIMEOUT = 1.0

#: The world sizes of runs on CPU devices that have failed.
_failed_runs: list[int] = []

#: The world sizes of failed runs whose ranks ended at different places. What a rank had recorded stays with its device,
#: so graphs of a later run would differ between ranks, which would wait for each other until XLA ends the process.
_unusable_runs: list[int] = []


def _check_usable() -> None:
    if _unusable_runs:
        raise StrategyUnavailableError(
            "a run on XLA's CPU devices has failed in this process before, on some ranks earlier than on others, and "
            "the devices can't be used again.\nRestart Python."
        )


def _run_on_processes(function: Callable[..., Any], arguments: Any) -> Any:
    if xla.runtime_is_started():
        raise StrategyUnavailableError(
            "XLA has been used in this process before the ranks start, and a TPU can't be shared with them.\n"
            "Touch no XLA device (torch_xla.device(), tensor.to('xla')) before trainer.fit() or fabric.launch()."
        )
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder) / "answer"

        def run_rank() -> None:
            _seed_device(torch.initial_seed())
            result = function(copy.deepcopy(arguments))
            rank_here = xla.rank_here()
            if rank_here is not None and rank_here.local_rank == 0:
                result_file.write_bytes(to_bytes(result))

        xla.run_on_processes(run_rank)
        return from_bytes(result_file.read_bytes())
