"""What hooks and code after a fit compute of a rank's pieces of parameters is refused, unless it is elementwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from fsdp_core import full_state_dict, load_state_dict
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import FEATURES
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer
from native_runs import HYBRID, set_up


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank, as PEFT builds it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.down = nn.Linear(FEATURES, 2, bias=False)
        self.up = nn.Linear(2, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))

    def merge(self) -> None:
        self.base.weight.data += self.up.weight @ self.down.weight

    def shrink(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9).clamp_(-1.0, 1.0)


class Merging(Lit):
    """Merges the adapter in one of its hooks, and in all of them changes elements by themselves."""

    def __init__(self, hook: str, automatic: bool) -> None:
        super().__init__("sgd")
        self.net = Adapted()
        self.automatic_optimization = automatic
        self.told: list[str] = []
        self.hook = hook

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def called(self, hook: str) -> None:
        if hook == self.hook:
            self.told.append(refusal(UnsupportedCapabilityError, self.net.merge))
            self.net.shrink()

    def on_train_batch_start(self, *_: Any) -> None:
        self.called("on_train_batch_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.called("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.called("on_train_epoch_end")

    def on_fit_end(self) -> None:
        self.called("on_fit_end")


def merged(tmp: str, hook: str, automatic: bool, accumulate: int) -> list[str]:
    module = Merging(hook, automatic)
    run = new_trainer(tmp, "fsdp_native", 2, {"auto_wrap_policy": None}, accumulate_grad_batches=accumulate)
    run.fit(module, loader(2, 2), loader(1, 2))
    if hook == "after the fit":
        module.called(hook)
        run.fit(module, loader(2, 2), loader(1, 2))  # goes on as ever
    return module.told


@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "on_fit_end", "after the fit"]
)
@pytest.mark.parametrize(("automatic", "accumulate"), [(True, 1), (True, 2), (False, 1)])
def test_merging_pieces_between_steps_is_refused(
    ranks: RankPool, tmp_path: Path, hook: str, automatic: bool, accumulate: int
) -> None:
    for told in ranks.run(2, merged, str(tmp_path), hook, automatic, accumulate):
        assert told
        for message in told:
            assert_says(message, "matmul", "this rank's piece", "gathered(module)")


def written_by_index() -> tuple[list[str], list[float]]:
    fabric, net, _, _ = set_up({"auto_wrap_policy": None}, net=nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=False)))
    weight = net[0].weight
    with torch.no_grad():
        weight[:] = 2.0
        weight[...] *= 0.5
        weight.data[weight.data > 0.5] = 3.0

    def assign() -> None:
        with torch.no_grad():
            weight[0:1] = 0.0

    told = [
        refusal(UnsupportedCapabilityError, write)
        for write in (
            assign,
            lambda: weight.data.__setitem__(torch.tensor([0]), 0.0),
            lambda: weight.data.index_fill_(0, torch.tensor([0]), 0.0),
            lambda: weight.detach().tril_(),
        )
    ]
    return told, full_state(fabric.strategy)["0.weight"].flatten().tolist()


def test_rows_of_a_piece_are_refused(ranks: RankPool) -> None:
    """An index counts from the piece's beginning; what looks at each element by itself is right."""
    for told, values in ranks.run(2, written_by_index):
        for message in told:
            assert_says(message, "this rank's piece", "gathered(module)")
        assert values == [3.0] * FEATURES**2


def new_pair() -> nn.Sequential:
    """Two weights of one shape, of which ranks hold different elements: a unit's first half has no place for a bias."""
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES, bias=False))


#: What mixes two parameters, or a gradient and another parameter.
MIXTURES: dict[str, Callable[[nn.Parameter, nn.Parameter], Any]] = {
    "lerp_": lambda a, b: a.lerp_(b, 0.5),
    "add_": lambda a, b: a.add_(b),
    "copy_": lambda a, b: a.copy_(b),
    "mul": lambda a, b: a * b,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "of clones": lambda a, b: a.detach().clone().add_(2 * b.data),
    "a gradient": lambda a, b: a.sub_(b.grad),
    "gradients": lambda a, b: a.grad.add_(b.grad),  # type: ignore[union-attr]
    "an assignment": lambda a, b: setattr(a, "data", b.data),
    "_foreach_lerp_": lambda a, b: torch._foreach_lerp_([a.data, b.data], [b.data, a.data], 0.5),
}


