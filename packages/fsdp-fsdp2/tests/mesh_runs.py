"""What tests of ``fsdp2`` on meshes share: the meshes, the rows of a rank, set-ups, and what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, DistributedSampler

import test_conformance
from declared_meshes import MESHES as DECLARED
from fsdp_core.testing import RankPool, oracle, short_runs
from fsdp_core.testing.meshes import DeclaredMesh
from fsdp_core.testing.oracle import Trained, train_plain
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.numerics.pairs import assert_equals_plain
from fsdp_core.testing.training import Lit, accelerator

WIDTH = 8  # of a block, which two ranks can divide


def plan_of_blocks(prefix: str) -> dict[str, Any]:
    """A plan that leaves the other layers whole, whose six rows four ranks can't divide."""
    styles = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return {"tp_plan": {f"{prefix}{name}": style for name, style in styles.items()}}


MESHES: Mapping[str, DeclaredMesh] = {
    **DECLARED,
    "replicate 2": DeclaredMesh(ranks=2, options={"data_parallel_replicate_size": 2, "data_parallel_size": 1}),
    "tensor 4": DeclaredMesh(ranks=4, options={"tensor_parallel_size": 4}, plan=plan_of_blocks),
}
#: Those of two axes, or of one over which nothing is sharded.
PARALLEL = [name for name in MESHES if name not in ("shard 2", "shard 4")]


class OnAllMeshes(test_conformance.TestFSDP2):
    """The suite's combinations of options, on these meshes too."""

    meshes = MESHES


def assert_combination(ranks: RankPool, tmp_path: Path, **labels: str) -> None:
    """Check that a combination of the suite's options trains as one process."""
    assert_equals_plain(ranks, tmp_path, OnAllMeshes, **labels)


def options_of(mesh: str, prefix: str = "") -> dict[str, Any]:
    return MESHES[mesh].options_for(prefix)


def set_up_on(
    mesh: str, net: nn.Module | None = None, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = oracle.sgd
) -> tuple[Any, Any, Any, Any]:
    """A Fabric on a mesh, the net, and what it returned for the net and for the optimizer."""
    net = oracle.new_net(width=WIDTH) if net is None else net
    return short_runs.set_up("fsdp2", options_of(mesh), net=net, optimizer=optimizer, world_size=MESHES[mesh].ranks)


def own_part(run: Any, batch: Any) -> Any:
    """The rows of this rank, which its peers of other axes have too: of a tensor, or of each tensor of a pair."""
    runtime = run.strategy.runtime
    if isinstance(batch, torch.Tensor):
        return batch.chunk(runtime.data_parallel_world_size)[runtime.data_parallel_rank].to(run.strategy.root_device)
    return tuple(own_part(run, tensor) for tensor in batch)


def plain(optimizer: str, *, empty: bool = False, **options: Any) -> Trained:
    """Four steps in one process.

    Args:
        optimizer: The name of the oracle's optimizer.
        empty: Whether ranks build the net without memory.
        **options: Those of the oracle.
    """
    return train_plain(4, getattr(oracle, optimizer), net=new_net(empty=empty), **options)


def new_net(*, empty: bool) -> oracle.Net:
    """The net of one process, with the values that ranks draw which build it without memory, or not."""
    with torch.device(accelerator() if empty else "cpu"):  # an accelerator draws other random numbers than the CPU
        net = oracle.new_net(width=WIDTH)
    return net.cpu()


class OwnLoader(Lit):
    """Divides the oracle's batches among the data-parallel ranks itself."""

    steps = 4

    def train_dataloader(self) -> Any:
        data: Any = oracle.dataset(oracle.BATCH * self.steps)
        assert self.trainer is not None
        share = self.trainer.distributed_sampler_kwargs
        assert share is not None
        sampler: Any = DistributedSampler(data, **share, shuffle=False)
        return DataLoader(data, batch_size=oracle.BATCH // share["num_replicas"], sampler=sampler)


#: Trains a step on a mesh; returns the Fabric, the model and the optimizer.
TrainOn = Callable[[str], tuple[Any, Any, Any]]


def save_on(train: TrainOn, mesh: str, folder: str) -> Any:
    """The state of a model and an optimizer that have trained, and are saved."""
    fabric, model, optimizer = train(mesh)
    fabric.save(folder, {"model": model, "optimizer": optimizer})
    return full_state(fabric.strategy), full_optimizer_state(fabric.strategy, optimizer)


def load_on(train: TrainOn, mesh: str, folder: str) -> Any:
    """The state of a model and an optimizer that have trained, and then loaded a checkpoint."""
    fabric, model, optimizer = train(mesh)
    fabric.load(folder, {"model": model, "optimizer": optimizer})
    return full_state(fabric.strategy), full_optimizer_state(fabric.strategy, optimizer)


def assert_moves(
    ranks: RankPool, folder: Path, train: TrainOn, saved: str, loaded: str, meshes: Mapping[str, DeclaredMesh] = MESHES
) -> dict[str, Any]:
    """Check that a checkpoint of one mesh is loaded bit for bit on another, and holds each byte once.

    Returns:
        The model's state.
    """
    want, *others = ranks.run(meshes[saved].ranks, save_on, train, saved, str(folder))
    for states in (*others, *ranks.run(meshes[loaded].ranks, load_on, train, loaded, str(folder))):
        torch.testing.assert_close(states, want, rtol=0, atol=0)
    model, optimizer = want
    tensors = [*model.values(), *(value for values in optimizer.values() for value in values.values())]
    written = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
    stored = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    assert stored < written + 2**16  # and the files' headers
    return dict(model)
