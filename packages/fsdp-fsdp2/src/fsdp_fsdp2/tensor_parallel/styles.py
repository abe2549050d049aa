"""Tensor parallelism: which of torch's parallel styles each submodule gets, and applying them before sharding."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from fsdp_core import ShardingError, UnsupportedCapabilityError
from fsdp_fsdp2.tensor_parallel.model_plans import matches, own_plan
from fsdp_fsdp2.user_sharding.built_parameters import is_dtensor

__all__ = [
    "TensorParallelPlan",
    "check_plan",
    "described_plan",
    "explain_errors",
    "missing_plan",
    "return_no_view",
    "styles_of",
    "tensor_parallelize",
    "tie_again",
]

#: By pattern of FQNs, in which ``*`` matches within one name between dots, the style of the submodules that match; or
#: ``"auto"`` for the plan that the model brings.
TensorParallelPlan = Mapping[str, ParallelStyle] | Literal["auto"]

#: How process groups report a rank that is gone.
_LOST_RANK_ERROR = re.compile("connection (reset|closed|refused)|broken pipe|socket timeout", re.IGNORECASE)

#: The attributes of attention layers with a number of heads, which tensor parallelism divides among ranks.
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "n_kv_heads")


def missing_plan(size: int) -> UnsupportedCapabilityError:
    """The error to raise for tensor-parallel ranks without a plan."""
    return UnsupportedCapabilityError(
        f"tensor_parallel_size={size} needs a plan that says which layers to divide, and no layer is divided.\n"
        "Write tp_plan={'layers.*.up': ColwiseParallel(), 'layers.*.down': RowwiseParallel()} with the styles of "
        "torch.distributed.tensor.parallel, or tp_plan='auto' for a model that brings one; or call "
        "parallelize_module(module, self.device_mesh['tensor_parallel'], plan) in configure_model(), or in a "
        "parallelize_fn."
    )


def check_plan(plan: object) -> None:
    """Refuse values of ``tp_plan`` that are no plan.

    Raises:
        UnsupportedCapabilityError: It is neither a dict of names and styles, nor ``"auto"``, nor ``None``.
    """
    if plan is None or plan == "auto":
        return
    entries = plan.items() if isinstance(plan, Mapping) else [("", plan)]
    wrong = [f"{name!r} is no name" for name, _ in entries if not isinstance(name, str)]
    wrong += [f"{style!r} is no style" for _, style in entries if not isinstance(style, ParallelStyle)]
    if wrong or not entries:
        raise UnsupportedCapabilityError(
            f"tp_plan={plan!r} is not a plan: {wrong[0] if wrong else 'it divides no layer'}.\n"
            "Write a dict from patterns of submodule names to styles of torch.distributed.tensor.parallel, such as "
            "{'layers.*.up': ColwiseParallel()}, or 'auto'."
        )


def described_plan(plan: TensorParallelPlan | None) -> object:
    """The plan as plain data, for comparison between ranks and strategies."""
    if plan is None or isinstance(plan, str):
        return plan
    return {pattern: _described_style(style) for pattern, style in plan.items()}


def _described_style(style: ParallelStyle) -> str:
    """A style with its layouts, if it shows them, as those of torch do; otherwise the name of its class."""
    return type(style).__name__ if type(style).__repr__ is object.__repr__ else repr(style)


def styles_of(root: nn.Module, plan: TensorParallelPlan, size: int) -> dict[nn.Module, tuple[str, ParallelStyle]]:
    """Each submodule that the plan names, with its FQN and style.

    Args:
        root: The module, not sharded yet.
        plan: The plan.
        size: The number of tensor-parallel ranks.

    Raises:
        ShardingError: A pattern matches no submodule, two match one, a style can't be applied to the submodule, or
            ``size`` does not divide it.
    """
    patterns = own_plan(root) if isinstance(plan, str) else plan
    named = dict(root.named_modules())
    styles: dict[nn.Module, tuple[str, ParallelStyle]] = {}
    pattern_of: dict[nn.Module, str] = {}
    for pattern, style in patterns.items():
        matching = [name for name in named if matches(name, pattern)]
        if not matching and plan != "auto":
            close = get_close_matches(pattern, [name for name in named if name], 3, 0.4)
            raise ShardingError(
                f"the pattern {pattern!r} of tp_plan matches no submodule of {type(root).__name__}.\n"
                f"Names are those of named_modules(), such as {', '.join(map(repr, close or list(named)[1:4]))}; '*' "
                "stands for one name between dots."
            )
        for name in matching:
            module = named[name]
            if module in styles:
                raise ShardingError(
                    f"{name!r} matches two patterns of tp_plan, {pattern_of[module]!r} and {pattern!r}.\n"
                    "Write patterns of which one matches each submodule."
                )
            styles[module], pattern_of[module] = (name, style), pattern
    _check_called(root, styles)
    for module, (name, style) in styles.items():
        _check_fits(name, module, style, size)
    _check_heads(root, styles, size)
    return styles


def _check_called(root: nn.Module, styles: Mapping[nn.Module, tuple[str, ParallelStyle]]) -> None:
    """Refuse styles inside torch's MultiheadAttention, which reads the weights of its layers and never calls them."""
    for name, module in root.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            inside = [styles[part] for part in module.modules() if part in styles]
            if inside:
                part_name, style = inside[0]
                raise ShardingError(
                    f"tp_plan gives {part_name!r} the style {type(style).__name__}, and {name!r} is an "
                    "nn.MultiheadAttention, which reads its layers' weights instead of calling them: what a style "
                    "does to inputs and outputs would never happen.\n"
                    "Leave it out of the plan; or write the attention with three nn.Linear for query, key and value "
                    "(ColwiseParallel), one for the output (RowwiseParallel), and scaled_dot_product_attention."
                )


