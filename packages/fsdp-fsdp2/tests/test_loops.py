"""Manual optimization, several optimizers and models, schedulers, units, tied parameters, exceptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

import oracle
import runs
from fsdp_core.errors import ShardingError
from fsdp_core.testing import RankPool
from fsdp_fsdp2 import FSDP2Strategy
from oracle import FEATURES, FP32_TOLERANCE, Block
from runs import Lit, full_state, loader, trainer


class Gan(Lit):
    """Two optimizers over two halves, stepped by hand in one training step, with forward passes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.critic = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = mse_loss(self.net(x), y) + self.critic(self.net(x)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        critic_loss = (self.critic(self.net(x).detach()) ** 2).mean()
        second.zero_grad()
        self.manual_backward(critic_loss)
        self.clip_gradients(second, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        second.step()
        self.untoggle_optimizer(second)
        self.losses += [loss.detach(), critic_loss.detach()]

    def configure_optimizers(self) -> Any:
        return [oracle.momentum(self.net), torch.optim.Adam(self.critic.parameters(), lr=0.01, eps=1e-3)]


def gan(tmp: str, strategy: Any, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    module = Gan()
    run = trainer(tmp, strategy, world_size)
    run.fit(module, loader(3, world_size), loader(1, world_size))
    return runs.means(module.losses), full_state(run.strategy, module)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_manual_optimization(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    plain = Gan()
    trainer(tmp_path, "auto").fit(plain, loader(3, 1))
    want = [loss.item() for loss in plain.losses]
    for losses, state in ranks.run(world_size, gan, str(tmp_path), "fsdp2", world_size):
        assert losses == pytest.approx(want, abs=FP32_TOLERANCE)
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(state[name], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)


class Scheduled(Lit):
    def configure_optimizers(self) -> Any:
        optimizer = oracle.adamw_groups(self)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def scheduled(tmp: str, world_size: int, save: str | None, resume: str | None, epochs: int) -> list[float]:
    module = Scheduled()
    run = trainer(tmp, world_size=world_size, max_epochs=epochs)
    run.fit(module, loader(2, world_size), ckpt_path=resume)
    if save:
        run.save_checkpoint(save)
    return runs.means(module.losses)


def test_scheduler_and_its_resumption(ranks: RankPool, tmp_path: Path) -> None:
    plain = Scheduled()
    trainer(tmp_path, "auto", max_epochs=3).fit(plain, loader(2, 1))
    path = str(tmp_path / "half")
    first = ranks.run(2, scheduled, str(tmp_path), 2, path, None, 1)[0]
    second = ranks.run(3, scheduled, str(tmp_path), 3, None, path, 3)[0]
    assert first + second == pytest.approx([loss.item() for loss in plain.losses], abs=FP32_TOLERANCE)


class Failing(Lit):
    fail = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.fail and batch_idx == 1:
            self.losses.clear()
            raise ZeroDivisionError
        return loss


def fit_after_exception(tmp: str) -> list[float]:
    module = Failing("sgd")
    run = trainer(tmp, world_size=2)
    with pytest.raises(ZeroDivisionError):
        run.fit(module, loader(2, 2))
    module.fail = False
    if not hasattr(module, "reset_iter_state"):  # before torch 2.13
        with pytest.raises(ShardingError, match="or upgrade to torch"):
            trainer(tmp, world_size=2).fit(module, loader(2, 2))
        module = Lit("sgd")
        trainer(tmp, world_size=2).fit(module, loader(1, 2))
        module.losses.clear()
    trainer(tmp, world_size=2).fit(module, loader(2, 2))
    return runs.means(module.losses)


def test_module_is_usable_after_an_exception(ranks: RankPool, tmp_path: Path) -> None:
    """By a new Trainer, which goes on with the shards of the one before it."""
    net = oracle.new_net()
    oracle.train_plain(1, oracle.sgd, net=net)
    want, _ = oracle.train_plain(2, oracle.sgd, net=net)
    for losses in ranks.run(2, fit_after_exception, str(tmp_path)):
        assert losses == pytest.approx(want, abs=FP32_TOLERANCE)


class Shared(nn.Module):
    """Two blocks that share a weight with each other, and one that shares one with the root."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[1].down.weight = self.blocks[0].down.weight
        self.blocks[2].up.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inp(x)[:, :FEATURES]
        for block in self.blocks:
            x = block(x)
        return x


def shared_units() -> tuple[list[str], list[float], list[str]]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp2")
    fabric.launch()
    torch.manual_seed(1)
    net = Shared()
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    losses = []
    for x, y in oracle.global_batches(3):
        loss = mse_loss(model(x), y)
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    units = [name for name, m in net.named_modules() if isinstance(m, FSDPModule)]
    return units, losses, [n for n, p in net.named_parameters() if not isinstance(p, DTensor)]


def test_tied_parameters_stay_in_one_unit(ranks: RankPool) -> None:
    torch.manual_seed(1)
    want, _ = oracle.train_plain(3, oracle.momentum, net=Shared())
    for units, losses, whole in ranks.run(2, shared_units):
        assert units == ["", "blocks.3"]
        assert losses == pytest.approx(want, abs=FP32_TOLERANCE)
        assert whole == [f"blocks.{i}.gain" for i in range(4)]


def different_seeds() -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp2")
    fabric.launch()
    torch.manual_seed(1 + 10 * fabric.global_rank)
    model = fabric.setup(oracle.Net())
    return [mse_loss(model(x), y).item() for x, y in oracle.global_batches(1)]


def test_rank_zeros_values_win(ranks: RankPool) -> None:
    net = oracle.new_net()
    want = [mse_loss(net(x), y).item() for x, y in oracle.global_batches(1)]
    for losses in ranks.run(2, different_seeds):
        assert losses == pytest.approx(want, abs=FP32_TOLERANCE)


def fabric_step_method() -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp2")
    fabric.launch()
    net = oracle.new_net()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, x: Tensor, y: Tensor) -> Tensor:
            return mse_loss(self.net(x), y)

    model, optimizer = fabric.setup(Wrapped(), oracle.sgd(net))
    losses = []
    for x, y in oracle.global_batches(3):
        loss = model.training_step(x, y)
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_fabric_step_method_runs_through_the_root(ranks: RankPool) -> None:
    want, _ = oracle.train_plain(3, oracle.sgd)
    for losses in ranks.run(2, fabric_step_method):
        assert losses == pytest.approx(want, abs=FP32_TOLERANCE)


def collectives() -> dict[str, Any]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp2")
    fabric.launch()
    rank = fabric.global_rank
    source = torch.full((2,), float(rank), requires_grad=True)
    fabric.all_gather(source, sync_grads=True).sum().backward()
    return {
        "mean": fabric.all_reduce(torch.tensor(float(rank))).item(),
        "sum": fabric.all_reduce(torch.tensor(rank + 1), reduce_op="sum").item(),
        "text": fabric.strategy.all_reduce("unchanged"),
        "gathered": fabric.all_gather(torch.tensor([rank])).tolist(),
        "grad": source.grad.tolist(),
        "object": fabric.broadcast({"from": rank, "path": Path("x")}, src=1),
    }


def test_collectives(ranks: RankPool) -> None:
    want = {
        "mean": 0.5,
        "sum": 3,
        "text": "unchanged",
        "gathered": [[0], [1]],
        "grad": [2.0, 2.0],
        "object": {"from": 1, "path": Path("x")},
    }
    assert ranks.run(2, collectives) == [want, want]


def memory_after_eval(tmp: str) -> bool:
    module = Lit("sgd")
    run = trainer(tmp, FSDP2Strategy(), 2)
    run.validate(module, loader(1, 2), verbose=False)
    return all(isinstance(p, DTensor) for p in module.parameters() if p.ndim)


def test_evaluation_leaves_nothing_unsharded(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, memory_after_eval, str(tmp_path)) == [True, True]


def other_terms(tmp: str) -> str:
    module = Lit("sgd")
    trainer(tmp, world_size=2).validate(module, loader(1, 2), verbose=False)
    with pytest.raises(ShardingError) as refused:
        trainer(tmp, world_size=2, precision="bf16-mixed").validate(module, loader(1, 2), verbose=False)
    return str(refused.value)


def test_a_sharded_module_keeps_its_precision(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(2, other_terms, str(tmp_path)):
        assert "32-true" in message
        assert "bf16-mixed" in message
        assert "build the module anew" in message
