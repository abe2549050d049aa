"""A training loop that is written once: it runs on ranks under Fabric, and in one process of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.testing import oracle
from fsdp_core.testing.oracle import Trained
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import means, new_fabric, own_share, whole_batches

__all__ = ["Loop"]


class Loop:
    """A net and its optimizer, set up together.

    Args:
        strategy: The name of a strategy; ``None`` for one process of plain torch, which uses none of our code.
        make_optimizer: Builds the optimizer over the net.
        net: The net; :func:`~fsdp_core.testing.oracle.new_net` by default.
        ranks: The number of ranks.
        options: The strategy's options; see :func:`~fsdp_core.testing.training.strategy_argument`.
        precision: Lightning's name of the precision.

    Attributes:
        net: The user's module.
        model: What ``fabric.setup`` has returned for it; in one process, the net itself.
        optimizer: The optimizer that ``fabric.setup`` has returned.
        fabric: The Fabric; ``None`` in one process.
    """

    def __init__(
        self,
        strategy: str | None,
        make_optimizer: Callable[[Any], torch.optim.Optimizer] = oracle.momentum,
        net: nn.Module | None = None,
        *,
        ranks: int = 2,
        options: Mapping[str, Any] | None = None,
        precision: Any = None,
    ) -> None:
        self.fabric: Any = None if strategy is None else new_fabric(strategy, ranks, options, precision)
        self.net: Any = oracle.new_net() if net is None else net
        self.model: Any = self.net
        self.optimizer: Any = make_optimizer(self.net)
        if self.fabric is not None:
            self.model, self.optimizer = self.fabric.setup(self.net, self.optimizer)

    def batches(self, steps: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's rows of the oracle's batches; in one process, all rows."""
        batches = oracle.global_batches(steps)
        return batches if self.fabric is None else [own_share(self.fabric, batch) for batch in batches]

    def whole_batches(self, steps: int) -> list[tuple[Tensor, Tensor]]:
        """The oracle's batches, the same on all ranks."""
        return oracle.global_batches(steps) if self.fabric is None else whole_batches(self.fabric, steps)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The model's loss on a batch."""
        return mse_loss(self.model(x), y)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run a backward pass."""
        if self.fabric is None:
            loss.backward(**options)
        else:
            self.fabric.backward(loss, **options)

    def unreduced(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """A context in which backward passes accumulate gradients without a reduction."""
        return nullcontext() if self.fabric is None else self.fabric.no_backward_sync(self.model, enabled=enabled)

    def step(self) -> None:
        """Take a step of the optimizer, and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step_on(self, x: Tensor, y: Tensor) -> Tensor:
        """Take a step on a batch, and return the loss."""
        loss = self.loss(x, y)
        self.backward(loss)
        self.step()
        return loss.detach()

    def train(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Trained:
        """Take a step on each batch, and return the losses and the state."""
        losses = [self.step_on(x, y) for x, y in batches]
        return self.means(losses), self.state()

    def means(self, losses: list[Tensor]) -> list[float]:
        """Each loss as its mean over all ranks."""
        return [loss.item() for loss in losses] if self.fabric is None else means(losses)

    def state(self) -> dict[str, Tensor]:
        """The full state by name, in host memory. All ranks must call it."""
        if self.fabric is not None:
            return full_state(self.fabric.strategy)
        return {name: tensor.detach().clone() for name, tensor in self.net.state_dict().items()}
