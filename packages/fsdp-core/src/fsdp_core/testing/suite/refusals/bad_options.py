"""Assertions that options are refused, for core's clauses and for backends' own tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import nn

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer

__all__ = ["BOTH", "assert_refused_at_once", "set_up", "unfit_options"]

BOTH = pytest.mark.parametrize("front_end", ["trainer", "fabric"])


class Wrapping(Lit):
    """A LightningModule around any module, for the Trainer."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def set_up(
    strategy: str, tmp: str, front_end: FrontEnd, module: nn.Module, options: Mapping[str, Any] | None = None
) -> None:
    """Call ``fit`` under the Trainer, or ``setup`` under Fabric. Asserts that nothing is trained if it fails."""
    if front_end == "fabric":
        new_fabric(strategy, 1, options).setup(module)
        return
    lit = module if isinstance(module, Lit) else Wrapping(module)
    try:
        new_trainer(tmp, strategy, 1, options).fit(lit, loader(1, 1))
    finally:
        assert not lit.losses


def assert_refused_at_once(constructor: Callable[..., Any], options: Mapping[str, Any], words: list[str]) -> None:
    """Assert that the constructor refuses options with an error that contains all words."""
    assert_says(refusal(UnsupportedCapabilityError, lambda: constructor(**options)), *words)


def unfit_options(
    strategy: str, tmp: str, front_end: FrontEnd, options: dict[str, Any], error: type[Exception]
) -> tuple[str, bool]:
    """The error for options that don't fit the suite's model, and whether the model is unchanged."""

    def describe_parameters(module: nn.Module) -> list[Any]:
        return [(name, type(p), tuple(p.shape)) for name, p in module.named_parameters()]

    net = oracle.new_net()
    message = refusal(error, lambda: set_up(strategy, tmp, front_end, net, options))
    return message, describe_parameters(net) == describe_parameters(oracle.new_net())
