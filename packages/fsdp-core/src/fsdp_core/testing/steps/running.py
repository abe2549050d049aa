"""Runs programs under a strategy, on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_core.errors import FSDPError
from fsdp_core.testing import oracle
from fsdp_core.testing.oracle import Trained
from fsdp_core.testing.state import full_state
from fsdp_core.testing.steps.grammar import Front, Program
from fsdp_core.testing.steps.unsharded_copies import BATCHES, new_net, sgd
from fsdp_core.testing.training import Lit, loader, means, new_fabric, new_trainer, own_share

__all__ = ["Raised", "run_all", "train"]

#: Whether an error says what to do instead, and its text.
Raised = tuple[bool, str]


class _Automatic(Lit):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.net = new_net(program)
        self.program = program.step()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.program(self.net, *batch, Tensor.backward, optimizer.zero_grad)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return sgd(self)


class _ByHand(_Automatic):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.program(self.net, *batch, self.manual_backward, optimizer.zero_grad)
        self.losses.append(loss.detach())
        self.manual_backward(loss)
        optimizer.step()


def _fit(strategy: str, tmp: str, front: Front, program: Program, ranks: int) -> Trained:
    module = _Automatic(program) if front == "automatic" else _ByHand(program)
    run = new_trainer(tmp, strategy, ranks)
    run.fit(module, loader(BATCHES, ranks))
    return means(module.losses), {name: tensor.detach().clone() for name, tensor in full_state(run.strategy).items()}


def _fabric(strategy: str, program: Program) -> Trained:
    fabric = new_fabric(strategy)
    net = new_net(program)
    model, optimizer = fabric.setup(net, sgd(net))
    step = program.step()
    losses = []
    for batch in oracle.global_batches(BATCHES):
        x, y = own_share(fabric, batch)
        optimizer.zero_grad()
        loss = step(model, x, y, fabric.backward, optimizer.zero_grad)
        losses.append(loss.detach())
        fabric.backward(loss)
        optimizer.step()
    return means(losses), {f"net.{name}": tensor for name, tensor in full_state(fabric.strategy).items()}


def train(strategy: str, tmp: str, front: Front, program: Program, ranks: int = 2) -> Trained | Raised:
    """Train by a program, on each rank.

    Args:
        strategy: The strategy's name.
        tmp: A folder that the Trainer may write to.
        front: What runs the steps.
        program: The program.
        ranks: How many ranks there are.
    """
    try:
        return _fabric(strategy, program) if front == "fabric" else _fit(strategy, tmp, front, program, ranks)
    except Exception as error:
        notes = list(getattr(error, "__notes__", ()))
        # Any note of ours explains an error where a layer inside of a unit is called. Elsewhere only the note about
        # create_graph=True does; another one would hide a fault.
        prefix = "fsdp-core: " if ".norm(" in str(program) else "fsdp-core: a graph that create_graph=True"
        is_refused = isinstance(error, FSDPError) or any(note.startswith(prefix) for note in notes)
        return is_refused, "\n".join([f"{type(error).__name__}: {error}", *notes])
    finally:
        torch.set_grad_enabled(True)


def run_all(strategy: str, tmp: str, front: Front, programs: Sequence[Program]) -> list[Trained | Raised]:
    """Train by several programs, one after the other, each a new model."""
    return [train(strategy, tmp, front, program) for program in programs]
