"""Loops under Fabric are rehearsed as the same steps under a Trainer are."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from fsdp_core.errors import ShardingError
from fsdp_core.rehearsal.candidates import Candidate, candidate_of
from fsdp_core.rehearsal.fabric_loop import CaughtLoop
from fsdp_core.rehearsal.large_scale import RankRehearsal, rehearse_rank_of_loop
from fsdp_core.rehearsal.planning import Outcome, rehearse_candidate
from fsdp_core.rehearsal.script import CaughtFit, run_script

SCRIPT = """
import lightning as L, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def main(fabric):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    if "late" in sys.argv:
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    else:
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    data = TensorDataset(torch.ones(64, 16), torch.arange(64))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8 // fabric.world_size))
    for number, (x, y) in enumerate(loader):
        accumulates = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            loss = model(x).square().mean() / 2
            fabric.backward(loss)
        if not accumulates:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
        if "fails" in sys.argv:
            raise ValueError("diverged")
        if "few" in sys.argv and number == 2:
            break
        fabric.log("loss", loss.item())

if __name__ == "__main__":
    fabric = L.Fabric(strategy="fsdp2", devices=2, loggers=[L.fabric.loggers.CSVLogger("logs")])
    fabric.launch(main)
"""

ADVERSARIES = """
import lightning as L, torch
from torch import nn

fabric = L.Fabric()
fabric.launch()
maker, judge = nn.Linear(8, 8), nn.Linear(8, 1)
maker, of_maker = fabric.setup(maker, torch.optim.Adam(maker.parameters()))
judge, of_judge = fabric.setup(judge, torch.optim.Adam(judge.parameters()))
for _ in range(5):
    made = maker(torch.randn(4, 8))
    of_maker.zero_grad()
    fabric.backward(judge(made).mean())
    of_maker.step()
    of_judge.zero_grad()
    fabric.backward(judge(made.detach()).mean() - judge(torch.randn(4, 8)).mean())
    of_judge.step()
"""


class Net(pl.LightningModule):
    """The same model and steps."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def rehearse_script(folder: Path, source: str, arguments: list[str], *candidates: Candidate) -> list[Outcome]:
    path = folder / "train.py"
    path.write_text(dedent(source))
    outcomes: list[Outcome] = []

    def rehearse(loop: CaughtFit | CaughtLoop) -> None:
        assert isinstance(loop, CaughtLoop)
        outcomes.extend(rehearse_candidate(loop, candidate) for candidate in candidates)

    run_script(str(path), arguments, rehearse, ranks=2)
    return outcomes


STRATEGIES = ("auto", "ddp", "fsdp2", "fsdp_native")


def test_a_loop_is_as_the_same_steps_under_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    candidates = [Candidate(strategy=name, ranks=1 if name == "auto" else 2) for name in STRATEGIES]
    of_loop = rehearse_script(tmp_path, SCRIPT, [], *candidates)
    keywords = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "callbacks": []}
    fit = CaughtFit(
        module=Net(),
        drawn=[(torch.ones(4, 16), torch.arange(4))],
        batches=16,
        datamodule=None,
        trainer_keywords=keywords,
        seconds_for_batch=0.0,
        location="train.py:1",
    )
    for candidate, outcome in zip(candidates, of_loop, strict=True):
        of_trainer = rehearse_candidate(fit, candidate)
        assert (outcome.error, of_trainer.error) == (None, None)
        assert outcome.sent_bytes == pytest.approx(of_trainer.sent_bytes, abs=16)  # whether to stop, of the Trainer's
        assert outcome.parameters == of_trainer.parameters == 3 * 17 * 16
        if candidate.ranks == 2:  # one alone has the whole batch
            assert outcome.peak_bytes == pytest.approx(of_trainer.peak_bytes, rel=0.02), candidate
        assert outcome.by_content.get("optimizer state") == of_trainer.by_content.get("optimizer state")
    assert not (tmp_path / "logs").exists()


def test_loops_that_set_up_in_parts_and_those_that_fail(tmp_path: Path) -> None:
    fsdp2 = Candidate(strategy="fsdp2", ranks=2)
    (together,) = rehearse_script(tmp_path, SCRIPT, [], fsdp2)
    (apart,) = rehearse_script(tmp_path, SCRIPT, ["late"], fsdp2)
    assert (apart.error, apart.sent_bytes, apart.peak_bytes) == (None, together.sent_bytes, together.peak_bytes)
    (fails,) = rehearse_script(tmp_path, SCRIPT, ["fails"], fsdp2)
    assert str(fails.error).startswith("ValueError: diverged (")
    (few,) = rehearse_script(tmp_path, SCRIPT, ["few"], fsdp2)
    assert "without two optimizer steps" in str(few.error)


def test_several_modules_and_optimizers_are_a_step_together(tmp_path: Path) -> None:
    alone, sharded = rehearse_script(
        tmp_path, ADVERSARIES, [], Candidate(strategy="auto"), Candidate(strategy="fsdp2", ranks=2)
    )
    assert (alone.error, sharded.error) == (None, None)
    assert alone.parameters == sharded.parameters == 8 * 9 + 9
    assert alone.by_content["optimizer state"] > sharded.by_content["optimizer state"]


def test_a_rank_of_many_in_a_loop(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(dedent(SCRIPT))
    results: list[RankRehearsal | str] = []

    def rehearse(loop: CaughtFit | CaughtLoop) -> None:
        assert isinstance(loop, CaughtLoop)
        candidate = candidate_of(loop.script_strategy, None, 8)
        results.append(rehearse_rank_of_loop(loop, candidate, 7, str))

    run_script(str(path), [], rehearse, ranks=8)
    (result,) = results
    assert isinstance(result, RankRehearsal), result
    assert (result.ranks, result.unchecked, result.differences) == (8, None, [])
    assert result.checkpoint.boxes > 0


def test_a_script_that_never_sets_up(tmp_path: Path) -> None:
    with pytest.raises(ShardingError, match="or setup\\(\\) of a Fabric"):
        rehearse_script(tmp_path, "import lightning as L\nL.Fabric().launch()", [])
