"""The meshes on which the suite trains ``fsdp2``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from fsdp_core.testing.meshes import LINES, DeclaredMesh


def plan(prefix: str) -> dict[str, dict[str, ParallelStyle]]:
    """The blocks' linear layers divided by columns and rows, and the tied pair by rows."""
    styles = {
        "inp": ColwiseParallel(output_layouts=Replicate()),
        "out": ColwiseParallel(output_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }
    return {"tp_plan": {f"{prefix}{name}": style for name, style in styles.items()}}


_REPLICATED: Mapping[str, Any] = {"data_parallel_replicate_size": 2}
_TENSOR: Mapping[str, Any] = {"tensor_parallel_size": 2}


def plan_of_experts(prefix: str) -> dict[str, dict[str, str]]:
    """The experts of the net whose options are drawn."""
    return {"expert_parallel_plan": {f"{prefix}mixture": "top_k"}}


_EXPERTS: Mapping[str, Any] = {"expert_parallel_size": 2}

#: Of a net with experts, which most of the suite's nets have not.
MESHES_OF_EXPERTS: Mapping[str, DeclaredMesh] = {
    "experts 2 of 4": DeclaredMesh(ranks=4, options=_EXPERTS, plan=plan_of_experts),
    "replicate 2 x experts 2": DeclaredMesh(ranks=4, options={**_REPLICATED, **_EXPERTS}, plan=plan_of_experts),
}

MESHES: Mapping[str, DeclaredMesh] = {
    **LINES,
    "replicate 2 x shard 2": DeclaredMesh(ranks=4, options=_REPLICATED),
    "tensor 2": DeclaredMesh(ranks=2, options=_TENSOR, plan=plan),
    "shard 2 x tensor 2": DeclaredMesh(ranks=4, options=_TENSOR, plan=plan),
    "replicate 2 x tensor 2": DeclaredMesh(
        ranks=4, options={**_REPLICATED, **_TENSOR, "data_parallel_size": 1}, plan=plan
    ),
}
