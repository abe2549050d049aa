"""Checks of what forward passes write to gathered parameters under Fabric, until an optimizer's first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core.gradients.gathered_values import WrittenValues
from fsdp_core.gradients.step_writes import StepWrites, check_writes
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.full_tensor import gathered_modules
from fsdp_core.torch_private.autograd import in_backward
from fsdp_core.torch_private.dynamo import outside_of_compilation

__all__ = ["FirstForwards"]


class FirstForwards:
    """Refuses what the forward passes of a root write to its gathered parameters, which is lost when they are freed.

    Under the Trainer, which knows where a step begins, the strategy does the same for the first ``training_step``. Only
    passes that record gradients are watched, since others, such as a validation, train nothing.

    Args:
        sharded: The root.
        before_first: Called with the root before the first of these passes, which trains it.
    """

    def __init__(self, sharded: Sharded, before_first: Callable[[Sharded], None]) -> None:
        self._sharded = ref(sharded)
        self._before_first = before_first
        has_parts = any(isinstance(p, DTensor) or sharded.is_shard(p) for p in sharded.layout())
        # Of ranks that have the full model, one may call it alone: they compare nothing.
        self._ranks = sharded.runtime if has_parts else None
        self._name = sharded.plan.class_name
        self._writes: StepWrites | None = None
        self._has_begun = False
        _watches[sharded.root] = _watches[sharded.module] = self
        # The first hook runs before a library's hooks gather parameters, the second before they free them.
        self._hooks = [
            sharded.root.register_forward_pre_hook(_begin_forward, prepend=True),
            sharded.module.register_forward_hook(_check_forward, prepend=True),
        ]

    def begin(self) -> None:
        """Begin a forward pass."""
        sharded = self._sharded()
        if sharded is not None and sharded.root not in gathered_modules:
            if not self._has_begun:
                self._before_first(sharded)
            self._stop_watching_writes()
            self._writes = sharded.watch_writes()
            self._has_begun = True

    def check(self) -> None:
        """Refuse writes since the last forward pass began. All ranks call this after the forward and backward passes.

        Raises:
            ShardingError: Something was written.
        """
        sharded = self._sharded()
        by = f"a forward pass of {self._name}"
        if self._writes is not None:
            check_writes(self._writes, self._ranks, by=by, instead="after optimizer.step()")
        elif self._has_begun and (sharded is None or sharded.root not in gathered_modules):
            # All ranks take part, also one whose model was collected as garbage, which happens at another time on each.
            values = WrittenValues() if sharded is None else sharded.written_values
            values.are_compared = self._ranks is not None
            if sharded is not None:
                sharded.keep_writes()
            if self._ranks is not None and self._ranks.total([bool(values)])[0]:
                values.check_same(values.take(), self._ranks, by)

    def stop(self) -> bool:
        """After an optimizer's step, stop watching if there was a forward pass, and return whether there was."""
        if self._has_begun:
            for hook in self._hooks:
                hook.remove()
            for module in [module for module, watch in _watches.items() if watch is self]:
                del _watches[module]  # since a compiled module may keep calling the hooks
            self._stop_watching_writes()
            if (sharded := self._sharded()) is not None:
                sharded.written_values.are_compared = False
        return self._has_begun

    def _stop_watching_writes(self) -> None:
        if self._writes is not None:
            self._writes.stop()
            self._writes = None


#: By root, and by the user's module in it. A copy of such a module has the hooks too, but is not watched.
_watches: WeakKeyDictionary[nn.Module, FirstForwards] = WeakKeyDictionary()


@outside_of_compilation
def _begin_forward(root: nn.Module, args: Any) -> None:
    watch = _watches.get(root)
    if watch is not None and torch.is_grad_enabled() and not in_backward():
        watch.begin()


@outside_of_compilation
def _check_forward(module: nn.Module, args: Any, output: Any) -> None:
    watch = _watches.get(module)
    if watch is not None and not in_backward():
        watch.check()
