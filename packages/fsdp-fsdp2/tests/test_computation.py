"""Options about how units compute and communicate: numbers are those of one process, and the effect is counted."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_core
from fsdp2_runs import set_up
from fsdp_core.errors import FSDPError, ShardingError, UnsupportedCapabilityError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import Block, Trained, train_plain
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.numerics.parity import assert_buffers_alone, assert_same
from fsdp_core.testing.training import fit, means, new_fabric
from fsdp_fsdp2.computation.compilation import CompiledForward, compile_units
from fsdp_fsdp2.computation.prefetch_and_reshard import reshards


class Operations(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_counted(func, args):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def is_counted(self, func: Any, args: Any) -> bool:
        return True


class Saved(saved_tensors_hooks):
    """Counts the bytes that operations save for the backward pass, by the shape of tensors."""

    def __init__(self) -> None:
        self.sizes: Counter[tuple[int, ...]] = Counter()
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sizes[tuple(tensor.shape)] += tensor.numel() * tensor.element_size()
        return tensor


#: What a run counts, by name.
Counts = dict[str, int]


def trained_with(
    options: dict[str, Any], world_size: int = 2, accumulate: int = 1, precision: Any = None, steps: int = 4
) -> tuple[Trained, Counts]:
    """Train the oracle's net, whose blocks are seven wide inside, and count what its first batch does."""
    fabric, _, model, optimizer = set_up(
        options, net=oracle.new_net(width=16), optimizer=oracle.adamw_groups, world_size=world_size, precision=precision
    )
    runtime: Any = fabric.strategy.runtime  # type: ignore[attr-defined]
    rank, ranks = runtime.data_parallel_rank, runtime.data_parallel_world_size
    losses, saved, operations = [], Saved(), Operations()
    for i, batch in enumerate(oracle.global_batches(steps)):
        x, y = (one.chunk(ranks)[rank] for one in batch)
        with fabric.no_backward_sync(model, enabled=(i + 1) % accumulate != 0):
            if i == 0 and "compile" not in options:
                with operations:
                    with saved:
                        loss = nn.functional.mse_loss(model(x), y)
                    fabric.backward(loss / accumulate)
            else:
                with saved if i == 0 else torch.enable_grad():
                    loss = nn.functional.mse_loss(model(x), y)
                fabric.backward(loss / accumulate)
            losses.append(loss.detach())
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    inner = sum(size for shape, size in saved.sizes.items() if shape[-1:] == (16,) and len(shape) == 2)
    counts = {"inner": inner, "saved": sum(saved.sizes.values()), **operations.counts}
    return (means(losses), full_state(fabric.strategy)), counts


def saves_matrix_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    kept = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


#: Options, and how often a first batch computes addmm and tanh, of which each of three blocks has two and one.
ACTIVATIONS: dict[str, tuple[dict[str, Any], int, int]] = {
    "none": ({}, 6, 3),
    "every block": ({"activation_checkpointing_policy": "every_1"}, 12, 6),
    "every second": ({"activation_checkpointing_policy": "every_2"}, 8, 4),
    "by operator": (
        {"activation_checkpointing_policy": {Block}, "activation_checkpointing_saves": ["aten.addmm"]},
        6,
        6,
    ),
    "by policy": (
        {"activation_checkpointing_policy": [Block], "activation_checkpointing_saves": saves_matrix_products},
        6,
        6,
    ),
    "offload": ({"activation_offload": True}, 6, 3),
    "offload and recompute": ({"activation_offload": True, "activation_checkpointing_policy": {Block}}, 12, 6),
}


def with_each(cases: dict[str, Any]) -> dict[str, tuple[Trained, Counts]]:
    return {name: trained_with(options) for name, (options, *_) in cases.items()}


def test_activations(ranks: RankPool) -> None:
    """What is recomputed is computed twice, and what is offloaded is not kept where it was."""
    want = train_plain(4, oracle.adamw_groups, net=oracle.new_net(width=16))
    for by_case in ranks.run(2, with_each, ACTIVATIONS, timeout=180.0):
        plain = by_case["none"][1]
        for name, (_, addmm, tanh) in ACTIVATIONS.items():
            trained, counts = by_case[name]
            assert_same([trained], want)
            linear = counts["addmm"] - plain["addmm"], counts["tanh"]
            assert linear == (addmm - 6, tanh), name
        saved = {name: counts["saved"] for name, (_, counts) in by_case.items()}
        assert saved["every block"] < saved["every second"] < saved["none"]
        assert saved["offload"] == saved["offload and recompute"] < saved["every block"]  # only outside of the blocks


