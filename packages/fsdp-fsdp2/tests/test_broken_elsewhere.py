"""What fails with Lightning's own sharded strategies, and works here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelSummary, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import mse_loss

import oracle
import runs
from fsdp_core.testing import RankPool
from fsdp_fsdp2 import FSDP2Strategy
from oracle import FP32_TOLERANCE
from runs import Lit, loader, trainer


class NanGradient(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * float("nan")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        backend = self.trainer.strategy.backend
        backend.clip_norm(self.parameters(), 1.0, error_if_nonfinite=True)


def nonfinite(tmp: str) -> tuple[str, str]:
    told = []
    with pytest.raises(RuntimeError, match=r"total norm .* is nan") as under_trainer:
        trainer(tmp, world_size=2).fit(NanGradient(), loader(1, 2))
    told.append(str(under_trainer.value))
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp2")
    fabric.launch()
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    fabric.backward(model(torch.ones(2, oracle.FEATURES)).sum() * float("nan"))
    with pytest.raises(RuntimeError, match=r"total norm .* is nan") as under_fabric:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    told.append(str(under_fabric.value))
    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    return tuple(told)  # type: ignore[return-value]


def test_error_if_nonfinite_is_honoured(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(2, nonfinite, str(tmp_path)):
        assert all("error_if_nonfinite=False" in message for message in told)


def every_stage(tmp: str, options: dict[str, Any]) -> dict[str, Any]:
    strategy = FSDP2Strategy(**options)
    module = Lit("momentum")
    run = trainer(tmp, strategy, 2, max_epochs=2)
    run.test(module, loader(2, 2), verbose=False)
    run.fit(module, loader(3, 2), loader(1, 2))
    first = run.validate(module, loader(2, 2), verbose=False)
    run.test(module, loader(2, 2), verbose=False)
    predicted = torch.cat(run.predict(module, loader(2, 2)))
    run.fit_loop.max_epochs = 3
    run.fit(module, loader(3, 2))
    run.validate(module, loader(2, 2), verbose=False)
    return {
        "losses": runs.means(module.losses),
        "validated": first[0]["val_loss"],
        "policy": strategy.backend.auto_wrap_policy is options.get("auto_wrap_policy", "auto"),
        "units": sum(isinstance(m, FSDPModule) for m in module.modules()),
        "predicted": predicted,
    }


@pytest.mark.parametrize("options", [{}, {"auto_wrap_policy": None}, {"auto_wrap_policy": {oracle.Block}}], ids=str)
def test_stages_in_any_order(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """Also with the root as the only unit; and the policy outlives every stage."""
    first, _ = oracle.train_plain(3, oracle.momentum)
    for got in ranks.run(2, every_stage, str(tmp_path), options):
        assert got["losses"][:3] == pytest.approx(first, abs=FP32_TOLERANCE)
        assert len(got["losses"]) == 9
        assert got["policy"]
        assert got["units"] == (1 if options.get("auto_wrap_policy", "auto") is None else 4)
        assert got["predicted"].shape == (oracle.BATCH, oracle.FEATURES)


def find_learning_rate(tmp: str) -> tuple[float, list[float], list[str]]:
    module = Lit("sgd")
    module.lr = 0.05
    run = trainer(tmp, world_size=2, enable_checkpointing=True)
    before = runs.means([mse_loss(module.net(x), y) for x, y in oracle.global_batches(1)])
    found = Tuner(run).lr_find(module, loader(10, 2), num_training=8, update_attr=False)
    assert found is not None
    run.validate(module, loader(1, 2), verbose=False)
    after = runs.means(module.validation_losses)
    return len(found.results["loss"]), [*before, *after], [p.name for p in Path(tmp).iterdir() if "lr_find" in p.name]


def test_lr_finder_restores_the_weights(ranks: RankPool, tmp_path: Path) -> None:
    for tried, (before, after), leftovers in ranks.run(2, find_learning_rate, str(tmp_path)):
        assert tried == 8
        assert after == pytest.approx(before, abs=FP32_TOLERANCE)
        assert not leftovers


class SaveOnce(pl.Callback):
    """Saves at the end of the first epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def averaged(tmp: str, world_size: int, path: str | None = None, resume: str | None = None) -> Any:
    module = Lit("sgd")
    callbacks: list[Any] = [EMAWeightAveraging(decay=0.5)]
    if path:
        callbacks.append(SaveOnce(path))
    run = trainer(tmp, world_size=world_size, callbacks=callbacks, max_epochs=2)
    run.fit(module, loader(2, world_size), loader(1, world_size), ckpt_path=resume)
    return runs.full_state(run.strategy, module)


