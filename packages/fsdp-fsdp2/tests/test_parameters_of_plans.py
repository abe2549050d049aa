"""Parameters that a plan divides, or a user's own mesh, stay what they were: frozen, tied, with their attributes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.functional import mse_loss

import fsdp_core
from fsdp_core.errors import ShardingError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import new_fabric, new_trainer, whole_batches
from fsdp_fsdp2.torch_private.parameter_groups import parameters_of
from mesh_runs import WIDTH, OwnLoader, options_of
from test_parallel_axes import Normed

pytestmark = pytest.mark.everything

State = dict[str, Tensor]


def assert_close(got: State, want: Any) -> None:
    torch.testing.assert_close(got, dict(want), rtol=oracle.FP32_TOLERANCE, atol=oracle.FP32_TOLERANCE)


def stepped(net: nn.Module, *batches: Tensor) -> State:
    """One process: the weights after a step over the mean of some batches."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, weight_decay=0.1)
    for x in batches:
        (net(x).square().mean() / len(batches)).backward()
    optimizer.step()
    return {name: value.detach() for name, value in net.state_dict().items()}


# -- frozen -----------------------------------------------------------------------------------------------------------


def frozen_norm() -> nn.Module:
    with oracle.seeded(3):
        net = Normed()
    net.norm.requires_grad_(False)
    return net


SEQUENCE = torch.linspace(-1, 1, 4 * 8 * 6).view(4, 8, 6)


def frozen_on() -> tuple[list[str], State]:
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel()}
    fabric = new_fabric("fsdp2", 2, {"tensor_parallel_size": 2, "tp_plan": plan})
    net = frozen_norm()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.5, weight_decay=0.1))
    fabric.backward(model(SEQUENCE).square().mean())
    optimizer.step()
    return [name for name, parameter in net.named_parameters() if parameter.requires_grad], full_state(fabric.strategy)


