"""Optimizers of whole matrices under fsdp2: each matrix is updated once, on one rank, and the shards get the result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR

from fsdp_core.errors import OptimizerMismatchError, ShardingError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.checkpoints.late_param_groups import Growing
from fsdp_core.testing.suite.training.whole_matrices import OwnMuon, assert_same_steps, make_muon, plain_steps, steps_on
from fsdp_core.testing.training import loader, means, new_fabric, new_trainer

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


@pytest.mark.everything
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
        assert_says(communicates, "Communicates communicates in its step", "Use one for a single device instead")
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


class NeedsOne(OwnMuon):
    """Looks up the device of the first parameter, which a rank that owns none has not."""

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["params"][0].device.type == "cpu"
        return super().step(closure)


def one_matrix() -> Tensor:
    fabric = new_fabric("fsdp2")
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, NeedsOne([net.blocks[0].up.weight]))
    x, y = oracle.global_batches(1)[0]
    fabric.backward(mse_loss(model(x), y))
    optimizer.step()
    moved: Tensor = net.blocks[0].up.weight.full_tensor().detach()
    return moved


def test_an_optimizer_that_needs_a_parameter_has_no_owners(ranks: RankPool) -> None:
    """On two ranks, one would own nothing of a single matrix, and fail while the other waits for it."""
    net: Any = oracle.new_net()
    optimizer = NeedsOne([net.blocks[0].up.weight])
    x, y = oracle.global_batches(1)[0]
    mse_loss(net(x), y).backward()
    optimizer.step()
    for moved in ranks.run(2, one_matrix):
        torch.testing.assert_close(moved, net.blocks[0].up.weight.detach(), atol=oracle.FP32_TOLERANCE, rtol=0)


class FillsIn(OwnMuon):
    """Takes a missing gradient for one of zeros, as the Muon that many have copied does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.add_(self._update(group, parameter, self.state[parameter]), alpha=-group["lr"])
        return loss


def scheduled(net: Any) -> tuple[FillsIn, StepLR]:
    """An optimizer that has a schedule before it is set up, as in configure_optimizers()."""
    optimizer = FillsIn([net.blocks[0].up.weight, net.blocks[1].up.weight])
    return optimizer, StepLR(optimizer, 1, 0.5)


def few_steps(
    net: Any, model: Any, optimizer: Any, schedule: StepLR, backward: Callable[[Tensor], Any], value: Any
) -> list[Any]:
    """Three steps with hooks; what the hooks see, and the weights."""
    seen: list[Any] = []
    plain: Any = getattr(optimizer, "optimizer", optimizer)
    plain.register_step_pre_hook(lambda *_: seen.append(net.blocks[0].up.weight.grad is None))
    plain.register_step_post_hook(lambda *_: seen.append(value(net.blocks[0].up.weight)))
    x, y = oracle.global_batches(1)[0]

    def evaluate() -> Tensor:
        loss = mse_loss(model(x), y)
        backward(loss)
        if len(seen) > 1:
            net.blocks[1].up.weight.grad = None  # it had one before, and has momentum
        return loss

    for _ in range(3):
        model.zero_grad()
        optimizer.step(evaluate)
        schedule.step()
    return [*seen, *(value(net.blocks[i].up.weight) for i in range(2))]


def with_hooks() -> tuple[list[Any], list[str]]:
    fabric = new_fabric("fsdp2")
    net = oracle.new_net()
    plain, schedule = scheduled(net)
    model, optimizer = fabric.setup(net, plain)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        value = lambda p: p.full_tensor().detach().clone()  # noqa: E731
        seen = few_steps(net, model, optimizer, schedule, fabric.backward, value)
    return seen, [str(one.message) for one in told if "lr_scheduler" in str(one.message)]


def test_schedules_hooks_and_missing_gradients(ranks: RankPool) -> None:
    """A schedule may be older than the shards, hooks see weights before and after, and no gradient may mean zeros."""
    net = oracle.new_net()
    want = few_steps(net, net, *scheduled(net), Tensor.backward, lambda p: p.detach().clone())
    for got, told in ranks.run(2, with_hooks):
        assert told == []
        assert [one for one in got if isinstance(one, bool)] == [True] * 3
        torch.testing.assert_close(got, want, atol=oracle.FP32_TOLERANCE, rtol=0)


