"""What test_rank_failures.py runs on XLA's CPU devices: runs that fail."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fsdp_xla.torch_xla_private import devices as xla
from xla_process import save_cases

DEVICES, FOLDER = (int(sys.argv[1]), Path(sys.argv[2])) if __name__ == "__main__" else (2, Path())
#: What ranks have noted, by name.
seen: dict[str, list[Any]] = {}


def note(name: str, value: Any) -> None:
    seen.setdefault(name, []).append(value)


def rows(count: int = 16) -> Any:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, generator=generator), torch.randn(2, generator=generator)) for _ in range(count)]


class Module(L.LightningModule):
    """A small regression."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: Any, index: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=2)

    test_dataloader = train_dataloader


def trainer(**kwargs: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "strategy": "xla_fsdp",
        "devices": DEVICES,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(FOLDER),
    }
    return L.Trainer(**{**quiet, **kwargs})


def launch(function: Any, *args: Any, **options: Any) -> Any:
    from fsdp_xla.fabric import XLAFSDPStrategy

    return L.Fabric(strategy=XLAFSDPStrategy(**options), devices=DEVICES).launch(function, *args)


class Tells(L.Callback):
    """Notes which ranks are told of an error."""

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        note("told", [trainer.global_rank, trainer.global_step, trainer.strategy.is_in_a_rank, type(error).__name__])


