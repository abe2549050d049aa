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

from fsdp_core.errors import CheckpointMismatchError, ShardingError, UnsupportedCapabilityError
from fsdp_core.lightning.outside_steps.exporting import full_state_dict
from fsdp_core.lightning.outside_steps.weight_stream import SentWeights, stream_weights
from fsdp_core.state.full_tensor import gather_full
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE, Trained
from fsdp_core.testing.refusals import assert_says, refusal, result_or_refusal, was_refused
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.base_class import Clauses, each_ranks, on_ranks
from fsdp_core.testing.suite.numerics.parity import assert_same, assert_same_or_refused
from fsdp_core.testing.training import Lit, fit_plainly, loader, means, new_fabric, new_trainer

__all__ = ["ShardedModulesSuite"]


# -- reading -----------------------------------------------------------------------------------------------------------

#: Parts of the suite's module that users export: all of it, the model, a block, and one of two tied layers.
PARTS = ("", "net", "net.blocks.0", "net.out")


class Exporting(Lit):
    """Calls ``state_dict()`` of its parts where users export them."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[tuple[str, str], Mapping[str, Any] | str] = {}

    def configure_optimizers(self) -> Any:
        self.read_parts("in configure_optimizers")
        return oracle.momentum(self)

    def on_train_end(self) -> None:
        self.read_parts("in on_train_end")

    def read_parts(self, hook: str) -> None:
        """Keep each part's state dict, or the error."""
        for part in PARTS:
            self.read[part, hook] = result_or_refusal(ShardingError, self.get_submodule(part).state_dict)


def _export(strategy: str, tmp: str) -> list[str]:
    """Return the errors of refused exports, and compare the others with full values."""
    module = Exporting()
    run = new_trainer(tmp, strategy, 2)
    run.fit(module, loader(1, 2))
    module.read_parts("after the fit")
    used_strategy: Any = run.strategy
    want = full_state(used_strategy)
    messages = []
    for (part, hook), got in module.read.items():
        if isinstance(got, str):
            messages.append(got)
            continue
        call = f"state_dict() of {part or 'all'} {hook}"
        prefix = f"{part}." if part else ""
        expected = {name.removeprefix(prefix): value for name, value in want.items() if name.startswith(prefix)}
        assert got.keys() == expected.keys(), f"{call} holds {list(got)} instead of {list(expected)}"
        full = {name: gather_full(got[name], used_strategy.runtime) for name in expected}
        for name, value in expected.items():
            shape = tuple(value.shape)
            shape_read = tuple(full[name].shape)
            assert shape_read == shape, f"{call} shows {name} of {shape} as {shape_read}"
        if "configure" in hook:  # the values may still be placeholders then
            continue
        for name, value in expected.items():
            assert torch.equal(full[name].cpu(), value.cpu()), f"{call}: {name}"
        message, saved = _through_a_file(got)
        messages += message
        for name, value in saved.items():
            assert type(value) is Tensor, f"{call}, from a file: {name} is a {type(value)}"
            assert torch.equal(value, expected[name].cpu()), f"{call}, from a file: {name}"
    moments = full_optimizer_state(used_strategy, run.optimizers[0])
    message, saved = _through_a_file(run.optimizers[0].state_dict())
    for values in saved.get("state", {}).values():
        moment = values["momentum_buffer"]
        assert any(
            full_values["momentum_buffer"].shape == moment.shape
            and torch.equal(full_values["momentum_buffer"].cpu(), moment)
            for full_values in moments.values()
        ), f"the optimizer's state_dict(), from a file, holds {tuple(moment.shape)}, the shape of no parameter"
    return messages + message


def _through_a_file(state: Mapping[str, Any]) -> tuple[list[str], dict[Any, Any]]:
    """The error of ``torch.save``, or the state read back."""
    file = io.BytesIO()
    message = refusal(ShardingError, lambda: torch.save(dict(state), file))
    if was_refused(message):
        return [message], {}
    file.seek(0)
    return [], torch.load(file, map_location="cpu", weights_only=True)


