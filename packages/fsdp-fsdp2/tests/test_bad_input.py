"""Bad input: each case raises before anything is trained, says what to type next, and nothing is lost."""

from __future__ import annotations

import copy
import json
import shutil
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
    CheckpointExistsError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointValueError,
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
from runs import Lit, full_state, loader, means, trainer

STRATEGIES = [FSDP2Strategy, fsdp_fsdp2.fabric.FSDP2Strategy]
BOTH = pytest.mark.parametrize("front_end", ["trainer", "fabric"])


def refusal(error: type[Exception], call: Callable[[], Any]) -> str:
    """What a call raises, as text."""
    with pytest.raises(error) as refused:
        call()
    return str(refused.value)


def new_fabric(world_size: int = 1, **options: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=fsdp_fsdp2.fabric.FSDP2Strategy(**options))
    fabric.launch()
    return fabric


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


def assert_says(message: str, *words: str) -> None:
    for word in words:
        assert word in message, f"{word!r} is not in:\n{message}"


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


def misused(tmp: str, front_end: str, case: str) -> str:
    options, error, _ = MISUSED[case]
    net = oracle.new_net()
    told = refusal(error, lambda: set_up(tmp, front_end, net, **options))
    assert all(type(p) is nn.Parameter for p in net.parameters())  # the model is as it was
    return told


@BOTH
@pytest.mark.parametrize("case", MISUSED)
def test_option_that_does_not_fit_the_model(ranks: RankPool, tmp_path: Path, front_end: str, case: str) -> None:
    (told,) = ranks.run(1, misused, str(tmp_path), front_end, case)
    assert_says(told, *MISUSED[case][2])


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
        fully_shard(self.net.blocks[1])


def unfit_modules(tmp: str) -> dict[str, list[str]]:
    fabric = new_fabric()
    sharded = oracle.new_net()
    fully_shard(sharded.blocks[1])
    return {
        "parameters": [
            refusal(ShardingError, lambda: set_up(tmp, "trainer", NoParameters())),
            refusal(ShardingError, lambda: fabric.setup(nn.Tanh())),
        ],
        "sharded": [
            refusal(ShardingError, lambda: set_up(tmp, "trainer", AlreadySharded())),
            refusal(ShardingError, lambda: fabric.setup(sharded)),
        ],
    }


def test_modules_that_cannot_be_sharded(ranks: RankPool, tmp_path: Path) -> None:
    (told,) = ranks.run(1, unfit_modules, str(tmp_path))
    for message, name in zip(told["parameters"], ["NoParameters", "Tanh"], strict=True):
        assert_says(message, f"{name} has no parameters", "configure_model", "strategy='ddp'")
    for message, name in zip(told["sharded"], ["net.blocks.1", "blocks.1"], strict=True):
        assert_says(message, "already sharded", repr(name), "Remove", "auto_wrap_policy={MyBlock}")


# -- optimizers --------------------------------------------------------------------------------------------------------


class ForeignParameter(Lit):
    """Its optimizer holds a parameter that is in no module."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(5))], lr=0.1)


class OfACopy(Lit):
    def configure_optimizers(self) -> Any:
        return oracle.sgd(copy.deepcopy(self.net))


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
        assert_says(message, "param group 0 of SGD", "not one of the sharded model's")
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


@pytest.mark.parametrize("joint", [True, False])
def test_fabrics_optimizer_from_before_sharding_is_repointed(ranks: RankPool, joint: bool) -> None:
    for got in ranks.run(2, fabric_steps, 2, joint):
        assert_trained(got)


# -- checkpoints that can't be loaded ----------------------------------------------------------------------------------


class Resized(Lit):
    """Another head."""

    def __init__(self) -> None:
        super().__init__()
        self.net.frozen = nn.Linear(oracle.FEATURES, oracle.FEATURES + 1)


class Renamed(Lit):
    """A block less than the checkpoint has, and a layer more."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.extra = nn.Linear(3, 3)


