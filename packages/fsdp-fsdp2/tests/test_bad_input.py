"""Bad input: each case raises before anything is trained, and says what to type next."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, fully_shard
from torch.nn.functional import mse_loss

import fsdp_fsdp2.fabric
import oracle
from fsdp_core.errors import (
    OptimizerMismatchError,
    ShardingError,
    StrategyUnavailableError,
    UnknownStrategyError,
    UnsupportedCapabilityError,
)
from fsdp_core.lightning.devices import check_devices
from fsdp_core.precision import ShardPrecision
from fsdp_core.testing import RankPool
from fsdp_fsdp2 import FSDP2Strategy
from fsdp_fsdp2.backend import FSDP2Backend
from oracle import FP32_TOLERANCE, Block
from refusals import assert_says, new_fabric, refusal
from runs import Lit, full_state, loader, means, trainer

STRATEGIES = [FSDP2Strategy, fsdp_fsdp2.fabric.FSDP2Strategy]
BOTH = pytest.mark.parametrize("front_end", ["trainer", "fabric"])


def set_up(tmp: str, front_end: str, module: nn.Module, **options: Any) -> None:
    """As a user begins: ``fit`` under the Trainer, ``setup`` under Fabric. Nothing may be trained if it fails."""
    if front_end == "fabric":
        new_fabric(**options).setup(module)
        return
    lit = module if isinstance(module, pl.LightningModule) else Wrapping(module)
    try:
        trainer(tmp, FSDP2Strategy(**options)).fit(lit, loader(1, 1))
    finally:
        assert not lit.losses


class Wrapping(Lit):
    """Any module under the Trainer."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        # FSDP1's, and what to write for it here
        ({"sharding_strategy": "SHARD_GRAD_OP"}, ["sharding_strategy", "'fsdp2'", "reshard_after_forward"]),
        ({"mixed_precision": None}, ["mixed_precision", "'fsdp2'", "mp_policy"]),
        ({"auto_wrap_polcy": None}, ["auto_wrap_polcy", "'fsdp2'", "auto_wrap_policy"]),
        ({"state_dict_type": "sharded_state"}, ["state_dict_type='sharded_state'", "'sharded'", "'full'"]),
        ({"checkpoint_io": TorchCheckpointIO()}, ["TorchCheckpointIO", "FSDP2Strategy(state_dict_type='full')"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_option_that_is_refused_at_once(strategy: Any, options: dict[str, Any], words: list[str]) -> None:
    assert_says(refusal(UnsupportedCapabilityError, lambda: strategy(**options)), *words)


MISUSED: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "matches nothing": (
        {"auto_wrap_policy": {nn.Conv2d}},
        ShardingError,
        ["auto_wrap_policy={Conv2d} matches no submodule", "Block", "auto_wrap_policy={MyBlock}"],
    ),
    "callable matches nothing": (
        {"auto_wrap_policy": lambda module: False},
        ShardingError,
        ["auto_wrap_policy=<lambda> matches no submodule", "Block"],
    ),
    "class": ({"auto_wrap_policy": Block}, ShardingError, ["auto_wrap_policy=Block is a class", "{Block}"]),
    "string": ({"auto_wrap_policy": "automatic"}, ShardingError, ["auto_wrap_policy='automatic'", "'auto'"]),
    "non-class": ({"auto_wrap_policy": {"Block"}}, ShardingError, ["holds 'Block'", "auto_wrap_policy={MyBlock}"]),
    "number": ({"auto_wrap_policy": 5}, ShardingError, ["auto_wrap_policy=5", "auto_wrap_policy={MyBlock}"]),
    "ModuleList": ({"auto_wrap_policy": {nn.ModuleList}}, ShardingError, ["matches a ModuleList", "its members"]),
    "checkpointing matches nothing": (
        {"activation_checkpointing_policy": {nn.Conv2d}},
        ShardingError,
        ["activation_checkpointing_policy={Conv2d} matches no submodule", "Block", "Write"],
    ),
    "checkpointing string": (
        {"activation_checkpointing_policy": "auto"},
        ShardingError,
        ["activation_checkpointing_policy='auto'", "activation_checkpointing_policy={MyBlock}"],
    ),
    "checkpointing class": (
        {"activation_checkpointing_policy": Block},
        ShardingError,
        ["activation_checkpointing_policy=Block is a class", "{Block}"],
    ),
    "checkpointing ModuleList": (  # never called, so nothing would be recomputed
        {"activation_checkpointing_policy": {nn.ModuleList}},
        ShardingError,
        ["activation_checkpointing_policy={ModuleList}", "its members"],
    ),
    "FSDP1's CPUOffload": (
        {"cpu_offload": CPUOffload(offload_params=True)},
        UnsupportedCapabilityError,
        ["cpu_offload=CPUOffload", "cpu_offload=True", "'fsdp_native'"],
    ),
    "FSDP1's MixedPrecision": (
        {"mp_policy": MixedPrecision(param_dtype=torch.bfloat16)},
        UnsupportedCapabilityError,
        ["mp_policy=MixedPrecision", "MixedPrecisionPolicy"],
    ),
    "mp_policy string": ({"mp_policy": "bf16"}, UnsupportedCapabilityError, ["mp_policy='bf16'", "precision="]),
    "reshard string": (
        {"reshard_after_forward": "yes"},
        UnsupportedCapabilityError,
        ["reshard_after_forward='yes'", "True", "None"],
    ),
    "reshard size": ({"reshard_after_forward": 3}, UnsupportedCapabilityError, ["reshard_after_forward=3", "divide"]),
}


def misused(tmp: str, front_end: str, case: str) -> tuple[str, bool]:
    options, error, _ = MISUSED[case]
    net = oracle.new_net()
    told = refusal(error, lambda: set_up(tmp, front_end, net, **options))
    return told, all(type(p) is nn.Parameter for p in net.parameters())


@BOTH
@pytest.mark.parametrize("case", MISUSED)
def test_option_that_does_not_fit_the_model(ranks: RankPool, tmp_path: Path, front_end: str, case: str) -> None:
    ((told, as_it_was),) = ranks.run(1, misused, str(tmp_path), front_end, case)
    assert_says(told, *MISUSED[case][2])
    assert as_it_was


# -- names, hardware and precision -------------------------------------------------------------------------------------


def quiet(**options: Any) -> list[Callable[[], Any]]:
    """A Trainer and a Fabric, not built yet."""
    return [
        lambda: pl.Trainer(**{"strategy": "fsdp2", "accelerator": "cpu", "devices": 1, "logger": False, **options}),
        lambda: Fabric(**{"strategy": "fsdp2", "accelerator": "cpu", "devices": 1, **options}),
    ]


def test_misspelt_name() -> None:
    for build in quiet(strategy="fsdp22"):
        assert_says(refusal(UnknownStrategyError, build), "'fsdp22'", "Did you mean 'fsdp2'?", "fsdp2_cpu_offload")


@pytest.mark.parametrize("accelerator", ["cuda", "mps"])
def test_accelerator_that_is_not_there(accelerator: str) -> None:
    """Lightning's own message."""
    if getattr(torch, accelerator).is_available():
        pytest.skip(f"{accelerator} is there")
    for build in quiet(accelerator=accelerator):
        with pytest.raises(Exception, match=r"can not run on your system.*'cpu'"):
            build()


@pytest.mark.parametrize("device", ["mps", "xla", "meta"])
def test_device_of_another_strategy(device: str) -> None:
    told = refusal(
        StrategyUnavailableError,
        lambda: check_devices("fsdp2", FSDP2Backend(), [torch.device(device)], ShardPrecision()),
    )
    assert_says(told, "'fsdp2'", repr(device), "cuda and cpu", "accelerator='cpu'", "fsdp list")


@pytest.mark.parametrize(("precision", "instead"), [("bf16-mixed", "16-mixed"), ("bf16-true", "16-true")])
def test_device_without_bf16(precision: str, instead: str) -> None:
    device = torch.device("cuda", 0)
    told = refusal(
        UnsupportedCapabilityError, lambda: ShardPrecision.named(precision).check_device(device, bf16_supported=False)
    )
    assert_says(told, f"precision={precision!r}", "cuda:0", f"precision={instead!r}", "precision='32-true'")


@pytest.mark.parametrize("precision", ["64-true", "transformer-engine"])
def test_precision_without_meaning_for_shards(precision: str) -> None:
    for build in quiet(precision=precision):
        assert_says(refusal(ValueError, build), repr(precision), "'32-true'", "'bf16-mixed'")
    assert_says(
        refusal(UnsupportedCapabilityError, lambda: ShardPrecision.named(precision)), repr(precision), "'bf16-mixed'"
    )


class TrainersOwn(Precision):
    """A plugin that may do anything."""


class FabricsOwn(FabricPrecision):
    """A plugin that may do anything."""


@pytest.mark.parametrize("plugin", [TrainersOwn, DoublePrecision])
def test_precision_plugin_that_shards_cannot_follow(plugin: type[Precision]) -> None:
    under_trainer, _ = quiet(plugins=[plugin()])
    assert_says(refusal(UnsupportedCapabilityError, under_trainer), plugin.__name__, "precision='bf16-mixed'")
    _, under_fabric = quiet(plugins=[FabricsOwn()])
    assert_says(refusal(UnsupportedCapabilityError, under_fabric), "FabricsOwn", "precision='bf16-mixed'")


def test_checkpoint_io_that_cannot_write_shards() -> None:
    under_trainer, _ = quiet(plugins=[AsyncCheckpointIO()])
    _, under_fabric = quiet(plugins=[TorchCheckpointIO()])
    for name, build in {"AsyncCheckpointIO": under_trainer, "TorchCheckpointIO": under_fabric}.items():
        assert_says(refusal(UnsupportedCapabilityError, build), name, "FSDP2Strategy(state_dict_type='full')")


# -- modules -----------------------------------------------------------------------------------------------------------


class NoParameters(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Tanh()


class AlreadySharded(Lit):
    def configure_model(self) -> None:
        fully_shard(self.net.blocks[1].up)


def sharded_on_other_terms(tmp: str) -> None:
    lit = Lit()
    trainer(tmp, FSDP2Strategy()).fit(lit, loader(1, 1))
    lit.losses.clear()
    set_up(tmp, "trainer", lit, cpu_offload=True)


def unfit_modules(tmp: str) -> dict[str, list[str]]:
    fabric = new_fabric()
    sharded = oracle.new_net()
    fully_shard(sharded.blocks[1].up)
    return {
        "parameters": [
            refusal(ShardingError, lambda: set_up(tmp, "trainer", NoParameters())),
            refusal(ShardingError, lambda: fabric.setup(nn.Tanh())),
        ],
        "sharded": [
            refusal(ShardingError, lambda: set_up(tmp, "trainer", AlreadySharded())),
            refusal(ShardingError, lambda: fabric.setup(sharded)),
        ],
        "terms": [refusal(ShardingError, lambda: sharded_on_other_terms(tmp))],
    }


def test_modules_that_cannot_be_sharded(ranks: RankPool, tmp_path: Path) -> None:
    (told,) = ranks.run(1, unfit_modules, str(tmp_path))
    for message, name in zip(told["parameters"], ["NoParameters", "Tanh"], strict=True):
        assert_says(message, f"{name} has no parameters", "configure_model", "strategy='ddp'")
    for message, name in zip(told["sharded"], ["net.blocks.1.up", "blocks.1.up"], strict=True):
        assert_says(message, "already sharded", repr(name), "Remove", "auto_wrap_policy={MyBlock}")
    for message in told["terms"]:
        assert_says(message, "cpu_offload False, now True", "Use the same options", "build the module anew")


# -- optimizers --------------------------------------------------------------------------------------------------------


class ForeignParameter(Lit):
    """Its optimizer holds a parameter that is in no module."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(5))], lr=0.1)


class OfACopy(Lit):
    """Its optimizer holds the parameters of another module, of the same names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [copy.deepcopy(self.net)]  # a module in a list is no submodule

    def configure_optimizers(self) -> Any:
        return oracle.sgd(self.hidden[0])


class Stale(Lit):
    """Lists parameters in its constructor, and replaces them before the training begins."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = list(self.parameters())

    def configure_model(self) -> None:
        self.net = oracle.new_net()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.listed, lr=0.1)


def unfit_optimizers(tmp: str) -> dict[str, list[str]]:
    fabric = new_fabric()
    net, other, stepped = oracle.new_net(), oracle.new_net(), oracle.new_net()
    has_stepped = oracle.momentum(stepped)
    stepped(oracle.global_batches(1)[0][0]).sum().backward()
    has_stepped.step()
    weight = stepped.inp.weight.detach().clone()
    told = {
        "foreign": [
            refusal(OptimizerMismatchError, lambda: set_up(tmp, "trainer", ForeignParameter())),
            refusal(OptimizerMismatchError, lambda: set_up(tmp, "trainer", OfACopy())),
            refusal(OptimizerMismatchError, lambda: set_up(tmp, "trainer", Stale())),
            refusal(OptimizerMismatchError, lambda: fabric.setup(net, oracle.sgd(other))),
            refusal(OptimizerMismatchError, lambda: fabric.setup_optimizers(oracle.sgd(other))),
        ],
        "stepped": [refusal(OptimizerMismatchError, lambda: fabric.setup(stepped, has_stepped))],
    }
    assert torch.equal(stepped.inp.weight.full_tensor(), weight)
    return told


def test_optimizers_over_other_parameters(ranks: RankPool, tmp_path: Path) -> None:
    (told,) = ranks.run(1, unfit_optimizers, str(tmp_path))
    for message in told["foreign"]:
        assert_says(message, "param group 0 of SGD", "the sharded model's, so training would leave it stale")
        assert_says(message, "model, optimizer = fabric.setup(model, optimizer)", "configure_optimizers")
    assert_says(told["foreign"][0], "(5,)")
    for message in told["stepped"]:
        assert_says(message, "SGD has stepped", "before the first step")


class ListsInInit(Lit):
    """Makes its lists of parameters before anything is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = oracle.adamw_groups(self).param_groups

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.lists, lr=0.01, eps=1e-3)


class OptimizerInInit(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.made = oracle.adamw_groups(self)

    def configure_optimizers(self) -> Any:
        return self.made


def fit_with(tmp: str, world_size: int, module_class: type[Lit], epochs: int) -> tuple[list[float], dict[str, Tensor]]:
    """Fit two steps an epoch, each epoch by a ``fit`` of its own."""
    module = module_class()
    for _ in range(epochs):
        run = trainer(tmp, "fsdp2", world_size)
        run.fit(module, loader(2, world_size))
    state = full_state(run.strategy, module)
    return means(module.losses), {name.removeprefix("net."): tensor for name, tensor in state.items()}


def fabric_steps(world_size: int, joint: bool) -> tuple[list[float], dict[str, Tensor]]:
    """The optimizer is older than the shards: set up together with the model, or after it."""
    fabric = new_fabric(world_size)
    net = oracle.new_net()
    optimizer = oracle.adamw_groups(net)
    old = [p for group in optimizer.param_groups for p in group["params"]]
    if joint:
        model, optimizer = fabric.setup(net, optimizer)
    else:
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(optimizer)
    live = {id(p) for p in net.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(id(p) in live for p in held)
    assert not {id(p) for p in old if p.ndim} & live  # 0-dim parameters stay as they are
    return fabric_steps_of(fabric, net, model, optimizer, world_size)


def fabric_steps_of(
    fabric: Fabric, net: nn.Module, model: Any, optimizer: Any, world_size: int
) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    for x, y in fabric.setup_dataloaders(loader(2, world_size)):
        loss = mse_loss(model(x), y)
        losses.append(loss.detach())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return means(losses), full_state(fabric.strategy, net)


def assert_trained(got: tuple[list[float], dict[str, Tensor]]) -> None:
    losses, state = got
    want_losses, want = oracle.train_plain(2, oracle.adamw_groups)
    assert losses[:2] == pytest.approx(want_losses, abs=FP32_TOLERANCE)
    if len(losses) == 2:
        assert state.keys() == want.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(state[name], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE, msg=name)
    start = oracle.new_net().state_dict()
    moved = [name for name in want if not torch.equal(want[name], start[name])]
    assert len(moved) > 20
    assert all(not torch.allclose(state[name], start[name], atol=1e-4) for name in moved)


@pytest.mark.parametrize("module_class", [ListsInInit, OptimizerInInit])
@pytest.mark.parametrize("epochs", [1, 2])
def test_parameters_from_before_sharding_are_trained(
    ranks: RankPool, tmp_path: Path, module_class: type[Lit], epochs: int
) -> None:
    for got in ranks.run(2, fit_with, str(tmp_path), 2, module_class, epochs):
        assert_trained(got)
        assert len(got[0]) == 2 * epochs


def optimizer_after_evaluation(world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    """A forward pass without a backward pass leaves the root's parameters gathered; then an optimizer is built."""
    fabric = new_fabric(world_size)
    net = oracle.new_net()
    model = fabric.setup_module(net)
    with torch.no_grad():
        model(oracle.global_batches(1)[0][0])
    optimizer = fabric.setup_optimizers(oracle.adamw_groups(model))
    return fabric_steps_of(fabric, net, model, optimizer, world_size)


def test_optimizer_built_after_evaluation_trains_the_shards(ranks: RankPool) -> None:
    for got in ranks.run(2, optimizer_after_evaluation, 2):
        assert_trained(got)


@pytest.mark.parametrize("joint", [True, False])
def test_fabrics_optimizer_from_before_sharding_is_repointed(ranks: RankPool, joint: bool) -> None:
    for got in ranks.run(2, fabric_steps, 2, joint):
        assert_trained(got)
