"""Training under Trainer and Fabric with a strategy given by name: what the suite runs on each rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

import fsdp_core
from fsdp_core.device_names import KINDS_OF_LIGHTNING
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import oracle
from fsdp_core.testing.launching.process_ranks import ranks_are_nodes
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.oracle import BATCH, Trained, dataset, new_net
from fsdp_core.testing.state import copied_state, full_state

__all__ = [
    "QUIET",
    "Lit",
    "accelerator",
    "fabric_fit",
    "fit",
    "fit_module",
    "fit_plainly",
    "loader",
    "losses_of",
    "means",
    "new_fabric",
    "new_trainer",
    "own_share",
    "scaled_precision",
    "strategy_argument",
    "whole_batches",
]

#: Arguments of a Trainer that writes nothing by itself.
QUIET: Mapping[str, Any] = dict.fromkeys(
    ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
)


class Lit(pl.LightningModule):
    """The suite's net as a LightningModule, which records the losses of all steps."""

    def __init__(self, optimizer: str = "sgd", **net: Any) -> None:
        super().__init__()
        self.net: Any = new_net(**net)
        self.optimizer_name = optimizer
        self.losses: list[Tensor] = []
        self.validation_losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        loss = mse_loss(self(x), y)
        self.losses.append(loss.detach())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = mse_loss(self(batch[0]), batch[1])
        self.validation_losses.append(loss)
        self.log("val_loss", loss, sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self(batch[0])

    def step_by_hand(self, loss: Tensor) -> None:
        """Take a step under manual optimization."""
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return getattr(oracle, self.optimizer_name)(self)


def loader(steps: int, world_size: int) -> DataLoader[Any]:
    """A dataloader whose batches, concatenated over all ranks, are the oracle's, in the same order."""
    data: Any = dataset(BATCH * steps)
    shares = rank_context().shares(world_size)
    sampler: Any = DistributedSampler(data, shares, rank_context().rank, shuffle=False)
    return DataLoader(data, batch_size=BATCH // shares, sampler=sampler)


def whole_batches(fabric: Fabric, steps: int) -> list[tuple[Tensor, Tensor]]:
    """The oracle's global batches, on the device of this rank."""
    return [fabric.to_device(batch) for batch in oracle.global_batches(steps)]


def own_share(fabric: Fabric, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's rows of a batch."""
    x, y = batch
    rows = slice(fabric.global_rank, None, fabric.world_size)
    share: tuple[Tensor, Tensor] = fabric.to_device((x[rows], y[rows]))
    return share


def strategy_argument(name: str, front_end: FrontEnd, options: Mapping[str, Any] | None = None) -> Any:
    """The value to pass to Trainer or Fabric as ``strategy=``.

    Args:
        name: A strategy's name, ours or Lightning's.
        front_end: The front end whose class is built.
        options: The constructor's arguments; when ``None``, the name itself is returned.
    """
    return name if options is None else fsdp_core.resolve(name, front_end)(**options)


def accelerator() -> str:
    """Lightning's name of the accelerator that tests run on: the CPU, except under ``nox -s hardware``."""
    return os.environ.get("FSDP_TESTS_ACCELERATOR", "cpu")


def _devices(world_size: int) -> dict[str, Any]:
    """The arguments of Trainer and Fabric for ``world_size`` ranks."""
    return {"devices": 1, "num_nodes": world_size} if ranks_are_nodes() else {"devices": world_size}


def new_trainer(
    tmp: str | Path, strategy: str, world_size: int = 1, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> pl.Trainer:
    """A Trainer for one epoch on :func:`accelerator`, without progress bar, logger and checkpoints.

    Args:
        tmp: The folder that it may write to.
        strategy: A strategy's name.
        world_size: The number of ranks.
        options: The strategy's options; see :func:`strategy_argument`.
        **kwargs: Arguments of the Trainer, which override these defaults.
    """
    quiet: dict[str, Any] = {
        "accelerator": accelerator(),
        **_devices(world_size),
        **QUIET,
        "max_epochs": 1,
        "default_root_dir": str(tmp),
    }
    configured_strategy = strategy_argument(strategy, "trainer", options)
    if configured_strategy == "auto" and accelerator() not in (*KINDS_OF_LIGHTNING, "auto"):
        # Given an accelerator that it does not know, Lightning itself would take the CPU.
        configured_strategy = SingleDeviceStrategy(torch.device(accelerator(), 0))
    return pl.Trainer(strategy=configured_strategy, **{**quiet, **kwargs})


def new_fabric(
    strategy: str, world_size: int = 2, options: Mapping[str, Any] | None = None, precision: Any = None
) -> Fabric:
    """A Fabric, launched. Its device and its arguments are those of :func:`new_trainer`.

    Its precision is a name or a plugin.
    """
    argument = "plugins" if isinstance(precision, Precision) else "precision"
    configured_strategy = strategy_argument(strategy, "fabric", options)
    fabric = Fabric(
        accelerator=accelerator(), strategy=configured_strategy, **{argument: precision}, **_devices(world_size)
    )
    fabric.launch()
    return fabric


def scaled_precision(plugin: Any, init_scale: float) -> Any:
    """A plugin for ``"16-mixed"`` on :func:`accelerator`, with a gradient scaler of its own.

    Args:
        plugin: The front end's plugin for mixed precision.
        init_scale: The scale of the first step.
    """
    kind = KINDS_OF_LIGHTNING.get(accelerator(), accelerator())
    return plugin("16-mixed", kind, torch.amp.GradScaler(kind, init_scale=init_scale))


def means(losses: list[Tensor]) -> list[float]:
    """Each step's loss over all ranks."""
    if not losses:
        return []
    values: list[float] = rank_context().mean(torch.stack([loss.detach().cpu() for loss in losses]).float()).tolist()
    return values


def losses_of(module: Lit) -> list[float]:
    """The losses that a module has recorded in this process."""
    return [loss.item() for loss in module.losses]


def fit_module(
    strategy: str,
    tmp: str | Path,
    module: Lit,
    steps: int,
    world_size: int = 2,
    options: Mapping[str, Any] | None = None,
    validation_steps: int = 0,
    **trainer: Any,
) -> Trained:
    """Fit a module under the Trainer.

    Args:
        strategy: A strategy's name.
        tmp: The folder that the Trainer may write to.
        module: The module.
        steps: The number of batches.
        world_size: The number of ranks.
        options: The strategy's options; see :func:`strategy_argument`.
        validation_steps: The number of batches for validation, if there is any.
        **trainer: Arguments of the Trainer.
    """
    run = new_trainer(tmp, strategy, world_size, options, **trainer)
    run.fit(module, loader(steps, world_size), loader(validation_steps, world_size) if validation_steps else None)
    return means(module.losses), full_state(run.strategy)


def fit_plainly(tmp: str | Path, module: Lit, steps: int, validation_steps: int = 0, **trainer: Any) -> Trained:
    """Fit a module under Lightning's own Trainer on one device, which :func:`fit_module` is compared with."""
    run = new_trainer(tmp, "auto", **trainer)
    run.fit(module, loader(steps, 1), loader(validation_steps, 1) if validation_steps else None)
    return losses_of(module), copied_state(module)


def fit(
    strategy: str,
    tmp: str,
    world_size: int,
    steps: int,
    optimizer: str = "sgd",
    options: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    net: Mapping[str, Any] | None = None,
) -> Trained:
    """Fit the suite's net under the Trainer; the state has the net's names.

    Args:
        strategy: A strategy's name.
        tmp: The folder that the Trainer may write to.
        world_size: The number of ranks.
        steps: The number of batches.
        optimizer: The name of the oracle's function that builds the optimizer.
        options: The strategy's options; see :func:`strategy_argument`.
        trainer: Arguments of the Trainer.
        net: Arguments of the net.
    """
    module = Lit(optimizer, **(net or {}))
    losses, state = fit_module(strategy, tmp, module, steps, world_size, options, **(trainer or {}))
    return losses, {name.removeprefix("net."): tensor for name, tensor in state.items()}


def fabric_fit(
    strategy: str,
    world_size: int,
    steps: int,
    optimizer: str = "sgd",
    options: Mapping[str, Any] | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> Trained:
    """Train under Fabric, with module and optimizer set up together.

    Args:
        strategy: A strategy's name.
        world_size: The number of ranks.
        steps: The number of batches.
        optimizer: The name of the oracle's function that builds the optimizer.
        options: The strategy's options; see :func:`strategy_argument`.
        accumulate: The number of micro-batches per optimizer step.
        clip_norm: The maximum norm of the gradient.
        clip_value: The maximum absolute value of the gradient's elements.
    """
    fabric = new_fabric(strategy, world_size, options)
    net = new_net()
    model, fabric_optimizer = fabric.setup(net, getattr(oracle, optimizer)(net))
    data = fabric.setup_dataloaders(loader(steps, world_size))
    losses = []
    for i, (x, y) in enumerate(data):
        is_last = (i + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = mse_loss(model(x), y)
            losses.append(loss.detach())
            fabric.backward(loss / accumulate)
        if is_last:
            if clip_norm is not None:
                fabric.clip_gradients(model, fabric_optimizer, max_norm=clip_norm)
            if clip_value is not None:
                fabric.clip_gradients(model, fabric_optimizer, clip_val=clip_value)
            fabric_optimizer.step()
            fabric_optimizer.zero_grad()
    return means(losses), full_state(fabric.strategy)
