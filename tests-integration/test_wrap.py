"""Units chosen by hand, under all strategies: torch's wrap, ours, and what neither can be used for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import wrap as torch_wrap

from fsdp_core import wrap
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.initialization.wrap import marked
from fsdp_core.state.fqn import clean_name
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE, HALF_TOLERANCE, Block, Trained
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.short_runs import run_steps
from fsdp_core.testing.state import full_state, sharded_by
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.training import Lit, loader, means, new_fabric, new_trainer


def units_of(root: nn.Module) -> dict[str, Any]:
    """The units that either of torch's libraries shards, by the user's names for them."""
    kinds = (FullyShardedDataParallel, FSDPModule)
    return {clean_name(name): module for name, module in root.named_modules() if isinstance(module, kinds)}


def wrap_two(net: Any, wrapping: Callable[..., Any]) -> Any:
    """Two of the three blocks that would be units by themselves, and a layer inside of the third, which would not."""
    net.blocks[0] = wrapping(net.blocks[0])
    net.blocks[1].down = wrapping(net.blocks[1].down)
    net.blocks[2] = wrapping(net.blocks[2])
    return net


TWO = ["blocks.0", "blocks.1.down", "blocks.2"]


class InLegacyHook(Lit):
    """As in Lightning 1.x."""

    def __init__(self) -> None:
        super().__init__("momentum")
        self.net = None

    def configure_sharded_model(self) -> None:
        if self.net is None:
            self.net = wrap_two(oracle.new_net(), torch_wrap)


class InConfigureModel(Lit):
    """As in Lightning 2.x."""

    def __init__(self) -> None:
        super().__init__("momentum")
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = wrap_two(oracle.new_net(), torch_wrap)


class OursInConfigureModel(InConfigureModel):
    def configure_model(self) -> None:
        if self.net is None:
            self.net = wrap_two(oracle.new_net(), wrap)


class OursInInit(Lit):
    def __init__(self) -> None:
        super().__init__("momentum")
        wrap_two(self.net, wrap)


MODULES: list[type[Lit]] = [InLegacyHook, InConfigureModel, OursInConfigureModel, OursInInit]


@pytest.mark.parametrize("strategy", ["fsdp_native", "ddp_fully_sharded", "fsdp2"])
def test_model_sharded_context(tmp_path: Path, strategy: str) -> None:
    """In it, torch's wrap chooses units; outside of it, it does nothing."""
    used: Any = new_trainer(tmp_path, strategy).strategy
    with used.model_sharded_context():
        inside = torch_wrap(nn.Linear(2, 2))
    outside = torch_wrap(nn.Linear(2, 2))
    assert type(inside) is type(outside) is nn.Linear
    assert marked(nn.Sequential(inside, outside)) == [inside]


def fit_and_validate(
    strategy: str, tmp: str, world_size: int, module_class: type[Lit], options: dict[str, Any] | None = None
) -> tuple[Trained, list[str], list[str]]:
    """Losses and weights, the units, and the classes of the blocks."""
    module = module_class()
    run = new_trainer(tmp, strategy, world_size, options)
    run.fit(module, loader(3, world_size), loader(1, world_size))
    ours = hasattr(run.strategy, "backend")
    assert run.strategy.model is not None
    units = list(units_of(sharded_by(run.strategy).root if ours else run.strategy.model))
    classes = [type(block).__name__ for block in module.net.blocks]
    state = full_state(run.strategy) if ours else {n: t.clone() for n, t in module.state_dict().items()}
    run.validate(module, loader(1, world_size), verbose=False)
    return (means(module.losses), {n.removeprefix("net."): t for n, t in state.items()}), units, classes


@pytest.mark.drawn
@pytest.mark.parametrize("module_class", MODULES)
@pytest.mark.parametrize("strategy", ["fsdp_native", "fsdp2", "ddp"])
def test_units_under_trainer(ranks: RankPool, tmp_path: Path, strategy: str, module_class: type[Lit]) -> None:
    """Sharded: the ones that are wrapped, and the root; else there are none, and blocks stay what they are."""
    got = ranks.run(2, fit_and_validate, strategy, str(tmp_path), 2, module_class)
    assert_same([trained for trained, _, _ in got], oracle.train_plain(3, oracle.momentum))
    for _, units, classes in got:
        assert sorted(units) == ([] if strategy == "ddp" else ["", *(f"net.{name}" for name in TWO)])
        if strategy == "ddp":
            assert classes == ["Block"] * 3


