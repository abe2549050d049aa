"""What ranks on XLA's CPU devices log, reduce, send each other and bring back, against one process of plain torch."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import launching as runs
from fsdp_core.errors import CheckpointValueError
from fsdp_core.testing.oracle import (
    BATCH,
    FEATURES,
    FP32_TOLERANCE,
    dataset,
    global_batches,
    momentum,
    new_net,
    sgd,
    train_plain,
)
from fsdp_core.testing.training import Lit
from launching import Launching, devices, launch

STEPS = 3


class Module(Lit):
    """The suite's module with its data, shared out between ranks."""

    def train_dataloader(self) -> DataLoader[Any]:
        return runs.loader(self.trainer.global_rank, STEPS)

    def val_dataloader(self) -> DataLoader[Any]:
        return runs.loader(self.trainer.global_rank, 2)

    test_dataloader = val_dataloader


def trainer(folder: Path, **kwargs: Any) -> L.Trainer:
    return runs.trainer(folder, num_sanity_val_steps=0, **kwargs)


def logged(folder: Path) -> Any:
    """With ``logger=True``, as it is by default: a fit, and a test of its checkpoint."""
    saves = ModelCheckpoint(monitor="loss", save_top_k=2, every_n_train_steps=1)
    stage = trainer(folder, logger=True, enable_checkpointing=True, callbacks=[saves], log_every_n_steps=1)
    module = Module()
    stage.fit(module)
    told = {
        "global_step": stage.global_step,
        "current_epoch": stage.current_epoch,
        "logged": {name: value.item() for name, value in stage.logged_metrics.items()},
        "best": {Path(path).name: value.item() for path, value in saves.best_k_models.items()},
        "folder": stage.log_dir,
    }
    stage.test(module, ckpt_path="best", verbose=False)
    with open(f"{stage.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return {
        **told,
        "folders": [str(one) for one in (folder / "lightning_logs").iterdir()],
        "losses": [float(row["loss"]) for row in rows if row["loss"]],
        "test": [[int(row["step"]), float(row["test_loss"])] for row in rows if row["test_loss"]],
    }


