"""A fit that is rehearsed on fake tensors has the peak and the collectives of real ranks, and those of the formula."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_core.cli.rehearse import rehearse
from fsdp_core.errors import FSDPError, UnsupportedCapabilityError
from fsdp_core.rehearsal.candidates import Candidate
from fsdp_core.rehearsal.collectives import total_sent
from fsdp_core.rehearsal.fit import RehearsedRun, rehearse_fit
from fsdp_core.rehearsal.forks import call_in_fork
from fsdp_core.rehearsal.large_scale import RankRehearsal, rehearse_rank
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


# -- one rank of many --------------------------------------------------------------------------------------------------


class NetWithRepeatedBlock(Net):
    """Its second block runs twice, and its third not at all."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch)
        for index in (0, 1, 1):
            x = self.blocks[index](x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())


class NetThatCallsItself(Net):
    """Its step calls the module, within the call of the module that a strategy makes of the step."""

    def forward(self, batch: Tensor) -> Tensor:
        return super().training_step(batch, 0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch)
        return loss


class NetWithFrozenBlocks(Net):
    """The backward pass ends before its first block, and goes through its last one."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.embedding, self.blocks[0], self.blocks[2]):
            module.requires_grad_(False)


def rehearse_last_rank(strategy: str, ranks: int, build: type[Net] = Net, **arguments: Any) -> RankRehearsal:
    precision = arguments.pop("precision", None)
    run = RehearsedRun(
        build=build,
        batch=new_batch(),
        batches=4,
        trainer_arguments=arguments,
        strategy=Candidate(strategy=strategy, ranks=ranks).build(),
        ranks=ranks,
        rank=ranks - 1,
        precision=precision,
    )
    return call_in_fork(lambda: rehearse_rank(run))  # DTensor's caches know the rank of a rehearsal before


@pytest.mark.drawn
@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp_native"])
def test_the_bytes_of_a_step_are_those_of_the_formula(strategy: str, ranks: int) -> None:
    rehearsal = rehearse_last_rank(
        strategy, ranks, precision="bf16-mixed", accumulate_grad_batches=2, gradient_clip_val=0.1
    )
    assert rehearsal.unchecked is None
    assert rehearsal.differences == []
    assert {unit.label for unit in rehearsal.units} == {"blocks.0", "blocks.1", "blocks.2", "the root"}
    calls, sent = rehearsal.collectives["reduce-scatter"]
    assert calls == 4  # of each unit, once in two micro-batches
    assert sent == sum(unit.reduced_nbytes // ranks for unit in rehearsal.units) * (ranks - 1)
    assert rehearsal.collectives["all-gather"][0] >= 8
    assert rehearsal.beside[0] == 1  # the norm


@pytest.mark.drawn
@pytest.mark.parametrize("build", [NetWithRepeatedBlock, NetWithFrozenBlocks, NetThatCallsItself])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp_native"])
def test_the_formula_follows_units_that_run_twice_are_frozen_or_call_themselves(
    strategy: str, build: type[Net]
) -> None:
    assert rehearse_last_rank(strategy, 3, build).differences == []


def test_what_only_many_ranks_show() -> None:
    rehearsal = rehearse_last_rank("fsdp2", 512)
    assert rehearsal.padding_ratio > 4  # 63 rows are padded to 512
    assert rehearsal.empty_parameters == rehearsal.parameters
    assert rehearsal.ranks_without_parameters == 512 - 2 * WIDTH
    assert rehearsal.ranks_without_data(4) == 508
    assert rehearsal.checkpoint.nbytes == rehearsal.checkpoint.boxes == 0
    assert rehearsal.checkpoint.files == 2 * 2 * WIDTH + 1


def test_a_rank_plans_what_it_saves_and_loads() -> None:
    rehearsals = [rehearse_last_rank(strategy, 2) for strategy in ("fsdp2", "fsdp_native")]
    numel = rehearsals[0].numel
    for rehearsal in rehearsals:  # half of the weights and of two moments
        assert rehearsal.checkpoint.nbytes == pytest.approx(3 * 4 * numel / 2, rel=0.02)


SCRIPT = """
import sys
import lightning as L, torch

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 6)
    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=4)
    L.Trainer(strategy=sys.argv[1], devices=2, logger=False).fit(Net(), loader)
"""


def run_rehearse(tmp_path: Path, *words: str, strategy: str = "fsdp2") -> Result:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return CliRunner().invoke(rehearse, [*words, str(path), strategy])


def test_the_command_rehearses_a_script(tmp_path: Path) -> None:
    run = run_rehearse(tmp_path, "--ranks", "16", "--json")
    assert run.exit_code == 0, run.output
    (fit,) = json.loads(run.stdout)["fits"]
    assert (fit["strategy"], fit["rank"], fit["differences"]) == ("fsdp2", 15, [])
    assert fit["collectives"]["all-gather"] == {"calls": 1, "sent": 4 * (16 * 8 + 16) * 15 // 16}
    assert fit["ranks_without_parameters"] == 10


def test_the_command_says_what_many_ranks_show(tmp_path: Path) -> None:
    run = run_rehearse(tmp_path, "--ranks", "16", "--rank", "0", "--strategy", "fsdp_native", strategy="auto")
    for part in ("rank 0 of 16", "By formula: the same", "have none of their own", "Grows with"):
        assert part in run.stdout


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["strategy='auto'", "--strategy NAME", "fsdp_native"]),
        (["--strategy", "fsdp3"], ["no strategy named 'fsdp3'", "Installed:"]),
    ],
)
def test_strategies_that_the_command_can_not_rehearse(tmp_path: Path, words: list[str], parts: list[str]) -> None:
    run = run_rehearse(tmp_path, "--ranks", "4", *words, strategy="auto")
    assert isinstance(run.exception, FSDPError)  # whose words the command `fsdp` prints
    for part in parts:
        assert part in str(run.exception)


def test_a_number_of_ranks_that_the_mesh_can_not_divide_is_refused() -> None:
    strategy = Candidate(strategy="fsdp2", options={"data_parallel_replicate_size": 2}, ranks=7).build()
    run = RehearsedRun(build=Net, batch=new_batch(), batches=4, strategy=strategy, ranks=7)
    with pytest.raises(UnsupportedCapabilityError, match="does not divide 7 ranks"):
        rehearse_rank(run)
