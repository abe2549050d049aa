"""Frozen integers under fsdp2: sharded as bytes, never cast, whatever the precision; and packed weights refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.errors import ShardingError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import HALF_TOLERANCE
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.suite.refusals.bad_modules import (
    OverIntegers,
    over_integers,
    steps_over_integers,
    train_over_integers,
)
from fsdp_core.testing.training import new_fabric
from fsdp_fsdp2.torch_private import parameter_groups


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_integers_are_not_cast(ranks: RankPool, precision: str) -> None:
    net = over_integers()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    want = steps_over_integers(net, optimizer, oracle.global_batches(3), Tensor.backward)
    for told, losses, state in ranks.run(2, train_over_integers, "fsdp2", precision):
        assert losses == pytest.approx(want, abs=HALF_TOLERANCE), told
        for name in ("0.base", "1.base"):
            assert torch.equal(state[name], net.state_dict()[name])


def held_with(old_torch: bool) -> tuple[bool, list[float]]:
    """Whether integers are sharded under bf16-mixed, and the losses."""
    looks = nn.Module.forward if old_torch else parameter_groups.FSDPParam.init_dtype_attrs  # the first reads no dtype
    with mock.patch.object(parameter_groups, "FSDPParam", mock.Mock(init_dtype_attrs=looks)):
        fabric = new_fabric("fsdp2", precision="bf16-mixed")
        with fabric.init_module(empty_init=True):
            net = over_integers()
        model = fabric.setup_module(net)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = fabric.setup_optimizers(torch.optim.SGD(trained, lr=0.1))
    batches = [fabric.to_device(batch) for batch in oracle.global_batches(2)]
    losses = steps_over_integers(model, optimizer, batches, fabric.backward)
    first: Any = net[0]  # type: ignore[index]
    return isinstance(first.base, DTensor), losses


def test_a_torch_that_would_cast_them_gets_none(ranks: RankPool) -> None:
    """They are whole on every rank then; built on meta in both cases."""
    ((is_sharded, losses), _), ((is_whole, of_whole), _) = (ranks.run(2, held_with, old) for old in (False, True))
    assert is_sharded == (torch.__version__ >= "2.13")
    assert not is_whole
    assert losses == of_whole


class Params4bit(nn.Parameter):
    """As the class of bitsandbytes."""


def packed(kind: str) -> nn.Module:
    net = OverIntegers()
    bits = torch.zeros(21, 1, dtype=torch.uint8)
    if kind == "of a class":
        net.base = Params4bit(bits, requires_grad=False)
    elif kind == "as a buffer":
        del net.base
        net.register_buffer("base", bits.as_subclass(type("NF4", (Tensor,), {})))
    else:
        dtype = {"as floats": torch.bfloat16, "in 8 bits": torch.float8_e4m3fn}.get(kind, torch.uint8)
        net.base = nn.Parameter(bits.view(torch.uint8).to(dtype), requires_grad=False)
        setattr(net.base, "scale" if kind == "in 8 bits" else "quant_state", torch.ones(1))
    return net


#: How weights are packed, and what is said.
PACKED = {
    "of a class": "'base' is of the class Params4bit",
    "as a buffer": "'base' is of the class NF4",
    "in bytes": "'base', in torch.uint8, has an attribute 'quant_state'",
    "as floats": "'base', in torch.bfloat16, has an attribute 'quant_state'",
    "in 8 bits": "'base', in torch.float8_e4m3fn, has an attribute 'scale'",
}


def refused() -> dict[str, str]:
    fabric = new_fabric("fsdp2", 1)
    return {kind: refusal(ShardingError, lambda kind=kind: fabric.setup(packed(kind))) for kind in PACKED}  # type: ignore[misc]


def test_packed_weights_are_refused(ranks: RankPool) -> None:
    (told,) = ranks.run(1, refused)
    for kind, words in PACKED.items():
        assert_says(told[kind], words, "precision='bf16-true'", "devices=1")
