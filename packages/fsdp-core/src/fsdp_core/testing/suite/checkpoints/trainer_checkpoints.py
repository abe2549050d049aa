"""Checkpoints under the Trainer: sharded and full, loaded and resumed on any world size."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.nn.functional import mse_loss

import fsdp_core
from fsdp_core.errors import ShardingError
from fsdp_core.lightning.checkpoints.full.opening import read_whole
from fsdp_core.plugins.strategy_info import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.refusals import assert_says, refusal, was_refused
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.base_class import KINDS, Clauses, each_ranks, requires, shares_of
from fsdp_core.testing.suite.training.loops import losses_of
from fsdp_core.testing.training import Lit, loader, means, new_trainer

__all__ = ["CheckpointsSuite", "assert_bit_equal", "assert_continues", "loaded", "oracle_epochs", "two_epochs"]


def two_epochs(
    strategy: str,
    tmp: str,
    world_size: int,
    optimizer: str,
    save: str | None = None,
    resume: str | None = None,
    options: Mapping[str, Any] | None = None,
    max_epochs: int = 2,
) -> dict[str, Any]:
    """Fit epochs of two steps, optionally resuming or saving; the losses, and the whole state at the end."""
    module = Lit(optimizer)
    names = _spoil_buffers(module) if resume else set(module.state_dict())
    run = new_trainer(tmp, strategy, world_size, options, max_epochs=max_epochs)
    run.fit(module, loader(2, world_size), ckpt_path=resume)
    if save:
        run.save_checkpoint(save)
    model = full_state(run.strategy)
    assert set(model) == names, "of what a module holds, a part is not in its state"
    return {
        "losses": means(module.losses),
        "model": model,
        "optimizer": full_optimizer_state(run.strategy, run.optimizers[0]),
    }


def loaded(
    strategy: str, tmp: str, world_size: int, optimizer: str, path: Any, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a checkpoint of the first epoch restores, before any step."""
    module = Lit(optimizer)
    names = _spoil_buffers(module)
    run = new_trainer(tmp, strategy, world_size, options, max_epochs=1)
    run.fit(module, loader(2, world_size), ckpt_path=path)  # the epoch is complete: nothing is trained
    assert not module.losses
    model = full_state(run.strategy)
    assert set(model) == names, "of what a module holds, a part is not in its state"
    return {
        "model": model,
        "optimizer": full_optimizer_state(run.strategy, run.optimizers[0]),
    }


def _spoil_buffers(module: torch.nn.Module) -> set[str]:
    """Zero all buffers, so that only a checkpoint can restore them; the names in the module's state."""
    for buffer in module.buffers():
        buffer.zero_()
    return set(module.state_dict())


def oracle_epochs(optimizer: str) -> list[float]:
    """The losses of two epochs of two steps in one process."""
    net = oracle.new_net()
    opt = getattr(oracle, optimizer)(net)
    losses = []
    for x, y in oracle.global_batches(2) * 2:
        loss = mse_loss(net(x), y)
        losses.append(loss.item())
        loss.backward()
        opt.step()
        opt.zero_grad()
    return losses


def assert_bit_equal(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """Assert that the states of model and optimizer are equal, bit for bit."""
    assert got["model"].keys() == want["model"].keys()
    for name, tensor in want["model"].items():
        assert torch.equal(got["model"][name], tensor), name
    assert got["optimizer"].keys() == want["optimizer"].keys()
    for name, values in want["optimizer"].items():
        mine = got["optimizer"][name]
        assert mine.keys() == values.keys(), name
        for key, value in values.items():
            same = torch.equal(mine[key], value) if isinstance(value, torch.Tensor) else mine[key] == value
            assert same, (name, key)


def assert_continues(
    ranks: Ranks,
    tmp_path: Path,
    *,
    saver: str,
    reader: str,
    saved_on: int,
    loaded_on: tuple[int, ...],
    optimizer: str,
    kind: str = "sharded",
) -> None:
    """Assert that one strategy restores another's (or its own) checkpoint bit for bit, and resumes from it.

    Args:
        ranks: The ranks to run on.
        tmp_path: An empty folder.
        saver: The name of the strategy that trains the first epoch.
        reader: The name of the strategy that trains the second epoch.
        saved_on: The world size of the first epoch.
        loaded_on: World sizes to load on. The last one trains the second epoch.
        optimizer: The name of the oracle's function that builds the optimizer.
        kind: ``"sharded"`` or ``"full"``.
    """
    path, tmp, options = str(tmp_path / "checkpoint"), str(tmp_path), {"state_dict_type": kind}
    first = ranks.run(saved_on, two_epochs, saver, tmp, saved_on, optimizer, path, None, options, 1)[0]
    assert Path(path).is_dir() == (kind == "sharded")
    for world_size in loaded_on:
        for got in ranks.run(world_size, loaded, reader, tmp, world_size, optimizer, path, options):
            assert_bit_equal(got, first)
    last = loaded_on[-1]
    for got in ranks.run(last, two_epochs, reader, tmp, last, optimizer, None, path, options):
        assert first["losses"] + got["losses"] == pytest.approx(oracle_epochs(optimizer), abs=FP32_TOLERANCE)


def _model_checkpoint(strategy: str, tmp: str, kind: str) -> dict[str, Any]:
    keep = ModelCheckpoint(dirpath=f"{tmp}/kept", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}")
    module = Lit("sgd")
    loop: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True, "max_epochs": 4}
    run = new_trainer(tmp, strategy, 2, {"state_dict_type": kind}, **loop)
    run.fit(module, loader(2, 2), loader(1, 2))
    names = sorted(p.name for p in Path(tmp, "kept").iterdir())
    assert keep.best_model_score is not None
    score = float(keep.best_model_score)
    best = run.validate(module, loader(1, 2), ckpt_path="best", verbose=False)[0]["val_loss"]
    run.fit_loop.max_epochs = 5
    run.fit(module, loader(2, 2), loader(1, 2), ckpt_path="last")
    return {"names": names, "best": best, "score": score, "epoch": run.current_epoch}


