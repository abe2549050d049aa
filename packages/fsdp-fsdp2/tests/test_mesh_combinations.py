"""What was found by combining options on meshes: each by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from fsdp2_runs import set_up
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.modules.sharded_modules import Unfreezing
from fsdp_core.testing.training import means, new_fabric, new_trainer, scaled_precision, whole_batches
from mesh_runs import MESHES, OwnLoader, assert_combination, own_part

pytestmark = pytest.mark.everything


@pytest.mark.parametrize("clip", ["nothing", "norm", "value"])
def test_manual_optimization_on_a_mesh(ranks: RankPool, tmp_path: Path, clip: str) -> None:
    """A gathered parameter that tensor parallelism has divided is a DTensor: it could not show its shard's gradient."""
    assert_combination(ranks, tmp_path, mesh="shard 2 x tensor 2", front_end="by hand", accumulate="2", clip=clip)


def test_module_in_fp64_under_fabric(ranks: RankPool, tmp_path: Path) -> None:
    """Fabric rounded what a model in fp64 returned to fp32."""
    assert_combination(ranks, tmp_path, mesh="replicate 2 x tensor 2", front_end="fabric", precision="double")


@pytest.mark.parametrize("front_end", ["fabric", "by hand"])
def test_two_optimizers_of_which_both_are_clipped_before_steps_in_fp16(
    ranks: RankPool, tmp_path: Path, front_end: str
) -> None:
    """The first step's ``GradScaler.update()`` made the second divide its gradients by the scale once more."""
    assert_combination(ranks, tmp_path, front_end=front_end, precision="16-mixed", optimizer="two", clip="norm")


def test_replicas_that_accumulate_offloaded_gradients(ranks: RankPool, tmp_path: Path) -> None:
    options = {"accumulate": "2", "cpu_offload": "True", "optimizer": "adamw", "resume": "amid a step"}
    assert_combination(
        ranks, tmp_path, mesh="replicate 2 x shard 2", resumed_on="shard 2 x tensor 2", clip="value", **options
    )


class Thawed(OwnLoader):
    """Its optimizer gets the parameters that are trainable at the beginning."""

    def __init__(self) -> None:
        super().__init__("sgd", width=8)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def thawed_under_half_a_plan(tmp: str) -> list[float]:
    module = Thawed()
    own = {f"net.blocks.*.{name}": style() for name, style in (("up", ColwiseParallel), ("down", RowwiseParallel))}
    options = {"tensor_parallel_size": 2, "tp_plan": own}
    new_trainer(tmp, "fsdp2", 4, options, max_epochs=2, callbacks=[Unfreezing()]).fit(module)
    return means(module.losses)


def test_finetuning_callback_under_a_plan_for_some_layers(ranks: RankPool, tmp_path: Path) -> None:
    """Lightning compares what it adds with what the optimizer holds: DTensors of several meshes, and plain tensors."""
    module = Thawed()
    run = new_trainer(tmp_path, "auto", max_epochs=2, callbacks=[Unfreezing()])
    run.fit(module, DataLoader(oracle.dataset(oracle.BATCH * module.steps), batch_size=oracle.BATCH))
    want = [loss.item() for loss in module.losses]
    for losses in ranks.run(4, thawed_under_half_a_plan, str(tmp_path)):
        assert losses == pytest.approx(want, abs=oracle.FP32_TOLERANCE)


