"""Undeclared capabilities are refused. That declared ones work is tested by the other clauses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from lightning.fabric import Fabric
from torch.nn.functional import mse_loss

import fsdp_core
from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.lightning.capability_checks import capability_of
from fsdp_core.plugins import registry
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.measuring.collectives import count_collectives
from fsdp_core.testing.oracle import Block
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.suite.base_class import Clauses, requires, undeclared
from fsdp_core.testing.suite.numerics.parity import assert_numbers_alone
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer, whole_batches

__all__ = ["ASKED", "CapabilitiesSuite"]


class Ask(Protocol):
    """Requests a capability from a strategy; writes to the given folder."""

    def __call__(self, strategy: Chosen, tmp: str, /) -> Any: ...


class ByHand(Lit):
    """Uses manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class ClipsItself(Lit):
    """Clips gradients itself, by norm or by value."""

    def __init__(self, algorithm: str) -> None:
        super().__init__()
        self.algorithm = algorithm

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm=self.algorithm)


class Chosen(NamedTuple):
    """A strategy, by name or, where options are given, as an instance of its class."""

    name: str
    options: dict[str, Any] | None


def _fit(strategy: Chosen, tmp: str, module: Lit | None = None, **trainer: Any) -> None:
    new_trainer(tmp, strategy.name, 1, strategy.options, **trainer).fit(module or Lit(), loader(2, 1))


def _on_meta(strategy: Chosen, tmp: str) -> None:
    with torch.device("meta"):
        module = Lit()
    _fit(strategy, tmp, module)


def _init_module(strategy: Chosen, tmp: str) -> None:
    with new_trainer(tmp, strategy.name, 1, strategy.options).init_module(empty_init=True):
        Lit()


def _save(kind: str) -> Ask:
    def ask(strategy: Chosen, tmp: str) -> None:
        run = new_trainer(tmp, strategy.name, 1, {"state_dict_type": kind})
        run.fit(Lit(), loader(1, 1))
        run.save_checkpoint(f"{tmp}/saved")

    return ask


def _fabric(strategy: Chosen, precision: Any = None) -> Fabric:
    return new_fabric(strategy.name, 1, strategy.options, precision)


def _fabric_step(strategy: Chosen, **clip: Any) -> None:
    fabric = _fabric(strategy)
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    x, y = whole_batches(fabric, 1)[0]
    fabric.backward(mse_loss(model(x), y))
    fabric.clip_gradients(model, optimizer, **clip)


def _fabric_accumulation(strategy: Chosen, tmp: str) -> None:
    fabric = _fabric(strategy)
    model = fabric.setup(oracle.new_net())
    with fabric.no_backward_sync(model):
        pass


def _fabric_on_meta(strategy: Chosen, tmp: str) -> None:
    with torch.device("meta"):
        net = oracle.new_net()
    _fabric(strategy).setup(net)


def _fabric_save(kind: str) -> Ask:
    def ask(strategy: Chosen, tmp: str) -> None:
        fabric = new_fabric(strategy.name, 1, {"state_dict_type": kind})
        fabric.save(f"{tmp}/saved", {"model": fabric.setup(oracle.new_net())})

    return ask


def _option(name: str, value: Any) -> dict[FrontEnd, list[Ask]]:
    return {
        "trainer": [lambda strategy, tmp: fsdp_core.resolve(strategy.name, "trainer")(**{name: value})],
        "fabric": [lambda strategy, tmp: fsdp_core.resolve(strategy.name, "fabric")(**{name: value})],
    }


def _precision(name: str) -> dict[FrontEnd, list[Ask]]:
    return {
        "trainer": [lambda strategy, tmp: _fit(strategy, tmp, precision=name)],
        "fabric": [lambda strategy, tmp: _fabric(strategy, name)],
    }


