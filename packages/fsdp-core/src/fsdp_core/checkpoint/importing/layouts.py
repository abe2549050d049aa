"""Converts a source's content to the nest of our checkpoints: the Trainer's, or the user's own keys under Fabric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_core.checkpoint.format.state_paths import join_path
from fsdp_core.checkpoint.importing.memory_budget import current_budget
from fsdp_core.checkpoint.importing.optimizer_states import (
    ParameterOrder,
    is_flattened,
    is_optimizer,
    name_parameters,
    unflatten,
)
from fsdp_core.checkpoint.importing.tensors import StridedTensor, read_full
from fsdp_core.errors import CheckpointFormatError, CheckpointMismatchError
from fsdp_core.state.chunks import TensorSource
from fsdp_core.state.fqn import clean_name

__all__ = ["KEPT_WITH_WEIGHTS", "Imported", "convert_trainer_state", "convert_user_state"]

TRAINER_MARK = "pytorch-lightning_version"

_PROGRESS_KEYS = ("epoch", "global_step", "loops", TRAINER_MARK)
_MODULE_KEYS = ("hparams_name", "hyper_parameters", "hparams_type")
_DATAMODULE_KEYS = ("datamodule_hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_type")
KEPT_WITH_WEIGHTS = frozenset((*_PROGRESS_KEYS, *_MODULE_KEYS, *_DATAMODULE_KEYS))
"""The keys that the Trainer's ``save_weights_only`` keeps in addition to the weights."""


@dataclass(kw_only=True)
class Imported:
    """The content of an import.

    Attributes:
        state: The nest.
        kinds: ``"model"`` or ``"optimizer"``, by the path of a part of the nest.
        aliases: The path of a tied parameter's first name, by that of each additional name.
        source: A description of the source, for people.
        is_trainer_state: Whether the nest is that of a Trainer checkpoint.
        notes: Notes for the user on how it was read.
    """

    state: dict[str, Any]
    kinds: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    source: str = ""
    is_trainer_state: bool = False
    notes: list[str] = field(default_factory=list)


def convert_trainer_state(
    model: Mapping[str, Any],
    optimizers: list[Any] | None,
    rest: Mapping[str, Any],
    order: ParameterOrder,
    source: str,
) -> Imported:
    """Build the Trainer's nest.

    Args:
        model: The LightningModule's state dict.
        optimizers: The optimizers' states, if there are any.
        rest: The other data that the Trainer saves.
        order: Gives numbered parameters their names.
        source: A description of the source.

    Raises:
        CheckpointFormatError: The model is no state dict, or an optimizer's state does not have the form of one.
        CheckpointMismatchError: It is not certain which parameters an optimizer's state is of.
    """
    state: dict[str, Any] = {"model": _clean_names(model)}
    imported = Imported(state=state, kinds={"model": "model"}, source=source, is_trainer_state=True)
    aliases = _aliases(state["model"])
    imported.aliases = {join_path("model", name): join_path("model", first) for name, first in aliases.items()}
    if optimizers is not None:
        shapes = _parameter_shapes(state["model"], aliases)
        state["optimizer"] = [
            _name_optimizer_state(f"optimizer {i}", o, shapes, order) for i, o in enumerate(optimizers)
        ]
        imported.kinds.update({f"optimizer/{i}": "optimizer" for i in range(len(optimizers))})
        order.check_all_used()
        imported.notes += order.notes
    state["trainer"] = _read_into_memory(rest)
    return imported


def convert_user_state(
    nest: Mapping[str, Any], order: ParameterOrder, source: str, *, weights_only: bool = False
) -> Imported:
    """Keep the user's own keys, as under Fabric. Values other than models and optimizers are read into memory.

    Args:
        nest: The content of the source; a model's tensors may also be at its top level.
        order: Gives numbered parameters their names.
        source: A description of the source.
        weights_only: Whether to keep only the models.

    Raises:
        CheckpointFormatError: There is no model in it.
        CheckpointMismatchError: It is not certain which parameters an optimizer's state is of.
    """
    nest = _with_tensors_under_model(nest)
    models = {key: _clean_names(value) for key, value in nest.items() if is_model(value)}
    if not models:
        raise CheckpointFormatError(
            f"{source} holds no model: none of {', '.join(map(repr, nest)) or 'its keys'} is a dict of tensors by name."
        )
    imported = Imported(state={}, source=source)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, model in models.items():
        aliases = _aliases(model)
        shapes[key] = _parameter_shapes(model, aliases)
        imported.kinds[join_path(key)] = "model"
        imported.aliases.update({join_path(key, name): join_path(key, first) for name, first in aliases.items()})
    for key, value in nest.items():
        optimizer = unflatten(value) if is_flattened(value) else value
        if key in models:
            imported.state[key] = models[key]
        elif weights_only:
            continue
        elif is_optimizer(optimizer):
            imported.state[key] = _name_optimizer_state(
                f"optimizer {key!r}", optimizer, _shapes_for_optimizer(shapes, key, optimizer), order
            )
            imported.kinds[join_path(key)] = "optimizer"
        else:
            imported.state[key] = _read_into_memory(value)
    order.check_all_used()
    imported.notes += order.notes
    return imported


