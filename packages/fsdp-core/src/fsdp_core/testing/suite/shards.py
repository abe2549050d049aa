"""What each rank holds: its share, before and after every stage, of what rank 0 had."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.errors import ShardingError
from fsdp_core.strategy_info import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.here import here
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE, WIDE, Block
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import assert_sharded, full_state, held_by, root_of, trained_by
from fsdp_core.testing.suite.clauses import Clauses, precisions, requires, with_options
from fsdp_core.testing.training import Lit, loader, means, new_fabric, new_trainer, whole_batches

__all__ = ["ShardsSuite", "Shared"]


def _held_under_trainer(strategy: str, tmp: str, world_size: int) -> int:
    module = Lit("adamw_groups", width=WIDE)
    run = new_trainer(tmp, strategy, world_size)
    run.fit(module, loader(1, world_size))
    return held_by(trained_by(run.optimizers[0]))


def _held_under_fabric(strategy: str, world_size: int) -> int:
    fabric = new_fabric(strategy, world_size)
    net = oracle.new_net(width=WIDE)
    _, optimizer = fabric.setup(net, oracle.adamw_groups(net))
    return held_by(trained_by(optimizer))


def _held_after_evaluation(strategy: str, tmp: str, options: dict[str, Any]) -> int:
    module = Lit("sgd", width=WIDE)
    run = new_trainer(tmp, strategy, 2, options)
    run.validate(module, loader(1, 2), verbose=False)
    return held_by(root_of(run.strategy).parameters())


def _largest_tensor(strategy: str) -> int:
    fabric = new_fabric(strategy, 2)
    net = nn.Sequential(nn.Linear(512, 512))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    largest: list[int] = []
    while len(largest) < 10:  # a thread of gloo's may keep what was broadcast a moment longer
        gc.collect()
        largest.append(max(here().memory(t) for t in gc.get_objects() if isinstance(t, Tensor)))
        time.sleep(0.05)
    del model, optimizer
    return min(largest)


def _different_seeds(strategy: str) -> list[float]:
    fabric = new_fabric(strategy)
    with oracle.seeded(1 + 10 * fabric.global_rank):
        net = oracle.Net()
    model = fabric.setup(net)
    return [mse_loss(model(x), y).item() for x, y in whole_batches(fabric, 1)]


class Positioned(nn.Module):
    """A buffer that is saved with the module, and one that is not."""

    saved: Tensor
    unsaved: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("saved", torch.full((FEATURES,), value))
        self.register_buffer("unsaved", torch.full((FEATURES,), value), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x * self.saved) + self.unsaved


def _buffers(strategy: str) -> tuple[float, float]:
    fabric = new_fabric(strategy)
    net = Positioned(1.0 + fabric.global_rank)
    fabric.setup(net)
    return net.saved.sum().item(), net.unsaved.sum().item()


class Shared(nn.Module):
    """Two blocks that share a weight with each other, and one that shares one with the root."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDE)
        blocks = [Block(width=WIDE) for _ in range(4)]
        blocks[1].down.weight = blocks[0].down.weight
        blocks[2].up.weight = self.inp.weight
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inp(x)[:, :FEATURES]
        for block in self.blocks:
            x = block(x)
        return x


def _shared_units(strategy: str) -> tuple[list[float], int]:
    fabric = new_fabric(strategy)
    with oracle.seeded(1):
        net = Shared()
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    losses = []
    for x, y in whole_batches(fabric, 3):
        loss = mse_loss(model(x), y)
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses, held_by(trained_by(optimizer))


def _other_terms(strategy: str, tmp: str, precision: Any) -> str:
    module = Lit("sgd")
    new_trainer(tmp, strategy, 2).validate(module, loader(1, 2), verbose=False)
    other = new_trainer(tmp, strategy, 2, precision=precision)
    return refusal(ShardingError, lambda: other.validate(module, loader(1, 2), verbose=False))


def _built_on_meta(strategy: str, tmp: str, precision: Any) -> tuple[list[float], torch.dtype]:
    run = new_trainer(tmp, strategy, 2, precision=precision)
    with run.init_module(empty_init=True):
        module = Lit("sgd")
    assert all(p.is_meta for p in module.parameters())
    module.net.scale = torch.ones(FEATURES)
    for block in module.net.blocks:
        block.reset_parameters = lambda block=block: nn.init.constant_(block.gain, 0.5)
    run.fit(module, loader(2, 2))
    return means(module.losses), module.net.blocks[0].up.weight.dtype


class OddNames(nn.Module):
    """Parts of its names are what wrappers put into names, or begin as they do."""

    def __init__(self) -> None:
        super().__init__()
        self.a_orig_mod = nn.Linear(FEATURES, FEATURES, bias=False)
        self.aweight = nn.Parameter(torch.zeros(3))
        self.block = Block()

    def forward(self, x: Tensor) -> Any:
        return self.block(self.a_orig_mod(x)) + self.aweight.sum()


