"""Modules, optimizers and loops that are refused before a backend gets them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from fsdp_core.errors import CheckpointMismatchError, ShardingError, UnsupportedCapabilityError
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.refusals import assert_says, refusal, was_refused
from fsdp_core.testing.suite.base_class import Clauses, on_ranks
from fsdp_core.testing.suite.refusals.bad_options import set_up
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer

__all__ = ["BadModulesOfAdaptersSuite"]


class NoParameters(Lit):
    """Has nothing to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Tanh()


def _without_parameters(strategy: str, tmp: str) -> list[str]:
    return [
        refusal(ShardingError, lambda: set_up(strategy, tmp, "trainer", NoParameters())),
        refusal(ShardingError, lambda: set_up(strategy, tmp, "fabric", nn.Tanh())),
    ]


def _pruned(strategy: str, tmp: str) -> tuple[str, int]:
    module = Lit()
    run = new_trainer(tmp, strategy, 1, callbacks=[ModelPruning("l1_unstructured", amount=0.5)])
    return refusal(UnsupportedCapabilityError, lambda: run.fit(module, loader(1, 1))), len(module.losses)


class _Drawing(CSVLogger):
    """Runs the model on rank 0 to draw its graph, as ``TensorBoardLogger(log_graph=True)`` does."""

    _log_graph = True


def _drawn(strategy: str, tmp: str) -> tuple[str, int]:
    module = Lit()
    module.example_input_array = oracle.global_batches(1)[0][0]
    run = new_trainer(tmp, strategy, 2, logger=_Drawing(tmp))
    return refusal(UnsupportedCapabilityError, lambda: run.fit(module, loader(1, 2))), len(module.losses)


def _changed(change: Callable[[Any], object]) -> Callable[[Fabric, str], None]:
    """What sets up the oracle's model after a change."""

    def set_up_changed(fabric: Fabric, path: str) -> None:
        net = oracle.new_net()
        change(net)
        fabric.setup(net)

    return set_up_changed


def _tie_by_memory(net: Any) -> None:
    net.head = nn.Linear(6, 6)
    net.head.weight = nn.Parameter(net.inp.weight.data)


class Packed(Tensor):
    """Stands for the tensor subclasses of quantisation libraries."""


def _quantise(net: Any) -> None:
    net.blocks[0].up.weight = nn.Parameter(torch.ones(7, 6).as_subclass(Packed), requires_grad=False)


def _pack(net: Any) -> None:
    """As bitsandbytes packs 4-bit weights, without its class."""
    weight = nn.Parameter(torch.zeros(21, 1, dtype=torch.uint8), requires_grad=False)
    net.blocks[0].packed = weight
    setattr(weight, "quant_state", {"shape": (7, 6)})  # noqa: B010  # no attribute that torch knows


def _part_first(fabric: Fabric, path: str) -> None:
    net = oracle.new_net()
    fabric.setup(net.blocks[0])
    fabric.setup(net)


class Unfilled(nn.Linear):
    """Has a buffer that ``reset_parameters`` doesn't initialise."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("table", torch.empty(3))


def _unfilled(fabric: Fabric, path: str) -> None:
    with fabric.init_module(empty_init=True):
        net = Unfilled()
    fabric.setup(net)


class Initialising(nn.Sequential):
    """Initialises its layers itself, in its constructor."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)


def _initialised_on_meta(fabric: Fabric, path: str) -> None:
    with torch.device("meta"):
        net = Initialising()
    fabric.setup(net)


def _fewer_parameters(fabric: Fabric, path: str) -> None:
    net = oracle.new_net()
    _, optimizer = fabric.setup(net, oracle.momentum(net))
    fabric.save(path, {"optimizer": optimizer})
    other = oracle.new_net()
    _, optimizer = fabric.setup(other, oracle.momentum(other.blocks[0]))
    fabric.load(path, {"optimizer": optimizer})


