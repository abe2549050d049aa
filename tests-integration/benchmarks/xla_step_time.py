"""Times one contender's steps on XLA's CPU devices beside those of a loop by hand, in turn, in one process; see xla.py.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python xla_step_time.py spmd|classic fabric|trainer|lightning STEPS [alone]
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python xla_step_time.py spmd|classic by-hand STEPS alone

Prints ``{"seconds": …, "cpu": …, "by_hand": {"seconds": …, "cpu": …}, "executions": …, "compiles": …, "loss": …}``:
times of each block of steps, the executions of a step, the programs compiled in all, and the last step's loss. Programs
are counted ``alone``, since one that another loop has compiled is not compiled again.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xr
from lightning.fabric import Fabric
from lightning.fabric.accelerators import XLAAccelerator
from lightning.fabric.strategies import XLAFSDPStrategy
from torch import Tensor, nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel
from transformer import Block, Size, batch, optimizer, transformer

from fsdp_xla import XLACPUAccelerator
from fsdp_xla.lightning.launchers import FabricXLALauncher
from fsdp_xla.ranks.launch import run_ranks

#: Steps are taken in blocks, so that XLA may run one while the next is recorded; the first blocks compile.
DEVICES, BLOCK, WARM = 2, 5, 2
#: The windows of a step are those of all devices together.
SIZE = Size(width=128, layers=4, windows=4 * DEVICES, context=64)
#: Ranks may be threads, which each train a copy: torch's random generator, and so a model's making, is the process's.
MODEL = transformer(SIZE)

WAY, CONTENDER, STEPS, ALONE = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:] == ["alone"]


def loader(rank: int, ranks: int) -> torch.utils.data.DataLoader[Any]:
    """Loads a rank's part of each step's batch."""
    batches: Any = [batch(SIZE, step, 0)[rank::ranks] for step in range(BLOCK * WARM + STEPS)]
    return torch.utils.data.DataLoader(batches, batch_size=None)


# -- by hand -----------------------------------------------------------------------------------------------------------


def by_hand(root: nn.Module, batches: Any, place: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """The shortest loop that torch_xla allows; gives each step's loss."""
    stepper = optimizer(root)
    for tokens in batches:
        loss = root(place(tokens))
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        torch_xla.sync()
        yield loss.detach()


def spmd_by_hand() -> Iterator[Tensor]:
    xr.use_spmd()
    mesh = spmd.Mesh(numpy.arange(DEVICES), (DEVICES,), ("fsdp",))

    def cut(output: Tensor, mesh: Any) -> None:
        if output.ndim:  # not the loss
            spmd.mark_sharding(output, mesh, ("fsdp",) + (None,) * (output.ndim - 1))

    def place(tokens: Tensor) -> Tensor:
        on_devices = tokens.to("xla")
        spmd.mark_sharding(on_devices, mesh, ("fsdp", None))
        return on_devices

    model = copy.deepcopy(MODEL)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = SpmdFullyShardedDataParallel(block, mesh=mesh, shard_output=cut)
    return by_hand(SpmdFullyShardedDataParallel(model, mesh=mesh, shard_output=cut), loader(0, 1), place)


def classic_by_hand() -> Iterator[Tensor]:
    device = torch_xla.device()
    model = copy.deepcopy(MODEL).to(device)
    options = {"pin_layout_in_collective_ops": False}  # else no two ranks compile the same program
    for index, block in enumerate(model.blocks):
        model.blocks[index] = XlaFullyShardedDataParallel(block, **options)
    root = XlaFullyShardedDataParallel(model, **options)
    return by_hand(root, loader(xr.global_ordinal(), DEVICES), lambda tokens: tokens.to(device))


# -- taking turns ------------------------------------------------------------------------------------------------------


class Turns:
    """Lets the loop by hand take a block of steps after each of a contender's, and times both."""

    def __init__(self) -> None:
        self.times: dict[str, list[tuple[float, float]]] = {"contender": [], "by_hand": []}
        self.executions = self.executed = 0
        self.by_hand: Iterator[Tensor] | None = None
        self.loss_by_hand = torch.zeros(())

    def before(self, step: int) -> None:
        """Called before each step of the contender, with its index."""
        if step % BLOCK == 0:
            if step:
                self._end("contender")
            self._steps_by_hand()
            self.began = _now()

    def report(self, loss: Tensor) -> dict[str, Any]:
        """Called after the last step, with its loss."""
        self._end("contender")
        self._steps_by_hand()
        if not ALONE and abs(float(loss) - float(self.loss_by_hand)) > 1e-3:
            raise SystemExit(f"they did not train the same: {float(loss)}, by hand {float(self.loss_by_hand)}")
        of_each = {name: times[WARM:] for name, times in self.times.items()}
        seconds = {name: [of_block[0] for of_block in times] for name, times in of_each.items()}
        cpu = {name: [of_block[1] for of_block in times] for name, times in of_each.items()}
        return {
            "seconds": seconds["contender"],
            "cpu": cpu["contender"],
            "by_hand": {"seconds": seconds["by_hand"], "cpu": cpu["by_hand"]},
            "executions": self.executions / BLOCK,
            "compiles": metrics.counter_value("UncachedCompile"),
            "loss": float(loss),
        }

    def _steps_by_hand(self) -> None:
        if ALONE:
            return
        if self.by_hand is None:
            self.by_hand = {"spmd": spmd_by_hand, "classic": classic_by_hand}[WAY]()
        self.began = _now()
        taken = 0
        for loss in self.by_hand:
            self.loss_by_hand = loss
            taken += 1
            if taken == BLOCK:
                break
        if taken:
            self._end("by_hand")

    def _end(self, who: str) -> None:
        now = _now()
        self.times[who].append(((now[0] - self.began[0]) / BLOCK, (now[1] - self.began[1]) / BLOCK))
        if who == "contender":
            self.executions = now[2] - self.began[2]


