"""Training with SPMD as these tests and their scripts do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import launching
from fsdp_core.sharding import sharded_of
from fsdp_core.testing import oracle
from fsdp_core.testing.oracle import new_net
from fsdp_core.testing.training import Lit, loader, strategy_argument

NAME = "xla_fsdp_spmd"


def whole_state(strategy: Any, root: nn.Module) -> dict[str, Tensor]:
    """The state of a sharded root, whole and on the host."""
    sharded = sharded_of(root)
    assert sharded is not None
    return {name: strategy.backend.full_tensor(value) for name, value in sharded.model_state().items()}


def new_fabric(options: Mapping[str, Any] | None = None, devices: int = 4, **kwargs: Any) -> Fabric:
    fabric = Fabric(strategy=strategy_argument(NAME, "fabric", options), devices=devices, **kwargs)
    fabric.launch()
    return fabric


def fabric_fit(
    steps: int = 4,
    optimizer: str = "adamw_groups",
    options: Mapping[str, Any] | None = None,
    *,
    net: nn.Module | None = None,
    accumulate: int = 1,
    clip: Mapping[str, Any] | None = None,
    precision: Any = None,
    after: Callable[[Fabric, nn.Module, Any], Any] | None = None,
) -> dict[str, Any]:
    """Train the oracle's net on the oracle's batches under Fabric."""
    fabric = new_fabric(options, precision=precision)
    net = net or new_net()
    model, opt = fabric.setup(net, getattr(oracle, optimizer)(net))
    losses = []
    for i, (x, y) in enumerate(fabric.setup_dataloaders(loader(steps, 1))):
        stepping = (i + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not stepping):
            loss = mse_loss(model(x), y)
            losses.append(loss.detach())
            fabric.backward(loss / accumulate)
        if stepping:
            if clip:
                fabric.clip_gradients(model, opt, **clip)
            opt.step()
            opt.zero_grad()
    return {
        "losses": [loss.item() for loss in losses],
        "state": whole_state(fabric.strategy, net),
        "after": after(fabric, net, opt.optimizer) if after else None,
    }


def new_trainer(tmp: str, options: Mapping[str, Any] | None = None, **kwargs: Any) -> pl.Trainer:
    strategy = strategy_argument(NAME, "trainer", options)
    shared = {"strategy": strategy, "devices": 4, "limit_val_batches": None, "use_distributed_sampler": True}
    return launching.trainer(Path(tmp), **{**shared, **kwargs})


def fit(
    tmp: str,
    steps: int = 4,
    optimizer: str = "adamw_groups",
    options: Mapping[str, Any] | None = None,
    *,
    module: pl.LightningModule | None = None,
    data: DataLoader[Any] | None = None,
    ckpt_path: str | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train the oracle's net on the oracle's batches under the Trainer."""
    module = module or Lit(optimizer)
    trainer = new_trainer(tmp, options, **kwargs)
    trainer.fit(module, data or loader(steps, 1), ckpt_path=ckpt_path)
    state = whole_state(trainer.strategy, module)
    return {
        "losses": [loss.item() for loss in getattr(module, "losses", [])],
        "state": {name.removeprefix("net."): value for name, value in state.items()},
    }


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[int, ...]]]:
    """What each device holds of tensors, by name."""
    from fsdp_xla.torch_xla_private.sharded_tensors import local_shards

    return {name: [tuple(shard.shape) for shard in local_shards(tensor)] for name, tensor in tensors.items()}


def moments(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": value
        for name, parameter in net.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.device.type == "xla"
    }


def compiled() -> int:
    """How many programs XLA has compiled in this process."""
    import torch_xla.debug.metrics as met

    return int(met.counter_value("UncachedCompile") or 0)
