"""The position of the data loader in a checkpoint: which samples a run that goes on sees, on any number of ranks."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from fsdp_core.errors import CheckpointMismatchError, CheckpointValueError
from fsdp_core.strategy_info import Capability
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.suite.clauses import Clauses, requires
from fsdp_core.testing.training import Lit, new_fabric, new_trainer

__all__ = ["LoaderPositionsSuite"]

Sample = tuple[Tensor, Tensor, int]


class Numbered(Dataset[Sample]):
    """Samples that tell their number."""

    def __init__(self, size: int) -> None:
        self.rows = oracle.dataset(size)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return (*self.rows[index], index)


class Counting(Numbered):
    """Samples that can be looked up, and a state beside them: their numbers go up by what was looked up before."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.looked_up = 0

    def __getitem__(self, index: int) -> Sample:
        self.looked_up += 1
        return (*self.rows[index], index + 100 * self.looked_up)

    def state_dict(self) -> dict[str, int]:
        """How many were looked up."""
        return {"looked_up": self.looked_up}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore it."""
        self.looked_up = state["looked_up"]


class Stream(IterableDataset[Sample]):
    """Samples without a length. Each rank and each worker goes through the rows by steps of its own."""

    def __init__(self, size: int) -> None:
        self.rows = oracle.dataset(size)
        self.at = self.given = 0

    def __iter__(self) -> Iterator[Sample]:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        worker = get_worker_info()
        part, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while self.given < len(self.rows) // (ranks * parts):
            index, self.at = self.at % len(self.rows), self.at + 1 + rank + ranks * part
            self.given += 1
            yield (*self.rows[index], index)
        self.given = 0  # but the next epoch goes on where this one has ended

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"at": self.at, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore it."""
        self.at, self.given = state["at"], state["given"]


