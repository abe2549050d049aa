"""What is done to a module once it is sharded, whatever the backend: its calls, its files and its hooks."""

from __future__ import annotations

import logging

from torch.distributed.tensor import DTensor

from fsdp_core.lightning.outside_steps.redirection import follow_calls
from fsdp_core.sharding.refusals.files_of_shards import refuse_files_of_shards, refuse_state_dicts
from fsdp_core.sharding.refusals.gradient_hooks import refuse_gradient_hooks
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.fqn import clean_name
from fsdp_core.torch_private.dtensor_random import draw_for_shards
from fsdp_core.torch_private.dtensor_views import write_through_copied_views

__all__ = ["announce_shards", "guard_module", "size_in_words"]

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def guard_module(sharded: Sharded, strategy_name: str) -> None:
    """Let parts of a sharded module be called outside of steps, and refuse what would only see this rank's shards.

    Args:
        sharded: The module.
        strategy_name: The name that users type.

    Raises:
        ShardingError: A parameter has a hook that would be called with a shard's gradient, or never.
    """
    layout = sharded.layout()
    has_parts = any(isinstance(p, DTensor) or sharded.holds_part(p) for p in layout)
    if has_parts or sharded.module is not sharded.root:
        follow_calls(sharded, on_all_ranks=has_parts)
    if any(isinstance(p, DTensor) for p in layout):
        write_through_copied_views()
        draw_for_shards()
    refuse_state_dicts(sharded.root, sharded.plan.names, layout, strategy_name)
    refuse_files_of_shards(sharded.root, strategy_name)
    module_params = [(clean_name(name), parameter) for name, parameter in sharded.root.named_parameters()]
    optimizer_params = [(parts[0].name, parameter) for parameter, parts in layout.items()]
    refuse_gradient_hooks([*module_params, *optimizer_params], sharded.called_hooks)


def announce_shards(log: logging.Logger, sharded: Sharded) -> None:
    """Log on rank 0 what was sharded, over what, and what a rank holds of it."""
    runtime, plan = sharded.runtime, sharded.plan
    if runtime.rank != 0 or not log.isEnabledFor(logging.INFO):
        return
    units = len(plan.units)
    in_units = f"{units} unit{'s' if units > 1 else ''} and the root" if units else "the root alone"
    log.info(
        f"{sharded.strategy_name}: {plan.class_name} is sharded over {runtime.described()}, in {in_units}; "
        f"the first holds {size_in_words(sharded.bytes_held())} of {size_in_words(plan.nbytes)} of parameters."
    )


def size_in_words(size: int) -> str:
    """A number of bytes in the unit that leaves one to four digits.

    Example:
        >>> size_in_words(1000), size_in_words(1536), size_in_words(7 * 2**30)
        ('1000 B', '1.5 KiB', '7.0 GiB')
    """
    power = min(max(0, (size.bit_length() - 1) // 10), len(_SIZES) - 1)
    return f"{size / 2 ** (10 * power):.1f} {_SIZES[power]}" if power else f"{size} B"
