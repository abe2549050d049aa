"""Part 2: right on one card, one rank over NCCL: each way to train, beside a loop of plain torch on the same device.

All fits are of one process, one after the other.
"""

from __future__ import annotations

import gc
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from card import ACCELERATOR, DEVICE, HAS_CARD, arguments
from lightning.fabric import Fabric
from plain import (
    SEED,
    Batches,
    Block,
    FrontEnd,
    Trained,
    Way,
    differences,
    new_net,
    new_optimizer,
    tolerances,
    train_plainly,
)
from records import Records
from torch import Tensor
from torch.nn.functional import mse_loss

import fsdp_core
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import QUIET
from fsdp_core.torch_private.dtensors import note_meshes

STRATEGIES = ("fsdp2", "fsdp_native")
#: The backend of the process group for tensors on the device.
BACKEND = "nccl" if HAS_CARD else "gloo"
#: What the loss of one micro-batch is multiplied by to let gradients in fp16 overflow.
OVERFLOW = 1e6


@dataclass(frozen=True, kw_only=True)
class Mode:
    """What is checked.

    Attributes:
        way: How to train.
        options: The strategy's options; without any it is given by its name.
        on_host: Whether weights are in host memory between steps, and computed with on the device.
        strategies: Which strategies have it.
        seconds: What it takes at least: it is not begun if less time is left.
    """

    way: Way
    options: Mapping[str, Any] = field(default_factory=dict)
    on_host: bool = False
    strategies: tuple[str, ...] = STRATEGIES
    seconds: float = 0.0


def modes() -> dict[str, Mode]:
    """What is checked, most valuable and cheapest first, by name."""
    # inductor's C++ takes half a minute to compile on a CPU, where another backend shows the same calls
    compiled = {"compile": True if HAS_CARD else {"backend": "aot_eager"}}
    return {
        "32-true": Mode(way=Way()),
        "bf16-mixed": Mode(way=Way(precision="bf16-mixed")),
        "16-mixed": Mode(way=Way(precision="16-mixed")),
        "bf16-true": Mode(way=Way(precision="bf16-true")),
        "accumulation of 3 micro-batches": Mode(way=Way(accumulate=3, factors=(1.0,) * 6)),
        "clipping by norm": Mode(way=Way(clip_norm=0.05)),
        "clipping by value": Mode(way=Way(clip_value=0.002)),
        "16-mixed, a step overflows": Mode(way=Way(precision="16-mixed", factors=(1.0, OVERFLOW, 1.0, 1.0))),
        "dropout": Mode(way=Way(dropout=0.2)),
        "activation checkpointing": Mode(way=Way(dropout=0.2), options={"activation_checkpointing_policy": {Block}}),
        "CPU offload": Mode(way=Way(clip_norm=0.05), options={"cpu_offload": True}, on_host=True),
        "16-mixed, clipping by norm": Mode(way=Way(precision="16-mixed", clip_norm=0.05)),
        "bf16-mixed, accumulation of 3 micro-batches": Mode(
            way=Way(precision="bf16-mixed", accumulate=3, factors=(1.0,) * 6)
        ),
        "float8": Mode(way=Way(precision="bf16-mixed", float8=True), options={"float8": True}, strategies=("fsdp2",)),
        "compile": Mode(
            way=Way(compiled=True), options=compiled, strategies=("fsdp2",), seconds=25.0 if HAS_CARD else 0.0
        ),
    }


def reason_to_leave_out(mode: Mode, strategy: str) -> str | None:
    """Why a mode can't be checked; ``None`` if it can.

    Args:
        mode: What is checked.
        strategy: The strategy's name.
    """
    if strategy not in mode.strategies:
        return f"{strategy} has no option {', '.join(mode.options)}"
    if mode.way.float8:
        try:
            import_module("torchao.float8")
        except Exception as error:  # whatever its compiled parts raise beside another torch
            return f"torchao can't be imported: {type(error).__name__}: {error}"
    if mode.way.compiled and HAS_CARD and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "triton needs a C compiler, and there is none"
    return None


@cache
def plain_run(way: Way, front_end: FrontEnd) -> Trained:
    """The run of plain torch, trained once for all that are compared with it."""
    return train_plainly(way, DEVICE, front_end)