class ReadAsWhole(Lit):
    """Calls ``full_state_dict()`` where users export weights."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, dict[str, Any]] = {}
        self.message = ""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.message = refusal(ShardingError, lambda: full_state_dict(self))
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
    for used_strategy, parts in ((run.strategy, module.read), (fabric.strategy, {"": under_fabric})):
        want = full_state(used_strategy)
        for part, got in parts.items():
            expected = {name.removeprefix(f"{part}."): v for name, v in want.items() if name.startswith(part)}
            assert not got or got.keys() == expected.keys(), f"full_state_dict of {part or 'all'} holds {list(got)}"
            for name, value in got.items():
                assert type(value) is Tensor and value.device.type == "cpu", f"{part}: {name} is {type(value)}"
                assert torch.equal(value, expected[name].cpu()), f"full_state_dict of {part or 'all'}: {name}"
    if under_fabric:
        assert under_fabric["inp.weight"] is under_fabric["out.weight"]
        oracle.new_net().load_state_dict(under_fabric)
    return module.message, sum(map(len, [*module.read.values(), under_fabric]))


class Streaming(Lit):
    """Iterates over its full weights after each batch, also amid an accumulation, and compares them.

    Args:
        streams: Whether it does.
    """

    def __init__(self, streams: bool) -> None:
        super().__init__()
        self.streams = streams
        self.sent = SentWeights()
        self.message = ""
        self.wrong: list[str] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.message = refusal(ShardingError, lambda: stream_weights(self))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.streams:
            return
        streamed = dict(stream_weights(self, budget="1KiB"))
        want = full_state_dict(self)  # empty on ranks other than 0
        differing = [name for name, value in want.items() if not torch.equal(streamed[name].cpu(), value)]
        if differing or (want and streamed.keys() != want.keys()):
            self.wrong.append(f"batch {batch_idx}: {differing} of {list(streamed)} are not those of full_state_dict()")
        sent_names = {name for name, _ in stream_weights(self.net, changed_since=self.sent)}
        if bool(sent_names) != (batch_idx != 2):  # the first of an accumulation: no step since the last
            self.wrong.append(f"batch {batch_idx}: {sent_names} were sent as changed")


def _stream(strategy: str, tmp: str) -> tuple[str, list[str]]:
    """The error inside a step, and what was wrong outside of it."""
    trained = []
    for streams in (True, False):
        module = Streaming(streams)
        run = new_trainer(tmp, strategy, 2, accumulate_grad_batches=2, max_steps=2)
        run.fit(module, loader(4, 2))
        trained.append((module, full_state(run.strategy)))
    (module, state), (_, state_without) = trained
    differing = [name for name, value in state.items() if not torch.equal(value, state_without[name])]
    if differing:
        module.wrong.append(f"{differing} were trained otherwise than without stream_weights()")
    return module.message, module.wrong


# -- adding ------------------------------------------------------------------------------------------------------------


class Growing(Lit):
    """Gets a new head in one of its hooks, trained by its optimizer or frozen.

    Args:
        hook: The name of the hook.
        frozen: Whether the head is frozen.
    """

    late: nn.Linear

    def __init__(self, hook: str, *, frozen: bool = False) -> None:
        super().__init__()
        self.hook = hook
        self.is_frozen = frozen

    def grow(self, hook: str) -> None:
        """Add the head if this is the chosen hook."""
        if hook != self.hook:
            return
        self.late = _new_head().to(self.device).requires_grad_(not self.is_frozen)
        if not self.is_frozen and hook != "configure_optimizers":
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


def _new_head() -> nn.Linear:
    return nn.Linear(FEATURES, FEATURES, bias=False)


#: Hooks that come after sharding.
HOOKS = ("configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start")


def _grow(strategy: str, tmp: str) -> tuple[list[str], int]:
    """The errors, up to the first hook that is not refused, and the number of batches seen by a frozen head."""

    def refusal_of_fit(module: Lit, steps: int) -> str:
        return refusal(ShardingError, lambda: new_trainer(tmp, strategy, 2).fit(module, loader(steps, 2)))

    messages = []
    for hook in HOOKS:
        module = Growing(hook)
        messages.append(refusal_of_fit(module, 2))
        if not was_refused(messages[-1]):
            return messages, 0
        assert not module.losses, hook
    between_fits = Lit()
    new_trainer(tmp, strategy, 2).fit(between_fits, loader(1, 2))
    between_fits.late = _new_head()
    messages.append(refusal_of_fit(between_fits, 1))
    frozen = Growing("on_fit_start", frozen=True)
    new_trainer(tmp, strategy, 2).fit(frozen, loader(2, 2))
    return messages, len(frozen.losses)


def _grow_under_fabric(strategy: str) -> list[str]:
    """The errors if a new head is added to the optimizer that was set up, or gets an optimizer of its own."""
    loop = Loop(strategy, oracle.sgd)
    loop.net.late = _new_head().to(loop.fabric.device)
    loop.optimizer.optimizer.add_param_group({"params": loop.net.late.parameters()})
    message = refusal(ShardingError, loop.optimizer.step)
    net: Any = oracle.new_net()
    loop.fabric.setup(net)
    net.late = _new_head().to(loop.fabric.device)
    own_optimizer = torch.optim.SGD(net.late.parameters(), lr=0.1)
    return [message, refusal(ShardingError, lambda: loop.fabric.setup_optimizers(own_optimizer))]


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
    message = refusal(UnsupportedCapabilityError, lambda: run.fit(module, loader(2, world_size)))
    return message, means(module.losses)


# -- copying and passing on --------------------------------------------------------------------------------------------


def _hand_on(strategy: str, tmp: str) -> list[str]:
    """The errors if a sharded module is then trained with DDP, under the Trainer and under Fabric."""
    module = Lit()
    net = oracle.new_net()
    new_trainer(tmp, strategy, 2).fit(module, loader(1, 2))
    new_fabric(strategy).setup(net)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return [
        refusal(ShardingError, lambda: new_trainer(tmp, "ddp", 2).fit(module, loader(1, 2))),
        refusal(ShardingError, lambda: fabric.setup(net)),
    ]


def _wrong_copies(strategy: str) -> list[str]:
    """Describe faults of copies of a sharded module: they lack full parameters, or are refused without advice."""
    loop = Loop(strategy, oracle.sgd)
    shapes = {name: tuple(p.shape) for name, p in oracle.new_net().named_parameters()}
    originals = {"deepcopy of the user's module": loop.net, "deepcopy of what Fabric has returned": loop.model}
    faults = []
    for call, original in originals.items():
        copied = result_or_refusal(ShardingError, partial(copy.deepcopy, original))
        if isinstance(copied, str):
            if not all(part in copied for part in (repr(strategy), "in __init__()", "fsdp_core.gathered(module)")):
                faults.append(f"{call} is refused without saying what to write: {copied}")
            continue
        user_module: nn.Module = getattr(copied, "_original_module", copied)
        if {name: tuple(p.shape) for name, p in user_module.named_parameters()} != shapes:
            faults.append(f"{call} holds a rank's shards")
    return faults


def _load_own_state(strategy: str) -> list[str]:
    """Return what fails if a root loads the state that it returned itself, which may be one rank's part."""
    loop = Loop(strategy)
    loop.train(loop.batches(1))
    used_strategy = loop.fabric.strategy
    plain = loop.optimizer.optimizer
    sharded = used_strategy.sharded_of(loop.model)

    def states() -> dict[str, Any]:
        return {"weights": loop.state(), "moments": full_optimizer_state(used_strategy, loop.optimizer)}

    states_before_load = states()
    loads: dict[str, Callable[[], None]] = {
        "model": lambda: sharded.load_model_state(sharded.model_state()),
        "optimizer": lambda: sharded.load_optimizer_state(plain, sharded.optimizer_state(plain)),
    }
    faults = []
    for name, load in loads.items():
        try:
            load()
        except CheckpointMismatchError:
            continue
        except Exception as error:
            faults.append(f"{name}: {type(error).__name__}")
    for name, state in states().items():
        if not _is_same(state, states_before_load[name]):
            faults.append(name)
    return faults


