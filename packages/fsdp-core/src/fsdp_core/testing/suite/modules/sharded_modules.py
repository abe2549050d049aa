"""A sharded module used like a plain one: exported, extended, unfrozen in part, copied, given to another strategy.

The result is correct, or an error says what to write instead. Nothing is lost silently.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.errors import CheckpointMismatchError, ShardingError, UnsupportedCapabilityError
from fsdp_core.lightning.hooks.exporting import full_state_dict
from fsdp_core.state.full_tensor import whole
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE, Trained
from fsdp_core.testing.refusals import assert_says, refusal, was_refused
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.base_class import Clauses, each_ranks, on_ranks
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.training import Lit, loader, means, new_fabric, new_trainer, own_share

__all__ = ["ShardedModulesSuite"]


# -- reading -----------------------------------------------------------------------------------------------------------

#: Parts of the suite's module that users export: all of it, the model, a block, and one of two tied layers.
PARTS = ("", "net", "net.blocks.0", "net.out")


class Exporting(Lit):
    """Calls ``state_dict()`` of its parts where users export them."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, Mapping[str, Any] | str] = {}

    def configure_optimizers(self) -> Any:
        self.read_parts("in configure_optimizers")
        return oracle.momentum(self)

    def on_train_end(self) -> None:
        self.read_parts("in on_train_end")

    def read_parts(self, when: str) -> None:
        """Keep each part's state dict, or the error."""
        for part in PARTS:
            place = f"{part or 'all'} {when}"
            try:
                self.read[place] = self.get_submodule(part).state_dict()
            except ShardingError as refused:
                self.read[place] = str(refused)


def _export(strategy: str, tmp: str) -> list[str]:
    """The errors of refused exports. The others are compared with whole values."""
    module = Exporting()
    run = new_trainer(tmp, strategy, 2)
    run.fit(module, loader(1, 2))
    module.read_parts("after the fit")
    used: Any = run.strategy
    want = full_state(used)
    refused = []
    for place, got in module.read.items():
        if isinstance(got, str):
            refused.append(got)
            continue
        part = place.partition(" ")[0].replace("all", "")
        named = {name.removeprefix(f"{part}.") if part else name: value for name, value in want.items()}
        expected = {name: value for name, value in named.items() if not part or f"{part}.{name}" in want}
        assert got.keys() == expected.keys(), f"state_dict() of {place} holds {list(got)} instead of {list(expected)}"
        for name, value in expected.items():
            found = whole(got[name], used.runtime)
            shapes = tuple(found.shape), tuple(value.shape)
            assert shapes[0] == shapes[1], f"state_dict() of {place} shows {name} of {shapes[1]} as {shapes[0]}"
            if "configure" not in place:  # where the values may still be placeholders
                assert torch.equal(found.cpu(), value.cpu()), f"state_dict() of {place}: {name}"
        if "configure" not in place:
            told, read = _in_a_file(got)
            refused += told
            for name, saved in read.items():
                assert type(saved) is Tensor, f"state_dict() of {place}, from a file: {name} is a {type(saved)}"
                assert torch.equal(saved, expected[name].cpu()), f"state_dict() of {place}, from a file: {name}"
    moments = full_optimizer_state(used, run.optimizers[0])
    told, read = _in_a_file(run.optimizers[0].state_dict())
    refused += told
    for values in read.get("state", {}).values():
        found = values["momentum_buffer"]
        assert any(
            one["momentum_buffer"].shape == found.shape and torch.equal(one["momentum_buffer"].cpu(), found)
            for one in moments.values()
        ), f"the optimizer's state_dict(), from a file, holds {tuple(found.shape)}, the shape of no parameter"
    return refused


def _in_a_file(state: Mapping[str, Any]) -> tuple[list[str], dict[Any, Any]]:
    """The error of ``torch.save``, or the state read back."""
    file = io.BytesIO()
    told = refusal(ShardingError, lambda: torch.save(dict(state), file))
    if was_refused(told):
        return [told], {}
    file.seek(0)
    return [], torch.load(file, map_location="cpu", weights_only=True)


