"""With ``use_orig_params=False``, what a step looks for in modules that FSDP1 leaves without parameters is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_core import gathered
from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import FEATURES, Block
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import Lit, loader, means, new_fabric, new_trainer

OPTIONS = {"use_orig_params": False}


class Net(nn.Module):
    """Blocks between layers that belong to the root; one of these asks for its own parameters, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.head = AsksItself(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Any:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class AsksItself(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        list(self.parameters())
        return super().forward(x)


#: What loops do with the parameters of a module.
LOOPS: dict[str, Callable[[nn.Module], Any]] = {
    "penalty": lambda module: sum(p.square().sum() for p in module.parameters()),
    "clamp": lambda module: [p.data.clamp_(-0.1, 0.1) for p in module.parameters()],
    "average": lambda module: [p.detach().clone() for _, p in module.named_parameters()],
    "clip": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.1),
    "forget": lambda module: module.zero_grad(),
}

#: What is done with one parameter.
READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda weight: weight.norm(),
    "data": lambda weight: weight.data.clamp_(-0.1, 0.1),
    "product": lambda weight: torch.ones_like(weight) @ weight,
    "in place": lambda weight: weight.detach().mul_(0.5),
    "in a list": lambda weight: torch.cat([weight, weight]),
    "copy": lambda weight: copy.deepcopy(weight),
    "values": lambda weight: weight.tolist(),
}


def refuse_loops(net: Any) -> list[str]:
    """The refusals of loops over modules without parameters. Loops over others are done."""
    for whole in (net.blocks, *net.blocks):
        assert list(whole.parameters())
    parts = net.inp, net.head, net.blocks[0].up
    return [
        refusal(UnsupportedCapabilityError, lambda loop=loop, part=part: loop(part))
        for part in parts
        for loop in LOOPS.values()
    ]


def refuse_reads(net: Any) -> list[str]:
    """The refusals of reads of what is freed, which ended the process."""
    weights = net.inp.weight, net.blocks[0].up.weight
    assert all(weight.shape[1] == FEATURES and weight.dtype == torch.float32 for weight in weights)
    return [
        refusal(UnsupportedCapabilityError, lambda read=read, weight=weight: read(weight))
        for weight in weights
        for read in READS.values()
    ]


def refuse_norm(unit: nn.Module) -> None:
    """In a step and between two: the unit's flat parameter is this rank's piece."""
    flat = next(p for p in unit.parameters() if p.ndim)  # its gain, without dimensions, is no part of it
    assert_says(refusal(UnsupportedCapabilityError, flat.norm), "norm of a parameter would see this rank's piece of it")


def attack(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Inputs that are moved along the sign of a gradient, by a pass that adds to no parameter's gradient."""
    x = x.detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(nn.functional.mse_loss(net(x), y), x)
    return (x + 0.1 * gradient.sign()).detach()


class Looping(Lit):
    """Tries all of it in each step and after it."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.net = Net()
        self.loops: list[str] = []
        self.reads: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loops += refuse_loops(self.net)
        refuse_norm(self.net.blocks[0])
        x, y = batch
        batch = attack(self.net, x, y), y
        refuse_norm(self.net.blocks[0])
        loss = super().training_step(batch, batch_idx)
        refuse_norm(self.net.blocks[0])
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.loops += refuse_loops(self.net)
        self.reads += refuse_reads(self.net)


Run = tuple[list[str], list[str], list[float], dict[str, Tensor]]


def fit(tmp: str) -> Run:
    module = Looping()
    run = new_trainer(tmp, "fsdp_native", 2, OPTIONS)
    run.fit(module, loader(2, 2))
    weights = {name.removeprefix("net."): weight for name, weight in full_state(run.strategy).items()}
    return module.loops, module.reads, means(module.losses), weights


def train_plainly() -> tuple[list[float], dict[str, Tensor]]:
    net = Net()
    optimizer, losses = oracle.sgd(net), []
    for x, y in oracle.global_batches(2):
        loss = nn.functional.mse_loss(net(attack(net, x, y)), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, net.state_dict()


def fit_by_fabric() -> Run:
    fabric = new_fabric("fsdp_native", 2, OPTIONS)
    net = Net()
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    loops, reads, losses = refuse_loops(net), refuse_reads(net), []
    for x, y in fabric.setup_dataloaders(loader(2, 2)):
        x = attack(model, x, y)
        refuse_norm(net.blocks[0])
        loss = nn.functional.mse_loss(model(x), y)
        loops += refuse_loops(net)
        losses.append(loss.detach())
        refuse_norm(net.blocks[0])
        fabric.backward(loss)
        refuse_norm(net.blocks[0])
        loops += refuse_loops(net)
        reads += refuse_reads(net)
        optimizer.step()
        optimizer.zero_grad()
        loops += refuse_loops(net)
        reads += refuse_reads(net)
        refuse_norm(net.blocks[0])
    with gathered(net):
        assert LOOPS["penalty"](net.inp) > 0
        assert len(LOOPS["average"](net.inp)) == 2
    return loops, reads, means(losses), full_state(fabric.strategy)


@pytest.mark.parametrize("front_end", ["trainer", "fabric"])
def test_parts_of_flat_parameters(ranks: RankPool, tmp_path: Path, front_end: str) -> None:
    plain_losses, plain_weights = train_plainly()
    trained = ranks.run(2, fit, str(tmp_path)) if front_end == "trainer" else ranks.run(2, fit_by_fabric)
    for loops, reads, losses, weights in trained:
        for message in loops:
            assert_says(message, "parameters() of", "would lack", "auto_wrap_policy", "use_orig_params=False out")
        for message in reads:
            assert_says(message, "weight' was used outside of the forward()", "memory is freed", "gathered(module)")
        assert loops
        assert reads
        assert losses == pytest.approx(plain_losses, abs=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, plain_weights[name], rtol=1e-4, atol=1e-5)
