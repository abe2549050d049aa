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
from fsdp_core.testing.loopback.flat_shards import FlatShard, parameters_with_owners

__all__ = ["LoopbackSharded"]


class LoopbackSharded(Sharded):
    """Cuts the parameters of a module.

    A forward pass of the root gathers all of them. At the end of the backward pass, their gradients are averaged, each
    rank keeps the range that its optimizer needs, and the modules get their shards back.

    Args:
        module: The module, with the same values on every rank.
        shard_class: How a parameter is split.
        runtime: The ranks.

    Attributes:
        shards: The shards of its parameters, in the module's order.
        replicated: Its 0-dim parameters, which are not sharded.
        end: Calls the reduction at the end of a backward pass.
        step: The gradients that gathered parameters show within a manual step.
    """

    def __init__(self, module: nn.Module, shard_class: type[FlatShard], runtime: Runtime) -> None:
        super().__init__(module)
        parameters = list(parameters_with_owners(module))
        replicated = [parameter for parameter, _, _ in parameters if not parameter.ndim]
        self.shards = [shard_class(names, p, owners, runtime) for p, names, owners in parameters if p.ndim]
        self.replicated = ReplicatedParameters(replicated, module, runtime)
        self.end = EndOfBackward([], module, lambda: self._after_backward())
        self.step = StepGradients(module)
        self._writes_when_gathered = 0
        self._watch: StepWrites | None = None
        module.register_forward_pre_hook(_gather)

    # -- what it is made of ----------------------------------------------------------------------------------------

    @contextmanager
    def unsharded_view(self) -> Iterator[None]:
        self.reshard()
        stand_ins = [stand_in(shard.shape, shard.local) for shard in self.shards]
        self.remember((shard.names[0], parameter) for shard, parameter in zip(self.shards, stand_ins, strict=True))
        for shard, parameter in zip(self.shards, stand_ins, strict=True):
            shard.give_to_owners(parameter)
        try:
            yield
        finally:
            for shard, parameter in zip(self.shards, stand_ins, strict=True):
                shard.local.requires_grad_(parameter.requires_grad)
                shard.give_to_owners(shard.local)

    def layout(self) -> Layout:
        self.reshard()
        parts = {shard.local: shard.part for shard in self.shards}
        return {p: (parts.get(p) or Part(name=name, shape=tuple(p.shape)),) for name, p in named_parameters(self.root)}

    def holds_part(self, parameter: Tensor) -> bool:
        return parameter.ndim > 0

    # -- steps -----------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Replace the shards in their modules by full parameters, except for those that are gathered already."""
        for shard in self.shards:
            if shard.gathered is None:
                shard.gathered = nn.Parameter(shard.all_gather())
                shard.gathered.register_post_accumulate_grad_hook(shard.take_gradient)
                self.end.follow(shard.gathered)
                shard.copy_requires_grad()
                shard.give_to_owners(shard.gathered)
            elif shard.was_trained != shard.local.requires_grad:  # frozen or unfrozen since it was gathered
                shard.copy_requires_grad()
        self._writes_when_gathered = self._count_shard_writes()

    def _after_backward(self) -> None:
        self.reduce()
        self.reshard()
        if self.root in running_forwards:  # the backward pass was inside a forward pass, which continues
            self.resume_forward()
            self.inner_pass_ended()

    def reduce(self) -> None:
        """Add the mean of the ranks' gradients to the gradients of the shards. All ranks must call it."""
        has_gradient = torch.tensor([float(shard.gradient is not None) for shard in self.shards])
        used_on_any_rank = self.runtime.all_reduce(has_gradient, "max")
        for shard, is_used in zip(self.shards, used_on_any_rank.tolist(), strict=True):
            if is_used:
                gradient = shard.local.new_zeros(shard.shape) if shard.gradient is None else shard.gradient
                reduced = shard.reduce_scatter(gradient.detach())
                shard.local.grad = reduced if shard.local.grad is None else shard.local.grad + reduced
                shard.gradient = None

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
                # Users may have frozen or unfrozen the gathered parameter.
                if shard.gathered.requires_grad != shard.was_trained:
                    shard.local.requires_grad_(shard.gathered.requires_grad)
                shard.gathered = None
                shard.give_to_owners(shard.local)

    def suspend_forward(self, loss: Tensor | None = None) -> None:
        self.step.on = False

    def follow_written_shards(self) -> None:
        if self._count_shard_writes() != self._writes_when_gathered:
            self.resume_forward()
            if self._watch is not None:
                self._watch.renew()

    def gather_again(self) -> None:
        self.gather()

    def _count_shard_writes(self) -> int:
        return sum(shard.local._version for shard in self.shards)

    def resume_forward(self) -> None:
        self.reshard()
        self.gather()
        for shard in self.shards:
            if shard.gathered is not None:
                self.step.follow(shard.gathered, shard.local, is_part=True)
        self.step.on = True

    def watch_writes(self) -> StepWrites | None:
        self._watch = ComparedShards(
            {
                self.root: [
                    GatheredShard(
                        name=shard.names[0], shard=partial(getattr, shard, "local"), gathered=shard.gathered_range
                    )
                    for shard in self.shards
                ]
            }
        )
        return self._watch

    def follow_requires_grad(self) -> None:
        for shard in self.shards:
            shard.copy_requires_grad()

    def reset(self) -> None:
        self.reshard()
        for shard in self.shards:
            shard.gradient = None

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
        return {name: shards[name].part.of(shards[name].local) if name in shards else state[name] for name in state}

    def accumulated_gradients(self) -> HeldGradients:
        gradients = super().accumulated_gradients()
        gradients.own.update({s.names[0]: s.gradient for s in self.shards if s.gradient is not None})
        return gradients

    def restore_gradients(
        self, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        shards = {shard.names[0]: shard for shard in self.shards}
        super().restore_gradients({n: read for n, read in own.items() if n not in shards}, reduced)
        for name, shard in shards.items():
            shard.gradient = own[name]().to(shard.local) if name in own else None


def _gather(root: nn.Module, args: Any) -> None:
    sharded = sharded_of(root)
    if isinstance(sharded, LoopbackSharded) and root not in gathered_modules:  # a copy of a root has none
        sharded.gather()
