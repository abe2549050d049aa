"""Saves and restores optimizer state by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_core.errors import CheckpointMismatchError, OptimizerMismatchError
from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.gradients.step_gradients import plain
from fsdp_core.runtime import Runtime
from fsdp_core.state.block_quantised import (
    check_blocks,
    check_fits_shard,
    describe_full_state,
    describe_shard,
    is_quantised,
    is_saved_quantised,
    quantises,
    restore_shard,
)
from fsdp_core.state.chunks import Chunk, ChunkedTensor, chunked
from fsdp_core.state.filling import fill
from fsdp_core.state.layout import Layout, Part, separation_hint
from fsdp_core.state.owned import Owners, owned_groups, owned_state, owners_of
from fsdp_core.state.saved_tensor import SavedTensor

__all__ = ["load_optimizer_state", "optimizer_state", "state_by_name", "stateful_optimizer"]

NamedState = dict[str, Any]
#: Called with a parameter, its parts, its param group, a key of its state, and the parts' values under that key.
RestoreValue = Callable[[nn.Parameter, Sequence[Part], Mapping[str, Any], str, Sequence[Any]], Any]


def stateful_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that holds the state: an inner one with the same param groups, as in timm's Lookahead.

    Args:
        optimizer: An optimizer, which may step by another one.
    """
    for inner in vars(optimizer).values():
        if isinstance(inner, torch.optim.Optimizer) and inner.param_groups is optimizer.param_groups:
            return inner
    return optimizer


def optimizer_state(optimizer: torch.optim.Optimizer, layout: Layout, runtime: Runtime) -> NamedState:
    """Describe an optimizer's state by parameter name. All ranks must call it.

    Args:
        optimizer: The optimizer; it need not have taken a step yet.
        layout: How its parameters map to the user's.
        runtime: The ranks.

    Returns:
        ``{"state": {name: {key: state tensor or plain}}, "param_groups": [{..., "params": [name, ...]}]}``, sharing
        memory with the optimizer; names and keys are the same on every rank.

    Raises:
        OptimizerMismatchError: The optimizer holds a parameter without a name.
    """
    owners = owners_of(optimizer)
    if owners is not None:
        settings = owned_groups(optimizer, owners, runtime)
        return {
            "state": owned_state(optimizer, layout, owners, runtime),
            "param_groups": [
                {**group_settings, "params": _parameter_names(layout, group["params"])}
                for group_settings, group in zip(settings, optimizer.param_groups, strict=True)
            ],
        }
    optimizer = stateful_optimizer(optimizer)
    is_quantising = quantises(optimizer)
    state = {
        part.name: {
            key: _describe_value(part, p, describe_shard(part, p, value) if is_quantising else value)
            for key, value in values.items()
        }
        for p, values in optimizer.state.items()
        for part in _parts_of(layout, p)
        if not part.is_empty
    }
    if is_quantising:
        state = check_blocks(state, {part.name: part.shape for parts in layout.values() for part in parts}, runtime)
    all_parts = [part for parts in layout.values() for part in parts]
    if any(part.range is not None for part in all_parts):
        state = _complete_state(state, {part.name: part for part in all_parts}, runtime)
    return {
        "state": state,
        "param_groups": [
            {**{k: v for k, v in group.items() if k != "params"}, "params": _parameter_names(layout, group["params"])}
            for group in optimizer.param_groups
        ],
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    saved: Mapping[str, Any],
    *,
    check_only: bool = False,
    restore: RestoreValue | None = None,
) -> None:
    """Restore a state from :func:`optimizer_state`, whatever order or grouping the parameters have now.

    Everything is checked before anything is changed.

    Args:
        optimizer: The optimizer to restore.
        layout: How its parameters map to the user's.
        saved: As from :func:`optimizer_state`, its tensors plain or :class:`~fsdp_core.checkpoint.SavedTensor`; or a
            plain torch optimizer's ``state_dict()``, whose parameters are numbered.
        check_only: Whether to check only, and change nothing.
        restore: Converts a value to the optimizer's layout. By default, it becomes a DTensor, a flat shard or a full
            tensor.

    Raises:
        CheckpointMismatchError: A parameter is not in the saved groups, a shape differs, parameters of one group were
            saved in groups of different settings, or parameters of one saved group are in several groups now, each of
            which would lose its own settings.
    """
    if owners_of(optimizer) is None:
        optimizer = stateful_optimizer(optimizer)
    saved = state_by_name(optimizer, layout, saved)
    saved = {
        "state": {
            name: {k: describe_full_state(v) for k, v in values.items()} for name, values in saved["state"].items()
        },
        "param_groups": [_read_settings(group) for group in saved["param_groups"]],
    }
    settings_by_group = _find_saved_settings(optimizer, layout, saved["param_groups"])
    owners = owners_of(optimizer)
    _check_state(optimizer, layout, saved["state"], is_owned=owners is not None)
    if check_only:
        return
    for group, settings in zip(optimizer.param_groups, settings_by_group, strict=True):
        group.update(settings)
    optimizer.state.clear()
    if owners is not None:
        _restore_owned_state(optimizer, layout, owners, saved["state"])
    else:
        _restore_sharded_state(optimizer, layout, saved["state"], restore or _restore_value)


