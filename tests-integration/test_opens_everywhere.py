"""A folder that two ranks have saved opens in scripts that import Lightning alone, with no strategy of ours."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_core
from forked_scripts import run_forked
from fsdp_core.checkpoint import is_checkpoint
from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.testing import RankPool
from fsdp_core.testing.launching.processes import start
from fsdp_core.testing.oracle import FP32_TOLERANCE, momentum
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.short_runs import run_steps
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import Lit, loader, losses_of, means, new_fabric, new_trainer
from one_device import train

SCRIPT = Path(__file__).parent / "one_device.py"
STRATEGIES = ["fsdp2", "fsdp_native"]
STEPS = 3


def script(tmp: Path, *arguments: str) -> dict[str, Any]:
    """What rank 0 of the script tells."""
    return next(told for told in json_lines(run_forked(SCRIPT, *arguments, folder=tmp)) if told.get("rank", 0) == 0)


def started_script(tmp: Path, *arguments: str) -> dict[str, Any]:
    """The same of one that is started as users do, which imports nothing but what it says."""
    ended = start(tmp, str(SCRIPT), *arguments)
    assert ended.status == 0, ended.output
    return ended.json_lines[0]


def json_lines(output: str) -> list[dict[str, Any]]:
    """The lines of JSON in what a script wrote."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two epochs on one device that nothing has interrupted."""
    return train("auto", 1, str(tmp_path_factory.mktemp("whole")), 2)


class Saved:
    """The first epoch on two ranks, put back as it was for each test."""

    def __init__(self, tmp: Path, strategy: str) -> None:
        self.tmp, self.strategy, self.folder = tmp, strategy, tmp / "run"
        self.told = script(tmp, "train", strategy, "2", str(self.folder), "1")
        shutil.copytree(self.folder, tmp / "as it was")

    def restore(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.tmp / "as it was", self.folder)


@pytest.fixture(scope="module", params=STRATEGIES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"), request.param)


@pytest.fixture
def saved(trained: Saved) -> Saved:
    trained.restore()
    return trained


def test_a_script_opens_it_in_every_way(saved: Saved) -> None:
    run = saved.told
    assert all(is_checkpoint(path) for path in (run["last"], run["best"], saved.folder / "weights"))
    want = {name: tensor.tolist() for name, tensor in fsdp_core.load_state_dict(run["last"]).items()}
    told = (started_script if saved.strategy == "fsdp2" else script)(saved.tmp, "open", json.dumps(run))
    assert told["backends"] == []
    hyper_parameters = {"width": 7, "lr": 0.01}
    for way in ("load_from_checkpoint", "best", "weights only"):
        assert told[way] == want, way
    assert told["hyper-parameters"] == [hyper_parameters, [0, [0, 1, 2]]]
    assert told["override"] == {**hyper_parameters, "lr": 0.5}
    assert told["not strict"] == 7
    assert told["data module"] == ["trained", {"devices": 2, "name": "trained"}]
    assert told["validate"] == {"val_loss": pytest.approx(run["score"], abs=FP32_TOLERANCE)}
    assert told["test"] == {"test_loss": pytest.approx(run["test_loss"], abs=FP32_TOLERANCE)}
    assert told["predict"] == [True] * STEPS
    weights, rest = told["fabric"]
    assert weights == want
    assert {"optimizer_states", "lr_schedulers", "loops", "callbacks", "note", "Data"} <= set(rest)


def test_training_goes_on_as_if_never_interrupted(saved: Saved, whole: dict[str, Any]) -> None:
    """Its checkpoints then take the place of the folders that have their names."""
    first = saved.told
    # one of the ways from each, for each takes seconds
    ways = {"fsdp2": ("ddp", "2", "last"), "fsdp_native": ("auto", "1", first["last"])}
    strategy, devices, path = ways[saved.strategy]
    told = script(saved.tmp, "train", strategy, devices, str(saved.folder), "2", path)
    assert first["losses"] + told["losses"] == pytest.approx(whole["losses"], abs=FP32_TOLERANCE)
    assert told["score"] == pytest.approx(whole["score"], abs=FP32_TOLERANCE)
    assert (told["lr"], told["step"], told["data"]) == (whole["lr"], whole["step"], "trained")
    assert told["note"] == [0, [0, 1, 2]]
    assert told["last"] == first["last"]
    assert torch.load(told["last"], weights_only=True)["epoch"] == 1
    assert sorted(p.name for p in saved.folder.rglob("*") if p.parent.name in ("run", "kept")) == [
        "epoch=0.ckpt",
        "epoch=1.ckpt",
        "kept",
        "last.ckpt",
        "weights",
    ]


# -- flat parameters ---------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """One layer in a unit of its own, between two that are in the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.unit(x))


class Between(Lit):
    """Layers that all have one shape, so that state which is mixed up still loads."""

    def __init__(self) -> None:
        super().__init__("momentum")
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 6), Mixed(), nn.Linear(6, 6))

    def configure_optimizers(self) -> Any:
        return momentum(self)