class ReadAsWhole(Lit):
    """Calls ``full_state_dict()`` where users export weights."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, dict[str, Any]] = {}
        self.told = ""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.told = refusal(ShardingError, lambda: full_state_dict(self))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.read = {part: full_state_dict(self.get_submodule(part)) for part in PARTS}


def _read_as_whole(strategy: str, tmp: str) -> tuple[str, int]:
    """The error inside a step, and this rank's number of tensors, which are compared with the state."""
    module = ReadAsWhole()
    run = new_trainer(tmp, strategy, 2)
    run.fit(module, loader(2, 2))
    fabric = new_fabric(strategy)
    model = fabric.setup(oracle.new_net())
    under_fabric = full_state_dict(model)
    for used, parts in ((run.strategy, module.read), (fabric.strategy, {"": under_fabric})):
        want = full_state(used)
        for part, got in parts.items():
            expected = {name.removeprefix(f"{part}."): v for name, v in want.items() if name.startswith(part)}
            assert got.keys() in (expected.keys(), {}.keys()), f"full_state_dict of {part or 'all'} holds {list(got)}"
            for name, value in got.items():
                assert type(value) is Tensor and value.device.type == "cpu", f"{part}: {name} is {type(value)}"
                assert torch.equal(value, expected[name].cpu()), f"full_state_dict of {part or 'all'}: {name}"
    if under_fabric:
        assert under_fabric["inp.weight"] is under_fabric["out.weight"]
        oracle.new_net().load_state_dict(under_fabric)
    return module.told, sum(map(len, [*module.read.values(), under_fabric]))


# -- adding ------------------------------------------------------------------------------------------------------------


