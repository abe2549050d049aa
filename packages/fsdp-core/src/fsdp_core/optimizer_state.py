"""Optimizer state by parameter name: out of an optimizer, into one, and in the index form of a plain torch file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_core.checkpoint import SavedTensor, chunked, fill
from fsdp_core.clipping import local_tensor
from fsdp_core.errors import CheckpointMismatchError, OptimizerMismatchError

__all__ = ["load_optimizer_state", "optimizer_state", "repoint"]

NamedState = dict[str, Any]


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> NamedState:
    """Describe an optimizer's state by parameter name.

    Args:
        optimizer: The optimizer; a step may not have been taken yet.
        names: The name of each of its parameters.

    Returns:
        ``{"state": {name: {key: tensor or plain}}, "param_groups": [{..., "params": [name, ...]}]}``, sharing memory
        with the optimizer.

    Raises:
        OptimizerMismatchError: The optimizer holds a parameter without a name.
    """
    return {
        "state": {_name(names, p): dict(values) for p, values in optimizer.state.items()},
        "param_groups": [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [_name(names, p) for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    saved: Mapping[str, Any],
    *,
    check_only: bool = False,
) -> None:
    """Restore what :func:`optimizer_state` described, whatever order or grouping the parameters have now.

    Everything is checked before anything is changed.

    Args:
        optimizer: The optimizer to restore.
        names: The name of each of its parameters.
        saved: As from :func:`optimizer_state`, its tensors plain or :class:`~fsdp_core.checkpoint.SavedTensor`; or a
            plain torch optimizer's ``state_dict()``, whose parameters are numbered.
        check_only: Whether to change nothing even if all fits.

    Raises:
        CheckpointMismatchError: A parameter is not in the saved groups, a shape differs, or parameters of one group
            were saved in groups of different settings.
    """
    saved = _by_name(optimizer, names, saved)
    saved = {**saved, "param_groups": [_plain(group) for group in saved["param_groups"]]}
    held = {_name(names, p) for group in optimizer.param_groups for p in group["params"]}
    dropped = [name for group in saved["param_groups"] for name in group["params"] if name not in held]
    if dropped:
        raise CheckpointMismatchError(
            f"the checkpoint's optimizer holds {_some(dropped)} too, and this {type(optimizer).__name__} doesn't.\n"
            "Build the optimizer over the parameters that it was saved with, or load the weights alone."
        )
    group_of = {name: group for group in saved["param_groups"] for name in group["params"]}
    settings: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        of_group = [_name(names, p) for p in group["params"]]
        missing = [name for name in of_group if name not in group_of]
        if missing:
            raise CheckpointMismatchError(
                f"the checkpoint's optimizer state lacks {_some(missing)}, which param group {index} holds.\n"
                "Load it into the model and the optimizer that it was saved from, or load the weights alone."
            )
        found = [{k: v for k, v in group_of[name].items() if k not in ("params", "param_names")} for name in of_group]
        if any(f != found[0] for f in found[1:]):
            raise CheckpointMismatchError(
                f"the parameters of param group {index} were saved in groups of different settings.\n"
                "Build the optimizer with the param groups that it was saved with."
            )
        settings.append(found[0] if found else {})
    _check_shapes(optimizer, names, saved["state"])
    if check_only:
        return
    for group, restored in zip(optimizer.param_groups, settings, strict=True):
        group.update(restored)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = saved["state"].get(_name(names, parameter))
            if values:
                optimizer.state[parameter] = {
                    key: _restored(parameter, group, key, value) for key, value in values.items()
                }


def repoint(
    optimizer: torch.optim.Optimizer, sharded: Callable[[nn.Parameter], nn.Parameter | None]
) -> torch.optim.Optimizer:
    """Let an optimizer that was built over the unsharded parameters hold the sharded ones, in place.

    Args:
        optimizer: The optimizer; it must not have stepped yet if it has to be changed.
        sharded: The sharded parameter for a parameter, which may be that itself; ``None`` for a foreign one.

    Raises:
        OptimizerMismatchError: A parameter is foreign, or the optimizer has stepped over unsharded parameters.
    """
    groups: list[list[nn.Parameter]] = []
    changed = False
    for index, group in enumerate(optimizer.param_groups):
        now: list[nn.Parameter] = []
        for parameter in group["params"]:
            target = sharded(parameter)
            if target is None:
                raise OptimizerMismatchError(
                    f"param group {index} of {type(optimizer).__name__} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is none of the sharded model's, so training would leave it stale."
                    "\nBuild the optimizer from the parameters of the model that is set up: in Fabric "
                    "`model, optimizer = fabric.setup(model, optimizer)` over `model.parameters()`, in a "
                    "LightningModule `configure_optimizers` over `self.parameters()`."
                )
            changed = changed or target is not parameter
            now.append(target)
        groups.append(now)
    if not changed:
        return optimizer
    if any(optimizer.state.values()):
        raise OptimizerMismatchError(
            f"{type(optimizer).__name__} has stepped over the unsharded parameters already, and its state can't follow "
            "them into shards.\nSet the model and the optimizer up before the first step."
        )
    for group, now in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = now
    optimizer.state.clear()
    return optimizer


def _name(names: Mapping[nn.Parameter, str], parameter: Tensor) -> str:
    try:
        return names[cast("nn.Parameter", parameter)]
    except KeyError:
        raise OptimizerMismatchError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's, "
            "so its state has no name to be saved or loaded under.\n"
            "Pass the model that the optimizer trains along with it."
        ) from None


def _by_name(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], saved: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Turn the numbers of a plain torch ``state_dict()`` into names, by the groups' order as torch itself does."""
    numbered = any(isinstance(p, int) for group in saved["param_groups"] for p in group["params"])
    if not numbered:
        return saved
    numbers = [group["params"] for group in saved["param_groups"]]
    if all("param_names" in group for group in saved["param_groups"]):
        in_order = [group["param_names"] for group in saved["param_groups"]]
    else:
        in_order = [[_name(names, p) for p in group["params"]] for group in optimizer.param_groups]
    if [len(g) for g in numbers] != [len(g) for g in in_order]:
        raise CheckpointMismatchError(
            f"the checkpoint's optimizer has param groups of {[len(g) for g in numbers]} parameters, this one of "
            f"{[len(g) for g in in_order]}.\nBuild the optimizer with the param groups that it was saved with."
        )
    name_of = dict(zip(chain.from_iterable(numbers), chain.from_iterable(in_order), strict=True))
    return {
        "state": {name_of[number]: values for number, values in saved["state"].items()},
        "param_groups": [{**group, "params": [name_of[n] for n in group["params"]]} for group in saved["param_groups"]],
    }


