"""One rank per XLA device: its number, and its communication with the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core import ReduceOp, Runtime
from fsdp_xla.ranks.communicator import Communicator
from fsdp_xla.seeding import follow_manual_seed, follow_seed_from_before
from fsdp_xla.torch_xla_private import devices as xla

__all__ = ["XLARuntime"]

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


class XLARuntime(Runtime):
    """Ranks that are XLA devices: processes on a TPU, threads on the CPU.

    Values are reduced and gathered on the host, so that metrics never add a graph to those that training compiles.
    Reductions on the device, inside the graph of a step, go through :meth:`in_graph`.
    """

    def __init__(self) -> None:
        self._communicator: Communicator | None = None

    def start(
        self,
        *,
        rank: int,
        local_rank: int,
        world_size: int,
        device: torch.device,
        address: str,
        port: int,
        timeout: timedelta | None = None,
    ) -> None:
        self.rank, self.local_rank, self.world_size = rank, local_rank, world_size
        self.device = xla.start_alone() if world_size == 1 else xla.default_device()
        xla.check_autograd(
            self.device,
            "xla_fsdp",
            "Take that backward pass in another process, or in a rank: in a hook, or in train().",
        )
        if world_size > 1 and self._communicator is None:
            self._communicator = xla.communicator_of_ranks(rank, world_size, address, port, timeout)
        if world_size == 1:
            follow_seed_from_before(self.set_device_random_state)
        follow_manual_seed(self.set_device_random_state)

    def stop(self) -> None:
        self._communicator = None

    def described(self) -> str:
        return f"{super().described()} (XLA)"

    def gather_objects(self, obj: Any) -> list[Any]:
        return [obj] if self._communicator is None else self._communicator.all_gather_object(self.rank, obj)

    def gather_objects_to(self, obj: Any, dst: int = 0) -> list[Any] | None:
        return [obj] if self._communicator is None else self._communicator.gather_object(self.rank, obj, dst)

    def total(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers) if self._communicator is None else self._communicator.total(self.rank, numbers)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        if self._communicator is None:
            return obj
        has_device_tensors = any(
            isinstance(leaf, Tensor) and leaf.device.type == "xla" for leaf in xla.tree_flatten(obj)[0]
        )
        sent_object = None if self.rank != src else _DeviceObject() if has_device_tensors else obj
        received = self._communicator.all_gather_object(self.rank, sent_object)[src]
        if isinstance(received, _DeviceObject):
            xla.sync()  # on all ranks, because the object's values may depend on a collective
            received = self._communicator.all_gather_object(self.rank, obj if self.rank == src else None)[src]
        return received

    def barrier(self) -> None:
        self.gather_objects(None)

    def all_reduce(self, tensor: Tensor, op: ReduceOp | str = "mean", group: Any | None = None) -> Tensor:
        if self._communicator is None:
            return tensor
        stacked = torch.stack(self.gather_objects(xla.on_host(tensor)))
        reduced = stacked.sum(0) / len(stacked) if op == "mean" else _REDUCTIONS[str(op)](stacked)
        # Autograd must not record the copy, which would replace the tensor's own history. The copy rounds integers
        # towards zero, as Lightning's reduction does.
        with torch.no_grad():
            tensor.copy_(reduced)
        return tensor

    def building(self) -> AbstractContextManager[None]:
        """Context in which this rank builds its model."""
        return nullcontext() if self._communicator is None else self._communicator.building(self.rank)

    def claim(self, module: nn.Module) -> None:
        """Record that this rank shards a module.

        Raises:
            ShardingError: Another rank, a thread of this process, shards it too.
        """
        if self._communicator is not None:
            self._communicator.claim(self.rank, module)

    def in_graph(self) -> XLARuntime:
        """The same ranks, reducing inside the graph that is being recorded, without fetching values."""
        return self if self._communicator is None else _InGraph(self)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if self._communicator is None:
            return tensor.unsqueeze(0)
        if sync_grads and tensor.requires_grad:
            gathered: Tensor = _GatherOnDevice.apply(tensor, self.world_size)  # type: ignore[no-untyped-call]
            return gathered
        return torch.stack(self.gather_objects(xla.on_host(tensor))).to(tensor.device)

    def side_channel(self) -> Runtime:
        channel = XLARuntime()
        channel.rank, channel.local_rank, channel.world_size = self.rank, self.local_rank, self.world_size
        channel._communicator = None if self._communicator is None else self._communicator.duplicate(self.rank)
        return channel

    def device_random_state(self) -> Any:
        return xla.random_state(self.device)

    def set_device_random_state(self, state: Any) -> None:
        xla.set_random_state(self.device, state)


class _DeviceObject:
    """A message that announces an object with device tensors: all ranks run their pending computations first."""


class _InGraph(XLARuntime):
    def __init__(self, runtime: XLARuntime) -> None:
        super().__init__()
        self.__dict__.update(runtime.__dict__)

    def all_reduce(self, tensor: Tensor, op: ReduceOp | str = "mean", group: Any | None = None) -> Tensor:
        return xla.all_reduce(tensor, str(op))


class _GatherOnDevice(torch.autograd.Function):
    """All-gather with a reduce-scatter as backward. torch_xla's own ignores the gradients of the other ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world_size: int) -> Tensor:
        ctx.world_size = world_size
        return xla.all_gather(tensor.unsqueeze(0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return xla.reduce_scatter(grad.contiguous(), ctx.world_size).squeeze(0), None
