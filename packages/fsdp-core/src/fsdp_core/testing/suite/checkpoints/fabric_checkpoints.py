"""Checkpoints under Fabric: several models, filters, and the Trainer's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.checkpoint import SavedTensor
from fsdp_core.errors import CheckpointValueError, ShardingError
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import FEATURES, Trained
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.base_class import KINDS, Clauses, on_ranks, requires
from fsdp_core.testing.suite.checkpoints.trainer_checkpoints import assert_bit_equal
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.training import new_fabric, own_share, whole_batches

__all__ = ["FabricCheckpointsSuite"]


class Tally:
    """A stateful object."""

    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore it."""
        self.n = state["n"]


def _round_trip(strategy: str, save_kind: str | None, path: str) -> dict[str, Any]:
    """Train two models and save them as this kind of checkpoint; or restore them, if it is ``None``."""
    fabric = new_fabric(strategy, 2, {"state_dict_type": save_kind} if save_kind else {})
    with oracle.seeded(7 if save_kind is None else 1):
        nets = oracle.Net(), oracle.Net(blocks=2)
    model, optimizer = fabric.setup(nets[0], oracle.adamw_groups(nets[0]))
    other, other_optimizer = fabric.setup(nets[1], oracle.momentum(nets[1]))
    tally = Tally()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "tally": tally, "step": 0}
    state |= {"other": other, "opt2": other_optimizer}
    rest: dict[str, Any] = {}
    if save_kind:
        for x, y in whole_batches(fabric, 2):
            fabric.backward(mse_loss(model(x), y) + mse_loss(other(x), y))
            optimizer.step()
            other_optimizer.step()
            tally.n += 1
        state["step"] = 2
        state["note"] = {"lr": (0.1, None)}
        fabric.save(path, state)
    else:
        rest = fabric.load(path, state)
    used_strategy: Any = fabric.strategy
    outcome: dict[str, Any] = {"model": {}, "optimizer": {}, "plain": (tally.n, state["step"]), "rest": rest}
    for index, root_optimizer in enumerate((optimizer, other_optimizer)):
        sharded = used_strategy.roots[index]
        moments = full_optimizer_state(used_strategy, root_optimizer, sharded)
        outcome["model"] |= {f"{index}.{k}": v for k, v in full_state(used_strategy, sharded).items()}
        outcome["optimizer"] |= {f"{index}.{k}": v for k, v in moments.items()}
    return outcome


def _blocks_first_or_last(strategy: str, path: str, load: bool) -> dict[str, dict[str, Any]]:
    """The state of an optimizer over the blocks: save it, or load it into one over them in reverse order."""

    def new_optimizer(net: Any) -> torch.optim.Optimizer:
        blocks = [*reversed(net.blocks)] if load else [*net.blocks]
        parameters = [parameter for block in blocks for parameter in block.parameters()]
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    loop = Loop(strategy, new_optimizer)
    if load:
        loop.fabric.load(path, objects_of(loop))
    else:
        loop.step_on(*loop.whole_batches(1)[0])
        loop.fabric.save(path, objects_of(loop))
    return full_optimizer_state(loop.fabric.strategy, loop.optimizer)


def _state_dicts(strategy: str, tmp: str, kind: str) -> tuple[list[str], list[bool]]:
    """Save state dicts instead of objects: the errors, and whether each loaded tensor equals the whole one."""
    loop = Loop(strategy, oracle.adamw_groups, options={"state_dict_type": kind})
    fabric = loop.fabric
    loop.step_on(*loop.whole_batches(1)[0])
    weights = loop.state()
    moments = full_optimizer_state(fabric.strategy, loop.optimizer)
    by_name: Any = loop.optimizer.state_dict()  # Lightning gets it from the strategy
    fabric.save(f"{tmp}/by name", {"optimizer": by_name})
    saved = _read_whole(fabric.load(f"{tmp}/by name"))["optimizer"]["state"]
    equal = [torch.equal(saved[name][key], value) for name, values in moments.items() for key, value in values.items()]
    messages = []
    state_dicts: dict[str, Callable[[], dict[str, Any]]] = {
        "weights": loop.model.state_dict,  # may raise itself
        "moments": lambda: {"nested": [loop.optimizer.optimizer.state_dict()]},
    }
    for name, state_dict in state_dicts.items():
        save = partial(lambda path, state_dict: fabric.save(path, state_dict()), f"{tmp}/{name}", state_dict)
        message = refusal((CheckpointValueError, ShardingError), save)
        if message.endswith("nothing was raised"):  # the tensors describe their shards, as DTensors do
            loaded = _read_whole(fabric.load(f"{tmp}/{name}"))
            if name == "weights":
                equal += [torch.equal(loaded[key], value) for key, value in weights.items()]
        else:
            messages.append(message)
    return messages, equal


