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
        return _on_threads(world_size, function, arguments)
    return _on_processes(function, arguments)


def check_cpu_devices(world_size: int) -> None:
    """Check that XLA can have this number of CPU devices.

    Raises:
        StrategyUnavailableError: It has another number already, or ``CPU_NUM_DEVICES`` specifies another.
    """
    device_count = os.environ.get("CPU_NUM_DEVICES")
    if _started_with and _started_with[0] != world_size:
        raise StrategyUnavailableError(
            f"devices={world_size} was requested, and XLA has {_started_with[0]} CPU devices since a run with "
            f"devices={_started_with[0]} in this process (CPU_NUM_DEVICES={device_count}).\n"
            f"Write devices={_started_with[0]}, or restart Python."
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


#: The number of devices with which the first run has started XLA, if no variable specified it before.
_started_with: list[int] = []


def _let_have_cpu_devices(world_size: int) -> None:
    check_cpu_devices(world_size)
    if "CPU_NUM_DEVICES" not in os.environ:
        os.environ["CPU_NUM_DEVICES"] = str(world_size)
        _started_with.append(world_size)


def _on_threads(world_size: int, function: Callable[..., Any], arguments: Any) -> Any:
    from fsdp_xla.cpu_ranks.lockstep import lockstep  # what the CPU client needs, and no TPU

    _check_not_interrupted()
    _let_have_cpu_devices(world_size)
    communicator = ThreadCommunicator(world_size)
    results: dict[int, Any] = {}
    failures: list[BaseException] = []
    interrupted = False
    ended = [threading.Event() for _ in range(world_size)]
    seed = torch.initial_seed()
    copies = [copy.deepcopy(arguments) for _ in range(world_size)]  # not in ranks: copying may draw random numbers
    with lockstep(world_size, communicator.barrier) if world_size > 1 else nullcontext() as steps:

        def rank() -> None:
            xla.this_thread.communicator = communicator
            here = xla.rank_here()
            assert here is not None
            try:
                if steps is not None:
                    steps.begin(after_failure=bool(_failed))
                _seed_device(seed)
                results[here.rank] = function(copies[here.rank])
                communicator.barrier.leave(here.rank)
            except BaseException as error:
                failures.append(error)
                ended[here.rank].set()
                # most failures occur on all ranks alike: let each raise its own, rather than a RankLostError
                if not all(other.wait(_SECONDS_FOR_PEERS) for other in ended):
                    communicator.abort()
            finally:
                ended[here.rank].set()

        try:
            xla.run_on_threads(rank, (communicator.barrier.interrupt, communicator.abort))
        except KeyboardInterrupt:
            interrupted = True
    if failures:
        _failed.append(world_size)
    if failures and (len(failures) < world_size or any(isinstance(error, RankLostError) for error in failures)):
        _interrupted.append(world_size)
    if interrupted:
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
_SECONDS_FOR_PEERS = 1.0

#: Runs on CPU devices that failed in any way.
_failed: list[int] = []

#: Runs on CPU devices that ranks left at different places. What a rank had recorded stays with its device, so that the
#: next run's graphs would differ between ranks, which would wait for each other until XLA ends the process.
_interrupted: list[int] = []


def _check_not_interrupted() -> None:
    if _interrupted:
        raise StrategyUnavailableError(
            "a run on XLA's CPU devices has failed in this process before, on some ranks earlier than on others, and "
            "the devices can't be used again.\nRestart Python."
        )


def _on_processes(function: Callable[..., Any], arguments: Any) -> Any:
    if xla.runtime_is_started():
        raise StrategyUnavailableError(
            "XLA has been used in this process before the ranks start, and a TPU can't be shared with them.\n"
            "Touch no XLA device (torch_xla.device(), tensor.to('xla')) before trainer.fit() or fabric.launch()."
        )
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"

        def rank() -> None:
            _seed_device(torch.initial_seed())
            result = function(copy.deepcopy(arguments))
            here = xla.rank_here()
            if here is not None and here.local_rank == 0:
                answer.write_bytes(to_bytes(result))

        xla.run_on_processes(rank)
        return from_bytes(answer.read_bytes())
