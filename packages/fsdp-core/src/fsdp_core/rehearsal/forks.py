"""Calls functions in forked processes, which leave this one as it was, and returns what they return."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from fsdp_core.errors import ShardingError, UnsupportedCapabilityError, first_line
from fsdp_core.rehearsal.users_code import line_of_error
from fsdp_core.torch_private.processes import end_with_parent

__all__ = ["Failed", "call_in_fork", "call_in_forks", "how_it_ended"]

T = TypeVar("T")

#: How long the others get to end by themselves once one has failed, in seconds: ranks wait for it in a collective.
_GRACE = 5.0


@dataclass(frozen=True, kw_only=True)
class Failed:
    """What a process ended in.

    Attributes:
        words: The error, in a line.
        is_refusal: Whether it is an error of this project's own, which says that something can't be done.
    """

    words: str
    is_refusal: bool = False


def call_in_fork(call: Callable[[], T]) -> T:
    """Call a function in a process of its own, with one thread.

    Args:
        call: The function. What it returns is pickled, and has no tensors.

    Raises:
        ShardingError: It has raised an error, or its process has ended without an answer.
    """
    (result,) = call_in_forks([call])
    if isinstance(result, Failed):
        raise ShardingError(result.words)
    return result


def call_in_forks(calls: Sequence[Callable[[], T]], seconds: float = float("inf")) -> list[T | Failed]:
    """Call functions at the same time, each in a process of its own, with one thread.

    However this call ends, by an interrupt too, the processes end with it; and they end with this process.

    Args:
        calls: The functions. What they return is pickled, and has no tensors.
        seconds: How long they may take before they are ended.

    Returns:
        What each has returned, or what it ended in.
    """
    context = multiprocessing.get_context("fork")
    children: list[Any] = []
    receivers: list[Connection] = []
    results: dict[int, T | Failed] = {}
    try:
        for call in calls:
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=_send_result, args=(call, sender, os.getpid()))
            child.start()
            sender.close()  # else a child that dies would leave it open
            children.append(child)
            receivers.append(receiver)
        deadline = time.monotonic() + seconds
        while len(results) < len(calls):
            remaining = deadline - time.monotonic()
            pending = [receiver for number, receiver in enumerate(receivers) if number not in results]
            ready = wait(pending, min(max(remaining, 0.0), 3600.0))
            if not ready and remaining <= 0:
                break
            for connection in ready:
                number = receivers.index(connection)  # type: ignore[arg-type]
                results[number] = _receive_result(children[number], receivers[number])
                if isinstance(results[number], Failed):
                    deadline = min(deadline, time.monotonic() + _GRACE)
    finally:
        for number, child in enumerate(children):
            if number not in results:
                child.kill()
            child.join()
    late = Failed(words=f"the process did not end within {seconds:g} s, or after another one had failed")
    return [results.get(number, late) for number in range(len(calls))]


def _receive_result(child: Any, receiver: Connection) -> Any:
    try:
        return receiver.recv()
    except (EOFError, OSError):  # before it has sent anything, or in the middle
        child.join()
        return Failed(words=how_it_ended(child.exitcode or 0))


def how_it_ended(code: int) -> str:
    """How a process has ended that has sent nothing, in words.

    Args:
        code: Its exit status; the negative of a signal's number.
    """
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
    return f"the process ended {how}"


def _send_result(call: Callable[[], Any], sender: Connection, parent: int) -> None:
    end_with_parent(parent)
    torch.set_num_threads(1)
    try:
        result = call()
    except KeyboardInterrupt:  # of a terminal, to all of its processes: the parent says so
        os._exit(128 + signal.SIGINT)
    except Exception as error:
        if os.environ.get("FSDP_FORK_TRACEBACK"):
            traceback.print_exc()
        words = f"{type(error).__name__}: {first_line(error)}{line_of_error(error)}"
        result = Failed(words=words, is_refusal=isinstance(error, ShardingError | UnsupportedCapabilityError))
    sender.send(result)
    sender.close()
    os._exit(0)  # without the exit handlers of the script's libraries
