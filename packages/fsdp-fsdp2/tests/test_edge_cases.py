"""What models and loops do besides: freezing, hooks, exceptions, batch norm, extra state, odd memory, odd names."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torchmetrics import SumMetric

import fsdp_fsdp2.fabric
import oracle
import runs
from fsdp_core.errors import CheckpointMismatchError, ShardingError
from fsdp_core.testing import RankPool
from fsdp_fsdp2 import FSDP2Strategy
from oracle import FEATURES, FP32_TOLERANCE, HALF_TOLERANCE, Block
from runs import Lit, full_state, loader, trainer


def launched(precision: Any = None, **options: Any) -> Fabric:
    fabric = Fabric(
        accelerator="cpu", devices=2, strategy=fsdp_fsdp2.fabric.FSDP2Strategy(**options), precision=precision
    )
    fabric.launch()
    return fabric


def share(fabric: Fabric, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0][fabric.global_rank :: 2], batch[1][fabric.global_rank :: 2]


class Gains(nn.Module):
    """Two 0-dim parameters, of which a forward pass uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.one, self.two = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, use_two: bool = True) -> Tensor:
        x = self.layer(x) * self.one
        return x * self.two if use_two else x


def gains_oracle(scenario: str) -> dict[str, float]:
    net = Gains()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = oracle.global_batches(3)
    if scenario == "unfrozen later":
        net.requires_grad_(True)
        (mse_loss(net.layer(batches[0][0]) * net.one.detach() * net.two.detach(), batches[0][1])).backward()
        optimizer.step()
        optimizer.zero_grad()
        batches = batches[1:]
    if scenario == "unused in the last micro-batch":
        for i, (x, y) in enumerate(batches):
            (mse_loss(net(x, use_two=i < 2), y)).backward()
        optimizer.step()
        return {"one": net.one.item(), "two": net.two.item()}
    for x, y in batches:
        mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"one": net.one.item(), "two": net.two.item()}


class Raises(torch.autograd.Function):
    """Raises in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ZeroDivisionError


def gains(scenario: str) -> dict[str, float]:
    fabric = launched()
    net = Gains()
    if scenario == "unfrozen later":
        net.one.requires_grad_(False)
        net.two.requires_grad_(False)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batches = [share(fabric, batch) for batch in oracle.global_batches(3)]
    if scenario == "unused in the last micro-batch":
        for i, (x, y) in enumerate(batches):
            with fabric.no_backward_sync(model, enabled=i < 2):
                fabric.backward(mse_loss(model(x, use_two=i < 2), y))
        optimizer.step()
    else:
        if scenario == "after an exception":
            x = Raises.apply(torch.ones(2, FEATURES, requires_grad=True))
            with pytest.raises(ZeroDivisionError):
                fabric.backward(model(x).sum())
            net.reset_iter_state()
            optimizer.zero_grad()
        for i, (x, y) in enumerate(batches):
            if scenario == "unfrozen later" and i == 1:
                net.one.requires_grad_(True)
                net.two.requires_grad_(True)
            fabric.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return {"one": net.one.item(), "two": net.two.item()}


SCENARIOS = ["unfrozen later", "after an exception", "unused in the last micro-batch"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_whole_parameters_stay_equal(ranks: RankPool, scenario: str) -> None:
    if scenario == "after an exception" and not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"):
        pytest.skip("torch before 2.13 can't bring a sharded module back from an exception; it is refused")
    want = gains_oracle(scenario)
    first, second = ranks.run(2, gains, scenario)
    assert first == second
    assert first == pytest.approx(want, abs=FP32_TOLERANCE)


class ManualClip(Lit):
    def __init__(self) -> None:
        super().__init__("sgd")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach().float())
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()


def manual_clip(tmp: str) -> list[float]:
    module = ManualClip()
    trainer(tmp, world_size=2, precision="16-mixed").fit(module, loader(4, 2))
    return runs.means(module.losses)


def test_clipping_by_hand_sees_unscaled_gradients(ranks: RankPool, tmp_path: Path) -> None:
    want, _ = oracle.train_plain(4, oracle.sgd, clip_norm=0.2)
    for losses in ranks.run(2, manual_clip, str(tmp_path)):
        assert losses == pytest.approx(want, rel=HALF_TOLERANCE)


class BigTargets(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.target = batch[1]
        return super().training_step(batch, batch_idx)


def targets(tmp: str, precision: Any) -> tuple[float, str]:
    module = BigTargets("sgd")
    data = [(torch.ones(FEATURES), torch.full((FEATURES,), 100001.0))] * 4
    batches = torch.utils.data.DataLoader(data, batch_size=2)
    trainer(tmp, world_size=2, precision=precision, max_steps=1).fit(module, batches)
    return module.target[0, 0].item(), str(module.target.dtype)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_leaves_targets_alone(ranks: RankPool, tmp_path: Path, precision: str) -> None:
    assert ranks.run(2, targets, str(tmp_path), precision) == [(100001.0, "torch.float32")] * 2


class Stateful(nn.Module):
    """State that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.count = 0
        self.total = SumMetric()
        self.total.persistent(True)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.layer(x)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.count)

    def set_extra_state(self, state: Tensor) -> None:
        self.count = int(state)


