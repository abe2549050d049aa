"""Cases that fail with Lightning's own sharded strategies and must work here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from fsdp_core.errors import ShardingError
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.measuring.collectives import count_collectives
from fsdp_core.testing.oracle import BATCH, FEATURES, FP32_TOLERANCE, WIDE, Block, Trained
from fsdp_core.testing.refusals import assert_says, refusal, was_refused
from fsdp_core.testing.state import (
    assert_sharded,
    count_local_elements,
    full_state,
    poison_gradient,
    sharded_by,
    trained_by,
)
from fsdp_core.testing.suite.base_class import Clauses, on_ranks, requires, with_options
from fsdp_core.testing.suite.numerics.parity import assert_state_close
from fsdp_core.testing.training import Lit, fabric_fit, fit, loader, means, new_trainer

__all__ = ["BrokenElsewhereSuite", "every_stage"]


class NanGradient(Lit):
    """Has a loss and gradients that are NaN."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * float("nan")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        used: Any = self.trainer.strategy
        sharded_by(used).clip_norm(trained_by(optimizer), 1.0, error_if_nonfinite=True)


def _clip_nan_gradients(strategy: str, tmp: str) -> list[str]:
    """The errors of clipping under the Trainer and under Fabric."""
    run = new_trainer(tmp, strategy, 2)
    under_trainer = refusal(RuntimeError, lambda: run.fit(NanGradient(), loader(1, 2)))
    loop = Loop(strategy, oracle.sgd)
    clip = partial(loop.fabric.clip_gradients, loop.model, loop.optimizer, max_norm=1.0)
    loop.backward(loop.model(loop.fabric.to_device(torch.ones(2, FEATURES))).sum() * float("nan"))
    under_fabric = refusal(RuntimeError, clip)
    clip(error_if_nonfinite=False)
    return [under_trainer, under_fabric]


def _infinite_norm(strategy: str) -> str:
    # Wide enough that every rank holds a part of it, whatever a library pads shards to.
    loop = Loop(strategy, oracle.sgd, oracle.new_net(width=WIDE))
    fabric = loop.fabric
    loop.backward(loop.model(fabric.to_device(torch.ones(2, FEATURES))).sum())
    layout = sharded_by(fabric.strategy).layout()
    linear = [p for p, parts in layout.items() if any(".up." in part.name or ".down." in part.name for part in parts)]
    poison_gradient(linear, torch.nan, on_this_rank=fabric.global_rank == fabric.world_size - 1)
    clip = partial(fabric.clip_gradients, loop.model, loop.optimizer, max_norm=1.0, norm_type=float("inf"))
    return refusal(RuntimeError, clip)


def every_stage(strategy: str, tmp: str, options: dict[str, Any]) -> dict[str, Any]:
    """Test, fit, validate, test, predict, fit and validate with one strategy and one module."""
    module = Lit("momentum", width=WIDE)
    run = new_trainer(tmp, strategy, 2, options, max_epochs=2)
    used_strategy: Any = run.strategy
    policy = getattr(used_strategy.options, "auto_wrap_policy", "auto")
    run.test(module, loader(2, 2), verbose=False)
    run.fit(module, loader(3, 2), loader(1, 2))
    run.validate(module, loader(2, 2), verbose=False)
    run.test(module, loader(2, 2), verbose=False)
    predictions: Any = run.predict(module, loader(2, 2))
    run.fit_loop.max_epochs = 3
    run.fit(module, loader(3, 2))
    run.validate(module, loader(2, 2), verbose=False)
    new_policy = getattr(used_strategy.options, "auto_wrap_policy", "auto")
    return {
        "losses": means(module.losses),
        "policy": new_policy is policy is options.get("auto_wrap_policy", "auto"),
        "elements": count_local_elements(sharded_by(used_strategy).root.parameters()),
        "predictions": torch.cat(predictions),
        "rows": 2 * BATCH // rank_context().shares(2),
    }


