"""Each backend trains as one process that plays its ranks in turn, and a fault that is seeded into one is named."""

from __future__ import annotations

import importlib
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_core.plugins import registry
from fsdp_core.proving.proof import BATCHES, prove_fit
from fsdp_core.rehearsal.script import CaughtFit

STRATEGIES = ("fsdp2", "fsdp_native")
WIDTH = 7  # no multiple of the number of ranks: shards are padded


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.5)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return output


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 20)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def new_fit(strategy: object = "auto") -> CaughtFit:
    torch.manual_seed(0)
    return CaughtFit(
        module=Net(),
        drawn=[torch.randint(0, 20, (2, 5)) for _ in range(BATCHES)],
        batches=None,
        datamodule=None,
        trainer_keywords={"callbacks": [], "strategy": strategy, "gradient_clip_val": 0.5},
        seconds_for_batch=0.0,
        location="train.py:1",
    )


#: By name: options, with the Trainer's accumulation.
OPTIONS: dict[str, dict[str, Any]] = {
    "recomputed and accumulated": {"activation_checkpointing_policy": "every_1", "accumulate_grad_batches": 2},
    "none": {},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backend_is_proven(strategy: str, options: str) -> None:
    proof = prove_fit(new_fit(), only=strategy, options=OPTIONS[options])
    assert [row.verdict for row in proof.rows] == ["same", "same"], [row.words for row in proof.rows]


def seeded(strategy: str, fault: str) -> Any:
    """A strategy with a fault."""
    module, _, name = str(registry.describe(strategy).trainer).partition(":")
    sound: Any = getattr(importlib.import_module(module), name)

    class Seeded(sound):  # type: ignore[misc]
        def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            loses = fault == "a rank's gradients are lost" and dist.get_rank() == 1
            return super().backward(closure_loss * (0 if loses else 1), *args, **kwargs)

        def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            output = super().optimizer_step(optimizer, *args, **kwargs)
            if fault == "a rank forgets momentum" and dist.get_rank() == 1:
                for state in optimizer.state.values():
                    state["exp_avg"].zero_()
            return output

    return Seeded()


#: By fault: what is said of it.
FAULTS = {
    "a rank forgets momentum": "the optimizer loses what it keeps between steps",
    "a rank's gradients are lost": "ranks have shares of 0.5, 0 in it",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fault_of_a_backend_is_named(strategy: str, fault: str) -> None:
    references, row = prove_fit(new_fit(seeded(strategy, fault)), only="script", options={}).rows
    assert (references.verdict, row.verdict) == ("same", "differs")
    assert FAULTS[fault] in row.words
