"""Rebinds an optimizer that was built over unsharded parameters to the sharded ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.optimizers.copying import nested_values
from fsdp_core.sharding.optimizers.owner_compute import step_on_owners
from fsdp_core.sharding.optimizers.trial import check_steps
from fsdp_core.state.layout import Layout, Part, separation_hint
from fsdp_core.state.owned import owners_of

__all__ = ["rebind_optimizer"]


def rebind_optimizer(
    optimizer: torch.optim.Optimizer,
    find_sharded: Callable[[nn.Parameter], nn.Parameter | None],
    layout: Layout,
    owners: Runtime | None = None,
) -> torch.optim.Optimizer:
    """Replace an optimizer's unsharded parameters by the sharded ones, in place.

    This covers every reference: some optimizers keep lists of parameters besides their groups, or another optimizer.
    State created before the first step, with all elements equal, is recreated for the shards. All ranks must call it.

    Args:
        optimizer: The optimizer; it must not have stepped yet if it has to be changed.
        find_sharded: Returns the sharded parameter of a parameter, which may be itself; ``None`` for a foreign one.
        layout: The parts of the user's parameters that each sharded parameter holds.
        owners: The ranks that may each step over some of the parameters, whole; ``None`` if none may.

    Raises:
        OptimizerMismatchError: A parameter is foreign, or the optimizer has stepped over unsharded parameters, or
            parameters that share a flat one are not all in the same group, or the optimizer keeps other tensors that
            can't be sharded, or its steps over shards would differ from those over whole parameters.
    """
    _check_keys(optimizer)
    groups: list[list[nn.Parameter]] = []
    replacements: dict[Tensor, nn.Parameter] = {}
    counts: dict[nn.Parameter, int] = {}  # by sharded parameter, how many parameters it has replaced
    for index, group in enumerate(optimizer.param_groups):
        group_targets: dict[nn.Parameter, None] = {}  # in order, each once
        for parameter in group["params"]:
            target = find_sharded(parameter)
            if target is None:
                raise OptimizerMismatchError(
                    f"param group {index} of {type(optimizer).__name__} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is none of the sharded model's, so training would leave it stale."
                    "\nBuild the optimizer from the parameters of the model that is set up: in Fabric "
                    "`model, optimizer = fabric.setup(model, optimizer)` over `model.parameters()`, in a "
                    "LightningModule `configure_optimizers` over `self.parameters()`."
                )
            if target is not parameter:
                is_in_earlier_group = target in counts and target not in group_targets
                if is_in_earlier_group:  # the parameters of a flat one must all be in one group
                    raise _divided_group_error(optimizer, layout[target])
                counts[target] = counts.get(target, 0) + 1
            replacements[parameter] = target
            group_targets[target] = None
        groups.append(list(group_targets))
    for target, count in counts.items():
        if count < len(layout.get(target, ())):  # the optimizer lacks parameters of a flat one
            raise _divided_group_error(optimizer, layout[target])
    if counts:
        state = _recreate_state(optimizer, replacements)
        inner_optimizers = {
            id(value): value
            for value in nested_values(list(vars(optimizer).values()))
            if isinstance(value, torch.optim.Optimizer) and value is not optimizer
        }
        for inner in inner_optimizers.values():
            rebind_optimizer(inner, find_sharded, layout)
        for name, value in list(vars(optimizer).items()):
            if name != "state":
                vars(optimizer)[name] = _replace_params(value, replacements, optimizer)
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"][:] = params  # in place: LBFGS, for one, holds this very list
        optimizer.state.clear()
        optimizer.state.update(state)
    needs_owners = check_steps(optimizer, layout, owners=owners is not None, runtime=owners)
    has_owners = owners_of(optimizer) is not None
    if owners is not None and (needs_owners or has_owners):
        step_on_owners(optimizer, layout, owners)  # if it has owners already, added parameters get some
    return optimizer


def _check_keys(optimizer: torch.optim.Optimizer) -> None:
    """Refuse state that is not of a parameter, which no checkpoint by parameter name holds."""
    for key in optimizer.state:
        if not isinstance(key, Tensor):
            raise OptimizerMismatchError(
                f"{type(optimizer).__name__} keeps state of no parameter, under {key!r}, which a checkpoint could not "
                "hold.\nUse another optimizer, such as AdamW; or one that keeps it in its param groups."
            )


def _recreate_state(
    optimizer: torch.optim.Optimizer, replacements: Mapping[Tensor, nn.Parameter]
) -> dict[Any, dict[str, Any]]:
    """The state that an optimizer created before its first step, recreated for the shards."""
    params_with_device_step: set[nn.Parameter] = set()  # those whose count of steps is kept on their device
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("capturable"):
            params_with_device_step.update(group["params"])

    def is_on_param_device(key: str, parameter: Any) -> bool:
        """Whether a tensor of a parameter's state belongs on the parameter's device: a count of steps may not."""
        return key != "step" or parameter in params_with_device_step

    new_state: dict[Any, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        target = replacements.get(parameter, cast("nn.Parameter", parameter))
        if target is parameter:  # it is a shard already, or is not sharded: its state is kept
            device = local_tensor(target).device  # to which it may have been moved
            new_state[target] = {
                key: value.to(device) if isinstance(value, Tensor) and is_on_param_device(key, parameter) else value
                for key, value in values.items()
            }
            continue
        new_values = {}
        for key, value in values.items():
            if not _is_initial(key, value):
                raise OptimizerMismatchError(
                    f"{type(optimizer).__name__} has stepped over the unsharded parameters already, or has copied "
                    f"them, and its state ({key!r}) can't follow them into shards.\n"
                    "Set the model and the optimizer up before the first step."
                )
            if not isinstance(value, Tensor) or not is_on_param_device(key, parameter):
                new_values[key] = copy.deepcopy(value)
            elif key == "step" or value.shape != parameter.shape:
                new_values[key] = value.to(local_tensor(target).device)
            else:  # as large as the shard, filled with the value that all elements have
                fill = value.reshape(-1)[0].item() if value.numel() else 0.0
                new_values[key] = torch.full_like(target.detach(), fill, dtype=value.dtype)
        new_state[target] = new_values
    return new_state


def _is_initial(key: str, value: Any) -> bool:
    """Whether a state value may be from before the first step, and does not depend on a parameter's values."""
    if isinstance(value, Tensor):
        if key == "step" and value.any():
            return False
        has_equal_elements = not value.numel() or bool((value == value.reshape(-1)[0]).all())
        return has_equal_elements
    if value is None:
        return True
    has_stepped = key == "step" and bool(value)
    return isinstance(value, bool | int | float | str) and not has_stepped


