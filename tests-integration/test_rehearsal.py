"""A fit that is rehearsed on fake tensors has the peak, the parts of it, and the collectives that real ranks have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_core.rehearsal.candidates import Candidate
from fsdp_core.rehearsal.collectives import total_sent
from fsdp_core.rehearsal.fit import RehearsedRun, rehearse_fit
from fsdp_core.rehearsal.memory import MemoryMode, StepRecord
from fsdp_core.rehearsal.step_marks import StepMarks
from fsdp_core.testing import RankPool
from fsdp_core.testing.training import new_trainer

RANKS = 2
#: A rehearsal has no tensors of a few elements by which ranks agree; a tenth of a percent is the page's promise.
PEAK_TOLERANCE = 1e-3
WIDTH = 63  # no multiple of the number of ranks: shards are padded

#: By name: the strategy with its options, and arguments of the Trainer.
CASES: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "fsdp2": ("fsdp2", {}, {}),
    "fsdp2, gathered until the backward pass": ("fsdp2", {"reshard_after_forward": False}, {}),
    "fsdp2, recomputed, in bf16": (
        "fsdp2",
        {"activation_checkpointing_policy": "every_1"},
        {"precision": "bf16-mixed"},
    ),
    "fsdp2, accumulated and clipped": ("fsdp2", {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "fsdp2, one replica a rank": ("fsdp2", {"data_parallel_replicate_size": 2}, {}),
    "fsdp_native": ("fsdp_native", {}, {}),
    "fsdp_native, gathered until the backward pass": ("fsdp_native", {"sharding_strategy": "SHARD_GRAD_OP"}, {}),
    "fsdp_native, recomputed, in bf16": (
        "fsdp_native",
        {"activation_checkpointing_policy": "every_1"},
        {"precision": "bf16-mixed"},
    ),
    "fsdp_native, accumulated and clipped": (
        "fsdp_native",
        {},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "ddp": ("ddp", {}, {}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return output


class Net(pl.LightningModule):
    """Embeddings, blocks and a loss over the tokens that a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 50)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        selected = batch > 9
        return F.cross_entropy(self.head(x)[selected], batch[selected])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def new_batch() -> Tensor:
    return torch.arange(60).remainder(50).view(4, 15)


class Batches:
    def __init__(self, count: int, memory: MemoryMode) -> None:
        self.count, self.memory = count, memory

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            batch = new_batch()
            self.memory.take([batch], "batch")
            yield batch


def trained_for_real(name: str) -> StepRecord:
    """The second step of a run on this rank, with the same modes."""
    strategy, options, arguments = CASES[name]
    memory = MemoryMode(reduces_in_a_copy=True)
    marks = StepMarks(memory)
    trainer = new_trainer(".", strategy, RANKS, options or None, callbacks=[marks], **arguments)
    with memory:
        trainer.fit(Net(), Batches(4, memory))
    return memory.step


def facts(step: StepRecord) -> tuple[int, dict[str, int], str, dict[str, tuple[int, int]]]:
    peak = step.peak("cpu")
    # ranks also compare some sums, which imagined ranks have no values of
    large = [collective for collective in step.collectives if collective.nbytes > 1000]
    return peak.nbytes, dict(peak.by_content), peak.phase, dict(total_sent(large))


def all_for_real() -> dict[str, Any]:
    return {name: facts(trained_for_real(name)) for name in CASES}


@pytest.fixture(scope="module")
def of_real_ranks() -> Iterator[dict[str, Any]]:
    with RankPool() as ranks:
        yield ranks.run(RANKS, all_for_real, timeout=200)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_rehearsal_has_the_peak_and_the_collectives_of_real_ranks(name: str, of_real_ranks: dict[str, Any]) -> None:
    strategy, options, arguments = CASES[name]
    candidate = Candidate(strategy=strategy, options=options, ranks=RANKS)
    rehearsal = rehearse_fit(
        RehearsedRun(
            build=Net,
            batch=new_batch(),
            batches=4,
            trainer_arguments={key: value for key, value in arguments.items() if key != "precision"},
            strategy=candidate.build(),
            ranks=RANKS,
            precision=arguments.get("precision"),
        )
    )
    peak, contents, phase, collectives = facts(rehearsal.step)
    real_peak, real_contents, real_phase, real_collectives = of_real_ranks[name]
    assert peak == pytest.approx(real_peak, rel=PEAK_TOLERANCE)
    assert phase == real_phase
    assert collectives == real_collectives
    for content in {*contents, *real_contents}:
        difference = contents.get(content, 0) - real_contents.get(content, 0)
        assert abs(difference) <= PEAK_TOLERANCE * real_peak, content
    assert not rehearsal.assumptions  # the mask follows from the batch
