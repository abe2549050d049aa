"""Saves without frozen parameters under both front ends: in the background, scattered, with hooks and averages."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch.nn.functional import mse_loss

import fsdp_core
from fsdp_core.checkpoint import gather, load_state_dict, read_manifest
from fsdp_core.errors import CheckpointMismatchError, UnsupportedCapabilityError
from fsdp_core.lightning.checkpoints.frozen_parameters import FrozenParameters
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.state import copied_state, full_state
from fsdp_core.testing.suite.base_class import Clauses, requires
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer, whole_batches

__all__ = ["FrozenParametersOfAdaptersSuite"]

FROZEN = {"model/net.frozen.weight", "model/net.frozen.bias"}


class AtEnd(pl.Callback):
    """Saves once the last step of a fit is taken."""

    def __init__(self, path: Any, weights_only: bool = False) -> None:
        self.path, self.weights_only = path, weights_only

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path, self.weights_only)


def saved_by(strategy: str, tmp: str, module: Lit, *callbacks: pl.Callback, **options: Any) -> list[str]:
    """Fit and save, and return the warnings about frozen parameters."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = new_trainer(tmp, strategy, 2, {"save_frozen": False, **options}, callbacks=list(callbacks))
        run.fit(module, loader(2, 2))
    return [str(warning.message) for warning in caught if "save_frozen" in str(warning.message)]