#: What a user does, and parts of the error.
REFUSED: dict[str, tuple[Callable[[Fabric, str], None], list[str]]] = {
    "gradient hook": (
        _changed(lambda net: net.blocks[0].up.weight.register_hook(lambda grad: grad * 0)),
        ["'blocks.0.up.weight'", "hook"],
    ),
    "weights that a forward pass writes": (
        _changed(lambda net: net.register_module("table", nn.Embedding(4, 2, max_norm=1.0))),
        ["'table'", "Leave max_norm out"],
    ),
    "sparse gradients": (
        _changed(lambda net: net.register_module("table", nn.Embedding(4, 2, sparse=True))),
        ["'table'", "sparse=True", "AdamW"],
    ),
    "a layer without a shape": (
        _changed(lambda net: net.register_module("head", nn.LazyLinear(2))),
        ["'head.weight'", "lazy", "nn.Linear"],
    ),
    "two parameters in one memory": (
        _changed(_tie_by_memory),
        ["'inp.weight'", "'head.weight'", "share memory", "tied"],
    ),
    "a slice of a weight in a list": (
        _changed(lambda net: setattr(net, "kept", [net.inp.weight.data[:2]])),
        ["'kept[0]'", "'inp.weight'", "share memory", ".clone()"],
    ),
    "quantised weight": (_changed(_quantise), ["'blocks.0.up.weight' is of the class Packed", "precision='bf16-true'"]),
    "packed weight": (
        _changed(_pack),
        ["'blocks.0.packed', in torch.uint8, has an attribute 'quant_state'", "before it was"],
    ),
    "part of a model first": (_part_first, ["'blocks.0'", "Set up the whole model"]),
    "a buffer that nothing fills": (_unfilled, ["'table'", "reset_parameters()"]),
    "initialised in vain": (
        _initialised_on_meta,
        ["Linear", "_init_weights() of Initialising", "fabric.init_module(empty_init=True)"],
    ),
    "optimizer over fewer parameters": (_fewer_parameters, ["'inp.weight'", "doesn't", "saved with"]),
}