def is_model(value: Any) -> bool:
    """Return whether a value is a state dict: tensors by name, at least one trainable, and modules' extra state."""
    return (
        isinstance(value, Mapping)
        and not is_flattened(value)
        and any(_is_trainable(leaf) and len(leaf.shape) > 0 for leaf in value.values())
        and all(
            isinstance(name, str) and (isinstance(leaf, TensorSource) or name.endswith("_extra_state"))
            for name, leaf in value.items()
        )
    )


def _is_trainable(leaf: Any) -> bool:
    return isinstance(leaf, TensorSource) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)


def _with_tensors_under_model(nest: Mapping[str, Any]) -> dict[str, Any]:
    """Move tensors at the top of a nest under ``model``, if there is no other model."""
    model = {key: leaf for key, leaf in nest.items() if isinstance(leaf, TensorSource) or key.endswith("_extra_state")}
    if not model or any(map(is_model, nest.values())) or "model" in nest:
        return dict(nest)
    return {"model": model, **{key: value for key, value in nest.items() if key not in model}}


def _clean_names(model: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(model, Mapping):
        raise CheckpointFormatError(f"the model's state is not a dict of tensors, but {type(model).__name__}")
    cleaned: dict[str, Any] = {}
    for name, leaf in model.items():
        if clean_name(str(name)) in cleaned:
            raise CheckpointFormatError(
                f"the model's state holds {name!r} twice, with a wrapper in its name and without"
            )
        cleaned[clean_name(str(name))] = leaf if isinstance(leaf, TensorSource) else _read_into_memory(leaf)
    return cleaned


def _aliases(model: Mapping[str, Any]) -> dict[str, str]:
    """Return the additional names of tied parameters, each with the first name of the same tensor."""
    first_names: dict[StridedTensor, str] = {}
    aliases = {}
    for name, leaf in model.items():
        if not isinstance(leaf, StridedTensor) or 0 in leaf.shape:
            continue
        if leaf in first_names:
            aliases[name] = first_names[leaf]
        else:
            first_names[leaf] = name
    return aliases


def _parameter_shapes(model: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors that may be parameters: without aliases and integers."""
    return {name: tuple(leaf.shape) for name, leaf in model.items() if _is_trainable(leaf) and name not in aliases}


def _shapes_for_optimizer(
    shapes: Mapping[str, dict[str, tuple[int, ...]]], key: str, optimizer: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model whose parameters an optimizer numbers; none are needed if it has their names."""
    if len(shapes) == 1:
        return next(iter(shapes.values()))
    if any(type(number) is int for group in optimizer["param_groups"] for number in group["params"]):
        raise CheckpointMismatchError(
            f"optimizer {key!r} numbers its parameters, and there are {len(shapes)} models: {', '.join(shapes)}.\n"
            "Leave the other models out by `--drop KEY`, or import the weights alone by `--weights-only`."
        )
    return {}


def _name_optimizer_state(title: str, value: Any, shapes: Mapping[str, tuple[int, ...]], order: ParameterOrder) -> Any:
    if not is_optimizer(value):
        raise CheckpointFormatError(
            f"{title} does not have the form of optimizer.state_dict(), so its state can't be imported.\n"
            "Import the weights alone with `--weights-only`."
        )
    named = name_parameters(title, value, shapes, order)
    state = {
        name: {key: leaf if isinstance(leaf, TensorSource) else _read_into_memory(leaf) for key, leaf in values.items()}
        for name, values in named["state"].items()
    }
    return {"state": state, "param_groups": _read_into_memory(named["param_groups"])}


def _read_into_memory(value: Any) -> Any:
    """Return plain data with its tensors read into memory; they are small."""
    if isinstance(value, TensorSource):
        current_budget().charge(math.prod(value.shape) * value.dtype.itemsize)
        return read_full(value)
    if type(value) is dict:
        return {key: _read_into_memory(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_read_into_memory(item) for item in value)
    if isinstance(value, dict):  # a subclass such as OrderedDict or Counter, changed in place to keep its class
        for key, item in value.items():
            value[key] = _read_into_memory(item)
    return value
