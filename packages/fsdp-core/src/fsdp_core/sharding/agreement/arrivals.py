"""Whether all ranks arrive at a comparison, after code of the user's in which an error may have left some waiting."""

from __future__ import annotations

import time

from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from fsdp_core.torch_private.process_groups import default_store

__all__ = ["all_arrive"]

#: How long a rank that has failed waits for the others, which may have more to do than it had.
PATIENCE_SECONDS = 60.0

_SECONDS_BETWEEN_LOOKS = 0.1


def all_arrive(runtime: Runtime, *, has_failed: bool) -> bool:
    """Record that this rank has arrived; if it has failed, wait for the others, but not for long.

    Ranks that have not failed do not wait here. All ranks must call it.

    Args:
        runtime: The ranks.
        has_failed: Whether this rank is to raise an error, which the others learn in the comparison that follows.

    Returns:
        ``False`` if some rank does not arrive: it may wait for this one in a collective of the user's code, and in the
        comparison this one would wait for it. ``True`` if all have arrived, or nothing is known of it.
    """
    store = default_store()
    if store is None or runtime.world_size == 1 or not isinstance(runtime, ProcessGroupRuntime):
        return True
    number = store.add(f"fsdp_core/arrivals of rank {runtime.rank}", 1)
    key = f"fsdp_core/arrival {number}"
    arrived = store.add(key, 1)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while has_failed and arrived < runtime.world_size:
        if time.monotonic() > deadline:
            return False
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        arrived = store.add(key, 0)
    return True