#: How users request each capability.
ASKED: dict[Capability, dict[FrontEnd, list[Ask]]] = {
    Capability.ACTIVATION_CHECKPOINTING: _option("activation_checkpointing_policy", {Block}),
    Capability.CLIP_BY_NORM: {
        "trainer": [
            lambda strategy, tmp: _fit(strategy, tmp, gradient_clip_val=0.1),
            lambda strategy, tmp: _fit(strategy, tmp, ClipsItself("norm")),
        ],
        "fabric": [lambda strategy, tmp: _fabric_step(strategy, max_norm=0.1)],
    },
    Capability.CLIP_BY_VALUE: {
        "trainer": [
            lambda strategy, tmp: _fit(strategy, tmp, gradient_clip_val=0.1, gradient_clip_algorithm="value"),
            lambda strategy, tmp: _fit(strategy, tmp, ClipsItself("value")),
        ],
        "fabric": [lambda strategy, tmp: _fabric_step(strategy, clip_val=0.1)],
    },
    Capability.CPU_OFFLOAD: _option("cpu_offload", True),
    Capability.FULL_CHECKPOINT: {"trainer": [_save("full")], "fabric": [_fabric_save("full")]},
    Capability.GRADIENT_ACCUMULATION: {
        "trainer": [lambda strategy, tmp: _fit(strategy, tmp, accumulate_grad_batches=2)],
        "fabric": [_fabric_accumulation],
    },
    Capability.GRADIENT_SCALING: _precision("16-mixed"),
    # under Fabric users write every step themselves, so nothing requests it
    Capability.MANUAL_OPTIMIZATION: {"trainer": [lambda strategy, tmp: _fit(strategy, tmp, ByHand())]},
    Capability.META_INIT: {
        "trainer": [_init_module, _on_meta],
        "fabric": [lambda strategy, tmp: _fabric(strategy).init_module(empty_init=True).__enter__(), _fabric_on_meta],
    },
    Capability.MIXED_PRECISION: _precision("bf16-mixed"),
    Capability.RESHARD_AFTER_FORWARD: _option("reshard_after_forward", False),
    Capability.SHARDED_CHECKPOINT: {"trainer": [_save("sharded")], "fabric": [_fabric_save("sharded")]},
    Capability.WRAP_POLICY: _option("auto_wrap_policy", {Block}),
}


def _refusals(strategy: str, tmp: str, front_end: FrontEnd, capability: Capability) -> list[str]:
    """Return the error messages, with the strategy given by name and as an instance of its class."""
    by_name, by_class = Chosen(strategy, None), Chosen(strategy, {})
    return [
        refusal(UnsupportedCapabilityError, partial(ask, chosen, tmp))
        for ask in ASKED[capability][front_end]
        for chosen in (by_name, by_class)
    ]


def _count_gathers(strategy: str, tmp: str, options: Mapping[str, Any]) -> int:
    """The number of all-gathers in a training step."""
    run = new_trainer(tmp, strategy, 2, options)
    return count_collectives(lambda: run.fit(Lit("sgd"), loader(1, 2)), "allgather")


class CapabilitiesSuite(Clauses):
    """Declared capabilities match the implemented ones: a missing declaration fails here, an extra one elsewhere."""

    @pytest.mark.parametrize(
        ("capability", "front_end"),
        [
            pytest.param(capability, front_end, marks=undeclared(capability), id=f"{capability}-{front_end}")
            for capability, requests in ASKED.items()
            for front_end in requests
        ],
    )
    def test_what_is_not_declared_is_refused(
        self, ranks: Ranks, tmp_path: Path, capability: Capability, front_end: FrontEnd
    ) -> None:
        """A request for an undeclared capability must raise an error that lists the strategies that have it."""
        (messages,) = ranks.run(1, _refusals, self.strategy, str(tmp_path), front_end, capability)
        capable = [info.name for info in registry.strategies().values() if capability in info.capabilities]
        for message in messages:
            assert_says(message, repr(self.own_name(front_end)), *capable)

    def test_no_option_asks_for_what_is_not_declared(self) -> None:
        """The default of an option must not request a capability that the plugin does not declare."""
        info = fsdp_core.describe(self.strategy)
        asks = {option.name: capability_of(option.name, option.default) for option in info.options}
        options_without_capability = [
            f"{name} ({need})" for name, need in asks.items() if need and need not in info.capabilities
        ]
        assert not options_without_capability, (
            f"options without their capability: {', '.join(options_without_capability)}; "
            "declare it, or remove the option"
        )

    @requires(Capability.RESHARD_AFTER_FORWARD)
    def test_units_that_stay_gathered_leave_numbers_alone(self, ranks: Ranks, tmp_path: Path) -> None:
        """Without resharding after forward, losses and weights must be the same, with fewer all-gathers per step."""
        options = self.asks.get(Capability.RESHARD_AFTER_FORWARD, {"reshard_after_forward": False})
        assert_numbers_alone(ranks, tmp_path, self.strategy, options)
        if ranks.kind != "processes":
            return
        gathers_if_kept = ranks.run(2, _count_gathers, self.strategy, str(tmp_path), options)[0]
        usual_gathers = ranks.run(2, _count_gathers, self.strategy, str(tmp_path), {})[0]
        message = f"{gathers_if_kept} all-gathers per step with {options}, and {usual_gathers} without"
        assert 0 < gathers_if_kept < usual_gathers, f"{message}, which should be more"