@pytest.fixture(scope="module")
def of_a_logger(launching: Launching, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = launching.call(2, logged, tmp_path_factory.mktemp("logged"))
    return found


def test_lightnings_logger_writes_each_steps_loss_once(of_a_logger: dict[str, Any]) -> None:
    result = of_a_logger
    assert len(result["folders"]) == 1
    assert result["losses"] == pytest.approx(train_plain(STEPS, sgd)[0], abs=FP32_TOLERANCE)


def test_the_trainer_that_started_ranks_knows_how_far_they_came(of_a_logger: dict[str, Any]) -> None:
    result, losses = of_a_logger, train_plain(STEPS, sgd)[0]
    assert (result["global_step"], result["current_epoch"]) == (STEPS, 1)
    assert result["logged"] == {"loss": pytest.approx(losses[-1], abs=FP32_TOLERANCE)}
    by_loss = sorted(range(STEPS), key=losses.__getitem__)[:2]
    assert sorted(result["best"]) == sorted(f"epoch=0-step={step + 1}.ckpt" for step in by_loss)
    assert result["folders"] == [result["folder"]]  # and the test that followed has gone on with the same file
    assert [step for step, _ in result["test"]] == [STEPS]


def reduced_loss() -> Any:
    """Gradients of a loss whose mean over ranks was asked for before the backward pass, without ``detach()``."""

    def job(fabric: L.Fabric) -> Any:
        with fabric.init_module():
            net = new_net()
        net = fabric.setup_module(net)
        x = torch.full((2, FEATURES), 1.0 + fabric.global_rank).to(fabric.device)
        norms = []
        for reduces in (False, True):
            loss = net(x).square().mean()
            mean = fabric.all_reduce(loss) if reduces else loss
            told = mean.item()
            fabric.backward(loss)
            norms.append(sum(p.grad.abs().sum().item() for p in net.parameters() if p.grad is not None))
            net.zero_grad()
        return {"norms": norms, "means": fabric.all_gather(torch.tensor(told)).tolist()}

    return launch(job)


def test_a_reduced_loss_still_gives_its_gradients(launching: Launching) -> None:
    result = launching.call(2, reduced_loss)
    plain, reduced = result["norms"]
    assert reduced == plain > 0
    assert result["means"][0] == result["means"][1]


def broadcast() -> Any:
    """A tensor of the device, alone and in a dict, which waits for a collective of all ranks."""

    def job(fabric: L.Fabric) -> Any:
        net = nn.Linear(2, 2, bias=False)
        nn.init.ones_(net.weight)
        mine = fabric.setup_module(net)(torch.full((1, 2), 1.0 + fabric.global_rank).to(fabric.device)).detach()
        sent = [fabric.broadcast(mine, src=1), fabric.broadcast({"x": [mine]})["x"][0]]
        alone = fabric.broadcast(mine if fabric.global_rank == 0 else None)
        on = [str(one.device) == str(fabric.device) for one in (*sent, alone)]
        add = [(one + mine).sum().item() for one in sent]  # which XLA refuses for tensors of two devices
        values = [[one.tolist() for one in (*sent, alone)], on, add]
        return fabric.strategy.runtime.gather_objects(values)

    return launch(job)


def test_a_broadcast_tensor_is_on_the_receivers_device(launching: Launching) -> None:
    """Rank 0's row is 2 in both places, rank 1's is 4; in turn rank 1's was sent, rank 0's, and rank 0's again."""
    for rank, (values, on_own_device, sums) in enumerate(launching.call(2, broadcast)):
        assert values == [[[4.0, 4.0]], [[2.0, 2.0]], [[2.0, 2.0]]]
        assert on_own_device == [True, True, True]
        assert sums == [[12.0, 8.0], [16.0, 12.0]][rank]


class Measured(Module):
    """Logs metrics of torchmetrics: of one state, of a state for each class, and of a list of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.more = torchmetrics.MetricCollection(
            [torchmetrics.ConfusionMatrix(task="multiclass", num_classes=FEATURES)]
        )
        self.all = torchmetrics.CatMetric()
        self.seen: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        rows = x.sum(1)
        self.mean.update(rows)
        self.all.update(rows)
        self.more.update(x.argmax(1), y.argmax(1))
        self.log("mean", self.mean)
        self.log("own", rows.mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append([self.more.compute()["MulticlassConfusionMatrix"].tolist(), self.all.compute().sum().item()])
        self.more.reset()
        self.all.reset()

    def on_train_end(self) -> None:
        self.trainer.callback_metrics["mine"] = torch.tensor(7.0)
        told = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        SEEN.setdefault("measured", []).append({"seen": self.seen, "metrics": told})


#: What ranks have seen: they are threads, and their modules copies.
SEEN: dict[str, list[Any]] = {}


def measured(folder: Path) -> Any:
    SEEN.clear()
    stage = trainer(folder, max_epochs=2, limit_val_batches=1.0)
    stage.fit(Measured())
    told = {name: value.item() for name, value in stage.callback_metrics.items()}
    return {"ranks": SEEN["measured"], "told": told}


@pytest.fixture(scope="module")
def of_metrics(launching: Launching, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = launching.call(2, measured, tmp_path_factory.mktemp("measured"))
    return found


def test_metrics_of_torchmetrics_are_those_of_all_ranks(of_metrics: dict[str, Any]) -> None:
    x, y = (torch.stack(one) for one in zip(*dataset(2 * BATCH), strict=True))
    confusion = torch.zeros(FEATURES, FEATURES, dtype=torch.int64)
    for given, wanted in zip(x.argmax(1), y.argmax(1), strict=True):
        confusion[wanted, given] += 1
    for rank in of_metrics["ranks"]:
        assert rank["metrics"]["mean"] == pytest.approx(x.sum(1).mean().item(), abs=FP32_TOLERANCE)
        assert len(rank["seen"]) == 2
        for counts, total in rank["seen"]:  # of two epochs, of which the second goes on with the same metrics
            assert counts == confusion.tolist()
            assert total == pytest.approx(x.sum().item(), abs=FP32_TOLERANCE)


def test_what_is_written_to_callback_metrics_stays_there(of_metrics: dict[str, Any]) -> None:
    result = of_metrics
    assert [rank["metrics"]["mine"] for rank in result["ranks"]] == [7.0, 7.0]
    assert result["told"] == result["ranks"][0]["metrics"]


def kept_masks() -> Any:
    """What dropout keeps on each rank after ``fabric.seed_everything`` there."""

    def job(fabric: L.Fabric, seeds: tuple[int, ...]) -> Any:
        seed = seeds[fabric.global_rank]
        torch.manual_seed(seed) if seed < 0 else fabric.seed_everything(seed, verbose=False)
        kept = nn.Dropout(0.5)(torch.ones(64, device=fabric.device))
        return fabric.all_gather(kept).tolist()

    asked = {"0, 1": (0, 1), "again": (0, 1), "other way round": (1, 0), "far": (-1, 2**32 - 1)}
    fabric = L.Fabric(strategy="xla_fsdp", devices=devices())
    return {name: fabric.launch(job, seeds) for name, seeds in asked.items()}


def test_seed_everything_on_a_rank_seeds_its_device(launching: Launching) -> None:
    masks = launching.call(2, kept_masks)
    assert masks["again"] == masks["0, 1"]
    assert masks["other way round"] == masks["0, 1"][::-1]
    assert len({str(mask) for masks in (masks["0, 1"], masks["far"]) for mask in masks}) == 4


def test_seed_everything_seeds_the_device_of_a_single_rank(launching: Launching) -> None:
    masks = launching.call(1, kept_masks)
    assert masks["again"] == masks["0, 1"] != masks["other way round"]


def saved_from_the_device(folder: Path) -> Any:
    """Tensors of the device beside the model, and a parameter's shard, which is refused."""

    def job(fabric: L.Fabric) -> Any:
        net = new_net()
        model, optimizer = fabric.setup(net, momentum(net))
        for x, y in global_batches(1):
            fabric.backward(mse_loss(model(x.to(fabric.device)), y.to(fabric.device)))
            optimizer.step()
        scale, step = torch.tensor([2.0, 3.0]).to(fabric.device), torch.tensor(3).to(fabric.device)
        whole = {"model": model, "optimizer": optimizer}
        fabric.save(folder / "scaled", {**whole, "scale": scale, "more": [step]})
        rest = fabric.load(folder / "scaled", whole)
        refused = []
        parameter = next(model.parameters())
        held = optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"]
        for shard in (parameter, parameter.detach(), held):
            try:
                fabric.save(folder / "refused", {**whole, "shard": shard})
            except CheckpointValueError as error:
                refused.append(str(error))
        return {"scale": rest["scale"].tolist(), "more": rest["more"][0].item(), "refused": refused}

    return launch(job)


@pytest.fixture(scope="module")
def of_the_device(launching: Launching, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = launching.call(2, saved_from_the_device, tmp_path_factory.mktemp("saved"))
    return found


def test_a_tensor_of_the_device_is_saved_beside_the_model(of_the_device: dict[str, Any]) -> None:
    result = of_the_device
    assert (result["scale"], result["more"]) == ([2.0, 3.0], 3)


def test_a_shard_of_the_device_is_not_saved_as_a_whole_tensor(of_the_device: dict[str, Any]) -> None:
    parameter, detached, of_optimizer = of_the_device["refused"]
    for told in (parameter, detached):
        assert "a rank's own shard of parameter 'inp.weight'" in told
    assert "a rank's own shard of the optimizer's state of 'inp.weight'" in of_optimizer


def synced(folder: Path) -> None:
    trainer(folder, sync_batchnorm=True)


def synced_norm(_: Path) -> None:
    launch(lambda fabric: fabric.setup_module(nn.Sequential(nn.SyncBatchNorm(2), nn.Linear(2, 2))))


@pytest.mark.parametrize(("case", "option"), [(synced, "sync_batchnorm"), (synced_norm, "SyncBatchNorm")])
def test_batch_norm_over_ranks_is_refused(launching: Launching, tmp_path: Path, case: Any, option: str) -> None:
    words = ("UnsupportedCapabilityError", option, "several ranks of 'xla_fsdp'", "strategy='xla_fsdp_spmd'")
    launching.assert_error(2, words, case, tmp_path)
