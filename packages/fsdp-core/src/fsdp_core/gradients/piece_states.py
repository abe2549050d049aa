"""What optimizers keep for a rank's pieces of parameters: in their state, and wherever else it can be seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, compress
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_core.gradients.step_gradients import PIECE_CLASSES
from fsdp_core.torch_private.tensors import without_torch_function

__all__ = ["SHARDS_ATTRIBUTE", "parameter_of_state", "states_of_pieces"]

#: The values of a dictionary. As a function of C's, it is mapped over many without a call of Python.
_DICT_VALUES = dict.values

#: Classes of values in which nothing is looked for, so that one look at the class is enough.
_LEAVES = frozenset(
    {nn.Parameter, int, float, bool, complex, str, bytes, type(None), type, FunctionType, MethodType}
    | {torch.dtype, torch.device, torch.Size, torch.Generator}
)

#: Classes of values of a state that have no tensors inside them: leaves, and the tensors themselves.
_NOT_NESTED = _LEAVES | PIECE_CLASSES | {Tensor}

#: The attribute that marks an optimizer or module whose shards must not be written to files. Its value is for the hook
#: that refuses them.
SHARDS_ATTRIBUTE = "_fsdp_core_shards"

#: How deep tensors are looked for: those in lists, in a dictionary, in an attribute of an object, for example.
_DEPTH = 4


def states_of_pieces(
    optimizer: Optimizer, pieces: Callable[[], Iterable[Tensor]], ids: Collection[int]
) -> list[Tensor]:
    """The tensors that an optimizer keeps for pieces of parameters.

    Tensors without dimensions, such as a count of steps, are left out: they are the same on all ranks.

    Args:
        optimizer: The optimizer.
        pieces: Returns the pieces; only called if their shapes are needed.
        ids: The ids of the pieces.

    Returns:
        The tensors in the pieces' states, also in containers and objects there; and, found in the same way, those in
        the optimizer's attributes that have the shape of a piece.
    """
    # with few calls of Python, and none for each value: this is asked several times in each step
    piece_states = compress(optimizer.state.values(), map(ids.__contains__, map(id, optimizer.state)))
    values = list(chain.from_iterable(map(_DICT_VALUES, piece_states)))
    states = [
        value for value in values if value.__class__ in PIECE_CLASSES or (value.__class__ is Tensor and value.ndim)
    ]
    has_nested = not _NOT_NESTED.issuperset(map(type, values))
    unknown_names = optimizer.__dict__.keys() - _known_names()
    if not unknown_names and not has_nested:
        return states
    attributes = [optimizer.__dict__[name] for name in unknown_names]
    with without_torch_function():
        if has_nested:
            states = [tensor for tensor in _tensors_in(values, _DEPTH, set()) if tensor.ndim]
        if not _LEAVES.issuperset(map(type, attributes)):
            shapes = {piece.shape for piece in pieces()}
            visited = set(map(id, states))
            states += [tensor for tensor in _tensors_in(attributes, _DEPTH, visited) if tensor.shape in shapes]
    return states


def parameter_of_state(optimizer: Optimizer, state: Tensor) -> Tensor | None:
    """The parameter for which an optimizer keeps a tensor in its state; ``None`` if it does not."""
    for parameter, values in optimizer.state.items():
        if isinstance(parameter, Tensor) and any(
            tensor is state for tensor in _tensors_in(values.values(), _DEPTH, set())
        ):
            return parameter
    return None


@cache
def _known_names() -> frozenset[str]:
    """The attributes that torch gives each optimizer, and that this package does."""
    return frozenset({SHARDS_ATTRIBUTE, *vars(Optimizer([torch.zeros(1)], {}))})


def _tensors_in(values: Iterable[Any], depth: int, visited: set[int]) -> Iterator[Tensor]:
    """The plain tensors and guarded ones among values, and inside those that are containers or objects."""
    for value in values:
        value_class = value.__class__
        if value_class in _LEAVES or id(value) in visited:
            continue
        visited.add(id(value))
        if value_class is Tensor or value_class in PIECE_CLASSES:
            yield value
        elif depth:
            yield from _tensors_in(_members(value), depth - 1, visited)


def _members(value: Any) -> Iterable[Any]:
    """What a container holds, or an object of a class that is neither torch's nor Lightning's."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        starts_with_leaf = next(iter(value), None).__class__ in _LEAVES
        return () if starts_with_leaf else value  # a history of losses, for example, is long and has no tensors
    if isinstance(value, Tensor | nn.Module):
        return ()
    # an optimizer inside another, as in Lookahead, is looked into, also if it is torch's
    if not isinstance(value, Optimizer) and value.__class__.__module__.partition(".")[0] in _LIBRARIES:
        return ()
    slots = (getattr(value, name, None) for name in getattr(value, "__slots__", ()))
    return chain(getattr(value, "__dict__", {}).values(), slots)


#: Libraries whose objects, such as a Trainer or a scheduler, are looked into no further.
_LIBRARIES = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric", "builtins"})