@pytest.mark.drawn
@pytest.mark.parametrize("module_class", MODULES)
@pytest.mark.parametrize("strategy", ["auto", "fsdp_native"])
def test_units_on_one_device(ranks: RankPool, tmp_path: Path, strategy: str, module_class: type[Lit]) -> None:
    ((trained, units, _),) = ranks.run(1, fit_and_validate, strategy, str(tmp_path), 1, module_class)
    assert_same([trained], oracle.train_plain(3, oracle.momentum))
    assert sorted(units) == ([] if strategy == "auto" else ["", *(f"net.{name}" for name in TWO)])


def under_fabric(strategy: str, world_size: int, place: str) -> tuple[Trained, list[str]]:
    fabric = new_fabric(strategy, world_size)
    if place == "init_module":
        with fabric.init_module():
            net = wrap_two(oracle.new_net(), torch_wrap)
    else:
        net = wrap_two(oracle.new_net(), wrap)
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    losses = run_steps(model, optimizer, fabric.setup_dataloaders(loader(3, world_size)), fabric.backward)
    ours: Any = fabric.strategy
    if not hasattr(ours, "backend"):
        return (means(losses), {n: t.clone() for n, t in net.state_dict().items()}), list(units_of(net))
    return (means(losses), full_state(ours)), list(units_of(sharded_by(ours).root))


@pytest.mark.drawn
@pytest.mark.parametrize("place", ["before setup", "init_module"])
@pytest.mark.parametrize(
    ("strategy", "world_size"), [("fsdp_native", 2), ("fsdp_native", 1), ("fsdp2", 2), ("ddp", 2), ("auto", 1)]
)
def test_units_under_fabric(ranks: RankPool, strategy: str, world_size: int, place: str) -> None:
    got = ranks.run(world_size, under_fabric, strategy, world_size, place)
    assert_same([trained for trained, _ in got], oracle.train_plain(3, oracle.momentum))
    for _, units in got:
        assert sorted(units) == (["", *TWO] if strategy.startswith("fsdp") else [])


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("policy", "units"),
    [("auto", TWO), (None, TWO), ({Block}, ["blocks.0", "blocks.1", "blocks.1.down", "blocks.2"])],
    ids=["auto", "none", "blocks"],
)
def test_a_policy_of_ones_own_adds_to_what_is_wrapped(
    ranks: RankPool, tmp_path: Path, policy: Any, units: list[str]
) -> None:
    got = ranks.run(2, fit_and_validate, "fsdp_native", str(tmp_path), 2, OursInInit, {"auto_wrap_policy": policy})
    assert_same([trained for trained, _, _ in got], oracle.train_plain(3, oracle.momentum))
    for _, found, _ in got:
        assert sorted(found) == ["", *(f"net.{name}" for name in units)]


# -- options of one unit -----------------------------------------------------------------------------------------------

BF16 = MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True, cast_root_forward_inputs=False
)


class WithOptions(InConfigureModel):
    """One block has options of its own; a spy notes the dtype of its weight, and its output is of the others' dtype."""

    options: dict[str, Any]

    def configure_model(self) -> None:
        if self.net is None:
            net: Any = oracle.new_net()
            net.blocks[0] = torch_wrap(net.blocks[0], **self.options)
            net.blocks[1] = torch_wrap(net.blocks[1])
            self.seen: list[Any] = []
            for block in net.blocks[:2]:
                block.register_forward_pre_hook(lambda block, args: self.seen.append(block.up.weight.dtype))
                block.register_forward_hook(lambda block, args, output: output.float())
            self.net = net


