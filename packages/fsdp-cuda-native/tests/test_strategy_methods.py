"""The strategy class as Lightning and its users call it: signatures, methods, and what is left behind."""

from __future__ import annotations

import gc
import inspect
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelSummary
from lightning.pytorch.plugins.precision import MixedPrecision as MixedPrecisionPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FlatParameter,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

import fsdp_core
from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.state.fqn import aliases, clean_name
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE, Block, Trained
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.short_runs import assert_trained_alike, fit_module
from fsdp_core.testing.state import count_local_elements, full_state, sharded_by, trained_by
from fsdp_core.testing.training import Lit, fit, loader, means, new_fabric, new_trainer
from fsdp_cuda_native import DDPFullyShardedNativeStrategy, DDPFullyShardedStrategy
from fsdp_cuda_native.fabric import NativeFSDPStrategy
from native_runs import FLAT, SHARD_GRAD_OP, WHOLE, set_up

KINDS: list[dict[str, Any]] = [{}, SHARD_GRAD_OP, WHOLE, FLAT]
kinds = pytest.mark.parametrize("options", KINDS, ids=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "flat"])

# -- signatures --------------------------------------------------------------------------------------------------------

POSITIONAL: dict[type, list[str]] = {
    DDPFullyShardedNativeStrategy: [
        "accelerator",
        "parallel_devices",
        "cluster_environment",
        "checkpoint_io",
        "precision_plugin",
        "process_group_backend",
        "cpu_offload",
        "backward_prefetch",
        "mixed_precision",
        "activation_checkpointing",
    ],
    DDPFullyShardedStrategy: [
        "accelerator",
        "cpu_offload",
        "flatten_parameters",
        "reshard_after_forward",
        "move_grads_to_cpu",
        "fp32_reduce_scatter",
        "compute_dtype",
        "bucket_cap_mb",
        "min_num_params",
        "state_dict_to_cpu",
        "parallel_devices",
        "cluster_environment",
        "checkpoint_io",
        "precision_plugin",
        "process_group_backend",
    ],
}


@pytest.mark.parametrize("made", POSITIONAL)
def test_positional_order(made: type) -> None:
    """As in Lightning 1.x, whose scripts may pass them by position."""
    parameters = inspect.signature(made).parameters.values()
    positional = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == POSITIONAL[made]
    assert all(p.default is not inspect.Parameter.empty for p in parameters if p.name in positional)


def test_arguments_by_position() -> None:
    accelerator, environment = CPUAccelerator(), LightningEnvironment()
    devices, plugin = [torch.device("cpu")] * 2, MixedPrecisionPlugin("bf16-mixed", "cpu")
    policy, post = MixedPrecision(param_dtype=torch.bfloat16), BackwardPrefetch.BACKWARD_POST
    made: Any = DDPFullyShardedNativeStrategy(
        accelerator, devices, environment, None, plugin, "gloo", CPUOffload(offload_params=True), post, policy, Block
    )
    assert (made.accelerator, made.parallel_devices, made.cluster_environment) == (accelerator, devices, environment)
    assert (made.runtime.backend, made.shard_precision.compute) == ("gloo", torch.bfloat16)
    assert (made.backend.options.offloads, made.backend.options.prefetch) == (True, post)
    assert made.backend.options.mixed_precision is policy
    assert made.backend.options.checkpointing_policy == {Block}
    io = TorchCheckpointIO()
    full: Any = DDPFullyShardedNativeStrategy(None, None, None, io, state_dict_type="full")
    assert full.checkpoint_io is io
    fairscales: Any = DDPFullyShardedStrategy(
        None, True, True, False, None, True, torch.float16, 25, 100, True, devices
    )
    assert (fairscales.backend.options.offloads, fairscales.parallel_devices) == (True, devices)
    assert fairscales.backend.options.strategy is ShardingStrategy.SHARD_GRAD_OP
    halves = fairscales.backend.options.mixed_precision
    assert (halves.param_dtype, halves.reduce_dtype) == (torch.float16, torch.float32)
    fabrics: Any = NativeFSDPStrategy(
        accelerator, devices, environment, None, None, "gloo", True, None, policy, [Block]
    )
    assert (fabrics.parallel_devices, fabrics.backend.options.prefetch) == (devices, None)
    assert fabrics.backend.options.checkpointing_policy == {Block}