HYBRID: dict[str, Any] = {"data_parallel_replicate_size": 2, "sync_each_batch": "within_replica"}


def reductions_on(accumulate: int) -> tuple[Counter[str], Counter[str], str]:
    """The collectives of gradients in one step of ours and of the loop by hand; and what an exception leads to."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    batches = oracle.global_batches(accumulate)

    def by_hand(index: int, model: Any, forward: Any) -> None:
        model.set_requires_all_reduce(index == accumulate - 1)
        forward()

    def ours(index: int, model: Any, forward: Any) -> None:
        with fabric.no_backward_sync(model, enabled=index < accumulate - 1):
            forward()

    def run(model: Any, micro_batch: Any, backward: Any) -> Counter[str]:
        counting = Collectives()
        for index, (x, y) in enumerate(batches):
            with counting:
                micro_batch(index, model, lambda x=x, y=y: backward(nn.functional.mse_loss(model(x), y)))
        return counting.counts

    fabric, net, model, optimizer = set_up(HYBRID, net=without_scalars(), world_size=4)
    counted = run(model, ours, fabric.backward)
    optimizer.zero_grad()
    x, y = batches[0]
    with fabric.no_backward_sync(model):
        fabric.backward(nn.functional.mse_loss(model(x), y))
        output = model(x)
        output.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            fabric.backward(nn.functional.mse_loss(output, y))
        assert all(parameter.grad is None for parameter in net.parameters())
        told = refusal(ShardingError, partial(model, x))
    other = without_scalars()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in other.blocks:
        fully_shard(block, mesh=mesh)
    return counted, run(fully_shard(other, mesh=mesh), by_hand, torch.Tensor.backward), told


class Collectives(Operations):
    """Counts reductions of floating-point tensors."""

    def is_counted(self, func: Any, args: Any) -> bool:
        if "reduce" not in func.overloadpacket.__name__ or func.namespace != "c10d":
            return False
        tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        return bool(tensors[0].is_floating_point())


def without_scalars() -> Any:
    net = oracle.new_net(width=16)
    for block in net.blocks:
        del block.gain
        block.gain = 0.5  # type: ignore[assignment]
    return net


def test_all_reduce_waits_as_in_the_loop_by_hand(ranks: RankPool) -> None:
    for counted, by_hand, told in ranks.run(4, reductions_on, 4):
        assert_says(told, "incomplete", "optimizer.zero_grad()")
        assert counted == by_hand
        assert counted == {"_reduce_scatter_base_": 4 * 4, "allreduce_": 4}


def accumulated_on(what: str, folder: str, precision: Any) -> Any:
    """Weights after two optimizer steps of four micro-batches each, of which something happens in the second."""

    def set_up(options: dict[str, Any] = HYBRID) -> tuple[Any, Any, Any, Any]:
        fabric = new_fabric("fsdp2", 4, options, precision=precision)
        net = Branches()
        return fabric, net, *fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))

    fabric, net, model, optimizer = set_up()
    rank = fabric.strategy.runtime.data_parallel_rank
    for i, batch in enumerate(oracle.global_batches(8)):
        x, y = (one.chunk(4)[rank] for one in batch)
        if what == "saved" and i == 6:
            held = fsdp_core.AccumulatedGradients(model)
            fabric.save(folder, {"model": model, "optimizer": optimizer, "gradients": held})
        if what.startswith("resumed") and i == 6:
            others = {} if "other" in what else {**HYBRID, "sync_each_batch": "later" not in what and "within_replica"}
            fabric, net, model, optimizer = set_up(others)
            held = fsdp_core.AccumulatedGradients(model)
            fabric.load(folder, {"model": model, "optimizer": optimizer, "gradients": held})
        if what == "given up" and i == 6:
            optimizer.zero_grad()
        if what == "interrupted" and i == 6:
            with fabric.no_backward_sync(model):
                output = model(x, i)
                output.register_hook(interrupt)
                with pytest.raises(KeyboardInterrupt):
                    fabric.backward(nn.functional.mse_loss(output, y))
                assert_says(refusal(ShardingError, partial(model, x, i)), "incomplete", "optimizer.zero_grad()")
            optimizer.zero_grad()
        if what == "frozen" and i == 6:
            net.blocks[0].up.weight.requires_grad_(False)
        with fabric.no_backward_sync(model, enabled=i % 4 != 3):
            fabric.backward(nn.functional.mse_loss(model(x, i), y) / 4)
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return full_state(fabric.strategy)


def interrupt(gradient: torch.Tensor) -> None:
    raise KeyboardInterrupt


class Branches(oracle.Net):
    """Skips a block, and half of another one, in some micro-batches, the last of a step among them."""

    def __init__(self) -> None:
        super().__init__(width=16)
        with oracle.seeded(1):
            self.load_state_dict(oracle.new_net(width=16).state_dict())

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:  # type: ignore[override]
        x = self.inp(x) * self.scale
        for i, block in enumerate(self.blocks):
            if i != 1 or index % 4 in (0, 1):
                x = block(x)
        output: torch.Tensor = self.out(self.frozen(x))
        return output


def accumulated_plainly(what: str) -> dict[str, torch.Tensor]:
    net = Branches()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for i, (x, y) in enumerate(oracle.global_batches(8)):
        if what == "given up" and i == 6:
            optimizer.zero_grad()
        (nn.functional.mse_loss(net(x, i), y) / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def close(got: Any, want: Any, name: str, tolerance: float = oracle.FP32_TOLERANCE) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda told: f"{name}: {told}")


def accumulated_on_each(folder: str) -> dict[str, Any]:
    resumed = ("saved", "resumed", "resumed with other options", "resumed to reduce later")
    names = ("whole", *resumed, "given up", *(("interrupted",) if hasattr(FSDPModule, "reset_iter_state") else ()))
    got: dict[str, Any] = {name: accumulated_on(name, folder, None) for name in names}
    half = {precision: accumulated_on("whole", folder, precision) for precision in ("bf16-mixed", "16-mixed")}
    return {**got, **half, "frozen": refusal(ShardingError, lambda: accumulated_on("frozen", folder, None))}


@pytest.mark.everything
def test_all_reduce_waits_across_replicas(ranks: RankPool, tmp_path: Path) -> None:
    wanted = {name: accumulated_plainly(name) for name in ("whole", "given up")}
    for by_name in ranks.run(4, accumulated_on_each, str(tmp_path / "checkpoint"), timeout=240.0):
        assert_says(by_name.pop("frozen"), "'blocks.0.up.weight' was frozen", "within_replica", "zero_grad()")
        for name in ("bf16-mixed", "16-mixed"):
            close(by_name.pop(name), wanted["whole"], name, oracle.HALF_TOLERANCE)
        for name, got in by_name.items():
            want = wanted["given up" if name in ("given up", "interrupted") else "whole"]
            close(got, want, name)


def compiled_on(folder: str) -> tuple[dict[str, tuple[Trained, Counts]], int, Trained]:
    """Runs with compiled units, the number of graphs of one, and a run that continues a compiled one uncompiled."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    eager = {"backend": "aot_eager", "fullgraph": True}
    cases: dict[str, dict[str, Any]] = {
        "compiled": {"compile": eager},
        "recomputed": {"compile": eager, "activation_checkpointing_policy": "every_1"},
        "saves": {
            "compile": eager,
            "activation_checkpointing_policy": "every_1",
            "activation_checkpointing_saves": ["aten.addmm"],
        },
        "nothing kept": {"compile": eager, "activation_memory_budget": 0},
        "offloaded": {"compile": eager, "activation_offload": True},
        "divided": {
            "compile": eager,
            "tensor_parallel_size": 2,
            "tp_plan": {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()},
        },
    }
    found = {name: trained_with(options) for name, options in cases.items()}
    counted = trained_with({"compile": {"backend": backend, "fullgraph": True}})
    resumed = continued(folder, eager)
    torch.compiler.reset()  # or these ranks would be at the limit of graphs in later tests, and others would not
    return {**found, "counted": counted}, len(graphs), resumed


