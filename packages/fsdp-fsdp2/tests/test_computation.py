"""Options about how units compute and when they communicate: numbers are those of one process, and the effect counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

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