# -- methods -----------------------------------------------------------------------------------------------------------


def collectives(tmp: str) -> dict[str, Any]:
    strategy: Any = new_trainer(tmp, "fsdp_native", 2).strategy
    before = dist.is_initialized()
    strategy.setup_environment()
    rank = strategy.global_rank
    here, there = Path(tmp, "rank 0 is at the barrier"), Path(tmp, "rank 1 is at the barrier")
    if rank:
        while not here.exists():
            time.sleep(0.01)
    (there if rank else here).touch()
    strategy.barrier("a name")
    waited = there.exists()
    source = torch.tensor([float(rank)])
    thing = object()
    group = dist.new_group([0, 1])
    return {
        "joined": (before, dist.is_initialized(), dist.get_backend(), dist.get_world_size(), dist.get_rank() == rank),
        "root_device": str(strategy.root_device),
        "mean": strategy.reduce(source.clone()).tolist(),
        "avg": strategy.reduce(source.clone(), reduce_op="avg").tolist(),
        "sum": strategy.reduce(source.clone(), reduce_op="sum").tolist(),
        "SUM of torch's": strategy.reduce(source.clone(), reduce_op=dist.ReduceOp.SUM).tolist(),
        "max": strategy.reduce(source.clone(), None, "max").tolist(),
        "in a group": strategy.reduce(source.clone(), group, "sum").tolist(),
        "counts": strategy.reduce(torch.tensor(rank + 1), reduce_op="sum").item(),
        "not tensors": [strategy.reduce(one) is one for one in (thing, None, "text", 1.5, {"loss": source})],
        "from rank 0": strategy.broadcast({"rank": rank, "path": Path("x")}),
        "from rank 1": strategy.broadcast(f"rank {rank}", src=1),
        "of none": strategy.broadcast(None),
        "waited": waited,
    }


def test_collectives(ranks: RankPool, tmp_path: Path) -> None:
    want = {
        "joined": (False, True, "gloo", 2, True),
        "root_device": "cpu",
        "mean": [0.5],
        "avg": [0.5],
        "sum": [1.0],
        "SUM of torch's": [1.0],
        "max": [1.0],
        "in a group": [1.0],
        "counts": 3,
        "not tensors": [True] * 5,
        "from rank 0": {"rank": 0, "path": Path("x")},
        "from rank 1": "rank 1",
        "of none": None,
        "waited": True,
    }
    assert ranks.run(2, collectives, str(tmp_path)) == [want, want]


