"""Hybrid sharding and tensor parallelism: numbers are those of one process, and checkpoints move between meshes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.utils.data import DataLoader

import fsdp_core
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.testing import RankPool, oracle, short_runs
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.short_runs import assert_close_by_name, assert_trained_alike, run_steps
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import Lit, new_fabric, new_trainer, whole_batches
from mesh_runs import (
    MESHES,
    PARALLEL,
    WIDTH,
    OwnLoader,
    assert_combination,
    assert_moves,
    options_of,
    own_part,
    set_up_on,
)

pytestmark = pytest.mark.everything


@pytest.mark.parametrize("mesh", PARALLEL)
@pytest.mark.parametrize(
    "loop", [{"front_end": "trainer"}, {"front_end": "fabric", "accumulate": "2"}], ids=["trainer", "accumulated"]
)
def test_training_equals_plain(ranks: RankPool, tmp_path: Path, mesh: str, loop: dict[str, str]) -> None:
    assert_combination(ranks, tmp_path, mesh=mesh, clip="norm", optimizer="adamw", **loop)


ORDERS = (1.0, float("inf"))


def test_norm_of_gradients_sharded_over_different_axes(ranks: RankPool) -> None:
    net = oracle.new_net(width=WIDTH)
    (x, y), *_ = oracle.global_batches(1)
    nn.functional.mse_loss(net(x), y).backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    want = [nn.utils.get_total_norm(gradients, order).item() for order in ORDERS]
    for norms in ranks.run(4, norms_on, "shard 2 x tensor 2"):
        assert norms == pytest.approx(want, rel=oracle.FP32_TOLERANCE)


def norms_on(mesh: str) -> list[float]:
    fabric, _, model, optimizer = set_up_on(mesh)
    x, y = whole_batches(fabric, 1)[0]
    fabric.backward(nn.functional.mse_loss(model(x), y))
    return [float(fabric.clip_gradients(model, optimizer, max_norm=1e9, norm_type=order)) for order in ORDERS]


def seen_on(mesh: str, shuffle: bool) -> tuple[int, list[list[float]]]:
    fabric = new_fabric("fsdp2", MESHES[mesh].ranks, options_of(mesh))
    data: Any = [float(i) for i in range(16)]
    with mock.patch.dict(os.environ, {"PL_GLOBAL_SEED": "3"}):  # by which Lightning's sampler shuffles
        loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2, shuffle=shuffle))
    runtime: Any = fabric.strategy.runtime  # type: ignore[attr-defined]
    return runtime.data_parallel_rank, [batch.tolist() for batch in loader]


@pytest.mark.parametrize("shuffle", [False, True])
def test_tensor_parallel_peers_see_the_same_batches(ranks: RankPool, shuffle: bool) -> None:
    got = ranks.run(4, seen_on, "shard 2 x tensor 2", shuffle)
    assert [rank for rank, _ in got] == [0, 0, 1, 1]
    assert (got[0], got[2]) == (got[1], got[3])
    assert sorted(x for _, batches in (got[0], got[2]) for batch in batches for x in batch) == list(range(16))


def train_on(mesh: str) -> tuple[Any, Any, Any]:
    fabric, _, model, optimizer = set_up_on(mesh, optimizer=oracle.adamw_groups)
    x, y = whole_batches(fabric, 1)[0]
    fabric.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    return fabric, model, optimizer


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("shard 2 x tensor 2", "shard 2"),
        ("shard 2 x tensor 2", "replicate 2 x shard 2"),
        ("replicate 2 x shard 2", "tensor 2"),
        ("replicate 2 x tensor 2", "shard 2 x tensor 2"),
    ],
)
def test_checkpoints_move_between_meshes(ranks: RankPool, tmp_path: Path, saved: str, loaded: str) -> None:
    assert_moves(ranks, tmp_path / "checkpoint", train_on, saved, loaded)


def axes_on(mesh: str) -> tuple[Any, ...]:
    strategy: Any = new_fabric("fsdp2", MESHES[mesh].ranks, options_of(mesh)).strategy
    mesh_of_all = strategy.device_mesh
    left_out = next(
        axis for axis in ("tensor_parallel", "data_parallel_replicate") if axis not in mesh_of_all.mesh_dim_names
    )
    assert_says(refusal(KeyError, lambda: mesh_of_all["data_parallel", left_out]), left_out, "one rank", "apart")
    sizes = (mesh_of_all[axis].size() for axis in ("tensor_parallel", "data_parallel_replicate"))
    return mesh_of_all.mesh_dim_names, *sizes, strategy.mesh


@pytest.mark.parametrize("mesh", ["replicate 2", "shard 2 x tensor 2"])
def test_axes_of_one_rank_are_left_out_and_can_be_looked_up(ranks: RankPool, mesh: str) -> None:
    sizes = MESHES[mesh].options
    for names, tensor, replicate, data in ranks.run(MESHES[mesh].ranks, axes_on, mesh):
        assert tensor == sizes.get("tensor_parallel_size", 1) == data.tensor_parallel
        assert replicate == sizes.get("data_parallel_replicate_size", 1) == data.data_parallel_replicate
        assert ("tensor_parallel" in names, "data_parallel_replicate" in names) == (tensor > 1, replicate > 1)


def device_mesh_of_module(tmp: str) -> tuple[int, int]:
    meshes: list[Any] = []

    class Looks(Lit):
        def configure_model(self) -> None:
            meshes.append(self.device_mesh)

    run = new_trainer(tmp, "fsdp2", 2, options_of("replicate 2"))
    run.validate(Looks(width=WIDTH), DataLoader([torch.ones(oracle.FEATURES)] * 0, batch_size=1), verbose=False)
    (mesh,) = meshes
    return mesh["data_parallel_replicate"].size(), mesh["tensor_parallel"].size()


def reduced_losses() -> Any:
    strategy: Any = new_fabric("fsdp2", 4, {"tensor_parallel_size": 2}).strategy
    own = torch.tensor(float(strategy.runtime.data_parallel_rank))
    loss = DTensor.from_local(own, strategy.device_mesh["tensor_parallel"], [Replicate()], run_check=False)
    return strategy.all_reduce(loss).item()


def test_losses_that_are_dtensors_are_averaged_over_data_parallel_ranks(ranks: RankPool) -> None:
    """As inside of torch's loss_parallel(): each rank got its own."""
    assert ranks.run(4, reduced_losses) == [0.5] * 4


