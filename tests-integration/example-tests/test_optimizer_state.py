"""What ZeRO is for: each of n ranks keeps 1/n of the optimizer's state."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from both_examples import PACKAGES, of_both
from torch import Tensor, nn

from fsdp_core.testing import RankPool, full_state, new_fabric

# 10 000 elements: no rank's share of a parameter is rounded up by much
WIDE = 100


def _memory(tensors: list[Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def held_while_training(strategy: str, world_size: int) -> tuple[int, int, bool]:
    """How many elements this rank's optimizer keeps in moments, how many it was given to step, and whether these share
    memory with the module's parameters."""
    fabric = new_fabric(strategy, world_size)
    net = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    fabric.backward(model(torch.ones(2, WIDE)).sum())
    optimizer.step()
    shards = [p for group in optimizer.param_groups for p in group["params"]]
    moments = [t for state in optimizer.state.values() for key, t in state.items() if key.startswith("exp_avg")]
    memory = {p.untyped_storage().data_ptr() for p in net.parameters()}
    return _memory(moments), _memory(shards), all(p.untyped_storage().data_ptr() in memory for p in shards)


@of_both
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_state_is_divided_among_the_ranks(ranks: RankPool, strategy: str, world_size: int) -> None:
    total = 2 * (WIDE * WIDE + WIDE)
    held = ranks.run(world_size, held_while_training, strategy, world_size)
    assert sum(shards for _, shards, _ in held) == total
    for moments, shards, shares_memory in held:
        assert moments == 2 * shards <= 2 * 1.01 * total / world_size
        assert shares_memory


def differences_after_a_step(strategy: str) -> float:
    fabric = new_fabric(strategy, 3)
    torch.manual_seed(fabric.global_rank)  # other data on each rank
    net = nn.Linear(7, 5)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    fabric.backward(model(torch.randn(2, 7)).sum())
    optimizer.step()
    everywhere = fabric.all_gather(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    assert isinstance(everywhere, Tensor)
    assert torch.equal(everywhere[0], torch.cat([t.reshape(-1) for t in full_state(fabric.strategy).values()]))
    return float((everywhere - everywhere[0]).abs().max())


@of_both
def test_every_rank_has_every_new_value_after_a_step(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(3, differences_after_a_step, strategy) == [0.0] * 3


def added_later(strategy: str) -> str:
    fabric = new_fabric(strategy, 2)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sgd = torch.optim.SGD(net[0].parameters(), lr=0.1)
    model, _ = fabric.setup(net, sgd)
    sgd.add_param_group({"params": list(net[1].parameters())})
    fabric.backward(model(torch.ones(2, 4)).sum())
    with pytest.raises(ValueError, match="added to SGD after it was set up") as refused:
        sgd.step()  # and not the strategy, which re-points what was added
    return str(refused.value)


@of_both
def test_whole_parameters_are_not_stepped(ranks: RankPool, strategy: str) -> None:
    for told in ranks.run(2, added_later, strategy):
        assert "freeze those that wait" in told


@of_both
def test_it_runs_by_name_alone(strategy: str) -> None:
    used = L.Fabric(strategy=strategy, accelerator="cpu", devices=1).strategy
    assert type(used).__module__ == f"{PACKAGES[strategy]}.fabric"