def ema_oracle(batches: Any, decay: float) -> dict[str, torch.Tensor]:
    net = oracle.new_net()
    optimizer = oracle.sgd(net)
    average: dict[str, torch.Tensor] = {}
    for x, y in batches:
        mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        now = {n: p.detach().clone() for n, p in net.state_dict().items()}
        average = {n: decay * average[n] + (1 - decay) * now[n] for n in now} if average else now
    return average


def test_weight_averaging(ranks: RankPool, tmp_path: Path) -> None:
    want = ema_oracle(oracle.global_batches(2) * 2, 0.5)
    path = str(tmp_path / "half")
    uninterrupted = ranks.run(2, averaged, str(tmp_path), 2, path)
    resumed = ranks.run(2, averaged, str(tmp_path), 2, None, path)
    elsewhere = ranks.run(3, averaged, str(tmp_path), 3, None, path)
    for state in (*uninterrupted, *resumed, *elsewhere):
        for name, tensor in want.items():
            torch.testing.assert_close(state[f"net.{name}"], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)


def swa(tmp: str) -> str:
    run = trainer(tmp, world_size=2, callbacks=[StochasticWeightAveraging(swa_lrs=0.01)])
    with pytest.raises(MisconfigurationException) as refused:
        run.fit(Lit(), loader(1, 2))
    return str(refused.value)


def test_stochastic_weight_averaging_is_refused_before_training(ranks: RankPool, tmp_path: Path) -> None:
    assert all("sharded" in message for message in ranks.run(2, swa, str(tmp_path)))


class Counts(ModelSummary):
    counts: Any = None

    def summarize(self, summary_data: Any, total_parameters: int, trainable_parameters: int, *a: Any, **k: Any) -> None:
        self.counts = (total_parameters, trainable_parameters, dict(summary_data)["Params"])


def summary(tmp: str) -> Any:
    callback = Counts(max_depth=1)
    run = trainer(tmp, world_size=2, callbacks=[callback], enable_model_summary=True)
    run.fit(Lit(), loader(1, 2))
    return callback.counts


def test_model_summary_counts_the_whole_model(ranks: RankPool, tmp_path: Path) -> None:
    net = oracle.new_net()
    total = sum(p.numel() for p in net.parameters())
    trainable = sum(p.numel() for p in net.parameters() if p.requires_grad)
    counts = ranks.run(2, summary, str(tmp_path))
    assert counts[0][:2] == (total, trainable)


class CountsReductions:
    """Counts reduce-scatters: torch's own name of the collective, seen by its profiler."""

    def __init__(self) -> None:
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def __enter__(self) -> CountsReductions:
        self.profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.profiler.__exit__(*error)
        self.count = sum(
            e.count for e in self.profiler.key_averages() if e.key.startswith("FSDP::post_backward_reduce")
        )


def reductions(tmp: str, sync_each_batch: bool) -> tuple[int, int]:
    with CountsReductions() as under_trainer:
        runs.fit(tmp, 2, 4, "sgd", {"sync_each_batch": sync_each_batch}, accumulate_grad_batches=4)
    with CountsReductions() as under_fabric:
        runs.fabric_fit(2, 4, "sgd", {"sync_each_batch": sync_each_batch}, accumulate=4)
    return under_trainer.count, under_fabric.count


@pytest.mark.parametrize(("sync_each_batch", "expected"), [(False, 4), (True, 16)])
def test_accumulation_skips_the_reduction(
    ranks: RankPool, tmp_path: Path, sync_each_batch: bool, expected: int
) -> None:
    """Four units, four micro-batches: one reduction per unit, or one per unit and micro-batch."""
    for under_trainer, under_fabric in ranks.run(2, reductions, str(tmp_path), sync_each_batch):
        assert (under_trainer, under_fabric) == (expected, expected)


