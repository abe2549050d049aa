"""Calls of functions in other processes: how they are sent, answered, and reported where they fail."""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pickle import Pickler
from types import TracebackType
from typing import Any, NoReturn, Self

from fsdp_core.testing.launching.forking import lead_session, read_stacks

__all__ = [
    "WAITED_FOR_FAILED",
    "Answer",
    "Failure",
    "RankError",
    "StartedRanks",
    "answer_calls",
    "answer_of",
    "describe_silence",
    "freeze_modules",
    "import_function",
    "raise_failures",
    "restored_environment",
    "send_call",
]

#: The outcome of a call on one rank: whether it returned, and its result or its failure.
Answer = tuple[bool, Any]

WAITED_FOR_FAILED = "ended, because it waited for a rank that failed"
"""The summary of the failure of a rank that has not failed itself."""

_CONNECT_FAILURE = "RuntimeError: Gloo connectFullMesh failed"


class RankError(AssertionError):
    """A rank failed or ran out of time.

    The message starts with the error of the first rank that failed, for pytest's short summary, and includes each
    rank's traceback.
    """


@dataclass(frozen=True)
class Failure:
    """Why a rank has no result: in one line, and with its traceback if it has one."""

    summary: str
    traceback: str = ""

    @property
    def is_connect_failure(self) -> bool:
        """Whether gloo failed to connect this rank with the others, which is unrelated to what ranks run."""
        return self.summary.startswith(_CONNECT_FAILURE) or self.summary == WAITED_FOR_FAILED

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Summarize an exception by its first line; further lines of ours and pytest's contain advice and details.

        For an assertion without a message: its source line. pytest shows values only in modules that it has rewritten.
        """
        lines = "".join(traceback.format_exception_only(error)).splitlines()
        if isinstance(error, AssertionError) and not error.args and error.__traceback__ is not None:
            source_line = traceback.extract_tb(error.__traceback__)[-1].line or ""
            if source_line.startswith("assert "):
                lines[0] += f": {source_line}"
        # A syntax error begins with indented lines, which show its location.
        summary = next(line for line in lines if not line.startswith(" "))
        return cls(summary, traceback.format_exc())

    @property
    def report(self) -> str:
        """The traceback, or else the line."""
        return self.traceback or self.summary


def describe_silence(process: BaseProcess, connection: Connection, timeout: float) -> Failure:
    """Return the failure of a process that has not answered in time, with the stacks of its threads."""
    summary = f"no answer within {timeout:g} s"
    stacks = read_stacks(process, connection)
    return Failure(summary, f"{summary}, in these calls:\n{stacks}" if stacks else "")


class StartedRanks(ABC):
    """Ranks in processes of their own: a context at the end of which they end."""

    @abstractmethod
    def close(self) -> None:
        """End the processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def answer_of(call: Callable[[], Any]) -> Answer:
    """Call a function, and return its result or failure."""
    try:
        return True, call()
    except BaseException as error:
        return False, Failure.of(error)


def send_call(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...], *extra_values: int) -> None:
    """Send a call to a process that runs :func:`answer_calls`.

    Args:
        connection: The connection to it.
        function: A function that it can import by module and name.
        args: The function's arguments.
        *extra_values: Further arguments of the other process's ``answer_call``; see :func:`answer_calls`.

    Raises:
        OSError: The process has ended.
    """
    connection.send((function.__module__, function.__qualname__, sys.path, *extra_values))
    connection.send(args)  # by itself, since the process can unpickle it only when it has set sys.path


def answer_calls(connection: Connection, answer_call: Callable[..., list[Answer]]) -> None:
    """Receive calls and answer them, until ``None`` arrives or the other process has ended. The main loop of a process.

    Args:
        connection: The connection to the process that sends calls.
        answer_call: Makes a call. Its arguments are a function that receives those of the call; the call's module, its
            name and ``sys.path``; and the extra values of :func:`send_call`.
    """
    lead_session(connection)
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        if call is None:
            return
        answers = answer_call(connection.recv, *call)
        try:
            _send_by_value(connection, answers)
        except Exception as error:  # what a rank returned can't be pickled
            connection.send([(False, Failure.of(error))])


class _ByValue(Pickler):
    def reducer_override(self, value: Any) -> Any:
        from torch import Tensor, float32, float64, from_numpy, int64, strided

        is_plain = type(value) is Tensor and value.is_cpu and value.layout is strided and not value.requires_grad
        if is_plain and value.dtype in (float32, float64, int64):
            return from_numpy, (value.numpy(),)
        return NotImplemented


def _send_by_value(connection: Connection, value: Any) -> None:
    """Send a value to :meth:`Connection.recv`, with the elements of its tensors.

    ``send`` would share each tensor's memory through a file and another connection, which takes ten times as long for
    small tensors.
    """
    buffer = io.BytesIO()
    _ByValue(buffer).dump(value)
    connection.send_bytes(buffer.getbuffer())


@contextmanager
def restored_environment(kept: Collection[str] = ()) -> Iterator[None]:
    """A context after which the environment variables are as before.

    Args:
        kept: The names of variables that stay as they were set in the context.
    """
    variables_before = dict(os.environ)
    try:
        yield
    finally:
        kept_variables = {name: os.environ[name] for name in kept if name in os.environ}
        for variable in os.environ.keys() - variables_before.keys() - kept_variables.keys():
            del os.environ[variable]
        os.environ.update(variables_before | kept_variables)


def raise_failures(function: Callable[..., Any], failures: Mapping[int, Failure], world_size: int) -> NoReturn:
    """Raise the failures of ranks as one error.

    Args:
        function: The function that they ran.
        failures: By rank, in the order in which they were reported.
        world_size: The number of ranks.

    Raises:
        RankError: Always.
    """
    __tracebackhide__ = True
    first_rank, failure = next(iter(failures.items()))
    message = [failure.summary, f"on rank {first_rank} of {world_size}, in {function.__qualname__}:"]
    message += [f"--- rank {rank} of {world_size}\n{failures[rank].report}" for rank in sorted(failures)]
    raise RankError("\n".join(message))


def import_function(module: str, name: str) -> Any:
    """Import a function by its module and its name in it."""
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    return function


_frozen_module_count = 0


def freeze_modules() -> None:
    """Exclude objects of imported modules from garbage collection, which otherwise takes 0.2 s each time."""
    global _frozen_module_count
    if len(sys.modules) != _frozen_module_count:
        _frozen_module_count = len(sys.modules)
        gc.collect()
        gc.freeze()