def with_options(strategy: str, tmp: str, options: dict[str, Any]) -> tuple[list[float], list[Any], list[Any]]:
    """Losses, the settings of both units, and the dtypes that they compute in."""
    module = WithOptions()
    module.options = options
    run = new_trainer(tmp, strategy, 2)
    run.fit(module, loader(3, 2))
    units = units_of(sharded_by(run.strategy).root)
    settings = [
        (unit.backward_prefetch, unit.forward_prefetch, unit.limit_all_gathers)
        for unit in (units["net.blocks.0"], units["net.blocks.1"])
    ]
    return means(module.losses), settings, module.seen


PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"mixed_precision": BF16}, (PRE, False, True)),
        ({"backward_prefetch": POST}, (POST, False, True)),
        ({"backward_prefetch": "BACKWARD_POST"}, (POST, False, True)),
        ({"backward_prefetch": None}, (None, False, True)),
        ({"forward_prefetch": True}, (PRE, True, True)),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_unit_has_options_of_its_own(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any], settings: tuple[Any, ...]
) -> None:
    half = "mixed_precision" in options
    want, _ = oracle.train_plain(3, oracle.momentum)
    for losses, of_units, dtypes in ranks.run(2, with_options, "fsdp_native", str(tmp_path), options):
        assert losses == pytest.approx(want, rel=HALF_TOLERANCE if half else FP32_TOLERANCE)
        assert of_units == [settings, (PRE, False, True)]
        assert dtypes == [torch.bfloat16 if half else torch.float32, torch.float32] * 3


def refused_options(strategy: str, tmp: str, options: dict[str, Any]) -> str:
    module = WithOptions()
    module.options = options
    run = new_trainer(tmp, strategy, 1)
    return refusal(UnsupportedCapabilityError, lambda: run.fit(module, loader(1, 1)))


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("fsdp_native", {"sharding_strategy": "NO_SHARD"}, ["sharding_strategy=...", "whole model", "to the strategy"]),
        ("fsdp_native", {"cpu_offload": True}, ["cpu_offload=...", "whole model", "can have: mixed_precision"]),
        # torch wants it to be the same in all units
        ("fsdp_native", {"limit_all_gathers": False}, ["limit_all_gathers=...", "whole model", "to the strategy"]),
        ("fsdp_native", {"backward_prefetch": "BACKWARD"}, ["backward_prefetch='BACKWARD'", "'BACKWARD_POST'"]),
        ("fsdp_native", {"mixed_precision": "bf16"}, ["mixed_precision='bf16'", "MixedPrecision"]),
        (
            "fsdp2",
            {"backward_prefetch": POST},
            ["wrap(net.blocks.0, backward_prefetch=...)", "'fsdp2'", "'fsdp_native'"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_a_unit_cannot_have(
    ranks: RankPool, tmp_path: Path, strategy: str, options: dict[str, Any], words: list[str]
) -> None:
    (told,) = ranks.run(1, refused_options, strategy, str(tmp_path), options)
    assert_says(told, *words)


# -- what can't be wrapped ---------------------------------------------------------------------------------------------


def test_what_is_no_module() -> None:
    for thing in (5, "block", [nn.Linear(2, 2)], nn.Linear, None):
        told = refusal(ShardingError, lambda thing=thing: wrap(thing))
        assert_says(told, f"wrap() got a {type(thing).__name__}", "wrap(MyBlock(...))")


@pytest.mark.parametrize("container", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})])
def test_what_is_never_called(container: nn.Module) -> None:
    told = refusal(ShardingError, lambda: wrap(container))
    assert_says(told, f"wrap() got a {type(container).__name__}", "never called", "Wrap its members")


class WrapsAList(InConfigureModel):
    def configure_model(self) -> None:
        net: Any = oracle.new_net()
        net.blocks = torch_wrap(net.blocks)
        self.net = net


class WrapsByHand(InConfigureModel):
    """As FSDP1 is used without Lightning."""

    def configure_model(self) -> None:
        net: Any = oracle.new_net()
        net.blocks[1].up = FullyShardedDataParallel(net.blocks[1].up, device_id=torch.device("cpu"))
        self.net = net


class WrapsTooLate(Lit):
    def on_train_start(self) -> None:
        self.told = refusal(ShardingError, lambda: wrap(self.net.blocks[0].up))
        raise KeyboardInterrupt