class Growing(Lit):
    """Gets a new head in one of its hooks, trained by its optimizer or frozen.

    Args:
        where: The hook.
        frozen: Whether it is frozen.
    """

    late: nn.Linear

    def __init__(self, where: str, *, frozen: bool = False) -> None:
        super().__init__()
        self.where, self.is_frozen = where, frozen

    def grow(self, where: str) -> None:
        """Add the head if this is the chosen hook."""
        if where != self.where:
            return
        self.late = nn.Linear(FEATURES, FEATURES, bias=False).to(self.device).requires_grad_(not self.is_frozen)
        if not self.is_frozen and where != "configure_optimizers":
            self.trainer.optimizers[0].add_param_group({"params": self.late.parameters()})

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return self.late(x) if hasattr(self, "late") else x

    def configure_optimizers(self) -> Any:
        self.grow("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.grow("on_fit_start")

    def on_train_start(self) -> None:
        self.grow("on_train_start")

    def on_train_epoch_start(self) -> None:
        self.grow("on_train_epoch_start")


#: Hooks that come after sharding.
HOOKS = ("configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start")


def _grow(strategy: str, tmp: str) -> tuple[dict[str, str], int]:
    """The errors by hook, up to the first hook that is not refused, and the number of batches seen by a frozen head."""
    told: dict[str, str] = {}
    for where in HOOKS:
        module = Growing(where)
        run = new_trainer(tmp, strategy, 2)
        told[where] = refusal(ShardingError, lambda run=run, module=module: run.fit(module, loader(2, 2)))  # type: ignore[misc]
        if not was_refused(told[where]):
            return told, 0
        assert not module.losses, where
    between = Lit()
    new_trainer(tmp, strategy, 2).fit(between, loader(1, 2))
    between.late = nn.Linear(FEATURES, FEATURES, bias=False)
    told["between two fits"] = refusal(ShardingError, lambda: new_trainer(tmp, strategy, 2).fit(between, loader(1, 2)))
    frozen = Growing("on_fit_start", frozen=True)
    new_trainer(tmp, strategy, 2).fit(frozen, loader(2, 2))
    return told, len(frozen.losses)


def _grow_under_fabric(strategy: str) -> list[str]:
    """The errors if a new head is added to the optimizer that was set up, or gets an optimizer of its own."""
    fabric = new_fabric(strategy)

    def added_to_the_optimizer() -> None:
        net: Any = oracle.new_net()
        _, optimizer = fabric.setup(net, oracle.sgd(net))
        net.late = nn.Linear(FEATURES, FEATURES, bias=False).to(fabric.device)
        optimizer.optimizer.add_param_group({"params": net.late.parameters()})
        optimizer.step()

    def with_an_optimizer_of_its_own() -> None:
        net: Any = oracle.new_net()
        fabric.setup(net)
        net.late = nn.Linear(FEATURES, FEATURES, bias=False).to(fabric.device)
        fabric.setup_optimizers(torch.optim.SGD(net.late.parameters(), lr=0.1))

    ways: list[Callable[[], None]] = [added_to_the_optimizer, with_an_optimizer_of_its_own]
    return [refusal(ShardingError, way) for way in ways]


# -- unfreezing --------------------------------------------------------------------------------------------------------


class Unfreezing(BaseFinetuning):
    """Freezes a block at first, and adds it to the optimizer in the second epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        """Freeze it."""
        self.freeze(pl_module.net.blocks[1])  # type: ignore[union-attr,index]

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        """Unfreeze it."""
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[1], optimizer, lr=0.1)  # type: ignore[union-attr,index]


class Thawed(Lit):
    """Its optimizer gets the parameters that are trainable at the beginning."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def _thaw(strategy: str, tmp: str, world_size: int) -> tuple[str, list[float]]:
    module = Thawed()
    run = new_trainer(tmp, strategy, world_size, max_epochs=3, callbacks=[Unfreezing()])
    told = refusal(UnsupportedCapabilityError, lambda: run.fit(module, loader(2, world_size)))
    return told, means(module.losses)


# -- copying and passing on --------------------------------------------------------------------------------------------


def _hand_on(strategy: str, tmp: str) -> list[str]:
    """The errors if a sharded module is then trained with DDP, under the Trainer and under Fabric."""
    module, net = Lit(), oracle.new_net()
    new_trainer(tmp, strategy, 2).fit(module, loader(1, 2))
    new_fabric(strategy).setup(net)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return [
        refusal(ShardingError, lambda: new_trainer(tmp, "ddp", 2).fit(module, loader(1, 2))),
        refusal(ShardingError, lambda: fabric.setup(net)),
    ]


def _copied(strategy: str) -> list[str]:
    """What is wrong of copies of a sharded module: they don't hold whole parameters, or were refused without help."""
    fabric = new_fabric(strategy)
    net = oracle.new_net()
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    model, _ = fabric.setup(net, oracle.sgd(net))
    ways: dict[str, Callable[[], Any]] = {
        "deepcopy of the user's module": lambda: copy.deepcopy(net),
        "deepcopy of what Fabric has returned": lambda: copy.deepcopy(model),
    }
    wrong = []
    for way, copied in ways.items():
        try:
            made = copied()
        except ShardingError as refused:
            if not all(
                part in str(refused) for part in (repr(strategy), "in __init__()", "fsdp_core.gathered(module)")
            ):
                wrong.append(f"{way} is refused without saying what to write: {refused}")
            continue
        user: nn.Module = getattr(made, "_original_module", made)
        if {name: tuple(p.shape) for name, p in user.named_parameters()} != shapes:
            wrong.append(f"{way} holds a rank's shards")
    return wrong


def _own_state_back(strategy: str) -> list[str]:
    """What fails if a root loads the state that it returned itself, which may be one rank's part."""
    fabric = new_fabric(strategy)
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    used: Any = fabric.strategy
    sharded = used.sharded_of(model)
    plain: Any = optimizer
    x, y = own_share(fabric, oracle.global_batches(1)[0])
    fabric.backward(mse_loss(model(x), y))
    optimizer.step()
    weights, moments = full_state(used), full_optimizer_state(used, optimizer)
    ways: dict[str, Callable[[], None]] = {
        "model": lambda: sharded.load_model_state(sharded.model_state()),
        "optimizer": lambda: sharded.load_optimizer_state(plain.optimizer, sharded.optimizer_state(plain.optimizer)),
    }
    wrong = []
    for what, load in ways.items():
        try:
            load()
        except CheckpointMismatchError:
            continue
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}")
    now = {"weights": full_state(used), "moments": full_optimizer_state(used, optimizer)}
    return wrong + [name for name, was in (("weights", weights), ("moments", moments)) if not _is_same(now[name], was)]


