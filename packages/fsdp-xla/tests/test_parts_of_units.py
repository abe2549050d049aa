"""Modules in units of ``xla_fsdp`` have parameters, and a step may freeze them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.testing import oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import new_fabric, own_share
from fsdp_xla.testing import ThreadRanks


def freeze_parts(
    net: oracle.Net, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, backward: Callable[[Tensor], Any]
) -> None:
    """A step in one of whose two calls a part of a block, and the tied pair at the root, are frozen."""
    parts = (net.inp, net.blocks[1].down)
    optimizer.zero_grad()
    for part in parts:
        part.requires_grad_(False)
    first = mse_loss(model(x), y)
    for part in parts:
        for parameter in part.parameters():
            parameter.requires_grad = True
    backward(first + mse_loss(model(x.flip(1)), y))
    optimizer.step()


def frozen_in_parts() -> tuple[dict[str, Tensor], list[str], list[bool]]:
    fabric = new_fabric("xla_fsdp", 2)
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    for batch in oracle.global_batches(3):
        freeze_parts(net, model, optimizer, *own_share(fabric, batch), fabric.backward)
    names = [name for part in (net.inp, net.out, net.blocks[1].down) for name, _ in part.named_parameters()]
    held = list(net.parameters())
    return full_state(fabric.strategy), names, [any(p is one for one in held) for p in net.inp.parameters()]


def frozen_of_flat() -> list[str]:
    fabric = new_fabric("xla_fsdp", 2, {"flatten_parameters": True})
    net = oracle.new_net()
    net.frozen.requires_grad_(True)
    fabric.setup(net, oracle.momentum(net))
    parts = [net.inp, net.blocks[1].down, net.blocks]
    told = [refusal(UnsupportedCapabilityError, partial(part.requires_grad_, False)) for part in parts[:2]]
    parts[2].requires_grad_(False)  # units
    return [*told, str(any(parameter.requires_grad for parameter in parts[2].parameters()))]


def test_parts_of_flattened_units_are_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with ThreadRanks() as ranks:
        for *messages, is_any_trained in ranks.run(2, frozen_of_flat):
            for name, message in zip(("inp", "down"), messages, strict=True):
                assert_says(message, f"requires_grad_() of '{name}' would", "Leave flatten_parameters out")
            assert is_any_trained == "False"


def test_parts_of_units_are_frozen_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    net = oracle.new_net()
    optimizer = oracle.momentum(net)
    for x, y in oracle.global_batches(3):
        freeze_parts(net, net, optimizer, x, y, torch.autograd.backward)
    with ThreadRanks() as ranks:
        for state, names, are_shards in ranks.run(2, frozen_in_parts):
            torch.testing.assert_close(state, dict(net.state_dict()), atol=oracle.FP32_TOLERANCE, rtol=0)
            assert names == ["weight", "weight", "weight", "bias"]
            assert are_shards == [True]