class SaveOnce(pl.Callback):
    """Saves at the end of the first epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def _train_averaged(
    strategy: str, tmp: str, world_size: int, path: str | None = None, resume: str | None = None
) -> dict[str, Tensor]:
    callbacks: list[Any] = [EMAWeightAveraging(decay=0.5)]
    if path:
        callbacks.append(SaveOnce(path))
    run = new_trainer(tmp, strategy, world_size, callbacks=callbacks, max_epochs=2)
    run.fit(Lit("sgd"), loader(2, world_size), loader(1, world_size), ckpt_path=resume)
    return full_state(run.strategy)


def _averaging_oracle(batches: list[tuple[Tensor, Tensor]], decay: float) -> dict[str, Tensor]:
    loop = Loop(None, oracle.sgd)
    average: dict[str, Tensor] = {}
    for x, y in batches:
        loop.step_on(x, y)
        state = loop.state()
        if average:
            average = {name: decay * average[name] + (1 - decay) * tensor for name, tensor in state.items()}
        else:
            average = state
    return average


def _count_reductions(strategy: str, tmp: str, batches: int, options: Mapping[str, Any]) -> tuple[int, int]:
    def under_trainer() -> None:
        fit(strategy, tmp, 2, batches, "sgd", options, {"accumulate_grad_batches": batches})

    def under_fabric() -> None:
        fabric_fit(strategy, 2, batches, "sgd", options, accumulate=batches)

    return count_collectives(under_trainer, "reduce_scatter"), count_collectives(under_fabric, "reduce_scatter")


def _step_without_reduction(strategy: str) -> tuple[str, dict[str, Tensor]]:
    """The error of a step before gradients were reduced, and the state after the next step, which has reduced them."""
    loop = Loop(strategy, oracle.sgd)
    ((x, y),) = loop.batches(1)

    def backward(is_accumulating: bool) -> None:
        with loop.unreduced(is_accumulating):
            loop.backward(loop.loss(x, y))

    backward(True)
    message = refusal(ShardingError, loop.optimizer.step)
    loop.optimizer.zero_grad()
    backward(True)
    backward(False)
    loop.step()
    return message, loop.state()


def _state_after_steps(passes_by_step: Sequence[int]) -> dict[str, Tensor]:
    """The state of one process after steps, each with the given number of backward passes."""
    loop = Loop(None, oracle.sgd)
    ((x, y),) = loop.batches(1)
    for passes in passes_by_step:
        for _ in range(passes):
            loop.backward(loop.loss(x, y))
        loop.step()
    return loop.state()


def _norm_after(strategy: str, enabled: bool) -> float:
    loop = Loop(strategy, oracle.sgd)
    ((x, y),) = loop.batches(1)
    with loop.unreduced(enabled):
        loop.backward(loop.loss(x, y))
    loop.backward(loop.loss(x, y))
    return float(loop.fabric.clip_gradients(loop.model, loop.optimizer, max_norm=1e9))


class WithoutLogging(Lit):
    """Does not call Lightning's ``self.log``, which torch 2.13 can't trace under any strategy."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


def _train_compiled(strategy: str, tmp: str, front_end: FrontEnd) -> list[float]:
    if front_end == "fabric":
        compiled_net = cast(nn.Module, torch.compile(oracle.new_net(), backend="eager"))
        loop = Loop(strategy, oracle.sgd, compiled_net)
        return [loop.step_on(x, y).item() for x, y in loop.whole_batches(3)]
    module = WithoutLogging("sgd")
    compiled: Any = torch.compile(module, backend="eager")
    new_trainer(tmp, strategy, 2).fit(compiled, loader(3, 2))
    return means(module.losses)


def _count_block_calls(strategy: str, tmp: str, options: dict[str, Any]) -> int:
    """The number of calls of blocks' layers in a step."""
    calls: list[nn.Module] = []
    module = Lit("sgd")
    for block in module.net.blocks:
        block.up.register_forward_hook(lambda layer, *_: calls.append(layer))
    new_trainer(tmp, strategy, 2, options).fit(module, loader(1, 2))
    return len(calls)


def _train_with_dropout(strategy: str, tmp: str, checkpointing: bool) -> Trained:
    options = {"activation_checkpointing_policy": {Block}} if checkpointing else {}
    with oracle.seeded(5):
        pl.seed_everything(5, verbose=False)
    return fit(strategy, tmp, 1, 3, "sgd", options, None, {"dropout": 0.5})


