"""Sharding by hand: whole parameters for a forward and backward pass, a run of each at rest. Knows no Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsdp_core import Backend
from fsdp_core.sharding import (
    ComparedShards,
    EndOfBackward,
    GatheredShard,
    ReplicatedParameters,
    StepGradients,
    StepWrites,
    place,
)
from fsdp_core.state import HeldGradients, Layout, Part, SavedTensor, named_parameters, refuse_half_gradients, stand_in
from fsdp_core.testing.loopback.flat_shards import FlatShard, places_of

__all__ = ["LoopbackBackend", "shards_of"]


@dataclass(kw_only=True)
class Sharded:
    """What is known of a sharded root.

    Attributes:
        shards: Of its parameters, in the module's order.
        replicated: Its 0-dim parameters, which stay whole.
        end: Tells when to reduce gradients.
        step: What gathered parameters show for their gradients inside a step by hand.
    """

    shards: list[FlatShard]
    replicated: ReplicatedParameters
    end: EndOfBackward
    step: StepGradients


class LoopbackBackend(Backend):
    """Keeps a run of each parameter's elements on each rank.

    A forward pass of the root gathers all parameters. The end of the backward pass averages their gradients, leaves
    each rank the run that its optimizer needs, and puts the runs back in the places of the whole parameters.
    """

    accelerators = ("cpu",)
    #: How a parameter is cut; tests give others.
    shard_class: ClassVar[type[FlatShard]] = FlatShard

    # -- building and sharding -------------------------------------------------------------------------------------

    def shard(self, module: nn.Module) -> nn.Module:
        if self.is_sharded(module):
            return module
        self.check_shardable(module)
        self.remember(module)
        place(list(module.modules()), self.runtime)
        found = list(places_of(module))
        whole = [parameter for parameter, _, _ in found if not parameter.ndim]
        shards = [self.shard_class(names, p, places, self.runtime) for p, names, places in found if p.ndim]
        replicated = ReplicatedParameters(whole, module, self.runtime)
        end = EndOfBackward([], module, lambda: self._after_backward(module))
        # the module keeps it, for a module outlives the strategy that sharded it
        step = StepGradients(module)
        module.__dict__[_SHARDED] = Sharded(shards=shards, replicated=replicated, end=end, step=step)
        module.register_forward_pre_hook(lambda root, _: self.gather(root))
        self.mark_sharded(module)
        return module

    @contextmanager
    def as_written(self, module: nn.Module) -> Iterator[None]:
        self.reshard(module)
        shards = shards_of(module)
        stand_ins: list[nn.Parameter] = []
        for shard in shards:
            stand_ins.append(stand_in(shard.shape, shard.held))
            self._note_written(module, shard.names[0], stand_ins[-1])
            shard.put(stand_ins[-1])
        try:
            yield
        finally:
            for shard, parameter in zip(shards, stand_ins, strict=True):
                shard.held.requires_grad_(parameter.requires_grad)
                shard.put(shard.held)

    @contextmanager
    def unmanaged(self, module: nn.Module) -> Iterator[None]:
        with super().unmanaged(module):
            sharded = module.__dict__.pop(_SHARDED)  # which a copy of it would copy too
            try:
                yield
            finally:
                module.__dict__[_SHARDED] = sharded

    def layout(self, module: nn.Module) -> Layout:
        self.reshard(module)
        parts = {shard.held: shard.part for shard in shards_of(module)}
        return {p: (parts.get(p) or Part(name=name, shape=tuple(p.shape)),) for name, p in named_parameters(module)}

    # -- steps -----------------------------------------------------------------------------------------------------

    def gather(self, root: nn.Module) -> None:
        """Put whole parameters in the places of the shards, those aside that are whole already."""
        if _SHARDED not in root.__dict__:
            return  # of a copy, or within unmanaged()
        for shard in shards_of(root):
            if shard.gathered is None:
                shard.gathered = nn.Parameter(shard.whole())
                shard.gathered.register_post_accumulate_grad_hook(shard.take_gradient)
                _sharded(root).end.follow(shard.gathered)
                shard.gathered.requires_grad_(shard.held.requires_grad)
                shard.put(shard.gathered)

    def _after_backward(self, root: nn.Module) -> None:
        self.reduce(root)
        self.reshard(root)

    def reduce(self, root: nn.Module) -> None:
        """Add the mean of what the ranks have computed to the gradients of the shards. All ranks must call it."""
        shards = shards_of(root)
        some_rank_has = self.runtime.all_reduce(torch.tensor([float(shard.own is not None) for shard in shards]), "max")
        for shard, has in zip(shards, some_rank_has.tolist(), strict=True):
            if has:
                own = shard.held.new_zeros(shard.shape) if shard.own is None else shard.own
                mine = shard.reduced(own.detach())
                shard.held.grad = mine if shard.held.grad is None else shard.held.grad + mine
                shard.own = None

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        sharded = _sharded(module)
        sharded.end.enabled = sharded.replicated.sync = False
        try:
            yield
        finally:
            sharded.end.enabled = sharded.replicated.sync = True

    def reshard(self, module: nn.Module) -> None:
        for shard in shards_of(module):
            if shard.gathered is not None:
                shard.gathered = None
                shard.put(shard.held)

    def suspend_forward(self, module: nn.Module, loss: Tensor | None = None) -> None:
        _sharded(module).step.on = False

    def resume_forward(self, module: nn.Module) -> None:
        self.reshard(module)
        self.gather(module)
        step = _sharded(module).step
        for shard in shards_of(module):
            if shard.gathered is not None:
                step.follow(shard.gathered, shard.held, is_part=True)
        step.on = True

    def watch_writes(self, module: nn.Module) -> StepWrites | None:
        return ComparedShards(
            GatheredShard(name=one.names[0], shard=partial(getattr, one, "held"), gathered=one.gathered_run)
            for one in shards_of(module)
        )

    def follow_requires_grad(self, module: nn.Module) -> None:
        for shard in shards_of(module):
            if shard.gathered is not None:
                shard.gathered.requires_grad_(shard.held.requires_grad)

    def reset(self, module: nn.Module) -> None:
        self.reshard(module)
        for shard in shards_of(module):
            shard.own = None

    def abandon_forward(self, module: nn.Module) -> None:
        self.reshard(module)

    def mend_interrupted(self, module: nn.Module) -> None:
        if _sharded(module).end.interrupted:
            refuse_half_gradients(module, self.layout(module))
            self.reset(module)

    def holds_part(self, parameter: Tensor) -> bool:
        return parameter.ndim > 0

    # -- state -----------------------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        self.reshard(module)
        shards = {name: shard for shard in shards_of(module) for name in shard.names}
        state = super().model_state(module)
        return {name: shards[name].part.of(shards[name].held) if name in shards else state[name] for name in state}

    def accumulated_gradients(self, module: nn.Module) -> HeldGradients:
        held = super().accumulated_gradients(module)
        held.own.update({s.names[0]: s.own for s in shards_of(module) if s.own is not None})
        return held

    def restore_gradients(
        self, module: nn.Module, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        shards = {shard.names[0]: shard for shard in shards_of(module)}
        super().restore_gradients(module, {n: read for n, read in own.items() if n not in shards}, reduced)
        for name, shard in shards.items():
            shard.own = own[name]().to(shard.held) if name in own else None


_SHARDED = "_loopback"


def shards_of(root: nn.Module) -> list[FlatShard]:
    """What this rank keeps of the parameters of a sharded root, in the order of the module."""
    return _sharded(root).shards


def _sharded(root: nn.Module) -> Sharded:
    sharded: Sharded = root.__dict__[_SHARDED]
    return sharded
