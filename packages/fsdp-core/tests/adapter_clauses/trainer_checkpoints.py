"""What the checkpoints of a Trainer hold, and who else reads them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

import fsdp_core
from fsdp_core.errors import ShardingError
from fsdp_core.lightning.checkpoints.full.opening import read_full_state
from fsdp_core.testing import Ranks
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.refusals import assert_says, refusal, was_refused
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.base_class import KINDS, Clauses, each_ranks, shares_of
from fsdp_core.testing.suite.checkpoints.trainer_checkpoints import two_epochs
from fsdp_core.testing.training import Lit, loader, losses_of, new_trainer

__all__ = ["CheckpointFilesSuite"]


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


class CheckpointFilesSuite(Clauses):
    """What is in a checkpoint can be read elsewhere, and is what hooks have made of it."""

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
                assert not any(map(was_refused, (said["norm"], said["a file"])))
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
        state = read_full_state(path) if kind == "sharded" else torch.load(path, weights_only=True)
        assert state["state_dict"].keys() == {*kept, "renamed"}
        for name, tensor in {**kept, "renamed": want["net.frozen.weight"]}.items():
            assert torch.equal(state["state_dict"][name], tensor.cpu().to(torch.bfloat16)), name

    def test_either_kind_replaces_the_other(self, ranks: Ranks, tmp_path: Path) -> None:
        """Saving to the path of an older checkpoint must replace it, whatever the kinds."""
        kinds = ["sharded", "full", "full", "sharded", "sharded"]
        ranks.run(2, _overwritten, self.strategy, str(tmp_path), kinds)

    def test_weights_only(self, ranks: Ranks, tmp_path: Path) -> None:
        """``weights_only=True`` must save the model alone, which can be validated but not resumed from."""
        assert ranks.run(2, _weights_only, self.strategy, str(tmp_path)) == [["model"], ["model"]]