def mixed() -> dict[str, str]:
    fabric, net, model, _ = set_up({"auto_wrap_policy": {nn.Linear}}, net=new_pair())
    fabric.backward(model(torch.ones(2, FEATURES)).square().mean())
    told: dict[str, str] = {}
    for name, mix in MIXTURES.items():
        with torch.no_grad():
            told[name] = refusal(UnsupportedCapabilityError, partial(mix, net[0].weight, net[1].weight))
    return told


def test_pieces_of_two_parameters_are_not_mixed(ranks: RankPool) -> None:
    for told in ranks.run(2, mixed):
        for name, message in told.items():
            assert_says(message, "0.weight' and '", "different elements", "gathered(module, modifier_rank=0)")
            assert name != "an assignment" or message.startswith("an assignment of '0.weight' and '1.weight'")


def step_by_hand(net: nn.Module, average: nn.Module, averages: list[Tensor], momenta: list[Tensor]) -> None:
    """Steps with momentum, clipped by a number, and averages by hand, of copies and of another model."""
    norm = torch.tensor([2.0])
    with torch.no_grad():
        parameters = list(net.parameters())
        for p, q, held, momentum in zip(parameters, average.parameters(), averages, momenta, strict=True):
            if p.grad is not None:  # none, where this rank has no element
                momentum.mul_(0.9).add_(p.grad / norm)
                p.grad.copy_(torch.where(p > 0, p.grad, torch.zeros_like(p)))
            p.addcmul_(momentum, torch.ones_like(p), value=-0.1).clamp_(-1.0, 1.0)
            held.lerp_(p, 0.5)
            q.lerp_(held, 0.5)
        torch._foreach_lerp_(averages, parameters, 0.5)
        torch._foreach_mul_(torch._foreach_sub(averages, parameters), 2.0)
        for p, held in zip(parameters, averages, strict=True):
            p.copy_(held)


def stepped_by_hand(strategy: str) -> list[dict[str, Tensor]]:
    with oracle.seeded(3):
        nets = [new_pair(), new_pair()]
    x = torch.linspace(-1.0, 1.0, 2 * FEATURES).view(2, FEATURES)
    backward: Callable[[Tensor], Any] = Tensor.backward
    model: nn.Module = nets[0]
    if strategy != "none":
        fabric = new_fabric(strategy, 2, {"auto_wrap_policy": {nn.Linear}})
        backward = fabric.backward
        model, _ = fabric.setup(nets[0], torch.optim.SGD(nets[0].parameters(), lr=0.1))
        fabric.setup(nets[1], torch.optim.SGD(nets[1].parameters(), lr=0.1))
    averages = [p.detach().clone() for p in nets[0].parameters()]
    momenta = [torch.zeros_like(p) for p in nets[0].parameters()]
    for _ in range(2):
        backward(model(x).square().mean())
        step_by_hand(*nets, averages, momenta)
        for p in nets[0].parameters():
            p.grad = None
    return [dict(net.state_dict()) if strategy == "none" else full_state_dict(net) for net in nets]


def test_what_belongs_to_one_parameter_is_computed_together(ranks: RankPool) -> None:
    want = stepped_by_hand("none")
    got = ranks.run(2, stepped_by_hand, "fsdp_native")[0]
    torch.testing.assert_close(got, want, atol=oracle.FP32_TOLERANCE, rtol=0)


def scale(net: nn.Module, factor: float) -> None:
    for p in net.parameters():
        p.data = p.data * factor


