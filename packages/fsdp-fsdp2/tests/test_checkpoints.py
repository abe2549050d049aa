"""Checkpoints under Trainer and Fabric: sharded and full, on other numbers of ranks, continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import mse_loss

import fsdp_core
import fsdp_fsdp2.fabric
import oracle
import runs
from fsdp_core.testing import RankPool
from fsdp_fsdp2 import FSDP2Strategy
from oracle import FP32_TOLERANCE
from runs import Lit, full_state, loader, trainer


def full_optimizer_state(strategy: Any, module: Any, optimizer: Any) -> dict[str, Any]:
    state = strategy.backend.optimizer_state(module, getattr(optimizer, "_optimizer", optimizer))["state"]
    return {
        name: {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in values.items()}
        for name, values in state.items()
    }


def two_epochs(
    tmp: str,
    world_size: int,
    optimizer: str,
    save: str | None = None,
    resume: str | None = None,
    options: dict[str, Any] | None = None,
    max_epochs: int = 2,
) -> dict[str, Any]:
    """Fit epochs of two steps, from a checkpoint or to one."""
    module = Lit(optimizer)
    run = trainer(tmp, FSDP2Strategy(**(options or {})), world_size, max_epochs=max_epochs)
    run.fit(module, loader(2, world_size), ckpt_path=resume)
    if save:
        run.save_checkpoint(save)
    return {
        "losses": runs.means(module.losses),
        "model": full_state(run.strategy, module),
        "optimizer": full_optimizer_state(run.strategy, module, run.optimizers[0]),
    }


def loaded(
    tmp: str, world_size: int, optimizer: str, path: str, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a checkpoint restores, before any step."""
    module = Lit(optimizer)
    run = trainer(tmp, FSDP2Strategy(**(options or {})), world_size, max_epochs=1)
    run.fit(module, loader(2, world_size), ckpt_path=path)  # the epoch is done already: nothing is trained
    assert not module.losses
    return {
        "model": full_state(run.strategy, module),
        "optimizer": full_optimizer_state(run.strategy, module, run.optimizers[0]),
    }


def assert_bit_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["model"].keys() == want["model"].keys()
    for name, tensor in want["model"].items():
        assert torch.equal(got["model"][name], tensor), name
    assert got["optimizer"].keys() == want["optimizer"].keys()
    for name, values in want["optimizer"].items():
        assert got["optimizer"][name].keys() == values.keys()
        for key, value in values.items():
            same = (
                torch.equal(got["optimizer"][name][key], value)
                if isinstance(value, torch.Tensor)
                else (got["optimizer"][name][key] == value)
            )
            assert same, (name, key)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw_groups"])
@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("saved_on", [1, 2, 3])
def test_saved_on_n_loaded_on_m(ranks: RankPool, tmp_path: Path, saved_on: int, kind: str, optimizer: str) -> None:
    """Weights and optimizer bit-equal on any number of ranks; the losses go on as if nothing had happened."""
    batches = oracle.global_batches(2) * 2
    net = oracle.new_net()
    opt = getattr(oracle, optimizer)(net)
    want = []
    for x, y in batches:
        loss = mse_loss(net(x), y)
        want.append(loss.item())
        loss.backward()
        opt.step()
        opt.zero_grad()
    path = str(tmp_path / "checkpoint")
    options = {"state_dict_type": kind}
    first = ranks.run(saved_on, two_epochs, str(tmp_path), saved_on, optimizer, path, None, options, 1)[0]
    assert Path(path).is_dir() == (kind == "sharded")
    for loaded_on in {1, 2, 4} - {saved_on}:
        for got in ranks.run(loaded_on, loaded, str(tmp_path), loaded_on, optimizer, path, options):
            assert_bit_equal(got, first)
    for got in ranks.run(2, two_epochs, str(tmp_path), 2, optimizer, None, path, options):
        assert first["losses"] + got["losses"] == pytest.approx(want, abs=FP32_TOLERANCE)


def test_same_layout_goes_on_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    whole = ranks.run(2, two_epochs, str(tmp_path), 2, "adamw_groups")[0]
    first = ranks.run(2, two_epochs, str(tmp_path), 2, "adamw_groups", path, None, None, 1)[0]
    second = ranks.run(2, two_epochs, str(tmp_path), 2, "adamw_groups", None, path)[0]
    assert first["losses"] + second["losses"] == whole["losses"]
    assert_bit_equal(second, whole)


