"""Sharding by hand: whole parameters during forward and backward passes, a range of each otherwise. No Lightning."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import ClassVar

from torch import nn

from fsdp_core import Backend
from fsdp_core.sharding import ParameterPlan, ShardingPlan, place
from fsdp_core.testing.loopback.flat_shards import FlatShard
from fsdp_core.testing.loopback.sharded import LoopbackSharded

__all__ = ["LoopbackBackend"]


class LoopbackBackend(Backend):
    """Keeps a range of each parameter's elements on each rank."""

    accelerators = ("cpu",)
    owner_compute = True
    #: How a parameter is split, and what is done with the shards; tests give others.
    shard_class: ClassVar[type[FlatShard]] = FlatShard
    sharded_class: ClassVar[type[LoopbackSharded]] = LoopbackSharded

    def replicated(self, module: nn.Module) -> list[nn.Parameter]:
        return [parameter for parameter in module.parameters() if not parameter.ndim]

    def local_numels(self, parameters: Sequence[ParameterPlan]) -> list[int]:
        lengths = [ceil(parameter.numel / self.runtime.world_size) for parameter in parameters]
        lefts = [p.numel - self.runtime.rank * length for p, length in zip(parameters, lengths, strict=True)]
        return [max(0, min(length, left)) for length, left in zip(lengths, lefts, strict=True)]

    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> LoopbackSharded:
        place(list(module.modules()), self.runtime)
        return self.sharded_class(module, self.shard_class, self.runtime)