def extra_state(path: str) -> tuple[int, float]:
    fabric = launched()
    model = fabric.setup(Stateful())
    model(torch.ones(2, FEATURES))
    model.module.total.update(12.0)
    fabric.save(path, {"model": model})
    other = Stateful()
    fabric.load(path, {"model": fabric.setup(other)})
    return other.count, float(other.total.sum_value)


def test_extra_state_and_persistent_metrics_are_restored(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, extra_state, str(tmp_path / "checkpoint")) == [(1, 12.0), (1, 12.0)]


def infinite_norm() -> str:
    fabric = launched()
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    fabric.backward(model(torch.ones(2, FEATURES)).sum())
    if fabric.global_rank == 1:
        net.blocks[0].up.weight.grad.to_local()[0, 0] = torch.nan
    with pytest.raises(RuntimeError) as refused:
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=float("inf"))
    return str(refused.value)


def test_infinite_norm_sees_nan_of_another_rank(ranks: RankPool) -> None:
    assert all("is nan" in message for message in ranks.run(2, infinite_norm))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inp, self.norm, self.out = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.inp(x))))


def batch_norm(precision: Any) -> tuple[list[float], Any]:
    fabric = launched(precision)
    net = Normed()
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    losses = []
    for x, y in oracle.global_batches(3):  # the same batch on both ranks, so that statistics are the oracle's
        loss = mse_loss(model(x), y)
        losses.append(loss.item())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=10.0)
        optimizer.step()
        optimizer.zero_grad()
    weight = net.norm.weight.detach()
    return losses, weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_batch_norm(ranks: RankPool, precision: str) -> None:
    want, _ = oracle.train_plain(3, oracle.momentum, net=Normed())
    (losses, weight), (others, other_weight) = ranks.run(2, batch_norm, precision)
    tolerance = FP32_TOLERANCE if precision == "32-true" else HALF_TOLERANCE
    assert losses == others
    assert losses == pytest.approx(want, rel=tolerance, abs=tolerance)
    assert torch.equal(weight, other_weight)


def unfrozen(precision: Any) -> list[float]:
    fabric = launched(precision)
    net = oracle.new_net()
    net.blocks[1].requires_grad_(False)
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    losses = []
    for i, (x, y) in enumerate(oracle.global_batches(3)):
        if i == 1:
            net.blocks[1].requires_grad_(True)
        loss = mse_loss(model(x), y)
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_block_unfrozen_later(ranks: RankPool, precision: str) -> None:
    net = oracle.new_net()
    net.blocks[1].requires_grad_(False)
    optimizer = oracle.sgd(net)
    want = []
    for i, (x, y) in enumerate(oracle.global_batches(3)):
        net.blocks[1].requires_grad_(i > 0)
        loss = mse_loss(net(x), y)
        want.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tolerance = FP32_TOLERANCE if precision == "32-true" else HALF_TOLERANCE
    for losses in ranks.run(2, unfrozen, precision):
        assert losses == pytest.approx(want, rel=tolerance, abs=tolerance)


