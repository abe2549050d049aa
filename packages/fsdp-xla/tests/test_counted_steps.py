"""A run under Fabric or Trainer has XLA do what a loop by hand has it do, and compile a program less."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import lightning as L
import numpy
import pytest
import torch
from torch import Tensor, nn

from fsdp_core.testing.oracle import FP32_TOLERANCE
from launching import Launching, LaunchingSPMD

DEVICES, STEPS, WARM = 2, 12, 4
STRATEGY = {"classic": "xla_fsdp", "spmd": "xla_fsdp_spmd"}


class Net(nn.Module):
    """Two units and the root, which computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.head(x) ** 2).mean()


def batch(rank: int, ranks: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(2))[rank::ranks]


def loader(rank: int, ranks: int) -> Any:
    rows: Any = [batch(rank, ranks)] * STEPS
    return torch.utils.data.DataLoader(rows, batch_size=None)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


class Counts:
    """What XLA has done in the steps after the warm ones, and in all."""

    #: What is counted is of all ranks, which are threads: none may fetch its loss before all have looked.
    looked: ClassVar[threading.Barrier]

    def before(self, step: int) -> None:
        if step == WARM:
            self.began = self._now()

    def told(self, loss: Tensor) -> dict[str, Any]:
        import torch_xla.debug.metrics as metrics

        done = {name: value - self.began[name] for name, value in self._now().items()}
        self.looked.wait(60)
        return {"steps": done, "programs": metrics.counter_value("UncachedCompile"), "loss": float(loss)}

    def _now(self) -> dict[str, int]:
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as metrics

        xm.wait_device_ops()
        of_metrics = {name: metrics.metric_data(name) for name in ("TransferFromDeviceTime",)}
        return {
            "executions": sum(metrics.counter_value(name) or 0 for name in ("ExecuteComputation", "ExecuteReplicated")),
            "compiles": metrics.counter_value("UncachedCompile") or 0,
            **{name: 0 if data is None else data[0] for name, data in of_metrics.items()},
        }


# -- the same training in three ways -----------------------------------------------------------------------------------


def loop(root: nn.Module, rank: int, ranks: int, place: Any) -> dict[str, Any]:
    import torch_xla

    counts, optimizer = Counts(), adamw(root)
    for step in range(STEPS):
        counts.before(step)
        loss = root(place(batch(rank, ranks)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
    return counts.told(loss)


def spmd_by_hand() -> Any:
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime as xr
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    xr.use_spmd()
    mesh = spmd.Mesh(numpy.arange(DEVICES), (DEVICES,), ("fsdp",))

    def cut(tensor: Tensor, mesh: Any) -> None:
        if tensor.ndim:  # not the loss
            spmd.mark_sharding(tensor, mesh, ("fsdp", None))

    def place(rows: Tensor) -> Tensor:
        on_devices = rows.to("xla")
        cut(on_devices, mesh)
        return on_devices

    net = Net()
    for index, block in enumerate(net.blocks):
        net.blocks[index] = SpmdFullyShardedDataParallel(block, mesh=mesh, shard_output=cut)
    return loop(SpmdFullyShardedDataParallel(net, mesh=mesh, shard_output=cut), 0, 1, place)


def classic_by_hand() -> Any:
    import torch_xla
    import torch_xla.runtime as xr
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    from fsdp_xla.ranks.launch import run_ranks

    building = threading.Lock()

    def train(_: None) -> dict[str, Any]:
        device = torch_xla.device()
        with building:
            net = Net().to(device)
        options = {"pin_layout_in_collective_ops": False}
        for index, block in enumerate(net.blocks):
            net.blocks[index] = XlaFullyShardedDataParallel(block, **options)
        root = XlaFullyShardedDataParallel(net, **options)
        return loop(root, xr.global_ordinal(), DEVICES, lambda rows: rows.to(device))

    return run_ranks(DEVICES, train, None)


def with_fabric(strategy: str) -> Any:
    def train(fabric: L.Fabric) -> dict[str, Any]:
        with fabric.init_module():
            net = Net()
        root = fabric.setup_module(net)
        optimizer, counts = fabric.setup_optimizers(adamw(root)), Counts()
        batches = loader(fabric.global_rank, fabric.world_size)
        for step, rows in enumerate(fabric.setup_dataloaders(batches, use_distributed_sampler=False)):
            counts.before(step)
            loss = root(rows)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        return counts.told(loss)

    return L.Fabric(strategy=strategy, devices=DEVICES).launch(train)


class Lit(L.LightningModule):
    #: What rank 0 has counted: ranks train copies of the module.
    counted: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.net, self.counts = Net(), Counts()

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        self.counts.before(index)
        loss: Tensor = self.net(rows)
        self.loss = loss.detach()
        return loss

    def configure_optimizers(self) -> Any:
        return adamw(self)

    def train_dataloader(self) -> Any:
        return loader(self.trainer.global_rank, self.trainer.world_size)

    def on_train_end(self) -> None:
        counted = self.counts.told(self.loss)
        if self.trainer.is_global_zero:
            self.counted.update(counted)


def with_trainer(strategy: str) -> Any:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    quiet |= {"enable_model_summary": False, "use_distributed_sampler": False, "max_epochs": 1}
    L.Trainer(strategy=strategy, devices=DEVICES, **quiet).fit(Lit())
    return Lit.counted


def train(way: str, contender: str) -> Any:
    Counts.looked = threading.Barrier(DEVICES if way == "classic" else 1)
    if contender == "by hand":
        return {"spmd": spmd_by_hand, "classic": classic_by_hand}[way]()
    return {"fabric": with_fabric, "trainer": with_trainer}[contender](STRATEGY[way])


def counted(way: str, contender: str) -> dict[str, Any]:
    """What XLA has done, in a process of its own: programs are compiled once in each."""
    with {"spmd": LaunchingSPMD, "classic": Launching}[way]() as ranks:
        found: dict[str, Any] = ranks.call(DEVICES, train, way, contender)
    return found


@pytest.fixture(scope="module", params=["classic", "spmd"])
def by_hand(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, counted(request.param, "by hand")


@pytest.mark.parametrize("contender", ["fabric", "trainer"])
def test_a_program_less_and_as_many_executions_as_by_hand(by_hand: Any, contender: str) -> None:
    way, expected = by_hand
    result = counted(way, contender)
    assert result["loss"] == pytest.approx(expected["loss"], abs=FP32_TOLERANCE)
    # by hand, a first step with the zeros of AdamW's state is another program than the second, where they are data
    assert result["programs"] == expected["programs"] - 1
    assert result["steps"] == expected["steps"]


def test_a_step_is_one_execution_of_each_rank_and_fetches_nothing(by_hand: Any) -> None:
    way, result = by_hand
    executions = (STEPS - WARM) * (DEVICES if way == "classic" else 1)
    assert result["steps"] == {"executions": executions, "compiles": 0, "TransferFromDeviceTime": 0}