def _now() -> tuple[float, float, int]:
    """The time, the process's processor time, and how many programs were run, when the devices have done all."""
    xm.wait_device_ops()
    run = sum(metrics.counter_value(name) or 0 for name in ("ExecuteComputation", "ExecuteReplicated"))
    return time.perf_counter(), time.process_time(), run


# -- contenders --------------------------------------------------------------------------------------------------------


def by_hand_alone() -> dict[str, Any]:
    """The loop by hand as if it were a contender, to count its programs."""

    def train(_: None) -> dict[str, Any]:
        turns = Turns()
        losses = {"spmd": spmd_by_hand, "classic": classic_by_hand}[WAY]()
        loss = torch.zeros(())
        for step in range(BLOCK * WARM + STEPS):
            turns.before(step)
            loss = next(losses)
        return turns.report(loss)

    told: dict[str, Any] = run_ranks(DEVICES, train, None) if WAY == "classic" else train(None)
    return told


class LightningsOnCPU(XLAFSDPStrategy):
    """Lightning's own strategy, launched as ours is: its own way sets up no collectives on CPU devices."""

    def _configure_launcher(self) -> None:
        self._launcher = FabricXLALauncher(DEVICES)


class CPUDevices(XLAAccelerator):
    """Lightning's XLA accelerator, which looks for TPUs alone."""

    parse_devices = staticmethod(XLACPUAccelerator.parse_devices)
    get_parallel_devices = staticmethod(XLACPUAccelerator.get_parallel_devices)
    auto_device_count = staticmethod(XLACPUAccelerator.auto_device_count)
    is_available = staticmethod(XLACPUAccelerator.is_available)


def with_fabric(fabric: Fabric) -> dict[str, Any]:
    def train(fabric: Fabric) -> dict[str, Any]:
        turns = Turns()
        root = fabric.setup_module(copy.deepcopy(MODEL))
        stepper = fabric.setup_optimizers(optimizer(root))
        batches = loader(fabric.global_rank, fabric.world_size)
        for step, tokens in enumerate(fabric.setup_dataloaders(batches, use_distributed_sampler=False)):
            turns.before(step)
            loss = root(tokens)
            stepper.zero_grad()
            fabric.backward(loss)
            stepper.step()
        return turns.report(loss)

    told: dict[str, Any] = fabric.launch(train)
    return told


class Timed(pl.LightningModule):
    """The same under the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = copy.deepcopy(MODEL)

    def on_train_start(self) -> None:
        self.turns = Turns()

    def on_train_batch_start(self, tokens: Tensor, index: int) -> None:
        self.turns.before(index)  # not in the training step, inside of which the root's forward has begun

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(tokens)
        self.loss = loss.detach()
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer(self)

    def train_dataloader(self) -> Any:
        return loader(self.trainer.global_rank, self.trainer.world_size)

    def on_train_end(self) -> None:
        told = self.turns.report(self.loss)
        if self.trainer.is_global_zero:
            print(json.dumps(told), flush=True)


def with_trainer(strategy: str) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    quiet |= {"enable_model_summary": False, "use_distributed_sampler": False, "max_epochs": 1}
    pl.Trainer(strategy=strategy, devices=DEVICES, **quiet).fit(Timed())


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    strategy = {"spmd": "xla_fsdp_spmd", "classic": "xla_fsdp"}[WAY]
    if CONTENDER == "trainer":
        with_trainer(strategy)
    elif CONTENDER == "fabric":
        print(json.dumps(with_fabric(Fabric(strategy=strategy, devices=DEVICES))))
    elif CONTENDER == "lightning":
        own: Any = LightningsOnCPU(auto_wrap_policy={Block}, pin_layout_in_collective_ops=False)
        print(json.dumps(with_fabric(Fabric(accelerator=CPUDevices(), strategy=own, devices=DEVICES))))
    else:
        print(json.dumps(by_hand_alone()))


if __name__ == "__main__":
    main()
