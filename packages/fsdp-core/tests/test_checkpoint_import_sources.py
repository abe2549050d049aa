"""Every kind of source gives the very bits that its own library saved."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import checkpoint_import_ranks as ranks
import checkpoint_ranks
from damaged_folders import import_refused
from fsdp_core.checkpoint import load, read_manifest, verify
from fsdp_core.checkpoint.importing import import_checkpoint
from fsdp_core.errors import CheckpointFormatError, CheckpointMismatchError, CheckpointValueError
from fsdp_core.testing.launching.process_ranks import RankPool
from nests import assert_same, read_all

REAL_XLA = Path(__file__).parent / "xla_shards"


def imported(source: Path, out: Path, **options: Any) -> dict[str, Any]:
    """What a checkpoint holds after it was imported."""
    import_checkpoint(source, out, **options)
    verify(out)
    nest: dict[str, Any] = read_all(load(out))
    return nest


# -- torch.distributed.checkpoint -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 1])
def test_torch_distributed_checkpoint(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    pool.run(world_size, ranks.save_with_torch, tmp_path / "old", "plain", timeout=60)
    got = imported(tmp_path / "old", tmp_path / "new")
    want = {"model": ranks.weights(), "optim": ranks.optimizer(), "epoch": 4, "rng": torch.arange(5)}
    assert_same(got, want)
    manifest = read_manifest(tmp_path / "new")
    assert manifest.kinds == {"model": "model", "optim": "optimizer"}
    assert len(manifest.tensors["model/blocks.0.weight"].chunks) == 1
    assert "optim/short/exp_avg" in manifest.tensors
    weights = imported(tmp_path / "old", tmp_path / "weights", weights_only=True)
    assert_same(weights, {"model": ranks.weights()})


#: What is saved beside weights by layout, or instead of all of them.
LAYOUTS: dict[str, dict[str, Any]] = {
    "torchtitan": {
        "optimizer": ranks.optimizer(),
        "train_state": {"step": torch.tensor(4)},
        "dataloader": {"dp_rank_0": b"\x80\x04.", "world_size": 2},
    },
    "accelerate": {"optimizer": ranks.optimizer()},
    "safetensors": {"model": {name: tensor for name, tensor in ranks.weights().items() if tensor.ndim}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_other_libraries(pool: RankPool, tmp_path: Path, layout: str) -> None:
    pool.run(2, ranks.save_with_torch, tmp_path / "old", layout, timeout=60)
    if layout == "accelerate":
        (tmp_path / "old" / "random_states_0.pkl").write_bytes(b"never read")
    assert_same(imported(tmp_path / "old", tmp_path / "new"), {"model": ranks.weights(), **LAYOUTS[layout]})


def test_a_folder_without_its_metadata(pool: RankPool, tmp_path: Path) -> None:
    pool.run(1, ranks.save_with_torch, tmp_path / "old", "plain", timeout=60)
    (tmp_path / "old" / ".metadata").unlink()
    import_refused(tmp_path / "old", r"no \.metadata, which is written last: the save was interrupted")


@pytest.mark.parametrize("damage", ["missing", "truncated", "altered"])
def test_a_damaged_folder(pool: RankPool, tmp_path: Path, damage: str) -> None:
    pool.run(1, ranks.save_with_torch, tmp_path / "old", "plain", timeout=60)
    (file,) = (tmp_path / "old").glob("*.distcp")
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 2] if damage == "truncated" else bytes(len(data)))
    import_refused(tmp_path / "old", r"distcp.*(is missing|truncated|can't be read).*[Rr]estore")


# -- torch.save -----------------------------------------------------------------------------------------------------


def test_tensors_of_all_kinds(tmp_path: Path) -> None:
    base = torch.arange(120.0).reshape(4, 5, 6)
    tied = torch.randn(3, 2)
    state = OrderedDict(
        whole=base,
        transposed=base.permute(2, 0, 1),
        columns=base[:, 1:3, ::2],
        row=base[2],
        expanded=torch.randn(3, 1).expand(3, 4),
        channels=torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        parameter=nn.Parameter(torch.randn(2)),
        scalar=torch.tensor(1.5, dtype=torch.float64),
        empty=torch.empty(0, 3),
        eighth=torch.randn(4).to(torch.float8_e4m3fn),
        unsigned=torch.tensor([1, 65535], dtype=torch.uint16),
        flags=torch.tensor([True, False]),
        complex=torch.randn(3, dtype=torch.complex64),
        first=tied,
        second=tied,
        other=tied.T,
    )
    torch.save(state, tmp_path / "model.pt")
    got = imported(tmp_path / "model.pt", tmp_path / "new")["model"]
    assert list(got) == list(state)
    for name, tensor in state.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert checkpoint_ranks.bits(got[name]) == checkpoint_ranks.bits(tensor.detach()), name
    assert read_manifest(tmp_path / "new").aliases == {"model/second": "model/first"}


def test_a_file_with_the_users_own_keys(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {"net": model.state_dict(), "optim": optimizer.state_dict(), "at": {"epoch": 2}, "loss": torch.tensor(0.5)}
    torch.save(state, tmp_path / "state.pt")
    got = imported(tmp_path / "state.pt", tmp_path / "new")
    names = [name for name, _ in model.named_parameters()]
    moments = {names[number]: values for number, values in optimizer.state_dict()["state"].items()}
    groups = [{**optimizer.state_dict()["param_groups"][0], "params": names}]
    assert_same(got["net"], dict(model.state_dict()))
    assert_same(got["optim"], {"state": moments, "param_groups": groups})
    assert (got["at"], got["loss"]) == ({"epoch": 2}, torch.tensor(0.5))
    kept = imported(tmp_path / "state.pt", tmp_path / "kept", drop=["optim", "at/epoch"])
    assert (set(kept), kept["at"]) == ({"net", "at", "loss"}, {})


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (
            lambda path: torch.save(nn.Linear(2, 2), path),
            r"torch\.nn\.modules\.linear\.Linear.*save its state_dict\(\)",
        ),
        (lambda path: torch.save([1, 2], path), "does not hold a dict, but list: it contains no model"),
        (lambda path: torch.save({"epoch": 1}, path), "holds no model: none of 'epoch' is a dict of tensors by name"),
        (lambda path: torch.save({"w": torch.ones(1)}, path, _use_new_zipfile_serialization=False), "torch before 1.6"),
        (lambda path: torch.jit.script(nn.Linear(2, 2)).save(path), "TorchScript program"),
        (lambda path: path.write_bytes(b"PK\x03\x04 and no more"), "can't be read as a file of torch.save"),
        (lambda path: path.write_bytes(b"hello"), "can't be imported"),
        (lambda path: path.write_bytes(b""), "can't be imported"),
        (lambda path: path.mkdir(), r"holds nothing that can be imported \(there is nothing\)"),
        (lambda path: None, "nothing to import"),
    ],
    ids=["module", "list", "no-model", "old", "script", "zip", "text", "empty", "folder", "nothing"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_is_no_checkpoint(tmp_path: Path, write: Any, says: str) -> None:
    write(tmp_path / "old.pt")
    import_refused(tmp_path / "old.pt", f"(?s){says}", (CheckpointFormatError, TypeError))


# -- safetensors ----------------------------------------------------------------------------------------------------


def hugging_face(folder: Path) -> dict[str, Tensor]:
    folder.mkdir()
    first = {"embed.weight": torch.randn(4, 3), "norm.weight": torch.randn(3).bfloat16()}
    second = {"head.weight": torch.randn(3, 4)}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(second, folder / "model-00002-of-00002.safetensors")
    place = {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in first | second}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    (folder / "config.json").write_text("{}")
    return first | second


def test_folder_of_hugging_face(tmp_path: Path) -> None:
    want = hugging_face(tmp_path / "hf")
    assert_same(imported(tmp_path / "hf", tmp_path / "new"), {"model": want})
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    assert_same(imported(tmp_path / "hf", tmp_path / "again"), {"model": want})
    file = tmp_path / "hf" / "model-00002-of-00002.safetensors"
    assert_same(imported(file, tmp_path / "one"), {"model": {"head.weight": want["head.weight"]}})


def test_folder_of_hugging_face_that_is_not_whole(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf")
    save_file({"other": torch.ones(1)}, tmp_path / "hf" / "model-00002-of-00002.safetensors")
    import_refused(tmp_path / "hf", r"lists 'head\.weight' and 0 more tensors")
    (tmp_path / "hf" / "model-00002-of-00002.safetensors").unlink()
    import_refused(tmp_path / "hf", r"model-00002-of-00002\.safetensors is missing")


# -- torch_xla ------------------------------------------------------------------------------------------------------


def shard_name(name: str) -> str:
    return f"_fsdp_shard.{name}".replace(".", "_FSDP_SHARD_SEPARATOR_")


def xla_shards(folder: Path, world_size: int, *, flatten: bool, dim0: bool) -> dict[str, Any]:
    """Write shards as torch_xla's FSDP makes them, after its source; the real ones are below.

    They are of two wrapped modules, one in the other, with AdamW's state. Gives what is to come of them.
    """
    generator = torch.Generator().manual_seed(world_size)
    inner = {"weight": torch.randn(9, 5, 3, generator=generator), "bias": torch.randn(9, generator=generator)}
    outer = {"1.weight": torch.randn(41, 7, generator=generator), "1.scale": torch.randn(1, generator=generator)}
    units = {"": outer, "_fsdp_wrapped_module.0.": inner}
    weights = inner | outer
    moments = {"exp_avg": {n: t * 2 for n, t in weights.items()}, "exp_avg_sq": {n: t * 3 for n, t in weights.items()}}

    def to_be_cut(parameters: Iterable[str], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a unit cuts into shards, by the name that it has there."""
        if flatten:
            return {"_fsdp_wrapped_module.flat_param_0": torch.cat([values[name].flatten() for name in parameters])}
        return {f"_fsdp_wrapped_module._fpw_module.{name}": values[name] for name in parameters}

    def shards_of(values: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        shards = {}
        for prefix, parameters in units.items():
            for name, tensor in to_be_cut(parameters, values).items():
                tensor = tensor if dim0 else tensor.flatten()
                missing = -tensor.shape[0] % (world_size * (1 if dim0 else 128))
                padded = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
                shards[prefix + shard_name(name)] = padded.tensor_split(world_size)[rank].clone()
        return shards

    shard_info = {
        prefix.removesuffix("."): {
            shard_name(name): {"_orig_size": tensor.shape, "_orig_name": name}
            for name, tensor in to_be_cut(parameters, weights).items()
        }
        for prefix, parameters in units.items()
    }
    flatten_info = {
        f"{prefix}_fsdp_wrapped_module.flat_param_0": (
            [f"_fpw_module.{name}" for name in parameters],
            [tensor.shape for tensor in parameters.values()],
            [tensor.numel() for tensor in parameters.values()],
        )
        for prefix, parameters in units.items()
        if flatten
    }
    folder.mkdir()
    for rank in range(world_size):
        model = shards_of(weights, rank)
        cut_moments = {key: shards_of(values, rank) for key, values in moments.items()}
        state = {
            number: {"step": torch.tensor(5.0), **{key: values[name] for key, values in cut_moments.items()}}
            for number, name in enumerate(model)
        }
        content = {
            "model": OrderedDict(model, **{"_fsdp_wrapped_module.2.mean": torch.ones(2).bfloat16()}),
            "shard_metadata": {
                "shard_info": shard_info,
                "flatten_info": flatten_info,
                "buffer_info": {"_fsdp_wrapped_module._fpw_module.2.mean": {"_orig_dtype": torch.float32}},
                "world_size": world_size,
                "rank": rank,
            },
            "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": list(range(len(state)))}]},
            "epoch": 3,
        }
        torch.save(content, folder / f"checkpoint_rank-{rank:08d}-of-{world_size:08d}.pth")
    names = {**{name: name for name in outer}, **{name: f"0.{name}" for name in inner}}
    states = {
        full: {"step": torch.tensor(5.0), **{key: values[name] for key, values in moments.items()}}
        for name, full in names.items()
    }
    return {
        "model": {**{full: weights[name] for name, full in names.items()}, "2.mean": torch.ones(2)},
        "optimizer": {"state": states, "param_groups": [{"lr": 0.1, "params": list(names.values())}]},
        "epoch": 3,
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("flatten", "dim0"), [(False, False), (True, False), (False, True)])
def test_shards_of_torch_xla(tmp_path: Path, world_size: int, flatten: bool, dim0: bool) -> None:
    want = xla_shards(tmp_path / "xla", world_size, flatten=flatten, dim0=dim0)
    assert_same(imported(tmp_path / "xla", tmp_path / "new"), want)


