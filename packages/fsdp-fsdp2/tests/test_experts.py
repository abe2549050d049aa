"""Expert parallelism: numbers are those of one process, checkpoints move between sizes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import fsdp_core
import test_context_parallel
from expert_models import PLAN, ChoosingExperts, Experts, MixedBlock, MixedNet, balance, new_net, shares_of
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.sharding import Mesh
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.meshes import DeclaredMesh
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.short_runs import assert_close_by_name, assert_trained_alike
from fsdp_core.testing.state import full_state, sharded_by
from fsdp_core.testing.training import loader, means, new_fabric, new_trainer
from fsdp_fsdp2.expert_parallel import tokens as dispatch
from fsdp_fsdp2.expert_parallel.plans import check_units, experts_of
from fsdp_fsdp2.fabric import FSDP2Strategy
from mesh_runs import assert_moves

#: Of weights after some steps of AdamW in fp64, and of norms; measured differences stay below 1e-15.
TOLERANCE = 1e-6
MAX_NORM = 0.05
STEPS = 3

#: Ranks, and options of the strategy.
MESHES: dict[str, DeclaredMesh] = {
    "experts 2": DeclaredMesh(ranks=2, options={"expert_parallel_size": 2}),
    "experts 2 of 4": DeclaredMesh(ranks=4, options={"expert_parallel_size": 2}),
    "experts 4": DeclaredMesh(ranks=4, options={"expert_parallel_size": 4}),
    "replicate 2 x experts 2": DeclaredMesh(
        ranks=4, options={"expert_parallel_size": 2, "data_parallel_replicate_size": 2}
    ),
    "shard 2": DeclaredMesh(ranks=2),
}

#: Arguments of :func:`train_on` and :func:`train_plain`.
Case = Mapping[str, Any]


def set_up(mesh: str, net: nn.Module, options: Mapping[str, Any] | None = None) -> tuple[Any, Any, Any]:
    """A Fabric, and what it has set up: the net, and AdamW over it."""
    declared = MESHES[mesh]
    plan = {"expert_parallel_plan": PLAN} if "expert_parallel_size" in declared.options else {}
    fabric = new_fabric("fsdp2", declared.ranks, {**plan, **declared.options, **(options or {})})
    return fabric, *fabric.setup(net, oracle.adamw_groups(net))


def own_rows(fabric: Any, *tensors: Tensor) -> list[Tensor]:
    """The rows of this rank, in fp64."""
    runtime = fabric.strategy.runtime
    rank, ranks = runtime.data_parallel_rank, runtime.data_parallel_world_size
    return [tensor.double().chunk(ranks)[rank] for tensor in tensors]


def build(experts: int = 4, favoured: int = 0, frozen: bool = False) -> MixedNet:
    net = new_net(experts=experts, favoured=favoured).double()
    if frozen:
        net.blocks[0].experts.requires_grad_(False)  # type: ignore[union-attr,operator]
    return net


def train_on(mesh: str, case: Case, accumulate: int = 1, options: Mapping[str, Any] | None = None) -> Any:
    """The norm of each step, and the weights at the end."""
    fabric, model, optimizer = set_up(mesh, build(**case), options)
    norms = []
    for index, (x, y) in enumerate(oracle.global_batches(STEPS * accumulate), start=1):
        rows, targets = own_rows(fabric, x, y)
        with fabric.no_backward_sync(model, enabled=index % accumulate != 0):
            fabric.backward(mse_loss(model(rows), targets) / accumulate)
        if index % accumulate == 0:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, full_state(fabric.strategy)


def train_plain(case: Case, accumulate: int = 1) -> Any:
    net = build(**case)
    optimizer = oracle.adamw_groups(net)
    norms = []
    for index, (x, y) in enumerate(oracle.global_batches(STEPS * accumulate), start=1):
        (mse_loss(net(x.double()), y.double()) / accumulate).backward()
        if index % accumulate == 0:
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, net.state_dict()


def assert_equal_runs(got: Any, want: Any) -> None:
    norms, state = got
    assert norms == pytest.approx(want[0], rel=TOLERANCE)
    assert_close_by_name(state, want[1], tolerance=TOLERANCE)


#: By name, the net, and how many micro-batches a step has.
CASES: dict[str, tuple[Case, int]] = {
    "tokens for all": ({}, 1),
    "a rank without tokens": ({"favoured": 2}, 2),
    "fewer experts than ranks": ({"experts": 2}, 1),
    "frozen experts": ({"frozen": True}, 1),
}


def train_each_on(mesh: str, names: list[str]) -> Any:
    return {name: train_on(mesh, *CASES[name]) for name in names}


def assert_equals_one_process(ranks: RankPool, mesh: str, names: list[str]) -> None:
    for by_name in ranks.run(MESHES[mesh].ranks, train_each_on, mesh, names):
        for name in names:
            assert_equal_runs(by_name[name], train_plain(*CASES[name]))


def test_two_ranks_equal_one_process(ranks: RankPool) -> None:
    assert_equals_one_process(ranks, "experts 2", ["tokens for all", "a rank without tokens"])


@pytest.mark.everything
@pytest.mark.parametrize("mesh", ["experts 2 of 4", "experts 4", "replicate 2 x experts 2"])
def test_more_ranks_equal_one_process(ranks: RankPool, mesh: str) -> None:
    divides = [name for name in CASES if mesh != "experts 4" or name != "fewer experts than ranks"]
    assert_equals_one_process(ranks, mesh, divides)


OPTIONS: dict[str, Mapping[str, Any]] = {
    "recomputed blocks": {"activation_checkpointing_policy": {MixedBlock}},
    "recomputed experts": {"activation_checkpointing_policy": {Experts, ChoosingExperts}},
    "offload": {"cpu_offload": True, "activation_offload": True},
    "reduced on every batch": {"sync_each_batch": True},
    "prefetched": {"reshard_after_forward": True, "forward_prefetch_depth": 2, "backward_prefetch_depth": 2},
    "gathered once": {"reshard_after_forward": False, "auto_wrap_policy": None},
}


def train_with_each_option(mesh: str) -> Any:
    return {name: train_on(mesh, {}, 2, options) for name, options in OPTIONS.items()}


@pytest.mark.everything
def test_options_equal_one_process(ranks: RankPool) -> None:
    want = train_plain({}, 2)
    for by_name in ranks.run(4, train_with_each_option, "experts 2 of 4", timeout=240.0):
        for name in OPTIONS:
            assert_equal_runs(by_name[name], want)


def train_in_bf16(mesh: str | None) -> list[float]:
    """Losses of some steps, with ranks or without."""
    net = new_net()
    if mesh is None:
        optimizer = oracle.sgd(net)
        losses = []
        for x, y in oracle.global_batches(STEPS):
            loss = mse_loss(net(x), y)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses
    declared = MESHES[mesh]
    fabric: Any = new_fabric(
        "fsdp2", declared.ranks, {"expert_parallel_plan": PLAN, **declared.options}, precision="bf16-mixed"
    )
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    losses = []
    for x, y in oracle.global_batches(STEPS):
        rows, targets = (tensor.float() for tensor in own_rows(fabric, x, y))
        loss = mse_loss(model(rows), targets)
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.everything
def test_half_precision(ranks: RankPool) -> None:
    want = train_in_bf16(None)
    for losses in ranks.run(4, train_in_bf16, "experts 2 of 4"):
        assert losses == pytest.approx(want, rel=oracle.HALF_TOLERANCE)


# -- the Trainer, and losses of routers --------------------------------------------------------------------------------


class Balanced(pl.LightningModule):
    """Adds the loss that balances routers: over the tokens of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any) -> Tensor:
        x, y = (tensor.double() for tensor in batch)
        loss = mse_loss(self.net(x), y)
        for block in self.net.blocks:
            assert isinstance(block, MixedBlock)
            shares = self.trainer.strategy.reduce(shares_of(block), reduce_op="mean")
            loss = loss + balance(block, shares)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return oracle.adamw_groups(self)


