"""Every sharding strategy of FSDP1, however it is written: losses, weights and checkpoints are those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.nn.functional import mse_loss

import test_conformance
from fsdp_core.errors import OptimizerMismatchError, ShardingError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.measuring.collectives import count_collectives
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE, HALF_TOLERANCE, Block, Trained, train_plain
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.short_runs import assert_close_by_name, run_steps
from fsdp_core.testing.state import (
    assert_sharded,
    count_local_elements,
    full_optimizer_state,
    full_state,
    local,
    sharded_by,
    trained_by,
)
from fsdp_core.testing.suite.checkpoints.trainer_checkpoints import assert_bit_equal
from fsdp_core.testing.suite.numerics.pairs import assert_equals_plain
from fsdp_core.testing.suite.numerics.parity import assert_same, options_id
from fsdp_core.testing.training import Lit, fit, loader, means, new_fabric, new_trainer
from native_runs import FLAT, set_up

CLIP = 0.2


def mesh_of_four() -> DeviceMesh:
    """Made as a user makes one, before there is a Trainer."""
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def group_pair() -> tuple[Any, Any]:
    mesh = mesh_of_four()
    return mesh.get_group("shard"), mesh.get_group("replicate")


def group_of_all() -> Any:
    dist.init_process_group("gloo")
    return dist.new_group([0, 1, 2])


#: How a sharding strategy may be written: on how many ranks, and the options, made on each rank for its net.
WAYS: dict[str, tuple[int, Callable[[Any], dict[str, Any]]]] = {
    "FULL_SHARD": (3, lambda net: {"sharding_strategy": ShardingStrategy.FULL_SHARD}),
    "FULL_SHARD over a mesh": (2, lambda net: {"device_mesh": (2,)}),
    "FULL_SHARD over a group": (3, lambda net: {"sharding_strategy": "full_shard", "process_group": group_of_all()}),
    "SHARD_GRAD_OP": (2, lambda net: {"sharding_strategy": "SHARD_GRAD_OP"}),
    "NO_SHARD": (3, lambda net: {"sharding_strategy": "NO_SHARD"}),
    "HYBRID_SHARD": (4, lambda net: {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}),
    "HYBRID_SHARD over a DeviceMesh": (
        4,
        lambda net: {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh_of_four()},
    ),
    "HYBRID_SHARD over groups": (4, lambda net: {"sharding_strategy": "HYBRID_SHARD", "process_group": group_pair()}),
    "HYBRID_SHARD by host": (2, lambda net: {"sharding_strategy": "HYBRID_SHARD", "auto_wrap_policy": {Block}}),
    "HYBRID_SHARD_ZERO2": (4, lambda net: {"sharding_strategy": "HYBRID_SHARD_ZERO2", "device_mesh": (2, 2)}),
    "_HYBRID_SHARD_ZERO2 of torch's": (
        2,
        lambda net: {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2, "device_mesh": (1, 2)},
    ),
    "flat FULL_SHARD": (3, lambda net: FLAT),
    "flat NO_SHARD": (2, lambda net: {**FLAT, "sharding_strategy": "NO_SHARD"}),
    "flat HYBRID_SHARD": (4, lambda net: {**FLAT, "sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}),
    "ignored": (2, lambda net: {"ignored_modules": [net.blocks[1]]}),
}


def fit_way(way: str, tmp: str, steps: int, loop: dict[str, Any], more: dict[str, Any]) -> Trained:
    world_size, options = WAYS[way]
    module = Lit("momentum")
    run = new_trainer(tmp, "fsdp_native", world_size, {**options(module.net), **more}, **loop)
    run.fit(module, loader(steps, world_size))
    state = full_state(run.strategy)
    return means(module.losses), {name.removeprefix("net."): tensor for name, tensor in state.items()}


def train_way(way: str, steps: int, accumulate: int) -> tuple[Trained, list[float]]:
    """Losses and weights, and the norm before each clipping."""
    world_size, options = WAYS[way]
    net = oracle.new_net()
    fabric, net, model, optimizer = set_up(options(net), net=net, optimizer=oracle.momentum, world_size=world_size)
    losses, norms = train_clipped(fabric, model, optimizer, world_size, steps, accumulate)
    return (losses, full_state(fabric.strategy)), norms


def train_clipped(
    fabric: Any, model: Any, optimizer: Any, world_size: int, steps: int, accumulate: int
) -> tuple[list[float], list[float]]:
    """The losses; and the norms before each clipping, which is preceded by one that clips nothing."""
    losses, norms = [], []
    for i, (x, y) in enumerate(fabric.setup_dataloaders(loader(steps, world_size))):
        stepping = (i + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not stepping):
            loss = mse_loss(model(x), y)
            losses.append(loss.detach())
            fabric.backward(loss / accumulate)
        if stepping:
            order = 2.0 if i % 2 else float("inf")
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=1e9, norm_type=order)))
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    return means(losses), norms


def plain_norms(steps: int, accumulate: int) -> list[float]:
    """What :func:`under_fabric` finds, in one process."""
    net = oracle.new_net()
    optimizer = oracle.momentum(net)
    norms = []
    for i, (x, y) in enumerate(oracle.global_batches(steps)):
        (mse_loss(net(x), y) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            grads = [p.grad for p in net.parameters() if p.grad is not None]
            norms.append(nn.utils.get_total_norm(grads, 2.0 if i % 2 else float("inf")).item())
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    assert all(norm > CLIP for norm in norms[1::2])  # else nothing is clipped
    return norms


#: Arguments of the Trainer, and options.
LOOPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped": ({"gradient_clip_val": CLIP}, {}),
    "accumulated": ({"gradient_clip_val": CLIP, "accumulate_grad_batches": 2}, {}),
    "accumulated,sync_each_batch": (
        {"gradient_clip_val": CLIP, "accumulate_grad_batches": 2},
        {"sync_each_batch": True},
    ),
}


@pytest.mark.parametrize(
    ("way", "looped"),
    [
        *((way, "accumulated") for way in WAYS),
        *((way, "clipped") for way in list(WAYS)[::2]),
        *((way, "accumulated,sync_each_batch") for way in list(WAYS)[1::2]),
    ],
)
def test_trainer_equals_plain(ranks: RankPool, tmp_path: Path, way: str, looped: str) -> None:
    """Clipped by the norm of the whole gradient: once each element, however many ranks hold it."""
    loop, more = LOOPS[looped]
    got = ranks.run(WAYS[way][0], fit_way, way, str(tmp_path), 4, loop, more)
    want = train_plain(4, oracle.momentum, clip_norm=CLIP, accumulate=loop.get("accumulate_grad_batches", 1))
    assert_same(got, want)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "way", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD over groups", "flat HYBRID_SHARD", "ignored"]
)
def test_fabric_equals_plain(ranks: RankPool, way: str, accumulate: int) -> None:
    got = ranks.run(WAYS[way][0], train_way, way, 4, accumulate)
    assert_same([trained for trained, _ in got], train_plain(4, oracle.momentum, clip_norm=CLIP, accumulate=accumulate))
    for _, norms in got:
        assert norms == pytest.approx(plain_norms(4, accumulate), rel=FP32_TOLERANCE)


# -- what each of them does --------------------------------------------------------------------------------------------


def _local_elements(way: str) -> int:
    world_size, options = WAYS[way]
    net = oracle.new_net()
    fabric, *_ = set_up(options(net), net=net, world_size=world_size)
    return count_local_elements(sharded_by(fabric.strategy).root.parameters())


@pytest.mark.parametrize(
    ("way", "replicas"),
    [("FULL_SHARD", 1), ("SHARD_GRAD_OP", 1), ("NO_SHARD", 3), ("HYBRID_SHARD", 2), ("HYBRID_SHARD by host", 1)],
)
def test_share_of_each_rank(ranks: RankPool, way: str, replicas: int) -> None:
    total = sum(p.numel() for p in oracle.new_net().parameters())
    elements = ranks.run(WAYS[way][0], _local_elements, way)
    assert_sharded(elements, total * replicas)


def gathers_in_a_step(way: str) -> int:
    """How many all-gathers a forward and a backward pass take."""
    fabric, _, model, _ = set_up(WAYS[way][1](None))
    x, y = oracle.global_batches(1)[0]
    return count_collectives(lambda: fabric.backward(mse_loss(model(x), y)), "allgather")


def test_units_that_stay_gathered_are_gathered_once(ranks: RankPool) -> None:
    """The root always stays gathered, so that the three blocks make the difference."""
    freed, kept = [
        ranks.run(WAYS[way][0], gathers_in_a_step, way) for way in ("FULL_SHARD over a mesh", "SHARD_GRAD_OP")
    ]
    assert (freed, kept) == ([7, 7], [4, 4])


def settings_of_units(tmp: str, options: dict[str, Any]) -> set[tuple[Any, Any, Any]]:
    module = Lit("sgd")
    run = new_trainer(tmp, "fsdp_native", 2, options)
    run.fit(module, loader(1, 2))
    root = sharded_by(run.strategy).root
    units: Any = type(root).fsdp_modules(root)
    return {(unit.backward_prefetch, unit.forward_prefetch, unit.limit_all_gathers) for unit in units}


PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, (PRE, False, True)),
        ({"backward_prefetch": POST}, (POST, False, True)),
        ({"backward_prefetch": "backward_post"}, (POST, False, True)),
        ({"backward_prefetch": None}, (None, False, True)),
        ({"forward_prefetch": True}, (PRE, True, True)),
        ({"limit_all_gathers": False, "backward_prefetch": "BACKWARD_PRE"}, (PRE, False, False)),
    ],
    ids=lambda value: options_id(value) if isinstance(value, dict) else "",
)
def test_prefetching_leaves_numbers_alone(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any], settings: tuple[Any, ...]
) -> None:
    assert ranks.run(2, settings_of_units, str(tmp_path), options) == [{settings}] * 2
    got = ranks.run(2, fit, "fsdp_native", str(tmp_path), 2, 3, "momentum", options)
    assert_same(got, train_plain(3, oracle.momentum))


# -- what is left out of the shards ------------------------------------------------------------------------------------

#: What to ignore, and the names of the parameters that stay whole by it.
IGNORED: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "a block": (lambda net: {"ignored_modules": [net.blocks[1]]}, "blocks.1."),
    "a block among states": (lambda net: {"ignored_states": [net.blocks[1]]}, "blocks.1."),
    "a layer in a block": (lambda net: {"ignored_modules": {net.blocks[0].down}}, "blocks.0.down."),
    "a parameter": (lambda net: {"ignored_states": [net.blocks[2].up.weight]}, "blocks.2.up.weight"),
    "a module and a parameter": (
        lambda net: {"ignored_states": [net.blocks[0].norm, net.blocks[0].norm.weight, net.frozen.weight]},
        "blocks.0.norm.",
    ),
    "one of two that are tied": (lambda net: {"ignored_modules": [net.inp]}, "inp."),
    "all of it": (lambda net: {"ignored_modules": [net]}, ""),
}


def train_with_ignored(
    case: str, world_size: int, more: dict[str, Any], precision: Any = None
) -> tuple[Trained, dict[str, torch.Tensor]]:
    """Losses and weights, and those that this rank holds of what is ignored."""
    net = oracle.new_net()
    named = dict(net.named_modules())
    options, prefix = IGNORED[case]
    options = {**options(net), **more}
    fabric, net, model, optimizer = set_up(
        options, net=net, optimizer=oracle.momentum, world_size=world_size, precision=precision
    )
    losses, _ = train_clipped(fabric, model, optimizer, world_size, 4, 2)
    names = [name for name in oracle.new_net().state_dict() if name.startswith(prefix) and name != "scale"]
    unsharded = {name: getattr(named[name.rpartition(".")[0]], name.rpartition(".")[2]).detach() for name in names}
    return (losses, full_state(fabric.strategy)), unsharded


@pytest.mark.parametrize(
    ("case", "world_size", "more"),
    [
        *((case, 2, {}) for case in IGNORED),
        ("a block", 2, {"sync_each_batch": True}),
        ("a block", 2, {"auto_wrap_policy": None}),
        ("a block", 3, {"sharding_strategy": "NO_SHARD"}),
        ("a layer in a block", 4, {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}),
        ("a layer in a block", 2, FLAT),
    ],
    ids=lambda value: options_id(value) if isinstance(value, dict) else str(value),
)
def test_ignored_parameters_stay_whole_and_equal(
    ranks: RankPool, case: str, world_size: int, more: dict[str, Any]
) -> None:
    want = train_plain(4, oracle.momentum, accumulate=2, clip_norm=CLIP)
    got = ranks.run(world_size, train_with_ignored, case, world_size, more)
    assert_same([trained for trained, _ in got], want)
    for _, unsharded in got:
        assert unsharded
        for name, tensor in unsharded.items():
            assert tensor.shape == want[1][name].shape, name
            assert torch.equal(tensor, got[0][1][name]), f"{name} differs between ranks"


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_ignored_parameters_in_half_precision(ranks: RankPool, precision: str) -> None:
    """They keep the dtype of storage, beside units that compute in half precision."""
    want, state = train_plain(4, oracle.momentum, accumulate=2, clip_norm=CLIP)
    got = ranks.run(2, train_with_ignored, "a layer in a block", 2, {}, precision)
    for (losses, _), unsharded in got:
        assert losses == pytest.approx(want, rel=HALF_TOLERANCE)
        for name, tensor in unsharded.items():
            assert tensor.dtype is (torch.bfloat16 if precision == "bf16-true" else torch.float32)
            torch.testing.assert_close(tensor.float(), state[name], atol=HALF_TOLERANCE, rtol=HALF_TOLERANCE, msg=name)
            assert torch.equal(tensor, got[0][1][name]), f"{name} differs between ranks"


# -- one flat parameter for each unit ----------------------------------------------------------------------------------


class ByUnit(Lit):
    """Param groups that leave every unit in one piece."""

    def configure_optimizers(self) -> Any:
        blocks = list(self.net.blocks.parameters())
        others = [p for p in self.parameters() if not any(p is parameter for parameter in blocks)]
        return torch.optim.SGD(
            [{"params": blocks, "weight_decay": 0.1}, {"params": others, "lr": 0.01}], lr=0.05, momentum=0.9
        )


class ByNumberOfAxes(Lit):
    """Param groups that divide nearly every unit."""

    def configure_optimizers(self) -> Any:
        return oracle.adamw_groups(self)


class WeightsOnly(Lit):
    """Trains the weights of layers, and not their biases."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.ndim > 1], lr=0.05)