def _is_same(now: Any, was: Any) -> bool:
    if isinstance(was, Mapping):
        return now.keys() == was.keys() and all(_is_same(now[name], was[name]) for name in was)
    return torch.equal(now, was) if isinstance(was, Tensor) else bool(now == was)


class Held:
    """What a block returns that is no tensor, and no container."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@dataclass
class State:
    """What blocks pass on and change."""

    hidden: Tensor
    blocks: int = 0


#: How the blocks of a model exchange tensors with it.
EXCHANGES = (
    "a list",
    "a dictionary",
    "a dictionary in a tuple",
    "a dataclass",
    "an object",
    "an object that it changes",
    "a distribution",
    "a closure",
    "a closure over a layer",
    "a generator",
    "attributes",
    "a penalty in an attribute",
)

#: Those that compute when a block has returned, which may be refused.
LATER = ("a closure over a layer", "a generator")


class ExchangingBlock(nn.Linear):
    """Takes and gives its tensors in another way than as arguments and results.

    Args:
        how: One of :data:`EXCHANGES`.
    """

    shift: Tensor

    def __init__(self, how: str) -> None:
        super().__init__(FEATURES, FEATURES)
        self.how = how
        self.scale, self.is_used = 1.0, True

    def forward(self, given: Any) -> Any:
        if self.how == "a list":
            given.append(self.step(given[-1]))
        elif self.how == "a dictionary":
            given["hidden"] = self.step(given.pop("hidden"))
            given.setdefault("all", []).append(given["hidden"])
        elif self.how == "a dictionary in a tuple":
            given[0]["hidden"] = self.step(given[0]["hidden"]) + given[1]
        elif self.how == "a dataclass":
            given.hidden = self.step(given.hidden)
            given.blocks += 1
        elif self.how == "an object":
            return Held(self.step(given.hidden))
        elif self.how == "an object that it changes":
            given.hidden = self.step(given.hidden)
        elif self.how == "a closure":
            computed = self.step(given)
            return lambda: computed
        elif self.how == "a closure over a layer":
            return lambda: self.step(given)
        elif self.how == "a generator":
            return (self.step(each) for each in [given])
        elif self.how == "a penalty in an attribute":
            self.penalty = self.weight.square().mean()
            return self.step(given)
        elif self.how == "attributes":
            return self.step(given) * self.scale + (self.shift if self.is_used else 0.0)
        else:
            return torch.distributions.Normal(self.step(given.mean), 1.0, validate_args=False)
        return None

    def step(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Exchanging(nn.Module):
    """A model of such blocks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        with oracle.seeded(1):
            self.inp = nn.Linear(FEATURES, FEATURES)
            self.blocks: Any = nn.ModuleList(ExchangingBlock(how) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        given: Any = {
            "a list": [x],
            "a dictionary": {"hidden": x},
            "a dictionary in a tuple": ({"hidden": x}, 1.0),
            "a dataclass": State(x),
            "an object": Held(x),
            "an object that it changes": Held(x),
            "a distribution": torch.distributions.Normal(x, 1.0, validate_args=False),
        }.get(self.how, x)
        for index, block in enumerate(self.blocks):
            if self.how == "attributes":
                block.scale, block.is_used = 0.5 + index, index != 1
                if not hasattr(block, "shift"):
                    block.register_buffer("shift", torch.zeros_like(x[0].detach()), persistent=False)
                block.shift = block.shift + 1.0
            output = block(given)
            if self.how.startswith("a closure"):
                output = output()
            elif self.how == "a generator":
                output = next(output)
            given = given if output is None else output
        found: Tensor
        if self.how == "a list":
            found = torch.stack(given).sum(0)
        elif self.how == "a dictionary":
            found = torch.stack([*given["all"], given["hidden"]]).sum(0)
        elif self.how == "a dictionary in a tuple":
            found = given[0]["hidden"] * given[1]
        elif self.how == "a dataclass":
            found = given.hidden * given.blocks
        elif self.how == "a penalty in an attribute":
            found = given + sum(block.penalty for block in self.blocks)
        elif isinstance(given, Tensor):
            found = given
        else:
            found = given.mean if self.how == "a distribution" else given.hidden
        return found


def _exchanged(strategy: str) -> dict[str, tuple[str, Trained]]:
    """By how blocks exchange tensors, the error, and what was trained if there was none."""
    outcomes: dict[str, tuple[str, Trained]] = {}
    for how in EXCHANGES:
        fabric = new_fabric(strategy)
        net = Exchanging(how)
        model, optimizer = fabric.setup(net, oracle.sgd(net))
        losses: list[Tensor] = []
        said = refusal(ShardingError, partial(_train, fabric, model, optimizer, losses))
        trained = ([], {}) if was_refused(said) else (means(losses), full_state(fabric.strategy))
        outcomes[how] = said, trained
    return outcomes


def _train(fabric: Fabric, model: Any, optimizer: Any, losses: list[Tensor]) -> None:
    for batch in oracle.global_batches(3):
        x, y = own_share(fabric, batch)
        loss = mse_loss(model(x), y)
        losses.append(loss.detach())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


class Reusing(nn.Module):
    """Uses a parameter of one layer in another place, by a reference of its own.

    Args:
        tied: Whether it is registered there too.
    """

    def __init__(self, tied: bool) -> None:
        super().__init__()
        with oracle.seeded(1):
            self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        if tied:
            self.again = self.first.weight
        self.kept = [self.first.weight]
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x) @ (self.again if self.tied else self.kept[0]))
        return output


