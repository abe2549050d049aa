"""Losses and weights equal those of one unsharded process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_core import devices
from fsdp_core.plugins import registry
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.sharding.units.wrap_policy import describe_policy
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE, Trained, train_plain
from fsdp_core.testing.refusals import assert_says
from fsdp_core.testing.suite.base_class import Clauses, requires, with_options
from fsdp_core.testing.training import accelerator, fabric_fit, fit

__all__ = [
    "NumbersSuite",
    "assert_buffers_alone",
    "assert_numbers_alone",
    "assert_same",
    "assert_same_or_refused",
    "assert_state_close",
    "options_id",
]


def assert_same(got: Iterable[Trained], want: Trained) -> None:
    """Assert that every rank's losses and weights equal the oracle's."""
    want_losses, want_state = want
    for losses, state in got:
        assert losses == pytest.approx(want_losses, abs=FP32_TOLERANCE)
        assert state.keys() == want_state.keys()
        assert_state_close(state, want_state)


def assert_same_or_refused(outcomes: Iterable[Trained | str], want: Trained, *words: str) -> None:
    """Assert that every rank has trained as the oracle does, or was refused in a message that contains all words."""
    for outcome in outcomes:
        if isinstance(outcome, str):
            assert_says(outcome, *words)
        else:
            assert_same([outcome], want)


def assert_state_close(state: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Assert that a rank's state equals the oracle's up to rounding errors."""
    for name, tensor in want.items():
        torch.testing.assert_close(state[name], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE, msg=name)


def assert_numbers_alone(ranks: Ranks, tmp_path: Path, strategy: str, options: Mapping[str, Any]) -> None:
    """Assert that options don't change losses and weights; for tests of a backend's own options, too."""
    got = ranks.run(2, fit, strategy, str(tmp_path), 2, 3, "momentum", options)
    assert_same(got, train_plain(3, oracle.momentum))


class BufferBlock(nn.Module):
    """A block whose output depends on buffers that it writes to: in place, by assignment, and through ``.data``."""

    step_count: Tensor
    drift: Tensor
    mask: Tensor
    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.register_buffer("step_count", torch.zeros(()))
        self.register_buffer("drift", torch.ones(FEATURES))
        self.register_buffer("mask", torch.ones(600, 600))  # more than 1 MiB
        self.register_buffer("queue", torch.ones(600, 600))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.drift / (1 + self.step_count) * self.queue[0, 0] * self.mask[0, 0]
        output: Tensor = x + torch.tanh(self.norm(self.linear(x))) * scale
        if self.training:
            self.step_count = self.step_count + 0.25
            with torch.no_grad():
                self.drift.lerp_(output.mean(0), 0.1)
            self.queue.data[0] *= 0.9
        return output


def _new_buffer_net() -> nn.Sequential:
    with oracle.seeded(2):
        return nn.Sequential(*(BufferBlock() for _ in range(2)))


def _train_recomputed(strategy: str, options: Mapping[str, Any]) -> Trained:
    """Train on the same batches on all ranks, with activations that are computed again."""
    base_options: dict[str, Any] = {"activation_checkpointing_policy": {BufferBlock}}
    if Capability.WRAP_POLICY in registry.strategies()[strategy].capabilities:
        base_options["auto_wrap_policy"] = {BufferBlock}
    loop = Loop(strategy, oracle.momentum, _new_buffer_net(), options={**base_options, **options})
    return loop.train(loop.whole_batches(4))


def assert_buffers_alone(ranks: Ranks, strategy: str, options: Mapping[str, Any]) -> None:
    """Assert that recomputation writes to no buffer; for tests of a backend's own options, too."""
    losses, want = train_plain(4, oracle.momentum, net=_new_buffer_net())
    got = ranks.run(2, _train_recomputed, strategy, options)
    if "xla" in strategy:  # XLA's batch norm keeps the biased variance, unlike torch's
        for state in (want, *(state for _, state in got)):
            for name in [name for name in state if name.endswith("running_var")]:
                del state[name]
    assert_same(got, (losses, want))


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
        ("world_size", "optimizer"), [(1, "adamw_groups"), (2, "sgd"), (2, "adamw_groups"), (3, "sgd"), (4, "momentum")]
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
        run = partial(ranks.run, world_size)
        tmp = str(tmp_path)
        trainer = {"accumulate_grad_batches": 3}
        got = run(fit, self.strategy, tmp, world_size, 6, "momentum", options, trainer)
        got += run(fabric_fit, self.strategy, world_size, 6, "momentum", options, 3)
        assert_same(got, train_plain(6, oracle.momentum, accumulate=3))

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
        if "process_group_backend" in options and accelerator() != "cpu":
            options = {"process_group_backend": devices.process_group_backend(accelerator())}
        assert_numbers_alone(ranks, tmp_path, self.strategy, options)

    @requires(Capability.ACTIVATION_CHECKPOINTING)
    def test_recomputation_leaves_buffers_alone(self, ranks: Ranks) -> None:
        """Recomputation must read the buffers' values of the forward pass, and must not write to them again."""
        assert_buffers_alone(ranks, self.strategy, {})
