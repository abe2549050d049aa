"""Who trains the same model on the same shards: a strategy by name, Lightning's own way there, and a loop by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from device import ACCELERATOR, own_device
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Optimizer
from transformer import Block, Size, Transformer, batch, optimizer, transformer

__all__ = ["STRATEGIES", "Step", "Train", "contenders"]

Step = Callable[[int, Tensor, nn.Module, Optimizer], bool]
"""Called after each step with its number, from 0, this rank's loss and what trains; ``False`` ends the training."""

Train = Callable[[Size, Step], None]
"""A contender: trains a model of that size until told to end."""


def batches(size: Size) -> Iterator[Tensor]:
    """This rank's batches, without end."""
    return (batch(size, step, dist.get_rank()) for step in count())


def shard_in_place(model: Transformer) -> Transformer:
    """FSDP2: shard each block, then what remains, which is what ``"auto"`` does."""
    mesh = init_device_mesh(ACCELERATOR, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def wrap_flat(model: Transformer) -> FullyShardedDataParallel:
    """FSDP1: wrap each block, then what remains, behind the original parameters."""
    units = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(model, auto_wrap_policy=units, use_orig_params=True, device_id=own_device())


def by_hand(shard: Callable[[Transformer], nn.Module], size: Size, after_step: Step) -> None:
    """Train in the shortest loop that torch allows."""
    model = shard(transformer(size).to(own_device()))
    steps = optimizer(model)
    for step, tokens in enumerate(batches(size)):
        loss = model(tokens.to(own_device()))
        steps.zero_grad()
        loss.backward()
        steps.step()
        if not after_step(step, loss.detach(), model, steps):
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
        shard_in_place(self.model)


class FSDPStrategyOnCPU(FSDPStrategy):
    """Lightning's FSDPStrategy, able to start on the CPU; for this comparison only.

    In all that it does per step it is as Lightning wrote it. Lightning refuses the very class ``FSDPStrategy`` on the
    CPU, so that a subclass passes; and it hands FSDP1 the index of its device, of which the CPU has none, so that the
    model is wrapped here, with the same options and the device itself.
    """

    def _setup_model(self, model: nn.Module) -> nn.Module:
        wrapped = FullyShardedDataParallel(
            model,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,
            **self.kwargs,
        )
        self.kwargs.pop("auto_wrap_policy")  # has done its work; Lightning warns if it is still there
        return super()._setup_model(wrapped)


class _AfterStep(pl.Callback):
    """Hands each step on, and stops the Trainer when told."""

    def __init__(self, after_step: Step) -> None:
        self.after_step = after_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        model = trainer.strategy.model or pl_module
        if not self.after_step(batch_idx, outputs["loss"].detach(), model, trainer.optimizers[0]):
            trainer.should_stop = True


def by_trainer(
    strategy: str | Strategy,
    module: Module,
    size: Size,
    after_step: Step,
    *,
    data: Iterator[Tensor] | None = None,
    **trainer: Any,
) -> None:
    """Train with Lightning, without all that the loop by hand does not have: no bar, no logger, no checkpoints.

    Args:
        strategy: A strategy, or its name.
        module: What to train.
        size: How large it is.
        after_step: Called after each batch.
        data: This rank's batches, if they are not :func:`batches`.
        trainer: Further arguments of the Trainer.
    """
    pl.Trainer(
        strategy=strategy,
        accelerator=ACCELERATOR,
        devices=dist.get_world_size(),
        max_epochs=1,
        callbacks=[_AfterStep(after_step)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        **trainer,
    ).fit(module, batches(size) if data is None else data)


def by_name(strategy: str, size: Size, after_step: Step) -> None:
    """Train with one of this project's strategies: its name, and the model as it is."""
    by_trainer(strategy, Module(size), size, after_step)


def lightnings_fsdp1(size: Size, after_step: Step) -> None:
    """Train with Lightning's FSDPStrategy."""
    strategy = FSDPStrategy if ACCELERATOR == "cuda" else FSDPStrategyOnCPU
    by_trainer(strategy(auto_wrap_policy=ModuleWrapPolicy({Block})), Module(size), size, after_step)


def lightnings_fsdp2(size: Size, after_step: Step) -> None:
    """Train with Lightning's ModelParallelStrategy: all ranks in the data-parallel group."""
    strategy = ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    by_trainer(strategy, HandShardedModule(size), size, after_step)


STRATEGIES = ("fsdp2", "fsdp_native")


def contenders(strategy: str) -> dict[str, Train]:
    """By name: a strategy of this project, Lightning's own way to the same shards, and the loop by hand."""
    beside: dict[str, dict[str, Train]] = {
        "fsdp2": {"ModelParallelStrategy": lightnings_fsdp2, "fully_shard by hand": partial(by_hand, shard_in_place)},
        "fsdp_native": {"FSDPStrategy": lightnings_fsdp1, "FSDP1 by hand": partial(by_hand, wrap_flat)},
    }
    return {strategy: partial(by_name, strategy), **beside[strategy]}
