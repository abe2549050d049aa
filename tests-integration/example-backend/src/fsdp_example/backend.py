"""ZeRO-1 by hand: whole parameters to compute with, 1/n of the optimizer on each of n ranks. Knows no Lightning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import nn

from fsdp_core import Backend, OptimizerMismatchError, Sharded
from fsdp_core.sharding import ShardingPlan, checkpoint_activations, place
from fsdp_example.options import ZeRO1Options
from fsdp_example.sharded import ZeRO1Sharded

__all__ = ["ZeRO1Backend"]


class ZeRO1Backend(Backend):
    """Lets each rank's optimizer hold a run of every parameter's elements.

    The end of a backward pass reduce-scatters the gradients; a step of the optimizer changes this rank's runs and
    ends with an all-gather.

    Its options are those of :class:`fsdp_example.options.ZeRO1Options`.
    """

    accelerators = ("cpu",)

    # of all backends, for an optimizer may outlive the strategy that set it up
    _followed: ClassVar[WeakSet[torch.optim.Optimizer]] = WeakSet()

    options: ZeRO1Options

    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> ZeRO1Sharded:
        checkpoint_activations(module, plan)
        place(list(module.modules()), self.runtime)
        sharded = ZeRO1Sharded(module, self.runtime)
        sharded.remember(sharded.whole.items())  # what was on the meta device is other parameters now
        return sharded

    def rebind_optimizers(self, optimizers: Iterable[torch.optim.Optimizer], roots: Sequence[Sharded]) -> None:
        optimizers = list(optimizers)
        super().rebind_optimizers(optimizers, roots)
        for optimizer in optimizers:
            if optimizer not in self._followed:
                self._followed.add(optimizer)
                own = [sharded for sharded in roots if isinstance(sharded, ZeRO1Sharded)]
                optimizer.register_step_pre_hook(partial(_refuse_whole, own))
                optimizer.register_step_post_hook(partial(_gather, own))


# What an optimizer does before and after each step.


def _refuse_whole(roots: list[ZeRO1Sharded], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for sharded in roots:
        sharded.reshard()  # a step must change what the module computes with
    shards = {shard for sharded in roots for shard in sharded.layout()}
    if not all(p in shards for group in optimizer.param_groups for p in group["params"]):
        raise OptimizerMismatchError(
            f"a parameter was added to {type(optimizer).__name__} after it was set up, and it is whole: every rank "
            "would step it by itself.\nGive the optimizer all parameters at first, and freeze those that wait."
        )


def _gather(roots: list[ZeRO1Sharded], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for sharded in roots:
        sharded.gather()
