"""A proof: batches that are joined, runs that are compared, causes that are named, and the command."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fsdp_core
from fsdp_core.cli.prove import prove
from fsdp_core.errors import ShardingError
from fsdp_core.proving.batches import batches_of_one_size, join_batches
from fsdp_core.proving.proof import BATCHES, Row, prove_fit
from fsdp_core.proving.rows_of_ranks import can_read_as_ranks, read_the_same
from fsdp_core.proving.runs import TrainedRun, TrainedStep, compare_runs
from fsdp_core.rehearsal.forks import Failed, call_in_fork, call_in_forks
from fsdp_core.rehearsal.script import CaughtFit
from fsdp_core.testing.refusals import assert_says

# -- batches -----------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Tensor
    name: str


def test_batches_are_joined_by_rows() -> None:
    first = {"x": torch.ones(2, 3), "names": ["a", "b"], "scale": 2.0, "pair": (torch.zeros(2), None)}
    second = {"x": torch.zeros(2, 3), "names": ["c", "d"], "scale": 2.0, "pair": (torch.ones(2), None)}
    joined = join_batches([first, second])
    assert torch.equal(joined["x"], torch.cat([torch.ones(2, 3), torch.zeros(2, 3)]))
    assert joined["names"] == ["a", "b", "c", "d"]
    assert joined["scale"] == 2.0
    assert joined["pair"][0].tolist() == [0.0, 0.0, 1.0, 1.0]
    named = join_batches([Pair(torch.ones(1), "n"), Pair(torch.zeros(1), "n")])
    assert isinstance(named, Pair)
    assert named.x.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), "(2, 3) and (2, 4)"),
        ({"x": torch.ones(2)}, {"y": torch.ones(2)}, "different keys"),
        ({"epoch": 1}, {"epoch": 2}, "1 differs between them"),
        (torch.tensor(1), torch.tensor(2), "without dimensions"),
        ([torch.ones(2)], [torch.ones(2)] * 2, "different lengths"),
        (object(), object(), "nothing is known of the rows of object"),
        ([torch.ones(2)], (torch.ones(2),), "one has list"),
    ],
)
def test_batches_that_can_not_be_joined(first: Any, second: Any, why: str) -> None:
    with pytest.raises(ShardingError) as raised:
        join_batches([first, second])
    assert_says(str(raised.value), why, "Give the script batches")


def test_smaller_batches_are_left_out_and_others_repeated() -> None:
    drawn = [torch.zeros(4, 1), torch.ones(4, 1), torch.ones(2, 1)]
    assert [int(batch[0]) for batch in batches_of_one_size(drawn, 5)] == [0, 1, 0, 1, 0]


# -- comparisons -------------------------------------------------------------------------------------------------------


def new_run(gradient: Mapping[str, Any], weight: Mapping[str, Any] | None = None, **facts: Any) -> TrainedRun:
    gradients = {name: torch.tensor(values, dtype=torch.float64) for name, values in gradient.items()}
    weights = {name: torch.tensor(values, dtype=torch.float64) for name, values in (weight or gradient).items()}
    return TrainedRun(steps=[TrainedStep(gradients=gradients, weights=weights)], **facts)


def test_gradients_are_compared_before_weights() -> None:
    right = new_run({"a": [1.0, 2.0], "b": [1.0]})
    comparison = compare_runs(right, new_run({"a": [1.0, 2.0], "b": [1.1]}, {"a": [5.0, 2.0], "b": [1.0]}))
    assert comparison.difference is not None
    assert comparison.difference.words == "gradient of b in step 1 by 1.0e-01 of it"
    assert compare_runs(right, new_run({"a": [1.0, 2.0 + 1e-14], "b": [1.0]})).agrees


def test_what_adam_makes_of_rounding_is_not_compared() -> None:
    weights = {"bias": [0.1, 0.5], "a": [1.0, 1.0]}
    right = new_run({"bias": [1e-18, 0.3], "a": [1.0, 1.0]}, weights)
    other = new_run({"bias": [-1e-18, 0.3], "a": [1.0, 1.0]}, {**weights, "bias": [-0.1, 0.5]})
    assert compare_runs(right, other).agrees
    wrong = compare_runs(right, new_run({"bias": [1e-18, 0.3], "a": [1.0, 1.0]}, {**weights, "bias": [0.1, 0.4]}))
    assert wrong.difference is not None
    assert wrong.difference.of == "weight"


def test_a_gradient_that_one_run_lacks_is_zero() -> None:
    weights = {"a": [1.0], "b": [1.0]}
    right = new_run({"a": [1.0]}, weights)
    assert compare_runs(right, new_run({"a": [1.0], "b": [0.0]}, weights)).agrees
    assert compare_runs(right, new_run({"a": [1.0], "b": [0.5]}, weights)).difference is not None


@pytest.mark.parametrize(
    ("right", "other", "perturbed", "why"),
    [
        ({"a": [float("nan")]}, {"a": [1.0]}, None, "not finite"),
        ({"a": [1.0]}, {"a": [1.1]}, {"a": [1.5]}, "change in their 13th digit"),
    ],
)
def test_what_can_not_be_told(right: Any, other: Any, perturbed: Any, why: str) -> None:
    base = [] if perturbed is None else [(new_run(right), new_run(perturbed))]
    assert why in compare_runs(new_run(right), new_run(other), base).unclear


def test_half_precision_can_not_be_told() -> None:
    right = new_run({"a": [1.0]}, coarsest=torch.bfloat16)
    assert "bfloat16" in compare_runs(right, new_run({"a": [1.01]})).unclear
    assert compare_runs(right, new_run({"a": [1.0]})).agrees


# -- modules -----------------------------------------------------------------------------------------------------------


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
        self.register_buffer("center", torch.zeros(4))
        self.calls = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(self.net(x), y)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


class CountsItsOwn(Net):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, ignore_index=3)


class CountsAll(Net):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return fsdp_core.token_mean(F.cross_entropy(logits, y, ignore_index=3, reduction="sum"), y != 3)


class DividesByAll(Net):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        total = F.cross_entropy(logits, y, ignore_index=3, reduction="sum")
        everywhere: Any = self.all_gather((y != 3).sum())
        return total / everywhere.sum()


class Sums(Net):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, reduction="sum")


class Centers(Net):
    center: Tensor

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(logits - self.center, y)
        self.center = 0.9 * self.center + 0.1 * logits.detach().mean(0)
        return loss


class Remembers(Net):
    center: Tensor

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        self.center = self.center + y.bincount(minlength=4)
        return super().loss(logits, y)


class AsksForItsRank(Net):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().loss(logits, y) * (1 if self.global_rank == 0 else 2)


class WhitensRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class ComparesRows(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), WhitensRows(), nn.GELU(), nn.Linear(8, 4))


class TakesTheHardest(Net):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, reduction="none").max()


class CountsRows(Net):
    """Counts the rows that it has seen: each rank its own."""

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        weight = 1 + self.calls
        self.calls += len(y)
        return super().loss(logits, y) * weight


class CountsRowsElsewhere(Net):
    """Counts them where no proof looks; and where one does, which matters to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Any = {0}

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().loss(logits * self.count(y), y)

    def count(self, y: Tensor) -> int:
        self.calls += len(y)
        count = len(self.counted)
        self.counted |= set(range(count, count + len(y)))
        return count