class UsesRootTwice(Lit):
    """Calls itself, then uses a parameter of its own."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.bias = nn.Parameter(torch.zeros(FEATURES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = mse_loss(self(batch[0]) + self.bias, batch[1])
        self.losses.append(loss.detach())
        return loss


def uses_root(tmp: str, reshard: Any) -> list[float]:
    module = UsesRootTwice()
    trainer(tmp, FSDP2Strategy(reshard_after_forward=reshard), 2).fit(module, loader(3, 2))
    return runs.means(module.losses)


@pytest.mark.parametrize("reshard", [None, True, False, 1, 2])
def test_root_stays_gathered_through_a_step(ranks: RankPool, tmp_path: Path, reshard: Any) -> None:
    plain = UsesRootTwice()
    trainer(tmp_path, "auto").fit(plain, loader(3, 1))
    for losses in ranks.run(2, uses_root, str(tmp_path), reshard):
        assert losses == pytest.approx([loss.item() for loss in plain.losses], abs=FP32_TOLERANCE)


class TensorRate(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.01))


def tensor_rate(tmp: str, url: str) -> tuple[list[float], float]:
    first = TensorRate()
    run = trainer(tmp, world_size=2)
    run.fit(first, loader(2, 2))
    run.save_checkpoint(url)
    second = TensorRate()
    run = trainer(tmp, world_size=2, max_epochs=2)
    run.fit(second, loader(2, 2), ckpt_path=url)
    return runs.means([*first.losses, *second.losses]), float(run.optimizers[0].param_groups[0]["lr"])


def test_tensor_learning_rate_and_file_url(ranks: RankPool, tmp_path: Path) -> None:
    plain = TensorRate()
    trainer(tmp_path, "auto", max_epochs=2).fit(plain, loader(2, 1))
    for losses, rate in ranks.run(2, tensor_rate, str(tmp_path), f"file://{tmp_path}/checkpoint"):
        assert losses == pytest.approx([loss.item() for loss in plain.losses], abs=FP32_TOLERANCE)
        assert rate == pytest.approx(0.01)


def largest_tensor() -> tuple[int, int]:
    fabric = launched()
    net = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    gc.collect()
    tensors = [obj for obj in gc.get_objects() if isinstance(obj, Tensor)]
    locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    del model, optimizer
    return 512 * 512 * 4, max(t.untyped_storage().nbytes() for t in locals_)


def test_setup_leaves_no_whole_weight(ranks: RankPool) -> None:
    """Also not in the optimizer that was built over whole ones."""
    for whole, largest in ranks.run(2, largest_tensor):
        assert largest == whole / 2


def refusals(case: str, path: str) -> str:
    fabric = launched()
    with pytest.raises((ShardingError, CheckpointMismatchError)) as refused:
        REFUSED[case][0](fabric, path)
    return str(refused.value)


def hooked(fabric: Fabric, path: str) -> None:
    net = oracle.new_net()
    net.blocks[0].up.weight.register_hook(lambda grad: grad * 0)
    fabric.setup(net)


def mixed_dtypes(fabric: Fabric, path: str) -> None:
    net = oracle.new_net()
    net.blocks[0].up.to(torch.bfloat16)
    fabric.setup(net)


def part_first(fabric: Fabric, path: str) -> None:
    net = oracle.new_net()
    fabric.setup(net.blocks[0])
    fabric.setup(net)


class Unfilled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("table", torch.ones(3))


def unfilled(fabric: Fabric, path: str) -> None:
    with fabric.init_module(empty_init=True):
        net = Unfilled()
    fabric.setup(net)


def fewer_parameters(fabric: Fabric, path: str) -> None:
    net = oracle.new_net()
    _, optimizer = fabric.setup(net, oracle.momentum(net))
    fabric.save(path, {"optimizer": optimizer})
    other = oracle.new_net()
    _, optimizer = fabric.setup(other, oracle.momentum(other.blocks[0]))
    fabric.load(path, {"optimizer": optimizer})


REFUSED: dict[str, tuple[Callable[[Fabric, str], None], list[str]]] = {
    "gradient hook": (hooked, ["blocks.0.up.weight", "register_post_accumulate_grad_hook"]),
    "two dtypes in a unit": (mixed_dtypes, ["torch.bfloat16", "torch.float32", "one dtype"]),
    "part of a model first": (part_first, ["'blocks.0'", "Set up the whole model"]),
    "a buffer that nothing fills": (unfilled, ["'table'", "reset_parameters()"]),
    "optimizer over fewer parameters": (fewer_parameters, ["'inp.weight'", "doesn't", "saved with"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(ranks: RankPool, tmp_path: Path, case: str) -> None:
    for message in ranks.run(2, refusals, case, str(tmp_path / "checkpoint")):
        assert all(part in message for part in REFUSED[case][1]), message


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.odd = nn.Parameter(torch.randn(5, 4).T)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)) @ self.odd.T


def channels_last() -> list[float]:
    fabric = launched()
    net = Convolutions().to(memory_format=torch.channels_last)
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    return [step(fabric.backward, model, optimizer) for _ in range(3)]


def step(backward: Callable[[Tensor], Any], model: Any, optimizer: Any) -> float:
    loss = model(torch.ones(2, 3, 4, 4)).square().mean()
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_memory_formats(ranks: RankPool) -> None:
    net = Convolutions()
    optimizer = oracle.sgd(net)
    want = [step(Tensor.backward, net, optimizer) for _ in range(3)]
    for losses in ranks.run(2, channels_last):
        assert losses == pytest.approx(want, abs=FP32_TOLERANCE)


class OddNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a_orig_mod = nn.Linear(FEATURES, FEATURES, bias=False)
        self.aweight = nn.Parameter(torch.zeros(3))
        self.block = Block()


def odd_names() -> list[str]:
    fabric = launched()
    net = OddNames()
    fabric.setup(net)
    return sorted(full_state(fabric.strategy, net))


def test_odd_names(ranks: RankPool) -> None:
    assert ranks.run(2, odd_names) == [sorted(OddNames().state_dict())] * 2