class Stages(Lit):
    """Says in each step what it was given, and what its parameters are there."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(3, FEATURES))

    def seen(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        output = self(args[0] * self.gate.sum(0) / 3) if isinstance(args[0], Tensor) else None
        shape = None if output is None else tuple(output.shape)
        return {"step": name, "rest": (*args[1:], *kwargs.items()), "gate": tuple(self.gate.shape), "output": shape}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], list):
            return (self.gate * self(args[0][0]).mean()).sum()
        return self.seen("training", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return None if isinstance(args[0], list) else self.seen("validation", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.seen("test", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.seen("predict", *args, **kwargs)


class CallsSteps(pl.Callback):
    """Calls the step methods of the strategy by itself."""

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        batch = torch.ones(4, FEATURES)
        said = [
            strategy.training_step(batch, 3),
            strategy.validation_step(batch, 4, dataloader_idx=1),
            strategy.test_step(batch, batch_idx=5),
            strategy.predict_step(batch, 6, 7),
            strategy.predict_step("what was given", 8),
        ]
        root = sharded_by(strategy).root
        before = [(p.data_ptr(), p.shape) for p in root.parameters()]
        strategy.model_to_device()
        self.found = {
            "said": said,
            "left alone": before == [(p.data_ptr(), p.shape) for p in root.parameters()],
            "held": count_local_elements(p for p in root.parameters() if p.ndim),
            "model": (isinstance(strategy.model, FullyShardedDataParallel), strategy.lightning_module is module),
            "devices": {str(p.device) for p in root.parameters()},
            "optimizers": len(strategy.optimizers),
        }


def call_steps(tmp: str, options: dict[str, Any]) -> dict[str, Any]:
    callback = CallsSteps()
    run = new_trainer(tmp, "fsdp_native", 2, options, callbacks=[callback])
    run.validate(Stages(), loader(1, 2), verbose=False)
    return callback.found


@kinds
def test_steps(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """Arguments arrive as they were, outputs come back as they were, and parameters are whole meanwhile."""
    whole, output = (3, FEATURES), (4, FEATURES)
    total = sum(p.numel() for p in Stages().parameters() if p.ndim)
    shares = 1 if options.get("sharding_strategy") == "NO_SHARD" else 2
    got = ranks.run(2, call_steps, str(tmp_path), options if options is not FLAT else {"auto_wrap_policy": {Block}})
    for one in got:
        assert one["said"] == [
            {"step": "training", "rest": (3,), "gate": whole, "output": output},
            {"step": "validation", "rest": (4, ("dataloader_idx", 1)), "gate": whole, "output": output},
            {"step": "test", "rest": (("batch_idx", 5),), "gate": whole, "output": output},
            {"step": "predict", "rest": (6, 7), "gate": whole, "output": output},
            {"step": "predict", "rest": (8,), "gate": whole, "output": None},
        ]
        assert one["left alone"]
        assert one["held"] <= 1.3 * total / shares
        assert (one["model"], one["devices"], one["optimizers"]) == ((True, True), {"cpu"}, 0)


class LooksAtSetup(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        live = {id(p) for p in sharded_by(strategy).root.parameters()}
        (optimizer,) = strategy.optimizers
        self.live = all(id(p) in live for p in trained_by(optimizer))
        strategy.setup_optimizers(trainer)  # again, by hand: over what an optimizer may hold by now
        (again,) = strategy.optimizers
        self.again = again is not optimizer and all(id(p) in live for p in trained_by(again))


def look_at_setup(tmp: str) -> tuple[bool, bool, list[float]]:
    callback, module = LooksAtSetup(), Lit("momentum")
    new_trainer(tmp, "fsdp_native", 2, callbacks=[callback]).fit(module, loader(2, 2))
    return callback.live, callback.again, means(module.losses)


def test_setup_and_setup_optimizers(ranks: RankPool, tmp_path: Path) -> None:
    want, _ = oracle.train_plain(2, oracle.momentum)
    for live, again, losses in ranks.run(2, look_at_setup, str(tmp_path)):
        assert live
        assert again
        assert losses == pytest.approx(want, abs=FP32_TOLERANCE)


# -- what is left behind -----------------------------------------------------------------------------------------------

WIDTH = 256
SHARE, REST = 0.6 * 4 * WIDTH * WIDTH, 4 * WIDTH  # bytes: a little more than half of a layer, and next to nothing


class Wide(Lit):
    """Large enough for what is left of it to stand out."""

    def __init__(self) -> None:
        super().__init__("momentum")
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(torch.ones(2, WIDTH)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(torch.ones(2, WIDTH))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(torch.ones(2, WIDTH)).mean()


def storages() -> dict[int, int]:
    """The size of every new tensor's memory in this process, by its address."""
    sizes = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor):
            for tensor in (thing, thing.grad if isinstance(thing, nn.Parameter) else None):
                if tensor is not None and tensor.device.type == "cpu":
                    sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sizes


def settled(measure: Callable[[], int], enough: float) -> int:
    """What is measured, once it is small enough: gloo's threads let go of a tensor a little after the collective."""
    for _ in range(20):
        gc.collect()
        if measure() < enough:
            break
        time.sleep(0.05)
    return measure()