def fit_on(mesh: str, tmp: str) -> Any:
    torch.set_num_threads(1)
    module = Balanced()
    if mesh == "one process":
        run = new_trainer(tmp, "auto", 1)
        run.fit(module, loader(STEPS, 1))
        return means(module.losses), module.state_dict()
    declared = MESHES[mesh]
    plan = {f"net.{name}": contract for name, contract in PLAN.items()}
    run = new_trainer(tmp, "fsdp2", declared.ranks, {**declared.options, "expert_parallel_plan": plan})
    run.fit(module, loader(STEPS, declared.ranks))
    return means(module.losses), full_state(run.strategy)


@pytest.mark.everything
def test_routers_are_balanced_over_the_tokens_of_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    (want,) = ranks.run(1, fit_on, "one process", str(tmp_path))
    assert_trained_alike(ranks.run(4, fit_on, "experts 2 of 4", str(tmp_path)), want)


# -- state -------------------------------------------------------------------------------------------------------------


def train_a_step_on(mesh: str) -> tuple[Any, Any, Any]:
    fabric, model, optimizer = set_up(mesh, build())
    ((x, y),) = oracle.global_batches(1)
    rows, targets = own_rows(fabric, x, y)
    fabric.backward(mse_loss(model(rows), targets))
    optimizer.step()
    return fabric, model, optimizer


