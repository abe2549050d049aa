"""Modules that can't be sharded: refused before training, with an error that says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_core.errors import ShardingError
from fsdp_core.sharding.units.wrap_policy import describe_policy
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import Block
from fsdp_core.testing.refusals import assert_says, refusal, was_refused
from fsdp_core.testing.state import full_state, sharded_by
from fsdp_core.testing.suite.base_class import Clauses, on_ranks, with_options
from fsdp_core.testing.suite.numerics.parity import options_id
from fsdp_core.testing.suite.refusals.bad_options import set_up
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer, whole_batches

__all__ = ["BadModulesSuite"]


def _refuse_changed_options(strategy: str, tmp: str, options: dict[str, Any]) -> str:
    lit = Lit()
    new_trainer(tmp, strategy).fit(lit, loader(1, 1))
    lit.losses.clear()
    return refusal(ShardingError, lambda: set_up(strategy, tmp, "trainer", lit, options))


def _two_dtypes(strategy: str) -> tuple[str, bool]:
    """The error for a unit with parameters of two dtypes, or whether each parameter has kept its dtype."""
    fabric = new_fabric(strategy)
    net = oracle.new_net()
    blocks: Any = net.blocks
    blocks[0].up.to(torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in net.named_parameters()}
    state_dtypes: dict[str, torch.dtype] = {}

    def set_up_and_record_dtypes() -> None:
        fabric.setup(net)
        state = sharded_by(fabric.strategy).model_state()
        state_dtypes.update((name, state[name].dtype) for name in dtypes)

    return refusal(ShardingError, set_up_and_record_dtypes), state_dtypes == dtypes


class OverIntegers(nn.Module):
    """Trained low-rank layers beside a frozen weight that is stored as bytes, as in adapters of quantised models."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(oracle.FEATURES * 7, dtype=torch.uint8).view(7, oracle.FEATURES)
        self.base = nn.Parameter(values * 5 + 40, requires_grad=False)
        self.down, self.up = nn.Linear(oracle.FEATURES, 2, bias=False), nn.Linear(2, 7, bias=False)
        self.out = nn.Linear(7, oracle.FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        assert self.base.dtype == torch.uint8
        weight = (self.base.to(x.dtype) - 128) / 128
        output: Tensor = self.out(x @ weight.T + self.up(self.down(x)))
        return output


def over_integers() -> nn.Module:
    """Two :class:`OverIntegers` layers in a row, always with the same weights."""
    with oracle.seeded(3):
        return nn.Sequential(OverIntegers(), OverIntegers())


def steps_over_integers(
    model: nn.Module, optimizer: Any, batches: Any, backward: Callable[[Tensor], Any]
) -> list[float]:
    """Train a step on each batch, and return the losses."""
    losses = []
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(loss.item())
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_over_integers(strategy: str, precision: str | None = None) -> tuple[str, list[float], dict[str, Tensor]]:
    """Train three steps on whole batches; return the refusal if there is one, the losses, and the state."""
    fabric = new_fabric(strategy, precision=precision)
    net = over_integers()
    losses: list[float] = []

    def train() -> None:
        trained = [p for p in net.parameters() if p.requires_grad]
        model, optimizer = fabric.setup(net, torch.optim.SGD(trained, lr=0.1))
        losses.extend(steps_over_integers(model, optimizer, whole_batches(fabric, 3), fabric.backward))

    message = refusal(ShardingError, train)
    return message, losses, full_state(fabric.strategy) if losses else {}


class BadModulesSuite(Clauses):
    """Each error says what was requested, why it is impossible, and what to type next."""

    @pytest.mark.parametrize(
        "options",
        [
            with_options({"cpu_offload": True}),
            with_options({"auto_wrap_policy": None}),
            with_options({"activation_checkpointing_policy": {Block}}),
        ],
        ids=options_id,
    )
    def test_module_sharded_on_other_terms(self, ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
        """A sharded module must refuse other options, with an error that names the option and both values."""
        (message,) = ranks.run(1, _refuse_changed_options, self.strategy, str(tmp_path), options)
        ((name, value),) = options.items()
        described_value = value if isinstance(value, bool) else describe_policy(value)
        assert_says(message, f"{name} ", f", now {described_value!r}", "Use the same options", "build the module again")

    def test_two_dtypes_in_a_unit(self, ranks: Ranks, tmp_path: Path) -> None:
        """A unit with parameters of two dtypes must be refused, or keep the dtype of each."""
        for message, are_same in ranks.run(2, _two_dtypes, self.strategy):
            if not are_same:
                assert_says(message, "torch.bfloat16", "torch.float32", "one dtype")

    @on_ranks("processes")  # XLA would compile the steps, and refuses other dtypes than fp32
    def test_frozen_integers_keep_their_values(self, ranks: Ranks) -> None:
        """Frozen integer parameters must keep their bytes and dtype while others are trained, or be refused."""
        net = over_integers()
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        want = steps_over_integers(net, optimizer, oracle.global_batches(3), Tensor.backward)
        for message, losses, state in ranks.run(2, train_over_integers, self.strategy):
            if was_refused(message):
                assert_says(message, "'0.base'", "torch.uint8", "Use strategy=")
                continue
            assert losses == pytest.approx(want, abs=oracle.FP32_TOLERANCE), message
            for name, tensor in net.state_dict().items():
                tolerance = 0.0 if tensor.dtype == torch.uint8 else oracle.FP32_TOLERANCE
                torch.testing.assert_close(state[name], tensor, atol=tolerance, rtol=tolerance)