class Counting(OwnLoader):
    """Logs torchmetrics' objects: how many samples there were, and the mean of their losses."""

    def __init__(self) -> None:
        super().__init__("sgd", width=8)
        self.samples, self.mean = SumMetric(), MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.samples(len(batch[0]))
        self.mean(loss.detach())
        self.log("samples", self.samples, on_epoch=True, on_step=False)
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        return loss

    def on_train_start(self) -> None:
        self.late = SumMetric()

    def on_train_batch_end(self, outputs: Any, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.late.update(len(batch[0]))

    def on_train_epoch_end(self) -> None:
        self.found = float(self.late.compute())


def counted_on(mesh: str, tmp: str) -> dict[str, float]:
    module = Counting()
    run = new_trainer(tmp, "fsdp2", MESHES[mesh].ranks, MESHES[mesh].options_for("net."))
    run.fit(module)
    return {"late": module.found, **{name: float(run.callback_metrics[name]) for name in ("samples", "mean")}}


@pytest.mark.parametrize("mesh", ["shard 2 x tensor 2", "tensor 2", "replicate 2 x shard 2"])
def test_metrics_count_each_sample_once(ranks: RankPool, tmp_path: Path, mesh: str) -> None:
    """torchmetrics gathers states from all ranks: tensor-parallel peers, which see one batch, counted twice."""
    losses, _ = oracle.train_plain(4, oracle.sgd, net=oracle.new_net(width=8))
    samples = 4 * oracle.BATCH
    for got in ranks.run(MESHES[mesh].ranks, counted_on, mesh, str(tmp_path)):
        assert got == pytest.approx({"late": samples, "samples": samples, "mean": sum(losses) / 4}, rel=1e-5)


def averaged_on(mesh: str, tmp: str) -> dict[str, Tensor]:
    module = OwnLoader("sgd", width=8)
    average = WeightAveraging(avg_fn=get_ema_avg_fn(0.5))
    run = new_trainer(tmp, "fsdp2", MESHES[mesh].ranks, MESHES[mesh].options_for("net."), callbacks=[average])
    run.fit(module)
    return {name.removeprefix("net."): value for name, value in full_state(run.strategy).items()}


@pytest.mark.parametrize("mesh", ["shard 2 x tensor 2", "replicate 2 x shard 2"])
def test_weights_are_averaged_on_a_mesh(ranks: RankPool, tmp_path: Path, mesh: str) -> None:
    net = oracle.new_net(width=8)
    average = torch.optim.swa_utils.AveragedModel(net, avg_fn=get_ema_avg_fn(0.5))
    optimizer = oracle.sgd(net)
    for x, y in oracle.global_batches(4):
        optimizer.zero_grad()
        mse_loss(net(x), y).backward()
        optimizer.step()
        average.update_parameters(net)
    want = {name: value for name, value in average.module.state_dict().items() if name in dict(net.named_parameters())}
    for got in ranks.run(MESHES[mesh].ranks, averaged_on, mesh, str(tmp_path)):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=oracle.FP32_TOLERANCE, atol=oracle.FP32_TOLERANCE)


def scaled_on(mesh: str) -> tuple[list[float], dict[str, Tensor]]:
    plugin = scaled_precision(MixedPrecision, 2.0**8)
    fabric = new_fabric("fsdp2", MESHES[mesh].ranks, MESHES[mesh].options_for(""), plugin)
    net = oracle.new_net(width=8)
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    scales = []
    for index, batch in enumerate(whole_batches(fabric, 3)):
        x, y = own_part(fabric, batch)
        loss = mse_loss(model(x), y)
        fabric.backward(loss * (torch.inf if index == 1 and fabric.global_rank == fabric.world_size - 1 else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        scales.append(plugin.scaler.get_scale())
    return scales, full_state(fabric.strategy)


def test_overflow_of_one_rank_skips_the_step_on_a_mesh(ranks: RankPool) -> None:
    got = ranks.run(4, scaled_on, "replicate 2 x tensor 2")
    for scales, state in got:
        assert scales == [2.0**8, 2.0**7, 2.0**7]
        torch.testing.assert_close(state, got[0][1], rtol=0, atol=0)
        assert all(bool(value.isfinite().all()) for value in state.values())


def given_up_on(mesh: str) -> dict[str, Tensor]:
    fabric, _, model, optimizer = set_up(
        MESHES[mesh].options_for(""), net=oracle.new_net(width=8), world_size=MESHES[mesh].ranks, precision="16-mixed"
    )
    for x, y in whole_batches(fabric, 2):
        fabric.backward(mse_loss(model(x), y))
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.zero_grad()  # a step that is not taken
    fabric.backward(mse_loss(model(x), y))
    fabric.clip_gradients(model, optimizer, max_norm=0.1)
    optimizer.step()
    return full_state(fabric.strategy)


def test_step_given_up_after_clipping_in_fp16(ranks: RankPool) -> None:
    """What was unscaled and then zeroed is unscaled anew: the next step took gradients that were scaled still."""
    net = oracle.new_net(width=8)
    (_, (x, y)), optimizer = oracle.global_batches(2), oracle.sgd(net)
    mse_loss(net(x), y).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    for got in ranks.run(2, given_up_on, "shard 2"):
        for name, value in net.state_dict().items():
            torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-3)
