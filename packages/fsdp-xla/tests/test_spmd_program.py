"""The program that XLA makes of a step is that of FSDP: weights are gathered, gradients reduced, activations stay.

The model's weights are much smaller and larger than its activations, so that shapes tell them apart.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from launching import LaunchingSPMD
from spmd_runs import new_fabric

ROWS, WIDTH, HIDDEN = 16, 64, 256


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.relu(self.up(x)))


def collectives(folder: Path) -> Counter[str]:
    """The collectives of the largest program, by what they give, such as ``all-gather f32[64,256]``."""
    programs = folder.glob("*after_optimizations.txt")
    program = max(programs, key=lambda path: path.stat().st_size).read_text()
    found = re.findall(r" = (\w+\[[\d,]*\])\S* (all-gather|all-reduce|reduce-scatter|all-to-all)\(", program)
    return Counter(f"{kind} {shape}" for shape, kind in found)


def train(folder: Path, options: dict[str, Any]) -> Counter[str]:
    """Two steps; the collectives of their program. XLA reads where to write its programs when it is started."""
    os.environ["XLA_FLAGS"] += f" --xla_dump_to={folder} --xla_dump_hlo_as_text"
    fabric: Any = new_fabric(options)
    net = nn.Sequential(nn.Sequential(Part(), Part(), Part()), nn.Linear(WIDTH, 8))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        x, y = fabric.strategy.batch_to_devices((torch.randn(ROWS, WIDTH), torch.randn(ROWS, 8)))
        fabric.backward(mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return collectives(folder)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    cases: dict[str, dict[str, Any]] = {"plain": {}, "recomputed": {"activation_checkpointing_policy": {Part}}}
    for case, options in cases.items():
        with LaunchingSPMD() as ranks:
            found[case] = ranks.call(4, train, tmp_path_factory.mktemp(case), options)
    return found


@pytest.mark.parametrize("case", ["plain", "recomputed"])
def test_no_activation_crosses_devices(programs: dict[str, Counter[str]], case: str) -> None:
    sizes = {int(size) for each in programs[case] for size in each.partition("[")[2].strip("]").split(",") if size}
    assert sizes, "no collective was found"
    assert ROWS not in sizes
    assert ROWS // 4 not in sizes


@pytest.mark.parametrize("case", ["plain", "recomputed"])
def test_weights_are_gathered_and_gradients_reduced(programs: dict[str, Counter[str]], case: str) -> None:
    shapes = (f"[{WIDTH},{HIDDEN}]", f"[{HIDDEN},{WIDTH}]")
    gathered = sum(programs[case][f"all-gather f32{shape}"] for shape in shapes)
    reduced = sum(programs[case][f"all-reduce f32{shape}"] for shape in shapes)
    # six weights: forward and backward, but for the first weight, whose input needs no gradient
    assert gathered >= 11
    assert reduced == 6


def test_what_is_recomputed_is_gathered_once_more(programs: dict[str, Counter[str]]) -> None:
    def gathered(case: str) -> int:
        return sum(count for each, count in programs[case].items() if each.startswith("all-gather"))

    assert gathered("recomputed") > gathered("plain")