def _check_fits(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise ShardingError(
                f"tp_plan gives {name!r} the style {type(style).__name__}, which is for nn.Linear and nn.Embedding, "
                f"and it is a {type(module).__name__}.\nName the layers in it instead."
            )
        dim = _divided_dim(module, style)
        if module.weight.shape[dim] % size:
            raise ShardingError(
                f"tp_plan divides dimension {dim} of {name}.weight, of size {module.weight.shape[dim]}, among "
                f"tensor_parallel_size={size} ranks, which does not divide it.\n"
                "Choose another size, or leave the layer out of the plan."
            )


def _divided_dim(module: nn.Linear | nn.Embedding, style: ColwiseParallel | RowwiseParallel) -> int:
    """The dimension of the weight that a style divides."""
    dim_of_inputs, dim_of_outputs = (1, 0) if isinstance(module, nn.Linear) else (0, 1)  # of the weight's shape
    return dim_of_inputs if isinstance(style, RowwiseParallel) else dim_of_outputs


def _check_heads(root: nn.Module, styles: Collection[nn.Module] | Mapping[nn.Module, object], size: int) -> None:
    """Refuse to divide an attention layer whose heads can't be divided among the ranks."""
    for name, module in root.named_modules():
        if not any(child in styles for child in module.children()):
            continue
        config = getattr(module, "config", None) if hasattr(module, "head_dim") else None  # as transformers' have
        for attribute in _HEADS:
            heads = getattr(module, attribute, getattr(config, attribute, None))
            if type(heads) is int and heads % size:
                raise ShardingError(
                    f"tp_plan divides layers of {name!r}, which has {attribute}={heads}, and "
                    f"tensor_parallel_size={size} does not divide that.\n"
                    "Choose a size that divides it, or leave these layers out of the plan."
                )


def tensor_parallelize(
    modules: Iterable[nn.Module], styles: Mapping[nn.Module, tuple[str, ParallelStyle]], mesh: DeviceMesh
) -> None:
    """Apply styles to some modules, whose values are the same on every rank. Needs no communication.

    Args:
        modules: The modules.
        styles: What :func:`styles_of` returned.
        mesh: The tensor-parallel ranks.

    Raises:
        ShardingError: A style can't be applied.
    """
    for module in modules:
        if module not in styles:
            continue
        name, style = styles[module]
        if isinstance(style, ColwiseParallel | RowwiseParallel) and style.use_local_output:
            divided_dims = [layout.dim for layout in style.output_layouts if isinstance(layout, Shard)]
            # before the style's hook, which makes local tensors
            module.register_forward_hook(partial(_refuse_uneven, name, divided_dims, mesh.size()))
        frozen = {param_name for param_name, parameter in module.named_parameters() if not parameter.requires_grad}
        try:
            parallelize_module(module, mesh, style, src_data_rank=None)
        except (NotImplementedError, ValueError, AssertionError, RuntimeError) as error:
            raise ShardingError(
                f"tp_plan gives {name!r} the style {type(style).__name__}, which torch can't apply to a "
                f"{type(module).__name__}: {error}\nGive it another style, or leave it out of the plan."
            ) from error
        module.register_forward_hook(_refuse_recorded)
        for param_name, parameter in module.named_parameters():
            parameter.requires_grad_(param_name not in frozen)  # SequenceParallel makes new parameters, all trained


def _refuse_recorded(module: nn.Module, args: object, output: object) -> None:
    """Refuse backward passes with ``create_graph=True`` that reach what a divided layer returns."""
    if isinstance(output, Tensor) and output.requires_grad and not torch.compiler.is_compiling():
        output.register_hook(_refuse_graph)


def _refuse_graph(_: Tensor) -> None:
    if torch.is_grad_enabled():  # off in a backward pass, unless it was given create_graph=True
        raise UnsupportedCapabilityError(
            "create_graph=True goes through a layer that tp_plan divides, and torch's conversions between ranks' parts "
            "and whole tensors can be differentiated once: second derivatives would lack parts, without a word.\n"
            "Leave tensor_parallel_size and tp_plan out, and shard over all ranks."
        )


def _refuse_uneven(name: str, dims: Iterable[int], size: int, module: nn.Module, args: object, output: object) -> None:
    """Refuse to give ranks parts of different sizes of what a layer returns: each would infer another full size.

    Raises:
        ShardingError: The number of ranks does not divide the size of a dimension.
    """
    if not isinstance(output, Tensor) or not is_dtensor(output):
        return
    for dim in dims:
        if output.shape[dim] % size:
            next_multiple = -(-output.shape[dim] // size) * size
            raise ShardingError(
                f"tp_plan divides dimension {dim} of what {name!r} returns, of shape {tuple(output.shape)}, among "
                f"tensor_parallel_size={size} ranks, which does not divide it.\n"
                f"Pad it, such as a sequence to {next_multiple}; or leave the tensor whole, with "
                "output_layouts=Replicate()."
            )


def explain_errors(root: nn.Module) -> None:
    """Let errors of torch's in a forward pass of a divided module say what a plan may have to do with them."""
    root.register_forward_hook(_explain, always_call=True)


def _explain(root: nn.Module, args: object, output: object) -> None:
    error = sys.exception()  # torch calls hooks with always_call=True inside of its except clause
    is_explained = isinstance(error, ShardingError | UnsupportedCapabilityError) or hasattr(error, "__notes__")
    if output is not None or not isinstance(error, RuntimeError | ValueError) or is_explained:
        return
    if _LOST_RANK_ERROR.search(str(error)):
        return
    error.add_note(
        f"tp_plan divides layers of {type(root).__name__.removeprefix('FSDP')}, and the code between them sees the "
        "local part of what a ColwiseParallel layer returns. If this error is about shapes or DTensors: end each "
        "divided region with a RowwiseParallel layer, or with ColwiseParallel(output_layouts=Replicate()); count heads "
        "from the tensor, view(batch, length, -1, head_size), not from a constant; and give the strategy "
        "loss_parallel=True if the head's output stays divided (use_local_output=False)."
    )


def return_no_view(unit: nn.Module) -> None:
    """Let a divided module that becomes a unit return a copy, not a view. Call it before ``fully_shard``.

    What a style returns is a view of a DTensor. ``fully_shard`` hooks a unit's backward pass to what the unit returns,
    and an in-place operation on a view, such as ``x += position``, would drop that hook.
    """
    unit.register_forward_hook(_clone_output)


def _clone_output(module: nn.Module, args: object, output: object) -> object:
    return output.clone() if isinstance(output, Tensor) else output


def tie_again(ties: Iterable[Iterable[tuple[nn.Module, str]]], root: nn.Module) -> None:
    """Let modules share parameters again, after a plan has divided them separately in each module.

    Args:
        ties: For each shared parameter, the modules that share it, with its names there.
        root: The root, for the error.

    Raises:
        ShardingError: The plan places a shared parameter differently in its modules.
    """
    names = {module: name for name, module in root.named_modules()}
    for owners in ties:
        (first_module, first_name), *other_owners = owners
        first_parameter = getattr(first_module, first_name)
        for module, name in other_owners:
            parameter = getattr(module, name)
            if parameter is first_parameter:
                continue
            is_divided_alike = (
                isinstance(parameter, DTensor)
                and isinstance(first_parameter, DTensor)
                and parameter.placements == first_parameter.placements
            )
            if not is_divided_alike:
                names_of_tied = [f"{names[owner]}.{param_name}".removeprefix(".") for owner, param_name in owners]
                raise ShardingError(
                    f"{' and '.join(map(repr, names_of_tied))} are one parameter, and tp_plan would divide it "
                    "differently in each.\nGive both layers styles that divide the same dimension, such as "
                    "RowwiseParallel for an nn.Embedding and ColwiseParallel for the nn.Linear that shares its weight; "
                    "or leave both out."
                )
            setattr(module, name, first_parameter)
