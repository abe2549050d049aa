"""Says what a trial is doing, if it takes long: some optimizers take long for each step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

__all__ = ["said_if_it_takes_long"]

_log = logging.getLogger(__name__)

#: After so many seconds, and again, a trial says what it is doing.
_SILENT_SECONDS = 20.0


@contextmanager
def said_if_it_takes_long(name: str) -> Iterator[Callable[[str], None]]:
    """A context in which rank 0 logs what is tried, after twenty seconds and again.

    Args:
        name: The optimizer's class.

    Yields:
        A function to call with what is tried from now on.
    """
    if dist.is_initialized() and dist.get_rank():
        yield lambda what: None
        return
    done, now = threading.Event(), ["whether it can be tried"]

    def tell() -> None:
        seconds = 0.0
        while not done.wait(_SILENT_SECONDS):
            seconds += _SILENT_SECONDS
            _log.warning(
                "For %.0f s, %s has been tried over small tensors, to find out %s. This is done once, before training; "
                "an optimizer of torch.optim takes less than a second.",
                seconds,
                name,
                now[0],
            )

    watching = threading.Thread(target=tell, name="fsdp_core optimizer trial", daemon=True)
    watching.start()
    try:
        yield lambda what: now.__setitem__(0, what)
    finally:
        done.set()
        watching.join()
