"""``fsdp checkpoint consolidate`` and ``reshard``: what is written, what is refused, and how much memory it takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from chunked_tensors import in_pieces
from cli_checkpoints import ALIASES, run, save_trained, state_by_name, trained
from damaged_folders import flip, limited_files, save_alone
from fsdp_core import errors
from fsdp_core.checkpoint import (
    consolidate_huggingface,
    consolidate_safetensors,
    load,
    load_state_dict,
    read_manifest,
    reshard,
    verify,
)
from fsdp_core.errors import CheckpointError, CheckpointExistsError, CheckpointFormatError, CheckpointValueError
from fsdp_core.lightning.checkpoints.full.consolidation import consolidate_lightning
from fsdp_core.testing.refusals import assert_says
from nests import assert_same
from quiet_trainer import quiet_trainer

TO = ["safetensors", "lightning", "huggingface"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_trained(tmp_path / "a.ckpt")


def leftovers(path: Path) -> list[str]:
    """What an interrupted write would leave."""
    return [str(found.relative_to(path)) for found in path.rglob("*") if re.search("partial|replaced|tmp", found.name)]


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


# -- one safetensors file ----------------------------------------------------------------------------------------------


def test_one_safetensors_file(folder: Path, tmp_path: Path) -> None:
    result = run("consolidate", folder, tmp_path / "w.safetensors", "--to", "safetensors")
    assert result.stdout == (
        f"Wrote 6 tensors, 316 B, to {tmp_path / 'w.safetensors'}.\n"
        "Tied, and so written once:\n"
        "  head.weight = wte.weight\n"
    )
    assert result.stderr == ""
    expected = load_state_dict(folder)
    assert torch.equal(expected.pop("head.weight"), expected["wte.weight"])
    found = load_file(tmp_path / "w.safetensors")
    assert set(found) == set(expected)
    assert all(found[name].equal(tensor) and found[name].dtype == tensor.dtype for name, tensor in expected.items())
    assert metadata(tmp_path / "w.safetensors") == {"format": "pt", "head.weight": "wte.weight"}
    assert leftovers(tmp_path) == []


class Tied(nn.Module):
    """A model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.wte.weight


@pytest.mark.parametrize("copy", [False, True])
def test_a_tied_name_reaches_its_readers(tmp_path: Path, copy: bool) -> None:
    model = Tied()
    save_alone(
        tmp_path / "a", {"model": model.state_dict()},
        aliases={"model/head.weight": "model/wte.weight"},
    )  # fmt: skip
    run(*["consolidate", tmp_path / "a", tmp_path / "w", "--to", "safetensors", *(["--copy-tied"] if copy else [])])
    assert set(load_file(tmp_path / "w")) == {"wte.weight", *(["head.weight"] if copy else [])}
    other = Tied()
    if copy:
        other.load_state_dict(load_file(tmp_path / "w"))
    else:
        assert load_model(other, tmp_path / "w") == (set(), [])
    assert other.head.weight.equal(model.wte.weight)


def test_a_prefix_takes_what_is_under_it(tmp_path: Path) -> None:
    shared = torch.ones(2, 2)
    model = {"shared": shared, "model.wte": shared, "model.head": shared, "model.scale": torch.tensor(3.0)}
    further = {"loss.weight": torch.ones(1), "model._extra_state": {"version": 1, "mask": torch.ones(2)}}
    aliases = {"model/model.wte": "model/shared", "model/model.head": "model/shared"}
    save_alone(tmp_path / "a", {"model": {**model, **further}}, aliases=aliases)
    result = run("consolidate", tmp_path / "a", tmp_path / "w", "--to", "safetensors", "--strip-prefix", "model.")
    found = load_file(tmp_path / "w")
    assert set(found) == {"wte", "scale"}
    assert found["wte"].equal(shared)
    assert metadata(tmp_path / "w") == {"format": "pt", "head": "wte"}
    assert result.stdout.splitlines()[1:] == [
        "Tied, and so written once:",
        "  head = wte",
        "Left out:",
        "  shared: does not begin with 'model.'",
        "  loss.weight: does not begin with 'model.'",
        "  model._extra_state: is not a tensor",
    ]
    options = ["--to", "safetensors", "--strip-prefix", "x."]
    refused = run("consolidate", tmp_path / "a", tmp_path / "x", *options, status=1)
    assert "has no tensor that begins with 'x.'; it has shared, model.wte, model.head" in refused.stderr