def test_folder_holds_no_pickle_and_is_read_without_lightning(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    saved = ranks.run(2, two_epochs, str(tmp_path), 2, "momentum", str(path), None, None, 1)[0]
    files = [p for p in path.rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {".json", ".safetensors"}
    assert json.loads((path / "manifest.json").read_text())["world_size"] == 2
    state = fsdp_core.load_state_dict(path)
    assert state.keys() == saved["model"].keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in saved["model"].items())


def test_full_file_is_a_plain_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    """Read by plain torch, by load_from_checkpoint, and resumed by a Trainer without sharding."""
    path = tmp_path / "full.ckpt"
    options = {"state_dict_type": "full"}
    saved = ranks.run(2, two_epochs, str(tmp_path), 2, "adamw_groups", str(path), None, options, 1)[0]
    state = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(state[name], tensor) for name, tensor in saved["model"].items())
    module = Lit.load_from_checkpoint(path)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in saved["model"].items())
    plain = Lit("adamw_groups")
    trainer(tmp_path, "auto", max_epochs=2).fit(plain, loader(2, 1), ckpt_path=str(path))
    sharded = ranks.run(2, two_epochs, str(tmp_path), 2, "adamw_groups", None, str(path), options)[0]
    assert sharded["losses"] == pytest.approx([loss.item() for loss in plain.losses], abs=FP32_TOLERANCE)


def test_plain_checkpoint_goes_on_in_shards(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "plain.ckpt")
    plain = Lit("adamw_groups")
    run = trainer(tmp_path, "auto")
    run.fit(plain, loader(2, 1))
    run.save_checkpoint(path)
    whole = Lit("adamw_groups")
    trainer(tmp_path, "auto", max_epochs=2).fit(whole, loader(2, 1))
    for got in ranks.run(3, two_epochs, str(tmp_path), 3, "adamw_groups", None, path):
        assert got["losses"] == pytest.approx([loss.item() for loss in whole.losses[2:]], abs=FP32_TOLERANCE)