class Memory:
    """What a model takes, from before it is built until the user has let go of it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.enough = float("inf") if options.get("sharding_strategy") == "NO_SHARD" else SHARE
        gc.collect()
        gc.freeze()  # what is there already is neither looked at nor listed from here on
        self.largest: list[int] = []
        self.references: list[Any] = []

    def look(self, root: nn.Module, optimizers: list[Any]) -> None:
        """Note the largest tensor, and everything that holds or is a part of a model."""
        self.largest.append(settled(lambda: max(storages().values()), self.enough))
        held: list[Any] = [root, *root.modules(), *root.parameters(), *optimizers]
        held += [parameter for optimizer in optimizers for parameter in trained_by(optimizer)]
        held += [thing for thing in gc.get_objects() if isinstance(thing, FlatParameter)]
        self.references = [weakref.ref(thing) for thing in held]

    def report(self) -> dict[str, Any]:
        """Called when nothing should be left."""
        left = settled(lambda: sum(storages().values()), REST)
        gc.unfreeze()
        alive = sorted({type(thing).__name__ for ref in self.references if (thing := ref()) is not None})
        return {"small": max(self.largest) < self.enough, "seen": len(self.references), "left": left, "alive": alive}


def memory_of_a_trainer(tmp: str, options: dict[str, Any], evaluated: bool) -> dict[str, Any]:
    memory = Memory(options)
    module = Wide()
    run = new_trainer(tmp, "fsdp_native", 2, options)
    run.fit(module, loader(2, 2), loader(1, 2) if evaluated else None)
    memory.look(sharded_by(run.strategy).root, [*run.optimizers])
    if evaluated:
        run.validate(module, loader(1, 2), verbose=False)
        memory.look(sharded_by(run.strategy).root, [*run.optimizers])
        run.predict(module, loader(1, 2), return_predictions=False)
        memory.look(sharded_by(run.strategy).root, [*run.optimizers])
    del module, run
    return memory.report()


def memory_of_a_fabric(tmp: str, options: dict[str, Any], evaluated: bool) -> dict[str, Any]:
    memory = Memory(options)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))
    fabric, net, model, optimizer = set_up(options, net=net, optimizer=oracle.momentum)
    memory.look(sharded_by(fabric.strategy).root, [optimizer])
    for _ in range(2):
        fabric.backward(model(torch.ones(2, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        memory.look(sharded_by(fabric.strategy).root, [optimizer])
    if evaluated:
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        memory.look(sharded_by(fabric.strategy).root, [optimizer])
    del net, fabric, model, optimizer
    return memory.report()


@pytest.mark.parametrize("evaluated", [False, True], ids=["trained", "trained and evaluated"])
@pytest.mark.parametrize("memory_of", [memory_of_a_trainer, memory_of_a_fabric])
@kinds
def test_memory_is_given_back(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any], memory_of: Callable[..., Any], evaluated: bool
) -> None:
    """After each stage no unit is gathered; when the user lets go of the model, nothing of it is left."""
    of_linear = {**options, "auto_wrap_policy": {nn.Linear}}
    for got in ranks.run(2, memory_of, str(tmp_path), of_linear, evaluated):
        assert got["seen"] > 10
        assert got["small"]
        assert got["alive"] == []
        assert got["left"] < REST


def group_of_the_user(tmp: str, front_end: str) -> list[Any]:
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    for _ in range(2):
        if front_end == "trainer":
            run: Any = new_trainer(tmp, "fsdp_native", 2)
            run.fit(Lit(), loader(1, 2))
            run.validate(Lit(), loader(1, 2), verbose=False)
        else:
            run = new_fabric("fsdp_native", 2)
            run.setup(oracle.new_net())
            run.strategy.teardown()
        del run
        gc.collect()
    total = torch.tensor([1 + dist.get_rank()])
    dist.all_reduce(total)
    return [dist.is_initialized(), dist.group.WORLD is world, total.item()]


@pytest.mark.parametrize("front_end", ["trainer", "fabric"])
def test_process_group_of_the_user_is_left_as_found(ranks: RankPool, tmp_path: Path, front_end: str) -> None:
    assert ranks.run(2, group_of_the_user, str(tmp_path), front_end) == [[True, True, 3]] * 2


# -- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS[1:3], ids=["SHARD_GRAD_OP", "NO_SHARD"])
def test_groups_by_number_of_axes(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """Every parameter is in the group that its own shape puts it in, although shards are 1-D."""
    want = oracle.train_plain(3, oracle.adamw_groups)
    assert_trained_alike(ranks.run(2, fit, "fsdp_native", str(tmp_path), 2, 3, "adamw_groups", options), want)


class OfAnother(Lit):
    """Its optimizer holds its own parameters, and those of another module that is sharded."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.unregistered = [other]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.unregistered[0].parameters()], lr=0.1)