class WrapsInStep(Lit):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.told = refusal(ShardingError, lambda: wrap(self.net.blocks[0]))
        return super().training_step(batch, batch_idx)


def refused_wrapping(strategy: str, tmp: str, options: dict[str, Any]) -> dict[str, str]:
    def under_trainer(module: Lit) -> str:
        told = refusal(ShardingError, lambda: new_trainer(tmp, strategy, 2, options).fit(module, loader(1, 2)))
        assert not module.losses
        return told

    fabric = new_fabric(strategy, 2, options)
    late: Any = oracle.new_net()
    model = fabric.setup(late)
    in_step = WrapsInStep()
    new_trainer(tmp, strategy, 2, options).fit(in_step, loader(1, 2))
    told = {
        "late: the model": refusal(ShardingError, lambda: wrap(model)),
        "late: the module": refusal(ShardingError, lambda: wrap(late)),
        "late: a block": refusal(ShardingError, lambda: wrap(late.blocks[0])),
        "late: a layer": refusal(ShardingError, lambda: wrap(late.blocks[0].up)),
        "late: in a step": in_step.told,
        "a list": under_trainer(WrapsAList()),
    }
    if strategy == "fsdp2":
        return told
    by_hand: Any = oracle.new_net()
    by_hand.blocks[1].up = FullyShardedDataParallel(by_hand.blocks[1].up, device_id=torch.device("cpu"))
    a_root = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    return {
        **told,
        "by hand: 'net.blocks.1.up'": under_trainer(WrapsByHand()),
        "by hand: 'blocks.1.up'": refusal(ShardingError, lambda: fabric.setup(by_hand)),
        "by hand: the root": refusal(ShardingError, lambda: fabric.setup(a_root)),
    }


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("fsdp_native", {}),
        ("fsdp_native", {"sharding_strategy": "NO_SHARD"}),
        ("fsdp_native", {"use_orig_params": False, "auto_wrap_policy": {Block, nn.Linear}}),
        ("fsdp2", {}),
    ],
    ids=["fsdp_native", "NO_SHARD", "flat", "fsdp2"],
)
def test_wrapping_that_is_refused(ranks: RankPool, tmp_path: Path, strategy: str, options: dict[str, Any]) -> None:
    for told in ranks.run(2, refused_wrapping, strategy, str(tmp_path), options):
        for case, message in told.items():
            if case.startswith("late"):
                assert_says(message, "comes too late", "sharded already", "configure_model", "before fabric.setup()")
            elif case.startswith("by hand"):
                assert_says(message, "already sharded", case.removeprefix("by hand: "), "FullyShardedDataParallel")
                assert_says(message, "fsdp_core.wrap(module)", "auto_wrap_policy={MyBlock}")
            else:
                assert_says(message, "ModuleList", "never called", "Wrap its members")


# -- modules that are more than a tree of blocks -----------------------------------------------------------------------


