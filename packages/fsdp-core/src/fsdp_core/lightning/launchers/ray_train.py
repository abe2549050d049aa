"""Workers of Ray Train as ranks: their number, their devices, and what Ray asks of a strategy. Checked on Ray 2.60.0.

Ray starts a process per rank, numbers them, gives each a device, and creates torch's process group. Lightning derives
all that from ``devices`` and ``num_nodes``: on CPU ``devices="auto"`` is one device for any number of workers; hosts
may have different numbers of workers; and the local rank need not be the index of the worker's device. So what Ray says
is taken instead.

Ray is not imported here: in a worker it is imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.runtime import Runtime

__all__ = ["RayWorker", "check_reports", "ray_worker"]

#: The module of Ray that knows Lightning.
_FOR_LIGHTNING = "ray.train.lightning"


@dataclass(frozen=True, kw_only=True)
class RayWorker:
    """This process as one of the workers of a Ray Train run.

    Attributes:
        rank: Its index among all workers, from 0.
        world_size: The number of workers.
        local_rank: Its index among the workers of its node.
        local_world_size: The number of workers of its node.
        node_rank: The index of its node.
        device: The device that Ray gave it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: torch.device

    @classmethod
    def from_context(cls, context: Any) -> Self:
        """This process, by Ray's context for it."""
        return cls(
            rank=context.get_world_rank(),
            world_size=context.get_world_size(),
            local_rank=context.get_local_rank(),
            local_world_size=context.get_local_world_size(),
            node_rank=context.get_node_rank(),
            device=sys.modules["ray.train.torch"].get_device(),
        )

    def check_devices(self, devices: Sequence[torch.device]) -> None:
        """Refuse devices that Ray did not give.

        Args:
            devices: Those of this node by the arguments of the Trainer or Fabric. For CPUs, Lightning turns ``"auto"``
                into one.

        Raises:
            UnsupportedCapabilityError: This worker's device is not among them, or there are others.
        """
        number = len(devices)
        assignment = f"Ray Train has given worker {self.rank} of {self.world_size} the device {str(self.device)!r}"
        if self.device not in devices:
            raise UnsupportedCapabilityError(
                f"{assignment}, which is not among those that accelerator= and devices= name on its node: "
                f"{', '.join(map(str, devices))}.\nWrite accelerator={self.device.type!r} and devices='auto'; or let "
                "Ray give others: GPUs with ScalingConfig(use_gpu=True), and NPUs, HPUs and TPUs, which are all that "
                "Ray knows besides, such as with ScalingConfig(resources_per_worker={'NPU': 1})."
            )
        is_auto_of_cpus = self.device.type == "cpu" and number == 1
        is_too_few = number < self.local_world_size and not is_auto_of_cpus
        # of accelerators, Lightning's "auto" counts all of the node, which may be more than Ray gives
        is_too_many = self.device.type == "cpu" and number > self.local_world_size
        if is_too_few or is_too_many:
            raise UnsupportedCapabilityError(
                f"devices={number} contradicts Ray Train, which has started {self.local_world_size} of its "
                f"{self.world_size} workers on the node of worker {self.rank}.\n"
                "Write devices='auto', and choose the number of ranks by ScalingConfig(num_workers=...)."
            )

    def count_nodes(self, runtime: Runtime, num_nodes: int) -> int:
        """The number of nodes. All ranks must call it.

        Args:
            runtime: The ranks.
            num_nodes: ``num_nodes`` of the Trainer or Fabric, 1 by default.

        Raises:
            UnsupportedCapabilityError: Another number than 1 was asked for, and Ray has another.
        """
        last_node_rank = runtime.all_reduce(torch.tensor([self.node_rank], device=self.device), "max")
        number = int(last_node_rank) + 1
        if num_nodes not in (1, number):
            raise UnsupportedCapabilityError(
                f"num_nodes={num_nodes} contradicts Ray Train, whose {self.world_size} workers run on {number} "
                f"node{'s' if number > 1 else ''}.\nLeave num_nodes out: Ray places the workers."
            )
        return number


def ray_worker(environment: Any, strategies: type) -> RayWorker | None:
    """This process as a worker of Ray Train; ``None`` elsewhere.

    It also makes ``prepare_trainer`` accept our strategies, by registering them as virtual subclasses of the one of
    Ray's three classes that stands for sharding. They inherit none of its code.

    Args:
        environment: The cluster environment.
        strategies: The base class of our strategies.

    Raises:
        UnsupportedCapabilityError: This is one of several workers, and the cluster environment is not Ray's.
    """
    for_lightning = sys.modules.get(_FOR_LIGHTNING)
    # without the attribute, the module is being imported by another thread
    if for_lightning is not None and hasattr(for_lightning, "RayLightningEnvironment"):
        for_lightning.RayFSDPStrategy.register(strategies)
        if isinstance(environment, for_lightning.RayLightningEnvironment):
            return RayWorker.from_context(sys.modules["ray.train"].get_context())
    workers = _count_workers()
    if workers > 1:
        raise UnsupportedCapabilityError(
            f"Ray Train has started this process as one of {workers} workers, and {type(environment).__name__} does "
            "not know the others.\nWrite plugins=[RayLightningEnvironment()], after "
            "`from ray.train.lightning import RayLightningEnvironment`."
        )
    return None


def check_reports(callbacks: Iterable[object], strategy: str) -> None:
    """Refuse Ray's callback beside saves in the background: it uploads what is there once the call returns.

    Args:
        callbacks: The Trainer's.
        strategy: The strategy's name.

    Raises:
        UnsupportedCapabilityError: Ray's callback is among them.
    """
    for_lightning = sys.modules.get(_FOR_LIGHTNING)
    reporting = getattr(for_lightning, "RayTrainReportCallback", ())
    if any(isinstance(callback, reporting) for callback in callbacks):
        raise UnsupportedCapabilityError(
            f"RayTrainReportCallback can't be used with async_save=True of {strategy!r}: it uploads a checkpoint as "
            "soon as the call that saves it returns, and removes it then.\nLeave async_save out; Ray can upload in the "
            "background: RayTrainReportCallback(checkpoint_upload_mode=CheckpointUploadMode.ASYNC)."
        )


def _count_workers() -> int:
    """The number of Ray's workers, if this process is one, whether or not its cluster environment is Ray's; else 1."""
    train = sys.modules.get("ray.train")
    if train is None or not hasattr(train, "get_context"):
        return 1
    try:
        return int(train.get_context().get_world_size() or 1)
    except (RuntimeError, DeprecationWarning):  # the program that starts workers, or a trial of Ray Tune
        return 1
