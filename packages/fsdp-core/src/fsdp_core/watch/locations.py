"""Where the threads of this process stand, and for how long."""

from __future__ import annotations

import math
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fsdp_core.torch_private.process_groups import Collective, last_collective

__all__ = ["Location", "StandStill", "location_of", "stacks"]

#: Packages whose frames are not the user's, wherever they are installed. Nor are those in the folders below.
_LIBRARIES = ("torch", "torch_xla", "lightning", "pytorch_lightning", "lightning_fabric")
_INSTALLED = ("site-packages", "dist-packages")

#: The modules in whose frames a thread waits for other ranks.
_WAITING = ("torch.distributed", "torch_xla", "fsdp_xla.ranks")

#: The modules of Lightning's barrier that has no time limit. A rank waits there while another does something alone.
_LIGHTNINGS_BARRIER = ("lightning.fabric.utilities.distributed", "lightning_fabric.utilities.distributed")


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where the training thread of a rank stands.

    Attributes:
        innermost: The file, line and function that runs, such as ``"dataloader.py:1310 in _try_get_data"``.
        user_line: The innermost line of code that is not installed, as torch and Lightning are; else ``innermost``.
        waits: Whether it waits for other ranks: in torch.distributed, or for a collective that has not ended.
        collective: The last collective that the rank has entered, in words; empty if that is not known.
        sequence: How many collectives of all ranks it has entered; -1 if that is not known.
        awaited: What it waits for that another rank does alone, as ``prepare_data()``, and may take long; else empty.
    """

    innermost: str
    user_line: str
    waits: bool
    collective: str = ""
    sequence: int = -1
    awaited: str = ""

    def described(self) -> str:
        """Where it stands, in words.

        Example:
            >>> Location(innermost="queue.py:180 in get", user_line="train.py:7 in <module>", waits=False).described()
            'train.py:7 in <module> (there queue.py:180 in get)'
        """
        return self.user_line if self.user_line == self.innermost else f"{self.user_line} (there {self.innermost})"


class StandStill:
    """For how long a thread has stood at one place: the same frames, each at the same instruction, at every look.

    Args:
        thread: The thread's identifier.
    """

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self._last_position: tuple[tuple[int, int], ...] = ()
        self._since = time.monotonic()

    def seconds(self) -> float:
        """Look where the thread is now; the seconds since the first of the looks that have found it there."""
        frame = sys._current_frames().get(self.thread)
        position = tuple((id(stack_frame), stack_frame.f_lasti) for stack_frame in _stack(frame))
        if position != self._last_position:
            self._last_position = position
            self._since = time.monotonic()
        return time.monotonic() - self._since


def location_of(thread: int, *, wait_limit: float = math.inf) -> Location:
    """Where a thread stands.

    Args:
        thread: The thread's identifier.
        wait_limit: The seconds after which a collective that has not ended is one that the rank waits for.
    """
    frames = sys._current_frames()
    stack = _stack(frames.get(thread))
    if not stack:
        return Location(innermost="a thread that has ended", user_line="a thread that has ended", waits=False)
    innermost = _describe_frame(stack[0])
    if any(_module(frame) == "torch.utils.data.dataloader" for frame in stack):
        innermost = f"{innermost}, for a batch of a DataLoader"
    awaited = _describe_wait(stack)
    if awaited:
        innermost = f"{innermost}, for {awaited}"
    user_line = next((_describe_frame(frame) for frame in stack if not _is_of_library(frame)), innermost)
    collective = last_collective()
    in_collective = collective is not None and not collective.has_ended and collective.seconds_ago >= wait_limit
    # a save in the background runs collectives too, for which its own thread waits
    background_frames = [
        frames[background_thread.ident]
        for background_thread in _background_threads(thread)
        if background_thread.ident in frames
    ]
    return Location(
        innermost=innermost,
        user_line=user_line,
        waits=in_collective or bool(awaited) or any(_is_waiting(frame) for frame in [stack[0], *background_frames]),
        collective="" if collective is None else _in_words(collective),
        sequence=-1 if collective is None else collective.sequence,
        awaited=awaited,
    )


def stacks(without: Collection[int] = ()) -> str:
    """The Python stacks of all threads of this process, each with its innermost call last.

    Args:
        without: Identifiers of threads to leave out.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    descriptions = []
    for identifier, frame in sys._current_frames().items():
        if identifier not in without:
            stack = "".join(traceback.format_stack(frame))
            descriptions.append(f"Thread {names.get(identifier, identifier)}, innermost call last:\n{stack}")
    return "".join(descriptions)


def _background_threads(thread: int) -> list[threading.Thread]:
    """The threads that run collectives beside the training thread: those of saves in the background."""
    return [other for other in threading.enumerate() if other.ident != thread and other.name.startswith("fsdp-save")]


def _stack(frame: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_of_library(frame: FrameType) -> bool:
    top = _module(frame).partition(".")[0]
    file = frame.f_code.co_filename
    if top in _LIBRARIES or top.startswith("fsdp_") or file.startswith("<"):
        return True
    return file.startswith(sysconfig.get_path("stdlib")) or any(part in Path(file).parts for part in _INSTALLED)


def _is_waiting(frame: FrameType) -> bool:
    module = _module(frame)
    return any(module == waiting_module or module.startswith(f"{waiting_module}.") for waiting_module in _WAITING)


def _describe_wait(stack: list[FrameType]) -> str:
    """What a thread awaits in Lightning's barrier without a limit, in words; empty if it is not there."""
    if _module(stack[0]) not in _LIGHTNINGS_BARRIER:
        return ""
    called = {frame.f_code.co_name for frame in stack if _module(frame).partition(".")[0] in _LIBRARIES}
    return next((f"{name}()" for name in ("prepare_data", "rank_zero_first") if name in called), "another rank")


def _describe_frame(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _in_words(last: Collective) -> str:
    over = f" over {last.group}" if last.group else ""
    return f"{last.name} of {last.shapes}{over}, {'ended' if last.has_ended else 'not ended'}"