def assigned(tmp: str, is_root: bool) -> list[dict[str, Tensor]]:
    """What is read after ``parameter.data = …`` between steps: by hand, from a checkpoint, and what a load leaves."""
    fabric = new_fabric("fsdp_native", 2, {"auto_wrap_policy": None if is_root else {nn.Linear}})
    with oracle.seeded(3):
        net = new_pair()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.save(f"{tmp}/before.ckpt", {"model": model})
    fabric.backward(model(torch.ones(2, FEATURES)).square().mean())
    scale(net, 0.5)
    exported = full_state_dict(net)
    scale(net, 0.5)
    fabric.save(f"{tmp}/after.ckpt", {"model": model})
    optimizer.zero_grad()
    scale(net, 0.5)
    fabric.load(f"{tmp}/before.ckpt", {"model": model})
    outputs = [model(torch.ones(2, FEATURES))]  # without a backward pass, after which units may stay gathered
    loaded = full_state_dict(net)
    model(torch.ones(2, FEATURES))
    scale(net, 2.0)
    outputs.append(model(torch.ones(2, FEATURES)))
    scale(net, 2.0)
    called = full_state_dict(net)
    with torch.no_grad():
        told = refusal(UnsupportedCapabilityError, partial(setattr, net[0].weight, "data", torch.ones(1000)))
    assert_says(told, "an assignment", "this rank's piece", "gathered(module)")
    assert not torch.allclose(*outputs)
    return [exported, load_state_dict(f"{tmp}/after.ckpt"), loaded, called]


@pytest.mark.parametrize("is_root", [False, True])
def test_assigned_data_is_what_is_read(ranks: RankPool, tmp_path: Path, is_root: bool) -> None:
    with oracle.seeded(3):
        initial = new_pair().state_dict()
    for factor, got in zip((0.5, 0.25, 1.0, 4.0), ranks.run(2, assigned, str(tmp_path), is_root)[0], strict=True):
        torch.testing.assert_close(dict(got), {name: tensor * factor for name, tensor in initial.items()})


def filled() -> tuple[dict[str, str], list[float]]:
    """What is refused of plain tensors that pieces are written to, and of plain ones that are cut into pieces."""
    fabric, net, _, _ = set_up(
        {"auto_wrap_policy": None}, net=nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES))
    )
    parameters = list(net.parameters())
    averages = [torch.zeros(p.shape) for p in parameters]
    products, copies, slices = (torch.empty(parameters[0].shape) for _ in range(3))
    with torch.no_grad():
        for average, p in zip(averages, parameters, strict=True):
            average.mul_(0.9).add_(p, alpha=0.1)
        torch.mul(parameters[0], 2.0, out=products)
        copies.copy_(parameters[0])
        slices[:] = parameters[0]
    vector = torch.zeros(2 * FEATURES * (FEATURES + 1))
    reads: dict[str, Callable[[], Any]] = {
        "average": averages[0].norm,
        "out=": products.mean,
        "copy_": copies.tolist,
        "[:]": slices.sum,
        "a vector": lambda: nn.utils.vector_to_parameters(vector, net.parameters()),
        "dlpack": lambda: torch.utils.dlpack.from_dlpack(parameters[0].detach()).mean(),
        "layer_norm": lambda: nn.functional.layer_norm(parameters[0], parameters[0].shape),
        "cumsum_": lambda: parameters[0].detach().cumsum_(0),
        "flipud": lambda: torch.flipud(parameters[0]),
        "T": lambda: parameters[0].T,
    }
    told = {name: refusal(UnsupportedCapabilityError, read) for name, read in reads.items()}
    with torch.no_grad():
        for average, p in zip(averages, parameters, strict=True):
            p.copy_(average).sub_(average).add_(1.0)
    return told, [float(value.mean()) for value in full_state(fabric.strategy).values()]


def test_plain_tensors_that_pieces_are_written_to_are_pieces(ranks: RankPool) -> None:
    for told, values in ranks.run(2, filled):
        for message in told.values():
            assert_says(message, "this rank's piece", "gathered(module)")
        assert values == [1.0] * 4