def _save_flat(tmp: str) -> list[float]:
    module = Between()
    run = new_trainer(tmp, "fsdp_native", 2, {"use_orig_params": False, "auto_wrap_policy": {Mixed}})
    run.fit(module, loader(STEPS, 2))
    run.save_checkpoint(f"{tmp}/flat")
    return means(module.losses)


def test_state_of_flat_parameters_goes_to_the_right_ones(ranks: RankPool, tmp_path: Path) -> None:
    first = ranks.run(2, _save_flat, str(tmp_path))[0]
    module, whole = Between(), Between()
    new_trainer(tmp_path, "auto", max_epochs=2).fit(module, loader(STEPS, 1), ckpt_path=str(tmp_path / "flat"))
    new_trainer(tmp_path, "auto", max_epochs=2).fit(whole, loader(STEPS, 1))
    assert first + losses_of(module) == pytest.approx(losses_of(whole), abs=FP32_TOLERANCE)


# -- within an epoch ---------------------------------------------------------------------------------------------------


def _save_amid_an_epoch(strategy: str, tmp: str) -> None:
    run = new_trainer(tmp, strategy, 2, max_steps=2)
    run.fit(Lit("sgd"), loader(STEPS, 2))
    run.save_checkpoint(f"{tmp}/amid")
    run = new_trainer(tmp, strategy, 2)
    run.fit(Lit("sgd"), loader(STEPS, 2))
    run.save_checkpoint(f"{tmp}/whole")