def _reused(strategy: str, tied: bool) -> tuple[str, Trained]:
    fabric = new_fabric(strategy)
    net = Reusing(tied)
    losses: list[Tensor] = []

    def train() -> None:
        model, optimizer = fabric.setup(net, oracle.sgd(net))
        _train(fabric, model, optimizer, losses)

    said = refusal(ShardingError, train)
    return said, ([], {}) if was_refused(said) else (means(losses), full_state(fabric.strategy))


class ShardedModulesSuite(Clauses):
    """A sharded module works like a plain one, or an error says what to write instead."""

    def test_what_blocks_exchange(self, ranks: Ranks) -> None:
        """Blocks may change what they are called with, return objects of any class, and get attributes from outside."""
        want = {how: oracle.train_plain(3, oracle.sgd, net=Exchanging(how)) for how in EXCHANGES}
        for outcome in ranks.run(2, _exchanged, self.strategy):
            for how, (said, trained) in outcome.items():
                if was_refused(said):
                    assert how in LATER, said
                    assert_says(said, "a unit, ExchangingBlock, returned a ", "auto_wrap_policy")
                    continue
                if how == "a penalty in an attribute" and ranks.kind == "threads":
                    continue  # torch_xla raises
                assert said.endswith("nothing was raised"), said
                assert trained[0] == pytest.approx(want[how][0], abs=FP32_TOLERANCE), f"blocks exchange {how}"
                assert_same([trained], want[how])

    @pytest.mark.parametrize("tied", [False, True], ids=["in a list", "tied"])
    def test_a_parameter_in_two_places(self, ranks: Ranks, tied: bool) -> None:
        """A reference that keeps a parameter from before sharding must be that of the trained one, or raise."""
        want = oracle.train_plain(3, oracle.sgd, net=Reusing(tied))
        for said, trained in ranks.run(2, _reused, self.strategy, tied):
            if was_refused(said):
                assert not tied, said
                assert_says(said, "'first.weight', as it was before the model was sharded", "Read it from its module")
            else:
                assert_same([trained], want)

    def test_its_own_state_is_taken_back_or_refused(self, ranks: Ranks) -> None:
        """A sharded root must load the state that it returned itself, or refuse it with CheckpointMismatchError."""
        for wrong in ranks.run(2, _own_state_back, self.strategy):
            assert wrong == []

    def test_a_copy_is_of_the_model_or_refused(self, ranks: Ranks) -> None:
        """``copy.deepcopy`` must give a module with whole parameters, or raise an error."""
        for wrong in ranks.run(2, _copied, self.strategy):
            assert wrong == []

    def test_state_dicts_are_whole_or_refused(self, ranks: Ranks, tmp_path: Path) -> None:
        """``state_dict()`` must give whole values, also when saved with ``torch.save``, or raise an error."""
        for refused in ranks.run(2, _export, self.strategy, str(tmp_path)):
            for message in refused:
                assert "can't be read" in message or "can't be written to a file" in message
                assert_says(message, repr(self.own_name("trainer")), "trainer.save_checkpoint(path)", "consolidate")

    def test_full_state_dict(self, ranks: Ranks, tmp_path: Path) -> None:
        """``full_state_dict()`` must return whole values of the module and its parts, on rank 0 only."""
        everything = each_ranks(ranks, ranks.run(2, _read_as_whole, self.strategy, str(tmp_path)))
        for rank, (told, tensors) in enumerate(everything):
            assert_says(told, "full_state_dict() was called inside a step", "on_train_batch_end()")
            assert bool(tensors) == (rank == 0), f"rank {rank} got {tensors} tensors"

    def test_late_parameters_are_refused_under_trainer(self, ranks: Ranks, tmp_path: Path) -> None:
        """Parameters added after sharding must be refused: each rank would train its own."""
        for told, steps in ranks.run(2, _grow, self.strategy, str(tmp_path)):
            for message in told.values():
                assert_says(message, "'late.weight' was added to the model after it was sharded", "configure_model()")
            assert steps == 2, f"{steps} steps were trained with a frozen head instead of 2"

    def test_late_parameters_are_refused_under_fabric(self, ranks: Ranks) -> None:
        """Parameters added after sharding must be refused: each rank would train its own."""
        for told in ranks.run(2, _grow_under_fabric, self.strategy):
            for message in told:
                assert_says(
                    message, "'late.weight' was added to the model after it was sharded", "before fabric.setup()"
                )

    def test_finetuning_callback(self, ranks: Ranks, tmp_path: Path) -> None:
        """``BaseFinetuning`` must train what it unfreezes, or be refused before training."""
        module = Thawed()
        new_trainer(tmp_path, "auto", max_epochs=3, callbacks=[Unfreezing()]).fit(module, loader(2, 1))
        want = [loss.item() for loss in module.losses]
        for told, losses in ranks.run(2, _thaw, self.strategy, str(tmp_path), 2):
            if was_refused(told):
                assert_says(told, "Unfreezing can't be used", repr(self.own_name("trainer")), "configure_optimizers()")
                assert not losses
            else:
                assert losses == pytest.approx(want, abs=FP32_TOLERANCE)

    @on_ranks("processes")
    def test_a_sharded_module_under_ddp_is_refused(self, ranks: Ranks, tmp_path: Path) -> None:
        """Lightning's DDP must refuse a module that is already sharded."""
        for told in ranks.run(2, _hand_on, self.strategy, str(tmp_path)):
            for message in told:
                assert_says(
                    message, f"was sharded by {self.own_name('trainer')!r}", "DDPStrategy", "build the module again"
                )
