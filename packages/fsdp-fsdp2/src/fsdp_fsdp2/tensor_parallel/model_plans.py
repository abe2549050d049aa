"""The plans that models bring, as those of transformers do: how their layers are divided, and which are units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from fsdp_core import ShardingError
from fsdp_core.sharding import marked, repeated_blocks, select_units

__all__ = ["matches", "own_plan", "own_units"]

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
    # A norm over each head, of which every rank has others: its weight is whole, its gradient the sum over the ranks.
    # Along which dimension ranks differ makes no difference to a norm over the last one; the first always exists.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=0, use_local_output=True),
}

#: Whether transformers frees a unit between its forward and its backward pass.
_FREED = {"free_full_weight": True, "keep_full_weight": False}


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern, in which ``*`` stands for one name between dots, matches an FQN."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def own_plan(root: nn.Module) -> dict[str, ParallelStyle]:
    """How the submodules that bring a ``_tp_plan`` want to be divided, by patterns of FQNs in ``root``.

    Raises:
        ShardingError: None brings one, or one names a style that has no counterpart in torch.
    """
    styles_by_pattern: dict[str, ParallelStyle] = {}
    for name, style, owner in _plans(root, "_tp_plan"):
        if isinstance(style, str) and style not in _STYLES:
            raise ShardingError(
                f"tp_plan='auto': {owner} wants the style {style!r} for {name!r}, which "
                f"has no counterpart in torch.\nWrite the plan yourself; known are {', '.join(_STYLES)}."
            )
        if name not in styles_by_pattern:
            styles_by_pattern[name] = style if isinstance(style, ParallelStyle) else _STYLES[str(style)]()
    if not styles_by_pattern:
        raise ShardingError(
            f"tp_plan='auto', but no submodule of {type(root).__name__} brings a plan as _tp_plan.\n"
            "Write tp_plan={'layers.*.up': ColwiseParallel(), 'layers.*.down': RowwiseParallel()} with its layers."
        )
    return styles_by_pattern


def own_units(root: nn.Module) -> list[nn.Module] | None:
    """The repeated blocks, and what the ``_fsdp_plan`` of submodules wants to be freed after its forward pass.

    What a plan wants to keep (``keep_full_weight``: the last norm and the head) is left to the root, which stays
    gathered between its forward and its backward pass.

    Returns:
        The units; ``None`` if no submodule brings a plan, or one that names no module, or units are marked by ``wrap``.

    Raises:
        ShardingError: A plan names something unknown.
    """
    freed: list[str] = []
    for name, style, owner in _plans(root, "_fsdp_plan"):
        if style not in _FREED:
            raise ShardingError(
                f"auto_wrap_policy='auto': the _fsdp_plan of {owner} has {style!r} for {name!r}, which is not known; "
                f"known are {', '.join(_FREED)}.\nWrite auto_wrap_policy={{MyBlock}} instead."
            )
        if _FREED[str(style)]:
            freed.append(name)
    if not freed or marked(root):
        return None
    chosen = set(repeated_blocks(root))
    inside = {inner for block in chosen for inner in block.modules()} - chosen
    for name, module in root.named_modules():
        if module not in inside and any(matches(name, pattern) for pattern in freed):
            chosen.add(module)
    return select_units(root, lambda module: module in chosen) if chosen else None


def _plans(root: nn.Module, attribute: str) -> list[tuple[str, object, str]]:
    """The entries of submodules' plans: a pattern of FQNs in ``root``, what it asks for, and whose it is."""
    entries: list[tuple[str, object, str]] = []
    for prefix, module in root.named_modules():
        plan = getattr(module, attribute, None)
        if isinstance(plan, Mapping):
            name = type(module).__name__
            entries += [
                (f"{prefix}.{pattern}" if prefix else pattern, request, name) for pattern, request in plan.items()
            ]
    return entries