class BrokenElsewhereSuite(Clauses):
    """Each case raises, hangs or computes wrong numbers with a sharded strategy of Lightning 2.6."""

    @requires(Capability.CLIP_BY_NORM)
    def test_error_if_nonfinite_is_honoured(self, ranks: Ranks, tmp_path: Path) -> None:
        """Clipping must raise on a NaN norm, and ``error_if_nonfinite=False`` must turn that off."""
        for messages in ranks.run(2, _clip_nan_gradients, self.strategy, str(tmp_path)):
            for message in messages:
                assert_says(message, "total norm", "is nan", "error_if_nonfinite=False")

    @requires(Capability.CLIP_BY_NORM)
    def test_infinite_norm_sees_nan_of_another_rank(self, ranks: Ranks) -> None:
        """The infinity norm must be NaN on every rank if one rank's shard holds NaN."""
        for message in ranks.run(2, _infinite_norm, self.strategy):
            assert_says(message, "is nan")

    @pytest.mark.parametrize(
        "options",
        [{}, with_options({"auto_wrap_policy": None}), with_options({"auto_wrap_policy": {Block}})],
        ids=["as it is", "root alone", "blocks"],
    )
    def test_stages_in_any_order(self, ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
        """Fit, validate, test and predict must work in any order, and must not change the wrap policy."""
        first, _ = oracle.train_plain(3, oracle.momentum, net=oracle.new_net(width=WIDE))
        got = ranks.run(2, every_stage, self.strategy, str(tmp_path), options)
        for outcome in got:
            losses = outcome["losses"]
            assert losses[:3] == pytest.approx(first, abs=FP32_TOLERANCE)
            assert len(losses) == 9, f"{len(losses)} steps were trained instead of 9"
            assert outcome["policy"]
            assert outcome["predictions"].shape == (outcome["rows"], FEATURES)
        total = sum(p.numel() for p in oracle.new_net(width=WIDE).parameters())
        assert_sharded([outcome["elements"] for outcome in got], total)

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_weight_averaging(self, ranks: Ranks, tmp_path: Path) -> None:
        """``EMAWeightAveraging`` must give plain torch's averages, also after a resume on other numbers of ranks."""
        average = _averaging_oracle(oracle.global_batches(2) * 2, 0.5)
        want = {f"net.{name}": tensor for name, tensor in average.items()}
        tmp, path = str(tmp_path), str(tmp_path / "half")
        uninterrupted = ranks.run(2, _train_averaged, self.strategy, tmp, 2, path)
        resumed = ranks.run(2, _train_averaged, self.strategy, tmp, 2, None, path)
        elsewhere = ranks.run(3, _train_averaged, self.strategy, tmp, 3, None, path)
        for state in (*uninterrupted, *resumed, *elsewhere):
            assert_state_close(state, want)

    @requires(Capability.GRADIENT_ACCUMULATION)
    @on_ranks("processes")  # torch's profiler records the collectives of process groups only
    @pytest.mark.parametrize(
        "options", [{}, with_options({"sync_each_batch": True})], ids=["as it is", "sync_each_batch"]
    )
    def test_accumulation_skips_the_reduction(self, ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
        """Gradient accumulation must reduce once per step, or with ``sync_each_batch`` once per micro-batch."""
        tmp = str(tmp_path)
        one_batch = ranks.run(2, _count_reductions, self.strategy, tmp, 1, options)
        four_batches = ranks.run(2, _count_reductions, self.strategy, tmp, 4, options)
        times = 4 if options else 1
        for (trainer_of_one, fabric_of_one), accumulated in zip(one_batch, four_batches, strict=True):
            assert trainer_of_one > 0, "torch's profiler saw no reduce-scatter in a step under the Trainer"
            assert fabric_of_one > 0, "torch's profiler saw no reduce-scatter in a step under Fabric"
            message = f"reduce-scatters of four micro-batches under Trainer and Fabric: not {times} × those of one"
            assert accumulated == (times * trainer_of_one, times * fabric_of_one), message

    @requires(Capability.CLIP_BY_NORM)
    @pytest.mark.parametrize("enabled", [pytest.param(True, marks=requires(Capability.GRADIENT_ACCUMULATION)), False])
    def test_no_backward_sync_leaves_sync_on(self, ranks: Ranks, enabled: bool) -> None:
        """A backward pass after ``no_backward_sync`` must reduce the gradients of both passes."""
        loop = Loop(None, oracle.sgd)
        ((x, y),) = loop.batches(1)
        loop.backward(2 * loop.loss(x, y))
        want = nn.utils.get_total_norm([p.grad for p in loop.net.parameters() if p.grad is not None]).item()
        for norm in ranks.run(2, _norm_after, self.strategy, enabled):
            assert norm == pytest.approx(want, rel=FP32_TOLERANCE)

    @requires(Capability.GRADIENT_ACCUMULATION)
    def test_a_step_inside_an_accumulation(self, ranks: Ranks) -> None:
        """A step before gradients are reduced must use all ranks' gradients, or be refused until they are reduced."""
        for message, state in ranks.run(2, _step_without_reduction, self.strategy):
            if was_refused(message):
                assert_says(message, "while gradients of Net are not reduced", "enabled=is_accumulating")
            assert_state_close(state, _state_after_steps([2] if was_refused(message) else [1, 2]))

    @pytest.mark.parametrize("front_end", ["trainer", "fabric"])
    def test_compiled_module(self, ranks: Ranks, tmp_path: Path, front_end: FrontEnd) -> None:
        """A module compiled with ``torch.compile`` must train as the oracle does."""
        want, _ = oracle.train_plain(3, oracle.sgd)
        for losses in ranks.run(2, _train_compiled, self.strategy, str(tmp_path), front_end, timeout=240.0):
            assert losses == pytest.approx(want, abs=FP32_TOLERANCE)

    @requires(Capability.ACTIVATION_CHECKPOINTING)
    @pytest.mark.parametrize("options", [{}, with_options({"auto_wrap_policy": None})], ids=["as it is", "root alone"])
    def test_activation_checkpointing_needs_no_wrap_policy(
        self, ranks: Ranks, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        """Each checkpointed block must run once forward and once in the backward pass, whatever the wrap policy."""
        options = {**options, "activation_checkpointing_policy": {Block}}
        assert ranks.run(2, _count_block_calls, self.strategy, str(tmp_path), options) == [6, 6]

    @requires(Capability.ACTIVATION_CHECKPOINTING)
    def test_activation_checkpointing_repeats_dropout(self, ranks: Ranks, tmp_path: Path) -> None:
        """Recomputed blocks must use the same dropout masks: losses and weights must not change."""
        ((plain, state),) = ranks.run(1, _train_with_dropout, self.strategy, str(tmp_path), False)
        ((recomputed, recomputed_state),) = ranks.run(1, _train_with_dropout, self.strategy, str(tmp_path), True)
        assert recomputed == plain
        assert all(torch.equal(state[n], recomputed_state[n]) for n in state)
