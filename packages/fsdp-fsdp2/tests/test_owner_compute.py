"""Optimizers of whole matrices under fsdp2: each matrix is updated once, on one rank, and the shards get the result."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import mse_loss

from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.suite.training.whole_matrices import (
    OwnMuon,
    assert_same_steps,
    make_muon,
    plain_steps,
    steps_on,
)
from fsdp_core.testing.training import new_fabric

MATRICES = 7  # of the net: its tied pair, and two in each block


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_matrix_is_updated_on_one_rank(ranks: RankPool, world_size: int) -> None:
    """Momentum, decay, groups, a schedule, closures and clipping are those of one process, over uneven shards."""
    got: list[Any] = ranks.run(world_size, steps_on, "fsdp2", world_size, 0, 4)
    for of_rank in got:
        assert_same_steps(of_rank, plain_steps(4))
    matrices = [count for *_, count in got]
    assert sum(matrices) == 4 * MATRICES
    assert max(matrices) <= 4 * -(-MATRICES // world_size)


def on_mesh(options: dict[str, Any], folder: str, divided: bool, first: int, last: int) -> Any:
    if divided:
        whole: Any = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("inp", "out")}
        options = {
            **options,
            "tp_plan": {**whole, "blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()},
        }
    at = {"load": folder} if first else {"save": folder}
    return steps_on("fsdp2", 4, first, last, options=options, width=8, **at)  # type: ignore[arg-type]


def test_meshes_of_two_axes_and_a_resume_on_the_other(ranks: RankPool, tmp_path: Path) -> None:
    """All four ranks own matrices, also where two hold the same shards."""
    folder, divided, hybrid = str(tmp_path / "c"), {"tensor_parallel_size": 2}, {"data_parallel_replicate_size": 2}
    before: list[Any] = ranks.run(4, on_mesh, divided, folder, True, 0, 2)
    after: list[Any] = ranks.run(4, on_mesh, hybrid, folder, False, 2, 4)
    for of_rank in before:
        assert_same_steps(of_rank, plain_steps(2, width=8))
    for of_rank in after:
        assert_same_steps(of_rank, plain_steps(4, width=8), first=2)
    for got in (before, after):
        assert [count > 0 for *_, count in got] == [True] * 4
        assert sum(count for *_, count in got) == 2 * MATRICES


def whole_state_resumed(folder: str) -> tuple[list[float], list[float], int, int]:
    """Torch's Muon over matrices: a full checkpoint, loaded by plain torch; and what this rank holds of the state."""
    fabric = new_fabric("fsdp2", options={"state_dict_type": "full"})
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], lr=0.01))
    (x, y), *_ = oracle.global_batches(1)
    with CommDebugMode() as communication:
        fabric.backward(mse_loss(model(x), y))
        of_passes = communication.get_total_counts()
        optimizer.step()
    of_step = communication.get_total_counts() - of_passes
    fabric.save(folder, {"model": model, "optimizer": optimizer})
    plain = oracle.new_net()
    of_plain = torch.optim.Muon([p for p in plain.parameters() if p.ndim == 2], lr=0.01)
    saved = torch.load(folder, weights_only=True)
    plain.load_state_dict(saved["model"])
    of_plain.load_state_dict(saved["optimizer"])
    losses: tuple[list[float], list[float]] = ([], [])
    for number, (one, two) in enumerate(((model, optimizer), (plain, of_plain))):
        two.zero_grad()
        loss = mse_loss(one(x), y)
        (fabric.backward if number == 0 else torch.Tensor.backward)(loss)
        two.step()
        losses[number].extend([loss.item(), mse_loss(one(x), y).item()])
    held = sum(value.numel() for values in optimizer.optimizer.state.values() for value in values.values())
    return *losses, held, of_step