@pytest.mark.parametrize("target", TO)
def test_conversion_of_the_models_dtype(folder: Path, tmp_path: Path, target: str) -> None:
    run("consolidate", folder, tmp_path / "out", "--to", target, "--dtype", "bfloat16")
    if target == "lightning":
        whole = torch.load(tmp_path / "out", weights_only=False)  # it holds a pathlib.Path
        found = whole["state_dict"]
        assert whole["optimizer_states"][0]["state"][0]["exp_avg"].dtype == torch.float32
    else:
        found = load_file(tmp_path / "out" / ("model.safetensors" if target == "huggingface" else ""))
    expected = load_state_dict(folder, dtype=torch.bfloat16)
    assert expected["steps"].dtype == torch.int64
    for name, tensor in expected.items():
        if name != "head.weight":
            assert found[name].dtype == tensor.dtype
            assert found[name].equal(tensor)
    refused = run("consolidate", folder, tmp_path / "x", "--to", target, "--dtype", "int8", status=1)
    assert "can't convert to 'int8'; choose one of float64, float32, float16, bfloat16" in refused.stderr


@pytest.mark.parametrize("target", ["safetensors", "huggingface"])
def test_model_is_chosen_by_key(tmp_path: Path, target: str) -> None:
    state = {"gen": {"w": torch.ones(2)}, "nets/disc": {"w": torch.zeros(3)}}
    save_alone(tmp_path / "a", state, {"gen": "model", "nets%2Fdisc": "model"})
    refused = run("consolidate", tmp_path / "a", tmp_path / "x", "--to", target, status=1)
    assert "holds 2 models ('gen', 'nets/disc'): choose one with key= (--key)" in refused.stderr
    refused = run("consolidate", tmp_path / "a", tmp_path / "x", "--to", target, "--key", "model", status=1)
    assert_says(refused.stderr, "no model under 'model'", "Models in it: 'gen', 'nets/disc'; pass one as key= (--key)")
    for key, shape in (("gen", (2,)), ("nets/disc", (3,)), ("nets%2Fdisc", (3,))):
        run("consolidate", tmp_path / "a", tmp_path / "o", "--to", target, "--key", key, "--overwrite")
        found = load_file(tmp_path / "o" / ("model.safetensors" if target == "huggingface" else ""))
        assert found["w"].shape == shape


# -- a file that torch.load reads --------------------------------------------------------------------------------------


EVERY_DTYPE = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
    torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_load_gives_what_torch_save_was_given(tmp_path: Path, mmap: bool) -> None:
    weights = {str(dtype): torch.tensor([[1, 0], [1, 1], [0, 1]]).to(dtype) for dtype in EVERY_DTYPE}
    weights |= {"scalar": torch.tensor(2.5), "empty": torch.empty(3, 0), "tied": weights["torch.float32"]}
    rest = {
        "pytorch-lightning_version": "2.6.6",
        "callbacks": {"best": torch.tensor(0.5), "names": ("a", None, True, 2**40), "nan": float("nan")},
        "average": {"w": in_pieces(torch.arange(6.0).reshape(2, 3), 1, 1)},
        "lr_schedulers": [],
    }
    save_alone(tmp_path / "a", {"model": weights, "trainer": rest},
               aliases={"model/tied": "model/torch.float32"})  # fmt: skip
    run("consolidate", tmp_path / "a", tmp_path / "w.ckpt", "--to", "lightning")
    found = torch.load(tmp_path / "w.ckpt", weights_only=True, mmap=mmap)
    expected = {**rest, "average": {"w": torch.arange(6.0).reshape(2, 3)}, "state_dict": weights}
    assert_same(found, expected)
    assert list(found["state_dict"]) == list(weights)
    assert found["state_dict"]["tied"].data_ptr() == found["state_dict"]["torch.float32"].data_ptr()
    for name, tensor in found["state_dict"].items():
        assert tensor.is_contiguous()
        assert not mmap or tensor.data_ptr() % 64 == 0, name
    assert zipfile.ZipFile(tmp_path / "w.ckpt").testzip() is None
    torch.save(found, tmp_path / "again.ckpt")
    assert_same(torch.load(tmp_path / "again.ckpt", weights_only=True), expected)