def _replace_params(value: Any, replacements: Mapping[Tensor, nn.Parameter], optimizer: torch.optim.Optimizer) -> Any:
    """A value that an optimizer keeps, with parameters replaced; containers are changed in place."""
    if isinstance(value, Tensor):
        is_param = value in replacements or any(value is target for target in replacements.values())
        replaced_shapes = [parameter.shape for parameter, target in replacements.items() if target is not parameter]
        if not is_param and value.numel() > 1 and value.shape in replaced_shapes:
            raise OptimizerMismatchError(
                f"{type(optimizer).__name__} keeps tensors of its parameters' shapes outside of its state, which can't "
                "follow them into shards.\nUse another optimizer; or one that makes them at its first step, in "
                "self.state[parameter]."
            )
        return replacements.get(value, value)
    if isinstance(value, dict):
        items = [
            (_replace_params(key, replacements, optimizer), _replace_params(item, replacements, optimizer))
            for key, item in value.items()
        ]
        value.clear()
        value.update(items)
    elif isinstance(value, list):
        value[:] = _replace_members(value, replacements, optimizer)
    elif isinstance(value, set):
        members = _replace_members(value, replacements, optimizer)
        value.clear()
        value.update(members)
    elif type(value) is tuple:
        return tuple(_replace_members(value, replacements, optimizer))
    return value


def _replace_members(
    values: Iterable[Any], replacements: Mapping[Tensor, nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[Any]:
    """The replaced members of a container; a flat parameter replaces all its parts once."""
    members: list[Any] = []
    for value in values:
        member = _replace_params(value, replacements, optimizer)
        was_replaced = isinstance(value, Tensor) and member is not value
        if was_replaced and any(member is other for other in members):
            continue
        members.append(member)
    return members


def _divided_group_error(optimizer: torch.optim.Optimizer, parts: Sequence[Part]) -> OptimizerMismatchError:
    names = ", ".join(repr(part.name) for part in parts[:5])
    if len(parts) > 5:
        names += f" and {len(parts) - 5} more"
    return OptimizerMismatchError(
        f"{names} are one flat parameter here, and {type(optimizer).__name__} has them in "
        "different param groups, or has not all of them.\n"
        f"Give the optimizer all of them, in one group; or {separation_hint(parts[0])}"
    )
