"""What the plugin says of itself."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import fsdp_core
import fsdp_fsdp2
from fsdp_core.errors import ShardingError
from fsdp_core.plugins import registry
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import RankPool
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.training import Lit, fit, loader, means, new_trainer
from fsdp_fsdp2.plugin import fsdp_strategies, why_not_here

NAMES = ["fsdp2", "fsdp2_cpu_offload"]


def test_it_is_found_under_its_two_names() -> None:
    assert [info.name for info in fsdp_strategies()] == NAMES
    for name in NAMES:
        assert registry.provider(name).name == "fsdp-fsdp2"
        assert registry.FIRST_PARTY[name] == "fsdp-fsdp2"
    assert fsdp_core.describe("fsdp2").presets == {}
    assert fsdp_core.describe("fsdp2_cpu_offload").presets == {"cpu_offload": True}
    assert fsdp_fsdp2.__version__ == registry.provider("fsdp2").version


@pytest.mark.parametrize("front_end", ["trainer", "fabric"])
def test_name_that_offloads(front_end: FrontEnd) -> None:
    assert fsdp_core.resolve("fsdp2_cpu_offload", front_end)().backend.options.cpu_offload


def test_command_line_takes_the_public_class_with_an_option_of_its_own() -> None:
    pytest.importorskip("jsonargparse")
    args = [
        "--trainer.strategy=fsdp_fsdp2.FSDP2Strategy",
        "--trainer.strategy.reshard_after_forward=false",
        "--trainer.strategy.cpu_offload=true",
    ]
    quiet: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    cli = LightningCLI(BoringModel, args=args, run=False, save_config_callback=None, trainer_defaults=quiet)
    used: Any = cli.trainer.strategy
    assert type(used) is fsdp_fsdp2.FSDP2Strategy
    assert (used.backend.options.reshard_after_forward, used.backend.options.cpu_offload) == (False, True)


def test_what_the_package_offers() -> None:
    """Each name of it is found when it is asked for, and kept."""
    kept = {name: vars(fsdp_fsdp2).pop(name, None) for name in fsdp_fsdp2.__all__}
    try:
        assert set(fsdp_fsdp2.__all__) <= set(dir(fsdp_fsdp2))
        strategy, fabric, version = fsdp_fsdp2.FSDP2Strategy, fsdp_fsdp2.fabric, fsdp_fsdp2.__version__
        assert (strategy, fabric) == (sys.modules["fsdp_fsdp2.trainer"].FSDP2Strategy, sys.modules["fsdp_fsdp2.fabric"])
        assert version == registry.provider("fsdp2").version
        assert vars(fsdp_fsdp2).keys() >= set(fsdp_fsdp2.__all__)
        with pytest.raises(AttributeError, match="has no attribute 'FSDP3'"):
            fsdp_fsdp2.FSDP3  # noqa: B018
    finally:
        vars(fsdp_fsdp2).update({name: value for name, value in kept.items() if value is not None})


def test_a_platform_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_here() is None
    monkeypatch.setattr(sys, "platform", "emscripten")
    assert why_not_here() == (
        "torch has no gloo on the platform 'emscripten', and fsdp2 needs it; use Linux, macOS or Windows"
    )


def pickled(tmp: str) -> Any:
    return pickle.loads(pickle.dumps(new_trainer(tmp, "fsdp2", 2, {"state_dict_type": "full"})))


def copied(tmp: str) -> Any:
    return copy.deepcopy(new_trainer(tmp, "fsdp2", 2, {"state_dict_type": "full"}))


def trained_elsewhere(make: Callable[[str], Any], tmp: str) -> tuple[list[float], str]:
    """The losses of a Trainer that was pickled or copied, and what is said where it is pickled after its fit."""
    run = make(tmp)
    assert run.strategy.state_dict_type == "full"
    module = Lit()
    run.fit(module, loader(2, 2))
    return means(module.losses), refusal(ShardingError, lambda: pickle.dumps(run.strategy))


@pytest.mark.parametrize("make", [pickled, copied])
def test_a_trainer_that_was_pickled_trains(ranks: RankPool, tmp_path: Path, make: Callable[[str], Any]) -> None:
    """As tools pickle it that start its run elsewhere; once it has sharded a module, that is refused."""
    want = ranks.run(2, fit, "fsdp2", str(tmp_path), 2, 2)
    for (losses, told), (wanted, _) in zip(ranks.run(2, trained_elsewhere, make, str(tmp_path)), want, strict=True):
        assert losses == wanted
        assert_says(told, "strategy='fsdp2' can't be pickled", "before the first fit()")
