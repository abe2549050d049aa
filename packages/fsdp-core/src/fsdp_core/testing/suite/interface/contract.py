"""A strategy's classes have the methods of core's contracts, with signatures that match core's calls."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric

import fsdp_core
from fsdp_core.devices import kind_of
from fsdp_core.errors import StrategyUnavailableError
from fsdp_core.lightning.fabric_strategy import ShardedFabricStrategy
from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.backend import Backend
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.testing import oracle
from fsdp_core.testing.launching.process_ranks import Ranks
from fsdp_core.testing.state import sharded_by
from fsdp_core.testing.suite.base_class import Clauses
from fsdp_core.testing.training import new_fabric

__all__ = ["ContractSuite", "accelerators_disagree", "misfits"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def misfits(implementation: type, contract: type) -> list[str]:
    """The methods whose signatures don't match core's calls.

    Args:
        implementation: The class that implements the contract.
        contract: Its base class.

    Example:
        >>> class Contract:
        ...     def shard(self, module, *, check_only=False): ...
        >>> class Theirs(Contract):
        ...     def shard(self, model, device): ...
        >>> for misfit in misfits(Theirs, Contract):
        ...     print(misfit)
        Theirs.shard(self, model, device) is called as shard(self, module, *, check_only=False):
          'module' is called 'model' there
          'check_only' is missing
          'device' has no default
    """
    messages = []
    for name in dir(contract):
        ours, theirs = inspect.getattr_static(contract, name), inspect.getattr_static(implementation, name)
        if name.startswith("_") or theirs is ours or not _is_method(ours):
            continue
        if not _is_method(theirs) or isinstance(ours, property) != isinstance(theirs, property):
            messages.append(f"{implementation.__name__}.{name} is {type(theirs).__name__}, not {type(ours).__name__}")
        elif not isinstance(ours, property):
            contract_signature, signature = (
                inspect.signature(getattr(cls, name)) for cls in (contract, implementation)
            )
            reasons = _reasons(contract_signature, signature)
            if reasons:
                own = f"{implementation.__name__}.{name}{_plain(signature)}"
                head = f"{own} is called as {name}{_plain(contract_signature)}:"
                messages.append("\n  ".join([head, *reasons]))
    return messages


def accelerators_disagree(
    named: Collection[str], devices: Collection[str], chosen: Mapping[str, str] | None = None
) -> str:
    """Describe how a plugin's and its backend's accelerators disagree; an empty string if they agree.

    Args:
        named: The plugin's accelerators, by Lightning's names. A third-party accelerator may have any one device
            type, whatever its name.
        devices: The backend's accelerators, by torch's device types.
        chosen: The device types that the front end chooses on this machine instead of Lightning's defaults, by
            accelerator.

    Example:
        >>> accelerators_disagree(("tpu", "cpu"), ("cpu", "xla")), accelerators_disagree(("theirs",), ("npu",))
        ('', '')
        >>> accelerators_disagree(("any", "cpu"), ("cpu",))
        "the plugin names 'any', and the backend runs on no such device"
        >>> accelerators_disagree(("cpu",), ("mps", "cpu"))
        "the backend runs on 'mps', and the plugin names no such accelerator"
        >>> accelerators_disagree(("tpu", "cpu"), ("xla",), {"cpu": "xla"})
        ''
    """
    device_types = {name: (chosen or {}).get(name) or kind_of(name) or name for name in named}
    extra_names = [name for name, device in device_types.items() if device not in devices]
    extra_devices = [device for device in devices if device not in device_types.values()]
    # The name of a third-party accelerator says nothing about its device: each may stand for one of the extra devices.
    third_party_names = [name for name in extra_names if kind_of(name) is None][: len(extra_devices)]
    extra_names = [name for name in extra_names if name not in third_party_names]
    extra_devices = extra_devices[len(third_party_names) :]
    messages = []
    if extra_names:
        messages.append(f"the plugin names {', '.join(map(repr, extra_names))}, and the backend runs on no such device")
    if extra_devices:
        messages.append(
            f"the backend runs on {', '.join(map(repr, extra_devices))}, and the plugin names no such accelerator"
        )
    return "; ".join(messages)


def _reasons(contract_signature: inspect.Signature, signature: inspect.Signature) -> list[str]:
    """Why calls with one signature don't match the other."""
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_any_position = inspect.Parameter.VAR_POSITIONAL in kinds
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds
    positional = [parameter for parameter in signature.parameters.values() if parameter.kind in _POSITIONAL]
    reasons = []
    matched_names = set()
    position = -1  # of the contract's parameter, among its positional ones
    for name, parameter in contract_signature.parameters.items():
        is_positional = parameter.kind in _POSITIONAL
        position += is_positional
        same_name = signature.parameters.get(name)
        if is_positional and not takes_any_position and position < len(positional):
            same_position = positional[position]
            if same_position.name != name and same_name not in positional:
                reasons.append(f"{name!r} is called {same_position.name!r} there")
                matched_names.add(same_position.name)
                continue
            if same_position.name != name:
                reasons.append(f"{name!r} is not at the same position")
        if same_name is None:
            if not (takes_any_name and (takes_any_position or not is_positional)):
                reasons.append(f"{name!r} is missing")
            continue
        matched_names.add(name)
        if parameter.default is not parameter.empty and same_name.default is same_name.empty:
            reasons.append(f"{name!r} has no default")
        elif parameter.default is not parameter.empty and same_name.default != parameter.default:
            reasons.append(f"{name!r} is {same_name.default!r} by default, not {parameter.default!r}")
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, parameter in signature.parameters.items():
        is_unmatched = name not in matched_names and name not in contract_signature.parameters
        if is_unmatched and parameter.default is parameter.empty and parameter.kind not in variable:
            reasons.append(f"{name!r} has no default")
    return reasons