def test_real_shards_of_torch_xla(tmp_path: Path) -> None:
    """Two ranks of torch_xla 2.9, two wrapped modules, flattened, AdamW; and what torch_xla makes of them itself."""
    (tmp_path / "old").mkdir()
    for file in REAL_XLA.glob("*.pth"):
        (tmp_path / "old" / file.name).write_bytes(file.read_bytes())
    expected = torch.load(REAL_XLA / "expected.pt", weights_only=True)
    got = imported(tmp_path / "old", tmp_path / "new")
    assert {name.partition("/")[2] for name in expected} == set(got["model"])
    for key, want in expected.items():
        part, _, name = key.partition("/")
        found = got["model"][name] if part == "model" else got["optimizer"]["state"][name][part]
        if name == "0.scale":  # torch_xla leaves a wrapped module's buffer in the dtype that it computed in
            assert found.dtype == torch.float32
            found = found.to(want.dtype)
        assert_same(found, want, key)
    assert sorted(got["optimizer"]["param_groups"][0]["params"]) == sorted(got["optimizer"]["state"])


def test_shards_that_are_not_of_one_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "xla"
    xla_shards(folder, 3, flatten=False, dim0=False)
    files = sorted(folder.iterdir())
    files[1].rename(tmp_path / "aside.pth")
    import_refused(folder, r"(?s)lacks the shards of rank 1 of 3.*the files of all hosts")
    (folder / "again.pth").write_bytes(files[0].read_bytes())
    import_refused(folder, r"\(rank 0 of 3\).*don't belong to one checkpoint")
    with pytest.raises(CheckpointFormatError, match=r"one rank's shard of a model: import the folder"):
        import_checkpoint(files[0], tmp_path / "new")


