"""Whether the state that an optimizer has after a trial can be saved, and resumed as one process would."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.checkpoint.format.plain_data import decode, encode
from fsdp_core.checkpoint.format.safetensors_file import unsavable
from fsdp_core.errors import CheckpointValueError, FSDPError
from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.sharding.optimizers.copying import nested_values
from fsdp_core.sharding.optimizers.known import is_of_torch
from fsdp_core.sharding.optimizers.small_params import Key, SmallParam, Specs, View, as_dtensor, as_unsharded
from fsdp_core.sharding.optimizers.trial_run import COARSE, STEPS, TrialRun, allclose, run_steps, shard_values
from fsdp_core.state.block_quantised import is_quantised, quantises
from fsdp_core.state.chunks import chunked
from fsdp_core.state.layout import Layout, Part
from fsdp_core.state.optimizer import load_optimizer_state, optimizer_state, stateful_optimizer
from fsdp_core.state.owned import Owners, set_owners

__all__ = ["layout_of_small_params", "why_not_resumed", "why_not_saved"]

#: The steps that a resumed run is compared for.
_RESUMED_STEPS = range(STEPS, STEPS + 2)


def why_not_saved(run: TrialRun, *, is_sharded: bool) -> str | None:
    """Say why a checkpoint can't hold an optimizer's state; ``None`` if it can.

    What decides is the code that writes checkpoints. Where ranks have shards, they must be able to tell which part of
    a tensor they have: it is a scalar, or of its parameter's shape.

    Args:
        run: Its steps.
        is_sharded: Whether the state is that of shards, and not of whole parameters.
    """
    names = {param: part.name for param, (part,) in layout_of_small_params(run.small_params).items()}
    state = stateful_optimizer(run.optimizer).state
    has_own_format = isinstance(run.optimizer, torch.optim.LBFGS)
    if is_sharded and not has_own_format:
        for param in [param for param in state if param in names]:
            for name, value in state[param].items():
                for tensor in nested_values(value):
                    if isinstance(tensor, Tensor) and tensor.numel() != 1 and tensor.shape != param.shape:
                        return _describe_lost_state(
                            f"it keeps {name!r} of shape {tuple(tensor.shape)} for a parameter of "
                            f"{tuple(param.shape)}, and a checkpoint would hold that of one rank"
                        )
    for key in state:
        if not isinstance(key, Tensor) or key not in names:
            word = f"a tensor of {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            return _describe_lost_state(f"it keeps state of no parameter, under {word}")

    def check_tensor(keys: Any, tensor: Any) -> None:
        chunks = () if is_quantised(local_tensor(tensor)) else chunked(tensor).chunks
        for reason in filter(None, (unsavable(chunk.data) for chunk in chunks)):
            raise CheckpointValueError(reason)

    groups = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
    by_name = {name: state.get(param, {}) for param, name in names.items()}
    try:
        with torch.no_grad():
            encode({"state": by_name, "param_groups": groups}, check_tensor)
    except CheckpointValueError as error:
        return _describe_lost_state(str(error).splitlines()[1].strip(" ."))
    return None


def why_not_resumed(
    optimizer: torch.optim.Optimizer, specs: Specs, expected: TrialRun, run: TrialRun, view: View
) -> str | None:
    """Say why a run that is resumed would not go on as one process does; ``None`` if it would.

    A new copy of the optimizer gets the state of one that has stepped, through what a checkpoint holds of it, and steps
    on. With a view as DTensors, all ranks must call it.

    Args:
        optimizer: The optimizer. It is not changed.
        specs: The specs of its parameters.
        expected: The steps of one process.
        run: The steps over what ``view`` returns.
        view: What the optimizer gets of a small parameter: all of it, on its owner, or a DTensor.
    """
    # How ranks divide codes of a few bits depends on the sizes of parameters, and the small ones have other sizes.
    if is_of_torch(optimizer) or quantises(optimizer):
        return None
    resumed = partial(run_steps, optimizer, specs, by_closure=expected.by_closure, steps=_RESUMED_STEPS)
    try:
        further = resumed(as_unsharded, start=partial(_load_state_dict, expected)).values
    except Exception as error:  # nor does one process resume it
        name = type(optimizer).__name__
        warnings.warn(
            f"{name} can't be resumed, sharded or not: a copy of it that was given its state_dict() failed with "
            f"{type(error).__name__}: {str(error)[:200]}. Training goes on, and its checkpoints hold the weights; "
            f"expect this error when you resume one with {name}.",
            stacklevel=2,
        )
        return None
    try:
        further_over_view = resumed(view, start=partial(_load_from_checkpoint, run)).values
    except Exception as error:
        lines = str(error).splitlines() if isinstance(error, FSDPError) else [f"{type(error).__name__}: {error}"]
        return _describe_lost_state(lines[0][:300].rstrip(".") if lines else type(error).__name__)
    if allclose(shard_values(further) if view is as_dtensor else further, further_over_view, COARSE):
        return None
    return _describe_lost_state("resumed, it makes other steps than one process does")


def _describe_lost_state(reason: str) -> str:
    return (
        f"its state could not be saved and resumed: {reason}.\n"
        "Use an optimizer whose state is tensors of the parameters' shapes and plain numbers, such as AdamW."
    )


def _load_state_dict(run: TrialRun, optimizer: torch.optim.Optimizer, small_params: Mapping[Key, SmallParam]) -> None:
    _copy_values(run, small_params)
    optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def _load_from_checkpoint(
    run: TrialRun, optimizer: torch.optim.Optimizer, small_params: Mapping[Key, SmallParam]
) -> None:
    """Give a copy of the optimizer what a checkpoint would hold of one that has stepped."""
    _copy_values(run, small_params)
    state = optimizer_state(run.optimizer, layout_of_small_params(run.small_params), ProcessGroupRuntime())
    tensors: list[Tensor] = []

    def take_tensor(keys: Any, tensor: Any) -> dict[str, int]:
        tensors.append(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone())
        return {"$tensor": len(tensors) - 1}

    with torch.no_grad():
        saved = decode(encode(state, take_tensor), lambda tag, number: tensors[number])
    layout = layout_of_small_params(small_params)
    if not any(isinstance(param, DTensor) for param in layout) and stateful_optimizer(optimizer) is optimizer:
        set_owners(optimizer, Owners(rank=0, by_parameter=dict.fromkeys(layout, 0)))
    load_optimizer_state(optimizer, layout, saved)


def _copy_values(run: TrialRun, small_params: Mapping[Key, SmallParam]) -> None:
    with torch.no_grad():
        for key, small in small_params.items():
            small.param.copy_(run.small_params[key].param)


def layout_of_small_params(small_params: Mapping[Key, SmallParam]) -> Layout:
    """The small parameters as those of a model, each with a name of its own that says which it is."""
    by_name: dict[str, nn.Parameter] = {}
    for (group, spec), small in small_params.items():
        name = f"a parameter of {tuple(small.param.shape)}"
        for detail in (f"in group {group}", f"placed as {spec.placements}", f"the {len(by_name) + 1}th"):
            name = f"{name} {detail}" if name in by_name else name  # specs of one shape differ in something else
        by_name[name] = small.param
    return {param: (Part(name=name, shape=tuple(param.shape)),) for name, param in by_name.items()}