def test_state_is_spread_evenly_and_is_that_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    net = oracle.new_net()
    total = sum(p.numel() for p in net.parameters() if p.ndim == 2 and p.requires_grad)
    got = ranks.run(2, whole_state_resumed, str(tmp_path / "full.ckpt"))
    for sharded, plain, _, of_step in got:
        assert sharded == pytest.approx(plain, abs=1e-4)  # Muon orthogonalises in bf16
        assert of_step == 3  # which have gradients, the matrices and their gradients to owners, the matrices back
    held = [of_rank[2] for of_rank in got]
    assert sum(held) == total
    assert max(held) <= total / 2 + 42  # a matrix


class Communicates(OwnMuon):
    """Divides the matrices among ranks itself, as some do for replicated models."""

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        made = super()._orthogonal(matrix)
        if type(matrix) is Tensor:
            torch.distributed.broadcast(made, 0)
            return made
        return made.neg()  # over DTensors wrong, in a way that ranks agree on


class LooksAtAll(OwnMuon):
    """Scales updates by the norm of all gradients that it sees."""

    def _update(self, group: Any, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        norms = [p.grad.norm() for one in self.param_groups for p in one["params"] if p.grad is not None]
        return super()._update(group, parameter, state) * 100 / (1 + sum(float(n) for n in norms))


def of_kind(kind: type[OwnMuon]) -> tuple[Any, Any]:
    net = oracle.new_net()
    groups = [{key: group[key] for key in ("params", "use_muon")} for group in make_muon(net).param_groups]
    return net, kind(groups)


def refused() -> list[str]:
    fabric, told = new_fabric("fsdp2"), []
    for kind in (Communicates, LooksAtAll):
        net, optimizer = of_kind(kind)
        told.append(refusal(OptimizerMismatchError, partial(fabric.setup, net, optimizer)))
    return told


def test_optimizers_that_owners_cannot_run_are_refused(ranks: RankPool) -> None:
    for communicates, looks_at_all in ranks.run(2, refused):
        assert_says(communicates, "Communicates", "Use another optimizer")
        assert_says(looks_at_all, "LooksAtAll", "Use another optimizer")


def frozen_then_added() -> tuple[list[Tensor], list[int]]:
    """Parameters without gradients stay as they are; those added later get owners."""
    fabric = new_fabric("fsdp2")
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, OwnMuon([net.blocks[0].up.weight, net.blocks[1].up.weight]))
    before = net.blocks[1].up.weight.full_tensor().clone()
    x, y = oracle.global_batches(1)[0]
    for step in range(2):
        fabric.backward(mse_loss(model(x), y))
        if step == 0:
            net.blocks[1].up.weight.grad = None
        optimizer.step()
        model.zero_grad()
        if step == 0:
            assert torch.equal(net.blocks[1].up.weight.full_tensor(), before)
            optimizer.add_param_group({"params": [net.blocks[2].up.weight], "use_muon": True})
    moved = [net.blocks[i].up.weight.full_tensor().detach() for i in range(3)]
    return moved, [len(optimizer.optimizer.state)]


def test_parameters_without_gradients_and_added_ones(ranks: RankPool) -> None:
    net: nn.Module = oracle.new_net()
    optimizer = OwnMuon([net.blocks[0].up.weight, net.blocks[1].up.weight])  # type: ignore[union-attr,index]
    x, y = oracle.global_batches(1)[0]
    for step in range(2):
        mse_loss(net(x), y).backward()
        if step == 0:
            net.blocks[1].up.weight.grad = None  # type: ignore[union-attr,index]
        optimizer.step()
        net.zero_grad()
        if step == 0:
            optimizer.add_param_group({"params": [net.blocks[2].up.weight], "use_muon": True})  # type: ignore[union-attr,index]
    want = [net.blocks[i].up.weight for i in range(3)]  # type: ignore[union-attr,index]
    got = ranks.run(2, frozen_then_added)
    for moved, _ in got:
        torch.testing.assert_close(moved, [w.detach() for w in want], atol=oracle.FP32_TOLERANCE, rtol=0)
    assert sum(count for _, (count,) in got) == 3