@pytest.mark.everything
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("experts 2 of 4", "experts 4"),
        ("experts 4", "shard 2"),
        ("shard 2", "replicate 2 x experts 2"),
        ("replicate 2 x experts 2", "experts 2"),
    ],
)
def test_checkpoints_move_between_sizes(ranks: RankPool, tmp_path: Path, saved: str, loaded: str) -> None:
    assert_moves(ranks, tmp_path / "checkpoint", train_a_step_on, saved, loaded, MESHES)


def accumulate_on(mesh: str, folder: str, action: str) -> Any:
    """Save two of three micro-batches of a step, or load these and step after the third."""
    fabric, model, optimizer = set_up(mesh, build())
    gradients = fsdp_core.AccumulatedGradients(model)
    state = {"model": model, "optimizer": optimizer, "gradients": gradients}
    first, second, third = (own_rows(fabric, *batch) for batch in oracle.global_batches(3))
    if action == "save":
        with fabric.no_backward_sync(model):
            for rows, targets in (first, second):
                fabric.backward(mse_loss(model(rows), targets) / 3)
        fabric.save(folder, state)
        return None
    fabric.load(folder, state)
    rows, targets = third
    fabric.backward(mse_loss(model(rows), targets) / 3)
    optimizer.step()
    return full_state(fabric.strategy)


@pytest.mark.everything
@pytest.mark.parametrize(
    ("saved", "loaded"), [("experts 2 of 4", "experts 4"), ("experts 2", "shard 2"), ("shard 2", "experts 2 of 4")]
)
def test_unreduced_gradients_move_between_sizes(ranks: RankPool, tmp_path: Path, saved: str, loaded: str) -> None:
    net = build()
    optimizer = oracle.adamw_groups(net)
    for x, y in oracle.global_batches(3):
        (mse_loss(net(x.double()), y.double()) / 3).backward()
    optimizer.step()
    folder = str(tmp_path / "checkpoint")
    ranks.run(MESHES[saved].ranks, accumulate_on, saved, folder, "save")
    for state in ranks.run(MESHES[loaded].ranks, accumulate_on, loaded, folder, "load"):
        assert_close_by_name(state, net.state_dict(), tolerance=TOLERANCE)