class WeighsByWhatItCounts(CountsRowsElsewhere):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return Net.loss(self, logits, y) * self.count(y)


class ScalesItsRate(Net):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.param_groups[0]["lr"] = 1e-3 * len(y)
        return super().loss(logits, y)


class ClampsGradients(Net):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class DrawsNoise(Net):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().loss(logits + torch.randn_like(logits), y)


class AsksForSums(Net):
    """Right, by a sum over ranks, which one process can't play."""

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        total = F.cross_entropy(logits, y, ignore_index=3, reduction="sum")
        count = (y != 3).sum()
        world_size: int = self.trainer.world_size
        everywhere: Any = self.all_gather(count)
        return total * world_size / everywhere.sum()


class Drops(Net):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().loss(F.dropout(logits, 0.5, self.training), y)


class DropPath(nn.Module):
    """As each library writes it for itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty(len(x), 1).bernoulli_(0.5) if self.training else x


class DropsBranches(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(DropPath())


class WarmsUp(Net):
    """Counts its own steps, and reads the number of ranks and of the batch."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.calls += 1
        return super().training_step(batch, batch_idx) * self.calls * (1 + batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.world_size, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
                "monitor": "validation",
            },
        }


class Late(Net):
    """Is built in the hook for it, and clipped."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)

    def configure_model(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


class StepsByItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def new_fit(module: Callable[[], pl.LightningModule], **given: Any) -> CaughtFit:
    torch.manual_seed(0)
    net = module()
    drawn = [(torch.randn(4, 6), torch.randint(0, 4, (4,))) for _ in range(BATCHES)]
    return CaughtFit(
        module=net,
        drawn=drawn,
        batches=None,
        datamodule=None,
        trainer_keywords={"callbacks": [], **given},
        seconds_for_batch=0.0,
        location="train.py:1",
    )


def references(module: Callable[[], pl.LightningModule], **given: Any) -> Row:
    return prove_fit(new_fit(module, **given), only="references").rows[0]


#: By cause: a module that is wrong, and what is said of it.
WRONG: dict[str, tuple[Callable[[], pl.LightningModule], str]] = {
    "batchnorm": (Normalised, "net.1"),
    "count": (CountsItsOwn, "are averaged with 0.5 each"),
    "sum": (Sums, "share of 1 in the whole batch"),
    "buffer": (Centers, "in step 2"),
    "rank": (AsksForItsRank, "without self.global_rank"),
    "rows": (ComparesRows, "net.1"),
    "loss": (TakesTheHardest, "no mean over the rows"),
    "attribute": (CountsRows, "self.calls; with those of the whole batch, step 2 is the same"),
    "settings": (ScalesItsRate, "lr of parameter group 0 is 0.004 on ranks, and 0.008 with the whole batch"),
    "backward": (ClampsGradients, "hooks of parameters"),
    "unknown": (CountsRowsElsewhere, "none of the known causes"),
}


@pytest.mark.parametrize("cause", WRONG)
def test_what_is_wrong_on_ranks_is_named_with_its_cause(cause: str) -> None:
    module, words = WRONG[cause]
    row = references(module)
    assert (row.verdict, row.cause) == ("differs", cause), row.words
    assert words in row.words
    assert row.remedy


def test_a_loss_that_only_weighs_more_is_no_sum() -> None:
    row = references(WeighsByWhatItCounts)
    assert (row.verdict, row.cause) == ("differs", "unknown"), row.words


@pytest.mark.parametrize(("divides", "verdict"), [(True, "same"), (False, "differs")])
def test_what_ranks_read(divides: bool, verdict: str) -> None:
    rows = TensorDataset(torch.arange(48).reshape(24, 2), torch.zeros(24, dtype=torch.long))
    fit = replace(new_fit(Net, use_distributed_sampler=divides), loader=DataLoader(rows, batch_size=4))
    row = prove_fit(fit, only="references").rows[1]
    assert (row.what, row.verdict) == ("rows that a rank reads", verdict), row.words
    assert row.cause == ("" if divides else "data")


def test_rows_that_can_not_be_told_apart() -> None:
    assert read_the_same([["a"], ["a"]]) is None
    rows = TensorDataset(torch.zeros(8))
    sampler = DistributedSampler[Any](rows, 2, 0)
    assert not can_read_as_ranks(replace(new_fit(Net), loader=DataLoader(rows, sampler=sampler)))
    assert can_read_as_ranks(replace(new_fit(Net), loader=DataLoader(rows)))
    assert not can_read_as_ranks(new_fit(Net))


def test_a_buffer_that_ranks_would_save_differently() -> None:
    row = references(Remembers)
    assert (row.verdict, row.words) == ("differs", "buffer center differs between ranks after step 1")


@pytest.mark.parametrize("module", [WarmsUp, Net, Drops, DropsBranches, Late])
def test_what_is_right_is_proven(module: Callable[[], pl.LightningModule]) -> None:
    row = references(module, gradient_clip_val=0.1)
    assert row.verdict == "same", row.words


def test_random_numbers_of_a_step_can_not_be_told() -> None:
    row = references(DrawsNoise)
    assert row.verdict == "can't tell"
    assert_says(row.words, "randn_like", "test_proving.py:")


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [AsksForSums, CountsAll, StepsByItself, DrawsNoise])
def test_a_strategy_is_compared_with_what_can_be_played(module: Callable[[], pl.LightningModule]) -> None:
    proof = prove_fit(new_fit(module), only="ddp", options={})
    assert proof.rows[1].verdict == "same", proof.rows[1].words
    assert not proof.differences()
    assert proof.rows[1].with_what == ("ranks in turn" if module is DrawsNoise else "whole batch")
    assert (proof.rows[0].verdict == "same") == (module is not DrawsNoise)


def test_a_sum_that_is_divided_by_the_count_of_all_ranks() -> None:
    row = prove_fit(new_fit(DividesByAll), only="ddp", options={}).rows[1]
    assert (row.verdict, row.cause, row.with_what) == ("differs", "divided", "whole batch"), row.words
    assert_says(row.words, "gradients are 0.5 of those of the whole batch")


def test_only_what_is_installed_is_tried() -> None:
    with pytest.raises(ShardingError) as raised:
        prove_fit(new_fit(Net), only="zero")
    assert_says(str(raised.value), "--only zero names nothing", "references, ddp")


def test_processes_that_fail_say_so() -> None:
    def fail() -> int:
        raise ShardingError("too small\nWrite more")

    outcomes = call_in_forks([lambda: 1, fail], 60)
    assert outcomes == [1, Failed(words=outcomes[1].words, is_refusal=True)]  # type: ignore[union-attr]
    assert_says(outcomes[1].words, "ShardingError: too small", "test_proving.py:")  # type: ignore[union-attr]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, processes can't ask to end with their parent")
def test_processes_end_with_the_one_that_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    reading, writing = os.pipe()  # whose writing end each process has

    def wait_long() -> None:
        (tmp_path / "new").write_text(str(os.getppid()))
        (tmp_path / "new").rename(pids)
        time.sleep(60)

    def kill_its_parent() -> None:
        while not pids.exists():
            time.sleep(0.01)
        os.kill(int(pids.read_text()), signal.SIGKILL)

    killed, _ = call_in_forks([lambda: call_in_fork(wait_long), kill_its_parent], 60)
    os.close(writing)
    assert killed == Failed(words="the process ended by SIGKILL")
    assert select.select([reading], [], [], 30)[0], "a process is still there"
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_processes_end_with_an_interrupted_call() -> None:
    def interrupt() -> None:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(300)

    others = {child.pid for child in multiprocessing.active_children()}  # of other tests
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            call_in_fork(interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert {child.pid for child in multiprocessing.active_children()} <= others


# -- the command -------------------------------------------------------------------------------------------------------

SCRIPT = """
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    def training_step(self, batch, batch_idx):
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

