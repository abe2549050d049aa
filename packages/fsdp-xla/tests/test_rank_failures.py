"""``xla_fsdp`` where something goes wrong on its ranks: an error that says what, and no hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import lightning as L
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import launching as runs
from fsdp_core.testing.oracle import FP32_TOLERANCE
from launching import Launching, launch

#: What a rank waits for comes within this, or never.
SECONDS = 60.0

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


def trainer(folder: Path, **kwargs: Any) -> L.Trainer:
    return runs.trainer(folder, **{"use_distributed_sampler": True, "limit_val_batches": None, **kwargs})


def another_waits() -> None:
    """Return when a rank waits for this one."""
    from fsdp_xla.torch_xla_private import devices as xla

    barrier, end = xla.this_thread.communicator.barrier, time.monotonic() + SECONDS
    while not barrier._waiting:
        assert time.monotonic() < end, "no rank has come to wait for this one"
        time.sleep(0.001)


@contextmanager
def told_of_calls(name: str) -> Iterator[threading.Event]:
    """A context in which an event tells that a method of the ranks' barrier has been called, and has returned."""
    from fsdp_xla.ranks.barrier import ThreadBarrier

    method, called = getattr(ThreadBarrier, name), threading.Event()

    def then_tell(self: ThreadBarrier) -> None:
        method(self)
        called.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadBarrier, name, then_tell)
        yield called


class Tells(L.Callback):
    """Notes which ranks are told of an error."""

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        note("told", [trainer.global_rank, trainer.global_step, trainer.strategy.is_in_a_rank, type(error).__name__])


class Raises(Module):
    def training_step(self, batch: Any, index: int) -> Any:
        if index == 2:
            raise ValueError("the user's own error")
        return super().training_step(batch, index)


def raises_everywhere(folder: Path) -> Any:
    callbacks = [Tells(), OnExceptionCheckpoint(str(folder), "exception")]
    with pytest.raises(ValueError, match="the user's own error") as raised:
        trainer(folder, callbacks=callbacks, enable_checkpointing=True).fit(Raises())
    return str(raised.value), sorted(seen["told"])


def test_callbacks_are_told_of_an_error_in_their_ranks_and_can_save(afresh: Launching, tmp_path: Path) -> None:
    error, told = afresh.call(2, raises_everywhere, tmp_path)
    assert error == "the user's own error"
    assert told == [[0, 2, True, "ValueError"], [1, 2, True, "ValueError"]]
    assert (tmp_path / "exception.ckpt").exists()


def heed_control_c() -> None:
    """Let SIGINT interrupt this process, also if the tests were started in the background, where shells ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def control_c(folder: Path) -> Any:
    heed_control_c()
    with told_of_calls("interrupt") as main_thread_told:

        class Interrupted(Module):
            def training_step(self, batch: Any, index: int) -> Any:
                if index == 2:
                    if self.trainer.is_global_zero:
                        os.kill(os.getpid(), signal.SIGINT)
                    assert main_thread_told.wait(SECONDS)
                note("steps", index)
                return super().training_step(batch, index)

        saves = OnExceptionCheckpoint(str(folder), "exception")
        stage = trainer(folder, callbacks=[Tells(), saves], enable_checkpointing=True)
        with pytest.raises(SystemExit) as ended:
            stage.fit(Interrupted())
    return ended.value.code, max(seen["steps"]), sorted(seen["told"])


def test_control_c_ends_a_fit_at_the_next_step_and_callbacks_can_save(afresh: Launching, tmp_path: Path) -> None:
    code, steps, told = afresh.call(2, control_c, tmp_path)
    assert code == 1
    assert steps in (2, 3)
    assert [[rank, inside, kind] for rank, _, inside, kind in told] == [
        [0, True, "KeyboardInterrupt"],
        [1, True, "KeyboardInterrupt"],
    ]
    assert (tmp_path / "exception.ckpt").exists()


def control_c_twice() -> str:
    """The ranks' steps meet nobody, so that the first has nothing to stop."""
    heed_control_c()
    with told_of_calls("interrupt") as first, told_of_calls("abort") as second:

        def wait(fabric: L.Fabric) -> None:
            if fabric.global_rank == 0:
                another_waits()
                for told in (first, second):
                    os.kill(os.getpid(), signal.SIGINT)
                    assert told.wait(SECONDS)
            fabric.barrier()

        with pytest.raises(KeyboardInterrupt):
            launch(wait)
    return "interrupted"