class TwoOptimizers(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [oracle.sgd(self.net.blocks), oracle.sgd(self.net.frozen)]


class OtherGroups(Lit):
    """Trains a layer more than the checkpoint's optimizer did."""

    def configure_optimizers(self) -> Any:
        self.net.frozen.requires_grad_(True)
        return oracle.adamw_groups(self)


def without(name: str) -> Callable[[Path], Any]:
    return lambda path: next(path.rglob(name)).unlink()


def foreign_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def torch_distributed_folder(path: Path) -> None:
    """What Lightning's own sharded strategies write."""
    shutil.rmtree(path)
    path.mkdir()
    for name in (".metadata", "__0_0.distcp", "meta.pt"):
        (path / name).write_bytes(b"\x80\x04.")


def no_checkpoint_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("epoch,loss\n0,1.5\n")


def pickled_file(path: Path) -> None:
    shutil.rmtree(path)
    torch.save({"state_dict": {}, "hyper_parameters": RankPool}, path)


def empty_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


#: What is done to a good checkpoint, and what the refusal says.
DAMAGE: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing": (shutil.rmtree, ["there is no", "Check the path"]),
    "no manifest": (
        without("manifest.json"),
        ["no complete checkpoint", "manifest.json", "Load an earlier checkpoint"],
    ),
    "no part": (
        without("*-rank-00001.safetensors"),
        ["rank-00001.safetensors is missing", "load an earlier checkpoint"],
    ),
    "foreign folder": (foreign_folder, ["not a checkpoint", "notes.txt", "Check the path"]),
    "Lightning's folder": (torch_distributed_folder, ["not a checkpoint", ".metadata", "consolidate_checkpoint"]),
    "empty folder": (empty_folder, ["no checkpoint", "empty", "Check the path"]),
    "file": (no_checkpoint_file, ["can't be read as a full checkpoint", "a folder", "state_dict_type='full'"]),
    "pickle": (pickled_file, ["can't be read", "RankPool", "add_safe_globals"]),
}

#: The module that the checkpoint of a ``Lit`` is loaded into, and what the refusal says.
MISFITS: dict[str, tuple[type[Lit], list[str]]] = {
    "keys": (
        Renamed,
        ["2 are missing in it:\n    extra.weight", "7 are in it alone:\n    net.blocks.2.gain", "nothing was loaded"],
    ),
    "shapes": (
        Resized,
        [
            "2 differ:\n    net.frozen.weight: its shape is (6, 6) in the checkpoint, and (7, 6) here",
            "nothing was loaded",
        ],
    ),
    "optimizers": (TwoOptimizers, ["the state of 1 optimizers", "made 2", "Return the optimizers"]),
    "groups": (OtherGroups, ["'net.frozen.weight'", "param group 0", "Load it into the model and the optimizer"]),
}


def save_good(tmp: str, world_size: int, kind: str = "sharded") -> Path:
    path = Path(tmp, "checkpoint")
    run = trainer(tmp, FSDP2Strategy(state_dict_type=kind), world_size)
    run.fit(Lit("adamw_groups"), loader(1, world_size))
    run.save_checkpoint(path)
    run.strategy.barrier()
    return path


def assert_unchanged(strategy: Any, module: nn.Module, before: dict[str, Tensor]) -> None:
    now = full_state(strategy, module)
    assert now.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(now[name], tensor), f"{name} was changed by a refused load"


def refused_by_trainer(tmp: str, world_size: int, path: Path, module: Lit, error: type[Exception], stage: str) -> str:
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run = trainer(tmp, "fsdp2", world_size)
    told = refusal(error, lambda: getattr(run, stage)(module, loader(1, world_size), ckpt_path=str(path)))
    assert not module.losses
    assert not module.validation_losses
    assert_unchanged(run.strategy, module, before)
    return told


def refused_by_fabric(tmp: str, world_size: int, path: Path, module: Lit, error: type[Exception]) -> str:
    """The model, its optimizer and plain data at once, as a user loads them."""
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    fabric = new_fabric(world_size)
    made = module.configure_optimizers()
    model, *optimizers = fabric.setup(module, *(made if isinstance(made, list) else [made]))
    state: dict[str, Any] = {"model": model, "optimizer": optimizers[0], "step": -1}
    told = refusal(error, lambda: fabric.load(path, state))
    assert state["step"] == -1
    assert not optimizers[0].state_dict()["state"]
    assert_unchanged(fabric.strategy, module, before)
    return told


def damaged(tmp: str, case: str) -> list[str]:
    path = save_good(tmp, 2)
    if torch.distributed.get_rank() == 0:
        DAMAGE[case][0](path)
    torch.distributed.barrier()
    return [
        refused_by_trainer(tmp, 2, path, Lit("adamw_groups"), CheckpointFormatError, "fit"),
        refused_by_trainer(tmp, 2, path, Lit("adamw_groups"), CheckpointFormatError, "validate"),
        refused_by_fabric(tmp, 2, path, Lit("adamw_groups"), CheckpointFormatError),
    ]


@pytest.mark.parametrize("case", DAMAGE)
def test_checkpoint_that_is_none(ranks: RankPool, tmp_path: Path, case: str) -> None:
    for told in ranks.run(2, damaged, str(tmp_path), case):
        for message in told:
            assert_says(message, str(tmp_path / "checkpoint"), *DAMAGE[case][1])


def misfit(tmp: str, case: str, kind: str) -> str:
    path = save_good(tmp, 2, kind)
    return refused_by_trainer(
        tmp,
        2,
        path,
        MISFITS[case][0]("adamw_groups") if case == "groups" else MISFITS[case][0](),
        CheckpointMismatchError,
        "fit",
    )


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("case", MISFITS)
def test_checkpoint_of_another_model_under_trainer(ranks: RankPool, tmp_path: Path, case: str, kind: str) -> None:
    for told in ranks.run(2, misfit, str(tmp_path), case, kind):
        assert_says(told, *MISFITS[case][1])
        if case == "keys":
            assert_says(told, "strict_loading = False")  # what a LightningModule says for it


