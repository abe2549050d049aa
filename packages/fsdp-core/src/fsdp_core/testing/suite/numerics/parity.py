"""Losses and weights equal those of one unsharded process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_core.plugins.strategy_info import Capability
from fsdp_core.sharding.wrap_policy import describe_policy
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import FP32_TOLERANCE, Trained, train_plain
from fsdp_core.testing.suite.base_class import Clauses, requires, with_options
from fsdp_core.testing.training import fabric_fit, fit

__all__ = ["NumbersSuite", "assert_numbers_alone", "assert_same", "options_id"]


def assert_same(got: list[Trained], want: Trained) -> None:
    """Assert that every rank's losses and weights equal the oracle's."""
    want_losses, want_state = want
    for losses, state in got:
        assert losses == pytest.approx(want_losses, abs=FP32_TOLERANCE)
        assert state.keys() == want_state.keys()
        for name, tensor in want_state.items():
            torch.testing.assert_close(state[name], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE, msg=name)


def assert_numbers_alone(ranks: Ranks, tmp_path: Path, strategy: str, options: Mapping[str, Any]) -> None:
    """Assert that options don't change losses and weights. Backends may pass their own options."""
    got = ranks.run(2, fit, strategy, str(tmp_path), 2, 3, "momentum", options)
    assert_same(got, train_plain(3, oracle.momentum))


def options_id(options: Mapping[str, Any]) -> str:
    """The pytest id of options."""
    return ",".join(f"{key}={describe_policy(option)}" for key, option in options.items())


class NumbersSuite(Clauses):
    """Losses and weights are those of one unsharded process, under Trainer and Fabric, whatever the options."""

    @pytest.mark.parametrize(
        ("world_size", "optimizer"), [(1, "adamw_groups"), (2, "sgd"), (3, "adamw_groups"), (4, "momentum")]
    )
    def test_fabric_equals_plain(self, ranks: Ranks, world_size: int, optimizer: str) -> None:
        """Losses and weights under Fabric must equal those of one unsharded process."""
        got = ranks.run(world_size, fabric_fit, self.strategy, world_size, 4, optimizer)
        assert_same(got, train_plain(4, getattr(oracle, optimizer)))

    @pytest.mark.parametrize(
        ("world_size", "optimizer"),
        [(1, "adamw_groups"), (2, "sgd"), (2, "adamw_groups"), (3, "sgd"), (4, "momentum")],
    )
    def test_trainer_equals_plain(self, ranks: Ranks, tmp_path: Path, world_size: int, optimizer: str) -> None:
        """Losses and weights under Trainer must equal those of one unsharded process."""
        got = ranks.run(world_size, fit, self.strategy, str(tmp_path), world_size, 4, optimizer)
        assert_same(got, train_plain(4, getattr(oracle, optimizer)))

    @requires(Capability.GRADIENT_ACCUMULATION)
    @pytest.mark.parametrize(
        ("world_size", "options"),
        [(2, {}), (3, {}), with_options({"sync_each_batch": True}, 3, {"sync_each_batch": True})],
        ids=["2", "3", "sync_each_batch"],
    )
    def test_accumulation_equals_plain(
        self, ranks: Ranks, tmp_path: Path, world_size: int, options: dict[str, Any]
    ) -> None:
        """With gradient accumulation, losses and weights must equal those of one unsharded process."""
        threefold = {"accumulate_grad_batches": 3}
        got = ranks.run(
            world_size, fit, self.strategy, str(tmp_path), world_size, 6, "momentum", options, threefold
        ) + ranks.run(world_size, fabric_fit, self.strategy, world_size, 6, "momentum", options, 3)
        assert_same(got, train_plain(6, oracle.momentum, accumulate=3))

    @requires(Capability.CLIP_BY_NORM)
    @pytest.mark.parametrize("world_size", [2, 3])
    def test_clipping_by_norm_equals_plain(self, ranks: Ranks, tmp_path: Path, world_size: int) -> None:
        """With clipping by norm, losses and weights must equal those of one unsharded process."""
        clip = {"gradient_clip_val": 0.2}
        got = ranks.run(world_size, fit, self.strategy, str(tmp_path), world_size, 4, "momentum", {}, clip) + ranks.run(
            world_size, fabric_fit, self.strategy, world_size, 4, "momentum", {}, 1, 0.2
        )
        assert_same(got, train_plain(4, oracle.momentum, clip_norm=0.2))

    @requires(Capability.CLIP_BY_VALUE)
    @pytest.mark.parametrize("world_size", [2, 3])
    def test_clipping_by_value_equals_plain(self, ranks: Ranks, tmp_path: Path, world_size: int) -> None:
        """With clipping by value, losses and weights must equal those of one unsharded process."""
        clip = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
        got = ranks.run(world_size, fit, self.strategy, str(tmp_path), world_size, 4, "momentum", {}, clip) + ranks.run(
            world_size, fabric_fit, self.strategy, world_size, 4, "momentum", {}, 1, None, 0.01
        )
        assert_same(got, train_plain(4, oracle.momentum, clip_value=0.01))

    @pytest.mark.parametrize(
        "options",
        [
            with_options(options, id=options_id(options))
            for options in (
                {"auto_wrap_policy": None},
                {"auto_wrap_policy": {oracle.Block}},
                {"auto_wrap_policy": {torch.nn.Linear, torch.nn.LayerNorm}},
                {"auto_wrap_policy": oracle.is_block},
                {"auto_wrap_policy": oracle.torch_policy},
                {"cpu_offload": True},
                {"process_group_backend": "gloo"},
                {"activation_checkpointing_policy": {oracle.Block}},
                {"activation_checkpointing_policy": oracle.is_block, "auto_wrap_policy": {torch.nn.LayerNorm}},
            )
        ],
    )
    def test_options_leave_numbers_alone(self, ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
        """The option must not change losses or weights."""
        assert_numbers_alone(ranks, tmp_path, self.strategy, options)
