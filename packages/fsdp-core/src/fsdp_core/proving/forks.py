"""Calls functions in forked processes, which leave this one as it was, and returns what they return."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from fsdp_core.errors import ShardingError, UnsupportedCapabilityError, first_line
from fsdp_core.rehearsal.users_code import line_of_error

__all__ = ["Failed", "call_in_forks"]

T = TypeVar("T")

#: How long the other ranks get to end by themselves once one of them has failed, in seconds.
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


def call_in_forks(calls: Sequence[Callable[[], T]], seconds: float) -> list[T | Failed]:
    """Call functions at the same time, each in a process of its own, with one thread.

    Args:
        calls: The functions. They return plain data and tensors.
        seconds: How long they may take before they are ended.

    Returns:
        What each has returned, or what it ended in.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="fsdp-prove-") as folder:
        paths = [Path(folder, str(number)) for number in range(len(calls))]
        children = [
            context.Process(target=_keep_result, args=(call, path)) for call, path in zip(calls, paths, strict=True)
        ]
        for child in children:
            child.start()
        _await_all(children, paths, seconds)
        return [_result(child, path, seconds) for child, path in zip(children, paths, strict=True)]


def _await_all(children: Sequence[Any], paths: Sequence[Path], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    has_failed = False
    while any(child.is_alive() for child in children) and time.monotonic() < deadline:
        next(child for child in children if child.is_alive()).join(0.02)
        # its peers wait for it in a collective
        if not has_failed and any(child.exitcode for child in children):
            has_failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
    for child in children:
        if child.is_alive():
            child.kill()
        child.join()


def _keep_result(call: Callable[[], Any], path: Path) -> None:
    torch.set_num_threads(1)
    result: dict[str, Any]
    try:
        result, status = {"value": call()}, 0
    except Exception as error:
        if os.environ.get("FSDP_PROVE_TRACEBACK"):
            import traceback

            traceback.print_exc()
        words = f"{type(error).__name__}: {first_line(error)}{line_of_error(error)}"
        result, status = (
            {"words": words, "is_refusal": isinstance(error, ShardingError | UnsupportedCapabilityError)},
            1,
        )
    unfinished = path.with_suffix(".part")
    torch.save(result, unfinished)
    unfinished.rename(path)
    os._exit(status)  # without the exit handlers of the script's libraries


def _result(child: Any, path: Path, seconds: float) -> Any:
    if path.exists():
        result = torch.load(path, weights_only=True)
        return result["value"] if "value" in result else Failed(**result)
    code = child.exitcode or 0
    if code == -signal.SIGKILL:
        return Failed(words=f"the process did not end within {seconds:g} s, or after another one had failed")
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
    return Failed(words=f"the process ended {how}")