if __name__ == "__main__":
    loader = DataLoader(torch.randn(30, 6), batch_size=4)
    L.Trainer(max_epochs=3, logger=False).fit(Net(), loader)
"""


def run_prove(*words: str, status: int) -> str:
    command = [sys.executable, "-m", "fsdp_core", "prove", *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == status, run.stdout + run.stderr
    return run.stdout


@pytest.mark.everything
def test_prove_names_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(dedent(SCRIPT))
    proof = json.loads(
        run_prove("--json", "--only", "ddp", "--option", "accumulate_grad_batches=2", str(path), status=3)
    )
    (fit,) = proof["fits"]
    assert [(row["verdict"], row["cause"]) for row in fit["rows"]] == [("differs", "batchnorm"), ("same", "")]
    assert fit["rows"][1]["options"] == {"accumulate_grad_batches": 2}
    output = run_prove("--only", "references", "--accept", "batchnorm", str(path), status=0)
    assert_says(output, "accepted", "net.1", "Proven")


@pytest.mark.parametrize("words", [("--option", "a=1"), ("--only", "ddp", "--option", "a"), ("--accept", "luck")])
def test_wrong_usage(words: tuple[str, ...]) -> None:
    assert CliRunner().invoke(prove, [*words, "train.py"]).exit_code == 2
