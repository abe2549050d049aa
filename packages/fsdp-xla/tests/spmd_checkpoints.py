"""Saves and loads on some number of devices, for test_spmd_checkpoints.py to compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import mse_loss

from fsdp_core import RandomState
from fsdp_core.checkpoint.storage.folder import Folder
from fsdp_core.errors import CheckpointError, CheckpointMismatchError
from fsdp_core.testing.oracle import adamw_groups, global_batches, new_net
from fsdp_core.testing.training import Lit, loader
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
    fabric.save(folder / f"other{fabric.strategy.runtime.mesh.size()}", {"model": model, "optimizer": optimizer})
    other = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    of_other, its_optimizer = fabric.setup(other, torch.optim.AdamW(other.parameters()))
    before = whole_state(fabric.strategy, other)
    try:
        path = folder / f"other{fabric.strategy.runtime.mesh.size()}"
        fabric.load(path, {"model": of_other, "optimizer": its_optimizer})
    except CheckpointMismatchError as error:
        after = whole_state(fabric.strategy, other)
        return {"message": str(error), "same": all(torch.equal(before[name], after[name]) for name in before)}
    raise AssertionError("it was loaded")


def main(out: str, what: str, folder: str, devices: str) -> None:
    torch.manual_seed(11)
    torch.save({"save": save, "load": load}[what](Path(folder), int(devices)), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
