"""A proof's references train the conformance suite's net as the suite's oracle does, with which they share no code."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from fsdp_core.proving.runs import STEPS
from fsdp_core.proving.training import Reference, train_in_one_process
from fsdp_core.rehearsal.script import CaughtFit
from fsdp_core.testing.oracle import FP32_TOLERANCE, adamw_groups, global_batches, new_net, train_plain

RANKS = 2


class OfTheSuite(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = new_net()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return adamw_groups(self.net)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("in_turn", [False, True])
def test_references_train_as_the_oracle_of_the_suite(in_turn: bool, accumulate: int) -> None:
    batches = global_batches(STEPS * accumulate)
    _, expected = train_plain(len(batches), adamw_groups, accumulate=accumulate, clip_norm=0.5)
    if in_turn:  # rank after rank, in each micro-batch
        halves = [(x.chunk(RANKS), y.chunk(RANKS)) for x, y in batches]
        batches = [(x[rank], y[rank]) for x, y in halves for rank in range(RANKS)]
    fit = CaughtFit(
        module=OfTheSuite(),
        drawn=batches,
        batches=None,
        datamodule=None,
        trainer_keywords={"callbacks": [], "gradient_clip_val": 0.5},
        seconds_for_batch=0.0,
        location="train.py:1",
    )
    reference = Reference(batches=batches, ranks=RANKS, in_turn=in_turn, accumulate=accumulate, dtype=torch.float32)
    weights = train_in_one_process(fit, reference).steps[-1].weights
    assert len(weights) > 10
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name.removeprefix("net.")], rtol=FP32_TOLERANCE, atol=1e-7)