def _is_same(got: Any, want: Any) -> bool:
    if isinstance(want, Mapping):
        return got.keys() == want.keys() and all(_is_same(got[name], want[name]) for name in want)
    return torch.equal(got, want) if isinstance(want, Tensor) else bool(got == want)


class Carrier:
    """An object that a block returns, neither a tensor nor a container."""

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

#: The exchanges that compute only after a block has returned. They may be refused.
LATER = ("a closure over a layer", "a generator")


class ExchangingBlock(nn.Linear):
    """Exchanges its tensors with the model in other ways than as arguments and results.

    Args:
        how: One of :data:`EXCHANGES`.
    """

    shift: Tensor

    def __init__(self, how: str) -> None:
        super().__init__(FEATURES, FEATURES)
        self.how = how
        self.scale = 1.0
        self.is_used = True

    def forward(self, inputs: Any) -> Any:
        if self.how == "a list":
            inputs.append(self.step(inputs[-1]))
        elif self.how == "a dictionary":
            inputs["hidden"] = self.step(inputs.pop("hidden"))
            inputs.setdefault("all", []).append(inputs["hidden"])
        elif self.how == "a dictionary in a tuple":
            inputs[0]["hidden"] = self.step(inputs[0]["hidden"]) + inputs[1]
        elif self.how == "a dataclass":
            inputs.hidden = self.step(inputs.hidden)
            inputs.blocks += 1
        elif self.how == "an object":
            return Carrier(self.step(inputs.hidden))
        elif self.how == "an object that it changes":
            inputs.hidden = self.step(inputs.hidden)
        elif self.how == "a closure":
            computed = self.step(inputs)
            return lambda: computed
        elif self.how == "a closure over a layer":
            return lambda: self.step(inputs)
        elif self.how == "a generator":
            return (self.step(x) for x in [inputs])
        elif self.how == "a penalty in an attribute":
            self.penalty = self.weight.square().mean()
            return self.step(inputs)
        elif self.how == "attributes":
            return self.step(inputs) * self.scale + (self.shift if self.is_used else 0.0)
        else:
            return torch.distributions.Normal(self.step(inputs.mean), 1.0, validate_args=False)
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
        values: Any = {
            "a list": [x],
            "a dictionary": {"hidden": x},
            "a dictionary in a tuple": ({"hidden": x}, 1.0),
            "a dataclass": State(x),
            "an object": Carrier(x),
            "an object that it changes": Carrier(x),
            "a distribution": torch.distributions.Normal(x, 1.0, validate_args=False),
        }.get(self.how, x)
        for index, block in enumerate(self.blocks):
            if self.how == "attributes":
                block.scale = 0.5 + index
                block.is_used = index != 1
                if not hasattr(block, "shift"):
                    block.register_buffer("shift", torch.zeros_like(x[0].detach()), persistent=False)
                block.shift = block.shift + 1.0
            output = block(values)
            if self.how.startswith("a closure"):
                output = output()
            elif self.how == "a generator":
                output = next(output)
            values = values if output is None else output
        if self.how == "a penalty in an attribute":
            values = values + sum(block.penalty for block in self.blocks)
        read: dict[str, Callable[[], Tensor]] = {
            "a list": lambda: torch.stack(values).sum(0),
            "a dictionary": lambda: torch.stack([*values["all"], values["hidden"]]).sum(0),
            "a dictionary in a tuple": lambda: values[0]["hidden"] * values[1],
            "a dataclass": lambda: values.hidden * values.blocks,
            "an object": lambda: values.hidden,
            "an object that it changes": lambda: values.hidden,
            "a distribution": lambda: values.mean,
        }
        features: Tensor = read[self.how]() if self.how in read else values
        return features


