"""Memory that a user assigns to whole parameters is what is trained and saved."""

from __future__ import annotations

from pathlib import Path

import torch
from both_examples import of_both
from torch import nn

from fsdp_core.testing import RankPool, full_state, new_fabric


def trained(strategy: str, folder: str, saves: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight after a step between whose passes it was assigned to, or as saved; and what one process has."""
    fabric = new_fabric(strategy, 2)
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    want = 0.5 * net.weight.detach() - (0.0 if saves else 0.1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(1, 4)).sum())
    for parameter in net.parameters():
        parameter.data = 0.5 * parameter.data
    if saves:
        fabric.save(f"{folder}/saved", {"model": model})
        optimizer.step()
        fabric.load(f"{folder}/saved", {"model": model})
    else:
        optimizer.step()
    assert torch.equal(full_state(fabric.strategy)["weight"], net.weight)
    return net.weight.detach(), want


@of_both
def test_between_a_backward_pass_and_a_step(ranks: RankPool, strategy: str, tmp_path: Path) -> None:
    for saves in (False, True):
        for got, want in ranks.run(2, trained, strategy, str(tmp_path), saves):
            torch.testing.assert_close(got, want)
