"""Policies of FSDP2's own beside precision strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.functional import mse_loss

from fsdp2_runs import set_up
from fsdp_core import wrap
from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import FEATURES, HALF_TOLERANCE
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.suite.numerics.precision import assert_parts_equal, seen_by_a_block, trained_by_parts
from fsdp_core.testing.training import Lit, loader, losses_of, means, new_trainer, own_share


class Halves(Lit):
    """Two optimizers in turn, so that all that the root keeps for itself is frozen for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with oracle.seeded(1):
            self.net = wrap(nn.Linear(FEATURES, FEATURES))
            self.critic = nn.Linear(FEATURES, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.critic(self.net(batch[0])).pow(2).mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.detach())

    def configure_optimizers(self) -> Any:
        return [oracle.sgd(self.net), oracle.sgd(self.critic)]


def _halves(strategy: str, tmp: str, world_size: int) -> list[float]:
    module = Halves()
    new_trainer(tmp, strategy, world_size, precision="bf16-mixed").fit(module, loader(3, world_size))
    return means(module.losses)


def test_optimizers_in_turn_in_mixed_precision(ranks: RankPool, tmp_path: Path) -> None:
    plain = Halves()
    new_trainer(tmp_path, "auto", precision="bf16-mixed").fit(plain, loader(3, 1))
    for losses in ranks.run(2, _halves, "fsdp2", str(tmp_path), 2):
        assert losses == pytest.approx(losses_of(plain), rel=HALF_TOLERANCE)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="mse_loss of fp16 and fp32 has no backward pass before torch 2.13"
)
def test_explicit_policy_wins(ranks: RankPool, tmp_path: Path) -> None:
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)}
    for got in ranks.run(2, seen_by_a_block, "fsdp2", str(tmp_path), "bf16-mixed", policy):
        assert (got["shards"], got["weight"], got["input"]) == ({torch.float32}, torch.float16, torch.float16)


@pytest.mark.parametrize("units", [None, {nn.Linear}])
def test_what_a_step_calls_is_cast_as_by_the_root(ranks: RankPool, tmp_path: Path, units: Any) -> None:
    options = {"auto_wrap_policy": units, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for trained in ranks.run(2, trained_by_parts, "fsdp2", str(tmp_path), options):
        assert_parts_equal(trained)


@pytest.mark.parametrize(("precision", "instead"), [("bf16-mixed", "16-mixed"), ("bf16-true", "16-true")])
def test_device_without_bf16(precision: str, instead: str) -> None:
    dtypes, device = ShardPrecision.named(precision), torch.device("cuda", 0)
    told = refusal(UnsupportedCapabilityError, lambda: dtypes.check_device(device, bf16_supported=False))
    assert_says(told, f"precision={precision!r}", "cuda:0", f"precision={instead!r}", "precision='32-true'")


def _norms_in_double() -> dict[str, float]:
    fabric, net, model, optimizer = set_up(net=oracle.new_net().double())
    x, y = own_share(fabric, oracle.global_batches(1)[0])
    fabric.backward(mse_loss(model(x.double()), y.double()))
    norms = {name: float(value) for name, value in grad_norm(net, 2).items()}
    return {**norms, "clipped": float(fabric.clip_gradients(model, optimizer, max_norm=float("inf")))}


def test_norms_in_double(ranks: RankPool) -> None:
    """They are added up in fp64, of which fp32 would keep half the digits."""
    net = oracle.new_net().double()
    (x, y), *_ = oracle.global_batches(1)
    mse_loss(net(x.double()), y.double()).backward()
    want = {f"grad_2.0_norm/{n}": p.grad.norm().item() for n, p in net.named_parameters() if p.grad is not None}
    total = nn.utils.clip_grad_norm_(net.parameters(), float("inf")).item()
    want |= {"grad_2.0_norm_total": total, "clipped": total}
    for got in ranks.run(2, _norms_in_double):
        assert got == pytest.approx(want, rel=1e-12)  # of fp64's 2e-16, the order of additions takes some
