"""The layers that recompute their activations are those of the plan, for which the policy has been asked once."""

from __future__ import annotations

import torch
from both_examples import of_both
from torch import Tensor, nn

from fsdp_core.testing import RankPool, new_fabric


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x).tanh()
        return output


def calls_of_layers(strategy: str) -> int:
    """The calls of two blocks' layers in a step, where a policy answers "yes" only when it is first asked of each."""
    asked_of: set[nn.Module] = set()

    def policy(module: nn.Module) -> bool:
        is_first = module not in asked_of
        asked_of.add(module)
        return is_first and isinstance(module, Block)

    fabric = new_fabric(strategy, 1, {"activation_checkpointing_policy": policy})
    net = nn.Sequential(Block(), Block())
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    calls: list[nn.Module] = []
    for block in net:
        block.linear.register_forward_hook(lambda module, *_: calls.append(module))
    fabric.backward(model(torch.ones(2, 4)).sum())
    return len(calls)


@of_both
def test_the_policy_is_asked_once(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(1, calls_of_layers, strategy) == [4]