def _odd_names(strategy: str) -> list[str]:
    fabric = new_fabric(strategy)
    fabric.setup(OddNames())
    return sorted(full_state(fabric.strategy))


class Convolutions(nn.Module):
    """Parameters whose memory is not in the order of their indices."""

    def __init__(self) -> None:
        super().__init__()
        with oracle.seeded(1):
            self.conv = nn.Conv2d(3, 5, 3, padding=1)
            self.odd = nn.Parameter(torch.randn(5, 4).T)

    def forward(self, x: Tensor) -> Any:
        return self.conv(x).mean((2, 3)) @ self.odd.T


def _convolve(model: Any, backward: Any, optimizer: Any, device: torch.device | str = "cpu") -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(torch.full((2, 3, 4, 4), 0.2).to(device)).square().mean()  # from which no loss grows
        losses.append(loss.item())
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _channels_last(strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    fabric = new_fabric(strategy)
    net: Any = Convolutions()
    net.to(memory_format=torch.channels_last)
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    return _convolve(model, fabric.backward, optimizer, fabric.device), full_state(fabric.strategy)


class ShardsSuite(Clauses):
    """Each rank holds its share, of the user's parameters under the user's names."""

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_optimizers_hold_a_share(self, ranks: Ranks, tmp_path: Path, world_size: int) -> None:
        total = sum(p.numel() for p in trained_by(oracle.adamw_groups(oracle.new_net(width=WIDE))))
        assert_sharded(ranks.run(world_size, _held_under_trainer, self.strategy, str(tmp_path), world_size), total)
        assert_sharded(ranks.run(world_size, _held_under_fabric, self.strategy, world_size), total)

    @pytest.mark.parametrize("options", [{}, with_options({"auto_wrap_policy": None})], ids=["as it is", "root alone"])
    def test_evaluation_leaves_nothing_unsharded(self, ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
        """With all in the root, too, which libraries leave gathered more readily than other units."""
        total = sum(p.numel() for p in oracle.new_net(width=WIDE).parameters())
        assert_sharded(ranks.run(2, _held_after_evaluation, self.strategy, str(tmp_path), options), total)

    def test_setup_leaves_no_whole_weight(self, ranks: Ranks) -> None:
        """Also not in the optimizer that was built over whole ones."""
        for largest in ranks.run(2, _largest_tensor, self.strategy):
            assert largest < 0.6 * 4 * 512 * 512

    def test_rank_zeros_values_win(self, ranks: Ranks) -> None:
        net = oracle.new_net()
        want = [mse_loss(net(x), y).item() for x, y in oracle.global_batches(1)]
        for losses in ranks.run(2, _different_seeds, self.strategy):
            assert losses == pytest.approx(want, abs=FP32_TOLERANCE)

    def test_rank_zeros_buffers_win(self, ranks: Ranks) -> None:
        for saved, unsaved in ranks.run(2, _buffers, self.strategy):
            assert (saved, unsaved) == (FEATURES, FEATURES)

    def test_tied_parameters_are_trained_as_one(self, ranks: Ranks) -> None:
        """Within a unit, and across those that a wrap policy would make."""
        torch.manual_seed(1)
        net = Shared()
        total = sum(p.numel() for p in net.parameters())
        want, _ = oracle.train_plain(3, oracle.momentum, net=net)
        got = ranks.run(2, _shared_units, self.strategy)
        for losses, _ in got:
            assert losses == pytest.approx(want, abs=FP32_TOLERANCE)
        assert_sharded([held for _, held in got], total)

    @precisions("bf16-mixed", "bf16-true")
    def test_a_sharded_module_keeps_its_precision(self, ranks: Ranks, tmp_path: Path, precision: str) -> None:
        for message in ranks.run(2, _other_terms, self.strategy, str(tmp_path), precision):
            assert_says(message, "32-true", precision, "build the module anew")

    @requires(Capability.META_INIT)
    @precisions("32-true", "bf16-true")
    def test_meta_init(self, ranks: Ranks, tmp_path: Path, precision: str) -> None:
        """Built without memory and initialised unit by unit: the same on every rank, in the precision's dtype."""
        (losses, dtype), other = ranks.run(2, _built_on_meta, self.strategy, str(tmp_path), precision)
        assert losses == other[0]
        assert all(torch.isfinite(torch.tensor(losses)))
        assert dtype is {"32-true": torch.float32, "bf16-true": torch.bfloat16}[precision]

    def test_odd_names(self, ranks: Ranks) -> None:
        assert ranks.run(2, _odd_names, self.strategy) == [sorted(OddNames().state_dict())] * 2

    def test_memory_formats(self, ranks: Ranks) -> None:
        net = Convolutions()
        want = _convolve(net, Tensor.backward, oracle.sgd(net))
        for losses, state in ranks.run(2, _channels_last, self.strategy):
            assert losses == pytest.approx(want, abs=FP32_TOLERANCE)
            for name, tensor in net.state_dict().items():
                torch.testing.assert_close(state[name], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE, msg=name)
