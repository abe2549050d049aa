"""Runs that record which samples each rank sees, and that save and resume."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from fsdp_core.errors import CheckpointMismatchError, CheckpointValueError
from fsdp_core.testing import oracle
from fsdp_core.testing.launching.forking import allow_children
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.refusals import refusal
from fsdp_core.testing.training import Lit, new_fabric, new_trainer

Sample = tuple[Tensor, Tensor, int]


class Numbered(Dataset[Sample]):
    """Samples with their index."""

    def __init__(self, size: int) -> None:
        self.rows = oracle.dataset(size)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return (*self.rows[index], index)


class Counting(Numbered):
    """A map-style dataset with a state: it adds the number of earlier lookups, times 100, to each index."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.looked_up = 0

    def __getitem__(self, index: int) -> Sample:
        self.looked_up += 1
        return (*self.rows[index], index + 100 * self.looked_up)

    def state_dict(self) -> dict[str, int]:
        """Return the number of lookups."""
        return {"looked_up": self.looked_up}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore it."""
        self.looked_up = state["looked_up"]


class Unstateful:
    """A user's own iterable of batches, without a state.

    Args:
        batches: What it iterates over.
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Stream(IterableDataset[Sample]):
    """An iterable dataset. Each rank and each worker goes through the rows with its own stride."""

    def __init__(self, size: int, rank: int, ranks: int) -> None:
        self.rows = oracle.dataset(size)
        self.rank, self.ranks = rank, ranks
        self.at = self.given = 0

    def __iter__(self) -> Iterator[Sample]:
        rank, ranks = self.rank, self.ranks
        worker = get_worker_info()
        part, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while self.given < len(self.rows) // (ranks * parts):
            index, self.at = self.at % len(self.rows), self.at + 1 + rank + ranks * part
            self.given += 1
            yield (*self.rows[index], index)
        self.given = 0  # the next epoch starts where this one ended

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"at": self.at, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore it."""
        self.at, self.given = state["at"], state["given"]


class OddsFirst(Sampler[int]):
    """A user's own sampler: odd indices first."""

    def __init__(self, size: int) -> None:
        self.order = [*range(1, size, 2), *range(0, size, 2)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class Counted(OddsFirst):
    """A user's own sampler whose order follows from how often it was iterated over, in this process."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(self.order[self.times :] + self.order[: self.times])


FULL = {"state_dict_type": "full"}

#: For a run that saves in its second epoch and needs no third.
TWO_EPOCHS = {"max_epochs": 2}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A fit: its data, when to save, and what to resume from.

    Attributes:
        data: The kind of dataloader; see :meth:`loader`.
        size: The number of samples.
        batch: The batch size of a rank.
        workers: The number of worker processes.
        drop_last: Whether the loader drops a smaller last batch.
        save: When to save: the moment, the epoch, the batch index.
        fails: When a step fails: the epoch, the batch index. The checkpoint is saved then.
        path: The checkpoint to save.
        resume: The checkpoint to resume from.
        seed: The seed for shuffling.
        trainer: Arguments of the Trainer.
        options: The strategy's options.
        asks_steps: Whether ``configure_optimizers`` reads the number of steps, for which Lightning creates the loaders
            before it reads the checkpoint.
        validates_on_it: Whether the same loader object serves the validation.
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
    validates_on_it: bool = False

    def loader(self, world_size: int) -> Any:
        """The loader, as a user writes it."""
        kwargs: dict[str, Any] = {
            "batch_size": self.batch,
            "num_workers": self.workers,
            "drop_last": self.drop_last,
            # ranks of a RankPool would otherwise spawn their workers, which takes seconds
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
                return StatefulDataLoader(
                    Stream(self.size, rank_context().rank, rank_context().shares(world_size)), **kwargs
                )
            case "counted":
                return StatefulDataLoader(numbered, sampler=Counted(self.size), **kwargs)
            case "counted batches":
                return StatefulDataLoader(numbered, batch_sampler=BatchSampler(Counted(self.size), self.batch, False))
            case "one of two":
                rows = [numbered[index] for index in range(self.size)]
                short: Any = DataLoader(rows, batch_size=self.batch)  # type: ignore[arg-type]
                return {"long": DataLoader(numbered, shuffle=True, **kwargs), "short": Unstateful(short)}
            case "own sampler":
                return StatefulDataLoader(numbered, sampler=OddsFirst(self.size), **kwargs)
            case other:
                raise AssertionError(other)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a rank saw in a step, with Lightning's counters."""

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
    """Records its samples. The model is small, as its values don't matter."""

    def __init__(self, run: Run) -> None:
        super().__init__("sgd", blocks=1)
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
            assert self.trainer.estimated_stepping_batches > 0, "the Trainer expects no steps"
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
    """Run a fit on this rank."""
    allow_children()
    module = Watching(run)
    loop: dict[str, Any] = {"max_epochs": 3, "callbacks": [SaveOnce(run)], **(run.trainer or {})}
    trainer = new_trainer(tmp, strategy, world_size, run.options, **loop)
    training = run.loader(world_size)
    validation: Any = training if run.validates_on_it else DataLoader(Numbered(world_size))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setenv("PL_GLOBAL_SEED", str(run.seed))
        warnings.simplefilter("always")
        with pytest.raises(ArithmeticError) if run.fails else nullcontext():
            trainer.fit(module, training, validation, ckpt_path=run.resume)
    if run.path is not None and run.save is None and run.fails is None:
        trainer.save_checkpoint(run.path)
    return Seen(
        steps=module.steps,
        validated=module.validated,
        batches=int(trainer.num_training_batches) if run.data != "stream" else 0,
        warnings=[str(one.message) for one in caught],
    )


def refused(strategy: str, tmp: str, world_size: int, run: Run) -> str:
    """The error of a fit that must be refused."""
    return refusal(CheckpointMismatchError, lambda: fit(strategy, tmp, world_size, run))


def divided_by_hand(strategy: str, tmp: str) -> tuple[int, list[str]]:
    """The batches of a run resumed after one of four, over each rank's own samples, and its warnings."""
    samples: Any = list(oracle.dataset(8))[rank_context().rank :: rank_context().shares(2)]
    loader: Any = DataLoader(samples, batch_size=len(samples) // 4)
    own: dict[str, Any] = {"use_distributed_sampler": False}
    first = new_trainer(tmp, strategy, 2, max_epochs=-1, max_steps=1, **own)
    first.fit(Lit(), loader)
    first.save_checkpoint(f"{tmp}/saved")
    module = Lit()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        new_trainer(tmp, strategy, 2, **own).fit(module, loader, ckpt_path=f"{tmp}/saved")
    return len(module.losses), [str(one.message) for one in caught]


def order_of(epoch: int, size: int) -> list[int]:
    """The sample indices of an epoch, in the order of torch's sampler on one process."""
    sampler: Any = DistributedSampler(range(size), 1, 0)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


def in_turns(by_rank: list[list[list[int]]]) -> list[int]:
    """Merge the samples of all ranks' steps, in round-robin order."""
    steps = zip(*by_rank, strict=True)
    return [index for step in steps for turn in zip_longest(*step) for index in turn if index is not None]


def assert_sees(ranks: list[Seen], epoch: int, size: int, *, begins: int = 0) -> None:
    """Assert that the epoch's samples from ``begins`` on come in order, once each apart from padding at the end."""
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
    """Run epochs under Fabric, the last one up to ``stop`` batches; resumes or saves. This rank's batches by epoch."""
    allow_children()
    fabric = new_fabric(strategy, world_size, run.options)
    model = fabric.setup(oracle.new_net(blocks=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", str(run.seed))
        loader: Any = fabric.setup_dataloaders(run.loader(world_size))
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
    """The error of a save or load under Fabric that must be refused."""
    errors = (CheckpointMismatchError, CheckpointValueError)
    return refusal(errors, lambda: fabric_epochs(strategy, world_size, run, [0]))


def fabric_leaves_out(strategy: str, world_size: int, run: Run) -> list[str]:
    """Save twice and load, with a loader that has no state; the warnings about it."""
    fabric = new_fabric(strategy, world_size, run.options)
    state: dict[str, Any] = {"model": fabric.setup(oracle.new_net()), "step": 3}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state["loader"] = fabric.setup_dataloaders(run.loader(world_size))
        assert run.path is not None
        assert run.resume is not None
        for _ in range(2):
            fabric.save(run.path, state)
        state["step"] = 0
        rest = fabric.load(run.resume, state)
        assert (rest, state["step"]) == ({}, 3)
    return [str(one.message) for one in caught if "left out" in str(one.message)]