def continued(folder: str, keywords: dict[str, Any]) -> Trained:
    """Two steps with compiled units, and two without."""
    losses = []
    for compile, part in ((keywords, (0, 1)), (False, (2, 3))):
        fabric, _, model, optimizer = set_up(
            {"compile": compile}, net=oracle.new_net(width=16), optimizer=oracle.adamw_groups
        )
        if not compile:
            fabric.load(folder, {"model": model, "optimizer": optimizer})
        for i in part:
            x, y = (one.chunk(2)[fabric.global_rank] for one in oracle.global_batches(4)[i])
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(folder if compile else f"{folder}-2", {"model": model, "optimizer": optimizer})
    return means(losses), full_state(fabric.strategy)


def test_compiled_units(ranks: RankPool, tmp_path: Path) -> None:
    """Names, numbers and checkpoints stay; blocks of one class share a graph."""
    want = train_plain(4, oracle.adamw_groups, net=oracle.new_net(width=16))
    for by_case, graphs, resumed in ranks.run(2, compiled_on, str(tmp_path / "checkpoint"), timeout=280.0):
        for name, (trained, _) in by_case.items():
            assert trained[1].keys() == want[1].keys(), name
            assert_same([trained], want)
        assert_same([resumed], want)
        assert graphs == 1
        saved = {name: counts["saved"] for name, (_, counts) in by_case.items()}
        assert saved["recomputed"] < saved["saves"] < saved["compiled"]
        assert saved["nothing kept"] < saved["compiled"]
        assert saved["offloaded"] < saved["recomputed"]


