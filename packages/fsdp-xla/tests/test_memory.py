"""How much host memory ``xla_fsdp`` takes, over what its devices hold: measured, on two ranks that are one process."""

from __future__ import annotations

import ctypes
import gc
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

import launching as runs
from fsdp_core import CheckpointError, UnsupportedCapabilityError, load_state_dict, wrap
from launching import Launching, LaunchingSPMD, launch

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux resets a process's peak")

DEVICES = 2
LAYERS, DEEP, WIDTH = 8, 24, 512
#: Of the weights, and of the momentum that an optimizer keeps beside them: bytes.
WEIGHTS = LAYERS * WIDTH * (WIDTH + 1) * 4
#: Weights and momentum of all ranks, and of one.
ALL, SHARD = 2 * WEIGHTS, WEIGHTS
#: The weights of the model that is built: what the shards of both ranks take, and each rank's whole model.
MODEL = WEIGHTS * DEEP // LAYERS

seen: dict[str, Any] = {}

#: Options of glibc's mallopt(), and their values.
GIVEN_BACK = {"M_MMAP_THRESHOLD": (-3, 2**18), "M_TRIM_THRESHOLD": (-1, 0), "M_ARENA_MAX": (-8, 1)}


def give_back_what_is_freed() -> None:
    """Let malloc do so with large tensors at once, or no peak could be measured; before XLA has threads."""
    libc = ctypes.CDLL(None)
    for name, (option, value) in GIVEN_BACK.items():
        assert libc.mallopt(option, value) == 1, name


class Deep(nn.Module):
    """Layers of 1 MiB each."""

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


def fabric_save(folder: Path, name: str, options: dict[str, Any]) -> Any:
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
        fabric.save(folder / f"{name}-warm", state)  # what is needed once, is there then
        return peak_of(fabric.strategy.runtime, lambda: fabric.save(folder / name, state))

    peak = launch(train, **options)
    return {"peak": peak, **first_rows(folder / name)}


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


def trainer(folder: Path, options: dict[str, Any]) -> L.Trainer:
    return runs.trainer(folder, options, use_distributed_sampler=True)


def trainer_save(folder: Path, name: str, options: dict[str, Any]) -> Any:
    path = str(folder / f"trainer {name}")
    trainer(folder, options).fit(Module(path))
    return {"peak": seen[path], **first_rows(Path(path))}


#: How a model of many layers is built, and what is to be done to each.
BUILDS: dict[str, tuple[dict[str, Any], Callable[[nn.Module], nn.Module]]] = {
    "at once": ({}, lambda layer: layer),
    "in parts": ({}, wrap),
    "in parts by torch": ({}, torch_wrap),
    "empty": ({"empty_init": True}, lambda layer: layer),
}


def build_and_save(fabric: Any, folder: Path, name: str) -> int:
    """Build a model and shard it; the most memory that this took."""
    context, mark = BUILDS[name]

    def build(layers: int) -> Any:
        with fabric.init_module(**context):
            net = Deep(layers, mark)
        return fabric.setup_module(net)

    warm, models = build(2), []
    peak = peak_of(fabric.strategy.runtime, lambda: models.append(build(DEEP)))
    fabric.save(folder / name, {"model": models[0]})
    assert warm is not models[0]
    return peak


def built(folder: Path, name: str) -> Any:
    L.seed_everything(1)
    return {"peak": launch(build_and_save, folder, name), **first_rows(folder / name)}


def built_by_one_process(folder: Path, name: str) -> Any:
    """The same under SPMD."""
    fabric = L.Fabric(strategy="xla_fsdp_spmd", devices=DEVICES)
    fabric.launch()
    torch.manual_seed(1)
    return {"peak": build_and_save(fabric, folder, name), **first_rows(folder / name)}


class Configured(Module):
    """Builds in ``configure_model``, in parts or not."""

    def __init__(self, folder: Path, layers: int, mark: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__(str(folder / "configured"))
        self.build = partial(Deep, layers, mark)

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = self.build()

    def on_train_start(self) -> None:
        seen["status"] = _status("VmHWM")

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.path)


def configured(folder: Path, name: str) -> Any:
    """The same under the Trainer, up to where training starts."""
    mark = BUILDS[name][1]
    L.seed_everything(1)
    trainer(folder, {}).fit(Configured(folder, 2, mark))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    trainer(folder, {}).fit(Configured(folder, DEEP, mark))
    return {"peak": seen["status"] - before, **first_rows(folder / "configured")}


SAVES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "sharded in turn": {"sequential_save": True},
    "full": {"state_dict_type": "full"},
    "full in turn": {"state_dict_type": "full", "sequential_save": True},
}


def contradicting() -> dict[str, str]:
    from fsdp_xla import XLAFSDPStrategy, fabric

    told: dict[str, str] = {}
    for front_end, made in {"trainer": XLAFSDPStrategy, "fabric": fabric.XLAFSDPStrategy}.items():
        with pytest.raises(UnsupportedCapabilityError) as error:
            made(sequential_save=True, async_save=True)
        told[front_end] = str(error.value)
    return told


