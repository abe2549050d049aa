"""float8 training through torchao: numbers are those of one process that uses torchao likewise."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from fsdp_core.errors import FSDPError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import new_fabric

STEPS, ROWS, SIZE = 4, 16, 32


def see_torchao() -> None:
    """Let this rank import torchao, which the packages' own environment is without."""
    path = os.environ.get("FSDP_TESTS_APART", "")
    if path not in sys.path:
        sys.path.append(path)


class Derived(nn.Linear):
    """A layer with a forward pass of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Layers(nn.Module):
    """A block of layers that can compute in float8, and one of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(SIZE), nn.Linear(SIZE, 48), nn.Linear(48, SIZE, bias=False)
        self.own = Derived(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.own(self.down(torch.tanh(self.up(self.norm(x)))))
        return output


class Stack(nn.Module):
    """Blocks, and a head of a size that float8 units can't take."""

    def __init__(self) -> None:
        super().__init__()
        with oracle.seeded(4):
            self.blocks = nn.ModuleList(Layers() for _ in range(2))
            self.first = nn.Linear(SIZE, SIZE)
            self.head = nn.Linear(SIZE, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(5)
    return [(torch.randn(ROWS, SIZE, generator=g), torch.randn(ROWS, 6, generator=g)) for _ in range(STEPS)]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def plain(shares: int, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """One process with torchao's layers. It sees each rank's share by itself, which is scaled by its own maximum."""
    see_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    net = Stack()
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(net, config=config, module_filter_fn=lambda _, name: name in names)
    optimizer = sgd(net)
    for x, y in batches():
        for its_x, its_y in zip(x.chunk(shares), y.chunk(shares), strict=True):
            (nn.functional.mse_loss(net(its_x), its_y) / shares).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def trained(options: dict[str, Any], folder: str) -> Any:
    """The weights, which layers are torchao's, the weights after the checkpoint was loaded without float8, and a call.

    The call is that of a layer of the root, outside of a step.
    """
    fabric = new_fabric("fsdp2", 2, options)
    net = Stack()
    net.blocks[0].up.noted = "by the user"  # type: ignore[assignment]
    model, optimizer = fabric.setup(net, sgd(net))
    for x, y in batches():
        its_x, its_y = (one.chunk(2)[fabric.global_rank] for one in (x, y))
        fabric.backward(nn.functional.mse_loss(model(its_x), its_y))
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(folder, {"model": model, "optimizer": optimizer})
    state, noted = full_state(fabric.strategy), net.blocks[0].up.noted
    with torch.no_grad():
        outside = net.first(batches()[0][0])
    converted = [name for name, module in net.named_modules() if type(module).__name__ == "Float8Linear"]
    fabric = new_fabric("fsdp2", 2)
    other = Stack()
    model, optimizer = fabric.setup(other, sgd(other))
    fabric.load(folder, {"model": model, "optimizer": optimizer})
    return state, converted, noted, full_state(fabric.strategy), outside


def no_head(module: nn.Module, name: str) -> bool:
    return name != "first"


LAYERS = tuple(f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down"))


def on_rank(folder: str) -> Any:
    see_torchao()
    compiled = {"compile": {"backend": "aot_eager"}, "activation_checkpointing_policy": "every_1"}
    return [
        trained({"float8": True}, f"{folder}-1"),
        trained({"float8": True, "float8_filter": no_head, **compiled}, f"{folder}-2"),
        told_of({"float8": True, "auto_wrap_policy": None}, nn.Sequential(nn.Linear(6, 6), nn.ReLU())),
        told_of({"float8": True}, hooked()),
        told_of({"float8": True}, patched()),
        named_twice(),
        told_of({"float8": with_gathers()}, Stack()),
        told_of({"float8": "rowwise"}, Stack()),
        told_of({"float8": True, "tensor_parallel_size": 2, "tp_plan": {"blocks.*.up": ColwiseParallel()}}, Stack()),
    ]


def hooked() -> nn.Module:
    net = Stack()
    net.blocks[1].down.register_forward_hook(lambda *args: None)
    return net


def patched() -> nn.Module:
    net = Stack()
    net.blocks[1].down.forward = torch.nn.functional.silu  # type: ignore[assignment]
    return net


def named_twice() -> tuple[bool, bool]:
    """Whether a layer that has two names in a module stays one."""
    net = Stack()
    net.again = net.first  # type: ignore[assignment]
    new_fabric("fsdp2", 2, {"float8": True}).setup(net)
    return net.again is net.first, type(net.first).__name__ == "Float8Linear"


def with_gathers() -> Any:
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)


def told_of(options: dict[str, Any], net: nn.Module) -> str:
    return refusal(FSDPError, lambda: new_fabric("fsdp2", 2, options).setup(net))


def test_numbers_and_refusals(ranks: RankPool, tmp_path: Path) -> None:
    if "FSDP_TESTS_APART" not in os.environ:
        pytest.fail("FSDP_TESTS_APART names no folder with torchao; type: python -m nox -s integration")
    layers = ((*LAYERS, "first"), LAYERS, ())
    *wanted, (_, without) = ((names, *ranks.run(1, plain, 2, names)) for names in layers)
    for *runs, too_small, hooks, own, twice, gathers, recipe, divided in ranks.run(
        2, on_rank, str(tmp_path / "c"), timeout=240.0
    ):
        assert twice == (True, True)
        for (state, converted, noted, loaded, outside), (names, want) in zip(runs, wanted, strict=True):
            linear = nn.functional.linear(batches()[0][0], state["first.weight"], state["first.bias"])
            torch.testing.assert_close(outside, linear, rtol=0, atol=0.2)  # float8 is coarse
            assert sorted(converted) == sorted(names)
            assert noted == "by the user"
            assert {tensor.dtype for tensor in state.values()} == {torch.float32}
            torch.testing.assert_close(state, want, rtol=oracle.FP32_TOLERANCE, atol=oracle.FP32_TOLERANCE)
            torch.testing.assert_close(loaded, state, rtol=0, atol=0)
            assert (want["blocks.0.up.weight"] - without["blocks.0.up.weight"]).abs().max() > 1e-4  # float8 is coarse
        assert_says(too_small, "multiples of 16", "Sequential has none", "'0' (6, 6)")
        assert_says(hooks, "'blocks.1.down' has hooks", "float8_filter=")
        assert_says(own, "'blocks.1.down' has a forward of its own", "float8_filter=")
        assert_says(gathers, "enable_fsdp_float8_all_gather", "Leave it out")
        assert_says(recipe, "float8='rowwise'", "from_recipe_name('rowwise')")
        assert_says(divided, "tensor_parallel_size", "Leave out one")
