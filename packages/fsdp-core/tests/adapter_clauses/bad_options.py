"""Invalid options, names, hardware and plugins: refused before training, with what to type next."""

from __future__ import annotations

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
from torch import nn

from fsdp_core.errors import ShardingError, StrategyUnavailableError, UnknownStrategyError, UnsupportedCapabilityError
from fsdp_core.lightning.setup_checks import check_devices
from fsdp_core.plugins import registry
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.testing import Ranks
from fsdp_core.testing.oracle import Block
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.suite.base_class import Clauses, requires, with_options
from fsdp_core.testing.suite.refusals.bad_options import BOTH, assert_refused_at_once, unfit_options

__all__ = ["BadOptionsSuite"]


#: Options that don't fit the model, and parts of the error.
MISUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "matches nothing": (
        {"auto_wrap_policy": {nn.Conv2d}},
        ["auto_wrap_policy={Conv2d} matches no submodule", "Block", "auto_wrap_policy={MyBlock}"],
    ),
    "callable matches nothing": (
        {"auto_wrap_policy": lambda module: False},
        ["auto_wrap_policy=<lambda> matches no submodule", "Block"],
    ),
    "class": ({"auto_wrap_policy": Block}, ["auto_wrap_policy=Block is a class", "{Block}"]),
    "string": ({"auto_wrap_policy": "automatic"}, ["auto_wrap_policy='automatic'", "'auto'"]),
    "non-class": ({"auto_wrap_policy": {"Block"}}, ["holds 'Block'", "auto_wrap_policy={MyBlock}"]),
    "number": ({"auto_wrap_policy": 5}, ["auto_wrap_policy=5", "auto_wrap_policy={MyBlock}"]),
    "ModuleList": ({"auto_wrap_policy": {nn.ModuleList}}, ["matches a ModuleList", "its members"]),
    "checkpointing matches nothing": (
        {"activation_checkpointing_policy": {nn.Conv2d}},
        ["activation_checkpointing_policy={Conv2d} matches no submodule", "Block", "Write"],
    ),
    "checkpointing string": (
        {"activation_checkpointing_policy": "auto"},
        ["activation_checkpointing_policy='auto'", "activation_checkpointing_policy={MyBlock}"],
    ),
    "checkpointing path": (
        {"activation_checkpointing_policy": "nowhere.is_large"},
        ["activation_checkpointing_policy='nowhere.is_large' can't be imported: No module named", "{MyBlock}"],
    ),
    "checkpointing class": (
        {"activation_checkpointing_policy": Block},
        ["activation_checkpointing_policy=Block is a class", "{Block}"],
    ),
    "checkpointing ModuleList": (  # never called, so nothing would be recomputed
        {"activation_checkpointing_policy": {nn.ModuleList}},
        ["activation_checkpointing_policy={ModuleList}", "its members"],
    ),
}


def _misused(strategy: str, tmp: str, front_end: FrontEnd, case: str) -> tuple[str, bool]:
    return unfit_options(strategy, tmp, front_end, MISUSED[case][0], ShardingError)


class TrainersOwn(Precision):
    """A plugin that may do anything."""


class FabricsOwn(FabricPrecision):
    """A plugin that may do anything."""