def failing_in_turn(folder: Path) -> dict[int, str]:
    """What each rank raises when the last one can't be read."""
    from fsdp_xla.classic import lazy_state as read_late

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
            fabric.save(folder / "failing", {"model": model})
        told[rank] = str(error.value)

    try:
        launch(save, sequential_save=True)
    finally:
        read_late.flat_on_host = flat_on_host
    return told


def measured(pool: type[Launching], folder: Path, cases: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """What each case returns: a function with its arguments, called one after another in a process of their own."""
    with pool() as ranks:
        ranks.call(DEVICES, give_back_what_is_freed)
        return {case: ranks.call(DEVICES, run, folder, *args) for case, (run, *args) in cases.items()}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases: dict[str, tuple[Any, ...]] = {f"built {name}": (built, name) for name in BUILDS}
    cases |= {f"configured {name}": (configured, name) for name in ("at once", "in parts")}
    return measured(Launching, tmp_path_factory.mktemp("builds"), cases)


@pytest.mark.parametrize("case", ["built in parts", "built in parts by torch", "built empty", "configured in parts"])
def test_a_model_sharded_as_it_is_built_is_never_there_as_a_whole(builds: dict[str, Any], case: str) -> None:
    """Shards of both ranks and a few layers: less than one whole model beside them."""
    assert builds[case]["peak"] < 1.5 * MODEL
    whole = "configured at once" if case.startswith("configured") else "built at once"
    assert builds[whole]["peak"] > 1.9 * MODEL, "what is measured is not what a model takes"
    for name, value in builds[whole]["rows"].items():
        assert torch.equal(builds[case]["rows"][name], value), name


@pytest.mark.parametrize("case", ["built at once", "configured at once"])
def test_a_whole_model_is_freed_unit_by_unit_as_it_is_sharded(builds: dict[str, Any], case: str) -> None:
    """Each rank's on the host, and never those on the devices too, which torch_xla by itself keeps."""
    assert builds[case]["peak"] < 2.5 * MODEL


def test_spmd_frees_a_model_parameter_by_parameter_as_it_is_sharded(tmp_path: Path) -> None:
    """Its one process has the model once: the shards, and what is on its way to them."""
    builds = measured(LaunchingSPMD, tmp_path, {f"built {name}": (built_by_one_process, name) for name in BUILDS})
    for case in BUILDS:
        result = builds[f"built {case}"]
        assert result["peak"] < 1.3 * MODEL, case
        for name, value in builds["built at once"]["rows"].items():
            assert torch.equal(result["rows"][name], value), (case, name)


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases: dict[str, tuple[Any, ...]] = {f"fabric {name}": (fabric_save, name, SAVES[name]) for name in SAVES}
    cases |= {f"trainer {name}": (trainer_save, name, SAVES[name]) for name in SAVES if "turn" in name}
    return measured(Launching, tmp_path_factory.mktemp("saves"), cases)


@pytest.mark.parametrize("front_end", ["fabric", "trainer"])
def test_ranks_that_save_in_turn_need_memory_for_less_than_one_shard(saves: dict[str, Any], front_end: str) -> None:
    assert saves["fabric sharded"]["peak"] > 0.9 * ALL, "what is measured is not what a save takes"
    assert saves[f"{front_end} sharded in turn"]["peak"] < 0.5 * SHARD


@pytest.mark.parametrize("front_end", ["fabric", "trainer"])
def test_a_full_file_in_turn_needs_no_memory_for_shards(saves: dict[str, Any], front_end: str) -> None:
    """What is left is rank 0's: the whole, and what Lightning's writer makes of it in memory."""
    assert saves[f"{front_end} full in turn"]["peak"] < saves["fabric full"]["peak"] - 0.8 * ALL


@pytest.mark.parametrize("case", ["fabric sharded in turn", "fabric full in turn"])
def test_what_is_saved_in_turn_is_what_is_saved_at_once(saves: dict[str, Any], case: str) -> None:
    rows, want = saves[case]["rows"], saves["fabric sharded"]["rows"]
    assert list(rows) == list(want)
    for name, value in want.items():
        assert torch.equal(rows[name], value), name
    assert {value.numel() for name, value in rows.items() if name.endswith("weight")} == {WIDTH // 64}


def test_saving_in_turn_and_in_the_background_contradict_each_other(launching: Launching) -> None:
    for told in launching.call(DEVICES, contradicting).values():
        for words in ("sequential_save=True can't be combined with async_save=True", "where host memory is short"):
            assert words in told


def test_a_rank_that_fails_in_its_turn_is_raised_on_all(launching: Launching, tmp_path: Path) -> None:
    told = launching.call(DEVICES, failing_in_turn, tmp_path)
    assert len(told) == 2
    for rank in told.values():
        assert "this rank can't be read" in rank
        assert "on rank 1 of 2" in rank