class Seen:
    """What a run shows while it trains.

    Attributes:
        losses: The loss of each micro-batch.
        scales: The gradient at each loss: what it was multiplied by before its backward pass.
        devices: The types of the devices of the weights after the last step.
    """

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.scales: list[float] = []
        self.devices: set[str] = set()

    def note_loss(self, loss: Tensor) -> None:
        """Note a loss, before its backward pass."""
        self.losses.append(loss.detach())
        loss.register_hook(lambda gradient: self.scales.append(float(gradient)))

    def note_weights(self, module: torch.nn.Module) -> None:
        """Note where the weights are."""
        self.devices = {parameter.device.type for parameter in module.parameters()}

    def trained(self, strategy: Any, precision: Any) -> Trained:
        """What the run leaves."""
        weights = {name.removeprefix("net."): weight for name, weight in full_state(strategy).items()}
        scaler = getattr(precision, "scaler", None)
        final_scale = None if scaler is None else float(scaler.get_scale())
        return Trained([loss.item() for loss in self.losses], weights, self.scales, final_scale)


class Module(pl.LightningModule):
    """The net under a Trainer."""

    def __init__(self, way: Way, seen: Seen) -> None:
        super().__init__()
        self.net, self.seen = new_net(way), seen

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The loss of a micro-batch."""
        x, y, factor = batch
        loss = mse_loss(self.net(x), y) * factor
        self.seen.note_loss(loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of all runs."""
        return new_optimizer(self)


def strategy_argument(strategy: str, front_end: Any, options: Mapping[str, Any]) -> Any:
    """What the Trainer or Fabric is given as its strategy."""
    return fsdp_core.resolve(strategy, front_end)(**options) if options else strategy


def train_with_trainer(strategy: str, mode: Mode, seen: Seen) -> Trained:
    """Train under the Trainer."""
    way = mode.way
    module = Module(way, seen)
    trainer = pl.Trainer(
        strategy=strategy_argument(strategy, "trainer", mode.options),
        accelerator=ACCELERATOR,
        devices=1,
        precision=way.precision,  # type: ignore[arg-type]
        accumulate_grad_batches=way.accumulate,
        gradient_clip_val=way.clip_norm or way.clip_value,
        gradient_clip_algorithm="value" if way.clip_value else "norm",
        max_epochs=1,
        **QUIET,
    )
    torch.manual_seed(SEED)
    trainer.fit(module, Batches(way))
    seen.note_weights(module)
    return seen.trained(trainer.strategy, trainer.precision_plugin)


def train_with_fabric(strategy: str, mode: Mode, seen: Seen) -> Trained:
    """Train under Fabric."""
    way = mode.way
    fabric = Fabric(
        strategy=strategy_argument(strategy, "fabric", mode.options),
        accelerator=ACCELERATOR,
        devices=1,
        precision=way.precision,  # type: ignore[arg-type]
    )
    fabric.launch()
    net = new_net(way)
    model, optimizer = fabric.setup(net, new_optimizer(net))
    torch.manual_seed(SEED)
    for number, batch in enumerate(Batches(way), start=1):
        x, y, factor = fabric.to_device(batch)
        accumulates = number % way.accumulate != 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            loss = mse_loss(model(x), y) * factor
            seen.note_loss(loss)
            fabric.backward(loss / way.accumulate)
        if accumulates:
            continue
        if way.clip_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=way.clip_norm)
        if way.clip_value is not None:
            fabric.clip_gradients(model, optimizer, clip_val=way.clip_value)
        optimizer.step()
        optimizer.zero_grad()
    seen.note_weights(net)
    run = seen.trained(fabric.strategy, fabric.strategy.precision)
    fabric.strategy.teardown()
    return run


FRONT_ENDS: dict[FrontEnd, Callable[[str, Mode, Seen], Trained]] = {
    "trainer": train_with_trainer,
    "fabric": train_with_fabric,
}