def even_blocks(unit: Any) -> bool | None:
    """A policy that frees every other block."""
    return bool(unit.index % 2 == 0)


#: Options, and the order in which a step gathers four blocks; ``"|"`` is between the forward and the backward pass.
ORDERS: dict[str, tuple[dict[str, Any], str]] = {
    "by default": ({}, "root 0 1 2 3 | 2 1 0"),
    "one ahead": ({"forward_prefetch_depth": 1}, "root 0 1 2 3 | 2 1 0"),
    "two back": ({"backward_prefetch_depth": 2, "reshard_after_forward": True}, "root 0 1 2 3 | 3 2 1 0"),
    "none freed": ({"reshard_after_forward": False}, "root 0 1 2 3 |"),
    "of a class": ({"reshard_after_forward": {Block}}, "root 0 1 2 3 | 3 2 1 0"),
    "by a function": ({"reshard_after_forward": even_blocks}, "root 0 1 2 3 | 2 0"),
}


def set_up_with(options: dict[str, Any]) -> Any:
    fabric = new_fabric("fsdp2", 2, options)
    net = oracle.new_net(blocks=4)
    for index, block in enumerate(net.blocks):
        block.index = index  # type: ignore[assignment]
    model, _ = fabric.setup(net, oracle.sgd(net))
    return fabric, net, model


def gathered_in_order(options: dict[str, Any]) -> list[str]:
    """The units in the order in which one step gathers them, and runs them (in brackets)."""
    fabric, net, model = set_up_with(options)
    owners = {m: name for name, block in net.blocks.named_children() for m in block.modules()}
    order: list[str] = []
    gather = _fsdp_collectives.foreach_all_gather

    def note(parameters: Any, *args: Any) -> Any:
        order.append(owners.get(parameters[0]._module_info.module, "root"))
        return gather(parameters, *args)

    for name, block in net.blocks.named_children():
        block.up.register_forward_pre_hook(lambda *_, name=name: order.append(f"({name})"))
    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", note):
        x, y = oracle.global_batches(1)[0]
        loss = nn.functional.mse_loss(model(x), y)
        order.append("|")
        fabric.backward(loss)
    return order


def orders_of_each() -> dict[str, list[str]]:
    return {name: gathered_in_order(options) for name, (options, _) in ORDERS.items()}


def test_units_are_gathered_in_the_order_asked_for(ranks: RankPool) -> None:
    for by_case in ranks.run(2, orders_of_each, timeout=120.0):
        for name, (_, want) in ORDERS.items():
            assert " ".join(one for one in by_case[name] if not one.startswith("(")) == want, name
        # a unit is gathered when the one before it runs
        ahead = [order.index("(0)") - order.index("1") for order in (by_case["by default"], by_case["one ahead"])]
        assert ahead == [-1, 1]


