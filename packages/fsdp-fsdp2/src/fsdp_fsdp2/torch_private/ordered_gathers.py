"""Gathers on an accelerator that wait for what a step has written to shards.

``fully_shard`` gathers on streams of its own, which wait for the current stream when a forward pass of the root begins,
and not again: they would read what a step writes to shards after that, such as weights that are clamped, too early.
Shards in host memory are copied to the accelerator while the host goes on: what it writes to them next would be copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from fsdp_fsdp2.torch_private.data_writes import count_data_writes
from fsdp_fsdp2.torch_private.gathered_values import count_writes

__all__ = ["begin_step", "let_gathers_wait", "order_gathers", "wait_for_copies"]

_KNOWN_WRITES, _COPIED = "_fsdp_fsdp2_ordered_writes", "_fsdp_fsdp2_copy_event"


def order_gathers(groups: Iterable[Any]) -> None:
    """Let the gathers of units wait for writes to their shards from now on, and writes for gathers that read these.

    The CPU has no streams.
    """
    for group in groups:
        if group.device.type != "cpu":
            group.unshard = partial(_unshard_after_writes, weakref.ref(group))
            if any(parameter.offload_to_cpu for parameter in group.fsdp_params):
                group.post_forward = partial(_end_forward, weakref.ref(group))


def begin_step(groups: Iterable[Any]) -> None:
    """Record that the root's forward pass begins: the streams wait for all that was written before."""
    for group in groups:
        if group.device.type != "cpu":
            vars(group)[_KNOWN_WRITES] = _writes_to(group)


def let_gathers_wait(comm_ctx: Any, device: torch.device) -> None:
    """Let gathers that are queued from now on wait for what is queued on the current stream.

    Args:
        comm_ctx: The context that units share.
        device: Where they compute.
    """
    if device.type != "cpu":
        current_stream = torch.accelerator.current_stream(device)
        for stream in (comm_ctx.all_gather_copy_in_stream, comm_ctx.all_gather_stream):
            stream.wait_stream(current_stream)


def _writes_to(group: Any) -> tuple[Any, int]:
    return count_writes(group), count_data_writes(group)


def _unshard_after_writes(group_ref: weakref.ref[Any], *args: Any, **kwargs: Any) -> Any:
    group: Any = group_ref()
    if not group.is_unsharded and group._all_gather_result is None:
        writes, known_writes = _writes_to(group), vars(group).get(_KNOWN_WRITES)
        vars(group)[_KNOWN_WRITES] = writes
        if known_writes is not None and writes != known_writes:
            let_gathers_wait(group.comm_ctx, group.device)
    work = type(group).unshard(group, *args, **kwargs)
    if "post_forward" in vars(group):
        vars(group)[_COPIED] = group.comm_ctx.all_gather_copy_in_stream.record_event()
    return work


def wait_for_copies(groups: Iterable[Any]) -> None:
    """Let the host wait until shards in its memory are copied that units have gathered, as at the end of a pass."""
    for group in groups:
        copied = vars(group).pop(_COPIED, None)
        if copied is not None:
            copied.synchronize()


def _end_forward(group_ref: weakref.ref[Any], *args: Any, **kwargs: Any) -> Any:
    """End a unit's call, whose computation is queued, and let the host wait until its shards are copied."""
    group: Any = group_ref()
    wait_for_copies([group])
    return type(group).post_forward(group, *args, **kwargs)
