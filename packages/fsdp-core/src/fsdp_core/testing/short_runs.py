"""Short runs of a test's own modules: on ranks, and in one process that shards nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import FP32_TOLERANCE, Trained
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import Lit, loader, means, new_fabric, new_trainer

__all__ = [
    "assert_close_by_name",
    "assert_fits_as_plain",
    "assert_trained_alike",
    "fit_module",
    "run_steps",
    "set_up",
]


def set_up(
    strategy: str,
    options: Mapping[str, Any] | None = None,
    *,
    net: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = oracle.sgd,
    world_size: int = 2,
    precision: Any = None,
) -> tuple[Fabric, Any, Any, Any]:
    """Set a net and its optimizer up under Fabric, on a rank.

    Args:
        strategy: A strategy's name.
        options: The strategy's options.
        net: The module; the oracle's net when ``None``.
        optimizer: Builds the optimizer over it.
        world_size: The number of ranks.
        precision: Lightning's name of the precision.

    Returns:
        The Fabric, the net, and what ``fabric.setup`` has returned for the net and for its optimizer.
    """
    fabric = new_fabric(strategy, world_size, options, precision)
    net = oracle.new_net() if net is None else net
    return fabric, net, *fabric.setup(net, optimizer(net))


def run_steps(
    model: Callable[[Tensor], Any],
    optimizer: Any,
    batches: Iterable[tuple[Tensor, Tensor]],
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> list[Tensor]:
    """Step once for each batch, with the mean squared error.

    Args:
        model: What is called with the inputs.
        optimizer: Steps after each batch.
        batches: Inputs and targets, of this process or of this rank.
        backward: Fabric's method, on a rank.

    Returns:
        The losses.
    """
    losses = []
    for x, y in batches:
        loss = mse_loss(model(x), y)
        losses.append(loss.detach())
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def fit_module(
    make_module: Callable[[], Lit],
    strategy: str,
    tmp: str,
    world_size: int,
    steps: int,
    options: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    validates: bool = False,
) -> Trained:
    """Fit a module under the Trainer, and return the losses that it has kept, and its full state.

    Args:
        make_module: Builds the module.
        strategy: A strategy's name; ``"auto"`` shards nothing, in one process.
        tmp: The folder that the Trainer may write to.
        world_size: The number of ranks.
        steps: The number of batches.
        options: The strategy's options.
        trainer: Arguments of the Trainer.
        validates: Whether a batch is validated, too.
    """
    module = make_module()
    run = new_trainer(tmp, strategy, world_size, options, **(trainer or {}))
    run.fit(module, loader(steps, world_size), loader(1, world_size) if validates else None)
    state = module.state_dict() if strategy == "auto" else full_state(run.strategy)
    return means(module.losses), {name: tensor.detach().clone() for name, tensor in state.items()}


def assert_fits_as_plain(
    ranks: Ranks,
    tmp_path: Path,
    strategy: str,
    make_module: Callable[[], Lit],
    *,
    steps: int = 3,
    world_size: int = 2,
    options: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    validates: bool = False,
    tolerance: float = FP32_TOLERANCE,
) -> None:
    """Check that a module is fitted on ranks as in one process: losses and weights.

    Args:
        ranks: The ranks.
        tmp_path: A folder.
        strategy: The strategy's name.
        make_module: Builds the module; ranks must be able to unpickle it.
        steps: The number of batches.
        world_size: The number of ranks.
        options: The strategy's options.
        trainer: Arguments of the Trainer of the ranks.
        validates: Whether a batch is validated, too.
        tolerance: The tolerance of each loss and element.
    """
    want = fit_module(make_module, "auto", str(tmp_path), 1, steps, validates=validates)
    arguments = (make_module, strategy, str(tmp_path), world_size, steps, options, trainer, validates)
    assert_trained_alike(ranks.run(world_size, fit_module, *arguments), want, tolerance)


def assert_trained_alike(got: Iterable[Trained], want: Trained, tolerance: float = FP32_TOLERANCE) -> None:
    """Check losses and weights of each rank.

    Args:
        got: The losses and weights of each rank.
        want: Those of one process.
        tolerance: The tolerance of each loss and element.
    """
    for losses, state in got:
        assert losses == pytest.approx(want[0], abs=tolerance)
        assert losses == pytest.approx(want[0], rel=tolerance)
        assert_close_by_name(state, want[1], tolerance)


def assert_close_by_name(
    state: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float = FP32_TOLERANCE
) -> None:
    """Check that two states have the same names, and close values."""
    assert state.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(state[name], tensor, atol=tolerance, rtol=tolerance, msg=name)