def _find_saved_settings(
    optimizer: torch.optim.Optimizer, layout: Layout, saved_groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the saved settings of each of the optimizer's param groups; refuse groups of other parameters."""
    parameter_names = {name for group in optimizer.param_groups for name in _parameter_names(layout, group["params"])}
    unknown_names = [name for group in saved_groups for name in group["params"] if name not in parameter_names]
    if unknown_names:
        raise CheckpointMismatchError(
            f"the checkpoint's optimizer also holds {_list_some(unknown_names)}, and this {type(optimizer).__name__} "
            "doesn't.\n"
            "Build the optimizer over the parameters that it was saved with, or load only the weights."
        )
    saved_group_by_name = {name: group for group in saved_groups for name in group["params"]}
    settings_by_group: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        names = _parameter_names(layout, group["params"])
        missing = [name for name in names if name not in saved_group_by_name]
        if missing:
            raise CheckpointMismatchError(
                f"the checkpoint's optimizer state lacks {_list_some(missing)}, which param group {index} holds.\n"
                "Load it into the model and the optimizer that it was saved from, or load only the weights."
            )
        saved_settings = [
            {key: value for key, value in saved_group_by_name[name].items() if key not in ("params", "param_names")}
            for name in names
        ]
        if any(settings != saved_settings[0] for settings in saved_settings[1:]):
            raise CheckpointMismatchError(
                f"the parameters of param group {index} were saved in groups of different settings.\n"
                "Build the optimizer with the param groups that it was saved with."
            )
        settings_by_group.append(saved_settings[0] if saved_settings else {})
    _refuse_split_groups(optimizer, layout, saved_groups)
    return settings_by_group


def _restore_owned_state(
    optimizer: torch.optim.Optimizer, layout: Layout, owners: Owners, saved_state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore the full state of the parameters that this rank owns."""
    for group in optimizer.param_groups:
        for parameter in filter(owners.is_own, group["params"]):
            (part,) = _parts_of(layout, parameter)
            values = saved_state.get(part.name)
            if values:
                # An owner keeps full state, so it is restored as that of an unsharded parameter.
                unsharded = nn.Parameter(local_tensor(parameter).detach(), requires_grad=False)
                full_part = Part(name=part.name, shape=part.shape)
                optimizer.state[parameter] = {
                    key: _restore_value(unsharded, (full_part,), group, key, [value]) for key, value in values.items()
                }


def _restore_sharded_state(
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    saved_state: Mapping[str, Mapping[str, Any]],
    restore: RestoreValue,
) -> None:
    """Restore the state of this rank's shards."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parts = [part for part in _parts_of(layout, parameter) if not part.is_empty]
            values = saved_state.get(parts[0].name) if parts else None
            if not values:
                continue
            state: dict[str, Any] = {}
            for key, value in values.items():
                if is_saved_quantised(value):
                    state[key] = restore_shard(optimizer, parts[0], parameter, value)
                else:
                    values_of_parts = [saved_state[part.name][key] for part in parts]
                    state[key] = restore(parameter, parts, group, key, values_of_parts)
            optimizer.state[parameter] = state


_USE_SAVED_GROUPS = (
    "Build the optimizer with the param groups that it was saved with. To continue with other groups, change them "
    "after the state is loaded, in a LightningModule's on_train_start or after fabric.load: remove parameters from a "
    "group's 'params', and pass them to optimizer.add_param_group({'params': [...], 'lr': ...}); or load only the "
    "weights."
)


def _refuse_split_groups(optimizer: torch.optim.Optimizer, layout: Layout, saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse to give several groups the settings of the one group that their parameters were saved in."""
    saved_index_of = {name: index for index, group in enumerate(saved) for name in group["params"]}
    names_by_saved_group: dict[int, dict[int, list[str]]] = {}  # by the saved group's index, then by that of the new
    for index, group in enumerate(optimizer.param_groups):
        for name in _parameter_names(layout, group["params"]):
            names_by_saved_group.setdefault(saved_index_of[name], {}).setdefault(index, []).append(name)
    for saved_index, names_by_group in names_by_saved_group.items():
        if len(names_by_group) > 1:
            lines = []
            for index, names in names_by_group.items():
                lost_settings = _list_lost_settings(optimizer.param_groups[index], saved[saved_index])
                lines.append(f"    param group {index}, of {_list_some(names)}{lost_settings}\n")
            raise CheckpointMismatchError(
                f"param groups {' and '.join(map(str, names_by_group))} of the optimizer were saved as one, param "
                f"group {saved_index} of {len(saved)}, so all of them would get its settings:\n"
                f"{''.join(lines)}{_USE_SAVED_GROUPS}"
            )


def _list_lost_settings(group: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """List the settings of a group that the saved ones would replace."""
    lost_keys = [key for key in group if key != "params" and key in saved and str(group[key]) != str(saved[key])]
    settings = ", ".join(f"{key} {saved[key]} instead of {group[key]}" for key in lost_keys)
    return f": {settings}" if settings else ""


def _describe_value(part: Part, parameter: Tensor, value: Any) -> Any:
    """Describe a value of the optimizer's state, which may be nested, as part of the user's parameter's state."""
    if part.range is None:
        return value
    if isinstance(value, dict | list | tuple) and not is_saved_quantised(value):
        return _map_members(value, lambda member: _describe_value(part, parameter, member))
    if not isinstance(value, Tensor) or is_quantised(value):
        return value
    value = plain(value)
    if value.shape == parameter.shape:
        return part.of(value)
    # One value per parameter, such as a step count: the rank with the first element saves it.
    chunk = Chunk(offsets=(0,) * value.ndim, data=value.detach())
    replica = 0 if part.holds_first_element else 1
    return ChunkedTensor(shape=tuple(value.shape), dtype=value.dtype, chunks=(chunk,), replica=replica)


def _map_members(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Convert the members of a dict, a list or a tuple."""
    if isinstance(value, dict):
        return {key: convert(member) for key, member in value.items()}
    members = [convert(member) for member in value]
    return tuple(members) if isinstance(value, tuple) else members


def _complete_state(state: NamedState, parts: Mapping[str, Part], runtime: Runtime) -> NamedState:
    """Add state that only other ranks hold, so that all ranks have the same names and keys. All ranks must call it."""
    own_specs = {name: {key: _ValueSpec.of(value) for key, value in values.items()} for name, values in state.items()}
    own_first_elements = {name for name in own_specs if parts[name].holds_first_element}
    specs: dict[str, dict[str, _ValueSpec]] = {}
    gathered = runtime.gather_objects_to((own_specs, own_first_elements)) or ()  # on rank 0 only
    # Plain values may differ between ranks: those of the rank with a parameter's first element are taken.
    for specs_of_rank, names_with_first_element in gathered:
        specs.update((name, specs_of_rank[name]) for name in names_with_first_element if name not in specs)
    for specs_of_rank, _ in gathered:
        for name, specs_by_key in specs_of_rank.items():
            specs.setdefault(name, specs_by_key)
    specs = runtime.broadcast_object(specs)
    order = {name: index for index, name in enumerate(parts)}
    return {
        name: {key: state.get(name, {}).get(key, spec.without_chunks()) for key, spec in specs[name].items()}
        for name in sorted(specs, key=order.__getitem__)
    }


@dataclass(frozen=True)
class _ValueSpec:
    """What a rank tells the others about a value of an optimizer's state, which they may not hold.

    Attributes:
        shape: The shape of a tensor; ``None`` for a plain value.
        dtype: The dtype of a tensor; ``None`` for a plain value.
        plain: A plain value; a dict, a list or a tuple with specs as members.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    plain: Any

    @classmethod
    def of(cls, value: Any) -> _ValueSpec:
        if isinstance(value, ChunkedTensor | Tensor):
            return _tensor_spec(tuple(value.shape), value.dtype)
        is_nest = type(value) in (dict, list, tuple)
        return cls(shape=None, dtype=None, plain=_map_members(value, cls.of) if is_nest else value)

    def without_chunks(self) -> Any:
        """Describe the value for a rank that lacks it: tensors as copy 1 without chunks, plain values as they are."""
        if self.shape is None or self.dtype is None:
            is_nest = type(self.plain) in (dict, list, tuple)
            return _map_members(self.plain, lambda member: member.without_chunks()) if is_nest else self.plain
        return ChunkedTensor(shape=self.shape, dtype=self.dtype, chunks=(), replica=1)


@lru_cache(maxsize=1024)  # pickle writes an object once, however often it occurs
def _tensor_spec(shape: tuple[int, ...], dtype: torch.dtype) -> _ValueSpec:
    return _ValueSpec(shape=shape, dtype=dtype, plain=None)


def _parts_of(layout: Layout, parameter: Tensor) -> tuple[Part, ...]:
    try:
        return layout[cast("nn.Parameter", parameter)]
    except KeyError:
        raise OptimizerMismatchError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's, "
            "so its state can't be saved or loaded by name.\n"
            "Pass the model that the optimizer trains together with it."
        ) from None


def _parameter_names(layout: Layout, parameters: Iterable[Tensor]) -> list[str]:
    return [part.name for p in parameters for part in _parts_of(layout, p)]


def state_by_name(optimizer: torch.optim.Optimizer, layout: Layout, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the parameter numbers of a plain torch ``state_dict()`` with names, by group order as torch itself does.

    Args:
        optimizer: The optimizer, whose group order is used if the saved groups hold no names.
        layout: How its parameters map to the user's.
        saved: As for :func:`load_optimizer_state`; returned unchanged if its parameters are named already.

    Raises:
        CheckpointMismatchError: The groups have other numbers of parameters.
    """
    is_numbered = any(isinstance(p, int) for group in saved["param_groups"] for p in group["params"])
    if not is_numbered:
        return saved
    numbers = [group["params"] for group in saved["param_groups"]]
    if all("param_names" in group for group in saved["param_groups"]):
        names_by_group = [group["param_names"] for group in saved["param_groups"]]
    else:
        names_by_group = [_parameter_names(layout, group["params"]) for group in optimizer.param_groups]
    if [len(g) for g in numbers] != [len(g) for g in names_by_group]:
        raise CheckpointMismatchError(
            f"the checkpoint's optimizer has param groups of {[len(g) for g in numbers]} parameters, this one has "
            f"groups of {[len(g) for g in names_by_group]}.\n{_USE_SAVED_GROUPS}"
        )
    name_of_number = dict(zip(chain.from_iterable(numbers), chain.from_iterable(names_by_group), strict=True))
    return {
        "state": {name_of_number[number]: values for number, values in saved["state"].items()},
        "param_groups": [
            {**group, "params": [name_of_number[n] for n in group["params"]]} for group in saved["param_groups"]
        ],
    }


def _check_state(
    optimizer: torch.optim.Optimizer, layout: Layout, state: Mapping[str, Mapping[str, Any]], *, is_owned: bool = False
) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parts = _parts_of(layout, parameter)
            for part in parts:
                for key, value in state.get(part.name, {}).items():
                    if is_saved_quantised(value):
                        check_fits_shard(optimizer, part, parameter, key, value)
                    if isinstance(value, ChunkedTensor | DTensor):
                        raise CheckpointMismatchError(
                            f"{key} of {part.name!r} is one rank's shard, not a full tensor.\n"
                            "Save a checkpoint and load that, or pass full tensors."
                        )
                    shape = tuple(getattr(value, "shape", ()))
                    is_full = is_owned or (part.range is None and not isinstance(parameter, DTensor))
                    if not _has_fitting_shape(shape, part.shape, is_full=is_full):
                        raise CheckpointMismatchError(
                            f"the checkpoint holds {key} of {part.name!r} at shape {shape}, but the parameter has "
                            f"{part.shape}.\nLoad the checkpoint into the model that it was saved from."
                        )
            _check_shared_state(parts, state)


def _has_fitting_shape(shape: tuple[int, ...], parameter_shape: tuple[int, ...], *, is_full: bool) -> bool:
    """Whether state of a parameter can have a shape, as far as that is known of all optimizers."""
    if len(shape) != len(parameter_shape):
        return True
    # For full parameters, Shampoo and others keep square matrices with the size of one dimension.
    if is_full and len(set(shape)) == 1 and shape[0] in parameter_shape:
        return True
    # Factored moments have size 1 in some dimensions.
    return all(size in (1, wanted) for size, wanted in zip(shape, parameter_shape, strict=True))


def _check_shared_state(parts: Sequence[Part], state: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse parts of one flat parameter with different values of state that is not sharded, such as step counts."""
    state_of_first = _describe_shared_state(parts[0], state.get(parts[0].name, {}))
    for part in parts[1:]:
        if _describe_shared_state(part, state.get(part.name, {})) != state_of_first:
            raise CheckpointMismatchError(
                f"{parts[0].name!r} and {part.name!r} are one flat parameter here, but were saved with different "
                f"optimizer state, such as step counts.\nTo load it, {separation_hint(part)}"
            )


def _describe_shared_state(part: Part, values: Mapping[str, Any]) -> dict[str, Any]:
    shared_state: dict[str, Any] = {}
    for key, value in values.items():
        has_parameter_shape = tuple(getattr(value, "shape", ())) == part.shape
        if has_parameter_shape:
            shared_state[key] = "shaped"
            continue
        if isinstance(value, SavedTensor):
            value = value.full()
        shared_state[key] = value.tolist() if isinstance(value, Tensor) else value
    return shared_state


def _restore_value(
    parameter: nn.Parameter, parts: Sequence[Part], group: Mapping[str, Any], key: str, values: Sequence[Any]
) -> Any:
    """Convert a state value to the optimizer's layout: sharded as its parameter if it has that shape, else full."""
    value = values[0]
    if type(value) in (list, tuple):  # LBFGS keeps lists of vectors
        members = [_restore_value(parameter, parts, group, key, members) for members in zip(*values, strict=True)]
        return tuple(members) if isinstance(value, tuple) else members
    if isinstance(value, dict):
        return {
            name: _restore_value(parameter, parts, group, str(name), [part_value[name] for part_value in values])
            for name in value
        }
    if not isinstance(value, SavedTensor | Tensor):
        return value
    shape = tuple(value.shape)
    # In a flat parameter, state of a 0-dim parameter is taken to be sharded with it, except for the step count.
    is_shaped = shape == parts[0].shape and (bool(shape) or (parts[0].range is not None and key != "step"))
    if is_shaped and parts[0].range is not None:
        flat = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
        for part, value_of_part in zip(parts, values, strict=True):
            fill(part.of(flat), value_of_part)
        return flat
    if is_shaped and isinstance(parameter, DTensor):
        sharded = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        fill(chunked(sharded), value)
        return sharded
    # torch keeps the step count on the CPU unless the optimizer is capturable or fused
    is_on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
    full = torch.empty(shape, dtype=value.dtype, device="cpu" if is_on_cpu else local_tensor(parameter).device)
    fill(chunked(full), value)
    if isinstance(parameter, DTensor) and shape:
        # State of another shape, such as factored moments, is replicated on the mesh, so that it mixes with the shards.
        return DTensor.from_local(
            full, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim, run_check=False
        )
    return full


def _read_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with their tensors read, such as a tensor learning rate."""
    return {key: _read_tensors(value) for key, value in group.items()}


def _read_tensors(value: Any) -> Any:
    if type(value) in (dict, list, tuple):
        return _map_members(value, _read_tensors)
    return value.full() if isinstance(value, SavedTensor) else value


def _list_some(names: list[str]) -> str:
    first_names = ", ".join(repr(n) for n in names[:5])
    return first_names if len(names) <= 5 else f"{first_names} and {len(names) - 5} more"
