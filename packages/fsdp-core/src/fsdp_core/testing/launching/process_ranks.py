"""Real ranks for tests: processes over gloo, kept between tests, and terminated when one of them fails."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, Literal, Protocol

from fsdp_core.testing.launching.calls import (
    WAITED_FOR_FAILED,
    Failure,
    StartedRanks,
    answer_calls,
    answer_of,
    describe_silence,
    freeze_modules,
    import_function,
    raise_failures,
    restored_environment,
    send_call,
)
from fsdp_core.testing.launching.forking import StartMethod, end_process, kill_process, scaled_limit, start_process

__all__ = ["RankKind", "RankPool", "Ranks", "ranks_are_nodes"]

#: What ranks are: connected processes, threads of one process, or one process that drives all devices.
RankKind = Literal["processes", "threads", "one controller"]


_ATTEMPTS = 3


class Ranks(Protocol):
    """What the suite runs functions on: :class:`RankPool`, or a backend's class for ranks that are not processes.

    Attributes:
        kind: What these ranks are. Clauses about another kind don't apply.
    """

    kind: ClassVar[RankKind]

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``function(*args)`` on every rank, and return the results. See :meth:`RankPool.run`.

        With one controller it is called once, for ``world_size`` devices, and its result is returned for each.
        """
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class RankPool(StartedRanks):
    """Runs functions on several ranks at once.

    Each rank is a process with one torch thread and the environment variables that ``torchrun`` sets, so Lightning
    uses the ranks as they are. Processes are kept between calls; a process group that a call leaves open is destroyed,
    and the environment variables that it set are restored. After a failure all processes are terminated, with what they
    have started, and the next call starts new ones, because the state of the other ranks is unknown. The error has the
    stacks of ranks that did not answer in time. If gloo fails to connect the ranks, which happens occasionally on a
    busy machine, new ones are started for the same call.

    Attributes:
        start_method: ``"forkserver"``, which takes milliseconds, or ``"spawn"`` for libraries that start threads or
            open a device when torch is imported; see :func:`~fsdp_core.testing.launching.forking.start_process`.

    Example:
        .. code-block:: python

            with RankPool() as pool:
                pool.run(2, train, 5)  # [train(5) on rank 0, train(5) on rank 1]
    """

    kind: ClassVar[RankKind] = "processes"
    start_method: ClassVar[StartMethod] = "forkserver"

    def __init__(self) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``function(*args)`` on every rank.

        Args:
            world_size: The number of ranks.
            function: A function that ranks can import by module and name.
            *args: Picklable arguments.
            timeout: The time limit in seconds for the slowest rank, which ``FSDP_PATIENCE`` multiplies.

        Returns:
            What each rank returned, by rank. It must be picklable.

        Raises:
            RankError: A rank raised, died, or took too long.
        """
        __tracebackhide__ = True  # pytest then shows the calling test and the ranks' errors
        for attempt in range(1, _ATTEMPTS + 1):
            results, failures = self._run_once(world_size, function, args, scaled_limit(timeout))
            if not failures:
                break
            if attempt == _ATTEMPTS or not all(failure.is_connect_failure for failure in failures.values()):
                raise_failures(function, failures, world_size)
            summary = next(failure.summary for failure in failures.values() if failure.summary != WAITED_FOR_FAILED)
            warnings.warn(
                f"gloo failed to connect the ranks ({summary}); new ones are started for the same call.", stacklevel=2
            )
        return [results[rank] for rank in range(world_size)]

    def _run_once(
        self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> tuple[dict[int, Any], dict[int, Failure]]:
        """Make one call; the processes are terminated if a rank fails."""
        self._replace_lost()
        while len(self._workers) < world_size:
            self._workers.append(
                start_process(_answer_calls, method=self.start_method, environment={"OMP_NUM_THREADS": "1"})
            )
        try:
            with _reserved_port() as port:
                results, failures = self._call(port, world_size, function, args, timeout)
        except BaseException:
            self._abandon()  # otherwise their answers would be taken for those to the next call
            raise
        if failures:
            self._abandon()
        return results, failures

    def _call(
        self, port: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> tuple[dict[int, Any], dict[int, Failure]]:
        """The results of the ranks that returned, and the failures of the others, in the order of their reports."""
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        for rank in range(world_size):
            try:
                send_call(self._workers[rank][1], function, args, rank, world_size, port)
            except OSError:
                failures[rank] = Failure(f"the process died with exit code {self._exit_code(rank)}")
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < world_size:
            open_ranks = [r for r in range(world_size) if r not in results and r not in failures]
            rank_of_connection: dict[Any, int] = {self._workers[r][1]: r for r in open_ranks}
            # After a failure, other ranks may wait in a collective forever. They get five seconds to return or fail.
            wait_limit = min(deadline, time.monotonic() + 5.0) if failures else deadline
            ready = wait(list(rank_of_connection), timeout=max(wait_limit - time.monotonic(), 0.0))
            if not ready:
                is_late = wait_limit == deadline
                for rank in open_ranks:
                    failures[rank] = (
                        describe_silence(*self._workers[rank], timeout) if is_late else Failure(WAITED_FOR_FAILED)
                    )
            for connection in ready:
                rank = rank_of_connection[connection]
                has_returned: bool
                value: Any
                try:
                    ((has_returned, value),) = self._workers[rank][1].recv()
                except (EOFError, ConnectionResetError):
                    has_returned = False
                    value = Failure(f"the process died with exit code {self._exit_code(rank)}")
                except Exception as error:
                    reason = f"what it returned can't be unpickled here: {type(error).__name__}: {error}"
                    has_returned = False
                    value = Failure(reason, traceback.format_exc())
                (results if has_returned else failures)[rank] = value
        return results, failures

    def _abandon(self) -> None:
        """Kill processes in an unknown state: one that waits for another would not respond."""
        for process, _ in self._workers:
            kill_process(process)
        self.close()

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._workers:
            end_process(process, connection)
        self._workers.clear()

    def _replace_lost(self) -> None:
        """Terminate all processes if one of them has died since the last call."""
        for process, connection in self._workers:
            if connection.poll():  # nothing is sent between two calls, so the pipe has ended
                process.join(timeout=10)  # the process may end a moment later than its pipe
        dead_processes = {process.pid: process.exitcode for process, _ in self._workers if not process.is_alive()}
        if dead_processes:
            description = ", ".join(f"process {pid} with exit code {status}" for pid, status in dead_processes.items())
            warnings.warn(f"Ranks have died between two calls ({description}); new ones are started.", stacklevel=4)
            self.close()

    def _exit_code(self, rank: int) -> int | None:
        process = self._workers[rank][0]
        process.join(timeout=2.0)
        return process.exitcode


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A context with a free port for rank 0's store, which is reserved meanwhile.

    The port is bound, without listening, with a flag that lets the store's own socket, which has the flag too, listen
    on it. A port that is only looked up could be taken by another pool or connection before the store uses it.
    """
    with socket.socket() as port_holder:
        port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port_holder.bind(("127.0.0.1", 0))
        yield int(port_holder.getsockname()[1])


