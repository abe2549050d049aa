"""Modules that take their backward passes and steps themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from fsdp_core.testing.suite.loops import Gan
from fsdp_core.testing.training import Lit

__all__ = ["Accumulates", "Clips", "Gan", "OfItsOwn", "TwoForwards", "TwoLosses"]


class _ByHand(Lit):
    def __init__(self) -> None:
        super().__init__("momentum")
        self.automatic_optimization = False

    def step(self) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


class TwoLosses(_ByHand):
    """Two backward passes through one forward pass."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.manual_backward(0.25 * loss, retain_graph=True)
        self.manual_backward(0.75 * loss)
        self.step()


class TwoForwards(_ByHand):
    """A forward and a backward pass for each half of a batch, and one step for both."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        halves: list[Tensor] = []
        for i in range(2):
            halves.append(mse_loss(self(batch[0][i::2]), batch[1][i::2]) / 2)
            self.manual_backward(halves[-1])
        self.losses.append((halves[0] + halves[1]).detach())
        self.step()


class Accumulates(_ByHand):
    """A step for two batches."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.step()


class Clips(_ByHand):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.manual_backward(loss)
        optimizer: Any = self.optimizers()
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.step()


class OfItsOwn(_ByHand):
    """Looks at a parameter of its own after the step, in the same training step."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = mse_loss(self(batch[0]) + self.shift, batch[1])
        self.losses.append(loss.detach())
        self.manual_backward(loss)
        self.step()
        self.losses.append(self.shift.detach().clone())