def check_mode(strategy: str, front_end: FrontEnd, mode: Mode, details: dict[str, Any]) -> None:
    """Train in one mode, and compare losses, weights and scales with the loop of plain torch.

    Args:
        strategy: The strategy's name.
        front_end: ``"trainer"`` or ``"fabric"``.
        mode: What is checked.
        details: Of the record.
    """
    way, seen = mode.way, Seen()
    reference = plain_run(way, front_end)
    run = FRONT_ENDS[front_end](strategy, mode, seen)
    details["way"] = way
    details["differences"] = apart = differences(way, run, reference)
    details["tolerances"] = tolerances(way)
    details["losses"] = run.losses
    details["backend"] = dict(part.split(":") for part in dist.get_backend_config().split(","))[DEVICE.type]
    assert details["backend"] == BACKEND, f"the process group uses {details['backend']} for {DEVICE.type}"
    details["weights are on"], expected = seen.devices, {"cpu"} if mode.on_host else {DEVICE.type}
    assert seen.devices == expected, f"weights are on {seen.devices}, not on {expected}"
    computed_on = {loss.device for loss in seen.losses}
    assert computed_on == {DEVICE}, f"losses were on {computed_on}, not on {DEVICE}"
    if reference.final_scale is not None:
        details["scales"] = run.scales
        assert run.scales == reference.scales, f"scales were {run.scales}, in plain torch {reference.scales}"
        assert run.final_scale == reference.final_scale, f"the last scale {run.final_scale}, {reference.final_scale}"
    if OVERFLOW in way.factors:
        assert len(set(reference.scales)) > 1, "no gradient of plain torch has overflowed: the check is of no use"
    for name, most in tolerances(way).items():
        assert apart[name] <= most, f"{name} apart by {apart[name]:.2e}, more than {most:.1e}"


def check_collectives(records: Records) -> None:
    """Check which backend moves a tensor on the device, and record the collectives of a step on one rank."""
    from torch.profiler import ProfilerActivity, profile

    with records.check(f"a collective of {DEVICE.type} is {BACKEND}'s") as details:
        tensor = torch.ones(8, device=DEVICE)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            dist.all_reduce(tensor)
        names = {event.key for event in profiled.key_averages()}
        details["all-reduce"] = sorted(name for name in names if name.startswith(("nccl:", "gloo:")))
        assert any(name.startswith(f"{BACKEND}:") for name in details["all-reduce"]), f"it was {sorted(names)}"
    for strategy in STRATEGIES:
        with records.check(f"{strategy}: collectives of a fit on one rank are recorded") as details:
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                train_with_fabric(strategy, modes()["32-true"], Seen())
            calls = {event.key: event.count for event in profiled.key_averages()}
            details["collectives"] = {n: calls[n] for n in sorted(calls) if n.startswith(("nccl:", "gloo:"))}


def forget_run() -> None:
    """Let a run that has failed not disturb the next one."""
    if dist.is_initialized():
        note_meshes()  # torch names groups anew after this, and equal names would be taken for the old groups
        dist.destroy_process_group()
    gc.collect()


def main() -> None:
    """Run the part."""
    words, records = arguments("one_card", __doc__)
    for front_end in ("pytorch", "fabric"):  # would say of each fit what it runs on
        logging.getLogger(f"lightning.{front_end}").setLevel(logging.WARNING)
    names = [(mode, strategy, front_end) for mode in modes() for strategy in STRATEGIES for front_end in FRONT_ENDS]
    for mode, strategy, front_end in names:
        check = f"{strategy}/{front_end}/{mode}"
        reason = reason_to_leave_out(modes()[mode], strategy)
        if time.monotonic() + modes()[mode].seconds > words.deadline:
            records.no_time(check)
            continue
        if reason is not None:
            records.outcome(check, "left out", reason=reason)
            continue
        with records.check(check) as details:
            check_mode(strategy, front_end, modes()[mode], details)
        if "error" in details:
            forget_run()
        if mode == "32-true" and (strategy, front_end) == (STRATEGIES[-1], "fabric") and dist.is_initialized():
            check_collectives(records)
    if HAS_CARD:
        gc.collect()
        records.figure("memory of the card after all fits, MiB", torch.cuda.memory_allocated(DEVICE) / 2**20)


if __name__ == "__main__":
    main()