def flat_by_unit(tmp: str) -> tuple[list[float], list[list[tuple[int, ...]]]]:
    module = ByUnit()
    run = new_trainer(tmp, "fsdp_native", 2, FLAT)
    run.fit(module, loader(3, 2))
    groups = run.optimizers[0].param_groups
    return means(module.losses), [[tuple(p.shape) for p in group["params"]] for group in groups]


def test_groups_of_whole_units_are_flat_parameters(ranks: RankPool, tmp_path: Path) -> None:
    plain = ByUnit()
    new_trainer(tmp_path, "auto").fit(plain, loader(3, 1))
    for losses, (blocks, others) in ranks.run(2, flat_by_unit, str(tmp_path)):
        assert losses == pytest.approx([loss.item() for loss in plain.losses], abs=FP32_TOLERANCE)
        assert sum(1 for shape in blocks if len(shape) == 1) == 9  # up, down, and what the block has besides
        assert sum(1 for shape in blocks if not shape) == 3  # the gains, which are 0-dim
        assert [len(shape) for shape in others] == [1, 1]  # the tied pair in the root, and the frozen layer


def refusals_of_flat_parameters(tmp: str) -> dict[str, str]:
    def refuse_fit(module: Lit, options: dict[str, Any]) -> str:
        run = new_trainer(tmp, "fsdp_native", 2, options)
        message = refusal((OptimizerMismatchError, ShardingError), lambda: run.fit(module, loader(1, 2)))
        assert not module.losses
        return message

    fabric = new_fabric("fsdp_native", 2, FLAT)
    net, other = oracle.new_net(), oracle.new_net()
    apart: Any = fabric.setup_module(other)
    flat = [p for p in apart.parameters() if p.ndim == 1]
    assert flat
    fabric.setup_optimizers(torch.optim.SGD(flat, lr=0.1))  # flat parameters are what an optimizer may hold
    mixed = new_fabric("fsdp_native", 2, {"use_orig_params": False})
    return {
        "divided under Trainer": refuse_fit(ByNumberOfAxes(), FLAT),
        "divided under Fabric": refusal(OptimizerMismatchError, lambda: fabric.setup(net, oracle.adamw_groups(net))),
        "a part of it": refuse_fit(WeightsOnly(), FLAT),
        "frozen and trainable": refuse_fit(Lit(), {"use_orig_params": False}),
        "frozen and trainable under Fabric": refusal(ShardingError, lambda: mixed.setup(oracle.new_net())),
    }