def test_configure_model_has_the_mesh(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, device_mesh_of_module, str(tmp_path)) == [(2, 1)] * 2


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3
        self.q = nn.Linear(6, 6)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.emb, self.head = Heads(), nn.LayerNorm(6), nn.Embedding(6, 6), nn.Linear(6, 6)
        self.head.weight = self.emb.weight


class WithPlan(Attending):
    _tp_plan: ClassVar = {"norm": "packed"}


#: A plan, what it is used with, and what the message says.
UNFIT: dict[str, tuple[Any, type[nn.Module], list[str]]] = {
    "nothing matches": (
        {"blocks.*.upp": ColwiseParallel()},
        oracle.Net,
        ["matches no submodule of Net", "blocks.0.up"],
    ),
    "two match": (
        {"inp": ColwiseParallel(), "i*": RowwiseParallel()},
        oracle.Net,
        ["'inp' matches two patterns", "'i*'"],
    ),
    "a style of others": (
        {"norm": RowwiseParallel()},
        Attending,
        ["'norm'", "RowwiseParallel", "LayerNorm", "layers in"],
    ),
    "uneven": (
        {"blocks.*.up": ColwiseParallel()},
        oracle.Net,
        ["blocks.0.up.weight", "size 7", "size=2", "another size"],
    ),
    "heads": ({"attention.q": ColwiseParallel()}, Attending, ["num_heads=3", "'attention'"]),
    "tied": ({"emb": ColwiseParallel()}, Attending, ["'emb.weight' and 'head.weight'", "one parameter", "leave both"]),
    "no own plan": ("auto", Attending, ["no submodule of Attending brings a plan"]),
    "own plan": ("auto", WithPlan, ["'packed'", "WithPlan", "colwise"]),
}


def unfit() -> dict[str, str]:
    def set_up(tp_plan: Any, module: type[nn.Module]) -> None:
        new_fabric("fsdp2", 2, {"tensor_parallel_size": 2, "tp_plan": tp_plan}).setup(module())

    return {
        case: refusal(ShardingError, partial(set_up, tp_plan, module)) for case, (tp_plan, module, _) in UNFIT.items()
    }


def test_plan_that_does_not_fit(ranks: RankPool) -> None:
    for messages in ranks.run(2, unfit):
        for case, (_, _, words) in UNFIT.items():
            assert_says(messages[case], *words)


