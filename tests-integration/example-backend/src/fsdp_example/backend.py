"""ZeRO-1 by hand: whole parameters to compute with, 1/n of the optimizer on each of n ranks. Knows no Lightning."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsdp_core import Backend, OptimizerMismatchError
from fsdp_core.sharding import ActivationCheckpointingPolicy, checkpoint_activations, describe_policy, place
from fsdp_core.state import HeldGradients, Layout, SavedTensor, fill, refuse_half_gradients
from fsdp_example.shards import Shards

__all__ = ["ZeRO1Backend"]


class ZeRO1Backend(Backend):
    """Lets each rank's optimizer hold a run of every parameter's elements.

    The end of a backward pass reduce-scatters the gradients; a step of the optimizer changes this rank's runs and
    ends with an all-gather.

    Args:
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass.
        sync_each_batch: Whether gradients are reduced on every micro-batch of an accumulation.
    """

    accelerators = ("cpu",)

    # by root, and not by backend, for a root outlives the strategy that sharded it
    _shards: ClassVar[weakref.WeakKeyDictionary[nn.Module, Shards]] = weakref.WeakKeyDictionary()
    _followed: ClassVar[weakref.WeakSet[torch.optim.Optimizer]] = weakref.WeakSet()

    def __init__(
        self,
        *,
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        sync_each_batch: bool = False,
    ) -> None:
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.sync_each_batch = sync_each_batch

    # -- from the user's module to shards --------------------------------------------------------------------------

    def terms(self) -> dict[str, Any]:
        policy = describe_policy(self.activation_checkpointing_policy)
        return {**super().terms(), "activation_checkpointing_policy": policy}

    def shard(self, module: nn.Module) -> nn.Module:
        if not self.is_sharded(module):
            self.check_shardable(module)
            self.remember(module)
            checkpoint_activations(module, self.activation_checkpointing_policy)
            place(list(module.modules()), self.runtime)
            self.remember(module)  # what was on the meta device is other parameters now
            self._shards[module] = Shards(module, self.runtime)
            self.mark_sharded(module)
        return module

    def layout(self, module: nn.Module) -> Layout:
        return self._shards[module].layout

    def repoint(self, optimizers: Iterable[torch.optim.Optimizer], modules: Sequence[nn.Module]) -> None:
        optimizers = list(optimizers)
        super().repoint(optimizers, modules)
        for optimizer in optimizers:
            if optimizer not in self._followed:
                self._followed.add(optimizer)
                optimizer.register_step_post_hook(_gathering([self._shards[module] for module in modules]))

    # -- steps -----------------------------------------------------------------------------------------------------

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        return nullcontext() if self.sync_each_batch else self._shards[module].end.disabled()

    def suspend_forward(self, module: nn.Module, loss: Tensor | None = None) -> None:
        self._shards[module].step.on = False

    def resume_forward(self, module: nn.Module) -> None:
        self._shards[module].step.on = True

    def follow_requires_grad(self, module: nn.Module) -> None:
        for whole, shard in self._shards[module].of.items():
            whole.requires_grad_(shard.requires_grad)

    def reset(self, module: nn.Module) -> None:
        self._shards[module].forget_gradients()

    def abandon_forward(self, module: nn.Module) -> None:
        """Nothing is gathered for a forward pass."""

    def mend_interrupted(self, module: nn.Module) -> None:
        shards = self._shards[module]
        if shards.end.interrupted:
            refuse_half_gradients(module, shards.layout)
            shards.forget_gradients()

    def holds_part(self, parameter: Tensor) -> bool:
        return True

    # -- state -----------------------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        first = self.aliases(module)
        own = {part.name: part.of(shard) for shard, (part,) in self.layout(module).items()}
        return {name: own.get(first.get(name, name), value) for name, value in super().model_state(module).items()}

    def load_model_state(
        self, module: nn.Module, state: Mapping[str, Any], strict: bool = True, *, check_only: bool = False
    ) -> None:
        super().load_model_state(module, state, strict, check_only=check_only)
        if not check_only:
            self._shards[module].gather()

    def accumulated_gradients(self, module: nn.Module) -> HeldGradients:
        held = super().accumulated_gradients(module)
        held.own.update((n, whole.grad) for n, whole in self._shards[module].whole.items() if whole.grad is not None)
        return held

    def restore_gradients(
        self, module: nn.Module, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        whole = self._shards[module].whole
        super().restore_gradients(module, {n: read for n, read in own.items() if n not in whole}, reduced)
        for name, parameter in whole.items():
            parameter.grad = None
            if name in own:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
                fill(parameter.grad, own[name](), cast=True)


def _gathering(of: list[Shards]) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
    """What an optimizer does after each step."""
    known = {shard for shards in of for shard in shards.layout}

    def gather(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not all(p in known for group in optimizer.param_groups for p in group["params"]):
            raise OptimizerMismatchError(
                f"a parameter was added to {type(optimizer).__name__} after it was set up, and it is whole: every rank "
                "would step it by itself.\nGive the optimizer all parameters at first, and freeze those that wait."
            )
        for shards in of:
            shards.gather()

    return gather