def sync_after(enabled: bool) -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp2")
    fabric.launch()
    net = oracle.new_net()
    model, _ = fabric.setup(net, oracle.sgd(net))
    x, y = oracle.global_batches(1)[0]
    mine = slice(fabric.global_rank, None, 2)
    with fabric.no_backward_sync(model, enabled=enabled):
        fabric.backward(mse_loss(model(x[mine]), y[mine]))
    fabric.backward(mse_loss(model(x[mine]), y[mine]))
    return [p.grad.full_tensor().norm().item() for n, p in net.named_parameters() if n == "blocks.1.up.weight"]


@pytest.mark.parametrize("enabled", [True, False])
def test_no_backward_sync_leaves_sync_on(ranks: RankPool, enabled: bool) -> None:
    net = oracle.new_net()
    x, y = oracle.global_batches(1)[0]
    (2 * mse_loss(net(x), y)).backward()
    want = net.blocks[1].up.weight.grad.norm().item()
    for got in ranks.run(2, sync_after, enabled):
        assert got == pytest.approx([want], rel=1e-5)


class CountingScaler(torch.amp.GradScaler):
    steps = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().step(*args, **kwargs)


def custom_scaler(tmp: str) -> tuple[int, list[float]]:
    scaler = CountingScaler("cpu", init_scale=2.0**8)
    module = Lit("sgd")
    trainer(tmp, world_size=2, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)]).fit(module, loader(3, 2))
    return scaler.steps, runs.means(module.losses)


def test_custom_gradient_scaler(ranks: RankPool, tmp_path: Path) -> None:
    want, _ = oracle.train_plain(3, oracle.sgd)
    for steps, losses in ranks.run(2, custom_scaler, str(tmp_path)):
        assert steps == 3
        assert losses == pytest.approx(want, rel=oracle.HALF_TOLERANCE)


class WithoutLogging(Lit):
    """torch 2.13 can't trace Lightning's self.log, under any strategy."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


def compiled(tmp: str) -> list[float]:
    module = WithoutLogging("sgd")
    trainer(tmp, world_size=2).fit(torch.compile(module, backend="eager"), loader(3, 2))
    return runs.means(module.losses)


def test_compiled_module(ranks: RankPool, tmp_path: Path) -> None:
    want, _ = oracle.train_plain(3, oracle.sgd)
    for losses in ranks.run(2, compiled, str(tmp_path), timeout=240.0):
        assert losses == pytest.approx(want, abs=FP32_TOLERANCE)


def recomputation(tmp: str, options: dict[str, Any]) -> int:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    module = Lit("sgd")
    for block in module.net.blocks:
        block.up.register_forward_hook(count)
    trainer(tmp, FSDP2Strategy(**options), 2).fit(module, loader(1, 2))
    return calls


@pytest.mark.parametrize("policy", ["auto", None])
def test_activation_checkpointing_needs_no_wrap_policy(ranks: RankPool, tmp_path: Path, policy: Any) -> None:
    """Three blocks, one step: each runs once forward, and once more in the backward pass."""
    options = {"auto_wrap_policy": policy, "activation_checkpointing_policy": {oracle.Block}}
    assert ranks.run(2, recomputation, str(tmp_path), options) == [6, 6]


def dropout_losses(tmp: str, checkpointing: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    options = {"activation_checkpointing_policy": {oracle.Block}} if checkpointing else {}
    torch.manual_seed(5)
    return runs.fit(tmp, 1, 3, "sgd", options, {"dropout": 0.5})


def test_activation_checkpointing_repeats_dropout(ranks: RankPool, tmp_path: Path) -> None:
    ((plain, state),) = ranks.run(1, dropout_losses, str(tmp_path), False)
    ((recomputed, again),) = ranks.run(1, dropout_losses, str(tmp_path), True)
    assert recomputed == plain
    assert all(torch.equal(state[n], again[n]) for n in state)
