"""Manual optimization: backward passes and steps inside a training step, on two ranks and with SPMD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import spmd_runs
from fsdp_core import load_state_dict
from fsdp_core.testing import training
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.suite.training.loops import Gan
from fsdp_core.testing.training import Lit
from launching import STEPS, Launching, LaunchingSPMD, loader, means, seen, trainer


class _ByHand(Lit):
    def __init__(self) -> None:
        super().__init__("momentum")
        self.automatic_optimization = False

    def step(self) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


class PenaltyBetween(_ByHand):
    """A gradient penalty whose graph is recorded between two calls that are trained too."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        first = self(x)
        mixed = (0.3 * x + 0.7 * x.flip(1)).requires_grad_(True)
        (gradient,) = torch.autograd.grad(self(mixed).sum(), mixed, create_graph=True)
        loss = mse_loss(first, y) + mse_loss(self(x.flip(1)), y) + (gradient.norm(dim=1) - 1).square().mean()
        self.losses.append(loss.detach())
        self.manual_backward(loss)
        self.step()


class TwoLosses(_ByHand):
    """Two backward passes through one forward pass."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.manual_backward(0.25 * loss, retain_graph=True)
        self.manual_backward(0.75 * loss)
        self.step()


class TwoForwards(_ByHand):
    """A forward and a backward pass for each half of a batch, and one step for both."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        halves: list[Tensor] = []
        for i in range(2):
            halves.append(mse_loss(self(batch[0][i::2]), batch[1][i::2]) / 2)
            self.manual_backward(halves[-1])
        self.losses.append((halves[0] + halves[1]).detach())
        self.step()


class Accumulates(_ByHand):
    """A step for two batches."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.step()


class Clips(_ByHand):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.manual_backward(loss)
        optimizer: Any = self.optimizers()
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.step()


class OfItsOwn(_ByHand):
    """Looks at a parameter of its own after the step, in the same training step."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = mse_loss(self(batch[0]) + self.shift, batch[1])
        self.losses.append(loss.detach())
        self.manual_backward(loss)
        self.step()
        self.losses.append(self.shift.detach().clone())


def assert_as_one_process(result: dict[str, Any], kind: type[Any], folder: Path) -> None:
    plain: Any = kind()
    training.new_trainer(folder, "auto").fit(plain, training.loader(STEPS, 1))
    assert result["losses"] == pytest.approx([loss.item() for loss in plain.losses], abs=FP32_TOLERANCE)
    assert list(result["weights"]) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(result["weights"][name], value, atol=FP32_TOLERANCE, rtol=0)


def on_ranks(path: Path, kind: type[Any], options: dict[str, Any] | None) -> dict[str, Any]:
    """What a module has seen, as the mean over ranks, and its weights."""

    def train_dataloader(self: Any) -> DataLoader[Any]:
        return loader(self.trainer.global_rank, STEPS)

    def on_train_end(self: Any) -> None:
        seen.setdefault(str(path), {})[self.trainer.global_rank] = [loss.item() for loss in self.losses]
        self.trainer.save_checkpoint(str(path))

    hooks = {"train_dataloader": train_dataloader, "on_train_end": on_train_end}
    L.seed_everything(3, verbose=False)
    trainer(path.parent, options).fit(type(kind.__name__, (kind,), hooks)())
    return {"losses": means(seen[str(path)].values()), "weights": load_state_dict(path)}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (TwoLosses, None),
        (TwoLosses, {"reshard_after_forward": False}),
        (TwoForwards, None),
        (Accumulates, None),
        (Clips, {"reduce_scatter_bucket_size_mb": 1}),
        (Clips, {"flatten_parameters": True}),
        (Gan, None),
        (OfItsOwn, None),
    ],
)
def test_ranks_train_as_one_process_does(
    launching: Launching, tmp_path: Path, kind: type[Any], options: dict[str, Any] | None
) -> None:
    assert_as_one_process(launching.call(2, on_ranks, tmp_path / "run", kind, options), kind, tmp_path)


@pytest.mark.everything
def test_a_recorded_graph_is_run_in_any_order(launching: Launching, tmp_path: Path) -> None:
    """It is run by when its nodes were recorded, which threads count by themselves: a later fit's in another order."""
    for number in range(2):
        result = launching.call(2, on_ranks, tmp_path / str(number), PenaltyBetween, None)
        assert_as_one_process(result, PenaltyBetween, tmp_path)


def under_spmd(folder: Path, kind: type[Any]) -> dict[str, Any]:
    module = kind()
    stage = spmd_runs.new_trainer(str(folder))
    stage.fit(module, training.loader(STEPS, 1))
    weights = spmd_runs.whole_state(stage.strategy, module)
    return {"losses": [loss.item() for loss in module.losses], "weights": weights}


@pytest.mark.parametrize("kind", [Accumulates, Clips, OfItsOwn, TwoForwards, TwoLosses])
def test_spmd_trains_as_one_process_does(spmd: LaunchingSPMD, tmp_path: Path, kind: type[Any]) -> None:
    assert_as_one_process(spmd.call(4, under_spmd, tmp_path, kind), kind, tmp_path)
