"""Whether ranks read different rows: what the script's own loader gives two real ranks."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from fsdp_core.rehearsal.fit import quietly
from fsdp_core.rehearsal.imagined_ranks import ImaginedEnvironment
from fsdp_core.rehearsal.script import CaughtFit
from fsdp_core.torch_private.fake_tensors import tree_leaves

__all__ = ["can_read_as_ranks", "read_as_rank", "read_the_same"]

#: Batches that each rank reads.
_BATCHES = 2


def can_read_as_ranks(fit: CaughtFit) -> bool:
    """Whether the fit has a loader that ranks can read, and that no sampler of its own divides.

    Args:
        fit: What the script trains.
    """
    if fit.loader is None:
        source = fit.datamodule if fit.datamodule is not None else fit.module
        return is_overridden("train_dataloader", source)
    samplers = [getattr(fit.loader, name, None) for name in ("sampler", "batch_sampler")]
    # made for a number of ranks, which the script may have read from its environment
    return not any(hasattr(sampler, "num_replicas") for sampler in samplers)


def read_as_rank(fit: CaughtFit, *, rank: int, ranks: int, store: str, seconds: float) -> list[str]:
    """Read the first batches as one of several real ranks, by a Trainer that trains nothing; returns their digests.

    Args:
        fit: What the script trains.
        rank: This rank.
        ranks: The number of ranks.
        store: A path at which ranks find one another.
        seconds: How long a collective may wait.
    """
    dist.init_process_group(
        "gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds)
    )
    if "PL_GLOBAL_SEED" not in os.environ:  # else the script seeds all ranks alike
        torch.manual_seed(rank)
        random.seed(rank)
    reader = _Reader(fit)
    with quietly():
        trainer = pl.Trainer(
            strategy="ddp",
            accelerator="cpu",
            devices=ranks,
            plugins=[ImaginedEnvironment(rank, ranks)],
            max_steps=_BATCHES,
            use_distributed_sampler=fit.trainer_keywords.get("use_distributed_sampler", True),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(reader)
    return reader.digests


def read_the_same(digests: Sequence[Sequence[str]]) -> bool | None:
    """Whether ranks have read the same rows; ``None`` if batches are too few, or the same, to tell.

    Args:
        digests: Of each rank, those of its batches.

    Example:
        >>> read_the_same([["a", "b"], ["a", "b"]]), read_the_same([["a", "b"], ["c", "d"]])
        (True, False)
        >>> read_the_same([["a", "a"], ["a", "a"]])
    """
    if any(len(set(of_rank)) < _BATCHES for of_rank in digests):
        return None
    return all(list(of_rank) == list(digests[0]) for of_rank in digests)


class _Reader(pl.LightningModule):
    """Reads the batches of a fit in place of its module."""

    def __init__(self, fit: CaughtFit) -> None:
        super().__init__()
        self._fit, self.digests = fit, list[str]()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def train_dataloader(self) -> Any:
        if self._fit.loader is not None:
            return self._fit.loader
        source = self._fit.datamodule if self._fit.datamodule is not None else self._fit.module
        source.trainer = self.trainer
        source.setup("fit")  # may choose this rank's part
        return source.train_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.digests.append(_digest(batch))
        return 0.0 * self.weight

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _digest(batch: Any) -> str:
    digest = hashlib.sha256()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(repr((leaf.shape, leaf.dtype)).encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