def _check_shapes(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], state: Mapping[str, Mapping[str, Any]]
) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = _name(names, parameter)
            for key, value in state.get(name, {}).items():
                shape = tuple(getattr(value, "shape", ()))
                # factored moments have a 1 where the parameter has more
                fits = len(shape) != parameter.ndim or all(
                    s in (1, p) for s, p in zip(shape, parameter.shape, strict=True)
                )
                if not fits:
                    raise CheckpointMismatchError(
                        f"the checkpoint holds {key} of {name!r} at shape {shape}, but the parameter has "
                        f"{tuple(parameter.shape)}.\nLoad the checkpoint into the model that it was saved from."
                    )


def _restored(parameter: nn.Parameter, group: Mapping[str, Any], key: str, value: Any) -> Any:
    """A state value as the optimizer keeps it: sharded as its parameter if it has that shape, else whole."""
    if not isinstance(value, SavedTensor | Tensor):
        return value
    shape = tuple(value.shape)
    if isinstance(parameter, DTensor) and shape and shape == tuple(parameter.shape):
        made = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        fill(chunked(made), value)
        return made
    # torch keeps the step count on the CPU unless the optimizer is told to run without one
    on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
    whole = torch.empty(shape, dtype=value.dtype, device="cpu" if on_cpu else local_tensor(parameter).device)
    fill(chunked(whole), value)
    if isinstance(parameter, DTensor) and shape:
        # factored moments and the like: kept whole, on the parameter's mesh, so that they mix with its shards
        return DTensor.from_local(
            whole, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim, run_check=False
        )
    return whole


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with their tensors read, such as a learning rate that is one."""
    return {key: value.full() if isinstance(value, SavedTensor) else value for key, value in group.items()}


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