def fit_with_shards_of_another(tmp: str) -> str:
    sharded = Lit()
    new_trainer(tmp, "fsdp_native", 2).fit(sharded, loader(1, 2))
    module = OfAnother(sharded)
    return refusal(OptimizerMismatchError, lambda: new_trainer(tmp, "fsdp_native", 2).fit(module, loader(1, 2)))


def test_optimizer_over_another_sharded_module(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(2, fit_with_shards_of_another, str(tmp_path)):
        assert_says(message, "param group 0 of SGD", "none of the sharded model's", "leave it stale")


# -- callbacks ---------------------------------------------------------------------------------------------------------


def fit_averaged(strategy: str, tmp: str, world_size: int, options: dict[str, Any] | None = None) -> Trained:
    averaging = {"callbacks": [EMAWeightAveraging(decay=0.5)]}
    return fit_module(partial(Lit, "momentum"), strategy, tmp, world_size, 4, options, averaging, validates=True)


@kinds
def test_weight_averaging_equals_one_process(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    want = fit_averaged("auto", str(tmp_path), 1)
    got = ranks.run(2, fit_averaged, "fsdp_native", str(tmp_path), 2, options)
    assert_trained_alike(got, want)
    _, unaveraged = oracle.train_plain(4, oracle.momentum)
    assert not torch.allclose(want[1]["net.inp.weight"], unaveraged["inp.weight"], atol=1e-3)


class Keeps(ModelSummary):
    """Keeps what it would print."""

    kept: Any = None

    @staticmethod
    def summarize(summary_data: Any, total_parameters: int, trainable_parameters: int, *args: Any, **kw: Any) -> None:
        table = dict(summary_data)
        Keeps.kept = (total_parameters, trainable_parameters, table["Name"], table["Params"])


def summary(strategy: str, tmp: str, world_size: int, options: dict[str, Any] | None) -> Any:
    callback = Keeps(max_depth=3)
    run = new_trainer(tmp, strategy, world_size, options, callbacks=[callback], enable_model_summary=True)
    run.fit(Lit(), loader(1, world_size))
    return Keeps.kept


@kinds
def test_model_summary_counts_the_whole_model(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """And each of its parts."""
    want = summary("auto", str(tmp_path), 1, None)
    assert want[0] == sum(p.numel() for p in oracle.new_net().parameters())
    assert ranks.run(2, summary, "fsdp_native", str(tmp_path), 2, options)[0] == want


# -- torch's own functions ---------------------------------------------------------------------------------------------


def _summon() -> list[dict[str, bool]]:
    """With each kind of options, of what Fabric has returned: which parameters were whole, and written back."""
    found = []
    for options in KINDS:
        fabric, net, model, _ = set_up(options, optimizer=oracle.momentum)
        before, seen = full_state(fabric.strategy), {}
        with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            for name, parameter in net.named_parameters():
                seen[clean_name(name)] = parameter.clone()
                parameter.mul_(2)
        after = full_state(fabric.strategy)
        found.append(
            {n: torch.equal(seen[n], before[n]) and torch.equal(after[n], 2 * before[n]) for n in seen.keys() & before}
        )
        assert found[-1].keys() == dict(oracle.new_net().named_parameters()).keys()
        changed: list[nn.Module] = []
        model.apply(changed.append)
        assert len(changed) == len(set(changed)), "apply() has come to a module twice"
        assert not any(module.training for module in model.eval().modules())
    return found


def _names() -> dict[str, tuple[list[str], list[str], list[str]]]:
    """The names of modules, parameters and buffers of a net, and of one of its units."""
    net = oracle.new_net()
    whole = {name: parameter.shape for name, parameter in net.named_parameters()}
    fabric, net, model, optimizer = set_up(net=net, optimizer=oracle.momentum)
    found = {"net": _names_in(net), "unit": _names_in(net.blocks[1])}
    fabric.backward(model(oracle.global_batches(1)[0][0]).sum())
    found["after a backward pass"] = _names_in(net)
    optimizer.step()
    root = sharded_by(fabric.strategy).root
    with FullyShardedDataParallel.summon_full_params(root):
        assert {name: parameter.shape for name, parameter in root.named_parameters()} == whole
    states = FullyShardedDataParallel.optim_state_dict(root, getattr(optimizer, "optimizer", optimizer))["state"]
    assert set(states) == {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    for name in whole:
        assert net.get_parameter(name) is dict(net.named_parameters())[name]
    return found


def _names_in(module: nn.Module) -> tuple[list[str], list[str], list[str]]:
    named = module.named_modules(), module.named_parameters(), module.named_buffers()
    modules, parameters, buffers = ([name for name, _ in pairs] for pairs in named)
    return list(dict.fromkeys(modules)), sorted(parameters), buffers


def test_names_are_the_users_between_calls(ranks: RankPool) -> None:
    """Averages of other libraries, and what else selects by name, find what they have found before the set-up."""
    net = oracle.new_net()
    want = {"net": _names_in(net), "unit": _names_in(net.blocks[1]), "after a backward pass": _names_in(net)}
    for found in ranks.run(2, _names):
        assert found == want


def test_summon_full_params_of_what_fabric_returned(ranks: RankPool) -> None:
    """Of the root's own parameters too."""
    for found in ranks.run(2, _summon):
        for whole in found:
            assert whole == dict.fromkeys(whole, True)


# -- units of odd sizes, and names of what is shared -------------------------------------------------------------------


def odd_net(mark: Callable[[nn.Module], nn.Module] = nn.Identity) -> nn.Module:
    """Layers whose sizes don't divide by what FSDP1 aligns parameters to; one of the marked layers is used twice."""
    with oracle.seeded(4):
        first, second = nn.Linear(3, 5), nn.Linear(5, 3)
        net = nn.Sequential(first, second, nn.Linear(3, 5), nn.Linear(5, 3))
        for layer in (first, second):
            mark(layer)
        net.append(first)
    return net


def marked_layers() -> list[dict[str, Any]]:
    found = []
    for options in KINDS[::3]:
        fabric = new_fabric("fsdp_native", 2, options if options is not FLAT else {"use_orig_params": False})
        with fabric.init_module():
            net = odd_net(fsdp_core.wrap)
        fabric.setup(net)
        found.append({"state": full_state(fabric.strategy), "aliases": sharded_by(fabric.strategy).aliases()})
    return found


def test_marked_layers_of_odd_sizes(ranks: RankPool) -> None:
    """Each rank has kept its part of them, and FSDP1 pads between the parameters of a unit."""
    net = odd_net()
    for found in ranks.run(2, marked_layers):
        for one in found:
            torch.testing.assert_close(one["state"], dict(net.state_dict()), rtol=0, atol=0)
            assert one["aliases"] == aliases(net) == {"4.weight": "0.weight", "4.bias": "0.bias"}


def called_whole() -> list[bool]:
    """Of two precisions, whether a gathered module computes in that of its shards, on a rank alone."""
    found = []
    for precision in ("32-true", "bf16-mixed"):
        options = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
        fabric = new_fabric("fsdp_native", 2, options, precision)
        net = oracle.new_net()
        model = fabric.setup(net)
        x, _ = oracle.global_batches(1)[0]
        with fsdp_core.gathered(model), torch.no_grad():
            found.append(torch.equal(net(x), oracle.new_net()(x)) if fabric.is_global_zero else True)
    return found


def test_a_gathered_module_computes_in_full_precision(ranks: RankPool) -> None:
    assert ranks.run(2, called_whole) == [[True, True]] * 2
