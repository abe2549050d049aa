"""Every backend's checkpoint on every number of ranks opens in every backend on every number of ranks, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_core import checkpoint as checkpoints
from fsdp_core.testing import RankPool
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.training import new_fabric

STRATEGIES = ["fsdp_native", "fsdp2"]
#: How tensors are cut doesn't depend on their dtypes: those of other precisions are seen on an even and an odd number.
WORLDS = {"32-true": (1, 2, 3, 4), "bf16-mixed": (2, 3), "bf16-true": (2, 3)}


class Odd(nn.Module):
    """Whatever is hard to divide: uneven, tied, frozen, 0-dim, never stepped, and buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.frozen = nn.Linear(5, 3)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(()))
        self.unused = nn.Linear(1, 9)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("mean", torch.randn(5))

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids) + self.mean
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.scale
        return self.head(x).float().log_softmax(-1).mean() + self.frozen(x).float().square().mean()


def set_up(strategy: str, world_size: int, precision: str, seed: int, **options: Any) -> tuple[Any, dict[str, Any]]:
    fabric = new_fabric(strategy, world_size, options or None, precision=precision)
    net = Odd(seed)
    blocks: Any = net.blocks
    adam = torch.optim.AdamW(
        [
            {"params": [block.weight for block in blocks], "weight_decay": 0.1},
            {"params": [*(block.bias for block in blocks), *net.unused.parameters()], "lr": 0.02},
        ],
        lr=0.01,
    )
    sgd = torch.optim.SGD([net.embedding.weight, net.scale], lr=0.1, momentum=0.9)
    model, *optimizers = fabric.setup(net, adam, sgd)
    return fabric, {"model": model, "adam": optimizers[0], "sgd": optimizers[1]}


def step(fabric: Any, state: dict[str, Any]) -> float:
    """Train for a step; the loss after it."""
    fabric.backward(state["model"](torch.arange(7)))
    for key in ("adam", "sgd"):
        state[key].step()
        state[key].zero_grad()
    return float(state["model"](torch.arange(7)).detach())


def train_and_save(strategy: str, precision: str, path: str) -> float:
    """Two steps and a third one, whose loss is what training goes on with."""
    fabric, state = set_up(strategy, 1, precision, seed=1)
    for index in range(3):
        if index == 2:
            fabric.save(path, state)
        loss = step(fabric, state)
    return loss


def load_and_save(strategy: str, world_size: int, precision: str, paths: list[tuple[str, str]]) -> list[float]:
    """Each path is loaded into what holds other values, and saved again; then training goes on for a step."""
    fabric, state = set_up(strategy, world_size, precision, seed=2)
    losses = []
    for source, target in paths:
        fabric.load(source, state)
        fabric.save(target, state)
        losses.append(step(fabric, state))
    return losses


def load_and_scatter(strategy: str, world_size: int, source: str, folder: str) -> None:
    """The same, saved again by ranks that stand in different folders."""
    fabric, state = set_up(strategy, world_size, "32-true", seed=2, scattered_save=True)
    fabric.load(source, state)
    fabric.save(Path(folder, f"rank{fabric.global_rank}", "run.ckpt"), state)


def flat(nest: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a state; tensors are read."""
    if isinstance(nest, dict):
        for key in sorted(nest, key=str):
            yield from flat(nest[key], f"{path}/{key}")
    elif isinstance(nest, (list, tuple)):
        for index, item in enumerate(nest):
            yield from flat(item, f"{path}/{index}")
    else:
        yield path, nest.full() if isinstance(nest, checkpoints.SavedTensor) else nest


def contents(path: Path) -> dict[str, Any]:
    return dict(flat(checkpoints.load(path)))


def assert_bit_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, Tensor):
            assert got[name].dtype == value.dtype, name
            assert torch.equal(got[name], value), name
        else:
            assert got[name] == value, name


@pytest.mark.drawn
@pytest.mark.parametrize("precision", WORLDS)
def test_any_layout_to_any_other(ranks: RankPool, tmp_path: Path, precision: str) -> None:
    first = tmp_path / "first"
    (next_loss,) = ranks.run(1, train_and_save, "fsdp2", precision, str(first))
    want = contents(first)
    half = precision == "bf16-true"
    assert want["/model/head.weight"].dtype == (torch.bfloat16 if half else torch.float32)
    assert torch.equal(want["/model/head.weight"], want["/model/embedding.weight"])
    assert want["/model/scale"].shape == ()
    assert want["/adam/state/blocks.0.weight/exp_avg"].any()
    assert not any("unused" in name or "frozen" in name for name in want if name.startswith("/adam/state"))

    layouts = [(strategy, world) for strategy in STRATEGIES for world in WORLDS[precision]]
    for strategy, world in layouts:
        saved = tmp_path / f"{strategy}{world}"
        ranks.run(world, load_and_save, strategy, world, precision, [(str(first), str(saved))])
        assert_bit_equal(contents(saved), want)
    for strategy, world in layouts:
        paths = [(str(tmp_path / f"{a}{n}"), str(tmp_path / f"{a}{n}-{strategy}{world}")) for a, n in layouts]
        for losses in ranks.run(world, load_and_save, strategy, world, precision, paths):
            if precision == "32-true":
                assert losses == pytest.approx([next_loss] * len(layouts), abs=FP32_TOLERANCE)
        for _, target in paths:
            assert_bit_equal(contents(Path(target)), want)


def test_scattered_parts_are_joined_to_what_any_backend_loads(ranks: RankPool, tmp_path: Path) -> None:
    first = str(tmp_path / "first")
    ranks.run(1, train_and_save, "fsdp2", "32-true", first)
    want = contents(Path(first))
    for saver, reader in (("fsdp2", "fsdp_native"), ("fsdp_native", "fsdp2")):
        folder, whole, again = tmp_path / saver, tmp_path / f"{saver}.ckpt", tmp_path / f"{saver}-again.ckpt"
        ranks.run(3, load_and_scatter, saver, 3, first, str(folder))
        checkpoints.gather([folder / f"rank{rank}" / "run.ckpt" for rank in (2, 0, 1)], whole)
        assert_bit_equal(contents(whole), want)
        ranks.run(2, load_and_save, reader, 2, "32-true", [(str(whole), str(again))])
        assert_bit_equal(contents(again), want)
