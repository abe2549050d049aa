"""What xla_fsdp_spmd saves on four devices goes on bit for bit on four, and is whole on two, one, and without XLA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_core
from xla_process import results_of, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spmd_checkpoints")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = results_of("spmd_checkpoints.py", folder / "saved.pt", "save", str(folder), "4")
    return found


@pytest.fixture(scope="module")
def loaded(folder: Path, saved: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What was loaded, by the number of devices."""
    begun = {
        n: start("spmd_checkpoints.py", folder / f"loaded{n}.pt", "load", str(folder), str(n), devices=n)
        for n in (1, 2, 4)
    }
    return {n: process.finish() for n, process in begun.items()}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_weights_buffers_and_moments_are_bit_equal(
    saved: dict[str, Any], loaded: dict[int, dict[str, Any]], devices: int
) -> None:
    assert_equal(loaded[devices]["state"], saved["state"])
    assert_equal(loaded[devices]["moments"], saved["moments"])
    assert loaded[devices]["rest"] == {"steps": 3}
    assert int(saved["state"]["norm.num_batches_tracked"]) == 3


def test_the_same_number_of_devices_repeats_the_very_same_losses(
    saved: dict[str, Any], loaded: dict[int, dict[str, Any]]
) -> None:
    assert saved["again"] == saved["next"], "in the same process"
    assert loaded[4]["next"] == saved["next"], "in another process"


def test_loading_compiles_nothing(saved: dict[str, Any]) -> None:
    assert saved["compiled again"] == saved["compiled"]


@pytest.mark.parametrize(("devices", "part"), [(1, (7, 6)), (2, (7, 3)), (4, (2, 6))])
def test_restored_moments_are_in_shards(loaded: dict[int, dict[str, Any]], devices: int, part: tuple[int, ...]) -> None:
    assert loaded[devices]["shapes"]["net.blocks.0.up.weight/exp_avg"] == [part] * devices


def test_a_checkpoint_amid_an_accumulation_goes_on_exactly(
    saved: dict[str, Any], loaded: dict[int, dict[str, Any]]
) -> None:
    assert saved["trainer saved"] == [f"step={step}-batch=0.ckpt" for step in (1, 2, 3)]
    assert loaded[4]["trainer"]["losses"] == saved["trainer"]["losses"][3:]
    assert_equal(loaded[4]["trainer"]["state"], saved["trainer"]["state"])


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_full_checkpoint_is_one_file(
    folder: Path, saved: dict[str, Any], loaded: dict[int, dict[str, Any]], devices: int
) -> None:
    file = torch.load(folder / "full.ckpt", weights_only=True)
    assert_equal(file["state_dict"], saved["full"])
    assert_equal(loaded[devices]["full"], saved["full"])
    assert loaded[devices]["full steps"] == [], "it was saved after its last step"


def test_it_is_read_without_xla(folder: Path, saved: dict[str, Any]) -> None:
    assert_equal(dict(fsdp_core.load_state_dict(folder / "fabric")), saved["state"])


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_what_does_not_fit_changes_nothing(loaded: dict[int, dict[str, Any]], devices: int) -> None:
    refused = loaded[devices]["refused"]
    assert refused["same"]
    assert "0.weight: its shape is (7, 6) in the checkpoint, and (8, 6) here" in refused["message"]


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_save_behind_training_holds_what_was_there_when_it_was_asked_for(
    folder: Path, saved: dict[str, Any], kind: str
) -> None:
    found, path = saved["behind"][kind], folder / f"behind-{kind}"
    assert found["pending"]
    state = dict(fsdp_core.load_state_dict(path)) if kind == "sharded" else torch.load(path, weights_only=True)["model"]
    assert_equal(state, found["state"])
    assert not torch.equal(found["later"]["net.inp.weight"], state["net.inp.weight"]), "training did not go on"
    assert "in the background has failed" in found["told"]
    assert "No space left on device" in found["told"]


def test_checkpoints_of_a_trainer_behind_training(folder: Path, saved: dict[str, Any]) -> None:
    found = saved["behind trainer"]
    assert found["saved"] == [f"step={step}.ckpt" for step in (1, 2, 3)]
    last = dict(fsdp_core.load_state_dict(folder / "behind" / "step=3.ckpt"))
    assert_equal({name.removeprefix("net."): value for name, value in last.items()}, found["state"])
