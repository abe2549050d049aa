"""The layout of a full checkpoint: that of a plain Trainer and of plain optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_core.errors import CheckpointMismatchError

__all__ = ["as_trainers_file", "from_fabric", "number_parameters"]


def number_parameters(state: dict[str, Any]) -> dict[str, Any]:
    """Convert an optimizer state by FQN to the form of a plain torch optimizer's ``state_dict()``.

    FQNs are kept in each group as ``param_names``, as torch does for optimizers built from named parameters.

    Example:
        >>> number_parameters({"state": {"w": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]})
        {'state': {0: {'step': 1}}, 'param_groups': [{'lr': 0.1, 'params': [0], 'param_names': ['w']}]}
    """
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    return {
        "state": {number[name]: values for name, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [number[n] for n in group["params"]], "param_names": list(group["params"])}
            for group in state["param_groups"]
        ],
    }


def as_trainers_file(nest: Mapping[str, Any]) -> dict[str, Any] | None:
    """The contents of a Trainer's folder, under the keys of a Trainer's file; ``None`` for other folders.

    Raises:
        CheckpointMismatchError: Its model is no state dict.
    """
    plain = nest.get("trainer")
    if "model" not in nest or not isinstance(plain, Mapping) or "pytorch-lightning_version" not in plain:
        return None
    checkpoint = {**plain, "state_dict": _state_dict(nest, "model")}
    if "optimizer" in nest:
        checkpoint["optimizer_states"] = [number_parameters(state) for state in nest["optimizer"]]
    return checkpoint


def _state_dict(nest: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    model = nest[key]
    if not isinstance(model, Mapping):
        raise CheckpointMismatchError(
            f"the checkpoint holds a {type(model).__name__} as the model {key!r}, not tensors by name: save it again"
        )
    return model


def from_fabric(
    nest: Mapping[str, Any], model: str, optimizers: Sequence[str], *, left_out: Sequence[str], version: str
) -> dict[str, Any]:
    """The contents of a folder saved by Fabric, under the keys of a Trainer's file.

    Args:
        nest: The user's state.
        model: The key of a model in it.
        optimizers: The keys of its optimizers, in the order in which ``configure_optimizers`` returns them.
        left_out: The keys of what is left out: other models and optimizers.
        version: The Lightning version of the layout.

    Raises:
        CheckpointMismatchError: The user's state uses a key of Lightning's for something else, or its model is no state
            dict.
    """
    ours = {
        "pytorch-lightning_version": version,
        "state_dict": _state_dict(nest, model),
        "optimizer_states": [number_parameters(nest[key]) for key in optimizers],
        "lr_schedulers": [],
    }
    plain = {key: value for key, value in nest.items() if key not in (model, *optimizers, *left_out)}
    conflicts = sorted(plain.keys() & ours.keys())
    if conflicts:
        raise CheckpointMismatchError(
            f"the checkpoint of Fabric holds {conflicts[0]!r}, a key that a Lightning file uses for something else.\n"
            "Save it under another key, or write the model alone by --to safetensors."
        )
    return {"epoch": 0, "global_step": 0, **plain, **ours}
