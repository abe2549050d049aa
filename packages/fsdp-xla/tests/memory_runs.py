"""What test_memory.py runs: how much host memory a save takes, and building a model."""

from __future__ import annotations

import ctypes
import gc
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import wrap as torch_wrap
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from fsdp_core import CheckpointError, UnsupportedCapabilityError, load_state_dict, wrap
from xla_process import save_cases

DEVICES, FOLDER = (int(sys.argv[1]), Path(sys.argv[2])) if __name__ == "__main__" else (1, Path())
LAYERS, DEEP, WIDTH = 8, 24, 1024
#: Of the weights, and of the momentum that an optimizer keeps beside them: bytes.
WEIGHTS = LAYERS * WIDTH * (WIDTH + 1) * 4

seen: dict[str, Any] = {}

#: Options of glibc's mallopt(), and their values.
GIVEN_BACK = {"M_MMAP_THRESHOLD": (-3, 2**20), "M_TRIM_THRESHOLD": (-1, 0), "M_ARENA_MAX": (-8, 1)}


def give_back_what_is_freed() -> None:
    """Let malloc do so with large tensors at once, or no peak could be measured; before XLA has threads."""
    libc = ctypes.CDLL(None)
    for name, (option, value) in GIVEN_BACK.items():
        assert libc.mallopt(option, value) == 1, name


