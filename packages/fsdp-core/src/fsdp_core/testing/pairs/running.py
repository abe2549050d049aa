"""Trains configurations on ranks, under Trainer and Fabric, and returns what each rank holds of everything."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import fsdp_core
from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.gradients.step_gradients import plain
from fsdp_core.state.chunks import ChunkedTensor, chunked
from fsdp_core.state.layout import Layout
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.oracle import BATCH
from fsdp_core.testing.pairs.dimensions import Configuration
from fsdp_core.testing.pairs.net import CLIP, MICRO_BATCHES, batches, is_last, loss_of, new_net, optimizers
from fsdp_core.testing.state import sharded_by
from fsdp_core.testing.training import new_fabric, new_trainer, scaled_precision

__all__ = ["Outcome", "Piece", "Pieces", "RunRequest", "run_all"]

#: A loss scale with which no gradient of the net overflows, so that no step is skipped.
_SCALE = 2.0**8


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One run.

    Attributes:
        configuration: The labels.
        strategy: The strategy's name.
        ranks: The number of ranks.
        options: The strategy's options, by prefix of the net's names.
        saves: The path of a checkpoint to save within the run, if any.
        loads: The path of a checkpoint to resume from, if any.
    """

    configuration: Configuration
    strategy: str
    ranks: int
    options: Mapping[str, Mapping[str, Any]]
    saves: str | None = None
    loads: str | None = None

    @property
    def saved_after(self) -> int:
        """The number of micro-batches before the checkpoint."""
        accumulate = int(self.configuration["accumulate"])
        return max(accumulate, 2) + (self.configuration["resume"] == "amid a step")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one rank holds of a tensor.

    Attributes:
        shape: The shape of the full tensor.
        dtype: Its dtype.
        replica: Which copy the boxes belong to.
        boxes: The offsets of each box, and its elements in fp64.
    """

    shape: tuple[int, ...]
    dtype: str
    replica: int
    boxes: tuple[tuple[tuple[int, ...], np.ndarray[Any, Any]], ...]


#: Pieces by name.
Pieces = dict[Any, Piece]


@dataclass(kw_only=True)
class Outcome:
    """What one rank has of a run.

    Attributes:
        losses: The loss of each micro-batch, on this rank's share.
        gradients: The gradients of each step; empty if steps are inside a forward pass.
        norms: The norm of each step and optimizer, as ``clip_gradients`` returns it.
        weights: The weights at the end.
        moments: The optimizers' state at the end, by name and key.
        refused: The message, if the configuration is refused as unsupported.
        failed: The traceback, if any other error was raised.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[Pieces] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: Pieces = field(default_factory=dict)
    moments: Pieces = field(default_factory=dict)
    refused: str = ""
    failed: str = ""


def run_all(requests: Sequence[RunRequest], tmp: str) -> list[Outcome]:
    """Train one configuration after the other on these ranks.

    Args:
        requests: The runs.
        tmp: The folder that a Trainer may write to.
    """
    outcomes = []
    for request in requests:
        outcome = Outcome()
        try:
            run = _under_fabric if request.configuration["front_end"] == "fabric" else _under_trainer
            run(request, tmp, outcome)
        except UnsupportedCapabilityError as error:
            outcome.refused = str(error)
        except Exception:
            outcome.failed = "".join(traceback.format_exc().splitlines(keepends=True)[-12:])
        outcomes.append(outcome)
        gc.collect()
    return outcomes


def _to_piece(value: Any) -> Piece:
    if not isinstance(value, ChunkedTensor):
        value = chunked(plain(torch.as_tensor(value)), rank=rank_context().rank)
    boxes = tuple((chunk.offsets, np.array(plain(chunk.data).detach().cpu().double())) for chunk in value.chunks)
    return Piece(shape=tuple(value.shape), dtype=str(value.dtype), replica=value.replica, boxes=boxes)


