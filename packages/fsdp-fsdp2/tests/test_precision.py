"""Precision strings and policies as dtypes of shards, computation and reduction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.distributed.fsdp import MixedPrecisionPolicy

import oracle
import runs
from fsdp_core.testing import RankPool
from fsdp_fsdp2 import FSDP2Strategy
from oracle import FEATURES, HALF_TOLERANCE
from runs import Lit, loader, trainer

PRECISIONS = ["32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"]
STORAGE = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
COMPUTE = {
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}


class Spying(Lit):
    """Notes the dtypes that a block sees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[str, torch.dtype] = {}
        self.net.blocks[1].register_forward_pre_hook(self.look)

    def look(self, block: Any, args: Any) -> None:
        self.seen = {"weight": block.up.weight.dtype, "input": args[0].dtype}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weight = self.net.blocks[1].up.weight
        self.seen |= {"shard": weight.dtype, "grad": weight.grad.dtype}
        self.finite = bool(torch.isfinite(weight.grad.full_tensor()).all())


def fit(tmp: str, precision: Any, options: dict[str, Any]) -> dict[str, Any]:
    module = Spying("sgd")
    run = trainer(tmp, FSDP2Strategy(**options), 2, precision=precision, gradient_clip_val=10.0)
    run.fit(module, loader(3, 2))
    return {"losses": runs.means([loss.float() for loss in module.losses]), **module.seen}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_trainer(ranks: RankPool, tmp_path: Path, precision: str) -> None:
    want, _ = oracle.train_plain(3, oracle.sgd)
    storage, compute = STORAGE.get(precision, torch.float32), COMPUTE.get(precision, torch.float32)
    for got in ranks.run(2, fit, str(tmp_path), precision, {}):
        assert got["losses"] == pytest.approx(want, rel=HALF_TOLERANCE)
        assert (got["shard"], got["grad"]) == (storage, storage)
        assert (got["weight"], got["input"]) == (compute, compute)


def test_explicit_policy_wins(ranks: RankPool, tmp_path: Path) -> None:
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)}
    for got in ranks.run(2, fit, str(tmp_path), "bf16-mixed", policy):
        assert (got["shard"], got["weight"], got["input"]) == (torch.float32, torch.float16, torch.float16)


def fabric(precision: Any) -> dict[str, Any]:
    f = Fabric(accelerator="cpu", devices=2, strategy="fsdp2", precision=precision)
    f.launch()
    net = oracle.new_net()
    model, optimizer = f.setup(net, oracle.sgd(net))
    losses = []
    for x, y in oracle.global_batches(3):
        with f.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (
                COMPUTE[precision] if "mixed" in precision else torch.ones(()).dtype
            )
        output = model(x)
        assert output.dtype is torch.float32
        loss = torch.nn.functional.mse_loss(output, y)
        losses.append(loss.detach())
        f.backward(loss)
        f.clip_gradients(model, optimizer, max_norm=10.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": runs.means(losses), "shard": net.blocks[1].up.weight.dtype}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fabric(ranks: RankPool, precision: str) -> None:
    want, _ = oracle.train_plain(3, oracle.sgd)
    for got in ranks.run(2, fabric, precision):
        assert got["losses"] == pytest.approx(want, rel=HALF_TOLERANCE)
        assert got["shard"] is STORAGE.get(precision, torch.float32)


class Overflowing(Spying):
    """The first step overflows in one rank's shard alone: its gradient of one row is infinite."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 0 and not hasattr(self, "poisoned"):
            self.poisoned = True
            if self.global_rank == 1:
                self.net.blocks[1].up.weight.grad.to_local()[0, 0] = float("inf")


def overflow(tmp: str) -> tuple[list[float], list[float], float]:
    module = Overflowing("sgd")
    run = trainer(tmp, world_size=2, precision="16-mixed")
    run.fit(module, loader(2, 2))
    first = module.net.blocks[1].up.weight.full_tensor().flatten().tolist()
    scaler = run.precision_plugin.scaler
    return runs.means(module.losses), first, scaler.get_scale()


def test_overflow_in_one_shard_skips_the_step_everywhere(ranks: RankPool, tmp_path: Path) -> None:
    (losses, weights, scale), other = ranks.run(2, overflow, str(tmp_path))
    assert (losses, weights, scale) == other
    assert scale == 2.0**15  # halved once from torch's initial 2**16
    assert all(torch.isfinite(torch.tensor(weights)))
    # the first step was skipped: the second batch is seen with the initial weights
    net = oracle.new_net()
    x, y = oracle.global_batches(2)[1]
    assert losses[1] == pytest.approx(torch.nn.functional.mse_loss(net(x), y).item(), rel=HALF_TOLERANCE)


def scaler_state(tmp: str) -> tuple[float, float]:
    run = trainer(tmp, world_size=2, precision="16-mixed")
    run.fit(Overflowing("sgd"), loader(2, 2))
    run.save_checkpoint(f"{tmp}/scaled")
    again = trainer(tmp, world_size=2, precision="16-mixed")
    again.fit(Lit("sgd"), loader(2, 2), ckpt_path=f"{tmp}/scaled")
    return run.precision_plugin.scaler.get_scale(), again.precision_plugin.scaler.get_scale()


def test_scaler_state_is_restored(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, scaler_state, str(tmp_path)) == [(2.0**15, 2.0**15)] * 2


def meta(tmp: str, precision: Any) -> tuple[list[float], torch.dtype]:
    run = trainer(tmp, world_size=2, precision=precision)
    with run.init_module(empty_init=True):
        module = Lit("sgd")
    assert all(p.is_meta for p in module.parameters())
    module.net.scale = torch.ones(FEATURES)
    for block in module.net.blocks:
        block.reset_parameters = lambda block=block: torch.nn.init.constant_(block.gain, 0.5)
    run.fit(module, loader(2, 2))
    return runs.means([loss.float() for loss in module.losses]), module.net.blocks[0].up.weight.dtype


def test_meta_init(ranks: RankPool, tmp_path: Path) -> None:
    """Built without memory and initialised unit by unit: the same numbers on every rank, in the precision's dtype."""
    (losses, dtype), other = ranks.run(2, meta, str(tmp_path), "32-true")
    assert losses == other[0]
    assert all(torch.isfinite(torch.tensor(losses)))
    assert dtype is torch.float32
    assert ranks.run(2, meta, str(tmp_path), "bf16-true")[0][1] is torch.bfloat16
