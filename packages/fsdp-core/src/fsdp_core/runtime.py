"""The runtime: this process's device, rank and world, and the collectives between the ranks."""

from __future__ import annotations

import atexit
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError

from fsdp_core import devices
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.mesh import DATA_AXES, Mesh, MeshAxis
from fsdp_core.torch_private.dtensors import forget_meshes, note_meshes
from fsdp_core.torch_private.process_groups import default_store, set_default_backend

__all__ = ["ProcessGroupRuntime", "ReduceOp", "Runtime"]

ReduceOp = Literal["mean", "sum", "max", "min"]

#: Long enough for gloo's threads to release the tensors of finished work, even on a loaded machine.
_SECONDS_FOR_THREADS = 0.1
#: How long a rank whose script has ended waits for its device. After Ctrl-C, a collective may never have its peers.
_SECONDS_FOR_QUEUE = 60.0
_last_group_destroyed = float("-inf")


def _destroy_group(group: Any) -> None:
    global _last_group_destroyed
    if group is None:
        note_meshes()
    dist.destroy_process_group(group)
    _last_group_destroyed = time.monotonic()


@atexit.register
def _wait_for_threads() -> None:
    """Wait for gloo's threads: one that frees its last tensor while the interpreter shuts down aborts the process."""
    time.sleep(max(0.0, _last_group_destroyed + _SECONDS_FOR_THREADS - time.monotonic()))


def _check_backend(backend: str, device: str) -> None:
    """Refuse a process-group backend that can't communicate a kind of device's tensors.

    Args:
        backend: What ``process_group_backend`` asks for.
        device: The kind, such as ``"cpu"``.

    Raises:
        ShardingError: It can't.
    """
    device_types = dist.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    if device not in device_types:
        raise ShardingError(
            f"process_group_backend={backend!r} can't communicate tensors on {device!r}, where this run computes, but "
            f"those on {', '.join(map(repr, device_types))}.\n"
            f"Leave it out; or write process_group_backend={devices.group_for(device)!r}, or accelerator='cpu'."
        )


def _check_group(device: str) -> None:
    """Refuse the process group that exists if it can't communicate a kind of device's tensors.

    Args:
        device: The kind, such as ``"cpu"``.

    Raises:
        ShardingError: It can't.
    """
    config = dist.get_backend_config()
    device_types = [entry.partition(":")[0] for entry in config.split(",") if ":" in entry]
    if not device_types or device in device_types:
        return
    raise ShardingError(
        f"this process has a process group already, {config!r}, which can't communicate tensors on {device!r}, where "
        "this run computes. The script or an earlier run has made it with init_process_group().\n"
        "Call torch.distributed.destroy_process_group() before this run, which makes its own; or make it with "
        f"torch.distributed.init_process_group({devices.group_for(device)!r}), or under Ray Train with "
        f"TorchConfig(backend={devices.group_for(device)!r})."
    )


@contextmanager
def _collectives_recorded() -> Iterator[None]:
    """A context in which new process groups record their collectives. From torch 2.13 on they always do.

    The record tells the last collective of a rank that hangs.
    """
    name = "TORCH_FR_BUFFER_SIZE"
    previous = os.environ.get(name)
    os.environ.setdefault(name, "2000")
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]