def _read_whole(state: Any) -> Any:
    return apply_to_collection(state, SavedTensor, SavedTensor.full)


def objects_of(loop: Loop) -> dict[str, Any]:
    """What ``fabric.save`` and ``fabric.load`` get of a loop."""
    return {"model": loop.model, "optimizer": loop.optimizer}


def _goes_back(strategy: str, kind: str, path: str) -> list[dict[str, Any]]:
    """Save after two steps, take two more, load into the same objects, and take two more: both outcomes."""
    loop = Loop(strategy, oracle.adamw_groups, options={"state_dict_type": kind})
    batches = loop.whole_batches(4)

    def outcome() -> dict[str, Any]:
        losses, state = loop.train(batches[2:])
        moments = full_optimizer_state(loop.fabric.strategy, loop.optimizer)
        return {"losses": losses, "model": state, "optimizer": moments}

    loop.train(batches[:2])
    loop.fabric.save(path, objects_of(loop))
    first = outcome()
    loop.fabric.load(path, objects_of(loop))
    return [first, outcome()]


def _four_steps(loop: Loop, first: int, last: int) -> None:
    """Take the steps from ``first`` to ``last`` of four. In the second one, the first block is frozen."""
    for index, (x, y) in enumerate(loop.whole_batches(last)):
        if index >= first:
            loop.net.blocks[0].requires_grad_(index != 1)
            loop.step_on(x, y)


def _net(seed: int, frozen: float) -> Any:
    with oracle.seeded(seed):
        net = oracle.Net()
    nn.init.constant_(net.frozen.weight, frozen)
    return net


def _adamw(net: Any, settings: tuple[float, float, float]) -> torch.optim.Optimizer:
    lr, weight_decay, beta = settings
    return torch.optim.AdamW(net.parameters(), lr=lr, eps=1e-3, weight_decay=weight_decay, betas=(beta, 0.99))


#: The settings of a run, and those of another run before it loads the first one's checkpoint.
_FIRST = (0.01, 0.3, 0.8)
_OTHER = (0.5, 0.0, 0.0)


def _goes_on_elsewhere(strategy: str, path: str) -> dict[str, Any]:
    """Take two steps and save; load over other weights and settings, and take two more: the weights."""
    saver = Loop(strategy, partial(_adamw, settings=_FIRST), _net(1, 0.5))
    _four_steps(saver, 0, 2)
    saver.fabric.save(path, objects_of(saver))
    net = _net(7, 7.0)
    net.blocks[0].requires_grad_(False)  # as in the last step before the save
    loader = Loop(strategy, partial(_adamw, settings=_OTHER), net)
    loader.fabric.load(path, objects_of(loader))
    _four_steps(loader, 2, 4)
    return loader.state()


def _weights_alone(strategy: str, path: str) -> Trained:
    """Load only weights into a model that is set up with its optimizer, and take two steps."""
    fabric = new_fabric(strategy)
    fabric.save(path, {"model": fabric.setup(oracle.new_net())})
    loop = Loop(strategy, oracle.momentum, _net(7, 7.0))
    batches = loop.whole_batches(2)
    with torch.no_grad():
        loop.model(batches[0][0])  # unshards weights that the load must replace
    loop.fabric.load(path, {"model": loop.model})
    return loop.train(batches)