def _is_method(value: Any) -> bool:
    return isinstance(value, (property, classmethod, staticmethod)) or inspect.isfunction(value)


def _plain(signature: inspect.Signature) -> str:
    """A signature without annotations."""
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _misfits_of_sharded(strategy: str) -> list[str]:
    fabric = new_fabric(strategy, 1)
    fabric.setup_module(oracle.new_net())
    return misfits(type(sharded_by(fabric.strategy)), Sharded)


class ContractSuite(Clauses):
    """The classes subclass core's, and core can call the backend, the runtime and the sharded root."""

    @pytest.mark.parametrize("front_end", ["trainer", "fabric"])
    def test_its_class_is_an_adapter_of_cores(self, front_end: FrontEnd) -> None:
        """The strategy's class must subclass ShardedTrainerStrategy or ShardedFabricStrategy."""
        adapter: Any = {"trainer": ShardedTrainerStrategy, "fabric": ShardedFabricStrategy}[front_end]
        assert issubclass(self.strategy_class(front_end), adapter)
        assert self.own_name(front_end)

    @pytest.mark.parametrize("front_end", ["trainer", "fabric"])
    def test_plugin_and_backend_name_the_same_accelerators(self, front_end: FrontEnd) -> None:
        """The plugin lists accelerators by Lightning's names, the backend by device types: both must list the same."""
        backend = self.strategy_class(front_end)().backend
        named = fsdp_core.describe(self.strategy).accelerators
        message = accelerators_disagree(named, backend.accelerators, {"cpu": self._device_on_the_cpu(front_end)})
        assert not message, message

    @pytest.mark.parametrize("front_end", ["trainer", "fabric"])
    def test_methods_are_called_as_the_contract_says(self, front_end: FrontEnd) -> None:
        """The backend and the runtime must implement their contracts, with signatures that match core's calls."""
        strategy = self.strategy_class(front_end)()
        contracts: dict[str, type] = {"backend": Backend, "runtime": Runtime}
        for role, contract in contracts.items():
            implementation = type(getattr(strategy, role))
            assert issubclass(implementation, contract)
            assert not inspect.isabstract(implementation)
            messages = misfits(implementation, contract)
            assert not messages, "\n".join(messages)

    def test_a_sharded_root_is_asked_as_the_contract_says(self, ranks: Ranks) -> None:
        """The methods of the backend's Sharded class must have signatures that match core's calls."""
        (messages,) = ranks.run(1, _misfits_of_sharded, self.strategy)
        assert not messages, "\n".join(messages)

    def _device_on_the_cpu(self, front_end: FrontEnd) -> str:
        """The device type that ``accelerator="cpu"`` selects: some libraries have their own device on the CPU."""
        built: dict[FrontEnd, type[Any]] = {"trainer": pl.Trainer, "fabric": Fabric}
        try:
            front = built[front_end](strategy=self.strategy, accelerator="cpu", devices=1)
        except StrategyUnavailableError:
            return "cpu"
        device: torch.device = front.strategy.root_device
        return device.type
