"""Whether the state that an optimizer has after a trial can be saved, and resumed as one process would."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.checkpoint.format.plain_data import decode, encode
from fsdp_core.checkpoint.format.safetensors_file import unsavable
from fsdp_core.errors import CheckpointValueError, FSDPError
from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.sharding.optimizer_trial.copies import copied
from fsdp_core.sharding.optimizer_trial.courses import (
    COARSE,
    STEPS,
    Course,
    Ran,
    alike,
    of_this_rank,
    own_world,
    record,
)
from fsdp_core.sharding.optimizer_trial.small_tensors import Key, Kind, Shown, Small, as_dtensor, as_it_is, new_smalls
from fsdp_core.state.block_quantised import is_of_blocks, quantises
from fsdp_core.state.chunks import chunked
from fsdp_core.state.layout import Layout, Part
from fsdp_core.state.optimizer import holder_of_state, load_optimizer_state, optimizer_state
from fsdp_core.state.owned import Owners, set_owners

__all__ = ["layout_of_smalls", "why_lost", "why_not_resumed", "why_not_saved"]

#: The steps that a resumed run is compared for.
_FURTHER = range(STEPS, STEPS + 2)


def why_lost(ran: Ran) -> str | None:
    """Say why a checkpoint could not hold an optimizer's state of shards; ``None`` if it can.

    Ranks must be able to tell which part they hold: such state is a scalar, or of its parameter's shape.
    """
    apart = _not_told_apart(ran)
    if apart is None:
        return why_not_saved(ran)
    return _lost(f"it keeps {apart}, and a checkpoint would hold that of one rank")


def _not_told_apart(ran: Ran) -> str | None:
    if isinstance(ran.optimizer, torch.optim.LBFGS):
        return None  # handled separately
    for small in ran.smalls.values():
        for key, value in holder_of_state(ran.optimizer).state.get(small.held, {}).items():
            for one in _tensors(value):
                if one.numel() != 1 and one.shape != small.held.shape:
                    return f"{key!r} of shape {tuple(one.shape)} for a parameter of {tuple(small.held.shape)}"
    return None


def why_not_saved(ran: Ran) -> str | None:
    """Say why a checkpoint can't hold an optimizer's state; ``None`` if it can.

    What decides is the code that writes checkpoints.
    """
    held = {small.held for small in ran.smalls.values()}
    state = holder_of_state(ran.optimizer).state
    besides = next((key for key in state if not isinstance(key, Tensor) or key not in held), None)
    if besides is not None:
        return _lost(f"it keeps state of no parameter, under {_shown(besides)}")
    parameters = {part.name: state.get(parameter, {}) for parameter, (part,) in layout_of_smalls(ran.smalls).items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in ran.optimizer.param_groups]

    def on_tensor(keys: Any, leaf: Any) -> None:
        if is_of_blocks(local_tensor(leaf)):
            return
        for chunk in chunked(leaf).chunks:
            if (reason := unsavable(chunk.data)) is not None:
                raise CheckpointValueError(reason)

    try:
        with torch.no_grad():
            encode({"state": parameters, "param_groups": groups}, on_tensor)
    except CheckpointValueError as error:
        return _lost(str(error).splitlines()[1].strip(" ."))
    return None


def why_not_resumed(
    optimizer: torch.optim.Optimizer,
    kinds: Mapping[nn.Parameter, Kind],
    whole: Ran,
    ran: Ran,
    shown: Shown,
    *,
    by_closure: bool,
) -> str | None:
    """Say why a run that is resumed would not go on as one process does; ``None`` if it would.

    A new copy of the optimizer gets the state of one that has stepped, through what a checkpoint holds of it, and steps
    on. With ``shown`` as DTensors, all ranks must call it.

    Args:
        optimizer: The optimizer. It is not changed.
        kinds: What represents its parameters.
        whole: The steps of one process.
        ran: The steps over what ``shown`` returns.
        shown: What the optimizer gets of a small tensor: all of it, on its owner, or a DTensor.
        by_closure: Whether it steps with a closure.
    """
    if quantises(optimizer):
        return None  # what ranks hold of it is for the sizes of real parameters
    try:
        want = _stepped_on(optimizer, kinds, whole, as_it_is, by_closure, _plainly_resumed)
    except Exception as raised:  # nor does one process resume it
        name = type(optimizer).__name__
        warnings.warn(
            f"{name} can't be resumed, sharded or not: a copy of it that was given its state_dict() failed with "
            f"{type(raised).__name__}: {str(raised)[:200]}. Training goes on, and its checkpoints hold the weights; "
            f"expect this error when you resume one with {name}.",
            stacklevel=2,
        )
        return None
    try:
        got = _stepped_on(optimizer, kinds, ran, shown, by_closure, _resumed)
    except Exception as raised:
        words = str(raised).splitlines() if isinstance(raised, FSDPError) else [f"{type(raised).__name__}: {raised}"]
        return _lost(words[0][:300].rstrip(".") if words else type(raised).__name__)
    fine = alike(of_this_rank(want) if shown is as_dtensor else want, got, COARSE)
    return None if fine else _lost("resumed, it makes other steps than one process does")


def _lost(why: str) -> str:
    return (
        f"its state could not be saved and resumed: {why}.\n"
        "Use an optimizer whose state is tensors of the parameters' shapes and plain numbers, such as AdamW."
    )


def _stepped_on(
    optimizer: torch.optim.Optimizer,
    kinds: Mapping[nn.Parameter, Kind],
    ran: Ran,
    shown: Shown,
    by_closure: bool,
    give_state: Any,
) -> Course:
    smalls, stand_ins = new_smalls(optimizer, kinds, shown, torch.Generator().manual_seed(0))
    made = copied(optimizer, stand_ins)
    with torch.no_grad():
        for key, small in smalls.items():
            small.held.copy_(ran.smalls[key].held)
    give_state(ran, made, smalls)
    device = next((small.held.device for small in smalls.values()), torch.device("cpu"))
    with own_world(device, waits=shown is as_dtensor):
        return record(made, smalls, by_closure=by_closure, steps=_FURTHER)


def _plainly_resumed(ran: Ran, made: torch.optim.Optimizer, smalls: Mapping[Key, Small]) -> None:
    made.load_state_dict(copy.deepcopy(ran.optimizer.state_dict()))


def _resumed(ran: Ran, made: torch.optim.Optimizer, smalls: Mapping[Key, Small]) -> None:
    described = optimizer_state(ran.optimizer, layout_of_smalls(ran.smalls), ProcessGroupRuntime())
    tensors: list[Tensor] = []

    def on_tensor(keys: Any, leaf: Any) -> dict[str, int]:
        tensors.append(leaf.full_tensor() if isinstance(leaf, DTensor) else leaf.detach().clone())
        return {"$tensor": len(tensors) - 1}

    with torch.no_grad():
        saved = decode(encode(described, on_tensor), lambda tag, number: tensors[number])
    layout = layout_of_smalls(smalls)
    if not any(isinstance(held, DTensor) for held in layout) and holder_of_state(made) is made:
        set_owners(made, Owners(rank=0, by_parameter=dict.fromkeys(layout, 0)))
    load_optimizer_state(made, layout, saved)


def layout_of_smalls(smalls: Mapping[Key, Small]) -> Layout:
    """The small tensors as parameters of a model, each with a name of its own that says which it is."""
    named: dict[str, nn.Parameter] = {}
    for (group, kind), small in smalls.items():
        name = f"a parameter of {tuple(small.held.shape)}"
        for more in (f"in group {group}", f"placed as {kind.placements}", f"the {len(named) + 1}th"):
            name = f"{name} {more}" if name in named else name  # kinds of one shape differ in something else
        named[name] = small.held
    return {held: (Part(name=name, shape=tuple(held.shape)),) for name, held in named.items()}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


def _shown(key: Any) -> str:
    return f"a tensor of {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