#: Options, on two ranks, and what the message says.
SIZES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "does not divide": (
        {"tensor_parallel_size": 3, "tp_plan": "auto"},
        ["does not divide 2 ranks", "tensor_parallel_size=2"],
    ),
    "too many": ({"data_parallel_size": 4}, ["is for 4 ranks", "there are 2", "data_parallel_size=2", "start 4 ranks"]),
    "no number": (
        {"data_parallel_replicate_size": 0},
        ["data_parallel_replicate_size=0", "positive integer", "'auto'"],
    ),
    "a bool": ({"data_parallel_size": True}, ["data_parallel_size=True", "positive integer"]),
    "no size": (
        {"tp_plan": "auto"},
        ["tp_plan was given without tensor_parallel_size", "tensor_parallel_size=1, which"],
    ),
    "no size for a loss": ({"loss_parallel": True}, ["loss_parallel was given without tensor_parallel_size"]),
    "no dict": ({"tp_plan": ["blocks"]}, ["tp_plan=['blocks']", "dict from patterns"]),
    "no style": ({"tp_plan": {"blocks": "colwise"}}, ["'colwise' is no style"]),
    "no name": ({"tp_plan": {1: ColwiseParallel()}}, ["1 is no name", "dict from patterns"]),
    "no layer": (
        {"tp_plan": {}, "tensor_parallel_size": 2},
        ["tp_plan={}", "it divides no layer", "dict from patterns"],
    ),
}


@pytest.mark.parametrize("front_end", ["trainer", "fabric"])
@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_do_not_fit_before_any_process_starts(tmp_path: Path, front_end: str, case: str) -> None:
    options, words = SIZES[case]

    def start() -> None:
        if front_end == "trainer":
            new_trainer(tmp_path, "fsdp2", 2, options)
        else:
            new_fabric("fsdp2", 2, options)

    assert_says(refusal(UnsupportedCapabilityError, start), *words)
    assert not torch.distributed.is_initialized()


class Normed(nn.Module):
    """A block whose norm runs on parts of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return output


def sequence_parallel_on(world_size: int) -> dict[str, torch.Tensor]:
    from torch.distributed.tensor import Shard

    own = {
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    }
    styles = {**own, "down": RowwiseParallel(), "up": ColwiseParallel(input_layouts=Shard(1))}
    with oracle.seeded(3):
        net = Normed()
        x = torch.randn(4, 8, 6)
    options = {"tensor_parallel_size": 2, "tp_plan": styles}
    fabric, _, model, optimizer = short_runs.set_up("fsdp2", options, net=net, world_size=world_size)
    fabric.backward(model(own_part(fabric, x)).square().mean())
    optimizer.step()
    return full_state(fabric.strategy)


@pytest.mark.parametrize("world_size", [2, 4])
def test_sequence_parallel_norms_get_whole_gradients(ranks: RankPool, world_size: int) -> None:
    with oracle.seeded(3):
        net = Normed()
        x = torch.randn(4, 8, 6)
    net(x).square().mean().backward()
    oracle.sgd(net).step()
    for got in ranks.run(world_size, sequence_parallel_on, world_size):
        assert_close_by_name(got, net.state_dict())


def gathered_on(mesh: str) -> tuple[list[float], Any]:
    fabric, net, model, _ = set_up_on(mesh)
    x, _ = whole_batches(fabric, 1)[0]
    with fsdp_core.gathered(model, modifier_rank=0):
        output = net(x).flatten().tolist()
        with torch.no_grad():
            net.blocks[0].up.weight.mul_(2)
    return output, full_state(fabric.strategy)["blocks.0.up.weight"]


def test_gathered_model_runs_as_written_and_takes_changes(ranks: RankPool) -> None:
    net = oracle.new_net(width=WIDTH)
    x, _ = oracle.global_batches(1)[0]
    for output, weight in ranks.run(4, gathered_on, "shard 2 x tensor 2"):
        assert output == pytest.approx(net(x).flatten().tolist(), abs=oracle.FP32_TOLERANCE)
        torch.testing.assert_close(weight, net.blocks[0].up.weight.detach() * 2, rtol=0, atol=0)


class Scaled(nn.Linear):
    """Multiplies by a buffer, as some models of transformers scale their embeddings."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.scale


def gathered_beside_a_buffer(mesh: str) -> tuple[Any, Any, Any]:
    options = {"tensor_parallel_size": 2, "tp_plan": {"0": ColwiseParallel(), "1": RowwiseParallel()}}
    fabric = new_fabric("fsdp2", MESHES[mesh].ranks, options)
    with oracle.seeded(3):
        net = nn.Sequential(Scaled(6, 8), nn.Linear(8, 6))
    model = fabric.setup(net)
    x, _ = whole_batches(fabric, 1)[0]
    with fsdp_core.gathered(model, modifier_rank=0), torch.no_grad():
        before = net(x)
        net[0].scale.mul_(3)
    with fsdp_core.gathered(model):
        after = net(x)
    return before, after.detach(), full_state(fabric.strategy)["0.scale"]