# -- tied in a block --------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Uses one matrix twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + torch.tanh(self.second(torch.tanh(self.first(x))))
        return output


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with oracle.seeded(4):
            self.blocks = nn.ModuleList([Tied(), Tied()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


ROWS = torch.linspace(-2, 2, 4 * 8).view(4, 8)


def tied_on(folder: str) -> tuple[list[int], State]:
    """A step in whose accumulation a checkpoint was saved and loaded."""
    whole = ColwiseParallel(output_layouts=Replicate())
    plan = {"blocks.*.first": whole, "blocks.*.second": ColwiseParallel(output_layouts=Replicate())}

    def set_up() -> tuple[Any, Any, Any, Any]:
        fabric = new_fabric("fsdp2", 2, {"tensor_parallel_size": 2, "tp_plan": plan})
        net = Chain()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, weight_decay=0.1)
        return fabric, net, *fabric.setup(net, optimizer)

    fabric, net, model, optimizer = set_up()
    with fabric.no_backward_sync(model):
        fabric.backward(model(ROWS).square().mean() / 2)
    fabric.save(folder, {"model": model, "optimizer": optimizer, "gradients": fsdp_core.AccumulatedGradients(model)})
    fabric, net, model, optimizer = set_up()
    fabric.load(folder, {"model": model, "optimizer": optimizer, "gradients": fsdp_core.AccumulatedGradients(model)})
    fabric.backward(model(-2 * ROWS).square().mean() / 2)
    optimizer.step()
    held = [len(parameters_of(block)) for block in net.blocks]
    return held, full_state(fabric.strategy)


# -- what no unit can hold, and what ranks do not agree on ------------------------------------------------------------


class ScaledNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), Scale()

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.up(x))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class Sequence(nn.Module):
    """Of which ranks have parts, up to a layer that needs the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(10, 6), nn.LayerNorm(6), nn.Linear(6, 10)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.norm(self.embedding(tokens)))


def uneven_on() -> str:
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    fabric = new_fabric("fsdp2", 2, {"tensor_parallel_size": 2, "tp_plan": plan})
    with oracle.seeded(3):
        net = Sequence()
    model = fabric.setup(net)
    with oracle.seeded(3):
        plain = Sequence()
    tokens = torch.arange(8).view(2, 4)
    torch.testing.assert_close(model(tokens).cpu(), plain(tokens))
    return refusal(ShardingError, lambda: model(torch.arange(10).view(2, 5)))


def refused_on() -> tuple[str, str]:
    plan = {"up": ColwiseParallel(output_layouts=Shard(0)), "norm": SequenceParallel()}
    fabric = new_fabric("fsdp2", 2, {"tensor_parallel_size": 2, "tp_plan": plan})
    scalar = refusal(ShardingError, lambda: fabric.setup(ScaledNorm()))
    layouts = {"up": ColwiseParallel(output_layouts=Shard(-1) if fabric.global_rank else Replicate())}
    fabric = new_fabric("fsdp2", 2, {"tensor_parallel_size": 2, "tp_plan": layouts})
    return scalar, refusal(ShardingError, lambda: fabric.setup(ScaledNorm()))


def all_on_two(folder: str) -> tuple[Any, ...]:
    return frozen_on(), tied_on(folder), (*refused_on(), uneven_on())


def test_parameters_stay_what_they_were(ranks: RankPool, tmp_path: Path) -> None:
    got = ranks.run(2, all_on_two, str(tmp_path / "saved"))
    for (trained, frozen), (held, tied), (scalar, layouts, uneven) in got:
        assert trained == ["up.weight", "up.bias", "down.weight", "down.bias"]  # SequenceParallel trained the norm too
        assert_close(frozen, stepped(frozen_norm(), SEQUENCE))
        assert held == [3, 3]
        assert_close(tied, stepped(Chain(), ROWS, -2 * ROWS))
        assert_says(scalar, "'norm.scale'", "its shape ()", "Leave its module out of tp_plan")
        assert_says(uneven, "dimension 1 of what 'embedding' returns, of shape (2, 5, 6)", "such as a sequence to 6")
        assert_says(layouts, "rank 1 has not set up the same ScaledNorm", "option 'tp_plan'", "Shard(dim=-1)")


# -- attributes, own meshes -------------------------------------------------------------------------------------------


class Hinted(OwnLoader):
    """Some parameters have a hint to the optimizer, which is built when they are shards."""

    def __init__(self) -> None:
        super().__init__("sgd", width=WIDTH)
        self.net.blocks[0].up.weight.decays = False
        self.net.inp.weight.decays = False
        self.net.blocks[1].gain.decays = False
        self.steps = 1

    def configure_optimizers(self) -> Any:
        self.hinted = [name for name, one in self.named_parameters() if not getattr(one, "decays", True)]
        return super().configure_optimizers()


def hinted_on(tmp: str) -> list[str]:
    module = Hinted()
    new_trainer(tmp, "fsdp2", 4, options_of("shard 2 x tensor 2", "net.")).fit(module)
    return module.hinted


def own_mesh_on() -> tuple[Any, State]:
    """A net that its user divides over a mesh of the same ranks, whose axes have other names."""
    fabric = new_fabric("fsdp2", 4, {"tensor_parallel_size": 2})
    net = oracle.new_net(width=WIDTH)
    mesh = init_device_mesh(fabric.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"], ignored_params={block.gain})
    fully_shard(net, mesh=mesh["dp"], ignored_params={block.gain for block in net.blocks})
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    x, y = whole_batches(fabric, 1)[0]
    fabric.backward(mse_loss(model(x), y))
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
    told = refusal(ShardingError, optimizer.step)
    return (float(norm), told), full_state(fabric.strategy)


def all_on_four(tmp: str) -> tuple[Any, ...]:
    return hinted_on(tmp), own_mesh_on()


def test_attributes_and_own_meshes(ranks: RankPool, tmp_path: Path) -> None:
    net = oracle.new_net(width=WIDTH)
    x, y = oracle.global_batches(1)[0]
    mse_loss(net(x), y).backward()
    norm = float(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
    oracle.sgd(net).step()
    for hinted, ((clipped, told), state) in ranks.run(4, all_on_four, str(tmp_path)):
        assert hinted == ["net.inp.weight", "net.blocks.0.up.weight", "net.blocks.1.gain"]
        assert told == "instead of a refusal: nothing was raised"
        assert clipped == pytest.approx(norm, rel=oracle.FP32_TOLERANCE)
        assert_close(state, net.state_dict())