#: Options, and what the message says; before any process starts.
MISUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "saves without policy": (
        {"activation_checkpointing_saves": ["aten.mm"]},
        ["activation_checkpointing_saves", "Add activation_checkpointing_policy", "every_1"],
    ),
    "no operator": (
        {"activation_checkpointing_policy": {Block}, "activation_checkpointing_saves": ["aten.addm"]},
        ["'aten.addm'", "no operator", "'aten.addmm'"],
    ),
    "one name": (
        {"activation_checkpointing_policy": {Block}, "activation_checkpointing_saves": "aten.mm"},
        ["activation_checkpointing_saves='aten.mm' names no operations", "['aten.mm', 'aten.addmm']"],
    ),
    "budget without compile": ({"activation_memory_budget": 0.5}, ["=0.5", "compiled units", "Add compile=True"]),
    "budget too large": (
        {"activation_memory_budget": 50, "compile": True},
        ["activation_memory_budget=50", "from 0", "to 1"],
    ),
    "budget and policy": (
        {"activation_memory_budget": 0.5, "compile": True, "activation_checkpointing_policy": {Block}},
        ["{Block}", "activation_memory_budget=0.5", "Write one"],
    ),
    "budget in eager": (
        {"activation_memory_budget": 0.5, "compile": {"backend": "eager"}},
        ["no effect on the backend 'eager'", "'inductor'"],
    ),
    "offload": ({"activation_offload": "cpu"}, ["activation_offload='cpu'", "True"]),
    "compile string": ({"compile": "inductor"}, ["compile='inductor'", "compile=True", "dict"]),
    "compile keyword": ({"compile": {"fulgraph": True}}, ["'fulgraph'", "fullgraph"]),
    "compile backend": ({"compile": {"backend": "indctor"}}, ["'indctor'", "inductor"]),
    "no depth": ({"forward_prefetch_depth": 0}, ["forward_prefetch_depth=0", "positive integer"]),
    "true depth": ({"backward_prefetch_depth": True}, ["backward_prefetch_depth=True", "positive integer"]),
    "reshard no class": ({"reshard_after_forward": ["Block"]}, ["holds 'Block'", "set of the units' classes"]),
    "sync": ({"sync_each_batch": "within"}, ["sync_each_batch='within'", "'within_replica'"]),
    "one replica": (
        {"sync_each_batch": "within_replica"},
        ["there is one replica", "data_parallel_replicate_size=2", "sync_each_batch=True"],
    ),
    "no torchao": ({"float8": True}, ["float8=True needs torchao", "python -m pip install torchao"]),
    "float8 filter": ({"float8_filter": print}, ["float8_filter", "Add float8=True"]),
}


@pytest.mark.parametrize("case", MISUSED)
def test_option_that_says_nothing(case: str) -> None:
    options, words = MISUSED[case]
    assert_says(refusal(UnsupportedCapabilityError, lambda: new_fabric("fsdp2", 2, options)), *words)
    assert not torch.distributed.is_initialized()


def test_groups_of_ranks_beside_divided_layers() -> None:
    """torch fails in the first forward pass, and with groups of other ranks on each tensor-parallel rank."""
    net = oracle.new_net()
    told = refusal(UnsupportedCapabilityError, lambda: reshards(2, net, [*net.blocks], 4, tensor_parallel=2))
    assert_says(told, "reshard_after_forward=2", "tensor_parallel_size=2", "Write True, False, or None")
    assert reshards(4, net, [*net.blocks], 4, tensor_parallel=2)[net.blocks[0]] == 4


def compiles_already() -> nn.Module:
    net = oracle.new_net()
    net.blocks[1] = torch.compile(net.blocks[1], backend="eager")  # type: ignore[assignment]
    return net


def compiled_in_place() -> nn.Module:
    net = oracle.new_net()
    net.blocks[1].up.compile(backend="eager")
    return net


#: Options, what they are used with, and what the message says.
UNFIT: dict[str, tuple[dict[str, Any], Callable[[], nn.Module], list[str]]] = {
    "every none": ({"activation_checkpointing_policy": "every_0"}, oracle.new_net, ["'every_0' is no", "every_2"]),
    "too few": (
        {"activation_checkpointing_policy": "every_4"},
        oracle.new_net,
        ["one of 4 repeated blocks, and Net has 3", "{MyBlock}"],
    ),
    "offload of the root": (
        {"activation_offload": True, "auto_wrap_policy": None},
        oracle.new_net,
        ["Net has none but itself", "auto_wrap_policy"],
    ),
    "compiled root": ({"compile": True, "auto_wrap_policy": None}, oracle.new_net, ["none but itself", "auto_wrap"]),
    "compiled twice": ({"compile": True}, compiles_already, ["a Block is compiled already", "Leave out either"]),
    "compiled inside": ({"compile": True}, compiled_in_place, ["a Linear is compiled already", "Leave out either"]),
    "no such unit": (
        {"reshard_after_forward": {nn.Linear}},
        oracle.new_net,
        ["{Linear} matches no unit of Net", "units are of: Block"],
    ),
    "no answer": ({"reshard_after_forward": str}, oracle.new_net, ["str", "not known to 'fsdp2'"]),
    "another answer": ({"reshard_after_forward": repr}, oracle.new_net, ["repr returned 'Block(", "Return True"]),
    "answer that does not divide": (
        {"reshard_after_forward": lambda unit: 3},
        oracle.new_net,
        ["reshard_after_forward=3 does not divide the 2 ranks"],
    ),
}


