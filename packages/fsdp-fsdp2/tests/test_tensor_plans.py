"""Plans of tensor parallelism as models bring them, and styles that torch can't apply."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

import fsdp_core
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import RankPool
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.training import new_fabric
from fsdp_fsdp2.tensor_parallel.model_plans import own_units
from fsdp_fsdp2.tensor_parallel.styles import described_plan, styles_of
from fsdp_fsdp2.user_sharding.parallelize_fn import check_parallelize_fn


class Layer(nn.Module):
    """As transformers' models do, it names its own styles; one of its patterns matches nothing in it."""

    _tp_plan: ClassVar = {"up": "colwise", "down": "rowwise", "gate": "colwise", "norm": "sequence_parallel"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return output


class Model(nn.Module):
    """Layers, and a plan of its own that a layer's does not replace."""

    _tp_plan: ClassVar = {
        "head": "colwise_rep",
        "first": "rowwise_split_input",
        "last": "colwise_gather_output",
        "middle": "rowwise_rep",
        "layers.1.up": RowwiseParallel(),
    }

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head, self.first, self.last, self.middle = (nn.Linear(4, 4) for _ in range(4))


class NotHere(ParallelStyle):
    """A style of somebody else's."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        raise NotImplementedError("it is for convolutions")


def test_plan_that_a_model_brings() -> None:
    root = nn.ModuleDict({"model": Model()})
    styles: dict[str, Any] = dict(styles_of(root, "auto", 2).values())
    assert {name: type(style) for name, style in styles.items()} == {
        "model.layers.0.up": ColwiseParallel,
        "model.layers.0.down": RowwiseParallel,
        "model.layers.0.norm": SequenceParallel,
        "model.layers.1.up": RowwiseParallel,
        "model.layers.1.down": RowwiseParallel,
        "model.layers.1.norm": SequenceParallel,
        "model.head": ColwiseParallel,
        "model.first": RowwiseParallel,
        "model.last": ColwiseParallel,
        "model.middle": RowwiseParallel,
    }
    for name in ("head", "last"):
        assert styles[f"model.{name}"].output_layouts == (Replicate(),)
    for name in ("first", "middle"):
        assert styles[f"model.{name}"].input_layouts == (Replicate(),)
    assert styles["model.layers.0.up"].output_layouts == (Shard(-1),)


@pytest.mark.parametrize(
    ("plan", "described"),
    [
        (None, None),
        ("auto", "auto"),
        ({"of": NotHere()}, {"of": "NotHere"}),
    ],
)
def test_plan_as_plain_data(plan: Any, described: object) -> None:
    """By which ranks are compared, and a module that is sharded again."""
    assert described_plan(plan) == described


def test_layouts_are_a_part_of_a_plan() -> None:
    plans = [{"up": ColwiseParallel()}, {"up": ColwiseParallel()}, {"up": ColwiseParallel(output_layouts=Replicate())}]
    same, again, other = map(described_plan, plans)
    assert same == again != other


def not_here() -> str:
    fabric = new_fabric("fsdp2", 2, {"tensor_parallel_size": 2, "tp_plan": {"layers.0.up": NotHere()}})
    return refusal(ShardingError, lambda: fabric.setup(Model()))


def test_style_that_torch_cannot_apply(ranks: RankPool) -> None:
    for told in ranks.run(2, not_here):
        assert_says(told, "'layers.0.up' the style NotHere", "to a Linear: it is for convolutions", "another style")


class WithoutLayers(nn.Module):
    """Brings a plan of units that none of its modules matches, as a model of transformers with unusual names does."""

    _fsdp_plan: ClassVar = {"layers.*": "free_full_weight"}

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(2, 2)


def penalized() -> str:
    layer = Layer()
    options = {"tensor_parallel_size": 2, "tp_plan": {"up": ColwiseParallel(), "down": RowwiseParallel()}}
    fabric = new_fabric("fsdp2", options=options)
    model, _ = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    return refusal(UnsupportedCapabilityError, lambda: torch.autograd.grad(model(x).sum(), x, create_graph=True))


def test_second_derivatives_of_divided_layers_are_refused(ranks: RankPool) -> None:
    for told in ranks.run(2, penalized):
        assert_says(told, "create_graph=True", "tp_plan", "Leave tensor_parallel_size and tp_plan out")


def test_a_plan_of_units_that_names_nothing_is_none() -> None:
    assert own_units(WithoutLayers()) is None


def test_a_parallelize_fn_may_need_an_option() -> None:
    check_parallelize_fn(lambda module, mesh, *, mp_policy, **options: module, ["compile"], ["mp_policy", "compile"])


@pytest.mark.parametrize("front_end", ["trainer", "fabric"])
def test_parts_of_the_data_are_known_before_the_ranks_join(front_end: FrontEnd) -> None:
    """As under Lightning's own strategies: each rank read all of the data."""
    made: Any = fsdp_core.resolve("fsdp2", front_end)(tensor_parallel_size=2, tp_plan="auto")
    made.parallel_devices = [torch.device("cpu")] * 4
    made.cluster_environment = LightningEnvironment()
    assert made.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 0}
