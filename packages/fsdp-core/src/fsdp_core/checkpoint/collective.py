"""Steps that all ranks take: either all succeed, or the failure of one is raised on all, and none keeps waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fsdp_core import errors
from fsdp_core.checkpoint.storage.remedies import remedy
from fsdp_core.errors import FSDPError
from fsdp_core.runtime import Runtime

__all__ = ["together"]

T = TypeVar("T")


def together(runtime: Runtime | None, doing: str, step: Callable[[], T]) -> list[T]:
    """Run a step on every rank, and return the results of all ranks on each.

    Args:
        runtime: The ranks; this process alone if ``None``.
        doing: What the step does, for the error: ``"writing /data/last.ckpt"``.
        step: This rank's step. It must not wait for another rank, and its result must be picklable.

    Returns:
        The results by rank.

    Raises:
        CheckpointError: The step failed on some rank. The error names the ranks. Its class is that of the first failing
            rank's error, if that is a class of :mod:`fsdp_core.errors`.
    """
    if runtime is None:
        return [step()]
    own: Exception | None = None
    result: T | None = None
    try:
        result = step()
    except Exception as error:
        own = error
    outcomes = runtime.gather_objects((result, None if own is None else _describe(own, doing)))
    failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}
    if not failures:
        return [given for given, _ in outcomes]
    name, message = failures[min(failures)]
    ranks = [rank for rank, (_, other) in failures.items() if other == message]
    if len(ranks) < len(outcomes):
        message = f"{message}\n(on rank {', '.join(map(str, ranks))} of {len(outcomes)}, while {doing})"
    others = {other for _, other in failures.values()} - {failures[min(failures)][1]}
    for other in sorted(others):
        message += f"\nanother rank: {other}"
    raise getattr(errors, name)(message) from own


def _describe(error: Exception, doing: str) -> tuple[str, str]:
    """Return the name of an error class of :mod:`fsdp_core.errors` that every rank can raise, and the message."""
    if isinstance(error, FSDPError) and hasattr(errors, type(error).__name__):
        return type(error).__name__, str(error)
    return "CheckpointError", f"{doing} failed: {type(error).__name__}: {error}. {remedy(error)}".rstrip()
