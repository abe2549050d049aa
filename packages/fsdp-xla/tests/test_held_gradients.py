"""Gradients of an accumulation, and an optimizer's state, as checkpoints of any backend hold them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

from fsdp_core.errors import CheckpointMismatchError, ShardingError
from fsdp_core.sharding import sharded_of
from fsdp_core.testing import oracle
from fsdp_core.testing.refusals import assert_says, refusal
from launching import Launching, LaunchingSPMD
from spmd_runs import new_fabric


def net_of_two() -> nn.Module:
    with oracle.seeded(1):
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))


class OfOddState(torch.optim.SGD):
    """Keeps a number, and a tensor without dimensions, for each parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                self.state[parameter] |= {"number": number, "scale": torch.tensor(1.5 + number).to(parameter.device)}
        return super().step(closure)


def restored_under_spmd() -> dict[str, Any]:
    fabric = new_fabric()
    net = net_of_two()
    model, optimizer = fabric.setup(net, OfOddState(net.parameters(), lr=0.1))
    sharded: Any = sharded_of(net)
    own = {"0.weight": lambda: torch.arange(32.0).view(8, 4), "0.bias": lambda: torch.arange(8.0)}
    reduced = {"0.bias": torch.full((8,), 10.0), "1.bias": torch.full((3,), 20.0)}
    sharded.restore_gradients(own, reduced)
    whole = fabric.strategy.backend.full_tensor  # type: ignore[attr-defined]
    held = {name: whole(grad) for name, grad in sharded.accumulated_gradients().reduced.items()}
    refused = refusal(CheckpointMismatchError, lambda: sharded.restore_gradients({}, {"2.bias": torch.zeros(3)}))
    fabric.backward(model(fabric.to_device(torch.ones(4, 4))).sum())
    optimizer.step()
    plain = optimizer.optimizer
    state = sharded.optimizer_state(plain)
    plain.state.clear()
    saved = {name: {key: whole(value) for key, value in of.items()} for name, of in state["state"].items()}
    sharded.load_optimizer_state(plain, {**state, "state": saved})
    again = sharded.optimizer_state(plain)["state"]
    return {
        "held": held,
        "refused": refused,
        "state": {name: (values["number"], float(whole(values["scale"]))) for name, values in again.items()},
    }


def test_spmd_adds_up_what_ranks_held_by_themselves(spmd: LaunchingSPMD) -> None:
    found = spmd.call(4, restored_under_spmd)
    assert found["held"].keys() == {"0.weight", "0.bias", "1.bias"}
    torch.testing.assert_close(found["held"]["0.weight"], torch.arange(32.0).view(8, 4), rtol=0, atol=0)
    torch.testing.assert_close(found["held"]["0.bias"], torch.arange(8.0) + 10, rtol=0, atol=0)
    torch.testing.assert_close(found["held"]["1.bias"], torch.full((3,), 20.0), rtol=0, atol=0)
    assert_says(found["refused"], "gradient of '2.bias'", "not a parameter of Sequential", "load the weights alone")
    for number, name in enumerate(("0.weight", "0.bias", "1.weight", "1.bias")):
        assert found["state"][name] == (number, 1.5 + number)


def forgotten(fabric: L.Fabric) -> dict[str, Any]:
    net = net_of_two()
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    sharded: Any = sharded_of(net)
    x, y = torch.ones(2, 4).to(fabric.device), torch.ones(2, 3).to(fabric.device)
    with fabric.no_backward_sync(model):
        fabric.backward(mse_loss(model(x), y))
    before = _largest(sharded.accumulated_gradients().own.items())
    sharded.forget_unreduced({"0.bias", "1.weight"})
    after = _largest(sharded.accumulated_gradients().own.items())
    refused = refusal(CheckpointMismatchError, lambda: sharded.restore_gradients({"2.bias": net[0].bias.cpu}, {}))
    wrapped = nn.Sequential(XlaFullyShardedDataParallel(nn.Linear(4, 4).to(fabric.device)))
    return {
        "before": before,
        "after": after,
        "refused": refused,
        "wrapped": refusal(ShardingError, lambda: fabric.setup(wrapped)),
    }


def _largest(named: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    return {name: grad.abs().max().item() for name, grad in named}


def classic_ranks() -> dict[str, Any]:
    fabric = L.Fabric(strategy="xla_fsdp", devices=2)
    result: dict[str, Any] = fabric.launch(forgotten)
    return result


def test_a_part_of_what_a_rank_has_not_reduced_is_forgotten(afresh: Launching) -> None:
    """As ``zero_grad()`` of an optimizer does, which holds a part of the parameters."""
    found = afresh.call(2, classic_ranks)
    assert found["before"].keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert all(found["before"].values())
    assert [name for name, largest in found["after"].items() if largest == 0] == ["0.bias", "1.weight"]
    assert_says(found["refused"], "gradient of '2.bias'", "not a parameter", "load the weights alone")
    assert_says(found["wrapped"], "Sequential is already sharded: '0' is an XlaFullyShardedDataParallel", "Remove it")
