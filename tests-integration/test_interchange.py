"""A checkpoint of one backend goes on under another, on other numbers of ranks, as if nothing had happened."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fsdp_core import AccumulatedGradients, resolve
from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import RankPool
from fsdp_core.testing.oracle import FP32_TOLERANCE, adamw_groups, new_net, train_plain
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.short_runs import run_steps
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.training import Lit, loader, means, new_fabric, new_trainer

STEPS = 3

State = tuple[dict[str, Tensor], dict[str, dict[str, Any]]]

#: Each way from a strategy and its options to another.
WAYS = [
    ("fsdp_native", {}, "fsdp2", {}),
    ("fsdp2", {}, "fsdp_native", {}),
    ("fsdp_native", {"sharding_strategy": "NO_SHARD"}, "fsdp2", {"reshard_after_forward": False}),
    ("fsdp2", {"auto_wrap_policy": None}, "fsdp_native", {"sharding_strategy": "SHARD_GRAD_OP"}),
    ("fsdp_native", {"state_dict_type": "full"}, "fsdp2", {}),
    ("fsdp2", {"state_dict_type": "full"}, "fsdp_native", {}),
]
RANKS = [(1, 2), (2, 1), (2, 3), (3, 2), (4, 3), (3, 4)]


class TwoEpochs(Lit):
    """Sees the oracle's batches in its order: the first half in the first epoch, the second in the second."""

    def __init__(self, world_size: int) -> None:
        super().__init__("adamw_groups")
        self.world_size = world_size

    def train_dataloader(self) -> Any:
        whole = loader(2 * STEPS, self.world_size)
        first = self.trainer.current_epoch * STEPS
        batches: Any = list(islice(whole, first, first + STEPS))
        return DataLoader(batches, batch_size=None)


def train(
    strategy: str, options: dict[str, Any], world_size: int, tmp: str, epochs: int, load: str | None, save: str | None
) -> tuple[list[float], State]:
    module = TwoEpochs(world_size)
    run = new_trainer(
        tmp,
        strategy,
        world_size,
        options,
        max_epochs=epochs,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
    )
    run.fit(module, ckpt_path=load)
    if save is not None:
        run.save_checkpoint(save)
    return means(module.losses), (full_state(run.strategy), full_optimizer_state(run.strategy, run.optimizers[0]))


def train_by_fabric(
    strategy: str, options: dict[str, Any], world_size: int, steps: tuple[int, int], load: str | None, save: str | None
) -> tuple[list[float], State]:
    fabric = new_fabric(strategy, world_size, options)
    module = Lit("adamw_groups")
    model, optimizer = fabric.setup(module.net, adamw_groups(module.net))
    state = {"model": model, "optimizer": optimizer, "at": 0}
    if load is not None:
        fabric.load(load, state)
        assert state["at"] == steps[0]
    losses = run_steps(model, optimizer, islice(loader(2 * STEPS, world_size), *steps), fabric.backward)
    if save is not None:
        fabric.save(save, {**state, "at": steps[1]})
    return means(losses), (full_state(fabric.strategy), full_optimizer_state(fabric.strategy, optimizer))


def assert_bit_equal(got: State, want: State) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert mine.keys() == theirs.keys()
    for name, tensor in want[0].items():
        assert torch.equal(got[0][name], tensor), name
    for name, values in want[1].items():
        assert got[1][name].keys() == values.keys()
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(got[1][name][key]), torch.as_tensor(value)), f"{key} of {name}"