def raises_everywhere() -> Any:
    class Raises(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            if index == 2:
                raise ValueError("the user's own error")
            return super().training_step(batch, index)

    saves = OnExceptionCheckpoint(str(FOLDER), "exception")
    try:
        trainer(callbacks=[Tells(), saves], enable_checkpointing=True).fit(Raises())
    except ValueError as error:
        return {"error": str(error), "told": sorted(seen["told"]), "saved": (FOLDER / "exception.ckpt").exists()}
    return None


def control_c() -> Any:
    class Interrupted(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            if index == 2 and self.trainer.is_global_zero:
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # the main thread is told
            note("steps", index)
            return super().training_step(batch, index)

    stage = trainer(callbacks=[Tells(), OnExceptionCheckpoint(str(FOLDER), "exception")], enable_checkpointing=True)
    try:
        stage.fit(Interrupted())
    except SystemExit as ended:
        told, saved = sorted(seen["told"]), (FOLDER / "exception.ckpt").exists()
        return {"code": ended.code, "steps": max(seen["steps"]), "told": told, "saved": saved}
    return None


def control_c_twice() -> Any:
    """The ranks' steps meet nobody, so that the first has nothing to stop."""

    def wait(fabric: L.Fabric) -> None:
        if fabric.global_rank == 0:
            for _ in range(2):
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGINT)
            fabric.barrier()
        else:
            fabric.barrier()

    try:
        launch(wait)
    except KeyboardInterrupt:
        return "interrupted"
    return None


def late_rank() -> Any:
    def train(fabric: L.Fabric) -> None:
        if fabric.global_rank == 1:
            time.sleep(6)
        fabric.barrier()

    return launch(train, timeout=timedelta(seconds=2))


def uneven() -> Any:
    class Batches(IterableDataset[Any]):
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Any:
            yield from rows(self.count)

    class Uneven(Module):
        def train_dataloader(self) -> Any:
            return DataLoader(Batches(8 - 2 * self.trainer.global_rank), batch_size=2)

    trainer().fit(Uneven())


def ended_rank() -> Any:
    return launch(lambda fabric: fabric.barrier() if fabric.global_rank == 0 else None)


def barrier_amid_building() -> Any:
    def train(fabric: L.Fabric) -> None:
        with fabric.init_module():
            fabric.barrier()

    return launch(train)


def shared_model() -> Any:
    module = Module()

    def train(fabric: L.Fabric) -> None:
        fabric.setup(module, module.configure_optimizers())

    return launch(train)


def passed_model() -> Any:
    def train(fabric: L.Fabric, net: nn.Module) -> float:
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loss = model(torch.ones(2, 4).to(fabric.device)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        return float(loss)

    L.seed_everything(1)
    net = Module().net
    before = net(torch.ones(2, 4)).square().mean().item()  # takes no backward pass
    return {"ranks": launch(train, net), "plain": before}


class Saves(Module):
    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(str(FOLDER / "saved"))
        os.environ["SET_AMID_A_FIT"] = "1"


def after_a_fit() -> Any:
    """What may be tested and what not, by the trainer that has fitted a module and by another."""
    L.seed_everything(1)
    module, fitting = Saves(), trainer(limit_train_batches=2)
    fitting.fit(module)
    told = {}
    for name, stage in {"same": fitting, "other": trainer()}.items():
        try:
            stage.test(module, verbose=False)
        except NotImplementedError as error:
            told[name] = str(error)
    path = str(FOLDER / "saved")
    tested = [
        fitting.test(Saves.load_from_checkpoint(path), verbose=False),
        trainer().test(module, ckpt_path=path, verbose=False),
    ]
    module.load_state_dict(Saves.load_from_checkpoint(path).state_dict())
    tested.append(trainer().test(module, verbose=False))
    kept = os.environ.get("SET_AMID_A_FIT"), os.environ.get("PJRT_LOCAL_PROCESS_COUNT")
    return {"refused": told, "tested": [one[0]["test"] for one in tested], "environment": kept}


def tuner() -> Any:
    from lightning.pytorch.tuner import Tuner

    class Tuned(Module):
        lr = 0.1

    Tuner(trainer()).lr_find(Tuned())


def another_number() -> Any:
    """No variable says how many devices there are: the first run does."""
    del os.environ["CPU_NUM_DEVICES"]
    trainer(devices=4)
    first = trainer(devices=2, limit_train_batches=1)
    later = trainer(devices=4)
    first.fit(Module())
    later.fit(Module())


def backward_before() -> Any:
    Module().net(torch.ones(1, 4)).sum().backward()
    trainer().fit(Module())


def fails_and_fits_again() -> Any:
    """Amid a step, after its forward pass has been recorded."""

    class Fails(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            if index == 1:
                raise ValueError("all ranks alike")
            return loss

    try:
        trainer().fit(Fails())
    except ValueError:
        stage = trainer()
        stage.fit(Module())
        return "fitted"
    return None


def fetches() -> Any:
    """Each of these needs a value of what collectives have still to give."""

    def train(fabric: L.Fabric) -> list[list[float]]:
        with fabric.init_module():
            torch.manual_seed(0)
            module = Module()
        model, optimizer = fabric.setup(module.net, torch.optim.SGD(module.parameters(), lr=0.1))
        x, y = (torch.stack(of_rows).to(fabric.device) for of_rows in zip(*rows(), strict=True))

        def error() -> torch.Tensor:
            squared: torch.Tensor = (model(x) - y) ** 2
            return squared

        results = []
        for fetch in FETCHES.values():
            loss = fetch(error())
            if loss.requires_grad:
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            results.append([loss.item(), next(iter(model.parameters())).sum().item()])
        return results

    return launch(train)


def plain_fetches() -> Any:
    """The same on one thread of plain torch: losses alone, for a rank has shards."""
    torch.manual_seed(0)
    net = Module().net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = (torch.stack(of_rows) for of_rows in zip(*rows(), strict=True))
    losses = []
    for fetch in FETCHES.values():
        loss = fetch((net(x) - y) ** 2)
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _zeroed(error: torch.Tensor) -> torch.Tensor:
    kept = torch.ones_like(error)
    kept[error > 1] = 0.0
    return (error * kept).mean()


FETCHES: dict[str, Any] = {
    "mask": lambda error: error[error > 0.5].mean(),
    "masked_select": lambda error: torch.masked_select(error, error > 0.5).mean(),
    "masked assignment": _zeroed,
    "nonzero": lambda error: error.sum() / (error > 0.5).nonzero().shape[0],
    "where": lambda error: error.sum() / len(torch.where(error > 0.5)[0]),
    "unique": lambda error: error.sum() / len(torch.unique(error)),
    "equal": lambda error: error.sum() if torch.equal(error, error) else error.mean(),
    "allclose": lambda error: error.sum() if torch.allclose(error, error * 2) else error.mean(),
    "branch": lambda error: error.sum() if error.mean() > 100 else error.mean(),
    "item": lambda error: error.mean() * (1 + error.detach().max().item() * 0),
    "median": lambda error: error.detach().median(),
}


class ItemOfOne(Module):
    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        if self.trainer.is_global_zero:
            loss.item()
        return loss


def in_turn() -> Any:
    def train(fabric: L.Fabric) -> None:
        with fabric.rank_zero_first():
            if fabric.global_rank == 0:
                time.sleep(2)
            note("order", fabric.global_rank)

    launch(train)
    return seen["order"]


class HostDisk(LocalFileSystem):
    """A disk of each host's own, where every rank is a host."""

    protocol = "host"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        here = xla.rank_here()
        disk = FOLDER / f"host{0 if here is None else here.rank}"
        disk.mkdir(exist_ok=True)
        return super()._strip_protocol(str(path).replace("host://", f"{disk}/", 1))


def own_disks(kind: Any) -> Any:
    """Saves and loads where ranks do not see each other's files."""

    def train(fabric: L.Fabric) -> None:
        net = nn.Linear(64, 64)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        state = {"model": model, "optimizer": optimizer}
        fabric.save(f"host://{kind}", state)
        fabric.load(f"host://{kind}", state)

    fsspec.register_implementation("host", HostDisk, clobber=True)
    return launch(train, state_dict_type=kind)


CASES: dict[str, Any] = {
    "raises everywhere": raises_everywhere,
    "control-c": control_c,
    "control-c twice": control_c_twice,
    "late rank": late_rank,
    "uneven": uneven,
    "ended rank": ended_rank,
    "barrier within building": barrier_amid_building,
    "shared model": shared_model,
    "passed model": passed_model,
    "full on own disks": lambda: own_disks("full"),
    "sharded on own disks": lambda: own_disks("sharded"),
    "after a fit": after_a_fit,
    "tuner": tuner,
    "another number": another_number,
    "several hosts": lambda: trainer(num_nodes=2),
    "backward before": backward_before,
    "again": fails_and_fits_again,
    "fetches": lambda: {"ranks": fetches(), "plain": plain_fetches()},
    "item of one": lambda: trainer().fit(ItemOfOne()),
    "in turn": in_turn,
}

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    save_cases({name: CASES[name] for name in sys.argv[3:]}, FOLDER)
