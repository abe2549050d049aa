"""Ranks that live in one process, for libraries whose ranks are threads, or whose one process drives all devices."""

from __future__ import annotations

import gc
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

from fsdp_core.testing.launching.calls import (
    Answer,
    Failure,
    StartedRanks,
    answer_calls,
    describe_silence,
    freeze_modules,
    import_function,
    raise_failures,
    restored_environment,
    send_call,
)
from fsdp_core.testing.launching.forking import StartMethod, end_process, kill_process, scaled_limit, start_process
from fsdp_core.testing.launching.process_ranks import RankKind

__all__ = ["OneProcessRanks"]


class OneProcessRanks(StartedRanks):
    """Runs functions on ranks in one process; there is one process per world size, which is kept between calls.

    Such libraries read environment variables on import, and can be initialised only once per process, with a fixed
    number of devices. So each world size has its own process, which gets its variables before it imports anything. A
    process in which a rank has failed is terminated, because the state of the other ranks is unknown.

    A subclass defines what the ranks are, which variables they need, and what calls a function on them.

    Attributes:
        kind: What the ranks are.
        caller: The function that runs the ranks, as ``"module:function"``; called in the ranks' process as
            ``caller(world_size, function, arguments)``, it returns an :data:`Answer` for each rank, which the other
            process must be able to unpickle. Its first call comes before any other use of the library.
        keeps: Variables that the library itself sets for the life of the process; others are restored after each call.
        start_method: ``"spawn"`` sets the variables before the process imports anything. ``"forkserver"`` forks, in
            milliseconds, a process that has imported torch and Lightning: for libraries that neither of them imports.
        patience: The timeout factor of these ranks, relative to processes over gloo.
    """

    kind: ClassVar[RankKind]
    caller: ClassVar[str]
    keeps: ClassVar[tuple[str, ...]] = ()
    start_method: ClassVar[StartMethod] = "spawn"
    patience: ClassVar[float] = 1.0

    def __init__(self) -> None:
        self._workers: dict[int, tuple[BaseProcess, Connection]] = {}

    @abstractmethod
    def environment(self, world_size: int) -> Mapping[str, str]:
        """The environment variables that the process needs before it imports anything, by world size."""

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``function(*args)`` on every rank.

        Args:
            world_size: The number of ranks.
            function: A function that the process can import by module and name.
            *args: Picklable arguments; every rank gets copies.
            timeout: The time limit in seconds for processes over gloo; see :attr:`patience`.

        Returns:
            What each rank returned, by rank; with one controller, its result, repeated for each device.

        Raises:
            RankError: A rank raised, or the process died, or took too long.
        """
        __tracebackhide__ = True
        if world_size not in self._workers:
            self._start(world_size)
        process, connection = self._workers[world_size]
        answers: list[Answer]
        limit = scaled_limit(self.patience * timeout)
        try:
            send_call(connection, function, args, world_size)
            if connection.poll(limit):
                answers = connection.recv()
            else:
                answers = [(False, describe_silence(process, connection, limit))]
        except (EOFError, OSError):
            process.join(timeout=2.0)
            answers = [(False, Failure(f"the process died with exit code {process.exitcode}"))]
        except BaseException:
            kill_process(process)
            self._end(world_size)  # otherwise its answer would be taken for that to the next call
            raise
        failures = {rank: value for rank, (has_returned, value) in enumerate(answers) if not has_returned}
        if failures:
            self._end(world_size)
            # Causes first: a rank that waited for a failed one reports only a consequence.
            causes_first = sorted(failures, key=lambda rank: self.follows_from_another(failures[rank]))
            raise_failures(function, {rank: failures[rank] for rank in causes_first}, world_size)
        return [value for _, value in answers]

    def follows_from_another(self, failure: Failure) -> bool:
        """Whether a rank has failed because another one has."""
        return False

    def close(self) -> None:
        """End the processes."""
        for world_size in list(self._workers):
            self._end(world_size)

    def _start(self, world_size: int) -> None:
        variables = {"OMP_NUM_THREADS": "1", **self.environment(world_size)}
        self._workers[world_size] = start_process(
            _answer_calls, self.caller, self.keeps, method=self.start_method, environment=variables
        )

    def _end(self, world_size: int) -> None:
        end_process(*self._workers.pop(world_size))


def _answer_calls(connection: Connection, caller: str, keeps: Collection[str]) -> None:
    """Answer calls in the process of the ranks."""
    answer_calls(connection, partial(_call, caller, keeps))


def _call(
    caller: str,
    keeps: Collection[str],
    receive: Callable[[], Any],
    module: str,
    name: str,
    path: list[str],
    world_size: int,
) -> list[Answer]:
    sys.path[:] = path
    try:
        with restored_environment(keeps):
            import torch

            torch.set_num_threads(1)
            torch.manual_seed(0)
            call_on_ranks = import_function(*caller.split(":"))
            function = import_function(module, name)
            freeze_modules()
            answers: list[Answer] = call_on_ranks(world_size, function, receive())
        return answers
    except BaseException as error:
        return [(False, Failure.of(error))]
    finally:
        gc.collect()