# torch 2.13 deprecates the second name for the first
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Runtime(ABC):
    """The rank, world size and device of this process, and the collectives between the ranks of a run.

    Adapters call :meth:`start` once per rank; everything else may be called after it. A runtime that was never
    started has a world size of 1: its collectives return their input.

    Attributes:
        device: The device that this rank computes on.
        rank: This rank's index in the world, from 0.
        local_rank: This rank's index on its host, from 0.
        world_size: The number of ranks.
        patience: How long :meth:`rendezvous` waits for the other ranks.
        is_rehearsed: Whether the other ranks are imagined, and tensors have no values: what compares values of ranks
            has nothing to compare. See :mod:`fsdp_core.rehearsal`.
    """

    device: torch.device = torch.device("cpu")
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    patience: timedelta = timedelta(minutes=5)
    is_rehearsed: bool = False
    _mesh: Mesh | None = None

    @property
    def mesh(self) -> Mesh:
        """How the ranks are arranged; :attr:`~fsdp_core.Mesh.data_parallel` over all of them unless it was set."""
        return self._mesh or Mesh(data_parallel=self.world_size)

    @mesh.setter
    def mesh(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def along(self, *axes: MeshAxis) -> Runtime:
        """The peers of this rank along some axes of :attr:`mesh`, as a runtime of their own.

        Its :attr:`rank` is the coordinate along these axes, and its collectives are between the peers. Every rank must
        call it for the same axes in the same order: a group of processes is created the first time.

        Args:
            *axes: Axes of the mesh.

        Raises:
            UnsupportedCapabilityError: This runtime can't communicate among a part of the ranks.
        """
        if self.mesh.size(axes) == self.world_size:
            return self
        raise UnsupportedCapabilityError(
            f"{type(self).__name__} has no groups of a part of its ranks, and the mesh {self.mesh.described()} needs "
            "them.\n"
            "Leave the sizes of the mesh out, or use a strategy whose ranks are processes of torch.distributed."
        )

    def in_graph(self) -> Runtime:
        """The same ranks, for reductions in a training step, which wait for no values where that can be avoided.

        A library that records a step as one program overrides it; this default returns the runtime itself.
        """
        return self

    @property
    def data_parallel_rank(self) -> int:
        """This rank's index among the ranks that get different batches."""
        return self.mesh.coordinate(self.rank, DATA_AXES)

    @property
    def data_parallel_world_size(self) -> int:
        """The number of ranks that get different batches."""
        return self.mesh.size(DATA_AXES)

    def by_data_parallel_rank(self, by_rank: list[Any]) -> list[Any]:
        """Reduce a list with one entry per rank to one entry per data-parallel rank, in their order."""
        return [by_rank[rank] for rank in self.mesh.peers(0, DATA_AXES)]

    @property
    def data(self) -> Runtime:
        """The ranks that get different batches: the peers along both data-parallel axes."""
        return self.along(*DATA_AXES)

    @property
    def process_group(self) -> Any:
        """Torch's process group of these ranks; ``None`` for the default one, and where ranks are not its processes."""
        return None

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
        """Join the world. Idempotent: an existing process group is used as it is.

        Args:
            rank: This rank's index in the world.
            local_rank: This rank's index on its host.
            world_size: The number of ranks.
            device: The device that this rank computes on.
            address: Host name or address of rank 0.
            port: Port on which rank 0 listens.
            timeout: How long a collective may wait for its peers; ``None`` for the runtime's default.

        Raises:
            ShardingError: The existing process group can't communicate tensors of the device.
        """

    def described(self) -> str:
        """Describe the ranks and their communication backend, for the line that is logged after sharding a module."""
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"

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

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp | str = "mean") -> Tensor:
        """Reduce ``tensor`` over the ranks, and return each rank's row of the result.

        Args:
            tensor: Shape ``(world_size, ...)``, the same on every rank; its values are overwritten.
            op: As for :meth:`all_reduce`.

        Returns:
            A tensor of shape ``(...)``: row :attr:`rank` of the reduced tensor.
        """
        return self.all_reduce(tensor, op)[self.rank]

    @abstractmethod
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the ranks' tensors along a new first axis.

        Args:
            tensor: Shape ``(...)``, the same on every rank.
            group: A process group; all ranks when ``None``.
            sync_grads: Whether gradients flow back to the ranks that the tensors came from.

        Returns:
            A tensor of shape ``(world_size, ...)``.
        """

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send each rank a run of elements of ``tensor``. This default gathers all runs on every rank.

        Args:
            tensor: A 1-D tensor: the run for rank 0, then that for rank 1, and so on.
            send: How many elements each rank gets.
            receive: How many elements each rank sends to this one.

        Returns:
            A 1-D tensor: the run of rank 0, then that of rank 1, and so on.
        """
        counts = torch.tensor([tensor.numel(), *send], device=self.device)
        table = self.all_gather(counts).tolist()  # by sender: its number of elements, and those for each rank
        padded = tensor.new_zeros(max(row[0] for row in table))
        padded[: tensor.numel()] = tensor
        rows = self.all_gather(padded)
        starts = [sum(row[1 : 1 + self.rank]) for row in table]
        return torch.cat([row[start : start + n] for row, start, n in zip(rows, starts, receive, strict=True)])

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Copy the values of rank ``src`` to every rank, in place. This default sends them as an object via the host.

        Args:
            tensor: Of the same shape, dtype and device type on every rank.
            src: The rank whose values are copied.

        Returns:
            ``tensor``.
        """
        if self.world_size > 1:
            values = self.broadcast_object(tensor.detach().cpu() if self.rank == src else None, src)
            tensor.detach().copy_(values)
        return tensor

    @abstractmethod
    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src`` on every rank. The object must be picklable."""

    @abstractmethod
    def gather_objects(self, obj: Any) -> list[Any]:
        """Return the list of all ranks' objects, by rank, on every rank. The objects must be picklable."""

    def gather_objects_to(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Return the list of all ranks' objects, by rank, on rank ``dst`` alone. The objects must be picklable.

        What the other ranks send and keep should not depend on the number of ranks. This default uses
        :meth:`gather_objects`, for which it does.

        Args:
            obj: This rank's object.
            dst: The rank that gets all of them.

        Returns:
            The objects on rank ``dst``, ``None`` elsewhere.
        """
        gathered = self.gather_objects(obj)
        return gathered if self.rank == dst else None

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Add up whole numbers over the ranks, each by itself.

        This is how ranks find out whether something has happened on any of them. What a rank sends and receives should
        not depend on the number of ranks. This default uses :meth:`gather_objects`, for which it does.

        Args:
            numbers: As many on every rank, and such that each sum fits 64 bits.

        Returns:
            The sums, the same on every rank.
        """
        return [sum(of_ranks) for of_ranks in zip(*self.gather_objects(list(numbers)), strict=True)]

    @abstractmethod
    def barrier(self) -> None:
        """Block until every rank has called it."""

    def rendezvous(self, operation: str) -> None:
        """Block until every rank has called it, or raise if some rank does not.

        Used before operations that a user might run on one rank only, after which ranks would otherwise wait for each
        other for a long time, or exchange mismatched data.

        Args:
            operation: The operation that all ranks must run, in words, for the error.

        Raises:
            ShardingError: Another rank did not call it in time, where that can be detected.
        """
        self.barrier()

    def device_random_state(self) -> Any:
        """The state of the random-number generator of :attr:`device`, as a small tensor or plain data.

        Returns:
            The state; ``None`` on the CPU, whose generator is the process's default one.
        """
        if self.device.type == "cpu":
            return None
        return devices.random_state(self.device)

    def set_device_random_state(self, state: Any) -> None:
        """Restore the generator of :attr:`device` to a state from :meth:`device_random_state`."""
        devices.set_random_state(self.device, state)

    def side_channel(self) -> Runtime:
        """A runtime of the same ranks over a separate channel, whose collectives another thread may call.

        Every rank must call this, on the thread that calls this runtime's collectives, and :meth:`stop` the returned
        runtime when no thread uses it any more.

        Raises:
            UnsupportedCapabilityError: This runtime has no second channel between its ranks.
        """
        raise UnsupportedCapabilityError(
            f"{type(self).__name__} has no second channel to other ranks, which async_save=True needs.\n"
            "Leave async_save out."
        )


class ProcessGroupRuntime(Runtime):
    """One process per rank, in torch's default process group: gloo on the CPU, else what is registered for the device.

    On an accelerator the group has gloo too, because ranks agree on small things in host memory, after each batch for
    instance: over the device's own backend, such as NCCL, the host would wait for the device.

    Args:
        backend: The process-group backend, as in :func:`torch.distributed.init_process_group`; ``None`` to choose it
            by device.

    Example:
        A runtime that was not started has a world size of 1:

        >>> runtime = ProcessGroupRuntime()
        >>> runtime.world_size, runtime.broadcast_object("hello")
        (1, 'hello')
        >>> runtime.all_gather(torch.ones(3)).shape
        torch.Size([1, 3])
    """

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend
        self._owns_group = False
        self._timeout: timedelta | None = None
        #: The process group of the collectives; the default one when ``None``.
        self._group: Any = None
        self._along: dict[tuple[Mesh, tuple[MeshAxis, ...]], Runtime] = {}

    @property
    def process_group(self) -> Any:
        return self._group

    def along(self, *axes: MeshAxis) -> Runtime:
        if self.mesh.size(axes) == self.world_size:
            return self
        key = self.mesh, tuple(axis for axis in axes if self.mesh.size((axis,)) > 1)
        if key not in self._along:
            self._along[key] = _Peers(self, axes, self._timeout)
        return self._along[key]

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
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.device = device
        self._timeout = timeout
        devices.select(device)
        devices.check_parts(device)
        if dist.is_initialized():
            _check_group(device.type)
            return
        if self.backend is not None:
            _check_backend(self.backend, device.type)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = str(address), str(port)
        with _collectives_recorded():
            dist.init_process_group(
                self.backend or devices.process_group_backend(device.type),
                rank=rank,
                world_size=world_size,
                timeout=timeout,
            )
        if devices.is_accelerator(device):
            set_default_backend(device.type)
        forget_meshes(device)
        self._along.clear()  # groups of a former world
        self._owns_group = True
        # gloo's threads abort the interpreter (exit status 134) if the group still exists when it ends
        atexit.register(self.stop)

    def described(self) -> str:
        if self._is_alone:
            return super().described()
        by_device = dict(entry.split(":") for entry in dist.get_backend_config().split(",") if ":" in entry)
        return f"{super().described()} ({by_device.get(self.device.type) or dist.get_backend()})"

    def stop(self) -> None:
        if self._owns_group and dist.is_initialized():
            if not hasattr(sys, "last_value"):  # it ends by no exception, after which collectives may have no peers
                self._finish_queued()
            _destroy_group(None)
        self._owns_group = False
        self._along.clear()

    def _finish_queued(self) -> None:
        """Wait, not for ever, until the device has done what this rank has queued: other ranks may wait for its part.

        A script that ends after its last step may be several steps ahead of the device.
        """
        if not devices.is_accelerator(self.device):
            return
        end = time.monotonic() + _SECONDS_FOR_QUEUE
        with suppress(RuntimeError):  # a collective has failed: another rank has ended before
            event = devices.record_event(self.device)
            while not event.query() and time.monotonic() < end:
                time.sleep(0.001)

    @property
    def _is_alone(self) -> bool:
        return not dist.is_initialized()

    @property
    def _can_use_host_memory(self) -> bool:
        """Whether the group can communicate tensors in host memory."""
        return "cpu:" in dist.get_backend_config(self._group)

    def side_channel(self) -> Runtime:
        return _SideChannel(self, self._timeout)

    def all_reduce(self, tensor: Tensor, op: ReduceOp | str = "mean", group: Any | None = None) -> Tensor:
        from torch.distributed.tensor import DTensor

        group = group or self._group
        if isinstance(tensor, DTensor):
            return tensor.full_tensor()  # this has reduced it over all ranks
        if self._is_alone:
            return tensor
        if op == "mean":
            # gloo has no average; integers keep their dtype by rounding towards zero, as Lightning's reduction does.
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group=group)
            count = dist.get_world_size(group)
            return tensor.div_(count) if tensor.is_floating_point() else tensor.copy_(tensor / count)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, str(op).upper()), group=group)
        return tensor

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp | str = "mean") -> Tensor:
        if self._is_alone:
            return tensor[0]
        row = torch.empty_like(tensor[0])
        reduce_op = dist.ReduceOp.SUM if op == "mean" else getattr(dist.ReduceOp, str(op).upper())
        _reduce_scatter(row.view(-1), tensor.reshape(-1), reduce_op, group=self._group)
        return row.div_(len(tensor)) if op == "mean" else row

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        from torch.distributed.tensor import DTensor

        group = group or self._group
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if self._is_alone:
            return tensor.unsqueeze(0)
        tensor = tensor.contiguous()
        if sync_grads:
            from torch.distributed.nn.functional import all_gather

            return torch.stack(all_gather(tensor, group=group or dist.group.WORLD))
        gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
        dist.all_gather(list(gathered.unbind(0)), tensor.detach(), group=group)
        return gathered

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        if self._is_alone:
            return tensor
        received = tensor.new_empty(sum(receive))
        dist.all_to_all_single(received, tensor, list(receive), list(send), group=self._group)
        return received

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        if not self._is_alone:
            dist.broadcast(tensor.detach(), group=self._group, group_src=src)
        return tensor

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        if self._is_alone:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, group=self._group, group_src=src)
        return box[0]

    def gather_objects(self, obj: Any) -> list[Any]:
        if self._is_alone:
            return [obj]
        box: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(box, obj, group=self._group)
        return box

    def gather_objects_to(self, obj: Any, dst: int = 0) -> list[Any] | None:
        if self._is_alone:
            return [obj]
        world_size = dist.get_world_size(self._group)
        is_here = dist.get_rank(self._group) == dst
        gathered: list[Any] = [obj] * world_size
        if not self._can_use_host_memory:  # NCCL would make a communicator for each pair of ranks
            dist.gather_object(obj, gathered if is_here else None, group=self._group, group_dst=dst)
            return gathered if is_here else None
        # dist.gather_object would first tell every rank the size of every rank's object
        if not is_here:
            dist.send_object_list([obj], group=self._group, group_dst=dst)
            return None
        for rank in range(world_size):
            if rank != dst:
                box = [None]
                dist.recv_object_list(box, group=self._group, group_src=rank)
                gathered[rank] = box[0]
        return gathered

    def total(self, numbers: Sequence[int]) -> list[int]:
        if self.world_size == 1 or self._is_alone:
            return list(numbers)
        sums = torch.tensor(
            list(numbers), dtype=torch.int64, device="cpu" if self._can_use_host_memory else self.device
        )
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=self._group)
        return [int(total) for total in sums.tolist()]

    def rendezvous(self, operation: str) -> None:
        store = default_store()
        if store is None or self.world_size == 1:
            return
        wait = self.patience if self._timeout is None else min(self._timeout, self.patience)
        counter = f"fsdp_core/meetings of rank {self.rank}"
        number = store.add(counter, 1)
        meeting = f"fsdp_core/meeting {number}"
        store.set(f"{meeting}/{self.rank}", operation)
        if store.add(meeting, 1) == self.world_size:
            store.set(f"{meeting}/all", "")
        try:
            store.wait([f"{meeting}/all"], wait)
        except DistError as late:
            absent = [rank for rank in range(self.world_size) if not store.check([f"{meeting}/{rank}"])]
            if not absent:
                return
            store.delete_key(f"{meeting}/{self.rank}")  # a caller that catches this may retry the same meeting
            store.add(meeting, -1)
            store.add(counter, -1)
            raise ShardingError(
                f"rank {self.rank} waited {wait.total_seconds():g} s in {operation} for what rank "
                f"{', '.join(map(str, absent))} did not do. All ranks must do it, equally often.\n"
                "Let every rank call it, and one alone use what comes out; or write `with fsdp_core.gathered(module):` "
                "on every rank, in which a single one may call the module. generate() of transformers takes "
                "synced_gpus=True, with which ranks call the module equally often."
            ) from late
        # every rank that is here has left the previous meeting, so its keys are no longer needed
        previous = f"fsdp_core/meeting {number - 1}"
        store.delete_key(f"{previous}/{self.rank}")
        if self.rank == 0:
            store.delete_key(previous)
            store.delete_key(f"{previous}/all")

    def barrier(self) -> None:
        if self._is_alone:
            return
        if devices.is_accelerator(self.device):
            dist.barrier(group=self._group, device_ids=[self.device.index or 0])
        else:
            dist.barrier(group=self._group)


