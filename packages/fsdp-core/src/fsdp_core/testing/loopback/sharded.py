"""A root whose parameters are ranges of elements, gathered while a forward and backward pass need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core import Runtime, Sharded
from fsdp_core.sharding import (
    ComparedShards,
    EndOfBackward,
    GatheredShard,
    ReplicatedParameters,
    StepGradients,
    StepWrites,
    sharded_of,
)
from fsdp_core.state import (
    HeldGradients,
    Layout,
    Part,
    SavedTensor,
    gathered_modules,
    named_parameters,
    refuse_half_gradients,
    running_forwards,
    stand_in,
)
from fsdp_core.testing.loopback.flat_shards import FlatShard, places_of

__all__ = ["LoopbackSharded"]


class LoopbackSharded(Sharded):
    """Cuts the parameters of a module.

    A forward pass of the root gathers all of them. The end of the backward pass averages their gradients, leaves each
    rank the run that its optimizer needs, and puts the runs back in the places of the whole parameters.

    Args:
        module: The module, with the same values on every rank.
        shard_class: How a parameter is split.
        runtime: The ranks.

    Attributes:
        shards: Of its parameters, in the module's order.
        replicated: Its 0-dim parameters, which stay whole.
        end: Tells when to reduce gradients.
        step: What gathered parameters show for their gradients inside a step by hand.
    """

    def __init__(self, module: nn.Module, shard_class: type[FlatShard], runtime: Runtime) -> None:
        super().__init__(module)
        found = list(places_of(module))
        whole = [parameter for parameter, _, _ in found if not parameter.ndim]
        self.shards = [shard_class(names, p, places, runtime) for p, names, places in found if p.ndim]
        self.replicated = ReplicatedParameters(whole, module, runtime)
        self.end = EndOfBackward([], module, lambda: self._after_backward())
        self.step = StepGradients(module)
        self._times_written = 0
        self._watch: StepWrites | None = None
        module.register_forward_pre_hook(_gather)

    # -- what it is made of ----------------------------------------------------------------------------------------

    @contextmanager
    def as_written(self) -> Iterator[None]:
        self.reshard()
        stand_ins = [stand_in(shard.shape, shard.held) for shard in self.shards]
        self.remember((shard.names[0], parameter) for shard, parameter in zip(self.shards, stand_ins, strict=True))
        for shard, parameter in zip(self.shards, stand_ins, strict=True):
            shard.put(parameter)
        try:
            yield
        finally:
            for shard, parameter in zip(self.shards, stand_ins, strict=True):
                shard.held.requires_grad_(parameter.requires_grad)
                shard.put(shard.held)

    def layout(self) -> Layout:
        self.reshard()
        parts = {shard.held: shard.part for shard in self.shards}
        return {p: (parts.get(p) or Part(name=name, shape=tuple(p.shape)),) for name, p in named_parameters(self.root)}

    def holds_part(self, parameter: Tensor) -> bool:
        return parameter.ndim > 0

    # -- steps -----------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Put whole parameters in the places of the shards, those aside that are whole already."""
        for shard in self.shards:
            if shard.gathered is None:
                shard.gathered = nn.Parameter(shard.whole())
                shard.gathered.register_post_accumulate_grad_hook(shard.take_gradient)
                self.end.follow(shard.gathered)
                shard.was_trained = not shard.held.requires_grad
                shard.put(shard.gathered)
            if shard.was_trained != shard.held.requires_grad:  # it was frozen, or unfrozen, since
                shard.was_trained = shard.held.requires_grad
                shard.gathered.requires_grad_(shard.was_trained)
        self._times_written = self._times_shards_written()

    def _after_backward(self) -> None:
        self.reduce()
        self.reshard()
        if self.root in running_forwards:  # which goes on
            self.resume_forward()
            self.inner_pass_ended()

    def reduce(self) -> None:
        """Add the mean of what the ranks have computed to the gradients of the shards. All ranks must call it."""
        has = torch.tensor([float(shard.own is not None) for shard in self.shards])
        some_rank_has = self.runtime.all_reduce(has, "max")
        for shard, used in zip(self.shards, some_rank_has.tolist(), strict=True):
            if used:
                own = shard.held.new_zeros(shard.shape) if shard.own is None else shard.own
                mine = shard.reduced(own.detach())
                shard.held.grad = mine if shard.held.grad is None else shard.held.grad + mine
                shard.own = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.end.enabled = self.replicated.sync = False
        try:
            yield
        finally:
            self.end.enabled = self.replicated.sync = True

    def reshard(self) -> None:
        for shard in self.shards:
            if shard.gathered is not None:
                if shard.gathered.requires_grad != shard.was_trained:  # modules have held that one
                    shard.held.requires_grad_(shard.gathered.requires_grad)
                shard.gathered = None
                shard.put(shard.held)

    def suspend_forward(self, loss: Tensor | None = None) -> None:
        self.step.on = False

    def follow_written_shards(self) -> None:
        if self._times_shards_written() != self._times_written:
            self.resume_forward()
            if self._watch is not None:
                self._watch.renew()

    def gather_again(self) -> None:
        self.gather()

    def _times_shards_written(self) -> int:
        return sum(shard.held._version for shard in self.shards)

    def resume_forward(self) -> None:
        self.reshard()
        self.gather()
        for shard in self.shards:
            if shard.gathered is not None:
                self.step.follow(shard.gathered, shard.held, is_part=True)
        self.step.on = True

    def watch_writes(self) -> StepWrites | None:
        self._watch = ComparedShards(
            {
                self.root: [
                    GatheredShard(name=one.names[0], shard=partial(getattr, one, "held"), gathered=one.gathered_run)
                    for one in self.shards
                ]
            }
        )
        return self._watch

    def follow_requires_grad(self) -> None:
        for shard in self.shards:
            if shard.gathered is not None:
                shard.was_trained = shard.held.requires_grad
                shard.gathered.requires_grad_(shard.was_trained)

    def reset(self) -> None:
        self.reshard()
        for shard in self.shards:
            shard.own = None

    def abandon_forward(self) -> None:
        self.reshard()

    @property
    def is_interrupted(self) -> bool:
        return self.end.interrupted or self.replicated.interrupted

    def mend_interrupted(self) -> None:
        if self.is_interrupted:
            refuse_half_gradients(self.root, self.layout())
            self.reset()
            self.end.forget()
            self.replicated.forget()

    # -- state -----------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        self.reshard()
        shards = {name: shard for shard in self.shards for name in shard.names}
        state = super().model_state()
        return {name: shards[name].part.of(shards[name].held) if name in shards else state[name] for name in state}

    def accumulated_gradients(self) -> HeldGradients:
        held = super().accumulated_gradients()
        held.own.update({s.names[0]: s.own for s in self.shards if s.own is not None})
        return held

    def restore_gradients(
        self, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        shards = {shard.names[0]: shard for shard in self.shards}
        super().restore_gradients({n: read for n, read in own.items() if n not in shards}, reduced)
        for name, shard in shards.items():
            shard.own = own[name]().to(shard.held) if name in own else None


def _gather(root: nn.Module, args: Any) -> None:
    sharded = sharded_of(root)
    if isinstance(sharded, LoopbackSharded) and root not in gathered_modules:  # a copy of a root has none
        sharded.gather()
