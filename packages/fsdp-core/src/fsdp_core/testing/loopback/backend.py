"""Sharding by hand: whole parameters during forward and backward passes, a range of each otherwise. No Lightning."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from fsdp_core import Backend
from fsdp_core.sharding import ShardingPlan, place
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

    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> LoopbackSharded:
        place(list(module.modules()), self.runtime)
        return self.sharded_class(module, self.shard_class, self.runtime)