def test_a_second_control_c_ends_ranks_that_wait_for_another(afresh: Launching) -> None:
    assert afresh.call(2, control_c_twice) == "interrupted"


def late_rank(_: Path) -> None:
    is_told = threading.Event()

    def train(fabric: L.Fabric) -> None:
        if fabric.global_rank == 1:
            assert is_told.wait(SECONDS)
        try:
            fabric.barrier()
        finally:
            is_told.set()

    launch(train, timeout=timedelta(seconds=2))


def uneven(folder: Path) -> None:
    class Batches(IterableDataset[Any]):
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Any:
            yield from rows(self.count)

    class Uneven(Module):
        def train_dataloader(self) -> Any:
            return DataLoader(Batches(8 - 2 * self.trainer.global_rank), batch_size=2)

    trainer(folder).fit(Uneven())


def ended_rank(_: Path) -> None:
    launch(lambda fabric: fabric.barrier() if fabric.global_rank == 0 else None)


def barrier_amid_building(_: Path) -> None:
    def train(fabric: L.Fabric) -> None:
        with fabric.init_module():
            fabric.barrier()

    launch(train)


class ItemOfOne(Module):
    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        if self.trainer.is_global_zero:
            loss.item()
        return loss


def item_of_one(folder: Path) -> None:
    trainer(folder).fit(ItemOfOne())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            late_rank,
            [
                "rank 1 (train, test_rank_failures.py line",
                "did not arrive within 2 s",
                "rank 0 exchanges values",
                "hang_timeout=timedelta(",
            ],
        ),
        (uneven, ["rank 1 has ended, while rank 0 exchanges values", "DistributedSampler"]),
        (ended_rank, ["rank 1 has ended, while rank 0 exchanges values (barrier", "test_rank_failures.py line"]),
        (item_of_one, ["ranks do different things", "rank 0 waits for a value", "rank 1 exchanges values"]),
        (barrier_amid_building, ["while it builds its model", "before or after init_module()"]),
    ],
)
def test_ranks_that_can_not_meet_are_told_why(afresh: Launching, tmp_path: Path, case: Any, words: list[str]) -> None:
    afresh.assert_error(2, ("RankLostError", *words), case, tmp_path)


class HostDisk(LocalFileSystem):
    """A disk of each host's own, where every rank is a host."""

    protocol = "host"
    folder: ClassVar[Path]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        from fsdp_xla.torch_xla_private import devices as xla

        here = xla.rank_here()
        disk = cls.folder / f"host{0 if here is None else here.rank}"
        disk.mkdir(exist_ok=True)
        return super()._strip_protocol(str(path).replace("host://", f"{disk}/", 1))


def own_disks(folder: Path, kind: Any) -> None:
    """Saves and loads where ranks do not see each other's files."""

    def train(fabric: L.Fabric) -> None:
        net = nn.Linear(64, 64)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        state = {"model": model, "optimizer": optimizer}
        fabric.save(f"host://{kind}", state)
        fabric.load(f"host://{kind}", state)

    HostDisk.folder = folder
    fsspec.register_implementation("host", HostDisk, clobber=True)
    launch(train, state_dict_type=kind)


def tuner(folder: Path) -> None:
    from lightning.pytorch.tuner import Tuner

    class Tuned(Module):
        lr = 0.1

    Tuner(trainer(folder)).lr_find(Tuned())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (partial(trainer, num_nodes=2), ["num_nodes=2", "threads of one process", "devices="]),
        (tuner, ["LearningRateFinder", "xla_fsdp_spmd"]),
        (
            partial(own_disks, kind="full"),
            ["there is no checkpoint at host://full", "it is read on every host", "(on rank 1 of 2"],
        ),
        (partial(own_disks, kind="sharded"), ["-rank-00001.safetensors", "save to a file system that all ranks share"]),
    ],
)
def test_what_is_refused_says_what_to_write(launching: Launching, tmp_path: Path, case: Any, words: list[str]) -> None:
    launching.assert_error(2, words, case, tmp_path)


def shared_model() -> None:
    module = Module()

    def train(fabric: L.Fabric) -> None:
        fabric.setup(module, module.configure_optimizers())

    launch(train)


