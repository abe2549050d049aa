"""The terms on which a module was sharded, where a backend leaves out those of all backends."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fsdp_core import Backend, Sharded
from fsdp_core.errors import ShardingError
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.sharding.plan import ShardingPlan
from fsdp_core.sharding.precision_strings import ShardPrecision


class Whole(Sharded):
    def no_sync(self) -> Any: ...


class WithoutSuper(Backend):
    def __init__(self, level: int) -> None:
        self.level = level
        self.bind(ProcessGroupRuntime(), ShardPrecision())

    def sharding_config(self) -> dict[str, Any]:
        return {"level": self.level}

    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> Sharded:
        return Whole(module)


class Another(WithoutSuper):
    pass


def test_terms_need_not_call_super() -> None:
    sharded = WithoutSuper(1).shard(nn.Linear(3, 2))
    assert WithoutSuper(1).shard(sharded.root) is sharded
    with pytest.raises(ShardingError, match="with other settings: level 1, now 2"):
        WithoutSuper(2).shard(sharded.root)
    with pytest.raises(ShardingError, match="backend 'WithoutSuper', now 'Another'"):
        Another(1).shard(sharded.root)