def held_on(mesh: str) -> list[int]:
    """The elements of each parameter of experts that this rank has, and that its plan says."""
    fabric, *_ = set_up(mesh, build(experts=2 if mesh == "experts 2 of 4" else 4))
    sharded = sharded_by(fabric.strategy)
    held = []
    for name, parameter in sharded.root.named_parameters():
        if "experts" in name:
            local: Any = parameter
            assert local.to_local().numel() == sharded.plan.parameters[name].local_numel
            held.append(local.to_local().numel() * fabric.world_size // parameter.numel())
    return held


@pytest.mark.everything
def test_each_rank_has_its_share_of_experts(ranks: RankPool) -> None:
    """Also where experts are fewer than ranks, whose rows could not all have some."""
    for mesh in ("experts 2", "experts 4"):
        for held in ranks.run(MESHES[mesh].ranks, held_on, mesh):
            assert held == [1] * 6
    first, *_ = ranks.run(4, held_on, "experts 2 of 4")
    assert first == [1, 1, 1] * 2 or first[0] == first[2] == 1  # a bias of five elements is not even


# -- context parallelism -----------------------------------------------------------------------------------------------


class MixedTransformer(pl.LightningModule):
    """A transformer of context parallelism's tests, with experts for its wide layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = test_context_parallel.new_net()
        with oracle.seeded(3):
            for block in self.net.blocks:
                block.up = nn.Identity()  # type: ignore[union-attr]
                block.down = MixedBlock(sorts=False, features=test_context_parallel.WIDTH)  # type: ignore[union-attr]
        self.losses: list[Tensor] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return test_context_parallel.sampled(test_context_parallel.rows(), self.trainer.strategy)

    def training_step(self, batch: Any) -> Tensor:
        loss = test_context_parallel.loss_of(self.net(batch["ids"]), batch["labels"])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return oracle.adamw_groups(self)


def fit_sequences_on(tmp: str) -> Any:
    module = MixedTransformer()
    options = {
        "context_parallel_size": 2,
        "expert_parallel_size": 2,
        "expert_parallel_plan": {"net.blocks.*.down.experts": "top_k"},
    }
    run = new_trainer(tmp, "fsdp2", 4, options)
    run.fit(module)
    return means(module.losses), full_state(run.strategy)


@pytest.mark.everything
def test_context_parallelism_beside(ranks: RankPool, tmp_path: Path) -> None:
    module = MixedTransformer()
    optimizer = oracle.adamw_groups(module)
    losses = []
    for batch in test_context_parallel.batches():
        loss = test_context_parallel.loss_of(module.net(batch["ids"]), batch["labels"])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    want = losses, {name: value.detach() for name, value in module.state_dict().items()}
    assert_trained_alike(ranks.run(4, fit_sequences_on, str(tmp_path)), want)


# -- faults that the comparison must notice ----------------------------------------------------------------------------


@contextmanager
def gradients_averaged_over_those_who_shard() -> Iterator[None]:
    """The commonest fault: what comes back to the experts is not divided by the ranks that divide these."""
    original = dispatch.move_rows
    with mock.patch.object(dispatch, "move_rows", lambda route, factor, *rows: original(route, 1.0, *rows)):
        yield


@contextmanager
def norm_counts_experts_once_for_each_rank() -> Iterator[None]:
    def groups(*arguments: Any) -> tuple[Any, ...]:
        return (*original(*arguments), None)  # reduced over all ranks once more

    from fsdp_core.gradients import clipping

    original = clipping._groups
    with mock.patch.object(clipping, "_groups", groups):
        yield


@contextmanager
def a_token_is_lost() -> Iterator[None]:
    original = dispatch.ExpertForward._call_own

    def call(forward: Any, tokens: Tensor, *arguments: Tensor) -> Tensor:
        results: Tensor = original(forward, tokens, *arguments)
        return torch.cat([results[:-1], torch.zeros_like(results[-1:])])

    with mock.patch.object(dispatch.ExpertForward, "_call_own", call):
        yield


FAULTS = (gradients_averaged_over_those_who_shard, norm_counts_experts_once_for_each_rank, a_token_is_lost)


def train_with_each_fault() -> list[Any]:
    runs = []
    for fault in FAULTS:
        with fault():
            runs.append(train_on("experts 2", {}))
    return runs


@pytest.mark.everything
def test_faults_are_noticed(ranks: RankPool) -> None:
    want = train_plain({})
    for runs in ranks.run(2, train_with_each_fault):
        for got in runs:
            with pytest.raises(AssertionError):
                assert_equal_runs(got, want)


# -- refusals ----------------------------------------------------------------------------------------------------------


def with_experts(experts: nn.Module) -> nn.Module:
    return nn.ModuleDict({"experts": experts, "other": nn.Linear(2, 2)})


class Uneven(ChoosingExperts):
    def __init__(self) -> None:
        super().__init__(4)
        self.scale = nn.Parameter(torch.ones(3))


class WithBuffer(ChoosingExperts):
    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("load", torch.zeros(4))


class Miscounted(ChoosingExperts):
    def __init__(self) -> None:
        super().__init__(4)
        self.num_experts = 8


class Tied(ChoosingExperts):
    def __init__(self) -> None:
        super().__init__(4)
        self.again = self.up


def shared() -> nn.Module:
    experts = ChoosingExperts(4)
    return nn.ModuleDict({"experts": experts, "again": experts})


def mixed() -> nn.Module:
    return with_experts(ChoosingExperts(4))


MODULES: dict[str, tuple[Callable[[], nn.Module], Any, int, list[str]]] = {
    "a size that does not divide": (mixed, {"experts": "top_k"}, 3, ["does not divide the 4 experts", "2, 4"]),
    "no match": (mixed, {"expert": "top_k"}, 2, ["'expert'", "matches no submodule", "'experts'"]),
    "no plan": (mixed, None, 2, ["brings none", "Write expert_parallel_plan="]),
    "a list": (lambda: with_experts(nn.ModuleList([nn.Linear(2, 2)])), {"experts": "top_k"}, 2, ["stacked"]),
    "not stacked": (lambda: with_experts(Uneven()), {"experts": "top_k"}, 2, ["scale (3,)", "Stack them"]),
    "a buffer": (lambda: with_experts(WithBuffer()), {"experts": "top_k"}, 2, ["'load'", "Move it"]),
    "miscounted": (lambda: with_experts(Miscounted()), {"experts": "top_k"}, 2, ["num_experts is 8"]),
    "tied": (lambda: with_experts(Tied()), {"experts": "top_k"}, 2, ["'experts.up' and 'experts.again'"]),
    "shared": (shared, {"experts": "top_k"}, 2, ["'experts' and 'again' are one module"]),
    "called otherwise": (mixed, {"experts": "sorted"}, 2, ["can't be called as experts(tokens, counts)"]),
    "the root": (lambda: ChoosingExperts(4), {"": "top_k"}, 2, ["Make the experts a submodule"]),
    "contradiction": (mixed, {"experts": "top_k", "expert*": "sorted"}, 2, ["matches two patterns"]),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_are_refused(name: str) -> None:
    make, plan, size, says = MODULES[name]
    assert_says(refusal(ShardingError, partial(experts_of, make(), plan, size)), *says)


def test_units_inside_of_experts_are_refused() -> None:
    experts = with_experts(nn.Linear(2, 2))
    told = refusal(ShardingError, partial(check_units, [experts.get_submodule("experts")], {"": experts}))
    assert_says(told, "unit of its own", "auto_wrap_policy")


VALUES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no plan": ({"expert_parallel_plan": ["experts"]}, ["is not a plan of experts", "'top_k'"]),
    "an unknown contract": ({"expert_parallel_plan": {"experts": "top"}}, ["is not a plan of experts"]),
    "without a size": (
        {"expert_parallel_plan": {"experts": "top_k"}, "expert_parallel_size": "auto"},
        ["expert_parallel_plan was given without expert_parallel_size"],
    ),
    "no divisor of the ranks": ({"expert_parallel_size": 3}, ["does not divide the 4 ranks", "=2"]),
    "no number": ({"expert_parallel_size": 0}, ["expert_parallel_size=0", "positive"]),
    "tensor parallelism": ({"tensor_parallel_size": 2}, ["tensor_parallel_size=2", "Leave one"]),
    "compilation": ({"compile": True}, ["does not go together with compile"]),
    "a function": ({"parallelize_fn": lambda module, mesh: module}, ["parallelize_fn"]),
    "groups of ranks": ({"reshard_after_forward": 2}, ["reshard_after_forward"]),
}


@pytest.mark.parametrize("name", VALUES)
def test_options_that_are_refused(name: str) -> None:
    options, says = VALUES[name]
    given = {"expert_parallel_size": 2, **options}
    assert_says(refusal(UnsupportedCapabilityError, lambda: FSDP2Strategy(**given).backend.mesh(4)), *says)


def test_mesh_with_experts() -> None:
    mesh = Mesh.of(8, expert_parallel_size=2, data_parallel_replicate_size=2)
    assert (mesh.data_parallel, mesh.expert_data_parallel) == (4, 2)
    assert list(mesh.groups(("expert_parallel",))) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(mesh.groups(("expert_data_parallel",))) == [(0, 2), (1, 3), (4, 6), (5, 7)]