def test_flat_parameters_that_cannot_be(ranks: RankPool, tmp_path: Path) -> None:
    for messages in ranks.run(2, refusals_of_flat_parameters, str(tmp_path)):
        for case in ("divided under Trainer", "divided under Fabric"):
            assert_says(messages[case], "blocks.0.up.weight'", "blocks.0.up.bias'", "are one flat parameter", "AdamW")
            assert_says(messages[case], "different param groups", "in one group; or write use_orig_params=True")
        assert_says(
            messages["a part of it"], "net.blocks.0.up.bias'", "SGD", "has not all of them", "use_orig_params=True"
        )
        assert_says(messages["frozen and trainable"], "Lit", "'net.inp.weight'", "'net.frozen.", "one flat parameter")
        for case in ("frozen and trainable", "frozen and trainable under Fabric"):
            assert_says(messages[case], "frozen", "use_orig_params=True", "auto_wrap_policy")


# -- checkpoints -------------------------------------------------------------------------------------------------------

CHECKPOINTED = [
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "flat FULL_SHARD",
    "flat NO_SHARD",
    "ignored",
]


class OneGroup(Lit):
    """An optimizer with tensors and a step count for each parameter, that flat parameters can be in."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


def everything(run: Any) -> dict[str, Any]:
    return {"model": full_state(run.strategy), "optimizer": full_optimizer_state(run.strategy, run.optimizers[0])}


def first_epoch(way: str, tmp: str, path: str) -> dict[str, Any]:
    """Fit two steps and save; the losses, the whole state, and the smallest piece that this rank's optimizer holds."""
    world_size, options = WAYS[way]
    module = OneGroup()
    run = new_trainer(tmp, "fsdp_native", world_size, options(module.net))
    run.fit(module, loader(2, world_size))
    run.save_checkpoint(path)
    smallest = min(local(p).numel() for p in trained_by(run.optimizers[0]))
    return {"losses": means(module.losses), "smallest": smallest, **everything(run)}