def misfit_fabric(tmp: str, case: str, kind: str) -> str:
    path = Path(tmp, "checkpoint")
    fabric = new_fabric(2, state_dict_type=kind)
    saved = Lit("adamw_groups")
    model, optimizer = fabric.setup(saved, saved.configure_optimizers())
    fabric.backward(mse_loss(model(torch.ones(2, oracle.FEATURES)), torch.ones(2, oracle.FEATURES)))
    optimizer.step()
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 1})
    return refused_by_fabric(tmp, 2, path, MISFITS[case][0](), CheckpointMismatchError)


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("case", ["keys", "shapes"])
def test_checkpoint_of_another_model_under_fabric(ranks: RankPool, tmp_path: Path, case: str, kind: str) -> None:
    for told in ranks.run(2, misfit_fabric, str(tmp_path), case, kind):
        assert_says(told, *MISFITS[case][1])
        if case == "keys":
            assert_says(told, "strict=False")


def fabric_misses(tmp: str) -> list[str]:
    """A key that the checkpoint lacks, and an optimizer that trained other parameters."""
    fabric = new_fabric(2)
    one, two = oracle.new_net(), oracle.new_net()
    torch.nn.init.ones_(two.inp.weight)
    before = {name: tensor.clone() for name, tensor in two.state_dict().items()}
    model, optimizer = fabric.setup(one, oracle.adamw_groups(one))
    fabric.save(f"{tmp}/it", {"model": model, "optimizer": optimizer})
    two.frozen.requires_grad_(True)
    other, other_optimizer = fabric.setup(two, oracle.adamw_groups(two))
    told = [
        refusal(CheckpointMismatchError, lambda: fabric.load(f"{tmp}/it", {"model": other, "scheduler": {}})),
        refusal(
            CheckpointMismatchError,
            lambda: fabric.load(f"{tmp}/it", {"model": other, "optimizer": other_optimizer}),
        ),
    ]
    assert_unchanged(fabric.strategy, two, before)
    return told


def test_fabric_checkpoint_without_what_was_asked_for(ranks: RankPool, tmp_path: Path) -> None:
    for key, optimizer in ranks.run(2, fabric_misses, str(tmp_path)):
        assert_says(key, "no 'scheduler'", "'model', 'optimizer'", "strict=False")
        assert_says(optimizer, *MISFITS["groups"][1][1:], "'frozen.weight'")


# -- checkpoints that can't be saved -----------------------------------------------------------------------------------


def save_over_a_folder(tmp: str, kind: str) -> list[str]:
    run = trainer(tmp, FSDP2Strategy(state_dict_type=kind), 2)
    run.fit(Lit(), loader(1, 2))
    fabric = new_fabric(2, state_dict_type=kind)
    model = fabric.setup(oracle.new_net())
    return [
        refusal(CheckpointExistsError if run.is_global_zero or kind == "sharded" else Exception, save)
        for save in (
            lambda: run.save_checkpoint(f"{tmp}/mine"),
            lambda: fabric.save(f"{tmp}/mine", {"model": model}),
        )
    ]


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_folder_of_something_else_is_not_replaced(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    mine = {"notes.txt": "mine", "manifest.json": json.dumps({"of": "another program"})}
    (tmp_path / "mine").mkdir()
    for name, text in mine.items():
        (tmp_path / "mine" / name).write_text(text)
    for told in ranks.run(2, save_over_a_folder, str(tmp_path), kind):
        for message in told:
            assert_says(message, str(tmp_path / "mine"), "path")
    assert {path.name: path.read_text() for path in (tmp_path / "mine").iterdir()} == mine
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


class Tokenizer:
    """No plain data."""


class HoldsObjects(Lit):
    def __init__(self, tokenizer: Any, sizes: dict[str, int]) -> None:
        super().__init__()
        self.save_hyperparameters()


def hyper_parameters(tmp: str) -> str:
    lit = HoldsObjects(Tokenizer(), {"hidden": 3})
    told = refusal(CheckpointValueError, lambda: trainer(tmp, "fsdp2").fit(lit, loader(1, 1)))
    assert not lit.losses
    return told


def test_hyper_parameters_that_cannot_be_saved_are_refused_at_the_start(ranks: RankPool, tmp_path: Path) -> None:
    (told,) = ranks.run(1, hyper_parameters, str(tmp_path))
    assert_says(told, "hyper_parameters/tokenizer", "Tokenizer", "save_hyperparameters(ignore=['tokenizer'])")
    assert "sizes" not in told