def test_numpy_arrays_come_back(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    rest = {"pytorch-lightning_version": "2.6.6", "array": numpy.arange(6.0).reshape(2, 3), "none": numpy.zeros((0, 2))}
    save_alone(tmp_path / "a", {"model": {"w": torch.ones(1)}, "trainer": rest})
    run("consolidate", tmp_path / "a", tmp_path / "w.ckpt", "--to", "lightning")
    found = torch.load(tmp_path / "w.ckpt", weights_only=False)
    assert (found["array"] == rest["array"]).all()
    assert found["none"].shape == (0, 2)


class Tiny(pl.LightningModule):
    """Two layers, the names of which a plain module has too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def test_what_fabric_saved_goes_on_under_a_trainer(tmp_path: Path) -> None:
    """With its optimizer: as if the same two steps had been taken without a break."""
    module = Tiny()
    optimizer = module.configure_optimizers()

    def step() -> None:
        optimizer.zero_grad()
        module.training_step(torch.ones(4, 3)).backward()
        optimizer.step()

    step()
    state: dict[str, Any] = {"step": 1, "notes": {"lr": (0.1, None)}}
    state |= {"net": module.state_dict(), "opt": state_by_name(optimizer, module)}
    save_alone(tmp_path / "a", state, {"net": "model", "opt": "optimizer"})
    run("consolidate", tmp_path / "a", tmp_path / "w.ckpt", "--to", "lightning")
    found = torch.load(tmp_path / "w.ckpt", weights_only=True)
    assert (found["step"], found["notes"]) == (1, {"lr": (0.1, None)})
    step()
    resumed = Tiny()
    trainer = quiet_trainer(max_steps=1, default_root_dir=tmp_path, enable_checkpointing=False)
    trainer.fit(resumed, DataLoader(torch.ones(4, 3), batch_size=4), ckpt_path=tmp_path / "w.ckpt", weights_only=True)
    assert trainer.global_step == 1
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], tensor)
    opened = Tiny.load_from_checkpoint(tmp_path / "w.ckpt").state_dict()
    assert_same(dict(opened), dict(found["state_dict"]))


def _optimizer(*names: str) -> dict[str, Any]:
    return {"state": {}, "param_groups": [{"lr": 0.1, "params": list(names)}]}


def test_fabrics_model_and_optimizers_are_chosen_by_key(tmp_path: Path) -> None:
    """Is taken from their names where that is certain; else what to type is said."""
    weights = {"w": torch.ones(1)}
    state = {
        "gen": weights, "disc": weights, "other": {"v": torch.ones(1)},
        "opt_a": _optimizer("w"), "opt_b": _optimizer("w"), "opt_v": _optimizer("v"), "step": 3,
    }  # fmt: skip
    kinds = {key: "optimizer" if "opt" in key else "model" for key in state if key != "step"}
    save_alone(tmp_path / "a", state, kinds)
    save_alone(tmp_path / "none", {"step": 3}, {})
    save_alone(tmp_path / "taken", {"model": weights, "lr_schedulers": [1]})
    save_alone(
        tmp_path / "trainer", {"model": weights, "trainer": {"pytorch-lightning_version": "2"}}, {"model": "model"}
    )
    for place, arguments, said in (
        ("a", [], ["holds 3 models ('gen', 'disc', 'other')", "--key"]),
        ("a", ["--key", "disk"], ["no model under 'disk'", "'disc'", "--key"]),
        ("a", ["--key", "gen"], ["('opt_a', 'opt_b') that may belong to 'gen' and 'disc':", "--optimizer-key, once"]),
        ("a", ["--key", "gen", "--optimizer-key", "o"], ["no optimizer under 'o'", "'opt_a'", "--optimizer-key"]),
        ("a", ["--key", "gen", "--optimizer-key", "opt_v"], ["trains 'v', which is not in the model 'gen'"]),
        ("none", [], ["holds no model, but 'step'", 'fabric.save(path, {"model": model']),
        ("taken", [], ["holds 'lr_schedulers', a key that a Lightning file uses", "--to safetensors"]),
        ("trainer", ["--key", "gen"], ["was saved by a Trainer", "Leave out"]),
    ):
        refused = run("consolidate", tmp_path / place, tmp_path / "w.ckpt", "--to", "lightning", *arguments, status=1)
        assert_says(refused.stderr, *said)
    chosen = ["--key", "gen", "--optimizer-key", "opt_b", "--optimizer-key", "opt_a"]
    done = run("consolidate", tmp_path / "a", tmp_path / "gen.ckpt", "--to", "lightning", *chosen)
    assert "disc: is not of this model" in done.stdout
    found = torch.load(tmp_path / "gen.ckpt", weights_only=True)
    assert (found["state_dict"].keys(), len(found["optimizer_states"])) == ({"w"}, 2)
    assert found.keys() & {*state} == {"step"}
    run("consolidate", tmp_path / "a", tmp_path / "v.ckpt", "--to", "lightning", "--key", "other")
    found = torch.load(tmp_path / "v.ckpt", weights_only=True)["optimizer_states"]
    assert [group["param_names"] for state in found for group in state["param_groups"]] == [["v"]]
    with pytest.raises(KeyError, match=r"^no model under 'disk'") as raised:
        consolidate_lightning(tmp_path / "a", tmp_path / "w.ckpt", key="disk")
    assert isinstance(raised.value, errors.CheckpointMismatchError)


# -- a Hugging Face folder ---------------------------------------------------------------------------------------------


def test_shards_and_their_index(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "mine"}')
    run("consolidate", folder, tmp_path / "hf", "--to", "huggingface", "--max-shard-size", "200B", "--config", config)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", *shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    held = {shard: load_file(tmp_path / "hf" / shard) for shard in shards}
    assert index["metadata"] == {"total_size": 316}
    assert index["weight_map"] == {name: shard for shard in shards for name in held[shard]}
    expected = load_state_dict(folder)
    expected.pop("head.weight")
    assert_same(dict(sorted({**held[shards[0]], **held[shards[1]]}.items())), dict(sorted(expected.items())))
    for shard in shards:
        assert metadata(tmp_path / "hf" / shard) == {"format": "pt"}
        assert sum(tensor.nbytes for tensor in held[shard].values()) <= 200
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"model_type": "mine"}


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(folder: Path, tmp_path: Path) -> None:
    run("consolidate", folder, tmp_path / "hf", "--to", "huggingface", "--max-shard-size", "1")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 6  # the empty tensor, too: as transformers divides
    run("consolidate", folder, tmp_path / "one", "--to", "huggingface", "--max-shard-size", "1.5KiB")
    assert os.listdir(tmp_path / "one") == ["model.safetensors"]


def test_a_configuration_must_be_json(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for content, message in (("{", "can't read the configuration"), ("[1]", "is not a JSON object")):
        config.write_text(content)
        refused = run("consolidate", folder, tmp_path / "o", "--to", "huggingface", "--config", config, status=1)
        assert message in refused.stderr
        assert not (tmp_path / "o").exists()


# -- another number of files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [1, 2, 3, 5, 8])
def test_the_same_checkpoint_in_other_files(folder: Path, tmp_path: Path, files: int) -> None:
    run("reshard", folder, tmp_path / "b.ckpt", "--files", files)
    old, new = read_manifest(folder), read_manifest(tmp_path / "b.ckpt")
    run("verify", tmp_path / "b.ckpt")
    run("diff", folder, tmp_path / "b.ckpt")
    assert_same(load_state_dict(tmp_path / "b.ckpt"), load_state_dict(folder))
    assert list(load_state_dict(tmp_path / "b.ckpt")) == list(load_state_dict(folder))
    moment = load(tmp_path / "b.ckpt")["optimizer"][0]["state"]["wte.weight"]["exp_avg"].full()
    assert moment.equal(load(folder)["optimizer"][0]["state"]["wte.weight"]["exp_avg"].full())
    assert (tmp_path / "b.ckpt" / new.state_file).read_bytes() == (folder / old.state_file).read_bytes()
    assert (new.strategy, new.world_size, new.versions) == (old.strategy, old.world_size, old.versions)
    assert (new.kinds, new.aliases) == (old.kinds, old.aliases)
    assert new.save_id != old.save_id
    there = {str(path.relative_to(tmp_path / "b.ckpt")) for path in (tmp_path / "b.ckpt").rglob("*.*")}
    assert there == {*new.files, "manifest.json"}
    names = [f"model/{new.save_id}-rank-{number:05d}.safetensors" for number in range(files)]
    assert [name for name in new.files if name.startswith("model/")] == names
    chunks = new.tensors["model/wte.weight"].chunks
    assert [chunk.lengths[0] for chunk in chunks] == [
        6 * (piece + 1) // len(chunks) - 6 * piece // len(chunks) for piece in range(len(chunks))
    ]
    assert len(chunks) == min(files, 6)


def test_small_tensors_even_out_the_files(tmp_path: Path) -> None:
    state = {"model": {f"w{number}": torch.ones(()) for number in range(8)} | {"large": torch.ones(9)}}
    save_alone(tmp_path / "a", state)
    reshard(tmp_path / "a", tmp_path / "b", files=4)
    held: dict[str, int] = {}
    for tensor in read_manifest(tmp_path / "b").tensors.values():
        for chunk in tensor.chunks:
            held[chunk.file] = held.get(chunk.file, 0) + torch.Size(chunk.lengths).numel()
    assert max(held.values()) - min(held.values()) <= 1
    assert sum(held.values()) == 17


def test_resharding_keeps_sharded_state_that_is_no_models(tmp_path: Path) -> None:
    state = {"model": {"w@x": torch.ones(3)}, "average": {"w": in_pieces(torch.arange(8.0), 0, 3)}}
    save_alone(tmp_path / "a", state)
    reshard(tmp_path / "a", tmp_path / "b", files=2)
    verify(tmp_path / "b")
    assert load(tmp_path / "b")["average"]["w"].full().equal(torch.arange(8.0))
    assert load_state_dict(tmp_path / "b")["w@x"].equal(torch.ones(3))


# -- where it goes -----------------------------------------------------------------------------------------------------


def write_to(folder: Path, out: Any, target: str, *options: str, status: int = 0) -> str:
    """Consolidate or reshard; gives what went to stderr."""
    if target == "reshard":
        return run("reshard", folder, out, "--files", 2, *options, status=status).stderr
    return run("consolidate", folder, out, "--to", target, *options, status=status).stderr


def content(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(found.relative_to(path)): found.read_bytes() for found in path.rglob("*") if found.is_file()}


ALL = [*TO, "reshard"]


@pytest.mark.parametrize("target", ALL)
def test_existing_output_is_replaced_only_with_overwrite(folder: Path, tmp_path: Path, target: str) -> None:
    out, other = tmp_path / "x" / "y" / "out", save_trained(tmp_path / "b.ckpt", seed=1)  # in folders that are made
    write_to(folder, out, target)
    before = content(out)
    assert "already exists: choose another path, or pass overwrite=True (--overwrite" in write_to(
        other, out, target, status=1
    )
    assert content(out) == before
    write_to(other, out, target, "--overwrite")
    after = content(out)
    fresh = tmp_path / "fresh"
    write_to(other, fresh, target)
    if target == "reshard":
        run("diff", other, out)
        assert len(after) == len(content(fresh))  # nothing of the old one is left
    else:
        assert after == content(fresh)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("target", ALL)
def test_paths_that_overlap_are_refused(folder: Path, tmp_path: Path, target: str) -> None:
    before = content(folder)
    (tmp_path / "link").symlink_to(folder)
    for out, message in (
        (folder, "is the checkpoint to be read"),
        (tmp_path / "link", "is the checkpoint to be read"),
        (folder / "model" / "out", "lies inside"),
        (tmp_path / "link" / "out", "lies inside"),
        (tmp_path, "lies inside"),
        (f"{folder}/../a.ckpt/", "is the checkpoint to be read"),
    ):
        assert message in write_to(folder, out, target, "--overwrite", status=1)
    assert content(folder) == before


@pytest.mark.parametrize("target", ALL)
def test_foreign_files_are_not_replaced(folder: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    message = "and the output is one file" if target in ("safetensors", "lightning") else "something else in it"
    assert message in write_to(folder, tmp_path / "mine", target, "--overwrite", status=1)
    assert content(tmp_path / "mine") == {"thesis.tex": b"x"}
    (tmp_path / "file").write_text("x")
    if target in ("huggingface", "reshard"):
        assert "is a file, and the output is a folder" in write_to(
            folder, tmp_path / "file", target, "--overwrite", status=1
        )
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("target", ALL)
def test_a_folder_that_can_not_be_made_is_named(folder: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("x")
    message = write_to(folder, tmp_path / "file" / "out", target, status=1)
    assert "can't write" in message or "is a file" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("target", ALL)
def test_a_write_that_fails_leaves_what_was_there(
    folder: Path, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_to(folder, out, target)
    before = content(out)
    import fsdp_core.checkpoint.storage.tensor_bytes as tensor_bytes

    read, calls = tensor_bytes.TensorBytes.read, 0

    def failing(self: Any, *arguments: Any) -> bytearray:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise OSError(28, "No space left on device")
        return read(self, *arguments)

    monkeypatch.setattr(tensor_bytes.TensorBytes, "read", failing)
    message = write_to(folder, out, target, "--overwrite", status=1)
    assert f"can't write {out}: OSError: [Errno 28] No space left on device\nThere is no space left" in message
    assert content(out) == before
    calls = 0
    write_to(folder, tmp_path / "new" / "out", target, status=1)
    assert (content(tmp_path / "new"), leftovers(tmp_path)) == ({}, [])


@pytest.mark.parametrize("target", ["safetensors", "huggingface", "reshard"])
def test_a_disk_that_takes_no_more_is_named(tmp_path: Path, target: str) -> None:
    save_alone(tmp_path / "a.ckpt", {"model": {"w": torch.ones(300_000)}})
    with limited_files(300_000):
        message = write_to(tmp_path / "a.ckpt", tmp_path / "o", target, status=1)
    assert f"can't write {tmp_path / 'o'}: OSError: [Errno 27] File too large" in message
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("target", ALL)
def test_a_damaged_checkpoint_is_not_passed_on(folder: Path, tmp_path: Path, target: str) -> None:
    (file,) = (folder / "model").iterdir()
    flip(file)
    message = write_to(folder, tmp_path / "out", target, status=1)
    assert f"model/{file.name} has the checksum" in message
    assert not (tmp_path / "out").exists()
    write_to(folder, tmp_path / "out", target, "--no-verify")
    assert (tmp_path / "out").exists()


def test_only_what_is_read_is_verified(folder: Path, tmp_path: Path) -> None:
    (file,) = (folder / "optimizer").iterdir()
    flip(file)
    for target in ("safetensors", "huggingface"):
        write_to(folder, tmp_path / target, target)
    for target in ("lightning", "reshard"):
        assert f"optimizer/{file.name} has the checksum" in write_to(folder, tmp_path / target, target, status=1)


# -- object stores -----------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Any:
    """A file system of fsspec's that has no rename; empty."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    return fs


def test_from_and_to_an_object_store(memory: Any, tmp_path: Path) -> None:
    save_alone("memory://runs/a", trained(), aliases=ALIASES)
    expected = load_state_dict("memory://runs/a")
    for target in ALL:
        arguments = ["reshard", "memory://runs/a", f"memory://out/{target}", "--files", 3]
        if target != "reshard":
            arguments = ["consolidate", "memory://runs/a", f"memory://out/{target}", "--to", target]
        run(*arguments)
        assert "already exists" in run(*arguments, status=1).stderr
    memory.get("/out", str(tmp_path / "out"), recursive=True)
    assert sorted(os.listdir(tmp_path / "out")) == sorted(ALL)
    found = {
        "safetensors": load_file(tmp_path / "out" / "safetensors"),
        "huggingface": load_file(tmp_path / "out" / "huggingface" / "model.safetensors"),
        "lightning": torch.load(tmp_path / "out" / "lightning", weights_only=False)["state_dict"],
        "reshard": load_state_dict(tmp_path / "out" / "reshard"),
    }
    for target, weights in found.items():
        for name, tensor in weights.items():
            assert tensor.equal(expected[name]), target
    run("diff", "memory://runs/a", "memory://out/reshard")
    run("consolidate", "memory://runs/a", "memory://out/safetensors", "--to", "safetensors", "--overwrite")
    refused = run("consolidate", "memory://runs/a", "memory://out/huggingface", "--to", "huggingface", "--overwrite",
                  status=1)  # fmt: skip
    assert "a folder in an object store can't be replaced atomically" in refused.stderr


# -- without the command -----------------------------------------------------------------------------------------------


WRITERS: dict[str, Callable[..., Any]] = {
    "safetensors": consolidate_safetensors,
    "huggingface": consolidate_huggingface,
    "lightning": consolidate_lightning,
    "reshard": partial(reshard, files=2),
}


@pytest.mark.parametrize("options", [{}, {"verify": False}], ids=["verified", "unverified"])
@pytest.mark.parametrize("target", WRITERS)
def test_progress_ends_at_its_total(folder: Path, tmp_path: Path, target: str, options: dict[str, bool]) -> None:
    seen: list[tuple[int, int]] = []
    WRITERS[target](folder, tmp_path / "a", on_progress=lambda *done: seen.append(done), **options)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1] > 0
    with pytest.raises(CheckpointExistsError):
        WRITERS[target](folder, tmp_path / "a")


