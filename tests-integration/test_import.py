"""Training goes on from imported checkpoints; of Lightning's sharded Trainers, the migration page's tests show it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from fsdp_core.checkpoint import verify
from fsdp_core.checkpoint.importing import import_checkpoint
from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.testing import RankPool
from fsdp_core.testing.oracle import FP32_TOLERANCE, adamw_groups, global_batches, new_net, train_plain
from fsdp_core.testing.short_runs import run_steps
from fsdp_core.testing.training import QUIET, loader, means, new_fabric, new_trainer
from test_interchange import STEPS, TwoEpochs


def net() -> nn.Module:
    """A net that FSDP1 takes too: uneven, without 0-dim parameters."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 6))


class OnCPU(FSDPStrategy):
    """Lightning's own FSDP without its refusal of CPUs, which asks for the exact class."""


def lightnings_own(name: str) -> tuple[Fabric, nn.Module]:
    if name == "model_parallel":
        strategy = ModelParallelStrategy(
            lambda module, mesh: fully_shard(module, mesh=mesh["data_parallel"]),
            data_parallel_size=2,
            tensor_parallel_size=1,
        )
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        return fabric, fabric.setup_module(net())
    init = FullyShardedDataParallel.__init__

    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "device_id": torch.device("cpu")})

    FullyShardedDataParallel.__init__ = on_cpu  # type: ignore[method-assign]
    try:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=OnCPU(state_dict_type="sharded"))
        fabric.launch()
        return fabric, fabric.setup_module(net())
    finally:
        FullyShardedDataParallel.__init__ = init  # type: ignore[method-assign]


def steps(fabric: Fabric, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    batches = islice(loader(2 * STEPS, fabric.world_size), first, last)
    return means(run_steps(model, optimizer, batches, fabric.backward))


def train_old(name: str, path: str) -> list[float]:
    """Save half-way with Lightning's own strategy; gives the losses of the second half."""
    fabric, model = lightnings_own(name)
    optimizer = fabric.setup_optimizers(adamw_groups(model))
    steps(fabric, model, optimizer, 0, STEPS)
    fabric.save(path, {"model": model, "optimizer": optimizer, "at": STEPS})
    return steps(fabric, model, optimizer, STEPS, 2 * STEPS)


def one_group(module: nn.Module) -> torch.optim.Optimizer:
    """What :func:`adamw_groups` makes of FSDP1's shards: all of them are 1-D, so all are in its second group."""
    return torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0)


def go_on(strategy: str, world_size: int, path: str, old: str) -> list[float]:
    fabric = new_fabric(strategy, world_size)
    bare = net()
    for parameter in bare.parameters():
        nn.init.zeros_(parameter)
    if old == "fsdp":
        model, optimizer = fabric.setup(bare, adamw_groups(bare))
        with pytest.raises(CheckpointMismatchError, match=r"weight_decay 0\.0 instead of 0\.1"):
            fabric.load(path, {"model": model, "optimizer": optimizer, "at": 0})
        bare = net()
    model, optimizer = fabric.setup(bare, (one_group if old == "fsdp" else adamw_groups)(bare))
    state = {"model": model, "optimizer": optimizer, "at": 0}
    assert fabric.load(path, state) == {}
    assert state["at"] == STEPS
    return steps(fabric, model, optimizer, STEPS, 2 * STEPS)


@pytest.mark.parametrize("old", ["fsdp", "model_parallel"])
def test_a_fabric_loop_goes_on(ranks: RankPool, tmp_path: Path, old: str) -> None:
    want = ranks.run(2, train_old, old, str(tmp_path / "old"))[0]
    import_checkpoint(tmp_path / "old", tmp_path / "new")
    verify(tmp_path / "new")
    for strategy, world_size in (("fsdp2", 1), ("fsdp_native", 2)):
        for losses in ranks.run(world_size, go_on, strategy, world_size, str(tmp_path / "new"), old):
            assert losses == pytest.approx(want, abs=FP32_TOLERANCE)


def train_plainly(tmp: str, path: str) -> list[str]:
    """Save half-way with a plain Trainer; gives the parameters' names in the optimizer's order."""
    module = TwoEpochs(1)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=tmp, **QUIET)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [names[parameter] for group in trainer.optimizers[0].param_groups for parameter in group["params"]]


