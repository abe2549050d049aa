"""A device named "fake" over the host's memory, to test code for accelerators where there is none.

Importing it makes ``torch.device("fake", 0)`` and its like usable, ``torch.fake`` the module of the device, and
``"fakeccl"`` the backend of its process groups. Streams run asynchronously, memory is counted and limited, and what
reads too early, frees too early or waits where it need not is seen.
"""

from fsdp_fake_device.control import (
    CopyCount,
    Counters,
    counters,
    get_delay,
    reset_counters,
    set_blocking,
    set_delay,
    set_memory_limit,
    sleep,
    with_delay,
    without,
)
from fsdp_fake_device.registration import register as _register

__all__ = [
    "CopyCount",
    "Counters",
    "counters",
    "get_delay",
    "reset_counters",
    "set_blocking",
    "set_delay",
    "set_memory_limit",
    "sleep",
    "with_delay",
    "without",
]

_register()