class Longer(nn.Module):
    """Has an additional layer on all ranks but the first: unless ranks are compared, they would hang."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        if rank:
            self.second = nn.Linear(4, 4)


def _frozen_on_one(rank: int) -> nn.Module:
    net = oracle.new_net()
    return net.requires_grad_(False) if rank else net


#: The module by rank, and parts of the error.
UNLIKE: dict[str, tuple[Callable[[int], nn.Module], list[str]]] = {
    "frozen": (_frozen_on_one, ["'inp.weight' is (6, 6) in torch.float32, frozen", "trained"]),
    "width": (lambda rank: nn.Linear(4, 4 + rank), ["'weight' is (5, 4) in torch.float32", "rank 0's is (4, 4)"]),
    "dtype": (
        lambda rank: nn.Linear(4, 4, dtype=torch.float64 if rank else None),
        ["'weight' is (4, 4) in torch.float64", "rank 0's is (4, 4) in torch.float32"],
    ),
    "layer": (Longer, ["it has a parameter 'second.weight'", "rank 0 has none"]),
    "tied": (
        lambda rank: nn.Sequential(*[nn.Linear(4, 4)] * 2) if rank else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        ["'1.weight' is tied to '0.weight'"],
    ),
    "activation": (
        lambda rank: nn.Sequential(nn.Linear(4, 4), nn.ReLU() if rank else nn.GELU()),
        ["its layer '1' is ReLU, and rank 0's is GELU"],
    ),
    "setting": (
        lambda rank: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1 * rank)),
        ["its layer '1' is Dropout(p=0.1", "and rank 0's is Dropout(p=0.0"],
    ),
}


def _unlike(strategy: str) -> dict[str, str]:
    """The errors by case, up to the first case that is not refused, after which ranks may hang."""
    fabric = new_fabric(strategy)
    told: dict[str, str] = {}
    for case, (build, _) in UNLIKE.items():
        told[case] = refusal(ShardingError, lambda build=build: fabric.setup(build(rank_context().rank)))  # type: ignore[misc]
        if not was_refused(told[case]):
            break
    return told


def _unlike_in_loops(strategy: str, tmp: str) -> tuple[str, int]:
    module = Lit()
    run = new_trainer(tmp, strategy, 2, accumulate_grad_batches=1 + rank_context().rank)
    return refusal(ShardingError, lambda: run.fit(module, loader(2, 2))), len(module.losses)


def refused_setup(strategy: str, case: str, path: str) -> str:
    """The error of a case of ``REFUSED`` under Fabric."""
    fabric = new_fabric(strategy)
    return refusal((ShardingError, CheckpointMismatchError), lambda: REFUSED[case][0](fabric, path))


class UnlikeInOptimizers(Lit):
    """Ranks with different learning rates of the second group."""

    def configure_optimizers(self) -> Any:
        blocks = {"params": [*self.net.blocks.parameters()], "lr": 0.05 * (1 + rank_context().rank)}
        groups: list[dict[str, Any]] = [{"params": [self.net.inp.weight]}, blocks]
        return torch.optim.SGD(groups, lr=0.05)


def _unlike_in_optimizers(strategy: str, tmp: str) -> tuple[str, int, str]:
    module = UnlikeInOptimizers()
    run = new_trainer(tmp, strategy, 2)
    message = refusal(ShardingError, lambda: run.fit(module, loader(1, 2)))
    fabric, net = new_fabric(strategy), oracle.new_net()
    optimizer = oracle.adamw_groups(net) if rank_context().rank else oracle.sgd(net)
    return message, len(module.losses), refusal(ShardingError, lambda: fabric.setup(net, optimizer))


class BadModulesOfAdaptersSuite(Clauses):
    """Each error says what was requested, why it is impossible, and what to type next."""

    def test_module_without_parameters(self, ranks: Ranks, tmp_path: Path) -> None:
        """A module without parameters must be refused."""
        (told,) = ranks.run(1, _without_parameters, self.strategy, str(tmp_path))
        for message, name in zip(told, ["NoParameters", "Tanh"], strict=True):
            assert_says(message, f"{name} has no parameters", "configure_model", "strategy='ddp'")

    def test_pruning(self, ranks: Ranks, tmp_path: Path) -> None:
        """``ModelPruning``, which needs whole weights, must be refused before training."""
        ((told, steps),) = ranks.run(1, _pruned, self.strategy, str(tmp_path))
        assert_says(told, "ModelPruning", repr(self.own_name("trainer")), "load_from_checkpoint()", "strategy='ddp'")
        assert not steps

    @on_ranks("processes", "threads")  # one controller runs the model on all devices
    def test_logger_that_draws_the_graph(self, ranks: Ranks, tmp_path: Path) -> None:
        """A logger that would run the sharded model on rank 0 alone must be refused before training."""
        for told, steps in ranks.run(2, _drawn, self.strategy, str(tmp_path)):
            assert_says(told, "log_graph=True", repr(self.own_name("trainer")), "rank 0 alone", "Leave log_graph out")
            assert not steps

    @pytest.mark.parametrize("case", REFUSED)
    def test_module_that_is_refused(self, ranks: Ranks, tmp_path: Path, case: str) -> None:
        """The model, or the operation on it, must be refused on every rank, with an error that says what to do."""
        for told in ranks.run(2, refused_setup, self.strategy, case, str(tmp_path / "checkpoint")):
            assert_says(told, *REFUSED[case][1])

    @on_ranks("processes", "threads")
    def test_ranks_with_different_models(self, ranks: Ranks) -> None:
        """If ranks build different models, each must raise an error with the first difference: no rank may hang."""
        for told in ranks.run(2, _unlike, self.strategy):
            for case, message in told.items():
                assert_says(
                    message, "rank 1 has not set up the same", *UNLIKE[case][1], "Build the same model on every"
                )

    @on_ranks("processes", "threads")
    def test_ranks_with_different_optimizers(self, ranks: Ranks, tmp_path: Path) -> None:
        """If optimizers differ between ranks, each must raise an error with the first difference: none may hang."""
        for told, steps, under_fabric in ranks.run(2, _unlike_in_optimizers, self.strategy, str(tmp_path)):
            assert_says(told, "'lr' in param group 1 of SGD is 0.05 on rank 0, and 0.1 on rank 1", "strategy.broadcast")
            assert not steps
            assert_says(under_fabric, "the class of optimizer 0 is SGD on rank 0, and AdamW on rank 1")

    @on_ranks("processes", "threads")
    def test_ranks_with_different_loops(self, ranks: Ranks, tmp_path: Path) -> None:
        """If ``accumulate_grad_batches`` differs between ranks, each must raise an error before training."""
        for told, steps in ranks.run(2, _unlike_in_loops, self.strategy, str(tmp_path)):
            assert_says(told, "rank 1", "accumulate_grad_batches is 2, and rank 0's is 1")
            assert not steps