class OddsFirst(Sampler[int]):
    """An order that only its user knows."""

    def __init__(self, size: int) -> None:
        self.order = [*range(1, size, 2), *range(0, size, 2)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


FULL = {"state_dict_type": "full"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A fit: its data, when to save, and where to go on from.

    Attributes:
        data: What kind of loader; see :meth:`loader`.
        size: How many samples.
        batch: How many of them a rank sees in a step.
        workers: How many processes load them.
        drop_last: Whether the loader leaves out the last batch where it is smaller.
        save: When to save: the moment, the epoch, the number of the batch.
        fails: When a step fails: the epoch, the number of the batch. The checkpoint is saved then.
        path: Where to save to.
        resume: Where to go on from.
        seed: What shuffling follows from.
        trainer: Arguments of the Trainer.
        options: The strategy's options.
        asks_steps: Whether ``configure_optimizers`` asks how many steps there will be, for which Lightning makes the
            loaders before it reads the checkpoint.
    """

    data: str = "stateful"
    size: int = 24
    batch: int = 2
    workers: int = 0
    drop_last: bool = False
    save: tuple[str, int, int] | None = None
    fails: tuple[int, int] | None = None
    path: str | None = None
    resume: str | None = None
    seed: int = 0
    trainer: Mapping[str, Any] | None = None
    options: Mapping[str, Any] | None = None
    asks_steps: bool = False

    def loader(self) -> Any:
        """The loader, as its user writes it."""
        kwargs: dict[str, Any] = {
            "batch_size": self.batch,
            "num_workers": self.workers,
            "drop_last": self.drop_last,
            # ranks of a RankPool were spawned, and would spawn workers, which takes seconds
            "multiprocessing_context": "fork" if self.workers else None,
        }
        numbered, shorter, counting = Numbered(self.size), Numbered(self.size // 2), Counting(self.size)
        match self.data:
            case "stateful":
                return StatefulDataLoader(numbered, shuffle=True, **kwargs)
            case "stateful, persistent":
                return StatefulDataLoader(numbered, shuffle=True, persistent_workers=True, **kwargs)
            case "plain":
                return DataLoader(numbered, shuffle=True, **kwargs)
            case "two":
                return {
                    "long": StatefulDataLoader(numbered, shuffle=True, **kwargs),
                    "short": DataLoader(shorter, shuffle=True, **kwargs),
                }
            case "counting":
                return StatefulDataLoader(counting, shuffle=True, **kwargs)
            case "stream":
                return StatefulDataLoader(Stream(self.size), **kwargs)
            case "own sampler":
                return StatefulDataLoader(numbered, sampler=OddsFirst(self.size), **kwargs)
            case other:
                raise AssertionError(other)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a rank saw in a step, and what Lightning said of it."""

    epoch: int
    batch: int
    last: bool
    samples: list[int]
    short: list[int]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rank saw in a fit."""

    steps: list[Step]
    validated: list[tuple[int, int]]
    batches: int
    warnings: list[str]


class Watching(Lit):
    """Notes what it sees."""

    def __init__(self, run: Run) -> None:
        super().__init__("sgd")
        self.asks_steps, self.fails = run.asks_steps, run.fails
        self.steps: list[Step] = []
        self.validated: list[tuple[int, int]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) == self.fails:
            raise ArithmeticError("this step fails")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        both = batch if isinstance(batch, dict) else {"long": batch}
        x, y, index = both["long"]
        self.steps.append(
            Step(
                epoch=self.current_epoch,
                batch=batch_idx,
                last=self.trainer.is_last_batch,
                samples=index.tolist() if isinstance(index, Tensor) else [index],
                short=both["short"][2].tolist() if "short" in both else [],
            )
        )
        return mse_loss(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append((self.current_epoch, self.trainer.fit_loop.batch_idx))

    def configure_optimizers(self) -> Any:
        if self.asks_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class SaveOnce(Callback):
    """Saves a checkpoint at one moment."""

    def __init__(self, run: Run) -> None:
        self.when, self.fails, self.path = run.save, run.fails, run.path

    def _save(self, trainer: pl.Trainer, moment: str, epoch: int) -> None:
        if (moment, epoch, trainer.fit_loop.batch_idx) == self.when and not trainer.sanity_checking:
            assert self.path is not None
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._save(trainer, "batch end", trainer.current_epoch)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self.fails and isinstance(exception, ArithmeticError):
            trainer.save_checkpoint(str(self.path))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer, "validation end", trainer.current_epoch)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer, "epoch end", trainer.current_epoch)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer, "epoch start", trainer.current_epoch)


def fit(strategy: str, tmp: str, world_size: int, run: Run) -> Seen:
    """Fit on this rank."""
    allow_workers()
    module = Watching(run)
    loop: dict[str, Any] = {"max_epochs": 3, "callbacks": [SaveOnce(run)], **(run.trainer or {})}
    trainer = new_trainer(tmp, strategy, world_size, run.options, **loop)
    validation: Any = DataLoader(Numbered(world_size))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setenv("PL_GLOBAL_SEED", str(run.seed))
        warnings.simplefilter("always")
        with pytest.raises(ArithmeticError) if run.fails else nullcontext():
            trainer.fit(module, run.loader(), validation, ckpt_path=run.resume)
    if run.path is not None and run.save is None and run.fails is None:
        trainer.save_checkpoint(run.path)
    return Seen(
        steps=module.steps,
        validated=module.validated,
        batches=int(trainer.num_training_batches) if run.data != "stream" else 0,
        warnings=[str(one.message) for one in caught],
    )


def allow_workers() -> None:
    """Let this rank of a RankPool, which is a daemon, have loaders with workers."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def refused(strategy: str, tmp: str, world_size: int, run: Run) -> str:
    """What a fit is refused with."""
    return refusal(CheckpointMismatchError, lambda: fit(strategy, tmp, world_size, run))


def order_of(epoch: int, size: int) -> list[int]:
    """The samples of an epoch in the order of one process, by torch's own sampler."""
    sampler: Any = DistributedSampler(range(size), 1, 0)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


def in_turns(by_rank: list[list[list[int]]]) -> list[int]:
    """What all ranks together saw, given each one's steps, in the order in which they take turns."""
    steps = zip(*by_rank, strict=True)
    return [index for step in steps for turn in zip_longest(*step) for index in turn if index is not None]


def assert_sees(ranks: list[Seen], epoch: int, size: int, *, begins: int = 0) -> None:
    """From ``begins`` on, the epoch's samples come in order and once each, but for turns that don't come out even."""
    order, repeated = order_of(epoch, size), -(size - begins) % len(ranks)
    assert in_turns([[step.samples for step in rank.steps if step.epoch == epoch] for rank in ranks]) == (
        order[begins:] + order[:repeated]
    )
    for rank in ranks:
        steps = [step for step in rank.steps if step.epoch == epoch]
        assert [step.batch for step in steps] == list(range(rank.batches - len(steps), rank.batches))
        assert [step.last for step in steps] == [False] * (len(steps) - 1) + [True]


def steps_after(rank: Seen, save: tuple[str, int, int]) -> list[Step]:
    """The steps after a checkpoint was saved."""
    moment, epoch, batch = save
    saved = (epoch - 1, batch) if moment == "epoch start" else (epoch, batch)
    return [step for step in rank.steps if (step.epoch, step.batch) > saved]


def fabric_epochs(
    strategy: str, world_size: int, run: Run, epochs: list[int], stop: int | None = None
) -> list[list[list[int]]]:
    """Under Fabric, on this rank: each epoch's batches, of the last one ``stop`` at most; from or to a checkpoint."""
    allow_workers()
    fabric = new_fabric(strategy, world_size, run.options)
    net = oracle.new_net()
    model = fabric.setup(net)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", str(run.seed))
        loader: Any = fabric.setup_dataloaders(run.loader())
    if run.resume:
        fabric.load(run.resume, {"model": model, "loader": loader})
    seen: list[list[list[int]]] = []
    for epoch in epochs:
        seen.append([])
        for _, _, index in loader:
            seen[-1].append(index.tolist())
            if epoch == epochs[-1] and len(seen[-1]) == stop:
                break
    if run.path:
        fabric.save(run.path, {"model": model, "loader": loader})
    return seen


def fabric_refused(strategy: str, world_size: int, run: Run) -> str:
    """What saving or loading under Fabric is refused with."""
    errors = (CheckpointMismatchError, CheckpointValueError)
    return refusal(errors, lambda: fabric_epochs(strategy, world_size, run, [0]))


class LoaderPositionsSuite(Clauses):
    """Whoever goes on from a checkpoint sees the samples that are left, each once."""

    def _fit_of(self, ranks: RankPool, tmp_path: Path, world_size: int, run: Run) -> list[Seen]:
        return ranks.run(world_size, fit, self.strategy, str(tmp_path), world_size, run)

    @requires(Capability.SHARDED_CHECKPOINT)
    @pytest.mark.parametrize(
        ("saved_on", "loaded_on", "run", "following"),
        [
            pytest.param(2, 2, Run(), {}, id="same"),
            pytest.param(2, 3, Run(), {}, id="more"),
            pytest.param(3, 2, Run(size=25, batch=3), {}, id="fewer, uneven"),
            pytest.param(4, 1, Run(size=23), {"batch": 3}, id="one, other batches"),
            pytest.param(1, 4, Run(size=21, batch=3), {}, id="from one, uneven"),
            pytest.param(2, 2, Run(workers=2), {"workers": 0, "seed": 5}, id="other workers, another seed"),
            pytest.param(2, 1, Run(data="stateful, persistent", workers=2), {}, id="persistent workers"),
            pytest.param(3, 2, Run(data="plain", size=26, workers=2), {}, id="plain, workers"),
            pytest.param(2, 3, Run(), {"asks_steps": True}, id="loaders made early"),
            pytest.param(2, 3, Run(options=FULL), {}, id="full", marks=requires(Capability.FULL_CHECKPOINT)),
        ],
    )
    def test_what_is_left_of_an_epoch_is_divided(
        self, ranks: RankPool, tmp_path: Path, saved_on: int, loaded_on: int, run: Run, following: Mapping[str, Any]
    ) -> None:
        path = str(tmp_path / "saved")
        first = self._fit_of(ranks, tmp_path, saved_on, replace(run, save=("batch end", 1, 1), path=path))
        assert_sees(first, 1, run.size)
        resumed = self._fit_of(ranks, tmp_path, loaded_on, replace(run, resume=path, **following))
        assert {step.epoch for step in resumed[0].steps} == {1, 2}
        assert_sees(resumed, 1, run.size, begins=2 * saved_on * run.batch)
        assert_sees(resumed, 2, run.size)

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_divided_again(self, ranks: RankPool, tmp_path: Path) -> None:
        run, one, two = Run(size=40), str(tmp_path / "one"), str(tmp_path / "two")
        self._fit_of(ranks, tmp_path, 2, replace(run, save=("batch end", 1, 1), path=one))
        # of 40 samples, 8 are seen; 3 ranks with batches of 3 would have seen 1 batch of 5
        again = replace(run, batch=3, workers=2, resume=one, save=("batch end", 1, 2), path=two)
        assert_sees(self._fit_of(ranks, tmp_path, 3, again), 1, 40, begins=8)
        last = self._fit_of(ranks, tmp_path, 1, replace(run, resume=two))
        assert_sees(last, 1, 40, begins=8 + 2 * 3 * 3)
        assert_sees(last, 2, 40)

    @requires(Capability.SHARDED_CHECKPOINT)
    @pytest.mark.parametrize(
        ("data", "save", "trainer"),
        [
            ("stateful", ("validation end", 1, 2), {"val_check_interval": 3}),
            ("stateful", ("batch end", 1, 5), {}),
            ("stateful", ("validation end", 1, 5), {}),
            ("stateful", ("epoch end", 0, 5), {}),
            ("stateful", ("epoch end", 0, 5), {"max_steps": 18}),
            ("stateful", ("epoch start", 1, 5), {}),
            ("stream", ("validation end", 1, 2), {"val_check_interval": 3}),
            ("stream", ("batch end", 1, 5), {}),
            ("stream", ("epoch end", 0, 5), {}),
        ],
        ids=lambda value: None if isinstance(value, str) else " ".join(map(str, value)),
    )
    def test_every_moment(
        self,
        ranks: RankPool,
        tmp_path: Path,
        data: str,
        save: tuple[str, int, int],
        trainer: Mapping[str, Any],
    ) -> None:
        """On the same ranks the run that goes on sees what the first one did."""
        path = str(tmp_path / "saved")
        run = Run(data=data, trainer=trainer)
        first = self._fit_of(ranks, tmp_path, 2, replace(run, save=save, path=path))
        resumed = self._fit_of(ranks, tmp_path, 2, replace(run, resume=path))
        assert [rank.steps for rank in resumed] == [steps_after(rank, save) for rank in first]
        if save[2] == 5:  # the epoch is over, and other ranks can begin another one, whatever the data
            others = self._fit_of(ranks, tmp_path, 3, replace(run, resume=path))
            assert {step.epoch for step in others[0].steps} == {step.epoch for step in resumed[0].steps}
            if data == "stateful":
                assert_sees(others, 2, run.size)

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_saved_after_a_fit_that_stopped_amid_an_epoch(self, ranks: RankPool, tmp_path: Path) -> None:
        path = str(tmp_path / "saved")
        self._fit_of(ranks, tmp_path, 2, Run(data="plain", path=path, trainer={"max_steps": 8}))
        resumed = self._fit_of(ranks, tmp_path, 3, Run(data="plain", resume=path))
        assert_sees(resumed, 1, 24, begins=2 * 2 * 2)
        assert_sees(resumed, 2, 24)

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_batch_of_a_step_that_failed_comes_again(self, ranks: RankPool, tmp_path: Path) -> None:
        path = str(tmp_path / "saved")
        self._fit_of(ranks, tmp_path, 2, Run(fails=(1, 3), path=path))
        resumed = self._fit_of(ranks, tmp_path, 3, Run(resume=path))
        assert_sees(resumed, 1, 24, begins=3 * 2 * 2)
        assert_sees(resumed, 2, 24)

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_lightning_validates_at_its_count_of_batches(self, ranks: RankPool, tmp_path: Path) -> None:
        path, run = str(tmp_path / "saved"), Run(size=48, trainer={"val_check_interval": 4})
        self._fit_of(ranks, tmp_path, 2, replace(run, save=("batch end", 1, 4), path=path))
        # 20 of 48 samples are seen: of 3 ranks' 8 batches, 5 are left
        resumed = self._fit_of(ranks, tmp_path, 3, replace(run, resume=path))
        assert_sees(resumed, 1, 48, begins=20)
        assert resumed[0].validated == [(1, 3), (1, 7), (2, 3), (2, 7)]

    @requires(Capability.SHARDED_CHECKPOINT)
    @pytest.mark.parametrize("loaded_on", [2, 3])
    def test_limited_epochs_and_smaller_batches_left_out(self, ranks: RankPool, tmp_path: Path, loaded_on: int) -> None:
        path, run = str(tmp_path / "saved"), Run(size=50, drop_last=True, trainer={"limit_train_batches": 6})
        self._fit_of(ranks, tmp_path, 2, replace(run, save=("batch end", 1, 2), path=path))
        resumed = self._fit_of(ranks, tmp_path, loaded_on, replace(run, resume=path))
        left = {2: 3, 3: 4}[loaded_on]  # 12 samples are seen: as many as 3 batches of 2 ranks or 2 of 3
        seen = in_turns([[step.samples for step in rank.steps if step.epoch == 1] for rank in resumed])
        assert seen == order_of(1, 50)[12 : 12 + left * 2 * loaded_on]
        assert [step.batch for step in resumed[0].steps if step.epoch == 1] == list(range(6 - left, 6))
        whole = in_turns([[step.samples for step in rank.steps if step.epoch == 2] for rank in resumed])
        assert whole == order_of(2, 50)[: 6 * 2 * loaded_on]

    @requires(Capability.SHARDED_CHECKPOINT)
    @pytest.mark.parametrize("loaded_on", [2, 3])
    def test_each_of_two_loaders_has_its_own(self, ranks: RankPool, tmp_path: Path, loaded_on: int) -> None:
        """The shorter one has begun anew when the checkpoint is saved."""
        path, run = str(tmp_path / "saved"), Run(data="two")
        self._fit_of(ranks, tmp_path, 2, replace(run, save=("batch end", 1, 3), path=path))
        resumed = self._fit_of(ranks, tmp_path, loaded_on, replace(run, resume=path))
        assert_sees(resumed, 1, 24, begins=16)
        short = in_turns([[step.short for step in rank.steps if step.epoch == 1] for rank in resumed])
        order = order_of(1, 12)
        assert short == {2: order[4:12], 3: order[4:12] + order[:1]}[loaded_on]

    @requires(Capability.SHARDED_CHECKPOINT)
    @pytest.mark.parametrize(
        "run",
        [Run(data="stream"), Run(data="stream", workers=2), Run(data="counting"), Run(data="own sampler")],
        ids=["stream", "stream with workers", "counting", "own sampler"],
    )
    def test_state_of_each_rank(self, ranks: RankPool, tmp_path: Path, run: Run) -> None:
        """Each rank goes on where it was, and no other number of ranks can."""
        path, save = str(tmp_path / "saved"), ("batch end", 1, 1)
        first = self._fit_of(ranks, tmp_path, 2, replace(run, save=save, path=path))
        resumed = self._fit_of(ranks, tmp_path, 2, replace(run, resume=path))
        assert [rank.steps for rank in resumed] == [steps_after(rank, save) for rank in first]
        assert resumed[0].steps[0].samples != resumed[1].steps[0].samples
        other = (3, refused, self.strategy, str(tmp_path), 3, replace(run, resume=path))
        for message in ranks.run(*other):
            assert_says(message, "over 3 ranks", "StatefulDataLoader over", "on 2", "Resume on 2", "end of an epoch")

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_another_dataset(self, ranks: RankPool, tmp_path: Path) -> None:
        path = str(tmp_path / "saved")
        self._fit_of(ranks, tmp_path, 2, Run(save=("batch end", 1, 1), path=path))
        run = Run(size=30, resume=path)
        for message in ranks.run(2, refused, self.strategy, str(tmp_path), 2, run):
            assert_says(message, "24 samples", "now has 30", "same dataset", "end of an epoch")
        self._fit_of(ranks, tmp_path, 2, Run(save=("epoch end", 0, 5), path=path))
        assert_sees(self._fit_of(ranks, tmp_path, 2, run), 1, 30)

    @requires(Capability.FULL_CHECKPOINT)
    def test_checkpoint_of_a_plain_trainer(self, ranks: RankPool, tmp_path: Path) -> None:
        """It says nothing of a plain loader's position, and of a stateful loader's, nothing that could be divided."""
        path = str(tmp_path / "plain.ckpt")
        fit("auto", str(tmp_path), 1, Run(data="plain", save=("batch end", 1, 1), path=path))
        resumed = self._fit_of(ranks, tmp_path, 2, Run(data="plain", resume=path))
        assert any("does not hold the position of the data loader" in text for text in resumed[0].warnings)
        fit("auto", str(tmp_path), 1, Run(save=("batch end", 1, 1), path=path))
        for world_size, words in ((1, "can't be told"), (2, "over 2 ranks")):
            run = (world_size, refused, self.strategy, str(tmp_path), world_size, Run(resume=path))
            assert_says(ranks.run(*run)[0], words, "end of an epoch")

    @requires(Capability.SHARDED_CHECKPOINT)
    @pytest.mark.parametrize(
        ("saved_on", "loaded_on", "run"),
        [
            pytest.param(2, 2, Run(), id="same"),
            pytest.param(2, 3, Run(workers=2), id="more, workers"),
            pytest.param(3, 1, Run(size=25, options=FULL), id="one, full", marks=requires(Capability.FULL_CHECKPOINT)),
        ],
    )
    def test_what_is_left_of_an_epoch_under_fabric(
        self, ranks: RankPool, tmp_path: Path, saved_on: int, loaded_on: int, run: Run
    ) -> None:
        path, size = str(tmp_path / "saved"), run.size
        kwargs = (self.strategy, saved_on, replace(run, path=path), [0, 1], 2)
        first = ranks.run(saved_on, fabric_epochs, *kwargs)
        begins = 2 * saved_on * run.batch
        assert in_turns([rank[1] for rank in first]) == order_of(1, size)[:begins]
        resumed = ranks.run(loaded_on, fabric_epochs, self.strategy, loaded_on, replace(run, resume=path), [1, 2])
        for epoch, begin in ((1, begins), (2, 0)):
            order, repeated = order_of(epoch, size), -(size - begin) % loaded_on
            assert in_turns([rank[epoch - 1] for rank in resumed]) == order[begin:] + order[:repeated]

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_fabric_at_the_end_of_an_epoch(self, ranks: RankPool, tmp_path: Path) -> None:
        path = str(tmp_path / "saved")
        ranks.run(2, fabric_epochs, self.strategy, 2, Run(path=path), [0, 1])
        resumed = ranks.run(3, fabric_epochs, self.strategy, 3, Run(resume=path), [2])
        assert in_turns([rank[0] for rank in resumed]) == order_of(2, 24)
        ranks.run(2, fabric_epochs, self.strategy, 2, Run(data="stream", path=path), [0])
        fresh = ranks.run(3, fabric_epochs, self.strategy, 3, Run(data="stream"), [0])
        assert ranks.run(3, fabric_epochs, self.strategy, 3, Run(data="stream", resume=path), [0]) == fresh

    @requires(Capability.SHARDED_CHECKPOINT)
    @pytest.mark.parametrize("workers", [0, 2])
    def test_fabric_state_of_each_rank(self, ranks: RankPool, tmp_path: Path, workers: int) -> None:
        path, run = str(tmp_path / "saved"), Run(data="stream", workers=workers)
        whole = ranks.run(2, fabric_epochs, self.strategy, 2, run, [0, 1])
        ranks.run(2, fabric_epochs, self.strategy, 2, replace(run, path=path), [0, 1], 2)
        resumed = ranks.run(2, fabric_epochs, self.strategy, 2, replace(run, resume=path), [1])
        assert [rank[0] for rank in resumed] == [rank[1][2:] for rank in whole]
        for message in ranks.run(3, fabric_refused, self.strategy, 3, replace(run, resume=path)):
            assert_says(message, "over 3 ranks", "StatefulDataLoader over Stream", "Resume on 2")

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_fabric_needs_a_loader_that_tells(self, ranks: RankPool, tmp_path: Path) -> None:
        run = Run(data="plain", path=str(tmp_path / "saved"))
        for message in ranks.run(2, fabric_refused, self.strategy, 2, run):
            assert_says(message, "'loader'", "DataLoader", "StatefulDataLoader")
