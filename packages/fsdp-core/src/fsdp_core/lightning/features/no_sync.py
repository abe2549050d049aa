"""``fabric.no_backward_sync()``: leaves gradients unreduced, and refuses a step before they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_core.errors import ShardingError
from fsdp_core.lightning.private import BackwardSyncControl
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.sharding.sharded import Sharded

if TYPE_CHECKING:
    from fsdp_core.lightning.fabric_strategy import ShardedFabricStrategy

__all__ = ["NoSync"]


class NoSync(BackwardSyncControl):
    """Lets Fabric skip the reduction of gradients, and refuses a step whose last backward pass has skipped it.

    Args:
        strategy: The strategy.

    Attributes:
        accumulating: The roots that have been in the context since the last step.
    """

    def __init__(self, strategy: ShardedFabricStrategy) -> None:
        self._strategy = strategy
        self.accumulating: WeakSet[Sharded] = WeakSet()
        self._inside_context: WeakSet[Sharded] = WeakSet()
        #: The roots that were in the context at the last backward pass.
        self._unreduced: WeakSet[Sharded] = WeakSet()

    @property
    def is_inside(self) -> bool:
        """Whether a root is in the context now."""
        return bool(self._inside_context)

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        if not enabled:
            yield
            return
        self._strategy.require(Capability.GRADIENT_ACCUMULATION, "no_backward_sync()")
        sharded = self._strategy.sharded_of(module)
        self.accumulating.add(sharded)
        self._strategy.sharded_optimizers.unreduced.add(sharded)
        self._inside_context.add(sharded)
        try:
            with self._strategy._no_sync(sharded):
                yield
        finally:
            self._inside_context.discard(sharded)

    def after_backward(self, roots: Iterable[Sharded]) -> None:
        """Record which roots the last backward pass has left with unreduced gradients."""
        for root in roots:
            if root in self._inside_context:
                self._unreduced.add(root)
            else:
                self._unreduced.discard(root)

    def check_reduced(self, optimizer: Optimizer, roots: Iterable[Sharded]) -> None:
        """Refuse a step whose last backward pass has left gradients unreduced, which the step would not see.

        Raises:
            ShardingError: Gradients of the optimizer's parameters are unreduced.
        """
        if not self._unreduced:
            return
        optimizer_params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for root in [root for root in roots if root in self._unreduced]:
            names: set[str] = set()
            for p, parts in root.layout().items():
                if id(p) in optimizer_params and (isinstance(p, DTensor) or root.is_shard(p)):
                    names.update(part.name for part in parts)
            unreduced = sorted(names & root.accumulated_gradients().own.keys())
            if unreduced:
                raise ShardingError(
                    f"a step of {type(optimizer).__name__} while gradients of {root.plan.class_name} are not reduced, "
                    f"such as that of {unreduced[0]!r}: the last backward pass before it was inside "
                    "fabric.no_backward_sync(), so the step would leave them out.\n"
                    "Leave the context for the last backward pass before each step: `with "
                    "fabric.no_backward_sync(model, enabled=is_accumulating): ...`, and is_accumulating is False there."
                )

    def after_step(self) -> None:
        """Begin to accumulate anew."""
        self.accumulating.clear()