def _train(strategy: str, net: nn.Module) -> Trained | str:
    def train() -> Trained:
        loop = Loop(strategy, oracle.sgd, net)
        return loop.train(loop.batches(3))

    return result_or_refusal(ShardingError, train)


def _train_each_exchange(strategy: str) -> dict[str, Trained | str]:
    """By how blocks exchange tensors, what was trained, or the error."""
    return {how: _train(strategy, Exchanging(how)) for how in EXCHANGES}


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
        self.references = [self.first.weight]
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x) @ (self.again if self.tied else self.references[0]))
        return output


def _train_reusing(strategy: str, tied: bool) -> Trained | str:
    return _train(strategy, Reusing(tied))


class ShardedModulesSuite(Clauses):
    """A sharded module works like a plain one, or an error says what to write instead."""

    def test_what_blocks_exchange(self, ranks: Ranks) -> None:
        """Blocks may change what they are called with, return objects of any class, and get attributes from outside."""
        want = {how: oracle.train_plain(3, oracle.sgd, net=Exchanging(how)) for how in EXCHANGES}
        for outcomes in ranks.run(2, _train_each_exchange, self.strategy):
            for how, outcome in outcomes.items():
                if isinstance(outcome, str):
                    assert how in LATER, f"blocks exchange {how}: {outcome}"
                    assert_says(outcome, "a unit, ExchangingBlock, returned a ", "auto_wrap_policy")
                    continue
                if how == "a penalty in an attribute" and ranks.kind == "threads":
                    continue  # torch_xla raises
                assert outcome[0] == pytest.approx(want[how][0], abs=FP32_TOLERANCE), f"blocks exchange {how}"
                assert_same([outcome], want[how])

    @pytest.mark.parametrize("tied", [False, True], ids=["in a list", "tied"])
    def test_a_parameter_in_two_places(self, ranks: Ranks, tied: bool) -> None:
        """A reference that keeps a parameter from before sharding must be that of the trained one, or raise."""
        want = oracle.train_plain(3, oracle.sgd, net=Reusing(tied))
        outcomes = ranks.run(2, _train_reusing, self.strategy, tied)
        if tied:
            assert not any(isinstance(outcome, str) for outcome in outcomes), outcomes
        words = ("'first.weight', as it was before the model was sharded", "Read it from its module")
        assert_same_or_refused(outcomes, want, *words)

    def test_its_own_state_is_taken_back_or_refused(self, ranks: Ranks) -> None:
        """A sharded root must load the state that it returned itself, or refuse it with CheckpointMismatchError."""
        for wrong in ranks.run(2, _load_own_state, self.strategy):
            assert wrong == []

    def test_a_copy_is_of_the_model_or_refused(self, ranks: Ranks) -> None:
        """``copy.deepcopy`` must give a module with whole parameters, or raise an error."""
        for wrong in ranks.run(2, _wrong_copies, self.strategy):
            assert wrong == []

    def test_state_dicts_are_whole_or_refused(self, ranks: Ranks, tmp_path: Path) -> None:
        """``state_dict()`` must give whole values, also when saved with ``torch.save``, or raise an error."""
        for messages in ranks.run(2, _export, self.strategy, str(tmp_path)):
            for message in messages:
                assert "can't be read" in message or "can't be written to a file" in message
                assert_says(message, repr(self.own_name("trainer")), "trainer.save_checkpoint(path)", "consolidate")

    def test_full_state_dict(self, ranks: Ranks, tmp_path: Path) -> None:
        """``full_state_dict()`` must return whole values of the module and its parts, on rank 0 only."""
        results = each_ranks(ranks, ranks.run(2, _read_as_whole, self.strategy, str(tmp_path)))
        for rank, (message, tensors) in enumerate(results):
            assert_says(message, "full_state_dict() was called inside a step", "on_train_batch_end()")
            assert bool(tensors) == (rank == 0), f"rank {rank} got {tensors} tensors"

    def test_stream_weights(self, ranks: Ranks, tmp_path: Path) -> None:
        """``stream_weights()`` must yield what ``full_state_dict()`` returns, and not change training."""
        for message, wrong in each_ranks(ranks, ranks.run(2, _stream, self.strategy, str(tmp_path))):
            assert_says(message, "stream_weights() was called inside a step", "on_train_batch_end()")
            assert wrong == []

    def test_late_parameters_are_refused_under_trainer(self, ranks: Ranks, tmp_path: Path) -> None:
        """Parameters added after sharding must be refused: each rank would train its own."""
        for messages, steps in ranks.run(2, _grow, self.strategy, str(tmp_path)):
            for message in messages:
                assert_says(message, "'late.weight' was added to the model after it was sharded", "configure_model()")
            assert steps == 2, f"{steps} steps were trained with a frozen head instead of 2"

    def test_late_parameters_are_refused_under_fabric(self, ranks: Ranks) -> None:
        """Parameters added after sharding must be refused: each rank would train its own."""
        for messages in ranks.run(2, _grow_under_fabric, self.strategy):
            for message in messages:
                assert_says(
                    message, "'late.weight' was added to the model after it was sharded", "before fabric.setup()"
                )

    def test_finetuning_callback(self, ranks: Ranks, tmp_path: Path) -> None:
        """``BaseFinetuning`` must train what it unfreezes, or be refused before training."""
        want, _ = fit_plainly(tmp_path, Thawed(), 2, max_epochs=3, callbacks=[Unfreezing()])
        for message, losses in ranks.run(2, _thaw, self.strategy, str(tmp_path), 2):
            if was_refused(message):
                words = ("Unfreezing can't be used", repr(self.own_name("trainer")), "configure_optimizers()")
                assert_says(message, *words)
                assert not losses
            else:
                assert losses == pytest.approx(want, abs=FP32_TOLERANCE)

    @on_ranks("processes")
    def test_a_sharded_module_under_ddp_is_refused(self, ranks: Ranks, tmp_path: Path) -> None:
        """Lightning's DDP must refuse a module that is already sharded."""
        for messages in ranks.run(2, _hand_on, self.strategy, str(tmp_path)):
            for message in messages:
                assert_says(
                    message, f"was sharded by {self.own_name('trainer')!r}", "DDPStrategy", "build the module again"
                )