def test_a_model_that_ranks_share_is_refused(afresh: Launching) -> None:
    words = ("ShardingError: Module is set up by rank", "fabric.launch(train, model)")
    afresh.assert_error(2, words, shared_model)


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


def test_a_model_that_is_passed_is_each_ranks_own(launching: Launching) -> None:
    result = launching.call(2, passed_model)
    assert result["ranks"] == pytest.approx(result["plain"], abs=FP32_TOLERANCE)


class Saves(Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.path)
        os.environ["SET_AMID_A_FIT"] = "1"


def after_a_fit(folder: Path) -> Any:
    """What may be tested and what not, by the trainer that has fitted a module and by another."""
    L.seed_everything(1)
    path = str(folder / "saved")
    module, fitting = Saves(path), trainer(folder, limit_train_batches=2)
    fitting.fit(module)
    told = {}
    for name, stage in {"same": fitting, "other": trainer(folder)}.items():
        try:
            stage.test(module, verbose=False)
        except NotImplementedError as error:
            told[name] = str(error)
    tested = [
        fitting.test(Saves.load_from_checkpoint(path, path=path), verbose=False),
        trainer(folder).test(module, ckpt_path=path, verbose=False),
    ]
    module.load_state_dict(Saves.load_from_checkpoint(path, path=path).state_dict())
    tested.append(trainer(folder).test(module, verbose=False))
    kept = os.environ.get("SET_AMID_A_FIT"), os.environ.get("PJRT_LOCAL_PROCESS_COUNT")
    return {"refused": told, "tested": [one[0]["test"] for one in tested], "environment": kept}


def test_a_fitted_module_is_refused_and_a_loaded_one_is_not(launching: Launching, tmp_path: Path) -> None:
    result = launching.call(2, after_a_fit, tmp_path)
    assert list(result["refused"]) == ["same", "other"]
    for told in result["refused"].values():
        assert "trainer.test()" in told
        assert "load_from_checkpoint(path)" in told
    assert len(set(result["tested"])) == 1
    assert result["environment"] == ("1", None)  # what the user sets stays, what XLA's launch sets does not


def another_number(folder: Path) -> None:
    """No variable says how many devices there are: the first run does."""
    del os.environ["CPU_NUM_DEVICES"]
    trainer(folder, devices=4)
    first = trainer(folder, devices=2, limit_train_batches=1)
    later = trainer(folder, devices=4)
    first.fit(Module())
    later.fit(Module())


def backward_before(folder: Path) -> None:
    Module().net(torch.ones(1, 4)).sum().backward()
    trainer(folder).fit(Module())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (another_number, "devices=4 was requested, and XLA has 2 CPU devices since a run with devices=2"),
        (backward_before, "'xla_fsdp' can't start: this process took a backward pass before XLA was started"),
    ],
)
def test_what_came_before_in_the_process_is_told(afresh: Launching, tmp_path: Path, case: Any, words: str) -> None:
    assert words in afresh.error(2, case, tmp_path)


class Fails(Module):
    """Amid a step, after its forward pass has been recorded."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        if index == 1:
            raise ValueError("all ranks alike")
        return loss


def fails_and_fits_again(folder: Path) -> str:
    with pytest.raises(ValueError, match="all ranks alike"):
        trainer(folder).fit(Fails())
    trainer(folder).fit(Module())
    return "fitted"


def test_a_step_that_failed_on_all_ranks_leaves_nothing_to_the_next_fit(afresh: Launching, tmp_path: Path) -> None:
    assert afresh.call(2, fails_and_fits_again, tmp_path) == "fitted"


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


def test_values_that_torch_fetches_by_itself(launching: Launching) -> None:
    results, plain = launching.call(2, fetches), plain_fetches()
    assert [loss for loss, _ in results] == pytest.approx(plain, abs=FP32_TOLERANCE)


def in_turn() -> Any:
    seen.clear()

    def train(fabric: L.Fabric) -> None:
        with fabric.rank_zero_first():
            if fabric.global_rank == 0:
                another_waits()
            note("order", fabric.global_rank)

    launch(train)
    return seen["order"]


def test_rank_zero_goes_first(launching: Launching) -> None:
    assert launching.call(2, in_turn) == [0, 1]
