"""Where this process runs and who its peers are: the one place that starts, meets, reduces and broadcasts."""

from __future__ import annotations

import atexit
import os
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ProcessGroupRuntime", "Runtime"]

ReduceOp = Literal["mean", "sum", "max", "min"]

#: Long enough for threads that have done their work to let go of it, on a loaded machine too.
_SECONDS_FOR_THREADS = 0.1


class Runtime(ABC):
    """Tells a backend and a checkpoint which rank this is, and lets the ranks of one run talk.

    The adapters call :meth:`start` once per rank; everything else may be called after it. A runtime that was never
    started is a world of one: its collectives return what they were given.

    Attributes:
        device: The device that this rank computes on.
        rank: This rank's index in the world, from 0.
        local_rank: This rank's index on its host, from 0.
        world_size: The number of ranks.
        launcher: How Lightning should start the ranks: ``"subprocess"`` runs the user's script again.
    """

    device: torch.device = torch.device("cpu")
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launcher: Literal["subprocess"] = "subprocess"

    @abstractmethod
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
        """Join the world. Idempotent: a world that stands already is used as it is.

        Args:
            rank: This rank's index in the world.
            local_rank: This rank's index on its host.
            world_size: The number of ranks.
            device: The device that this rank computes on.
            address: Host name or address of rank 0.
            port: Port on which rank 0 listens.
            timeout: How long a collective may wait for its peers; the runtime's own default when ``None``.
        """

    @abstractmethod
    def stop(self) -> None:
        """Leave the world, if this runtime created it. Idempotent."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp | str = "mean", group: Any | None = None) -> Tensor:
        """Reduce ``tensor`` over the ranks, in place.

        Args:
            tensor: Any shape; the same on every rank.
            op: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
            group: A process group; all ranks when ``None``.

        Returns:
            The reduced tensor, which is ``tensor`` itself where its dtype can hold the result.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the ranks' tensors along a new first axis.

        Args:
            tensor: Shape ``(...)``, the same on every rank.
            group: A process group; all ranks when ``None``.
            sync_grads: Whether gradients flow back to the ranks that gave the tensors.

        Returns:
            A tensor of shape ``(world_size, ...)``.
        """

    @abstractmethod
    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Give every rank the object that rank ``src`` holds. The object must be picklable."""

    @abstractmethod
    def gather_objects(self, obj: Any) -> list[Any]:
        """Give every rank the list of all ranks' objects, by rank. The objects must be picklable."""

    @abstractmethod
    def barrier(self) -> None:
        """Return on no rank before every rank has called."""


class ProcessGroupRuntime(Runtime):
    """One process per rank, meeting in torch's default process group: NCCL on CUDA, gloo on CPU.

    On CUDA the group is ``cpu:gloo,cuda:nccl``, because parameters offloaded to the CPU are clipped there, which NCCL
    alone can't reduce.

    Args:
        backend: The process-group backend, as in :func:`torch.distributed.init_process_group`; chosen by device when
            ``None``.

    Example:
        A runtime that was not started is a world of one:

        >>> runtime = ProcessGroupRuntime()
        >>> runtime.world_size, runtime.broadcast_object("hello")
        (1, 'hello')
        >>> runtime.all_gather(torch.ones(3)).shape
        torch.Size([1, 3])
    """

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend
        self._owns_group = False

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
        self.rank, self.local_rank, self.world_size, self.device = rank, local_rank, world_size, device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if dist.is_initialized():
            return
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = str(address), str(port)
        dist.init_process_group(
            self.backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        self._owns_group = True
        # gloo's threads abort the interpreter (exit status 134) if the group is still there when it ends
        atexit.register(self.stop)

    def stop(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
            # a thread of gloo's that drops its last tensor in an interpreter that is already ending aborts the process
            time.sleep(_SECONDS_FOR_THREADS)
        self._owns_group = False

    @property
    def _alone(self) -> bool:
        return not dist.is_initialized()

    def all_reduce(self, tensor: Tensor, op: ReduceOp | str = "mean", group: Any | None = None) -> Tensor:
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            return tensor.full_tensor()  # it is of all ranks already
        if self._alone:
            return tensor
        if op == "mean":
            # gloo has no average; integers keep their dtype by rounding towards zero, as Lightning's reduction does.
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group=group)
            count = dist.get_world_size(group)
            return tensor.div_(count) if tensor.is_floating_point() else tensor.copy_(tensor / count)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, str(op).upper()), group=group)
        return tensor

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if self._alone:
            return tensor.unsqueeze(0)
        tensor = tensor.contiguous()
        if sync_grads:
            from torch.distributed.nn.functional import all_gather

            return torch.stack(all_gather(tensor, group=group or dist.group.WORLD))
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor.detach(), group=group)
        return torch.stack(gathered)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        if self._alone:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def gather_objects(self, obj: Any) -> list[Any]:
        if self._alone:
            return [obj]
        box: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(box, obj)
        return box

    def barrier(self) -> None:
        if self._alone:
            return
        if self.device.type == "cuda":
            dist.barrier(device_ids=[self.device.index or 0])
        else:
            dist.barrier()