def _overwritten(strategy: str, tmp: str, kinds: list[str]) -> None:
    for kind in kinds:
        run = new_trainer(tmp, strategy, 2, {"state_dict_type": kind})
        run.fit(Lit("sgd"), loader(1, 2))
        run.save_checkpoint(f"{tmp}/same")
        names = sorted(p.name for p in Path(tmp).iterdir())
        assert names == ["same"], names
        assert Path(tmp, "same").is_dir() == (kind == "sharded")
        run.validate(Lit("sgd"), loader(1, 2), ckpt_path=f"{tmp}/same", verbose=False)
        run.strategy.barrier()
    run.strategy.remove_checkpoint(f"{tmp}/same")
    assert not Path(tmp, "same").exists()


def _weights_only(strategy: str, tmp: str) -> list[str]:
    run = new_trainer(tmp, strategy, 2)
    run.fit(Lit("sgd"), loader(1, 2))
    run.save_checkpoint(f"{tmp}/weights", weights_only=True)
    run.validate(Lit("sgd"), loader(1, 2), ckpt_path=f"{tmp}/weights", verbose=False)
    with pytest.raises(KeyError, match="contains only the model"):
        new_trainer(tmp, strategy, 2).fit(Lit("sgd"), loader(1, 2), ckpt_path=f"{tmp}/weights")
    return sorted(json.loads(Path(tmp, "weights", "manifest.json").read_text())["kinds"])


