"""Steps that all ranks take: either all succeed, or the failure of one is raised on all, and none keeps waiting.

Where all succeed, a step costs each rank one sum over the ranks, however many they are. Only after a failure do ranks
exchange messages: rank 0 gets them, and tells all ranks the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

from fsdp_core import errors
from fsdp_core.checkpoint.storage.remedies import remedy
from fsdp_core.errors import FSDPError
from fsdp_core.runtime import Runtime

__all__ = ["gather_to_all", "gather_to_first", "run_on_all", "run_on_first", "total"]

T = TypeVar("T")

Failure = tuple[str, str]
"""The name of a class of :mod:`fsdp_core.errors`, and a message."""

_RANKS_SHOWN = 64
_MESSAGES_SHOWN = 16


def gather_to_all(runtime: Runtime | None, operation: str, step: Callable[[], T]) -> list[T]:
    """Run a step on every rank, and return the results of all ranks on each.

    Each rank receives what all ranks return: for small results that every rank needs. :func:`run_on_all`,
    :func:`run_on_first` and :func:`gather_to_first` send less.

    Args:
        runtime: The ranks; this process alone if ``None``.
        operation: What the step does, for the error: ``"writing /data/last.ckpt"``.
        step: This rank's step. It must not wait for another rank, and its result must be picklable.

    Returns:
        The results by rank.

    Raises:
        CheckpointError: The step failed on some rank. The error names the ranks. Its class is that of the first failing
            rank's error, if that is a class of :mod:`fsdp_core.errors`.
    """
    result = run_on_all(runtime, operation, step)
    return [result] if runtime is None else runtime.gather_objects(result)


def run_on_all(runtime: Runtime | None, operation: str, step: Callable[[], T]) -> T:
    """Run a step on every rank, and return this rank's own result, which is sent to no other.

    Args:
        runtime: The ranks; this process alone if ``None``.
        operation: What the step does, for the error.
        step: This rank's step, which must not wait for another rank.

    Raises:
        CheckpointError: As :func:`gather_to_all` raises it.
    """
    if runtime is None:
        return step()
    own_error: Exception | None = None
    result: T | None = None
    try:
        result = step()
    except Exception as error:
        own_error = error
    (failed_ranks,) = runtime.total([own_error is not None])
    if failed_ranks:
        _raise_on_all(runtime, operation, own_error)
    return result  # type: ignore[return-value]


def run_on_first(runtime: Runtime | None, operation: str, step: Callable[[], T]) -> T:
    """Run a step on every rank, and return rank 0's result on all of them.

    Args:
        runtime: The ranks; this process alone if ``None``.
        operation: What the step does, for the error.
        step: This rank's step. It must not wait for another rank. Rank 0's result must be picklable; that of others is
            sent to none.

    Raises:
        CheckpointError: As :func:`gather_to_all` raises it.
    """
    result = run_on_all(runtime, operation, step)
    return result if runtime is None else runtime.broadcast_object(result)


def gather_to_first(runtime: Runtime | None, operation: str, step: Callable[[], T]) -> list[T] | None:
    """Run a step on every rank, and return the results of all ranks on rank 0.

    Args:
        runtime: The ranks; this process alone if ``None``.
        operation: What the step does, for the error.
        step: This rank's step. It must not wait for another rank, and its result must be picklable.

    Returns:
        The results by rank, on rank 0; ``None`` elsewhere.

    Raises:
        CheckpointError: As :func:`gather_to_all` raises it.
    """
    result = run_on_all(runtime, operation, step)
    return [result] if runtime is None else runtime.gather_objects_to(result)


def total(runtime: Runtime | None, numbers: Sequence[int]) -> list[int]:
    """Add up numbers over the ranks, as :meth:`~fsdp_core.Runtime.total` does; in this process alone if ``None``."""
    return list(numbers) if runtime is None else runtime.total(numbers)


def _raise_on_all(runtime: Runtime, operation: str, own_error: Exception | None) -> NoReturn:
    """Raise the same error on every rank. All ranks must call it."""
    failures_by_rank = runtime.gather_objects_to(None if own_error is None else _describe_failure(own_error, operation))
    summary: Failure | None = None
    if failures_by_rank is not None:  # on rank 0
        failures = {rank: failure for rank, failure in enumerate(failures_by_rank) if failure is not None}
        summary = _summarize(failures, len(failures_by_rank), operation)
    name, message = runtime.broadcast_object(summary)
    raise getattr(errors, name)(message) from own_error


def _summarize(failures: Mapping[int, Failure], world_size: int, operation: str) -> Failure:
    """One error for all ranks' failures, at most a few kilobytes longer than the longest message."""
    name, first_message = failures[min(failures)]
    message = first_message
    ranks = [rank for rank, (_, message_of_rank) in failures.items() if message_of_rank == first_message]
    if len(ranks) < world_size:
        rank_list = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
        more = f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else ""
        message = f"{message}\n(on rank {rank_list}{more} of {world_size}, while {operation})"
    other_messages = sorted({message_of_rank for _, message_of_rank in failures.values()} - {first_message})
    for message_of_rank in other_messages[:_MESSAGES_SHOWN]:
        message += f"\nanother rank: {message_of_rank}"
    if len(other_messages) > _MESSAGES_SHOWN:
        message += f"\n… and {len(other_messages) - _MESSAGES_SHOWN} other messages"
    return name, message


def _describe_failure(error: Exception, operation: str) -> Failure:
    """Return the name of an error class of :mod:`fsdp_core.errors` that every rank can raise, and the message."""
    if isinstance(error, FSDPError) and hasattr(errors, type(error).__name__):
        return type(error).__name__, str(error)
    return "CheckpointError", f"{operation} failed: {type(error).__name__}: {error}. {remedy(error)}".rstrip()