#: Prunings that torch would do of a piece.
PRUNINGS: dict[str, Callable[[nn.Module], Any]] = {
    "smallest": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
    "random": lambda layer: prune.random_unstructured(layer, "weight", amount=0.3),
    "none": lambda layer: prune.identity(layer, "bias"),
}


def pruned() -> tuple[dict[str, str], bool]:
    """What is said of prunings of a layer of which only one rank may have elements, and whether a step goes on."""
    fabric = new_fabric("fsdp_native", 2, {"auto_wrap_policy": None})
    net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES))
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    told = {
        f"{name} of {index}": refusal(UnsupportedCapabilityError, partial(do, layer))
        for name, do in PRUNINGS.items()
        for index, layer in enumerate(net)
    }
    before = full_state(fabric.strategy)
    fabric.backward(model(torch.ones(2, FEATURES)).sum())
    optimizer.step()
    after = full_state(fabric.strategy)
    if fabric.global_rank:  # where nothing is gathered
        return told, True
    return told, before.keys() == after.keys() and not any(torch.equal(before[name], after[name]) for name in before)


def test_pruning_is_refused_on_all_ranks(ranks: RankPool) -> None:
    """Of a piece without elements torch has nothing to prune, and that rank would go on alone."""
    for told, goes_on in ranks.run(2, pruned):
        assert goes_on
        for message in told.values():
            assert_says(message, "torch.nn.utils.prune", "before it is sharded", "gathered(module, modifier_rank=0)")


class Summing(Lit):
    """Sums its parameters, after steps, and changes each element by itself."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.requires_grad_(True)
        self.messages: list[str] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.messages.append(refusal(UnsupportedCapabilityError, lambda: sum(p.sum() for p in self.parameters())))
        for parameter in self.parameters():
            parameter.data.mul_(0.9)
        with torch.no_grad():
            self.net(torch.ones(1, FEATURES))


def summed(tmp: str) -> list[str]:
    module = Summing()
    new_trainer(tmp, "fsdp_native", 2, {"use_orig_params": False}).fit(module, loader(2, 2))
    return module.messages


def test_flat_parameters_after_a_step(ranks: RankPool, tmp_path: Path) -> None:
    for messages in ranks.run(2, summed, str(tmp_path)):
        assert len(messages) == 2
        assert_says(messages[-1], "sum of a parameter would see this rank's piece")


class Averages:
    """An object of an optimizer that keeps a tensor in an attribute."""

    def __init__(self, average: Tensor) -> None:
        self.average = average


def read_states() -> tuple[list[tuple[str, str]], float, list[float]]:
    """What is refused of an optimizer's state, the norm that the refusal says how to compute, and where it began."""
    fabric, _, model, optimizer = set_up(optimizer=oracle.adamw_groups)
    fabric.backward(model(torch.ones(2, FEATURES)).square().mean())
    optimizer.step()
    averages = [state["exp_avg"] for state in optimizer.state.values() if state["exp_avg"].ndim]
    refused: dict[str, Callable[[], Any]] = {
        "norm": averages[0].norm,
        "sum": lambda: (averages[0] * 2.0).sum(),
        "__getitem__": lambda: averages[0][0],
    }
    messages = [(name, refusal(UnsupportedCapabilityError, read)) for name, read in refused.items()]
    squares = torch.stack([average.as_subclass(Tensor).square().sum() for average in averages]).sum()
    gathered: Any = fabric.all_gather(squares)
    for average in averages:
        average.mul_(0.0).add_(1.0)
    nested = [average.as_subclass(Tensor).clone() for average in averages]
    of_first = next(state for state in optimizer.state.values() if state["exp_avg"].ndim)
    of_first["nested"] = {"slow": [nested[0]], "history": Averages(nested[1])}
    optimizer.optimizer.kept = Averages(nested[2])
    optimizer.optimizer.table = torch.ones(3, 2)  # that no piece looks like
    optimizer.step()
    for tensor in nested[:3]:
        messages.append(("norm", refusal(UnsupportedCapabilityError, tensor.norm)))
        tensor.mul_(0.5)
    assert optimizer.optimizer.table.sum() == 6
    optimizer.step()
    del of_first["nested"]
    state = fabric.strategy.sharded_of(model).optimizer_state(optimizer.optimizer)["state"]  # type: ignore[attr-defined]
    means = [float(average.as_subclass(Tensor).mean()) for average in averages]
    assert all("exp_avg" in values for values in state.values())
    return messages, float(gathered.sum()), means