class Chain(nn.Module):
    """Subclasses say how blocks are chained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        return self.chain(x)


class CompiledBlocks(Chain):
    def build(self) -> None:
        compiled = [torch.compile(Block(), backend="eager") for _ in range(2)]
        self.chain = nn.Sequential(*compiled, nn.Linear(FEATURES, FEATURES))


class CompiledThenWrapped(Chain):
    def build(self) -> None:
        self.chain = nn.Sequential(wrap(torch.compile(Block(), backend="eager")), nn.Linear(FEATURES, FEATURES))


class WrappedThenCompiled(Chain):
    def build(self) -> None:
        self.chain = nn.Sequential(torch.compile(wrap(Block()), backend="eager"), nn.Linear(FEATURES, FEATURES))


class CompiledInPlace(Chain):
    def build(self) -> None:
        self.chain = nn.Sequential(wrap(Block()), wrap(Block()))
        for block in self.chain:
            block.compile(backend="eager")


class TiedAcrossUnits(Chain):
    """Of three wrapped blocks two share a weight, so that only the third can be a unit."""

    def build(self) -> None:
        self.chain = nn.Sequential(*(wrap(Block()) for _ in range(3)))
        self.chain[1].up.weight = self.chain[0].up.weight


class TiedInsideOfAUnit(Chain):
    """Two blocks share a weight, and are in one wrapped Sequential."""

    def build(self) -> None:
        self.chain = nn.Sequential(wrap(nn.Sequential(Block(), Block())), wrap(Block()))
        self.chain[0][1].up.weight = self.chain[0][0].up.weight


class UnderTwoParents(Chain):
    """One block is in two places, and called in both."""

    def build(self) -> None:
        block = Block()
        self.first = block
        self.chain = nn.Sequential(block, Block(), block)

    def forward(self, x: Tensor) -> Any:
        return self.chain(self.first(x))


class UnderTwoParentsAndWrapped(UnderTwoParents):
    def build(self) -> None:
        super().build()
        wrap(self.first)


class BlocksInSequential(Chain):
    def build(self) -> None:
        self.chain = nn.Sequential(nn.Linear(FEATURES, FEATURES), Block(), Block(), nn.Linear(FEATURES, FEATURES))


class UnitsInUnits(Chain):
    def build(self) -> None:
        self.chain = nn.Sequential(wrap(nn.Sequential(wrap(Block()), Block())), wrap(nn.Linear(FEATURES, FEATURES)))


#: Chains, and the units that they have.
CHAINS: dict[type[Chain], list[str]] = {
    CompiledBlocks: ["", "chain.0", "chain.1"],
    CompiledThenWrapped: ["", "chain.0"],
    WrappedThenCompiled: ["", "chain.0"],
    CompiledInPlace: ["", "chain.0", "chain.1"],
    TiedAcrossUnits: ["", "chain.2"],
    TiedInsideOfAUnit: ["", "chain.0", "chain.1"],
    UnderTwoParents: ["", "chain.1", "first"],
    UnderTwoParentsAndWrapped: ["", "first"],
    BlocksInSequential: ["", "chain.1", "chain.2"],
    UnitsInUnits: ["", "chain.0", "chain.0.0", "chain.1"],
}


def trained_chain(strategy: str, chain: type[Chain], path: str) -> tuple[Trained, list[str], Trained]:
    """Losses and weights, the units, and the same of a second model that goes on from a checkpoint of the first."""
    fabric = new_fabric(strategy)
    results = []
    for part in range(2):
        net = chain()
        model, optimizer = fabric.setup(net, oracle.momentum(net))
        used: Any = fabric.strategy
        sharded = used.roots[-1]
        if part:
            fabric.load(path, {"model": model, "optimizer": optimizer})
        losses = [loss.item() for loss in run_steps(model, optimizer, oracle.global_batches(2), fabric.backward)]
        if not part:
            fabric.save(path, {"model": model, "optimizer": optimizer})
        results.append((losses, full_state(fabric.strategy, sharded)))
    return results[0], sorted(units_of(sharded.root)), results[1]


@pytest.mark.drawn
@pytest.mark.parametrize("chain", CHAINS)
def test_chains_train_and_go_on(ranks: RankPool, tmp_path: Path, chain: type[Chain]) -> None:
    net = chain()
    optimizer = oracle.momentum(net)
    first = oracle.train_plain(2, lambda _: optimizer, net=net)
    second = oracle.train_plain(2, lambda _: optimizer, net=net)
    want = [(losses, {clean_name(n): t for n, t in state.items()}) for losses, state in (first, second)]
    got = ranks.run(2, trained_chain, "fsdp_native", chain, str(tmp_path / "checkpoint"))
    assert_same([before for before, _, _ in got], want[0])
    assert_same([after for _, _, after in got], want[1])
    for _, units, _ in got:
        assert units == CHAINS[chain]


def test_fsdp2_has_the_same_units(ranks: RankPool, tmp_path: Path) -> None:
    for chain in (UnitsInUnits, TiedAcrossUnits, WrappedThenCompiled):
        for _, units, _ in ranks.run(2, trained_chain, "fsdp2", chain, str(tmp_path / chain.__name__)):
            assert units == CHAINS[chain]