def test_an_xla_optimizer_of_other_parameters(tmp_path: Path) -> None:
    folder = tmp_path / "xla"
    xla_shards(folder, 2, flatten=True, dim0=False)
    for file in folder.iterdir():
        content = torch.load(file, weights_only=True)
        content["optimizer"]["state"][1] = {"exp_avg": torch.zeros(3)}
        torch.save(content, file)
    import_refused(folder, r"(?s)shapes don't match the model's.*--weights-only", CheckpointMismatchError)
    assert list(imported(folder, tmp_path / "new", weights_only=True)) == ["model"]


def test_parts_of_a_folder_are_left_out(pool: RankPool, tmp_path: Path) -> None:
    pool.run(1, ranks.save_with_torch, tmp_path / "old", "plain", timeout=60)
    torch.save({"seed": 3, "hook": nn.ReLU()}, tmp_path / "old" / "meta.pt")  # as Lightning's Fabric adds
    with pytest.raises(CheckpointValueError, match=r"(?s)'hook': torch\.nn\.modules\.activation\.ReLU.*`--drop hook`"):
        import_checkpoint(tmp_path / "old", tmp_path / "new")
    got = imported(tmp_path / "old", tmp_path / "new", drop=["hook", "optim", "model/short"])
    model = {name: tensor for name, tensor in ranks.weights().items() if name != "short"}
    assert_same(got, {"seed": 3, "model": model, "epoch": 4, "rng": torch.arange(5)})
    with pytest.raises(CheckpointValueError, match="nothing to drop at 'model/shirt'"):
        import_checkpoint(tmp_path / "old", tmp_path / "again", drop=["hook", "model/shirt"])
