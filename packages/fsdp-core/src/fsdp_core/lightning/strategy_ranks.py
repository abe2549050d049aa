"""Where the ranks of a strategy run, how they are started and numbered, and how they communicate."""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, cast
from weakref import ref

import torch
from lightning.fabric.plugins import ClusterEnvironment
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_core.errors import ShardingError
from fsdp_core.lightning.accelerators import announce_accelerator
from fsdp_core.lightning.constructing import ConstructedStrategy
from fsdp_core.lightning.launchers.launch_checks import check_launched, facts_of_visibility
from fsdp_core.lightning.launchers.notebooks import check_interactive, is_interactive
from fsdp_core.lightning.launchers.ray_train import RayWorker, ray_worker
from fsdp_core.lightning.private import reset_seed
from fsdp_core.lightning.setup_checks import check_devices, hang_duration, reduce_op_name, set_rank_zero
from fsdp_core.mesh import DATA_AXES, GRADIENT_AXES, Mesh
from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from fsdp_core.sharding.agreement.same_packages import check_same_packages, versions_of
from fsdp_core.sharding.backend import Backend
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.watch import watch

__all__ = ["StrategyRanks"]

#: How long collectives wait by default: torch's own default, which Lightning also sets for NCCL.
_TORCHS_TIMEOUT = timedelta(minutes=30)


