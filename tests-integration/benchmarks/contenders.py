"""The ways to train the same model on the same shards: by hand, and by two strategies of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformer import Size, Transformer, batch, optimizer, transformer

__all__ = ["Step", "by_hand", "by_trainer", "model_parallel"]

Step = Callable[[int, Tensor], bool]
"""Called after each step with its number, from 0, and the loss on this rank; ``False`` ends the training."""


def batches(size: Size) -> Iterator[Tensor]:
    """This rank's batches, without end."""
    return (batch(size, step, dist.get_rank()) for step in count())


def shard(model: Transformer) -> None:
    """Shard each block, then what remains: what ``"auto"`` does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def by_hand(size: Size, after_step: Step) -> None:
    """Train in the shortest loop that torch allows."""
    model = transformer(size)
    shard(model)
    steps = optimizer(model)
    for step, tokens in enumerate(batches(size)):
        loss = model(tokens)
        steps.zero_grad()
        loss.backward()
        steps.step()
        if not after_step(step, loss.detach()):
            return


class Module(pl.LightningModule):
    """The model as Lightning wants it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = transformer(size)

    def training_step(self, tokens: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.model(tokens)
        return loss

    def configure_optimizers(self) -> Any:
        """The same optimizer as the loop by hand."""
        return optimizer(self)


class HandShardedModule(Module):
    """The model for Lightning's ModelParallelStrategy, which leaves the sharding to the user."""

    def configure_model(self) -> None:
        """Shard as the loop by hand does."""
        shard(self.model)


class _AfterStep(pl.Callback):
    """Hands each step on, and stops the Trainer when told."""

    def __init__(self, after_step: Step) -> None:
        self.after_step = after_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.after_step(batch_idx, outputs["loss"].detach()):
            trainer.should_stop = True


def by_trainer(
    size: Size, after_step: Step, strategy: str | Strategy, module: Module, callbacks: tuple[pl.Callback, ...] = ()
) -> None:
    """Train with Lightning, without all that the loop by hand does not have: no bar, no logger, no checkpoints."""
    pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=1,
        callbacks=[*callbacks, _AfterStep(after_step)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    ).fit(module, batches(size))


def model_parallel() -> ModelParallelStrategy:
    """Lightning's own way to FSDP2: all ranks in the data-parallel group, none in a tensor-parallel one."""
    return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
