"""Ways to train under ``fsdp2`` besides its defaults, each beside the loop by hand that does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch.distributed as dist
from contenders import Module, Step, Train, by_trainer
from device import ACCELERATOR, own_device
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from transformer import Block, Size, Transformer, batch, optimizer, transformer

import fsdp_core

__all__ = ["WAYS", "Way", "contenders_of"]


@dataclass(frozen=True, kw_only=True)
class Way:
    """Options of ``fsdp2``, and the mesh that they ask for.

    Attributes:
        options: The options besides the mesh's.
        replicate: Replicas of the shards.
        tensor: Tensor-parallel ranks.
        ranks: All ranks.
        accumulate: Micro-batches per step.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    replicate: int = 1
    tensor: int = 1
    ranks: int = 2
    accumulate: int = 1

    @property
    def shard(self) -> int:
        """The ranks that shard."""
        return self.ranks // self.replicate // self.tensor


WAYS = {
    "default": Way(),
    "accumulation × 4": Way(accumulate=4),
    "activation checkpointing": Way(options={"activation_checkpointing_policy": {Block}}),
    "tensor 2": Way(tensor=2),
    "shard 2 × tensor 2": Way(tensor=2, ranks=4),
    "replicate 2 × shard 2": Way(replicate=2, ranks=4),
}


def plan() -> dict[str, Any]:
    """The MLPs by columns and rows."""
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def contenders_of(way: Way) -> dict[str, Train]:
    """``fsdp2`` by name, and the loop by hand."""
    return {"fsdp2": partial(_by_name, way), "by hand": partial(_by_hand, way)}


def _batches(size: Size, way: Way) -> Iterator[Tensor]:
    return (batch(size, step, dist.get_rank() // way.tensor) for step in count())


def _by_name(way: Way, size: Size, after_step: Step) -> None:
    options = dict(way.options)
    if way.tensor > 1:
        own = {f"model.blocks.*.{name}": style for name, style in plan().items()}
        options.update(tensor_parallel_size=way.tensor, tp_plan=own)
    if way.replicate > 1:
        options.update(data_parallel_replicate_size=way.replicate)
    strategy: Any = fsdp_core.resolve("fsdp2", "trainer")(**options)

    def each_step(number: int, loss: Tensor, model: nn.Module, steps: Any) -> bool:
        return (number + 1) % way.accumulate != 0 or after_step(number // way.accumulate, loss, model, steps)

    by_trainer(
        strategy, Module(size), size, each_step, data=_batches(size, way), accumulate_grad_batches=way.accumulate
    )


def _by_hand(way: Way, size: Size, after_step: Step) -> None:
    model: Any = _sharded(way, transformer(size).to(own_device()))
    steps = optimizer(model)
    data = _batches(size, way)
    for step in count():
        for micro in range(way.accumulate):
            model.set_requires_gradient_sync(micro == way.accumulate - 1)
            loss = model(next(data).to(own_device()))
            if micro == 0:
                steps.zero_grad()
            (loss / way.accumulate).backward()
        steps.step()
        if not after_step(step, loss.detach() / way.accumulate, model, steps):
            return


def _sharded(way: Way, model: Transformer) -> nn.Module:
    sizes = {"replicate": way.replicate, "shard": way.shard, "tensor": way.tensor}
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    mesh = init_device_mesh(ACCELERATOR, tuple(axes.values()), mesh_dim_names=tuple(axes))
    over = mesh["replicate", "shard"] if way.replicate > 1 else mesh["shard"]
    for block in model.blocks:
        if way.tensor > 1:
            parallelize_module(block, mesh["tensor"], plan())
        if "activation_checkpointing_policy" in way.options:
            block.forward = _recomputed(block.forward)  # type: ignore[method-assign]
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=over)
    return model


def _recomputed(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)