class _Peers(ProcessGroupRuntime):
    """The peers of a rank along some axes of the mesh, over a process group of their own."""

    def __init__(self, main: ProcessGroupRuntime, axes: tuple[MeshAxis, ...], timeout: timedelta | None) -> None:
        super().__init__(main.backend)
        self.local_rank, self.device = main.local_rank, main.device
        self.rank = main.mesh.coordinate(main.rank, axes)
        self.world_size = main.mesh.size(axes)
        for ranks in main.mesh.groups(axes):  # all ranks create all groups
            group = dist.new_group(list(ranks), timeout=timeout)
            if main.rank in ranks:
                self._group = group

    def rendezvous(self, operation: str) -> None:
        self.barrier()

    def stop(self) -> None:
        """Nothing to do: the group ends with the main one."""


class _SideChannel(ProcessGroupRuntime):
    """The ranks of a runtime over a separate gloo group, for CPU tensors only."""

    def __init__(self, main: ProcessGroupRuntime, timeout: timedelta | None) -> None:
        super().__init__("gloo")
        self.rank = main.rank
        self.local_rank = main.local_rank
        self.world_size = main.world_size
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    @property
    def _is_alone(self) -> bool:
        return self._group is None

    def stop(self) -> None:
        if self._group is not None and dist.is_initialized():
            with suppress(ValueError):  # it was destroyed already, with all other groups
                _destroy_group(self._group)
        self._group = None
