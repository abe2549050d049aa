"""The line that says what runs, when a module has been sharded."""

from __future__ import annotations

import logging

from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.layout import bytes_of_wholes

__all__ = ["announce"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def announce(log: logging.Logger, units: int, sharded: Sharded) -> None:
    """Say on rank 0 what was sharded, over what, and what a rank holds of it.

    Args:
        log: Lightning's logger, whose level decides whether it is said.
        units: How many of the module's submodules are units of their own.
        sharded: What the module has become.
    """
    runtime = sharded.runtime
    if runtime.rank != 0 or not log.isEnabledFor(logging.INFO):
        return
    in_units = f"{units} unit{'s' if units > 1 else ''} and the root" if units else "the root alone"
    held, whole = sharded.bytes_held(), bytes_of_wholes(sharded.layout())
    log.info(
        f"{sharded.strategy_name}: {sharded.class_name} is sharded over {runtime.described()}, in {in_units}; "
        f"the first holds {size_in_words(held)} of {size_in_words(whole)} of parameters."
    )


def size_in_words(size: int) -> str:
    """A number of bytes in the unit that leaves one to four digits.

    Example:
        >>> size_in_words(1000), size_in_words(1536), size_in_words(7 * 2**30)
        ('1000 B', '1.5 KiB', '7.0 GiB')
    """
    power = min(max(0, (size.bit_length() - 1) // 10), len(_UNITS) - 1)
    return f"{size / 2 ** (10 * power):.1f} {_UNITS[power]}" if power else f"{size} B"