class _Renamed(Lit):
    """Replaces a frozen tensor in what is saved, as hooks do."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["net.frozen.bias"] = checkpoint["state_dict"]["net.frozen.bias"].clone()


def _trainer_saves(strategy: str, tmp: str) -> dict[str, list[str]]:
    """Save in each way, and return the warnings."""
    warnings_by_way = {
        "background": saved_by(strategy, tmp, Lit("momentum"), AtEnd(f"{tmp}/background"), async_save=True),
        "weights": saved_by(strategy, tmp, Lit("momentum"), AtEnd(f"{tmp}/weights", weights_only=True)),
        "hook": saved_by(strategy, tmp, _Renamed("momentum"), AtEnd(f"{tmp}/hook")),
        "buffers": saved_by(
            strategy, tmp, Lit("momentum"), AtEnd(f"{tmp}/buffers"), save_frozen=True, save_unchanged_buffers=False
        ),
    }
    nothing = Lit("momentum")
    nothing.net.frozen.requires_grad_(True)
    warnings_by_way["nothing"] = saved_by(strategy, tmp, nothing, AtEnd(f"{tmp}/nothing"))
    return warnings_by_way


def _scattered_save(strategy: str, tmp: str) -> list[str]:
    own = Path(tmp, f"rank{rank_context().rank}", "it")
    return saved_by(strategy, tmp, Lit("momentum"), AtEnd(own), scattered_save=True)


def _averaged(strategy: str, tmp: str) -> None:
    """Save and resume with averages of the weights."""
    for resume in (None, f"{tmp}/averaged"):
        average = WeightAveraging(use_buffers=True)
        keep = AtEnd(f"{tmp}/averaged")
        run = new_trainer(tmp, strategy, 2, {"save_frozen": False}, callbacks=[average, keep], max_epochs=2)
        run.fit(Lit("momentum"), loader(2, 2), ckpt_path=resume)


def _resumes(strategy: str, tmp: str, world_size: int, base: str | None) -> dict[str, Any] | str:
    """Resume with a module whose frozen layer is another, and the base named; the whole state, or the error."""
    module = Lit("momentum")
    with torch.no_grad():
        module.net.frozen.weight.zero_()
    options = {"save_frozen": False, "frozen_base": base}
    run = new_trainer(tmp, strategy, world_size, options, callbacks=[AtEnd(f"{tmp}/again-{world_size}")], max_epochs=2)
    try:
        run.fit(module, loader(2, world_size), ckpt_path=f"{tmp}/background")
    except CheckpointMismatchError as error:
        return str(error)
    return full_state(run.strategy)


def _keeps_best(strategy: str, tmp: str) -> list[str]:
    keep = ModelCheckpoint(dirpath=f"{tmp}/kept", save_weights_only=True, filename="it")
    run = new_trainer(tmp, strategy, 1, {"save_frozen": False}, callbacks=[keep], enable_checkpointing=True)
    run.fit(Lit("sgd"), loader(1, 1))
    run.validate(Lit("sgd"), loader(1, 1), ckpt_path=keep.best_model_path, verbose=False)
    return sorted(read_manifest(keep.best_model_path).left_out)


def _fabric(strategy: str, tmp: str) -> dict[str, Any]:
    """Train a step and save under Fabric; load some of it into another model, and all of it."""
    fabric = new_fabric(strategy, 2, {"save_frozen": False})
    net = oracle.new_net()
    whole = copied_state(net)
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    for x, y in whole_batches(fabric, 1):
        fabric.backward(mse_loss(model(x), y))
        optimizer.step()
    fabric.save(f"{tmp}/fabric", {"model": model, "optimizer": optimizer, "step": 1})
    state = full_state(fabric.strategy)
    other = fabric.setup(oracle.new_net())
    rest = fabric.load(f"{tmp}/fabric", {"model": other}, strict=False)
    got = full_state(fabric.strategy, fabric.strategy.sharded_of(other))  # type: ignore[attr-defined]
    unsharded = oracle.new_net()
    fabric.load(f"{tmp}/fabric", {"model": unsharded})
    try:
        fabric.load(f"{tmp}/fabric")
        message = "nothing was raised"
    except CheckpointMismatchError as error:
        message = str(error)
    named = new_fabric(strategy, 2, {"frozen_base": f"{tmp}/fabric-base.pt"})
    if fabric.is_global_zero:
        torch.save({name: t for name, t in whole.items() if name != "out.weight"}, f"{tmp}/fabric-base.pt")
    fabric.barrier()
    everything = named.load(f"{tmp}/fabric")
    return {
        "same": all(torch.equal(got[name], tensor) for name, tensor in state.items()),
        "unsharded": all(torch.equal(unsharded.state_dict()[name], tensor) for name, tensor in state.items()),
        "named": all(torch.equal(everything["model"][name], tensor) for name, tensor in state.items()),
        "rest": sorted(rest),
        "message": message,
    }


def _assert_left_out(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert set(manifest.left_out) == FROZEN, folder.name
    assert not FROZEN & set(manifest.tensors)


class FrozenParametersOfAdaptersSuite(Clauses):
    """Every save leaves out what has the values of the base, and nothing else."""

    @requires("scattered_save")
    def test_scattered_save_without_the_base(self, ranks: Ranks, tmp_path: Path) -> None:
        """Each rank writes its part of what is not left out, and the parts make a checkpoint."""
        assert ranks.run(2, _scattered_save, self.strategy, str(tmp_path)) == [[], []]
        gather([tmp_path / "rank0/it", tmp_path / "rank1/it"], tmp_path / "scattered")
        _assert_left_out(tmp_path / "scattered")

    def test_saves_of_a_trainer_without_the_base(self, ranks: Ranks, tmp_path: Path) -> None:
        """In the background, of weights alone, after hooks; buffers if asked; nothing without a word."""
        for warnings_by_way in ranks.run(2, _trainer_saves, self.strategy, str(tmp_path)):
            assert [way for way, warned in warnings_by_way.items() if warned and way != "nothing"] == []
            assert all("nothing of it is frozen" in warning for warning in warnings_by_way["nothing"])
        for name in ("background", "weights"):
            _assert_left_out(tmp_path / name)
        assert set(read_manifest(tmp_path / "hook").left_out) == {"model/net.frozen.weight"}
        assert set(read_manifest(tmp_path / "buffers").left_out) == {"model/net.scale"}
        assert read_manifest(tmp_path / "nothing").base is None

        base = tmp_path / "base.pt"
        torch.save(copied_state(Lit()), base)
        want = load_state_dict(tmp_path / "background", base=base)
        for world_size in (1, 2):
            for message in ranks.run(world_size, _resumes, self.strategy, str(tmp_path), world_size, None):
                assert "'net.frozen.weight' has other values" in message
            for got in ranks.run(world_size, _resumes, self.strategy, str(tmp_path), world_size, str(base)):
                assert torch.equal(got["net.frozen.weight"], want["net.frozen.weight"])
            again = read_manifest(tmp_path / f"again-{world_size}")  # what was read from the base is its again
            assert set(again.left_out) == FROZEN
            assert again.base is not None
            assert again.base.source is not None
            assert again.base.source.name == str(base)

    def test_averages_are_saved_whole(self, ranks: Ranks, tmp_path: Path) -> None:
        """What a callback has copied of a module is saved, frozen or not, and resumes."""
        ranks.run(2, _averaged, self.strategy, str(tmp_path))
        assert set(read_manifest(tmp_path / "averaged").tensors) >= FROZEN

    def test_model_checkpoint_of_weights(self, ranks: Ranks, tmp_path: Path) -> None:
        """``ModelCheckpoint(save_weights_only=True)`` leaves the base out, and what it saves can be validated."""
        for left_out in ranks.run(1, _keeps_best, self.strategy, str(tmp_path)):
            assert set(left_out) == FROZEN

    def test_fabric_without_the_base(self, ranks: Ranks, tmp_path: Path) -> None:
        """Fabric leaves it out, restores parts of a state, and refuses to return what is not there."""
        for got in ranks.run(2, _fabric, self.strategy, str(tmp_path)):
            assert [got[way] for way in ("same", "unsharded", "named")] == [True] * 3
            assert got["rest"] == ["optimizer", "step"]
            assert "saved without what was not trained" in got["message"]
        assert set(read_manifest(tmp_path / "fabric").left_out) == {"model/frozen.weight", "model/frozen.bias"}

    @pytest.mark.parametrize("front_end", ["trainer", "fabric"])
    def test_options_that_do_not_fit(self, front_end: FrontEnd) -> None:
        """What is no switch or no path, or goes with no folder, is refused as the strategy is made."""
        make = fsdp_core.resolve(self.strategy, front_end)
        for options, words in (
            ({"save_frozen": "no"}, "save_frozen='no' is neither True nor False"),
            ({"save_unchanged_buffers": 0}, "save_unchanged_buffers=0 is neither True nor False"),
            ({"save_frozen": False, "state_dict_type": "full"}, "can't be combined with state_dict_type='full'"),
            ({"frozen_base": 3}, "frozen_base=3 is no path"),
        ):
            with pytest.raises(UnsupportedCapabilityError, match=words):
                make(**options)
        assert isinstance(make(save_frozen=False).frozen_parameters, FrozenParameters)