def _answer_calls(connection: Connection) -> None:
    """Answer calls in a rank's process."""
    import torch

    torch.set_num_threads(1)
    answer_calls(connection, lambda *call: [answer_of(partial(_call, *call))])


def _call(
    receive: Callable[[], Any], module: str, name: str, path: list[str], rank: int, world_size: int, port: int
) -> Any:
    import torch
    import torch.distributed as dist

    sys.path[:] = path
    try:
        with restored_environment():
            os.environ.update(_rank_environment(rank, world_size, port))
            try:
                args = receive()
                function = import_function(module, name)
                freeze_modules()
                torch.manual_seed(0)
                return _in_host_memory(function(*args))
            finally:
                if dist.is_initialized():
                    from fsdp_core.torch_private.dtensors import note_meshes

                    note_meshes()
                    dist.destroy_process_group()
    finally:
        gc.collect()


def _in_host_memory(result: Any) -> Any:
    """Copy a result's device tensors to the host: no process can read device memory when its owner has ended."""
    from torch import Tensor

    from fsdp_core.devices import is_accelerator
    from fsdp_core.torch_private.tensors import tree_map

    def on_host(leaf: Any) -> Any:
        return leaf.cpu() if isinstance(leaf, Tensor) and is_accelerator(leaf.device) else leaf

    return tree_map(on_host, result)


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables of a rank, as ``torchrun`` sets them for one host with all ranks or a host for each."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "fsdp-core-ranks",
    }
    if not ranks_are_nodes():
        return variables | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size), "GROUP_RANK": "0"}
    variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
    # NCCL refuses two ranks of one host on one device. Ranks of several hosts talk through sockets, here of this host.
    return variables | {"NCCL_HOSTID": f"fsdp-core-rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def ranks_are_nodes() -> bool:
    """Whether each rank is a node with one device, so that several ranks can share it.

    The environment variable ``FSDP_TESTS_RANKS_ARE_NODES=1`` asks for it, where there are fewer devices than ranks.
    """
    return os.environ.get("FSDP_TESTS_RANKS_ARE_NODES", "0") == "1"