@pytest.mark.drawn
@pytest.mark.parametrize(("way", "worlds"), list(zip(WAYS, RANKS, strict=True)), ids=str)
def test_training_goes_on_under_another_strategy(ranks: RankPool, tmp_path: Path, way: Any, worlds: Any) -> None:
    (first, options, second, other_options), (before, after) = way, worlds
    path, again = str(tmp_path / "first"), str(tmp_path / "second")
    want_losses, want_state = train_plain(2 * STEPS, adamw_groups)
    saved = ranks.run(before, train, first, options, before, str(tmp_path), 1, None, path)
    for losses, _ in saved:
        assert losses == pytest.approx(want_losses[:STEPS], abs=FP32_TOLERANCE)
    # one epoch is all there is to train, so that what was loaded is what is looked at and saved again
    for _, state in ranks.run(after, train, second, other_options, after, str(tmp_path), 1, path, again):
        assert_bit_equal(state, saved[0][1])
    for _, state in ranks.run(before, train, first, options, before, str(tmp_path), 1, again, None):
        assert_bit_equal(state, saved[0][1])
    for losses, (state, _) in ranks.run(after, train, second, other_options, after, str(tmp_path), 2, path, None):
        assert losses == pytest.approx(want_losses[STEPS:], abs=FP32_TOLERANCE)
        for name, tensor in want_state.items():
            torch.testing.assert_close(state[f"net.{name}"], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)


@pytest.mark.drawn
@pytest.mark.parametrize(("first", "second"), [("fsdp_native", "fsdp2"), ("fsdp2", "fsdp_native")])
def test_a_fabric_loop_goes_on_under_another_strategy(ranks: RankPool, tmp_path: Path, first: str, second: str) -> None:
    path = str(tmp_path / "saved")
    want_losses, _ = train_plain(2 * STEPS, adamw_groups)
    saved = ranks.run(2, train_by_fabric, first, {}, 2, (0, STEPS), None, path)
    for _, state in ranks.run(3, train_by_fabric, second, {}, 3, (STEPS, STEPS), path, None):
        assert_bit_equal(state, saved[0][1])
    for losses, _ in ranks.run(3, train_by_fabric, second, {}, 3, (STEPS, 2 * STEPS), path, None):
        assert losses == pytest.approx(want_losses[STEPS:], abs=FP32_TOLERANCE)


def accumulate(
    strategy: str, world_size: int, batches: tuple[int, int], load: str | None, save: str | None
) -> dict[str, Tensor]:
    """Add up the gradients of some batches, and save them, or take the step."""
    fabric = new_fabric(strategy, world_size)
    net = new_net()
    model, optimizer = fabric.setup(net, adamw_groups(net))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "gradients": AccumulatedGradients(model)}
    if load is not None:
        fabric.load(load, state)
    for i, (x, y) in enumerate(loader(STEPS, world_size)):
        if batches[0] <= i < batches[1]:
            with fabric.no_backward_sync(model, enabled=i < STEPS - 1):
                fabric.backward(torch.nn.functional.mse_loss(model(x), y))
    if save is None:
        optimizer.step()
    else:
        fabric.save(save, state)
    return full_state(fabric.strategy)


@pytest.mark.drawn
@pytest.mark.parametrize(("first", "second"), [("fsdp_native", "fsdp2"), ("fsdp2", "fsdp_native")])
@pytest.mark.parametrize("after", [2, 3])
def test_a_step_is_finished_under_another_strategy(
    ranks: RankPool, tmp_path: Path, first: str, second: str, after: int
) -> None:
    """What the micro-batches before the checkpoint have accumulated is not lost."""
    path, want = str(tmp_path / "saved"), new_net()
    optimizer = adamw_groups(want)
    for x, y in loader(STEPS, 1):
        torch.nn.functional.mse_loss(want(x), y).backward()
    optimizer.step()
    ranks.run(2, accumulate, first, 2, (0, 2), None, path)
    for state in ranks.run(after, accumulate, second, after, (2, STEPS), path, None):
        for name, tensor in want.state_dict().items():
            torch.testing.assert_close(state[name], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("strategy", "option", "other"),
    [
        ("fsdp_native", "reshard_after_forward", "fsdp2"),
        ("fsdp_native", "mp_policy", "fsdp2"),
        ("fsdp2", "sharding_strategy", "fsdp_native"),
        ("fsdp2", "mixed_precision", "fsdp_native"),
    ],
)
@pytest.mark.parametrize("front_end", ["trainer", "fabric"])
def test_option_of_the_other_backend(front_end: FrontEnd, strategy: str, option: str, other: str) -> None:
    """Whoever changes the name of the strategy and leaves an option is told whose it is."""
    made = resolve(strategy, front_end)
    assert_says(refusal(UnsupportedCapabilityError, lambda: made(**{option: None})), f"{strategy!r}", option, other)