def fit_on(strategy: str, world_size: int, tmp: str, path: str) -> list[float]:
    module = TwoEpochs(world_size)
    trainer = new_trainer(
        tmp, strategy, world_size, max_epochs=2, reload_dataloaders_every_n_epochs=1, use_distributed_sampler=False
    )
    trainer.fit(module, ckpt_path=path)
    return means(module.losses)


def test_a_full_file_of_the_trainer_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    want = train_plain(2 * STEPS, adamw_groups, net=new_net())[0][STEPS:]
    (order,) = ranks.run(1, train_plainly, str(tmp_path), str(tmp_path / "old.ckpt"))
    import_checkpoint(tmp_path / "old.ckpt", tmp_path / "new.ckpt", parameter_order=order)
    for strategy in ("fsdp2", "fsdp_native"):
        for losses in ranks.run(2, fit_on, strategy, 2, str(tmp_path), str(tmp_path / "new.ckpt")):
            assert losses == pytest.approx(want, abs=FP32_TOLERANCE)


class SecondHalf(TwoEpochs):
    """Sees in its first epoch what a plain loop saw in its last steps."""

    def train_dataloader(self) -> Any:
        batches: Any = [batch for i, batch in enumerate(loader(2 * STEPS, self.world_size)) if i >= STEPS]
        return DataLoader(batches, batch_size=None)

    def val_dataloader(self) -> Any:
        return loader(1, self.world_size)


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[float]:
    losses = [loss.item() for loss in run_steps(model, optimizer, batches)]
    return losses


def train_plain_model(path: str) -> list[str]:
    """Save half-way from a plain loop around a plain model; gives the parameters' names in the optimizer's order."""
    model = new_net()
    optimizer = adamw_groups(model)
    plain_steps(model, optimizer, global_batches(STEPS))
    names = {parameter: f"module.{name}" for name, parameter in model.named_parameters()}
    weights = {f"module.{name}": value for name, value in model.state_dict().items()}  # as from inside of DDP
    torch.save({"weights": weights, "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def fit_in_a_module(strategy: str, tmp: str, path: str, weights: str) -> tuple[list[float], list[float]]:
    """The losses of going on with the optimizer, and of beginning one anew from the weights alone."""
    module, fresh = SecondHalf(2), SecondHalf(2)
    new_trainer(tmp, strategy, 2, use_distributed_sampler=False).fit(module, ckpt_path=path)
    trainer = new_trainer(tmp, strategy, 2, use_distributed_sampler=False, limit_val_batches=1)
    trainer.validate(fresh, ckpt_path=weights, verbose=False)
    trainer.fit(fresh)
    return means(module.losses), means(fresh.losses)


def test_a_plain_models_checkpoint_goes_on_in_a_module_that_holds_it(ranks: RankPool, tmp_path: Path) -> None:
    old, new, weights = (str(tmp_path / name) for name in ("old.pt", "new.ckpt", "weights.ckpt"))
    (order,) = ranks.run(1, train_plain_model, old)
    with pytest.raises(CheckpointMismatchError, match=r"`--drop epoch`: training begins at its first epoch"):
        import_checkpoint(old, new, parameter_order=order, strip_prefix="module.", add_prefix="net.")
    import_checkpoint(old, new, parameter_order=order, strip_prefix="module.", add_prefix="net.", drop=["epoch"])
    import_checkpoint(old, weights, weights_only=True, strip_prefix="module.", add_prefix="net.")
    want = train_plain(2 * STEPS, adamw_groups, net=new_net())[0][STEPS:]
    loaded = SecondHalf.load_from_checkpoint(weights, map_location="cpu", world_size=1).net
    anew = plain_steps(loaded, adamw_groups(loaded), global_batches(2 * STEPS)[STEPS:])
    for strategy in ("fsdp2", "fsdp_native"):
        for gone_on, begun in ranks.run(2, fit_in_a_module, strategy, str(tmp_path), new, weights):
            assert gone_on == pytest.approx(want, abs=FP32_TOLERANCE)
            assert begun == pytest.approx(anew, abs=FP32_TOLERANCE)
