"""What xla_fsdp_spmd saves on four devices goes on bit for bit on four, and is whole on two, one, and without XLA."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import mse_loss

import fsdp_core
from fsdp_core import RandomState
from fsdp_core.checkpoint.storage.folder import Folder
from fsdp_core.errors import CheckpointError, CheckpointMismatchError
from fsdp_core.testing.oracle import adamw_groups, global_batches, new_net
from fsdp_core.testing.training import Lit, loader
from launching import LaunchingSPMD
from spmd_runs import compiled, fit, moments, new_fabric, new_trainer, shapes, whole_state

STEPS = 6


class Statistics(nn.Module):
    """The oracle's net with dropout and a BatchNorm, whose buffers change."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = new_net(dropout=0.2, blocks=1)
        torch.manual_seed(seed)
        self.norm = nn.BatchNorm1d(6)
        for parameter in self.parameters():
            if seed:
                nn.init.constant_(parameter, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.net(x))
        return y


def train(fabric: Any, model: Any, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for x, y in batches:
        x, y = fabric.strategy.batch_to_devices((x, y))
        loss = mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def begin(devices: int, seed: int, options: dict[str, Any] | None = None) -> tuple[Any, ...]:
    fabric = new_fabric(options, devices)
    module = Statistics(seed)
    return fabric, module, *fabric.setup(module, adamw_groups(module))


def whole_moments(fabric: Any, module: nn.Module, optimizer: Any) -> dict[str, Any]:
    strategy = fabric.strategy
    state = strategy.sharded_of(module).optimizer_state(optimizer.optimizer)["state"]
    return {f"{name}/{key}": strategy.backend.full_tensor(v) for name, of in state.items() for key, v in of.items()}


def save(folder: Path, devices: int) -> dict[str, Any]:
    """Train, save, and go on: what one that loads it has to repeat."""
    torch.manual_seed(11)
    fabric, module, model, optimizer = begin(devices, 0)
    random = RandomState(fabric.strategy.runtime)
    train(fabric, model, optimizer, global_batches(3))
    fabric.save(folder / "fabric", {"model": model, "optimizer": optimizer, "random": random, "steps": 3})
    found = {
        "state": whole_state(fabric.strategy, module),
        "moments": whole_moments(fabric, module, optimizer),
        "next": train(fabric, model, optimizer, global_batches(STEPS)[3:]),
        "compiled": compiled(),
    }
    fabric.load(folder / "fabric", {"model": model, "optimizer": optimizer, "random": random})
    found["again"] = train(fabric, model, optimizer, global_batches(STEPS)[3:])
    found["compiled again"] = compiled()

    # three steps of two batches each: saved after each step, and within the second
    every = ModelCheckpoint(folder, filename="{step}-{batch}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [every, _SaveAmid(str(folder / "amid.ckpt"))]
    module = Lit("adamw_groups", dropout=0.2, blocks=1)
    found["trainer"] = fit(
        str(folder), STEPS, module=module, accumulate_grad_batches=2, enable_checkpointing=True, callbacks=callbacks
    )
    found["trainer saved"] = sorted(path.name for path in folder.glob("step*"))
    module = Lit("adamw_groups", dropout=0.2, blocks=1)
    full = new_trainer(str(folder), {"state_dict_type": "full"}, max_steps=2)
    full.fit(module, loader(2, 1))
    full.save_checkpoint(folder / "full.ckpt")
    found["behind"] = {kind: behind(folder, kind) for kind in ("sharded", "full")}
    found["behind trainer"] = behind_trainer(folder)
    found["full"] = whole_state(full.strategy, module)
    return found


def behind(folder: Path, kind: str) -> dict[str, Any]:
    """Saved in the background, which goes on meanwhile; and a failure, which the next step or save raises."""
    fabric, module, model, optimizer = begin(4, 0, {"async_save": True, "state_dict_type": kind})
    train(fabric, model, optimizer, global_batches(2))
    fabric.save(folder / f"behind-{kind}", {"model": model, "optimizer": optimizer})
    pending = fabric.strategy.async_saves._last is not None
    found = {"pending": pending, "state": whole_state(fabric.strategy, module)}
    train(fabric, model, optimizer, global_batches(4)[2:])
    found["later"] = whole_state(fabric.strategy, module)
    fabric.strategy.wait_for_saves()

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "writing", fails)
        patch.setattr(fabric.strategy.checkpoint_io, "save_checkpoint", fails)
        fabric.save(folder / "nowhere", {"model": model})
        with pytest.raises(CheckpointError) as told:
            fabric.strategy.wait_for_saves()
    return {**found, "told": str(told.value)}


def behind_trainer(folder: Path) -> dict[str, Any]:
    """The same with a ModelCheckpoint, as against without."""
    every = ModelCheckpoint(folder / "behind", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [every]}
    found = fit(str(folder), 3, options={"async_save": True}, module=Lit("adamw_groups", blocks=1), **options)
    return {**found, "saved": sorted(path.name for path in (folder / "behind").iterdir())}


class _SaveAmid(ModelCheckpoint):
    """Saves after the third batch."""

    def __init__(self, path: str) -> None:
        super().__init__(save_top_k=0)
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.save_checkpoint(self.path)


def load(folder: Path, devices: int) -> dict[str, Any]:
    """Go on from what was saved, in another process, perhaps on another number of devices."""
    torch.manual_seed(11)
    fabric, module, model, optimizer = begin(devices, 7)
    random = RandomState(fabric.strategy.runtime)
    rest = fabric.load(folder / "fabric", {"model": model, "optimizer": optimizer, "random": random})
    found = {
        "rest": rest,
        "state": whole_state(fabric.strategy, module),
        "moments": whole_moments(fabric, module, optimizer),
        "shapes": shapes(moments(module, optimizer.optimizer)),
        "next": train(fabric, model, optimizer, global_batches(STEPS)[3:]),
    }
    module, path = Lit("adamw_groups", dropout=0.2, blocks=1), str(folder / "amid.ckpt")
    found["trainer"] = fit(
        str(folder), STEPS, module=module, devices=devices, ckpt_path=path, accumulate_grad_batches=2
    )
    module = Lit("adamw_groups", dropout=0.2, blocks=1)
    trainer = new_trainer(str(folder), {"state_dict_type": "full"}, devices=devices, max_steps=2)
    trainer.fit(module, loader(2, 1), ckpt_path=str(folder / "full.ckpt"))
    found["full"] = whole_state(trainer.strategy, module)
    found["full steps"] = [loss.item() for loss in module.losses]
    found["refused"] = refused(fabric, folder)
    return found


def refused(fabric: Any, folder: Path) -> dict[str, Any]:
    """A checkpoint that does not fit changes nothing."""
    module = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    fabric.save(folder / f"other{fabric.strategy.runtime.device_mesh.size()}", {"model": model, "optimizer": optimizer})
    other = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    of_other, its_optimizer = fabric.setup(other, torch.optim.AdamW(other.parameters()))
    before = whole_state(fabric.strategy, other)
    try:
        path = folder / f"other{fabric.strategy.runtime.device_mesh.size()}"
        fabric.load(path, {"model": of_other, "optimizer": its_optimizer})
    except CheckpointMismatchError as error:
        after = whole_state(fabric.strategy, other)
        return {"message": str(error), "same": all(torch.equal(before[name], after[name]) for name in before)}
    raise AssertionError("it was loaded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spmd_checkpoints")


@pytest.fixture(scope="module")
def saved(spmd: LaunchingSPMD, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = spmd.call(4, save, folder, 4)
    return found


@pytest.fixture(scope="module")
def loaded(folder: Path, saved: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What was loaded, by the number of devices; in processes of their own, side by side."""

    def load_on(count: int) -> tuple[int, dict[str, Any]]:
        with LaunchingSPMD() as ranks:
            return count, ranks.call(count, load, folder, count)

    with ThreadPoolExecutor(3) as threads:
        return dict(threads.map(load_on, (1, 2, 4)))


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