def next_epochs(way: str, tmp: str, paths: Mapping[str, str]) -> dict[str, Any]:
    """What each checkpoint restores, before any step; and the second epoch after each, with what it leaves."""
    world_size, options = WAYS[way]
    restored, continued = {}, {}
    for saver, path in paths.items():
        module = OneGroup()
        run = new_trainer(tmp, "fsdp_native", world_size, options(module.net))
        run.fit(module, loader(2, world_size), ckpt_path=path)
        assert not module.losses
        restored[saver] = everything(run)
        if saver in (way, CHECKPOINTED[CHECKPOINTED.index(way) - 1]):
            run.fit_loop.max_epochs = 2
            run.fit(module, loader(2, world_size), ckpt_path=path)
            continued[saver] = (means(module.losses), everything(run)["optimizer"])
    return {"restored": restored, "continued": continued}


Saved = dict[str, tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Each checkpoint's path, and what was in it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made: Saved = {}
    for way in CHECKPOINTED:
        path = str(folder / way.replace(" ", "_"))
        every = ranks.run(WAYS[way][0], first_epoch, way, str(folder), path)
        if way in ("FULL_SHARD", "HYBRID_SHARD"):
            assert min(one["smallest"] for one in every) == 0  # a rank has no element of some parameter
        made[way] = path, every[0]
    return made


def one_group_oracle() -> list[float]:
    net = oracle.new_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3)
    return means(run_steps(net, optimizer, oracle.global_batches(2) * 2))