class Counting(nn.Module):
    """A layer that keeps in a buffer, beside a batch norm's, what it has seen on this rank."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.register_buffer("seen", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.seen += x.detach().sum(0)
        return self.norm(self.layer(x))


_RANK_BUFFERS = ("seen", "norm.running_mean", "norm.running_var")


def _own_buffers(strategy: str, kind: str, path: str) -> tuple[dict[str, Tensor], ...]:
    """A rank's buffers after a step on its own share, and another model's after and before it has loaded them."""
    fabric = new_fabric(strategy, 2, {"state_dict_type": kind})
    with oracle.seeded(1):
        net, loading_net = Counting(), Counting()

    def buffers(module: nn.Module) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in module.named_buffers() if name in _RANK_BUFFERS}

    model = fabric.setup(net)
    loading_model = fabric.setup(loading_net)
    initial = buffers(loading_net)
    x, y = own_share(fabric, oracle.global_batches(1)[0])
    fabric.backward(mse_loss(model(x), y))
    fabric.save(path, {"model": model})
    own = buffers(net)  # a save changes nothing
    fabric.load(path, {"model": loading_model})
    return own, buffers(loading_net), initial


class FabricCheckpointsSuite(Clauses):
    """Fabric's checkpoints are restored bit for bit, with everything that users save along with a model."""

    @KINDS
    def test_fabric_save_and_load(self, ranks: Ranks, tmp_path: Path, kind: str) -> None:
        """``fabric.load`` must restore models, optimizers and other state bit for bit, and return the rest."""
        path = str(tmp_path / "checkpoint")
        saved = ranks.run(2, _round_trip, self.strategy, kind, path)[0]
        for got in ranks.run(2, _round_trip, self.strategy, None, path):
            assert_bit_equal(got, saved)
            assert got["plain"] == (2, 2)
            assert got["rest"] == {"note": {"lr": (0.1, None)}}

    @on_ranks("processes", "threads")  # one controller has one of each buffer
    @KINDS
    def test_rank_zeros_buffers_are_saved(self, ranks: Ranks, tmp_path: Path, kind: str) -> None:
        """Of buffers that ranks have written differently, those of rank 0 must be saved, and loaded by every rank."""
        got = ranks.run(2, _own_buffers, self.strategy, kind, str(tmp_path / "checkpoint"))
        (own_0, _, _), (own_1, _, initial) = got
        for name in _RANK_BUFFERS:
            assert not torch.equal(own_0[name], own_1[name]), f"{name} should be of each rank's own share"
            assert not torch.equal(own_0[name], initial[name]), f"{name} was not written to"
            for _, loaded, _ in got:
                is_rank_0s = torch.equal(loaded[name], own_0[name])
                assert is_rank_0s, f"the checkpoint's {name} is {loaded[name].tolist()}, and not rank 0's"

    @KINDS
    def test_fabric_goes_back(self, ranks: Ranks, tmp_path: Path, kind: str) -> None:
        """Loading a checkpoint into the objects that were saved must undo later steps; training repeats bit for bit."""
        for first, again in ranks.run(2, _goes_back, self.strategy, kind, str(tmp_path / "checkpoint")):
            assert again["losses"] == first["losses"]
            assert_bit_equal(again, first)

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_a_checkpoint_wins_over_what_it_is_loaded_into(self, ranks: Ranks, tmp_path: Path) -> None:
        """Loading must replace frozen weights, param group options, step counts, and moments of frozen parameters."""
        loop = Loop(None, partial(_adamw, settings=_FIRST), _net(1, 0.5))
        _four_steps(loop, 0, 4)
        got = ranks.run(2, _goes_on_elsewhere, self.strategy, str(tmp_path / "checkpoint"))
        assert_same([([], state) for state in got], ([], loop.state()))

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_loaded_weights_are_trained_by_an_optimizer_that_is_older(self, ranks: Ranks, tmp_path: Path) -> None:
        """An optimizer set up before ``fabric.load`` must train the loaded weights."""
        want = oracle.train_plain(2, oracle.momentum)
        assert_same(ranks.run(2, _weights_alone, self.strategy, str(tmp_path / "checkpoint")), want)

    @KINDS
    def test_state_dicts_are_saved_whole_or_refused(self, ranks: Ranks, tmp_path: Path, kind: str) -> None:
        """State dicts saved instead of objects must be restored whole, or be refused."""
        for messages, equal in ranks.run(2, _state_dicts, self.strategy, str(tmp_path), kind):
            assert all(equal)
            for message in messages:
                assert_says(message, 'fabric.save(path, {"model": model')
                assert "a rank's own shard of" in message or "state_dict() of Net can't be read" in message

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_fabric_knows_an_optimizers_state_by_name(self, ranks: Ranks, tmp_path: Path) -> None:
        """Optimizer state must be matched by parameter name, whatever the order of the optimizer's parameters."""
        path = str(tmp_path / "checkpoint")
        saved = ranks.run(2, _blocks_first_or_last, self.strategy, path, False)[0]
        for got in ranks.run(2, _blocks_first_or_last, self.strategy, path, True):
            assert_bit_equal({"model": {}, "optimizer": got}, {"model": {}, "optimizer": saved})