def test_gathered_shows_buffers_of_divided_layers(ranks: RankPool) -> None:
    with oracle.seeded(3):
        net = nn.Sequential(Scaled(6, 8), nn.Linear(8, 6))
    x, _ = oracle.global_batches(1)[0]
    want = net(x).detach()
    net[0].scale.mul_(3)
    for before, after, scale in ranks.run(2, gathered_beside_a_buffer, "tensor 2"):
        torch.testing.assert_close(before, want, rtol=oracle.FP32_TOLERANCE, atol=oracle.FP32_TOLERANCE)
        torch.testing.assert_close(after, net(x).detach(), rtol=oracle.FP32_TOLERANCE, atol=oracle.FP32_TOLERANCE)
        assert float(scale) == 6.0


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("shard 2 x tensor 2", "the same"), ("shard 2 x tensor 2", "tensor 2"), ("replicate 2", "tensor 2")],
)
def test_accumulated_gradients_move_between_meshes(ranks: RankPool, tmp_path: Path, saved: str, loaded: str) -> None:
    labels = {"accumulate": "2", "resume": "amid a step", "front_end": "fabric"}
    assert_combination(ranks, tmp_path, mesh=saved, resumed_on=loaded, **labels)


class NormedHeads(nn.Module):
    """Normalises each head between two layers that a plan divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(2), nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        heads = self.norm(self.up(x).unflatten(-1, (-1, 2)))
        return self.down(heads.flatten(-2).relu())


def unplanned_norm(mesh: str, planned: bool) -> tuple[str, str, str]:
    """The refusals under Fabric and under the Trainer, of a norm that sees the heads of one rank.

    The last is of one whose first gradient is zero.
    """
    style = {"norm": SequenceParallel(sequence_dim=1, use_local_output=True)} if planned else {}
    own = {"up": ColwiseParallel(), "down": RowwiseParallel(), **style}
    torch.manual_seed(0)
    net = NormedHeads()
    sizes = MESHES[mesh].options
    fabric = new_fabric("fsdp2", MESHES[mesh].ranks, {**sizes, "tp_plan": own})
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    x, y = whole_batches(fabric, 1)[0]
    fabric.backward(nn.functional.mse_loss(model(x), y))
    message = refusal(ShardingError, optimizer.step)

    gated = NormedHeads()
    nn.init.zeros_(gated.down.weight)
    model_of_gated, second = fabric.setup(gated, oracle.sgd(gated))

    def train() -> None:
        run_steps(model_of_gated, second, whole_batches(fabric, 3), fabric.backward)

    late = refusal(ShardingError, train)

    module = OwnLoader("sgd", width=WIDTH)
    module.net, module.steps = NormedHeads(), 1
    prefixed = {f"net.{name}": style for name, style in own.items()}
    run = new_trainer("unused", "fsdp2", MESHES[mesh].ranks, {**sizes, "tp_plan": prefixed})
    return message, refusal(ShardingError, lambda: run.fit(module)), late


@pytest.mark.parametrize("mesh", ["tensor 2", "shard 2 x tensor 2"])
def test_what_the_plan_forgets_is_refused_before_the_first_step(ranks: RankPool, mesh: str) -> None:
    """Each rank would train its own copy of a norm between divided layers."""
    for refused in ranks.run(MESHES[mesh].ranks, unplanned_norm, mesh, False):
        for message in refused:
            assert_says(message, "norm.weight'", "norm.bias' differ between tensor-parallel ranks", "SequenceParallel(")
    for taken in ranks.run(MESHES[mesh].ranks, unplanned_norm, mesh, True):
        assert [message.split(": ", 1)[1] for message in taken] == ["nothing was raised"] * 3


class Dropped(nn.Module):
    """Drops out what a norm, which no plan divides, is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm, self.up, self.down = (
            nn.Linear(6, 64), nn.LayerNorm(64), nn.Linear(64, 8), nn.Linear(8, 6)
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        return self.down(self.up(self.norm(nn.functional.dropout(self.inp(x)))).relu())


def drawn_on_one_rank() -> tuple[str, str]:
    """The refusals after a number that rank 1 alone has drawn, and of a divided layer's error under a bad plan."""
    own: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    fabric = new_fabric("fsdp2", 2, {"tensor_parallel_size": 2, "tp_plan": own})
    torch.manual_seed(0)
    net = Dropped()
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    torch.manual_seed(0)

    def train() -> None:
        for step, (x, y) in enumerate(whole_batches(fabric, 5)):
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            if step == 2 and fabric.global_rank == 1:
                torch.rand(1, device=fabric.device)

    drawn = refusal(ShardingError, train)
    half = new_fabric("fsdp2", 2, {"tensor_parallel_size": 2, "tp_plan": {"up": ColwiseParallel()}})
    divided = half.setup(NormedHeads())
    try:
        divided(whole_batches(half, 1)[0][0])
    except RuntimeError as error:
        return drawn, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return drawn, "nothing was raised"


def test_ranks_that_draw_apart_and_half_a_plan_are_told_why(ranks: RankPool) -> None:
    for drawn, half in ranks.run(2, drawn_on_one_rank):
        assert_says(drawn, "'norm.weight'", "so do their random generators", "Draw on all ranks or on none")
        assert_says(half, "mat1 and mat2", "tp_plan divides layers of NormedHeads", "RowwiseParallel", "-1")


class Backwards:
    """Reads each rank's part from the end."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def transform_dataloader(self, loader: Any) -> Any:
        sampler = loader.sampler
        self.seen.append((sampler.rank, sampler.num_replicas))
        return DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=list(sampler)[::-1])


def sampled_on(mesh: str) -> tuple[list[tuple[int, int]], list[list[float]], str, list[list[float]]]:
    """What the sampler was given under Fabric, the batches, a refusal, and the batches under the Trainer."""
    backwards, data = Backwards(), [float(i) for i in range(8)]
    samplers = [backwards.transform_dataloader, lambda loader: None]
    options = {**options_of(mesh), "data_sampler": lambda loader: samplers.pop(0)(loader)}
    fabric = new_fabric("fsdp2", MESHES[mesh].ranks, options)
    batches = [batch.tolist() for batch in fabric.setup_dataloaders(DataLoader(cast("Any", data), batch_size=2))]
    message = refusal(ShardingError, lambda: fabric.setup_dataloaders(DataLoader(cast("Any", data), batch_size=2)))
    seen = list(backwards.seen)

    validated: list[list[float]] = []

    class Validating(Lit):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            validated.append(batch.tolist())

    own = {**options_of(mesh, "net."), "data_sampler": backwards.transform_dataloader}
    run = new_trainer("unused", "fsdp2", MESHES[mesh].ranks, own)
    run.validate(Validating(width=WIDTH), DataLoader(cast("Any", data), batch_size=2), verbose=False)
    return seen, batches, message, validated


def test_data_sampler(ranks: RankPool) -> None:
    """It gets each loader with the sampler of the data-parallel rank, under both front ends."""
    for rank, (seen, batches, message, validated) in enumerate(ranks.run(4, sampled_on, "shard 2 x tensor 2")):
        assert seen == [(rank // 2, 2)]
        assert batches == validated == [[6.0 + rank // 2, 4.0 + rank // 2], [2.0 + rank // 2, 0.0 + rank // 2]]
        assert_says(message, "data_sampler returned None for a DataLoader", "Return the loader")


def test_a_data_sampler_of_nemo_is_named() -> None:
    with pytest.raises(UnsupportedCapabilityError, match=r"Write data_sampler=data_sampler\.transform_dataloader"):
        fsdp_core.resolve("fsdp2", "trainer")(data_sampler=Backwards())


def token_means_on(mesh: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A step of two micro-batches whose ranks have different numbers of tokens."""
    fabric, _, model, optimizer = set_up_on(mesh)
    means = []
    for number, batch in enumerate(oracle.global_batches(2)):
        x, y = own_part(fabric, batch)
        with fabric.no_backward_sync(model, enabled=number == 0):
            loss = fsdp_core.token_mean((model(x) - y).square(), y > (0.3, 1.0)[number], accumulated=True)
            fabric.backward(loss)
        means.append(loss.item())
    fabric.clip_gradients(model, optimizer, max_norm=0.05)
    optimizer.step()
    return means, full_state(fabric.strategy)


@pytest.mark.parametrize("mesh", ["replicate 2 x shard 2", "shard 2 x tensor 2"])
def test_means_are_over_the_tokens_of_ranks_with_other_data(ranks: RankPool, mesh: str) -> None:
    net = oracle.new_net(width=WIDTH)
    optimizer = oracle.sgd(net)
    counted = [
        (net(x) - y).square()[y > threshold]
        for (x, y), threshold in zip(oracle.global_batches(2), (0.3, 1.0), strict=True)
    ]
    (sum(losses.sum() for losses in counted) / sum(losses.numel() for losses in counted)).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    optimizer.step()
    want = [losses.mean().item() for losses in counted], net.state_dict()
    assert_trained_alike(ranks.run(4, token_means_on, mesh), want)
