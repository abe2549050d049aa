"""Token means: :func:`fsdp_core.token_mean` under our strategies, whose optimizers take what gradients wait."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from fsdp_core.mesh import GRADIENT_AXES
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.token_windows import CountedMean, LoopWindow, TokenWindow, follow_passes, use_window

if TYPE_CHECKING:
    from fsdp_core.lightning.fabric_strategy import ShardedFabricStrategy
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["TokenMeans", "TokenMeansElsewhere"]


class TokenMeans(TokenWindow):
    """The tokens of the steps of a strategy's optimizers.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: ShardedTrainerStrategy | ShardedFabricStrategy) -> None:
        super().__init__()
        self._strategy = strategy
        #: The optimizers that may have gradients of passes without such a mean, perhaps unreduced.
        self._with_other_gradients: WeakSet[Optimizer] = WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenMeans:
        return TokenMeans(copy.deepcopy(self._strategy, memo))

    def begin(self) -> None:
        """Let ``token_mean`` on this rank be of this strategy's run from now on."""
        use_window(self)
        follow_passes()

    def end(self) -> None:
        """Let it be of no strategy's run any more."""
        use_window(None)

    @property
    def _ranks(self) -> Runtime:
        return self._strategy.runtime.along(*GRADIENT_AXES)

    @property
    def device(self) -> torch.device:
        return self._strategy.runtime.device

    @property
    def ranks(self) -> int:
        return self._ranks.world_size

    @property
    def divisor(self) -> int | None:
        return self._strategy.loss_divisor

    @property
    def leaves_unreduced(self) -> bool:
        return self._strategy.leaves_unreduced

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return self._ranks.in_graph().all_reduce(tensor, "sum")

    def owners(self, outputs: Sequence[Any], *, complete: bool) -> Sequence[Optimizer]:
        return list(self._strategy.optimizers)

    def gradients(self, owner: Optimizer) -> Iterable[Tensor]:
        return (p.grad for group in owner.param_groups for p in group["params"] if p.grad is not None)

    def before_backward(self, outputs: Sequence[Any], new_means: Sequence[CountedMean]) -> None:
        if not new_means and not self._waiting and self.divisor != 1:
            self._with_other_gradients.update(self._strategy.optimizers)
        super().before_backward(outputs, new_means)

    def forget(self, owner: Optimizer) -> None:
        super().forget(owner)
        self._with_other_gradients.discard(owner)

    def forget_all(self) -> None:
        """Forget all gradients."""
        for optimizer in self._strategy.optimizers:
            self.forget(optimizer)

    def has_other_gradients(self, owner: Optimizer) -> bool:
        return super().has_gradients(owner) or (self._has_unreduced and owner in self._with_other_gradients)

    def has_gradients(self, owner: Optimizer) -> bool:
        return self._has_unreduced or super().has_gradients(owner)

    @property
    def _has_unreduced(self) -> bool:
        return bool(self._strategy.sharded_optimizers.unreduced)


class TokenMeansElsewhere(LoopWindow):
    """The tokens of the steps of a fit under one of Lightning's own strategies.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self._strategy_ref = ref(strategy)

    @classmethod
    def of(cls, strategy: Strategy) -> TokenMeansElsewhere:
        """That of a strategy, the same at each step."""
        if strategy not in _elsewhere:
            _elsewhere[strategy] = cls(strategy)
        return _elsewhere[strategy]

    @property
    def _strategy(self) -> Any:
        strategy = self._strategy_ref()
        assert strategy is not None
        return strategy

    @property
    def device(self) -> torch.device:
        device: torch.device = self._strategy.root_device
        return device

    @property
    def ranks(self) -> int:
        return int(getattr(self._strategy, "world_size", 1))

    @property
    def divisor(self) -> int | None:
        module: pl.LightningModule = self._strategy.lightning_module
        return module.trainer.accumulate_grad_batches if module.automatic_optimization else None

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        total: Tensor = self._strategy.reduce(tensor, reduce_op="sum")
        return total


_elsewhere: WeakKeyDictionary[Strategy, TokenMeansElsewhere] = WeakKeyDictionary()
