"""Converts other libraries' optimizer state, whether numbered, flattened or by name, to state by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fsdp_core.errors import CheckpointFormatError, CheckpointMismatchError
from fsdp_core.state.chunks import TensorSource
from fsdp_core.state.fqn import clean_name

__all__ = ["ParameterOrder", "is_flattened", "is_optimizer", "name_parameters", "unflatten"]

_STATE, _GROUPS = "state", "param_groups"

Shape = tuple[int, ...]

# Buffers of torch's own modules, which no optimizer holds.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")

_HOW_TO_GIVE_ORDER = (
    "Give the order: write the names to a file, one per line, by\n"
    "  names = {p: name for name, p in model.named_parameters()}\n"
    '  open("order.txt", "w").writelines(names[p] + "\\n" for g in optimizer.param_groups for p in g["params"])\n'
    "in the program that built the optimizer, and type `--parameter-order order.txt`; or import the weights alone with "
    "`--weights-only`."
)


def is_optimizer(value: Any) -> bool:
    """Whether a value has the form of ``optimizer.state_dict()``, with numbered or named parameters."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get(_STATE, {}), Mapping)
        and isinstance(value.get(_GROUPS), list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in value[_GROUPS])
    )


def is_flattened(value: Any) -> bool:
    """Whether a value is an optimizer's state as torch saves it with ``flatten_optimizer_state_dict=True``."""
    return (
        isinstance(value, Mapping)
        and any(isinstance(key, str) and key.startswith(f"{_GROUPS}.") for key in value)
        and all(isinstance(key, str) and key.startswith((f"{_STATE}.", f"{_GROUPS}.")) for key in value)
    )


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Restore an optimizer's state from a flattened one. Parameters with the same settings form one group.

    Example:
        >>> unflatten({"state.a.b.step": 1, "param_groups.a.b.lr": 0.1})
        {'state': {'a.b': {'step': 1}}, 'param_groups': [{'lr': 0.1, 'params': ['a.b']}]}
    """
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        section, _, name_and_key = key.partition(".")
        if section == _GROUPS:
            name, _, value_key = name_and_key.rpartition(".")
            settings.setdefault(name, {})[value_key] = value
    for key, value in flat.items():
        section, _, name_and_key = key.partition(".")
        if section == _STATE:
            name, _, value_key = name_and_key.rpartition(".")
            if name not in settings:
                raise CheckpointFormatError(
                    f"the optimizer's state holds {key!r}, and no param group {name!r}: this format can't hold "
                    "state in nested dicts.\nImport the weights alone with `--weights-only`."
                )
            state.setdefault(clean_name(name), {})[value_key] = value
    groups: list[dict[str, Any]] = []
    for name, stored_settings in settings.items():
        param_settings = {key: _read_setting(value) for key, value in stored_settings.items()}
        matching_groups = [
            group for group in groups if _comparable_settings(group) == _comparable_settings(param_settings)
        ]
        if matching_groups:
            matching_groups[0]["params"].append(clean_name(name))
        else:
            groups.append({**param_settings, "params": [clean_name(name)]})
    return {_STATE: state, _GROUPS: groups}


class ParameterOrder:
    """Maps the numbers of optimizers' parameters to names.

    Args:
        names: The names in the order in which the optimizers hold them, if the user gives it; those of several
            optimizers follow one another.

    Attributes:
        notes: Messages for the user on how the names were found.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self._listed_names = None if names is None else [clean_name(name) for name in names]
        self._used_count = 0
        self.notes: list[str] = []

    def find_names(self, title: str, state: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[int, str]:
        """Return the name of each numbered parameter.

        Args:
            title: What errors call the optimizer.
            state: The optimizer's state, with numbered parameters.
            shapes: The shapes of the model's parameters and buffers in their order, each tied one once.

        Raises:
            CheckpointMismatchError: The names are ambiguous, or shapes don't match.
        """
        numbers = [number for group in state[_GROUPS] for number in group["params"]]
        state_shapes = [_state_shapes(state[_STATE].get(number, {})) for number in numbers]
        if self._listed_names is not None:
            return self._use_given_order(title, numbers, state_shapes, shapes)
        if all(_has_param_names(group) for group in state[_GROUPS]):
            param_names = [clean_name(str(name)) for group in state[_GROUPS] for name in group["param_names"]]
            return dict(zip(numbers, param_names, strict=True))
        if len(state[_GROUPS]) > 1:
            raise CheckpointMismatchError(
                f"{title} has {len(state[_GROUPS])} param groups of numbered parameters, and the file does not say "
                f"which parameters they hold.\n{_HOW_TO_GIVE_ORDER}"
            )
        candidates = [name for name in shapes if not name.endswith(_BUFFERS)]
        candidate_shapes = [shapes[name] for name in candidates]
        earliest = _find_earliest_positions(state_shapes, candidate_shapes)
        latest = _find_latest_positions(state_shapes, candidate_shapes)
        if earliest is None or latest is None:
            raise CheckpointMismatchError(
                f"{title} has {len(numbers)} numbered parameters whose shapes don't match the model's in their order: "
                f"they belong to another model or are in another order.\n{_HOW_TO_GIVE_ORDER}"
            )
        if earliest != latest:
            raise CheckpointMismatchError(
                f"{title} has {len(numbers)} numbered parameters, the model has {len(candidates)}, and more than one "
                f"choice of them matches the shapes of the optimizer's state.\n{_HOW_TO_GIVE_ORDER}"
            )
        self.notes.append(
            f"{title[0].upper()}{title[1:]} numbers its {len(numbers)} parameters: they were assumed to be in the "
            "model's order, as in model.parameters(), which matches the shapes of all of its state."
        )
        return {number: candidates[index] for number, index in zip(numbers, earliest, strict=True)}

    def _use_given_order(
        self,
        title: str,
        numbers: Sequence[int],
        state_shapes: Sequence[set[Shape]],
        shapes: Mapping[str, Shape],
    ) -> dict[int, str]:
        assert self._listed_names is not None
        listed_names = self._listed_names[self._used_count : self._used_count + len(numbers)]
        self._used_count += len(numbers)
        if len(listed_names) != len(numbers) or len(set(listed_names)) != len(listed_names):
            raise CheckpointMismatchError(
                f"{title} has {len(numbers)} parameters, and --parameter-order gives {len(set(listed_names))} "
                "different names for them. Write one name per line, one optimizer after the other."
            )
        for name, shapes_of_state in zip(listed_names, state_shapes, strict=True):
            if name not in shapes:
                raise CheckpointMismatchError(f"--parameter-order names {name!r}, which the model does not have.")
            if not _can_have_state(shapes[name], shapes_of_state):
                raise CheckpointMismatchError(
                    f"--parameter-order lists {name!r} of shape {shapes[name]} where {title} holds state of "
                    "another shape. Correct the order."
                )
        return dict(zip(numbers, listed_names, strict=True))

    def check_all_used(self) -> None:
        """Refuse names beyond those of all optimizers' parameters.

        Raises:
            CheckpointMismatchError: Some names were not used.
        """
        if self._listed_names is not None and self._used_count != len(self._listed_names):
            raise CheckpointMismatchError(
                f"--parameter-order gives {len(self._listed_names)} names, and the optimizers have {self._used_count} "
                "numbered parameters."
            )


def name_parameters(title: str, saved: Mapping[str, Any], shapes: Mapping[str, Shape], order: ParameterOrder) -> Any:
    """Return an optimizer's state and param groups, with names instead of the keys of parameters.

    Args:
        title: What errors call the optimizer.
        saved: A state for which :func:`is_optimizer` is true.
        shapes: The shapes of the model's parameters and buffers in their order, each tied one once.
        order: Maps numbers to names, if the parameters are numbered.

    Raises:
        CheckpointMismatchError: The names of the numbers are ambiguous.
    """
    state = {_STATE: saved.get(_STATE, {}), _GROUPS: saved[_GROUPS]}
    keys = {key for group in state[_GROUPS] for key in group["params"]}
    names: dict[Any, str]  # the parameter's name by its key in the state
    if any(type(key) is int for key in keys):
        names = order.find_names(title, state, shapes)
    else:
        names = {str(key): clean_name(str(key)) for key in keys}
    unknown_keys = [key for key in state[_STATE] if key not in names]
    if unknown_keys:
        raise CheckpointMismatchError(
            f"{title} has state of {unknown_keys[0]!r}, which is in none of its param groups: it is damaged. Import "
            "the weights alone with `--weights-only`."
        )
    groups = []
    for saved_group in state[_GROUPS]:
        group = {key: _read_setting(v) for key, v in saved_group.items() if key not in ("params", "param_names")}
        group["params"] = [names[key] for key in saved_group["params"]]
        groups.append(group)
    return {_STATE: {names[key]: dict(values) for key, values in state[_STATE].items()}, _GROUPS: groups}


def _read_setting(value: Any) -> Any:
    """Return a setting of a param group, read into memory if it is a tensor, such as a learning rate."""
    if not isinstance(value, TensorSource):
        return value
    start = (0,) * len(value.shape)
    return value.read(start, value.shape)


def _comparable_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings without its parameters, and tensors as lists, so that ``==`` compares them."""
    settings = {key: value for key, value in group.items() if key != "params"}
    for key, value in settings.items():
        if isinstance(value, Tensor):
            settings[key] = value.tolist()
    return settings


def _has_param_names(group: Mapping[str, Any]) -> bool:
    param_count = len(group["params"])
    return param_count > 0 and len(group.get("param_names", ())) == param_count


def _state_shapes(values: Mapping[str, Any]) -> set[Shape]:
    """The shapes of the state's tensors; without 0-dim ones, which may be step counts."""
    shapes = {tuple(value.shape) for value in values.values() if isinstance(value, Tensor | TensorSource)}
    return shapes - {()}


def _can_have_state(shape: Shape, state_shapes: set[Shape]) -> bool:
    """Whether a parameter of a shape can have state of these shapes. Without any, nothing is known, so it can."""
    return shape in state_shapes or all(_is_factor_of(state_shape, shape) for state_shape in state_shapes)


def _is_factor_of(state_shape: Shape, shape: Shape) -> bool:
    """Whether state has the size of the parameter or 1 in each dimension."""
    if len(state_shape) != len(shape):
        return False
    return all(state_size in (1, size) for state_size, size in zip(state_shape, shape, strict=True))


def _find_earliest_positions(state_shapes: Sequence[set[Shape]], shapes: Sequence[Shape]) -> list[int] | None:
    """Assign each parameter's state to the earliest position that fits, in order; ``None`` if that is impossible."""
    positions = list[int]()
    position = 0
    for shapes_of_state in state_shapes:
        while position < len(shapes) and not _can_have_state(shapes[position], shapes_of_state):
            position += 1
        if position == len(shapes):
            return None
        positions.append(position)
        position += 1
    return positions


def _find_latest_positions(state_shapes: Sequence[set[Shape]], shapes: Sequence[Shape]) -> list[int] | None:
    """Assign each parameter's state to the latest position that fits, in order; ``None`` if that is impossible."""
    distances_from_end = _find_earliest_positions(state_shapes[::-1], shapes[::-1])
    if distances_from_end is None:
        return None
    return [len(shapes) - 1 - distance for distance in reversed(distances_from_end)]