def _gradients(layout: Layout, optimizer: Any) -> Pieces:
    """The gradients of what an optimizer trains."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    gradients: Pieces = {}
    rank_context().settle()
    for parameter, parts in layout.items():
        if parameter.grad is not None and id(parameter) in trained:
            gradients.update(
                {part.name.removeprefix("net."): _to_piece(part.of(plain(parameter.grad))) for part in parts}
            )
    return gradients


def _record_end(strategy: Any, steppers: Sequence[torch.optim.Optimizer], outcome: Outcome) -> None:
    sharded = sharded_by(strategy)
    rank_context().settle()
    outcome.weights = {
        name.removeprefix("net."): _to_piece(value)
        for name, value in sharded.model_state().items()
        if isinstance(value, (Tensor, ChunkedTensor))
    }
    for optimizer in steppers:
        state = sharded.optimizer_state(optimizer)["state"]
        for name, values in state.items():
            for key, value in values.items():
                if value is not None:
                    outcome.moments[name.removeprefix("net."), key] = _to_piece(value)


def _precision(request: RunRequest, plugin: Any) -> Any:
    precision = request.configuration["precision"]
    if precision != "16-mixed":
        return "32-true" if precision == "double" else precision
    return scaled_precision(plugin, _SCALE)


def _net(request: RunRequest) -> Any:
    net = new_net(request.configuration)
    if request.configuration.get("compile") == "blocks":
        for block in net.blocks:
            block.compile(backend="aot_eager")
    return net


def _use_between_batches(model: Any, net: Any, x: Tensor, how: str) -> None:
    """Use the model between two micro-batches, which must change nothing."""
    if how == "nothing":
        return
    model.eval()
    if how == "gathered":
        with fsdp_core.gathered(model):
            net(x, 0)
    else:
        with torch.no_grad():
            getattr(model, "net", model)(x, 0)  # a LightningModule's net, or Fabric's wrapper
    model.train()


def _dtype(request: RunRequest) -> torch.dtype:
    return torch.float64 if request.configuration["precision"] == "double" else torch.float32


# -- Fabric ------------------------------------------------------------------------------------------------------------


def _under_fabric(request: RunRequest, tmp: str, outcome: Outcome) -> None:
    chosen = request.configuration
    precision = _precision(request, FabricMixedPrecision)
    fabric = new_fabric(request.strategy, request.ranks, request.options[""], precision)
    net = _net(request)
    steppers = optimizers(chosen["optimizer"], net)
    model, *wrapped = fabric.setup(net, *steppers)
    used: Any = fabric.strategy
    state: dict[str, Any] = {"model": model, "batch": 0, "gradients": fsdp_core.AccumulatedGradients(model)}
    state.update({f"optimizer {number}": optimizer for number, optimizer in enumerate(wrapped)})
    if request.loads is not None:
        fabric.load(request.loads, state)
    layout = sharded_by(used).layout()
    for optimizer in steppers:
        optimizer.register_step_pre_hook(lambda stepping, *_: _before_step(stepping, steppers, layout, outcome))
    data = batches(_dtype(request))
    accumulate = int(chosen["accumulate"])
    while state["batch"] < MICRO_BATCHES:
        index = state["batch"]
        x, y = fabric.to_device(tuple(_share(rows, used.runtime) for rows in data[index]))
        is_stepping = is_last(index, accumulate)
        with nullcontext() if is_stepping else fabric.no_backward_sync(model):
            loss = loss_of(model(x, index), y)
            fabric.backward(loss / accumulate)
        outcome.losses.append(loss.item())
        if is_stepping:
            for optimizer in wrapped:
                _clip_under_fabric(fabric, model, optimizer, chosen["clip"], outcome)
            for optimizer in wrapped:
                optimizer.step()
            for optimizer in wrapped:
                optimizer.zero_grad(set_to_none=chosen["zeroed"] == "to none")
        _use_between_batches(model, net, x, chosen["between"])
        state["batch"] += 1
        if request.saves is not None and state["batch"] == request.saved_after:
            fabric.save(request.saves, state)
    used.wait_for_saves()
    _record_end(used, steppers, outcome)
    used.teardown()


def _before_step(optimizer: Any, steppers: Sequence[torch.optim.Optimizer], layout: Layout, outcome: Outcome) -> None:
    """Record the gradients that an optimizer steps with, which are unscaled and clipped at that point."""
    if optimizer is steppers[0]:
        outcome.gradients.append({})
    outcome.gradients[-1].update(_gradients(layout, optimizer))


def _share(batch: Tensor, runtime: Any) -> Tensor:
    share: Tensor = batch.chunk(runtime.data_parallel_world_size)[runtime.data_parallel_rank]
    return share


def _clip_under_fabric(fabric: Fabric, model: Any, optimizer: Any, how: str, outcome: Outcome) -> None:
    if how == "value":
        fabric.clip_gradients(model, optimizer, clip_val=CLIP[how])
    elif how != "nothing":
        order = float("inf") if how == "largest" else 2.0
        norm: Any = fabric.clip_gradients(model, optimizer, max_norm=CLIP[how], norm_type=order)
        outcome.norms.append(float(norm))


# -- Trainer -----------------------------------------------------------------------------------------------------------


class LitPairs(pl.LightningModule):
    """Trains the net, by itself or by hand."""

    def __init__(self, request: RunRequest, outcome: Outcome) -> None:
        super().__init__()
        self.net = _net(request)
        self.request, self.outcome = request, outcome
        self.by_hand = request.configuration["front_end"] == "by hand"
        self.automatic_optimization = not self.by_hand
        self.accumulate = int(request.configuration["accumulate"])
        self.steppers: list[torch.optim.Optimizer] = []
        self.batch_losses: list[Tensor] = []

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        share = self.trainer.distributed_sampler_kwargs
        assert share is not None
        data: Any = [pair for batch in batches(_dtype(self.request)) for pair in zip(*batch, strict=True)]
        sampler: Any = DistributedSampler(data, **share, shuffle=False)
        return DataLoader(data, batch_size=BATCH // share["num_replicas"], sampler=sampler)

    def configure_optimizers(self) -> Any:
        self.steppers = optimizers(self.request.configuration["optimizer"], self.net)
        return self.steppers

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.outcome.gradients.append(_gradients(sharded_by(self.trainer.strategy).layout(), optimizer))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        loss = loss_of(self.net(x, batch_idx), y)
        self.batch_losses.append(loss.detach())
        if not self.by_hand:
            return loss
        used: Any = self.optimizers()
        wrapped = used if isinstance(used, list) else [used]
        self.manual_backward(loss / self.accumulate)
        if is_last(batch_idx, self.accumulate):
            how = self.request.configuration["clip"]
            for optimizer in wrapped:
                if how != "nothing":
                    self.clip_gradients(optimizer, gradient_clip_val=CLIP[how], gradient_clip_algorithm=how)
            for optimizer in wrapped:
                optimizer.step()
            for optimizer in wrapped:
                optimizer.zero_grad(set_to_none=self.request.configuration["zeroed"] == "to none")
        return None

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=self.request.configuration["zeroed"] == "to none")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        _use_between_batches(self, self.net, batch[0], self.request.configuration["between"])


class _SaveCallback(pl.Callback):
    def __init__(self, request: RunRequest) -> None:
        self.request = request

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, output: Any, batch: Any, batch_idx: int) -> None:
        if self.request.saves is not None and batch_idx + 1 == self.request.saved_after:
            trainer.save_checkpoint(self.request.saves)


def _under_trainer(request: RunRequest, tmp: str, outcome: Outcome) -> None:
    chosen = request.configuration
    arguments: dict[str, Any] = {"callbacks": [_SaveCallback(request)]}
    if chosen["front_end"] == "trainer":
        arguments["accumulate_grad_batches"] = int(chosen["accumulate"])
        if chosen["clip"] != "nothing":
            arguments.update(gradient_clip_val=CLIP[chosen["clip"]], gradient_clip_algorithm=chosen["clip"])
    precision = _precision(request, MixedPrecision)
    arguments.update({"precision": precision} if isinstance(precision, str) else {"plugins": [precision]})
    module = LitPairs(request, outcome)
    trainer = new_trainer(tmp, request.strategy, request.ranks, request.options["net."], **arguments)
    trainer.fit(module, ckpt_path=request.loads)
    strategy: Any = trainer.strategy
    outcome.losses = [loss.item() for loss in module.batch_losses]
    _record_end(strategy, module.steppers, outcome)