class GrowingMuon(Growing):
    """Its optimizer steps over whole matrices, with a schedule, and gets param groups in hooks."""

    def configure_optimizers(self) -> Any:
        optimizer = OwnMuon([self.net.blocks[0].up.weight])
        return [optimizer], [{"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}]

    def _add(self, block: int) -> None:
        optimizer: Any = self.optimizers()
        if len(optimizer.param_groups) <= block:
            optimizer.add_param_group({"params": [self.net.blocks[block].up.weight], "lr": 0.02 * block})


def grown(tmp: str) -> tuple[list[float], list[float], Any, Any]:
    """Losses and the state at the end, of an uninterrupted run and of one that was stopped and resumed."""
    whole, first, second = GrowingMuon(), GrowingMuon(), GrowingMuon()
    run = new_trainer(tmp, "fsdp2", 2, max_epochs=2)
    run.fit(whole, loader(2, 2))
    new_trainer(tmp, "fsdp2", 2, callbacks=[ModelCheckpoint(tmp, "one")], enable_checkpointing=True).fit(
        first, loader(2, 2)
    )
    resumed = new_trainer(tmp, "fsdp2", 2, max_epochs=2)
    resumed.fit(second, loader(2, 2), ckpt_path=f"{tmp}/one.ckpt")
    states = [
        (full_state(one.strategy), full_optimizer_state(one.strategy, one.optimizers[0])) for one in (run, resumed)
    ]
    return means(whole.losses[2:]), means(second.losses), states[0], states[1]


def test_param_groups_that_are_added_late_have_owners(ranks: RankPool, tmp_path: Path) -> None:
    for losses, of_resumed, state, resumed in ranks.run(2, grown, str(tmp_path)):
        assert losses == of_resumed
        assert state[1].keys() == resumed[1].keys()
        torch.testing.assert_close(resumed, state, atol=0, rtol=0)


class Failing(OwnMuon):
    """Can't factorise one of the matrices, as ill-conditioned ones sometimes can't be."""

    fails_at: Tensor | None = None

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        if self.fails_at is not None and matrix.shape == self.fails_at.shape and torch.equal(matrix, self.fails_at):
            torch.linalg.cholesky(torch.zeros(2, 2))
        return super()._orthogonal(matrix)


def fails_on_its_owner() -> tuple[list[str], bool, int]:
    """Fail at a matrix, and at a gradient that one rank has not; what is told, and whether weights are as before."""
    fabric = new_fabric("fsdp2")
    net = oracle.new_net()
    matrices = {name: p for name, p in net.named_parameters() if p.ndim == 2 and p.requires_grad}
    optimizer = Failing(list(matrices.values()), momentum=0.0)
    model, stepped = fabric.setup(net, optimizer)
    (x, y), *_ = oracle.global_batches(1)
    said = []

    def step() -> None:
        with CommDebugMode() as mode:
            stepped.step()
        counts.append(sum(mode.get_comm_counts().values()))

    counts: list[int] = []
    fabric.backward(mse_loss(model(x), y))
    step()
    before = full_state(fabric.strategy)
    gradient = net.blocks[1].down.weight.grad
    optimizer.fails_at = gradient.full_tensor()
    said.append(refusal(ShardingError, step))
    optimizer.fails_at = None
    weight = net.blocks[0].up.weight
    if fabric.global_rank == 1:
        weight.grad = None
    said.append(refusal(ShardingError, step))
    after = full_state(fabric.strategy)
    weight.grad = torch.zeros_like(weight)
    step()  # ranks are not out of step
    return said, all(torch.equal(after[name], value) for name, value in before.items()), counts[-1]


def test_all_ranks_raise_what_one_owner_fails_with(ranks: RankPool) -> None:
    """The failing rank takes part in the exchange that the others wait in, so it costs no collective."""
    first, second = ranks.run(2, fails_on_its_owner, timeout=60)
    assert first == second
    (at_a_matrix, no_gradient), kept, collectives = first
    assert_says(at_a_matrix, "Failing has failed on rank", "while it updated 'blocks.1.down.weight': _LinAlgError")
    assert_says(at_a_matrix, "No weight was changed", "from a checkpoint")
    assert_says(no_gradient, "on rank 1, which has no gradient of its part of 'blocks.0.up.weight'", "AdamW")
    assert kept
    assert collectives == 3  # which have gradients, then gradients and weights to the owners, and weights back


def in_orders_of_their_own() -> str:
    fabric = new_fabric("fsdp2")
    net = oracle.new_net()
    matrices = [p for p in net.parameters() if p.ndim == 2 and p.requires_grad]
    given = matrices[::-1] if fabric.global_rank else matrices
    return refusal(ShardingError, lambda: fabric.setup(net, OwnMuon(given)))


def test_parameters_in_another_order_are_refused(ranks: RankPool) -> None:
    """As those of a set are: its order differs from process to process."""
    for told in ranks.run(2, in_orders_of_their_own):
        assert_says(told, "where rank 0 has 'inp.weight', rank 1 has 'blocks.2.down.weight'", "the order of a set")
