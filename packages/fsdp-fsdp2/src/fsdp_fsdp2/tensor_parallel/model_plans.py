"""The plans that models bring, as those of transformers do: how their layers are divided, and which are units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from fsdp_core import ShardingError
from fsdp_core.sharding import marked, repeated_blocks, select_units

__all__ = ["matches", "own_plan", "own_units", "plan_entries"]

#: The styles that transformers' models name in their own plans.
_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": lambda: SequenceParallel(use_local_output=True),
    # A norm over each head, with different heads on each rank: its weight is whole, and its gradient a sum over ranks.
    # Any sequence_dim but the last will do, since the norm is over the last; the first always exists.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=0, use_local_output=True),
}

#: The requests of a ``_fsdp_plan``: whether a unit is freed between its forward and its backward pass.
_FREED = {"free_full_weight": True, "keep_full_weight": False}


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern, in which ``*`` stands for one name between dots, matches an FQN."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def own_plan(root: nn.Module) -> dict[str, ParallelStyle]:
    """The styles that the ``_tp_plan`` of submodules asks for, by patterns of FQNs in ``root``.

    Raises:
        ShardingError: None brings one, or one names a style that has no counterpart in torch.
    """
    styles_by_pattern: dict[str, ParallelStyle] = {}
    for pattern, style, owner in plan_entries(root, "_tp_plan"):
        if isinstance(style, str) and style not in _STYLES:
            raise ShardingError(
                f"tp_plan='auto': {owner} wants the style {style!r} for {pattern!r}, which "
                f"has no counterpart in torch.\nWrite the plan yourself; known are {', '.join(_STYLES)}."
            )
        if pattern not in styles_by_pattern:
            styles_by_pattern[pattern] = style if isinstance(style, ParallelStyle) else _STYLES[str(style)]()
    if not styles_by_pattern:
        raise ShardingError(
            f"tp_plan='auto', but no submodule of {type(root).__name__} brings a plan as _tp_plan.\n"
            "Write tp_plan={'layers.*.up': ColwiseParallel(), 'layers.*.down': RowwiseParallel()} with its layers."
        )
    return styles_by_pattern


def own_units(root: nn.Module) -> list[nn.Module] | None:
    """The repeated blocks, and the modules that the ``_fsdp_plan`` of submodules frees after their forward pass.

    The modules that a plan keeps (``keep_full_weight``: the last norm and the head) are left to the root, which stays
    gathered between its forward and its backward pass.

    Returns:
        The units; ``None`` if no plan names a module to free, or units are marked by ``wrap``.

    Raises:
        ShardingError: A plan names something unknown.
    """
    freed_patterns: list[str] = []
    for pattern, request, owner in plan_entries(root, "_fsdp_plan"):
        if request not in _FREED:
            raise ShardingError(
                f"auto_wrap_policy='auto': the _fsdp_plan of {owner} has {request!r} for {pattern!r}, which is not "
                f"known; known are {', '.join(_FREED)}.\nWrite auto_wrap_policy={{MyBlock}} instead."
            )
        if _FREED[str(request)]:
            freed_patterns.append(pattern)
    if not freed_patterns or marked(root):
        return None
    units = set(repeated_blocks(root))
    inside_blocks = {inner for block in units for inner in block.modules()} - units
    for name, module in root.named_modules():
        if module not in inside_blocks and any(matches(name, pattern) for pattern in freed_patterns):
            units.add(module)
    return select_units(root, lambda module: module in units) if units else None


def plan_entries(root: nn.Module, attribute: str) -> list[tuple[str, object, str]]:
    """The entries of submodules' plans: a pattern of FQNs in ``root``, what it asks for, and the submodule's class."""
    entries: list[tuple[str, object, str]] = []
    for prefix, module in root.named_modules():
        plan = getattr(module, attribute, None)
        if isinstance(plan, Mapping):
            owner = type(module).__name__
            for pattern, request in plan.items():
                entries.append((f"{prefix}.{pattern}" if prefix else pattern, request, owner))
    return entries
