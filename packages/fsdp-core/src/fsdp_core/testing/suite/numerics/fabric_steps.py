"""Steps under Fabric that a strategy's tests compare with one process: whole ones in a method, and accumulated ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import new_fabric, own_share

__all__ = ["ACCUMULATIONS", "METHODS", "assert_gradients_wait", "assert_whole_steps"]


class _Stepping(nn.Module):
    """A model whose methods do whole steps, as Fabric's users write them after ``mark_forward_method``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = oracle.new_net()
        with oracle.seeded(3):
            self.critic = oracle.Net(blocks=1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output

    def once(self, x: Tensor, y: Tensor, backward: Any, optimizers: Any) -> Tensor:
        loss = mse_loss(self.net(x), y)
        backward(loss)
        optimizers[0].step()
        optimizers[0].zero_grad()
        return loss.detach()

    def twice(self, x: Tensor, y: Tensor, backward: Any, optimizers: Any) -> Tensor:
        return torch.stack([self.once(x, y, backward, optimizers) for _ in range(2)])

    def with_a_closure(self, x: Tensor, y: Tensor, backward: Any, optimizers: Any) -> Tensor:
        def evaluate() -> Tensor:
            optimizers[0].zero_grad()
            loss = mse_loss(self.net(x), y)
            backward(loss)
            return loss

        loss: Tensor = optimizers[0].step(evaluate)
        return loss.detach()

    def with_writes(self, x: Tensor, y: Tensor, backward: Any, optimizers: Any) -> Tensor:
        self.once(x, y, backward, optimizers)
        with torch.no_grad():
            self.net.out.weight.mul_(0.9)
        return self.once(x, y, backward, optimizers)

    def adversaries(self, x: Tensor, y: Tensor, backward: Any, optimizers: Any) -> Tensor:
        """Take steps of two optimizers. A rank may hold no part of the critic, so that its step writes to no shard."""
        generator, critic = optimizers
        fake = self.net(x)
        critic.zero_grad()
        judged = (self.critic(y) - 1).square().mean() + self.critic(fake.detach()).square().mean()
        backward(judged)
        critic.step()
        generator.zero_grad()
        fooled = (self.critic(fake) - 1).square().mean()
        backward(fooled)
        generator.step()
        return torch.stack([judged.detach(), fooled.detach()])


#: The methods that do whole steps.
METHODS = ("once", "twice", "with_a_closure", "with_writes", "adversaries")


def _optimizers(module: _Stepping) -> list[torch.optim.Optimizer]:
    return [oracle.momentum(module.net), oracle.momentum(module.critic)]


def _whole_steps(strategy: str) -> dict[str, tuple[list[Any], dict[str, Tensor]]]:
    outcomes = {}
    for name in METHODS:
        fabric = new_fabric(strategy, 2)
        module = _Stepping()
        model, *optimizers = fabric.setup(module, *_optimizers(module))
        model.mark_forward_method(name)
        shares = [own_share(fabric, batch) for batch in oracle.global_batches(3)]
        losses = [getattr(model, name)(x, y, fabric.backward, optimizers) for x, y in shares]
        outcomes[name] = [fabric.all_reduce(loss) for loss in losses], full_state(fabric.strategy)
    return outcomes


def assert_whole_steps(ranks: Ranks, strategy: str) -> None:
    """Check that steps are right which a method does that ``mark_forward_method`` names.

    Args:
        ranks: The ranks.
        strategy: The name of the strategy.
    """
    got = ranks.run(2, _whole_steps, strategy)
    for name in METHODS:
        module = _Stepping()
        optimizers = _optimizers(module)
        step = getattr(module, name)
        losses = [step(x, y, Tensor.backward, optimizers) for x, y in oracle.global_batches(3)]
        for outcomes in got:
            torch.testing.assert_close(outcomes[name], (losses, module.state_dict()), atol=FP32_TOLERANCE, rtol=0)


#: What a step does within ``no_backward_sync``, and after it, where gradients are reduced: backward passes of the net
#: or of a block alone, and others.
ACCUMULATIONS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cleared, before a block's": (("net", "clear"), ("block",)),
    "cleared after the context, before a block's": (("net",), ("clear", "block")),
    "kept, before a block's": (("net",), ("block",)),
    "cleared and again, before a block's": (("net", "clear", "block"), ("block", "block")),
    "cleared, before the net's": (("net", "block", "clear", "net"), ("net",)),
    "of a block, cleared": (("block", "clear"), ("net",)),
    "frozen": (("net", "freeze", "net"), ("net", "unfreeze")),
    "frozen, before a block's": (("net", "freeze"), ("block", "unfreeze")),
    "frozen in part": (("net", "freeze part", "net"), ("net", "unfreeze")),
    "frozen, cleared": (("net", "freeze", "clear"), ("net", "unfreeze", "net")),
}


def _accumulate_all(strategy: str | None) -> dict[str, dict[str, Tensor]]:
    return {name: _accumulate(strategy, name) for name in ACCUMULATIONS}


def _accumulate(strategy: str | None, name: str) -> dict[str, Tensor]:
    loop = Loop(strategy)
    batches = iter(loop.batches(12))

    def run(parts: tuple[str, ...]) -> None:
        for part in parts:
            if part == "clear":
                loop.optimizer.zero_grad()
            elif "freeze" in part:
                frozen = loop.net.blocks[2].down if "part" in part else loop.net.blocks[2]
                frozen.requires_grad_("un" in part)
            else:
                x, y = next(batches)
                loop.backward(loop.loss(x, y) if part == "net" else loop.net.blocks[0](x).square().mean())

    unreduced_parts, reduced_parts = ACCUMULATIONS[name]
    for _ in range(2):
        with loop.unreduced():
            run(unreduced_parts)
        run(reduced_parts)
        loop.step()
    return loop.state()


def assert_gradients_wait(ranks: Ranks, strategy: str) -> None:
    """Check that gradients which wait for their reduction are reduced, or cleared, whatever the passes after it reach.

    Args:
        ranks: The ranks.
        strategy: The name of the strategy.
    """
    want = _accumulate_all(None)
    for got in ranks.run(2, _accumulate_all, strategy):
        torch.testing.assert_close(got, want, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)
