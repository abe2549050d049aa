"""The nest that is given to a save and what a load gives back: kinds, keys, aliases, optimizers, full files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_core
from conftest import Site
from damaged_folders import save_alone
from fsdp_core.checkpoint import load, load_state_dict, read_manifest
from fsdp_core.errors import CheckpointMismatchError, CheckpointValueError


class Tied(nn.Module):
    """A model with a tied parameter, a buffer and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("count", torch.tensor(2))
        self.version = 1

    def get_extra_state(self) -> dict[str, Any]:
        return {"version": self.version, "mask": torch.ones(2)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.version = state["version"]


@pytest.mark.parametrize("both_names", [True, False])
def test_a_tied_parameter_is_stored_once_and_comes_back_under_both_names(tmp_path: Path, both_names: bool) -> None:
    model = Tied()
    weights = model.state_dict()
    if not both_names:
        del weights["head.weight"]
    aliases = {"model/head.weight": "model/wte.weight"}
    save_alone(tmp_path / "c", {"model": weights}, aliases=aliases)
    manifest = read_manifest(tmp_path / "c")
    assert manifest.aliases == aliases
    assert set(manifest.tensors) == {"model/wte.weight", "model/count", "model/_extra_state/mask"}
    state_dict = load_state_dict(tmp_path / "c")
    assert state_dict["head.weight"] is state_dict["wte.weight"]
    other = Tied()
    other.version = 0
    other.load_state_dict(state_dict)
    assert other.head.weight.equal(model.wte.weight)
    assert other.version == 1


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ({"model/a": "model/nothing"}, "refers to 'model/nothing', which is not among the tensors|no 'model/nothing'"),
        ({"model/x": "model/y"}, r"alias 'model/x' has shape \(2,\) and torch.float32, but 'model/y' has \(3,\)"),
        ({"nothing/x": "model/y"}, "no 'nothing' in the state: the state has model, step"),
        ({"model/z": "step"}, "refers to 'step', which is not among the tensors"),
    ],
)
def test_aliases_that_do_not_fit_are_refused(tmp_path: Path, aliases: dict[str, str], message: str) -> None:
    state = {"model": {"x": torch.zeros(2), "y": torch.zeros(3)}, "step": 1}
    with pytest.raises(CheckpointValueError, match=message):
        save_alone(tmp_path / "c", state, aliases=aliases)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({"mdoel": "model"}, "no 'mdoel' in the state: the state has model, optimizer"),
        ({"optimizer/1": "optimizer"}, "no 'optimizer/1' in the state: 'optimizer' has 0"),
        ({"model": "weights"}, "must be 'model' or 'optimizer'"),
    ],
)
def test_kinds_that_do_not_fit_are_refused(tmp_path: Path, kinds: Any, message: str) -> None:
    with pytest.raises(CheckpointValueError, match=message):
        save_alone(tmp_path / "c", {"model": {}, "optimizer": [{}]}, kinds)


def test_two_tensors_of_one_key_are_refused(tmp_path: Path) -> None:
    state = {"model": {1: torch.ones(1), "1": torch.ones(1)}}
    with pytest.raises(
        CheckpointValueError, match="'model/1': another tensor of the state would also be stored as 'model/1'"
    ):
        save_alone(tmp_path / "c", state)
    save_alone(tmp_path / "c", {"plain": {1: torch.ones(1), "1": torch.zeros(1)}})
    assert [value.item() for value in load(tmp_path / "c")["plain"].values()] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (lambda: torch.zeros(1, dtype=torch.complex128), "safetensors has no dtype complex128; save torch.view"),
        (lambda: torch.zeros(1, device="meta"), "it is on the meta device and holds no data; materialise it first"),
        (lambda: torch.zeros(1).to_sparse(), r"layout torch.sparse_coo is not dense; save tensor.to_dense\(\)"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8), "is not dense"),
        (lambda: nn.Linear(1, 1), "torch.nn.modules.linear.Linear is neither plain data nor a tensor"),
    ],
    ids=["complex128", "meta", "sparse", "quantized", "module"],
)
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
@pytest.mark.parametrize("kinds", [{"model": "model"}, {}])
def test_refused_leaves_are_named_with_their_key(tmp_path: Path, leaf: Any, message: str, kinds: Any) -> None:
    with pytest.raises(CheckpointValueError, match=f"'model/w': .*{message}"):
        save_alone(tmp_path / "c", {"model": {"w": leaf()}}, kinds)
    assert not (tmp_path / "c").exists()


def test_load_state_dict_casts_floating_point_only(tmp_path: Path) -> None:
    save_alone(tmp_path / "c", {"model": {"w": torch.ones(2), "n": torch.ones(2).long()}})
    back = load_state_dict(tmp_path / "c", device="meta", dtype=torch.bfloat16)
    assert (back["w"].dtype, back["n"].dtype, back["w"].device.type) == (torch.bfloat16, torch.int64, "meta")


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_load_state_dict_reads_a_full_file(tmp_path: Path, key: str) -> None:
    weight = torch.arange(3.0)
    torch.save({key: {"a": weight, "b": weight}, "epoch": 1}, tmp_path / "full.ckpt")
    back = load_state_dict(tmp_path / "full.ckpt")
    assert back["a"].equal(weight)
    assert back["a"] is back["b"]
    with pytest.raises(CheckpointMismatchError, match=f"no model under 'x' in .*full.ckpt. It holds: '{key}', 'epoch'"):
        load_state_dict(tmp_path / "full.ckpt", "x")


def test_reading_needs_neither_lightning_nor_a_process_group(site: Site) -> None:
    save_alone(site.path / "c", {"model": {"w": torch.ones(2)}})
    done = site.forked("""
        import sys, fsdp_core
        print(fsdp_core.load_state_dict("c")["w"].tolist())
        print([name for name in ("lightning", "lightning_fabric", "pytorch_lightning") if name in sys.modules])
    """)
    assert done.stdout.splitlines() == ["[1.0, 1.0]", "[]"]
    assert fsdp_core.load_state_dict is load_state_dict
