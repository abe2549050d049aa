"""Parts of loops that adapters keep together: schedulers, targets, uneven evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fsdp_core.errors import ShardingError
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.suite.base_class import Clauses, on_ranks, precisions
from fsdp_core.testing.training import Lit, loader, losses_of, means, new_trainer

__all__ = ["LoopsOfAdaptersSuite"]


class Scheduled(Lit):
    """Has a scheduler that changes the learning rate in every step."""

    def configure_optimizers(self) -> Any:
        optimizer = oracle.adamw_groups(self)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _scheduled(
    strategy: str, tmp: str, world_size: int, save: str | None, resume: str | None, epochs: int
) -> list[float]:
    module = Scheduled()
    run = new_trainer(tmp, strategy, world_size, max_epochs=epochs)
    run.fit(module, loader(2, world_size), ckpt_path=resume)
    if save:
        run.save_checkpoint(save)
    return means(module.losses)


class TensorRate(Lit):
    """Has a learning rate that is a tensor."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.01))


def _tensor_rate(strategy: str, tmp: str, url: str) -> tuple[list[float], float]:
    first = TensorRate()
    run = new_trainer(tmp, strategy, 2)
    run.fit(first, loader(2, 2))
    run.save_checkpoint(url)
    second = TensorRate()
    run = new_trainer(tmp, strategy, 2, max_epochs=2)
    run.fit(second, loader(2, 2), ckpt_path=url)
    return means([*first.losses, *second.losses]), float(run.optimizers[0].param_groups[0]["lr"])


class BigTargets(Lit):
    """Records the targets that its step gets."""

    target: Tensor

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.target = batch[1]
        return super().training_step(batch, batch_idx)


def _targets(strategy: str, tmp: str, precision: Any) -> tuple[float, str]:
    module = BigTargets("sgd")
    data: Any = [(torch.ones(FEATURES), torch.full((FEATURES,), 100001.0))] * 4
    batches: DataLoader[Any] = DataLoader(data, batch_size=2)
    new_trainer(tmp, strategy, 2, precision=precision, max_steps=1).fit(module, batches)
    return module.target[0, 0].item(), str(module.target.dtype)


#: Numbers of samples that two ranks take in two and three batches of two, and in one and two.
_UNEVEN = (5, 7)


class _OfTwoLoaders(Lit):
    """Predicts for samples of two loaders."""

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().predict_step(batch, batch_idx)


class _Streamed(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def _predict_unevenly(strategy: str, tmp: str, streamed: bool) -> list[tuple[list[Tensor], list[Tensor]]]:
    """What is predicted of each loader's samples, and what one process predicts of those that this rank has."""
    shares = rank_context().shares(2)
    own: Any = [oracle.dataset(size)[rank_context().rank % shares :: shares] for size in _UNEVEN]
    datasets: Any = map(_Streamed, own) if streamed else map(oracle.dataset, _UNEVEN)
    loaders = [DataLoader(dataset, batch_size=2) for dataset in datasets]
    predicted: Any = new_trainer(tmp, strategy, 2).predict(_OfTwoLoaders(), loaders)
    net = oracle.new_net().eval()
    with torch.no_grad():
        wanted = [[net(x) for x, _ in samples] for samples in own]
    got = [[one.cpu() for batch in of_loader for one in batch] for of_loader in predicted]
    return list(zip(got, wanted, strict=True))


def _evaluate_apart(strategy: str, tmp: str) -> list[str]:
    """The refusals of a validation, a test and a fit with a validation, with one batch more on rank 1."""
    more: Any = oracle.dataset(2 * (2 + rank_context().rank))
    told = []
    for stage in ("validate", "test", "fit"):
        run = new_trainer(tmp, strategy, 2, use_distributed_sampler=False)
        given = (loader(1, 2), DataLoader(more, batch_size=2)) if stage == "fit" else (DataLoader(more, batch_size=2),)
        told.append(refusal(ShardingError, lambda run=run, given=given, to=stage: getattr(run, to)(Lit(), *given)))  # type: ignore[misc]
    return told


class LoopsOfAdaptersSuite(Clauses):
    """Schedulers, targets, and evaluations of uneven numbers."""

    def test_scheduler_and_its_resumption(self, ranks: Ranks, tmp_path: Path) -> None:
        """A scheduler must be restored, with the same learning rates on another number of ranks."""
        plain = Scheduled()
        new_trainer(tmp_path, "auto", max_epochs=3).fit(plain, loader(2, 1))
        path = str(tmp_path / "half")
        first = ranks.run(2, _scheduled, self.strategy, str(tmp_path), 2, path, None, 1)[0]
        second = ranks.run(3, _scheduled, self.strategy, str(tmp_path), 3, None, path, 3)[0]
        assert first + second == pytest.approx(losses_of(plain), abs=FP32_TOLERANCE)

    def test_tensor_learning_rate_and_file_url(self, ranks: Ranks, tmp_path: Path) -> None:
        """A learning rate that is a tensor must be restored, from a checkpoint at a ``file://`` URL."""
        plain = TensorRate()
        new_trainer(tmp_path, "auto", max_epochs=2).fit(plain, loader(2, 1))
        url = f"file://{tmp_path}/checkpoint"
        for losses, rate in ranks.run(2, _tensor_rate, self.strategy, str(tmp_path), url):
            assert losses == pytest.approx(losses_of(plain), abs=FP32_TOLERANCE)
            assert rate == pytest.approx(0.01)

    @precisions("bf16-mixed", "16-mixed")
    def test_mixed_precision_leaves_targets_alone(self, ranks: Ranks, tmp_path: Path, precision: str) -> None:
        """Mixed precision must not cast the batch of the training step."""
        assert ranks.run(2, _targets, self.strategy, str(tmp_path), precision) == [(100001.0, "torch.float32")] * 2

    @pytest.mark.parametrize("streamed", [False, True], ids=["loaders with a length", "loaders without"])
    def test_predictions_of_uneven_numbers(self, ranks: Ranks, tmp_path: Path, streamed: bool) -> None:
        """``predict`` must predict each sample once, also if ranks have different numbers of samples and batches."""
        for of_loaders in ranks.run(2, _predict_unevenly, self.strategy, str(tmp_path), streamed):
            for got, wanted in of_loaders:
                assert len(got) == len(wanted), f"a rank has {len(got)} predictions for {len(wanted)} samples"
                torch.testing.assert_close(got, wanted, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)

    @on_ranks("processes", "threads")
    def test_evaluations_of_uneven_numbers(self, ranks: Ranks, tmp_path: Path) -> None:
        """If ranks have different numbers of batches to validate or test, each must raise: no rank may wait."""
        for of_validate, of_test, of_fit in ranks.run(2, _evaluate_apart, self.strategy, str(tmp_path)):
            for told in (of_validate, of_fit):
                assert_says(told, "rank 0 validates 2 batches, and rank 1 validates 3", "limit_val_batches=N")
            assert_says(of_test, "rank 0 tests 2 batches, and rank 1 tests 3", "limit_test_batches=N")
