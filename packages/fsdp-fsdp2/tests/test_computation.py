"""Options about how units compute and when they communicate: numbers are those of one process, and the effect counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_core
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import Block, Trained, train_plain
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.training import means, new_fabric


class Operations(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


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
    fabric = new_fabric("fsdp2", world_size, options, precision=precision)
    net = oracle.new_net(width=16)
    model, optimizer = fabric.setup(net, oracle.adamw_groups(net))
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


def reductions_on(accumulate: int) -> tuple[Counter[str], Counter[str]]:
    """The collectives of gradients in one optimizer step of ours, and of the loop by hand."""
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

    fabric = new_fabric("fsdp2", 4, HYBRID)
    net = without_scalars()
    model, _ = fabric.setup(net, oracle.sgd(net))
    counted = run(model, ours, fabric.backward)
    other = without_scalars()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in other.blocks:
        fully_shard(block, mesh=mesh)
    return counted, run(fully_shard(other, mesh=mesh), by_hand, torch.Tensor.backward)


class Collectives(TorchDispatchMode):
    """Counts reductions of floating-point tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "reduce" in name and func.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            if tensors[0].is_floating_point():
                self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def without_scalars() -> Any:
    net = oracle.new_net(width=16)
    for block in net.blocks:
        del block.gain
        block.gain = 0.5  # type: ignore[assignment]
    return net


def test_all_reduce_waits_as_in_the_loop_by_hand(ranks: RankPool) -> None:
    for counted, by_hand in ranks.run(4, reductions_on, 4):
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
            others = {} if "other" in what else {"sync_each_batch": False} if "later" in what else HYBRID
            fabric, net, model, optimizer = set_up(others)
            held = fsdp_core.AccumulatedGradients(model)
            fabric.load(folder, {"model": model, "optimizer": optimizer, "gradients": held})
        if what == "given up" and i == 6:
            optimizer.zero_grad()
        if what == "frozen" and i == 6:
            net.blocks[0].up.weight.requires_grad_(False)
        with fabric.no_backward_sync(model, enabled=i % 4 != 3):
            fabric.backward(nn.functional.mse_loss(model(x, i), y) / 4)
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return full_state(fabric.strategy)


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


def accumulated_on_each(folder: str) -> dict[str, Any]:
    names = ("whole", "saved", "resumed", "resumed with other options", "resumed to reduce later", "given up")
    return {name: accumulated_on(name, folder, None) for name in names}


def test_all_reduce_waits_across_replicas(ranks: RankPool, tmp_path: Path) -> None:
    wanted = {name: accumulated_plainly(name) for name in ("whole", "given up")}
    for by_name in ranks.run(4, accumulated_on_each, str(tmp_path / "checkpoint"), timeout=240.0):
        for name, got in by_name.items():
            want = wanted["given up" if name == "given up" else "whole"]
            torch.testing.assert_close(
                got, want, rtol=oracle.FP32_TOLERANCE, atol=oracle.FP32_TOLERANCE, msg=lambda m, name=name: f"{name}: {m}"
            )