@pytest.mark.parametrize("way", CHECKPOINTED)
def test_a_checkpoint_of_each_goes_on_in_each(ranks: RankPool, tmp_path: Path, saved: Saved, way: str) -> None:
    paths = {saver: path for saver, (path, _) in saved.items()}
    want = one_group_oracle()
    for got in ranks.run(WAYS[way][0], next_epochs, way, str(tmp_path), paths):
        for saver, (_, first) in saved.items():
            assert_bit_equal(got["restored"][saver], first)
            assert {float(values["step"]) for values in got["restored"][saver]["optimizer"].values()} == {2.0}
        for saver, (losses, optimizer) in got["continued"].items():
            assert saved[saver][1]["losses"] + losses == pytest.approx(want, abs=FP32_TOLERANCE)
            assert {float(values["step"]) for values in optimizer.values()} == {4.0}


def stored_bytes(path: str) -> int:
    """How many bytes of a model and its optimizer a folder holds, by the headers of its files."""
    total = 0
    for file in (file for part in ("model", "optimizer") for file in Path(path, part).glob("*.safetensors")):
        content = file.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        total += sum(
            value["data_offsets"][1] - value["data_offsets"][0]
            for name, value in header.items()
            if name != "__metadata__"
        )
    return total


@pytest.mark.parametrize("way", CHECKPOINTED)
def test_replicas_are_written_once(saved: Saved, way: str) -> None:
    path, first = saved[way]
    model = dict(first["model"])
    del model["out.weight" if "out.weight" in model else "net.out.weight"]  # tied to inp.weight
    tensors = [*model.values(), *(v for values in first["optimizer"].values() for v in values.values())]
    assert stored_bytes(path) == sum(tensor.nbytes for tensor in tensors)