def unfit_on() -> dict[str, str]:
    def set_up(options: dict[str, Any], net: Callable[[], nn.Module]) -> None:
        new_fabric("fsdp2", 2, options).setup(net())

    return {
        case: refusal(FSDPError, lambda options=options, net=net: set_up(options, net))
        for case, (options, net, _) in UNFIT.items()
    }


def test_option_that_does_not_fit_the_model(ranks: RankPool) -> None:
    for told in ranks.run(2, unfit_on, timeout=120.0):
        for case, (_, _, words) in UNFIT.items():
            assert_says(told[case], *words)


def test_copies_of_compiled_modules_run_themselves() -> None:
    block = Block()
    compile_units(block, [block], {"backend": "eager"}, None)
    other = copy.deepcopy(block)
    assert isinstance(block.forward, CompiledForward)
    assert other.forward.__self__ is other  # type: ignore[attr-defined]


def test_under_the_trainer(ranks: RankPool, tmp_path: Path) -> None:
    options = {
        **HYBRID,
        "compile": {"backend": "aot_eager"},
        "activation_checkpointing_policy": "every_2",
        "activation_checkpointing_saves": ["aten.addmm"],
        "forward_prefetch_depth": 2,
        "backward_prefetch_depth": 2,
        "reshard_after_forward": {Block},
    }
    trainer = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    arguments = ("fsdp2", str(tmp_path), 4, 4, "adamw_groups", options, trainer, {"width": 16})
    got = ranks.run(4, fit, *arguments, timeout=180.0)
    want = train_plain(4, oracle.adamw_groups, net=oracle.new_net(width=16), accumulate=2, clip_norm=0.05)
    assert_same(got, want)


#: What inductor compiles anew: only in the slow run.
WITH_INDUCTOR: dict[str, dict[str, Any]] = {
    "whole": {"compile": True},
    "static": {"compile": {"fullgraph": True, "dynamic": False}, "activation_checkpointing_policy": {Block}},
    "half kept": {"compile": {"mode": "default"}, "activation_memory_budget": 0.5},
    "nothing kept": {"compile": True, "activation_memory_budget": 0},
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on a CPU, and there is no g++")
@pytest.mark.everything
def test_inductor(ranks: RankPool) -> None:
    want = train_plain(4, oracle.adamw_groups, net=oracle.new_net(width=16))
    cases = {name: (options,) for name, options in WITH_INDUCTOR.items()}
    for by_case in ranks.run(2, with_each, cases, timeout=280.0):
        for trained, _ in by_case.values():
            assert_same([trained], want)
        saved = {name: counts["saved"] for name, (_, counts) in by_case.items()}
        assert saved["nothing kept"] <= saved["half kept"] <= saved["whole"]
        assert saved["nothing kept"] < saved["whole"]


@pytest.mark.parametrize(
    "options", [{"activation_checkpointing_saves": ["aten.clone", "aten.addmm"]}, {"compile": True}]
)
def test_recomputation_leaves_buffers_alone(ranks: RankPool, options: dict[str, Any]) -> None:
    """Also where some results are kept, and where units are compiled."""
    assert_buffers_alone(ranks, "fsdp2", options)


def write_by_rank(options: dict[str, Any], world_size: int, name: str) -> str:
    """What the second step says after each rank has added something else to its part of a gradient."""
    fabric, net, model, optimizer = set_up(options, optimizer=oracle.sgd, world_size=world_size)
    parameter = net.get_parameter(name)

    def step() -> None:
        fabric.backward(model(torch.ones(2, oracle.FEATURES)).square().mean())
        gradient: Any = parameter.grad
        getattr(gradient, "to_local", lambda: gradient)().add_(0.1 * fabric.global_rank)
        optimizer.step()
        optimizer.zero_grad()

    step()
    return refusal(ShardingError, step)


@pytest.mark.parametrize(
    ("options", "world_size", "name"),
    [({"data_parallel_replicate_size": 2}, 4, "blocks.0.up.weight"), ({}, 2, "blocks.0.gain")],
)
def test_replicas_that_differ_are_told(ranks: RankPool, options: dict[str, Any], world_size: int, name: str) -> None:
    for message in ranks.run(world_size, write_by_rank, options, world_size, name):
        assert_says(message, "different ones before step 2 of SGD", repr(name), "fabric.broadcast(values)")