def model_checkpoint(tmp: str, kind: str) -> dict[str, Any]:
    keep = ModelCheckpoint(dirpath=f"{tmp}/kept", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}")
    module = Lit("sgd")
    run = trainer(
        tmp, FSDP2Strategy(state_dict_type=kind), 2, callbacks=[keep], enable_checkpointing=True, max_epochs=4
    )
    run.fit(module, loader(2, 2), loader(1, 2))
    names = sorted(p.name for p in Path(tmp, "kept").iterdir())
    best = run.validate(module, loader(1, 2), ckpt_path="best", verbose=False)[0]["val_loss"]
    run.fit_loop.max_epochs = 5
    run.fit(module, loader(2, 2), loader(1, 2), ckpt_path="last")
    return {"names": names, "best": best, "score": float(keep.best_model_score), "epoch": run.current_epoch}


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_model_checkpoint(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    for got in ranks.run(2, model_checkpoint, str(tmp_path), kind):
        assert len(got["names"]) == 3
        assert "last.ckpt" in got["names"]
        assert got["epoch"] == 5


def overwritten(tmp: str, kinds: list[str]) -> None:
    for kind in kinds:
        run = trainer(tmp, FSDP2Strategy(state_dict_type=kind), 2)
        run.fit(Lit("sgd"), loader(1, 2))
        run.save_checkpoint(f"{tmp}/same")
        names = sorted(p.name for p in Path(tmp).iterdir())
        assert names == ["same"], names
        assert Path(tmp, "same").is_dir() == (kind == "sharded")
        run.validate(Lit("sgd"), loader(1, 2), ckpt_path=f"{tmp}/same", verbose=False)
        run.strategy.barrier()
    run.strategy.remove_checkpoint(f"{tmp}/same")
    assert not Path(tmp, "same").exists()


def test_either_kind_replaces_the_other(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, overwritten, str(tmp_path), ["sharded", "full", "full", "sharded", "sharded"])


def weights_only(tmp: str) -> list[str]:
    run = trainer(tmp, world_size=2)
    run.fit(Lit("sgd"), loader(1, 2))
    run.save_checkpoint(f"{tmp}/weights", weights_only=True)
    run.validate(Lit("sgd"), loader(1, 2), ckpt_path=f"{tmp}/weights", verbose=False)
    with pytest.raises(KeyError, match="contains only the model"):
        trainer(tmp, world_size=2).fit(Lit("sgd"), loader(1, 2), ckpt_path=f"{tmp}/weights")
    return sorted(json.loads(Path(tmp, "weights", "manifest.json").read_text())["kinds"])


def test_weights_only(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, weights_only, str(tmp_path)) == [["model"], ["model"]]


class Tally:
    """Anything with a state of its own."""

    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def fabric_round_trip(tmp: str, save_kind: str | None, path: str) -> dict[str, Any]:
    """Train two models and save, or restore them."""
    options = {"state_dict_type": save_kind} if save_kind else {}
    fabric = Fabric(accelerator="cpu", devices=2, strategy=fsdp_fsdp2.fabric.FSDP2Strategy(**options))
    fabric.launch()
    torch.manual_seed(7 if save_kind is None else 1)
    one, two = oracle.Net(), oracle.Net(blocks=2)
    model, optimizer = fabric.setup(one, oracle.adamw_groups(one))
    other, other_optimizer = fabric.setup(two, oracle.momentum(two))
    tally = Tally()
    state = {"model": model, "optimizer": optimizer, "other": other, "opt2": other_optimizer, "tally": tally, "step": 0}
    if save_kind:
        for x, y in oracle.global_batches(2):
            fabric.backward(mse_loss(model(x), y) + mse_loss(other(x), y))
            optimizer.step()
            other_optimizer.step()
            tally.n += 1
        state["step"], state["note"] = 2, {"lr": (0.1, None)}
        fabric.save(path, state)
        rest = {}
    else:
        rest = fabric.load(path, state)
    return {
        "model": {
            **full_state(fabric.strategy, one),
            **{f"2.{k}": v for k, v in full_state(fabric.strategy, two).items()},
        },
        "optimizer": {
            **full_optimizer_state(fabric.strategy, one, optimizer.optimizer),
            **{f"2.{k}": v for k, v in full_optimizer_state(fabric.strategy, two, other_optimizer.optimizer).items()},
        },
        "plain": (tally.n, state["step"]),
        "rest": rest,
    }


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_fabric_save_and_load(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "checkpoint")
    saved = ranks.run(2, fabric_round_trip, str(tmp_path), kind, path)[0]
    for got in ranks.run(2, fabric_round_trip, str(tmp_path), None, path):
        assert_bit_equal(got, saved)
        assert got["plain"] == (2, 2)
        assert got["rest"] == {"note": {"lr": (0.1, None)}}


def fabric_filter(tmp: str) -> tuple[list[str], list[str]]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp2")
    fabric.launch()
    net = oracle.new_net()
    model = fabric.setup(net)
    fabric.save(f"{tmp}/some", {"model": model}, filter={"model": lambda name, _: "norm" in name})
    everything = fabric.load(f"{tmp}/some")
    fabric.load(f"{tmp}/some", {"model": model}, strict=False)
    return sorted(everything["model"]), [n for n in net.state_dict() if "norm" in n]


def test_fabric_filter(ranks: RankPool, tmp_path: Path) -> None:
    for saved, expected in ranks.run(2, fabric_filter, str(tmp_path)):
        assert saved == sorted(expected)


def trainer_to_fabric(tmp: str) -> None:
    run = trainer(tmp, world_size=2)
    module = Lit("sgd")
    run.fit(module, loader(1, 2))
    run.save_checkpoint(f"{tmp}/trained")
    want = full_state(run.strategy, module)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp2")
    fabric.launch()
    other = Lit("sgd")
    torch.nn.init.zeros_(other.net.frozen.weight)
    model = fabric.setup(other)
    fabric.load(f"{tmp}/trained", {"model": model})
    got = full_state(fabric.strategy, other)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_fabric_reads_the_trainers_folder(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, trainer_to_fabric, str(tmp_path))