class BadOptionsSuite(Clauses):
    """Each error says what was requested, why it is impossible, and what to type next."""

    @BOTH
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"state_dict_type": "sharded_state"}, ["state_dict_type='sharded_state'", "'sharded'", "'full'"]),
            ({"checkpoint_io": TorchCheckpointIO()}, ["TorchCheckpointIO", "(state_dict_type='full')"]),
            ({"async_save": "no"}, ["async_save='no'", "True", "False"]),
            ({"accelerator": {Block}}, ["accelerator={", "Accelerator of Lightning's", "auto_wrap_policy={MyBlock}"]),
            pytest.param(
                {"scattered_save": "no"},
                ["scattered_save='no'", "True", "False"],
                marks=requires("scattered_save"),
                id="scattered_save-",
            ),
            pytest.param(
                {"scattered_save": True, "state_dict_type": "full"},
                ["scattered_save=True", "state_dict_type='full'", "Leave one of them out"],
                marks=requires("scattered_save"),
                id="scattered_save of one file-",
            ),
            pytest.param(
                {"timeout": 30}, ["timeout=30", "timedelta(seconds=30)"], marks=requires("timeout"), id="timeout-"
            ),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_option_that_is_refused_at_once(self, front_end: FrontEnd, options: dict[str, Any], words: Any) -> None:
        """The constructor must refuse an invalid value of an option."""
        assert_refused_at_once(self.strategy_class(front_end), options, words)

    @BOTH
    def test_option_that_does_not_exist(self, front_end: FrontEnd) -> None:
        """The constructor must refuse an unknown option, and suggest the similar one."""
        words = [repr(self.own_name(front_end)), "'state_dict_typ'", "Did you mean 'state_dict_type'?", "fsdp describe"]
        assert_refused_at_once(self.strategy_class(front_end), {"state_dict_typ": "full"}, words)

    @BOTH
    @pytest.mark.parametrize("case", [with_options(options, case) for case, (options, _) in MISUSED.items()])
    def test_option_that_does_not_fit_the_model(
        self, ranks: Ranks, tmp_path: Path, front_end: FrontEnd, case: str
    ) -> None:
        """An option that doesn't fit the model must be refused, and leave the model unchanged."""
        ((told, as_it_was),) = ranks.run(1, _misused, self.strategy, str(tmp_path), front_end, case)
        assert_says(told, *MISUSED[case][1])
        assert as_it_was

    def front_ends(self, **options: Any) -> list[Callable[[], Any]]:
        """A Trainer and a Fabric, not built yet."""
        usual: dict[str, Any] = {"strategy": self.strategy, "accelerator": "cpu", "devices": 1}
        return [lambda: pl.Trainer(**{**usual, "logger": False, **options}), lambda: Fabric(**{**usual, **options})]

    def test_misspelt_name(self) -> None:
        """A misspelt name must raise UnknownStrategyError, which suggests the strategy and the package's others."""
        provider = registry.provider(self.strategy)
        siblings = [name for name in registry.strategies() if registry.provider(name) == provider]
        misspelt = f"{self.strategy}{self.strategy[-1]}"
        for build in self.front_ends(strategy=misspelt):
            told = refusal(UnknownStrategyError, build)
            assert_says(told, repr(misspelt), f"Did you mean {self.strategy!r}?", *siblings)

    @pytest.mark.parametrize("accelerator", ["cuda", "mps"])
    def test_accelerator_that_is_not_there(self, accelerator: str) -> None:
        """An accelerator that is not available must raise Lightning's own error."""
        if getattr(torch, accelerator).is_available():
            pytest.skip(f"{accelerator} is available")
        for build in self.front_ends(accelerator=accelerator):
            with pytest.raises(Exception, match=r"can not run on your system.*'cpu'"):
                build()

    @BOTH
    def test_device_of_another_strategy(self, front_end: FrontEnd) -> None:
        """A device type that the backend does not support must be refused."""
        backend = self.strategy_class(front_end)().backend
        others = [device for device in ("mps", "xla", "meta") if device not in backend.accelerators]
        assert others
        for device in others:
            told = refusal(
                StrategyUnavailableError,
                lambda device=device: check_devices(  # type: ignore[misc]
                    self.strategy, backend, [torch.device(device)], ShardPrecision()
                ),
            )
            assert_says(told, repr(self.strategy), repr(device), " and ".join(backend.accelerators), "accelerator=")
            assert_says(told, "fsdp list")

    @pytest.mark.parametrize("precision", ["64-true", "transformer-engine"])
    def test_precision_without_meaning_for_shards(self, precision: str) -> None:
        """A precision string that shards don't support must be refused."""
        for build in self.front_ends(precision=precision):
            assert_says(refusal(ValueError, build), repr(precision), "'32-true'", "'bf16-mixed'")

    @pytest.mark.parametrize("plugin", [TrainersOwn, DoublePrecision])
    def test_precision_plugin_that_shards_cannot_follow(self, plugin: type[Precision]) -> None:
        """A precision plugin that shards don't support must be refused, with a precision string to use instead."""
        under_trainer, _ = self.front_ends(plugins=[plugin()])
        assert_says(refusal(UnsupportedCapabilityError, under_trainer), plugin.__name__, "precision='bf16-mixed'")
        _, under_fabric = self.front_ends(plugins=[FabricsOwn()])
        assert_says(refusal(UnsupportedCapabilityError, under_fabric), "FabricsOwn", "precision='bf16-mixed'")

    def test_checkpoint_io_that_cannot_write_shards(self) -> None:
        """A CheckpointIO plugin that can't write shards must be refused."""
        under_trainer, _ = self.front_ends(plugins=[AsyncCheckpointIO()])
        _, under_fabric = self.front_ends(plugins=[TorchCheckpointIO()])
        for name, build in {"AsyncCheckpointIO": under_trainer, "TorchCheckpointIO": under_fabric}.items():
            told = refusal(UnsupportedCapabilityError, build)
            front_end: FrontEnd = "trainer" if build is under_trainer else "fabric"
            assert_says(told, name, f"{self.strategy_class(front_end).__name__}(state_dict_type='full')")