@pytest.mark.drawn
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_data_that_begin_anew_are_told(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    """A plain Trainer reads no positions of ours."""
    ranks.run(2, _save_amid_an_epoch, strategy, str(tmp_path))
    told: dict[str, list[str]] = {}
    for name in ("amid", "whole"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            new_trainer(tmp_path, "auto", max_epochs=2).fit(
                Lit("sgd"), loader(STEPS, 1), ckpt_path=str(tmp_path / name)
            )
            new_trainer(tmp_path, "auto").validate(Lit("sgd"), loader(1, 1), str(tmp_path / name), verbose=False)
        told[name] = [str(one.message) for one in caught if "positions" in str(one.message)]
    assert told["whole"] == []
    (message,) = told["amid"]
    assert_says(message, "within an epoch", "does not restore the positions", "start over", "`fsdp list` shows")


# -- the command line --------------------------------------------------------------------------------------------------


def test_lightnings_command_line_takes_a_folder(tmp_path: Path) -> None:
    command = Path(__file__).parent / "lightning_cli.py"
    folder = tmp_path / "runs"
    for words, steps in (
        (("fit", "--trainer.strategy=fsdp2", "--trainer.max_steps=3", f"--trainer.default_root_dir={folder}"), 3),
        (("fit", "--trainer.strategy=fsdp_native", "--trainer.max_steps=5", f"--ckpt_path={folder}/last"), 5),
    ):
        assert json_lines(run_forked(command, *words, folder=tmp_path))[-1]["step"] == steps
    words = ("test", "--trainer.strategy=auto", "--trainer.devices=1", f"--ckpt_path={folder}/last")
    (*_, told) = json_lines(run_forked(command, *words, folder=tmp_path, ranks=1))
    assert told["step"] == 0
    line = nn.Linear(4, 1)
    saved = fsdp_core.load_state_dict(folder / "last")
    line.load_state_dict({name.removeprefix("layer."): tensor for name, tensor in saved.items()})
    data = torch.eye(16, 4)
    want = (line(data) - data.sum(1, keepdim=True)).square().mean().item()
    assert told["loss"] == pytest.approx(want, abs=FP32_TOLERANCE)


# -- Fabric ------------------------------------------------------------------------------------------------------------


def _save_by_fabric(strategy: str, tmp: str) -> Any:
    fabric = new_fabric(strategy)
    module = Lit("adamw_groups")
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    run_steps(model, optimizer, loader(STEPS, 2), fabric.backward)
    fabric.save(f"{tmp}/run", {"model": model, "optimizer": optimizer, "step": STEPS})
    losses = run_steps(model, optimizer, loader(STEPS, 2), fabric.backward)
    return means(losses)


@pytest.mark.drawn
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fabrics_folder_goes_on_in_plain_fabric(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    want = ranks.run(2, _save_by_fabric, strategy, str(tmp_path))[0]
    fabric = new_fabric("auto", 1)
    module = Lit("adamw_groups")
    nn.init.zeros_(module.net.frozen.weight)
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load(tmp_path / "run", state) == {}
    assert state["step"] == STEPS
    losses = [loss.item() for loss in run_steps(model, optimizer, loader(STEPS, 1), fabric.backward)]
    assert losses == pytest.approx(want, abs=FP32_TOLERANCE)


def _raw(strategy: str, tmp: str) -> list[str]:
    """A raw state, before and after setup; a Trainer's folder by the keys of its file."""
    want = torch.load(f"{tmp}/raw.pt", weights_only=True)
    for path in (f"{tmp}/raw.pt", f"{tmp}/raw"):
        for set_up in (False, True):
            fabric = new_fabric(strategy)
            module = Lit("sgd")
            nn.init.zeros_(module.net.frozen.weight)
            model: Any = fabric.setup(module) if set_up else module
            fabric.load_raw(path, model)
            got = full_state(fabric.strategy) if set_up else module.state_dict()
            assert all(torch.equal(got[name], tensor) for name, tensor in want.items()), (path, set_up)
    fabric = new_fabric(strategy)
    model = fabric.setup(Lit("sgd"))
    rest = fabric.load(f"{tmp}/trainers", {"state_dict": model})
    assert rest["epoch"] == 1
    got = full_state(fabric.strategy)
    trained = fsdp_core.load_state_dict(f"{tmp}/trainers")
    assert all(torch.equal(got[name], tensor) for name, tensor in trained.items())
    with torch.device("meta"):
        empty = Lit("sgd")
    return [
        refusal(CheckpointMismatchError, lambda: fabric.load_raw(f"{tmp}/raw", empty)),
        refusal(CheckpointMismatchError, lambda: fabric.load_raw(f"{tmp}/raw", nn.Linear(2, 2))),
    ]


def _save_trainers(strategy: str, tmp: str) -> None:
    run = new_trainer(tmp, strategy, 2)
    run.fit(Lit("sgd"), loader(1, 2))
    run.save_checkpoint(f"{tmp}/trainers")


@pytest.mark.drawn
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_load_raw_under_our_strategies(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    state = Lit("sgd").state_dict()
    torch.save(state, tmp_path / "raw.pt")
    new_fabric("fsdp2", 1).save(tmp_path / "raw", dict(state))
    ranks.run(2, _save_trainers, strategy, str(tmp_path))
    for empty, other in ranks.run(2, _raw, strategy, str(tmp_path)):
        assert_says(empty, "Lit has no memory yet", "built on the meta device", "fabric.setup(model)")
        assert_says(other, "2 are missing in it", "weight", "nothing was loaded")
