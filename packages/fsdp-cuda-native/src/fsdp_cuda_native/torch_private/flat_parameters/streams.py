"""Handles whose gathers wait for what a step has written, on an accelerator, and shards that are in host memory.

FSDP1 gathers in streams of its own. These wait for the current stream in ``_root_pre_forward``, when the root's forward
pass begins, and not again: what a step writes to pieces after that would be gathered too early. With ``cpu_offload``,
``FlatParamHandle.pre_unshard`` copies a shard from host memory to the device, and the host may write to the shard
before it is copied; and ``prepare_gradient_for_backward`` loses a reduced gradient that is in host memory. The methods
of :class:`HandleWithStreams` wait, and keep that gradient. The CPU has no streams, and nothing to offload.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._flat_param import FlatParamHandle

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.sharding import count_piece_writes, outside_of_compilation

__all__ = ["HandleWithStreams"]


class HandleWithStreams(FlatParamHandle):
    """A handle that does what FSDP1's does, and waits where that does not. FSDP1's own get this class.

    Attributes:
        unit_ref: The unit, on an accelerator; ``None`` on the CPU.
        copied: The event at which the shard is copied from host memory, until the host has waited for it.
        ordered_writes: The :func:`count_piece_writes` that the streams of FSDP1's gathers have waited for.
    """

    unit_ref: weakref.ref[Any] | None = None
    copied: Any = None
    ordered_writes: ClassVar[int] = 0

    def order_gathers(self, unit: nn.Module) -> None:
        """Let FSDP1's streams on an accelerator wait for what a step has written to pieces and to their gradients."""
        if self.device.type != "cpu":
            self.unit_ref = weakref.ref(unit)
            if self._offload_params:
                vars(unit)["_apply"] = MethodType(_convert_offloaded, unit)
                unit.register_forward_hook(partial(_wait_for_copy, weakref.ref(self)))

    def _unit_with_streams(self) -> Any:
        """The unit, on an accelerator and once its root has been called; else ``None``."""
        unit = None if self.unit_ref is None else self.unit_ref()
        return unit if hasattr(unit, "_default_stream") else None

    @outside_of_compilation
    def pre_unshard(self) -> bool:
        if self.unit_ref is None:
            return bool(super().pre_unshard())
        unit = self._unit_with_streams()
        writes = count_piece_writes()
        if unit is not None and writes != HandleWithStreams.ordered_writes:
            HandleWithStreams.ordered_writes = writes
            for stream in (unit._pre_unshard_stream, unit._unshard_stream):
                stream.wait_stream(unit._default_stream)
        has_queued = bool(super().pre_unshard())
        if self._offload_params:
            self.copied = self._device_handle.current_stream().record_event()
            flat = self.flat_param
            if not self.uses_sharded_strategy and unit is not None and flat.device == self.device:
                # FSDP1 has copied it to the device on this stream, and frees it while the default one still computes
                flat.data.record_stream(unit._default_stream)
        return has_queued

    def _writeback_orig_params(self) -> bool:
        unit = self._unit_with_streams()
        if unit is None:
            return bool(super()._writeback_orig_params())
        # FSDP1 copies on the stream of its gathers what other streams write and read
        current = unit._device_handle.current_stream()
        other_streams = (unit._default_stream, unit._post_backward_stream)
        for stream in other_streams:
            current.wait_stream(stream)
        has_written = bool(super()._writeback_orig_params())
        gradient = self.flat_param.grad
        for stream in other_streams:
            stream.wait_stream(current)
            if gradient is not None and gradient.device == self.device:
                gradient.record_stream(stream)
        return has_written

    @outside_of_compilation
    def prepare_gradient_for_backward(self) -> None:
        flat: Any = self.flat_param
        grad = flat.grad
        if grad is None or grad.device == self.device or grad.shape != flat._local_shard.shape:
            super().prepare_gradient_for_backward()  # type: ignore[no-untyped-call]
            return
        # the reduced gradient of an earlier pass, in host memory: FSDP1 would replace it by that of this pass
        if self.uses_sharded_strategy:
            flat.grad = None
            if not hasattr(flat, "_saved_grad_shard"):
                flat._saved_grad_shard = grad.to(self.device, flat._local_shard.dtype, non_blocking=True)
        else:
            super().prepare_gradient_for_backward()  # type: ignore[no-untyped-call]
            flat.grad = torch.empty_like(flat)  # which may be gathered in another dtype: no other can be assigned
            flat.grad.data = grad.to(self.device, non_blocking=True)  # to which this pass adds in place


def _convert_offloaded(unit: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Convert a unit whose shards are in host memory, as ``module.to()`` does, and refuse to move these."""
    if fn(torch.empty(0)).device.type != "cpu":
        raise UnsupportedCapabilityError(
            "a module whose shards cpu_offload keeps in host memory can't be moved to an accelerator, as by "
            "module.to(): its units are gathered there while they are used.\n"
            "Leave the conversion out, or cpu_offload. Inputs go to self.device, or fabric.device."
        )
    return type(unit)._apply(unit, fn, recurse)


@outside_of_compilation
def _wait_for_copy(handle_ref: weakref.ref[Any], *_: Any) -> None:
    """Let the host wait until a shard in its memory is copied: else the copy could hold what it writes next."""
    handle = handle_ref()
    if handle is not None and handle.copied is not None:
        handle.copied.synchronize()
        handle.copied = None