class ExportsAverage(Lit):
    """Records the types in its checkpoint, whose weights are averages."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved = {name: type(value).__name__ for name, value in checkpoint["state_dict"].items()}


def _average_saved(strategy: str, tmp: str) -> dict[str, str]:
    module = ExportsAverage("momentum")
    run = new_trainer(tmp, strategy, 2, {"state_dict_type": "full"}, callbacks=[EMAWeightAveraging()])
    run.fit(module, loader(2, 2))
    run.save_checkpoint(f"{tmp}/averaged")
    return module.saved


class Exporting(Lit):
    """Changes its checkpoint in hooks written for one process, and exports its weights."""

    def __init__(self) -> None:
        super().__init__("momentum")
        self.said: dict[str, str] = {}
        self.norm = float("nan")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        path = f"{self.trainer.default_root_dir}/in-a-step"
        self.said["in a step"] = refusal(ShardingError, lambda: self.trainer.save_checkpoint(path))
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        del state["net.scale"]
        state["renamed"] = state.pop("net.frozen.weight")
        self.said["norm"] = refusal(ShardingError, lambda: self._take_norm(state))
        self.said["a file"] = refusal(ShardingError, lambda: torch.save(state, io.BytesIO()))
        self.said["a name"] = refusal(KeyError, lambda: state["net.inp.weight"])
        state["net.inp.weight"] = state.pop("net.inp.weight")
        checkpoint["state_dict"] = {name: value.to(torch.bfloat16) for name, value in state.items()}

    def _take_norm(self, state: dict[str, Any]) -> None:
        self.norm = sum((float(value.norm()) for value in state.values()), start=0.0)


def _exported(strategy: str, tmp: str, kind: str) -> dict[str, Any]:
    module = Exporting()
    run = new_trainer(tmp, strategy, 2, {"state_dict_type": kind})
    run.fit(module, loader(2, 2))
    exported = run.strategy.lightning_module_state_dict()
    run.save_checkpoint(f"{tmp}/computed")
    want = full_state(run.strategy)
    whole = (
        {name: tensor for name, tensor in exported.items() if type(tensor) is torch.Tensor} if kind == "full" else {}
    )
    return {"want": want, "exported": whole, "names": list(exported), "said": module.said, "norm": module.norm}


# world size of the save, kind and optimizer; the cases combine each with the others
_SHARDED = [
    (1, "sharded", "adamw_groups"),
    (2, "sharded", "momentum"),
    (3, "sharded", "sgd"),
    (3, "sharded", "adamw_groups"),
]
_FULL = [(1, "full", "momentum"), (2, "full", "sgd"), (3, "full", "adamw_groups")]


class CheckpointsSuite(Clauses):
    """The Trainer's checkpoints are restored bit for bit, and training continues as if uninterrupted."""

    @pytest.mark.parametrize(
        ("saved_on", "kind", "optimizer"),
        [
            *(pytest.param(*one, marks=requires(Capability.SHARDED_CHECKPOINT)) for one in _SHARDED),
            *(pytest.param(*one, marks=requires(Capability.FULL_CHECKPOINT)) for one in _FULL),
        ],
    )
    def test_saved_on_n_loaded_on_m(
        self, ranks: Ranks, tmp_path: Path, saved_on: int, kind: str, optimizer: str
    ) -> None:
        """A checkpoint must be restored bit for bit on any world size, and training must equal the oracle's."""
        assert_continues(
            ranks,
            tmp_path,
            saver=self.strategy,
            reader=self.strategy,
            saved_on=saved_on,
            loaded_on={1: (4, 2), 2: (1, 4, 2), 3: (1, 4, 2)}[saved_on],
            optimizer=optimizer,
            kind=kind,
        )

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_same_layout_goes_on_bit_for_bit(self, ranks: Ranks, tmp_path: Path) -> None:
        """On the same world size, a resumed run must equal the uninterrupted one bit for bit."""
        tmp, path = str(tmp_path), str(tmp_path / "checkpoint")
        whole = ranks.run(2, two_epochs, self.strategy, tmp, 2, "adamw_groups")[0]
        first = ranks.run(2, two_epochs, self.strategy, tmp, 2, "adamw_groups", path, None, None, 1)[0]
        second = ranks.run(2, two_epochs, self.strategy, tmp, 2, "adamw_groups", None, path)[0]
        assert first["losses"] + second["losses"] == whole["losses"]
        assert_bit_equal(second, whole)

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_folder_holds_no_pickle_and_is_read_without_lightning(self, ranks: Ranks, tmp_path: Path) -> None:
        """A sharded checkpoint must hold JSON and safetensors only, which ``fsdp_core.load_state_dict`` reads."""
        path = tmp_path / "checkpoint"
        run = (self.strategy, str(tmp_path), 2, "momentum", str(path), None, None, 1)
        saved = ranks.run(2, two_epochs, *run)[0]
        files = [p for p in path.rglob("*") if p.is_file()]
        assert {p.suffix for p in files} == {".json", ".safetensors"}
        assert json.loads((path / "manifest.json").read_text())["world_size"] == shares_of(ranks, 2)
        state = fsdp_core.load_state_dict(path)
        assert state.keys() == saved["model"].keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in saved["model"].items())

    @requires(Capability.FULL_CHECKPOINT)
    def test_full_file_is_a_plain_checkpoint(self, ranks: Ranks, tmp_path: Path) -> None:
        """A full checkpoint must load in plain torch, ``load_from_checkpoint`` and an unsharded Trainer."""
        path, tmp, options = tmp_path / "full.ckpt", str(tmp_path), {"state_dict_type": "full"}
        run = (self.strategy, tmp, 2, "adamw_groups", str(path), None, options, 1)
        saved = ranks.run(2, two_epochs, *run)[0]
        state = torch.load(path, weights_only=True)["state_dict"]
        assert state.keys() == saved["model"].keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in saved["model"].items())
        module = Lit.load_from_checkpoint(path)
        assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in saved["model"].items())
        plain = Lit("adamw_groups")
        new_trainer(tmp, "auto", max_epochs=2).fit(plain, loader(2, 1), ckpt_path=str(path))
        run = (self.strategy, tmp, 2, "adamw_groups", None, str(path), options)  # type: ignore[assignment]
        sharded = ranks.run(2, two_epochs, *run)[0]
        assert sharded["losses"] == pytest.approx(losses_of(plain), abs=FP32_TOLERANCE)

    @requires(Capability.FULL_CHECKPOINT)
    def test_plain_checkpoint_goes_on_in_shards(self, ranks: Ranks, tmp_path: Path) -> None:
        """Training must resume from an unsharded Trainer's checkpoint."""
        path, tmp = str(tmp_path / "plain.ckpt"), str(tmp_path)
        plain = Lit("adamw_groups")
        run = new_trainer(tmp, "auto")
        run.fit(plain, loader(2, 1))
        run.save_checkpoint(path)
        whole = Lit("adamw_groups")
        new_trainer(tmp, "auto", max_epochs=2).fit(whole, loader(2, 1))
        for got in ranks.run(3, two_epochs, self.strategy, tmp, 3, "adamw_groups", None, path):
            assert got["losses"] == pytest.approx(losses_of(whole)[2:], abs=FP32_TOLERANCE)

    @requires(Capability.FULL_CHECKPOINT)
    def test_hooks_see_a_whole_average(self, ranks: Ranks, tmp_path: Path) -> None:
        """With ``EMAWeightAveraging``, ``on_save_checkpoint`` must see the whole averages, on rank 0."""
        first, *others = each_ranks(ranks, ranks.run(2, _average_saved, self.strategy, str(tmp_path)))
        assert set(first.values()) == {"Tensor"}
        missing = {"net.inp.weight", "net.blocks.0.gain"} - first.keys()
        assert not missing, f"the average in the hook lacks {missing}"
        assert not any(others)

    @KINDS
    def test_hooks_compute_on_what_is_saved(self, ranks: Ranks, tmp_path: Path, kind: str) -> None:
        """Changes by ``on_save_checkpoint`` must be saved; computations that shards can't give must be refused."""
        everything = each_ranks(ranks, ranks.run(2, _exported, self.strategy, str(tmp_path), kind))
        for rank, got in enumerate(everything):
            want, said = got["want"], got["said"]
            kept = {name: tensor for name, tensor in want.items() if name not in ("net.scale", "net.frozen.weight")}
            norm = sum(float(tensor.norm()) for tensor in [*kept.values(), want["net.frozen.weight"]])
            if kind == "full":
                assert got["names"] == (list(want) if rank == 0 else [])
                assert all(
                    torch.equal(got["exported"][name], tensor.cpu()) for name, tensor in want.items() if not rank
                )
                assert got["norm"] == (pytest.approx(norm) if rank == 0 else 0)
                assert not was_refused(said["norm"]) and not was_refused(said["a file"])
                assert was_refused(said["a name"]) == (rank > 0)
                if rank:
                    assert_says(said["a name"], "'net.inp.weight' was read from full weights", "is_global_zero")
            else:
                assert got["names"] == list(want)
                assert not was_refused(said["a name"])
                assert_says(said["norm"], "shards alone" if "DTensor" in said["norm"] else ".norm is not supported by")
                assert_says(said["norm"], "full_state_dict(self)", 'state_dict_type="full"')
                assert_says(said["a file"], "full_state_dict(")
            assert_says(said["in a step"], "inside a step", "on_train_batch_end()")
        path = tmp_path / "computed"
        state = read_whole(path) if kind == "sharded" else torch.load(path, weights_only=True)
        assert state["state_dict"].keys() == {*kept, "renamed"}
        for name, tensor in {**kept, "renamed": want["net.frozen.weight"]}.items():
            assert torch.equal(state["state_dict"][name], tensor.cpu().to(torch.bfloat16)), name

    @KINDS
    def test_model_checkpoint(self, ranks: Ranks, tmp_path: Path, kind: str) -> None:
        """``ModelCheckpoint`` must keep the best checkpoints, and ``ckpt_path`` must accept ``best`` and ``last``."""
        for got in ranks.run(2, _model_checkpoint, self.strategy, str(tmp_path), kind):
            assert len(got["names"]) == 3, f"{got['names']} were kept, which should be 3"
            assert "last.ckpt" in got["names"]
            assert got["best"] == pytest.approx(got["score"], abs=FP32_TOLERANCE)
            assert got["epoch"] == 5, f"the resumed run ended in epoch {got['epoch']}, not 5"

    @requires(Capability.SHARDED_CHECKPOINT, Capability.FULL_CHECKPOINT)
    def test_either_kind_replaces_the_other(self, ranks: Ranks, tmp_path: Path) -> None:
        """Saving to the path of an older checkpoint must replace it, whatever the kinds."""
        kinds = ["sharded", "full", "full", "sharded", "sharded"]
        ranks.run(2, _overwritten, self.strategy, str(tmp_path), kinds)

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_weights_only(self, ranks: Ranks, tmp_path: Path) -> None:
        """``weights_only=True`` must save the model alone, which can be validated but not resumed from."""
        assert ranks.run(2, _weights_only, self.strategy, str(tmp_path)) == [["model"], ["model"]]