class Deep(nn.Module):
    """Layers of 4 MiB each."""

    def __init__(self, layers: int = LAYERS, mark: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mark(nn.Linear(WIDTH, WIDTH)) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def peak_of(runtime: Any, work: Callable[[], Any]) -> int:
    """The most bytes that this process, with all of its ranks, has held during ``work`` above what it held before."""
    gc.collect()
    runtime.barrier()
    before = 0
    if runtime.rank == 0:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
    runtime.barrier()
    work()
    runtime.barrier()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def fabric_save(name: str, options: dict[str, Any]) -> Any:
    from fsdp_xla.fabric import XLAFSDPStrategy

    def train(fabric: Any) -> Any:
        with fabric.init_module():
            torch.manual_seed(1)
            net = Deep()
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        fabric.backward(model(torch.ones(1, WIDTH, device=fabric.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
        state = {"model": model, "optimizer": optimizer}
        fabric.save(FOLDER / f"{name}-warm", state)  # what is needed once, is there then
        return peak_of(fabric.strategy.runtime, lambda: fabric.save(FOLDER / name, state))

    peak = L.Fabric(strategy=XLAFSDPStrategy(**options), devices=DEVICES).launch(train)
    return {"peak": peak, **first_rows(FOLDER / name)}


def first_rows(path: Path) -> dict[str, Any]:
    if path.is_dir():
        state = load_state_dict(path)
    else:
        state = torch.load(path, weights_only=True)
        state = state.get("state_dict", state.get("model"))
    return {"rows": {name: value.reshape(-1)[:: WIDTH * 64].clone() for name, value in state.items()}}


class Module(L.LightningModule):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(1)
            self.net = Deep()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return mse_loss(self.net(batch), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(DEVICES, WIDTH), batch_size=1)  # type: ignore[arg-type]

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(f"{self.path}-warm")
        runtime: Any = self.trainer.strategy.runtime  # type: ignore[attr-defined]
        peak = peak_of(runtime, lambda: self.trainer.save_checkpoint(self.path))
        if runtime.rank == 0:
            seen[self.path] = peak


def trainer(options: dict[str, Any]) -> L.Trainer:
    from fsdp_xla import XLAFSDPStrategy

    return L.Trainer(
        strategy=XLAFSDPStrategy(**options),
        devices=DEVICES,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_epochs=1,
        default_root_dir=str(FOLDER),
    )


def trainer_save(name: str, options: dict[str, Any]) -> Any:
    path = str(FOLDER / f"trainer {name}")
    trainer(options).fit(Module(path))
    return {"peak": seen[path], **first_rows(Path(path))}


#: How a model of many layers is built, and what is to be done to each.
BUILDS: dict[str, tuple[dict[str, Any], Callable[[nn.Module], nn.Module]]] = {
    "at once": ({}, lambda layer: layer),
    "in parts": ({}, wrap),
    "in parts by torch": ({}, torch_wrap),
    "empty": ({"empty_init": True}, lambda layer: layer),
}


def built(name: str) -> Any:
    """Build a model and shard it; the most memory that this took."""
    context, mark = BUILDS[name]

    def train(fabric: Any) -> Any:
        def build(layers: int) -> Any:
            with fabric.init_module(**context):
                net = Deep(layers, mark)
            return fabric.setup_module(net)

        warm, found = build(2), {}
        peak = peak_of(fabric.strategy.runtime, lambda: found.update(model=build(DEEP)))
        fabric.save(FOLDER / name, {"model": found["model"]})
        assert warm is not found["model"]
        return peak

    L.seed_everything(1)
    peak = L.Fabric(strategy="xla_fsdp", devices=DEVICES).launch(train)
    return {"peak": peak, **first_rows(FOLDER / name)}


def built_by_one_process(name: str) -> Any:
    """The same under SPMD."""
    context, mark = BUILDS[name]
    fabric = L.Fabric(strategy="xla_fsdp_spmd", devices=DEVICES)
    fabric.launch()

    def build(layers: int) -> Any:
        torch.manual_seed(1)
        with fabric.init_module(**context):
            net = Deep(layers, mark)
        return fabric.setup_module(net)

    warm, found = build(2), {}
    runtime: Any = fabric.strategy.runtime  # type: ignore[attr-defined]
    peak = peak_of(runtime, lambda: found.update(model=build(DEEP)))
    fabric.save(FOLDER / name, {"model": found["model"]})
    assert warm is not found["model"]
    return {"peak": peak, **first_rows(FOLDER / name)}


class Configured(Module):
    """Builds in ``configure_model``, in parts or not."""

    def __init__(self, layers: int, mark: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__("")
        self.build = partial(Deep, layers, mark)

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = self.build()

    def on_train_start(self) -> None:
        seen["status"] = _status("VmHWM")

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(str(FOLDER / "configured"))


def configured(name: str) -> Any:
    """The same under the Trainer, up to where training starts."""
    mark = BUILDS[name][1]
    L.seed_everything(1)
    trainer({}).fit(Configured(2, mark))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    trainer({}).fit(Configured(DEEP, mark))
    return {"peak": seen["status"] - before, **first_rows(FOLDER / "configured")}


SAVES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "sharded in turn": {"sequential_save": True},
    "full": {"state_dict_type": "full"},
    "full in turn": {"state_dict_type": "full", "sequential_save": True},
}


def contradicting(made: Any) -> str:
    with pytest.raises(UnsupportedCapabilityError) as told:
        made(sequential_save=True, async_save=True)
    return str(told.value)


def failing_in_turn() -> dict[int, str]:
    """What each rank raises when the last one can't be read."""
    from fsdp_xla.classic import lazy_state as read_late
    from fsdp_xla.fabric import XLAFSDPStrategy

    told: dict[int, str] = {}
    flat_on_host = read_late.flat_on_host

    def save(fabric: Any) -> None:
        model = fabric.setup_module(nn.Linear(32, 32))  # of which each rank has a part
        rank = fabric.global_rank

        def read(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.index == DEVICES - 1:
                raise OSError("this rank can't be read")
            return flat_on_host(tensor)

        read_late.flat_on_host = read
        with pytest.raises(CheckpointError) as error:
            fabric.save(FOLDER / "failing", {"model": model})
        told[rank] = str(error.value)

    try:
        L.Fabric(strategy=XLAFSDPStrategy(sequential_save=True), devices=DEVICES).launch(save)
    finally:
        read_late.flat_on_host = flat_on_host
    return told


def both() -> dict[str, Callable[[], Any]]:
    from fsdp_xla import XLAFSDPStrategy, fabric

    return {
        "fabric in turn and behind": lambda: contradicting(fabric.XLAFSDPStrategy),
        "trainer in turn and behind": lambda: contradicting(XLAFSDPStrategy),
    }


def cases(of: str) -> dict[str, Callable[[], Any]]:
    if of == "saves":
        return {
            **{f"fabric {name}": partial(fabric_save, name, options) for name, options in SAVES.items()},
            **{f"trainer {name}": partial(trainer_save, name, SAVES[name]) for name in SAVES if "turn" in name},
            **both(),
            "failing in turn": failing_in_turn,
        }
    if of == "spmd builds":
        return {f"built {name}": partial(built_by_one_process, name) for name in BUILDS}
    return {
        **{f"built {name}": partial(built, name) for name in BUILDS},
        **{f"configured {name}": partial(configured, name) for name in ("at once", "in parts")},
    }


if __name__ == "__main__":
    give_back_what_is_freed()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    save_cases(cases(sys.argv[3]), FOLDER)