class StrategyRanks(ConstructedStrategy):
    """A base of every strategy's class: starts, numbers and connects ranks. Comes before Lightning's class in the MRO.

    Attributes:
        backend: How modules are sharded.
        runtime: How the ranks communicate.
        timeout: How long a collective may wait for the other ranks.
        hang_timeout: How long ranks may wait for each other in one call before all end; ``None`` to watch nothing.
        log: Lightning's logger for rank 0, whose level users set.
    """

    launcher_class: ClassVar[Any]
    _fork_launcher_class: ClassVar[Any]  # in notebooks
    log: ClassVar[logging.Logger]

    backend: Backend
    runtime: Runtime
    timeout: timedelta | None
    hang_timeout: timedelta | None = None
    _worker: RayWorker | None = None  # under Ray Train
    _has_announced_accelerator: bool = False

    # set by Lightning's ParallelStrategy
    cluster_environment: ClusterEnvironment | None
    parallel_devices: list[torch.device] | None
    num_nodes: int
    local_rank: int
    node_rank: int
    global_rank: int
    world_size: int

    def _take_rank_options(self) -> None:
        self.timeout, self.hang_timeout = self.options.timeout, hang_duration(self.options.hang_timeout)

    def new_cluster_environment(self) -> ClusterEnvironment | None:
        """Where the ranks run; ``None``: Lightning finds out."""
        return cast(ClusterEnvironment | None, self.options.cluster_environment)

    def new_runtime(self) -> Runtime:
        """How the ranks communicate: a process group, unless a strategy says otherwise."""
        return ProcessGroupRuntime(getattr(self.options, "process_group_backend", None))

    @property
    def shard_precision(self) -> ShardPrecision:
        """The dtypes of the shards."""
        raise NotImplementedError

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        if self._worker is not None:
            return self._worker.device
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """The number of ranks on this host."""
        return len(self.parallel_devices or ()) if self._worker is None else self._worker.local_world_size

    def _rank_and_world_size(self) -> tuple[int, int]:
        """This rank and the number of ranks, which are known before they have joined."""
        if self._worker is not None:
            return self._worker.rank, self._worker.world_size
        return self.node_rank * self.num_processes + self.local_rank, self.num_nodes * self.num_processes

    @property
    def mesh(self) -> Mesh:
        """How the ranks are arranged."""
        return self.runtime.mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The sampler's arguments: every data-parallel rank gets its own part of the data.

        Before the runtime has started, they follow from this rank's number, as under Lightning's own strategies.
        """
        rank, world_size = self._rank_and_world_size()
        if world_size > 1 and self.runtime.world_size == 1:  # the runtime has not started
            mesh = self.backend.mesh(world_size)
            return {"num_replicas": mesh.size(DATA_AXES), "rank": mesh.coordinate(rank, DATA_AXES)}
        return {"num_replicas": self.runtime.data_parallel_world_size, "rank": self.runtime.data_parallel_rank}

    def _number_ranks(self) -> None:
        """Set the rank in the cluster environment and in Lightning's rank-zero helpers."""
        environment = self.cluster_environment
        self._worker = ray_worker(environment, StrategyRanks)  # it tells Ray of this class
        if environment is not None:
            rank, world_size = self._rank_and_world_size()
            environment.set_global_rank(rank)
            environment.set_world_size(world_size)
        set_rank_zero(self.global_rank)

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        forks = is_interactive() and self.num_processes > 1 and not environment.creates_processes_externally
        # forked ranks check the precision themselves: asking a device here would initialise it before the fork
        precision = None if forks else self.shard_precision
        check_devices(self.strategy_name, self.backend, self.parallel_devices, precision)
        if self._worker is not None:
            self._worker.check_devices(self.parallel_devices or ())
        else:
            check_launched(self.cluster_environment, self.num_processes, self.num_nodes)
        _, world_size = self._rank_and_world_size()
        self.backend.mesh(world_size)  # fail before any process is started
        if environment.creates_processes_externally:
            return
        if is_interactive():
            check_interactive(self.strategy_name, self.num_nodes)
            self._launcher = self._fork_launcher_class(self) if forks else None  # one rank runs in this process
        else:
            self._launcher = self.launcher_class(environment, self.num_processes, self.num_nodes)

    def _join_world(self) -> None:
        """Start the runtime with the other ranks, and bind the backend to it."""
        reset_seed()  # to that of seed_everything(), in a process that was just started
        self._number_ranks()
        environment = self.cluster_environment
        assert environment is not None
        check_devices(self.strategy_name, self.backend, [self.root_device], self.shard_precision)
        mesh = self.backend.mesh(self.world_size)
        self.runtime.start(
            rank=self.global_rank,
            local_rank=self.local_rank,
            world_size=self.world_size,
            device=self.root_device,
            address=environment.main_address,
            port=environment.main_port,
            timeout=self._collective_timeout(),
        )
        if self.global_rank == 0 and not self._has_announced_accelerator:
            announce_accelerator(self.log, self.root_device, self.num_processes)
            self._has_announced_accelerator = True
        if self.num_nodes > 1:
            check_same_packages(self.runtime, versions_of(type(self), type(self.backend), type(self.runtime)))
        if self._worker is not None:
            self.num_nodes = self._worker.count_nodes(self.runtime, self.num_nodes)
        self.runtime.mesh = mesh
        self.backend.bind(self.runtime, self.shard_precision)
        if self.hang_timeout is not None and self.world_size > 1 and isinstance(self.runtime, ProcessGroupRuntime):
            watch(self.runtime, self.hang_timeout, environment.main_address, partial(_progress_of, ref(self)))

    def _describe_devices(self) -> dict[str, str]:
        """By topic, what must be equal on ranks of one host, or two could take one device. Ray gives each its own."""
        return facts_of_visibility(self.root_device.type) if self.num_nodes == 1 and self._worker is None else {}

    def _check_started(self) -> None:
        if not hasattr(self.backend, "runtime"):
            raise ShardingError(
                f"{self.strategy_name}: its ranks were not started in this process.\n"
                "Call fabric.launch() of the same Fabric before its setup(); where launch(function) starts the ranks, "
                "do in the function what needs them."
            )

    def _collective_timeout(self) -> timedelta | None:
        """How long a collective waits: longer than it takes to name the rank that hangs, which says more."""
        if self.timeout is not None or self.hang_timeout is None:
            return self.timeout
        if not isinstance(self.runtime, ProcessGroupRuntime):  # another runtime's collectives name missing ranks
            return self.hang_timeout
        return max(_TORCHS_TIMEOUT, self.hang_timeout) + timedelta(minutes=1)

    def progress(self) -> str:
        """How far this rank is, in words, for messages about ranks that are lost or hang."""
        raise NotImplementedError

    def _reduce_values(self, tensor: Any, group: Any | None, reduce_op: Any) -> Any:
        """Reduce a tensor over the ranks with different batches or parts; other values are returned unchanged."""
        if not isinstance(tensor, Tensor):
            return tensor
        if isinstance(tensor, DTensor):  # such as a loss inside loss_parallel(): its ranks have parts, or copies, of it
            tensor = tensor.full_tensor()
        ranks = self.runtime.along(*GRADIENT_AXES) if group is None else self.runtime
        return ranks.all_reduce(tensor, reduce_op_name(reduce_op), group)

    def all_gather(self, tensor: Tensor | float, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of the ranks with different batches, or parts of them, along a new first dimension.

        A number becomes a tensor, as in the module's and in Fabric's ``all_gather``.
        """
        if not isinstance(tensor, Tensor):
            tensor = torch.tensor(tensor, device=self.root_device)
        ranks = self.runtime.along(*GRADIENT_AXES) if group is None else self.runtime
        return ranks.all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any of them, decide for something. All ranks must call it."""
        vote = torch.tensor(float(decision), device=self.root_device)
        return bool(self.runtime.all_reduce(vote, "min" if all else "max"))

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self.runtime.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast the object of rank ``src`` to all ranks."""
        return self.runtime.broadcast_object(obj, src)


def _progress_of(strategy_ref: ref[StrategyRanks]) -> str:
    strategy = strategy_ref()
    return "" if strategy is None else strategy.progress()