class Idle(nn.Module):
    """Has a parameter of its own, in no unit but the root, that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.idle = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output


def names_after_three_passes(
    world_size: int, options: dict[str, Any], accumulating: bool
) -> tuple[list[str], list[str]]:
    options = {"auto_wrap_policy": {nn.Linear}, **options}
    fabric, _, model, optimizer = set_up(
        options, net=Idle(), optimizer=lambda net: torch.optim.AdamW(net.parameters()), world_size=world_size
    )
    for batch in range(3):
        with fabric.no_backward_sync(model, enabled=accumulating and batch < 2):
            fabric.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    sharded = sharded_by(fabric.strategy)
    names = [part.name for parts in sharded.layout().values() for part in parts]
    return sorted(names), sorted(sharded.optimizer_state(optimizer.optimizer)["param_groups"][0]["params"])


@pytest.mark.parametrize("accumulating", [False, True])
@pytest.mark.parametrize(
    ("world_size", "options"), [(1, {}), (2, {"sharding_strategy": "NO_SHARD"})], ids=["one rank", "NO_SHARD"]
)
def test_a_parameter_that_is_never_used_stays_the_models(
    ranks: RankPool, world_size: int, options: dict[str, Any], accumulating: bool
) -> None:
    """Several backward passes before a step, of which none comes to the root's own parameter."""
    names = sorted(name for name, _ in Idle().named_parameters())
    for of_layout, of_optimizer in ranks.run(world_size, names_after_three_passes, world_size, options, accumulating):
        assert of_layout == of_optimizer == names


# -- units that return what they were given ----------------------------------------------------------------------------


class Skippable(nn.Module):
    """A layer that is skipped on rank 0, and then returns its input.

    Args:
        form: What it is called with, and returns: ``"a tensor"``, ``"tensors"``, or ``"a dict by keyword"``.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(FEATURES, FEATURES), form

    def forward(self, *args: Any, **more: Any) -> Any:
        inputs = [more["inputs"]["x"]] if self.form == "a dict by keyword" else args
        outputs = [x if _skips else x + torch.tanh(self.linear(x)) for x in inputs]
        if self.form == "a dict by keyword":
            return {"x": outputs[0], "of": more["inputs"]}
        return tuple(outputs) if self.form == "tensors" else outputs[0]


class Skipping(nn.Module):
    """Layers one after the other with nothing in between, of which rank 0 uses none."""

    def __init__(self, form: str) -> None:
        super().__init__()
        with oracle.seeded(1):
            self.inp, self.form = nn.Linear(FEATURES, FEATURES), form
            self.layers = nn.ModuleList(Skippable(form) for _ in range(3))

    def forward(self, x: Any) -> Any:
        x = self.inp(x)
        if self.form == "tensors":
            first, second = x, x.flip(1)
            for layer in self.layers:
                first, second = layer(first, second)
            return first + second
        for layer in self.layers:
            x = layer(inputs={"x": x})["x"] if self.form == "a dict by keyword" else layer(x)
        return x


_skips = False


def train_skipping(form: str, accumulate: int, sharded: bool) -> dict[str, Any]:
    """The weights after two steps, in whose last micro-batch rank 0 skips all layers; of a rank, or of one process."""
    global _skips
    net: Any = Skipping(form)
    if sharded:
        fabric, net, model, optimizer = set_up({"auto_wrap_policy": {Skippable}}, net=net)
        shares, backward, waits = [fabric.global_rank], fabric.backward, fabric.no_backward_sync
    else:
        model, optimizer = net, oracle.sgd(net)
        shares, backward, waits = [0, 1], torch.Tensor.backward, lambda *_, **__: nullcontext()
    for i, (x, y) in enumerate(oracle.global_batches(2 * accumulate)):
        last = i % accumulate == accumulate - 1
        losses = []
        with waits(model, enabled=not last):
            for rank in shares:
                _skips = rank == 0 and last
                losses.append(mse_loss(model(x[rank::2]), y[rank::2]))
            backward(torch.stack(losses).mean())
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return full_state(fabric.strategy) if sharded else net.state_dict()


@pytest.mark.parametrize(
    ("form", "accumulate"), [("a tensor", 1), ("a tensor", 2), ("tensors", 1), ("a dict by keyword", 1)]
)
def test_layers_that_one_rank_skips(ranks: RankPool, form: str, accumulate: int) -> None:
    """Each is called with tensors alone, or with what has to be searched for them; gradients are new, or added to."""
    want = train_skipping(form, accumulate, False)
    assert_close_by_name(ranks.run(2, train_skipping, form, accumulate, True)[0], want)


class Probe(nn.Module):
    """A layer that returns its input and keeps a loss of its own, as a head for deep supervision does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.loss = self.linear(x).square().mean()
        return x