def test_errors_of_the_functions(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointValueError, match="can't be written in 0 files: pass 1 or more"):
        reshard(folder, tmp_path / "o", files=0)
    with pytest.raises(CheckpointValueError, match=r"in 100000000 files: .* more than 6 rows .* Pass 1024"):
        reshard(folder, tmp_path / "o", files=100_000_000)
    assert not (tmp_path / "o").exists()
    with pytest.raises(CheckpointValueError, match="a file can't hold 0 bytes of tensors"):
        consolidate_huggingface(folder, tmp_path / "o", max_shard_size=0)
    with pytest.raises(CheckpointFormatError, match="the path does not exist"):
        consolidate_lightning(tmp_path / "nothing", tmp_path / "o")
    with pytest.raises(CheckpointError, match="can't open nosuchfs"):
        consolidate_safetensors(folder, "nosuchfs://bucket/o")


# -- memory ------------------------------------------------------------------------------------------------------------


MEASURED = """
import sys

def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024

if sys.argv.pop(1) == "torch":
    import torch
before = peak()
from fsdp_core.cli import fsdp
try:
    fsdp(sys.argv[1:], prog_name="fsdp")
except SystemExit as end:
    assert end.code == 0, end.code
print("peak", before, peak())
"""


def peak_of(*arguments: object, libraries: str = "none") -> tuple[int, int]:
    """The most bytes that a process has in memory, with all of its libraries, before and after it runs the command."""
    command = [sys.executable, "-c", MEASURED, libraries, "checkpoint", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    before, after = done.stdout.split()[-2:]
    return int(before), int(after)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 MB of state: one large tensor by rows, one by columns, and their moments."""
    path = tmp_path_factory.mktemp("large") / "a.ckpt"
    rows, columns = torch.ones(2048, 8192), torch.ones(2048, 8192)
    state = {
        "model": {"rows": in_pieces(rows, 0, 1000), "columns": in_pieces(columns, 1, 4097)},
        "optimizer": [
            {
                "state": {name: {"exp_avg": rows} for name in ("rows", "columns")},
                "param_groups": [{"params": ["rows", "columns"]}],
            }
        ],
        "trainer": {"pytorch-lightning_version": "2.6.6"},
    }
    save_alone(path, state)
    return path


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("target", ["verify", "safetensors", "huggingface", "reshard"])
def test_what_copies_bytes_takes_a_fraction_of_the_state(large: Path, tmp_path: Path, target: str) -> None:
    arguments: dict[str, list[object]] = {
        "verify": ["verify", large],
        "reshard": ["reshard", large, tmp_path / "o", "--files", 3],
    }
    _, peak = peak_of(*arguments.get(target, ["consolidate", large, tmp_path / "o", "--to", target]))
    assert peak < 64 * 2**20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("options", [["lightning"], ["safetensors", "--dtype", "bfloat16"]], ids=" ".join)
def test_what_needs_torch_takes_little_more_than_torch(large: Path, tmp_path: Path, options: list[str]) -> None:
    before, peak = peak_of("consolidate", large, tmp_path / "o", "--to", *options, libraries="torch")
    assert peak - before < 40 * 2**20