def test_states_of_pieces_are_refused(ranks: RankPool) -> None:
    net = oracle.new_net()
    optimizer = oracle.adamw_groups(net)
    net(torch.ones(2, FEATURES)).square().mean().backward()
    optimizer.step()
    averages = [state["exp_avg"] for state in optimizer.state.values() if state["exp_avg"].ndim]
    expected = sum(float(average.square().sum()) for average in averages)
    for messages, squares, means in ranks.run(2, read_states):
        for name, message in messages:
            assert_says(message, name, "an optimizer's state", "this rank's piece", "as_subclass(torch.Tensor)")
        assert squares == pytest.approx(expected, rel=1e-5)
        assert all(0.8 < mean < 1.2 for mean in means)


def draw_for_pieces() -> list[Tensor]:
    """What is drawn on a rank of two replicas for its gradients, parameters and an optimizer's state."""
    fabric, net, model, optimizer = set_up(HYBRID, optimizer=oracle.adamw_groups, world_size=4)
    fabric.backward(model(torch.ones(2, FEATURES)).square().mean())
    optimizer.step()
    torch.manual_seed(fabric.global_rank // 3)  # rank 3 has drawn otherwise than those with which it is seeded
    drawn: list[Tensor] = []
    with torch.no_grad():
        for parameter in net.blocks[0].parameters():
            if parameter.grad is None or not parameter.ndim:
                continue
            drawn += [torch.randn_like(parameter.grad), parameter.normal_(), torch.rand_like(parameter * 2.0)]
            drawn.append(torch.nn.functional.dropout(torch.ones_like(parameter), 0.5))
        after = torch.rand(1)
        for state in optimizer.state.values():  # of which ranks may have different numbers
            drawn += [state["exp_avg"].uniform_()] if state["exp_avg"].ndim else []
    drawn.append(after)
    return [tensor.detach().as_subclass(Tensor).clone() for tensor in drawn]


def test_replicas_draw_the_same_numbers(ranks: RankPool) -> None:
    drawn = ranks.run(4, draw_for_pieces)
    for first, second in ((0, 2), (1, 3)):
        for one, other in zip(drawn[first][:-1], drawn[second][:-1], strict=True):
            assert torch.equal(one, other)
    numbers = torch.cat([torch.cat(of_rank[0:1]) for of_rank in drawn[:2]])
    assert len(numbers.unique()) == len(numbers)
    assert drawn[0][-1] == drawn[1][-1]  # ranks that were seeded alike go on alike


def write_by_rank(options: dict[str, Any], world_size: int, name: str) -> str:
    """What the second step says after each rank has added something else to a gradient."""
    fabric, net, model, optimizer = set_up(options, optimizer=oracle.sgd, world_size=world_size)
    parameter = net.get_parameter(name)

    def step() -> None:
        fabric.backward(model(torch.ones(2, FEATURES)).square().mean())
        parameter.grad.add_(torch.full(parameter.grad.shape, 0.1 * fabric.global_rank))  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()

    step()
    return refusal(ShardingError, step)


@pytest.mark.parametrize(
    ("options", "world_size", "name"), [(HYBRID, 4, "blocks.0.up.weight"), ({}, 2, "blocks.0.gain")]
)
def test_replicas_that_differ_are_told(ranks: RankPool, options: dict[str, Any], world_size: int, name: str) -> None:
    for message in ranks.run(world_size, write_by_rank, options, world_size, name):
        assert_says(message, "different ones before step 2 of SGD", repr(name), "fabric.broadcast(values)")