class Probed(nn.Module):
    """Probes between layers; returns the output and the sum of the probes' losses."""

    def __init__(self) -> None:
        super().__init__()
        with oracle.seeded(1):
            self.layers = nn.Sequential(nn.Linear(FEATURES, FEATURES), Probe(), nn.Linear(FEATURES, FEATURES), Probe())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.layers(x)
        _, first, _, second = self.layers
        return output, first.loss + second.loss


def train_probed(net: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], None], rank: int | None) -> None:
    for x, y in oracle.global_batches(2):
        rows = slice(rank, None, 2 if rank is not None else 1)
        output, loss = net(x[rows])
        backward(mse_loss(output, y[rows]) + loss)
        optimizer.step()
        optimizer.zero_grad()


def probe_on_ranks() -> dict[str, Any]:
    fabric, _, model, optimizer = set_up({"auto_wrap_policy": {Probe}}, net=Probed())
    train_probed(model, optimizer, fabric.backward, fabric.global_rank)
    return full_state(fabric.strategy)


def test_a_unit_that_returns_its_input_is_gathered_for_a_loss_that_it_keeps(ranks: RankPool) -> None:
    """The backward pass comes to the unit's output first, although the input waits for the loss's gradient."""
    net = Probed()
    train_probed(net, oracle.sgd(net), torch.Tensor.backward, None)
    assert_close_by_name(ranks.run(2, probe_on_ranks)[0], net.state_dict())


def test_clipping_a_module_in_fp64_of_which_a_rank_holds_frozen_elements_alone(ranks: RankPool, tmp_path: Path) -> None:
    """Such a rank has no gradient, and sent its norm in fp32, where others sent theirs in fp64: gloo aborts on that."""
    options = {"mesh": "shard 4", "wrap": "the root", "sharding_strategy": "SHARD_GRAD_OP", "trained": "not a block"}
    assert_equals_plain(ranks, tmp_path, test_conformance.TestNative, clip="norm", precision="double", **options)


class Penalised(Lit):
    """Adds the gradient with respect to its input to the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        loss = self.net(x).float().square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.float().square().mean()


def penalised(tmp: str, precision: Any) -> list[str]:
    try:
        new_trainer(tmp, "fsdp_native", 1, {"auto_wrap_policy": {Block}}, precision=precision).fit(
            Penalised(), loader(2, 1)
        )
    except RuntimeError as error:
        return [str(error), *getattr(error, "__notes__", ())]
    return []


def test_what_replaces_half_precision_on_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    [messages] = ranks.run(1, penalised, str(tmp_path), "bf16-mixed")
    assert_says("\n".join(messages), "setStorage", "precision='bf16-true'")
    for precision in ("bf16-true", "32-true"):
        assert ranks.run(1, penalised, str(tmp_path), precision) == [[]]
