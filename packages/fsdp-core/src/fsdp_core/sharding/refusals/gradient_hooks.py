"""Refuses gradients of shards where autograd could not compute them, and hooks that it would not call.

A hook is called with the reduced gradient, or refused when it is registered. ``torch.autograd.grad`` with respect to a
shard, and ``backward(inputs=...)``, are refused where the graph does not contain the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.torch_private.autograd import (
    check_inputs_of_backward,
    check_missing_gradients,
    depends_on_other,
    reaches,
)
from fsdp_core.torch_private.modules import is_flattened

__all__ = ["refuse_gradient_hooks"]

_NAME = "_fsdp_core_shard_of"

_METHODS = ("register_hook", "register_post_accumulate_grad_hook")


def refuse_gradient_hooks(parameters: Iterable[tuple[str, nn.Parameter]], called: Collection[str]) -> None:
    """Refuse hooks on shards that the sharding library never calls, when they are registered.

    Args:
        parameters: The shards, with the user's names.
        called: The names of the methods whose hooks the library calls with reduced gradients.

    Example:
        >>> import torch
        >>> shard = nn.Parameter(torch.ones(2))
        >>> refuse_gradient_hooks([("weight", shard)], ["register_post_accumulate_grad_hook"])
        >>> shard.register_hook(print)
        Traceback (most recent call last):
            ...
        fsdp_core.errors.UnsupportedCapabilityError: register_hook() of 'weight', which is sharded: ...
    """
    for name, parameter in parameters:
        instance: Any = parameter
        if isinstance(parameter, DTensor) or is_flattened(parameter):
            setattr(instance, _NAME, name)
        for method in _METHODS:
            if method not in called:
                setattr(instance, method, partial(_refuse_hook, method, name, tuple(called)))
    check_missing_gradients(_check_reached)
    check_inputs_of_backward(_check_inputs)


def _check_reached(parameter: Tensor, outputs: Any) -> None:
    """Refuse to differentiate with respect to a parameter to which the graph of the outputs does not lead.

    Args:
        parameter: What ``torch.autograd.grad`` has no gradient of.
        outputs: What it differentiates.

    Raises:
        UnsupportedCapabilityError: The parameter is a shard; or it is a gathered parameter, and the outputs depend on
            its value that was gathered for another call. (A gathered parameter on which the outputs don't depend at
            all has no gradient, as in plain torch.)
    """
    name = _name_of(parameter)
    gathered = getattr(parameter, "_fsdp_value", None)
    if name is not None and (gathered is None or depends_on_other(outputs, parameter, _is_value_of(gathered))):
        raise _unreached_refusal(
            "torch.autograd.grad() with respect to",
            name,
            "Run backward(), under Fabric fabric.backward(loss), and read the reduced gradient in parameter.grad; or "
            "differentiate with respect to inputs and activations. Inside training_step(), under Fabric inside a "
            "method that model.mark_forward_method() names, parameters that belong to no unit (all of them with "
            "auto_wrap_policy=None) can be differentiated until the next backward() in the step.",
        )


def _check_inputs(outputs: Sequence[Tensor | GradientEdge], inputs: Sequence[Tensor]) -> None:
    """Refuse ``backward(inputs=...)`` where the graph of the outputs does not lead to one of the inputs.

    Raises:
        UnsupportedCapabilityError: That input is a shard, or a gathered parameter.
    """
    names: dict[int, str] = {}
    leaves: list[Tensor] = []
    for tensor in inputs:
        name = _name_of(tensor)
        if name is not None and id(tensor) not in names:
            names[id(tensor)] = name
            if tensor.is_leaf and tensor.requires_grad:
                leaves.append(tensor)
    if not names:
        return
    reached = reaches(outputs, leaves)
    for key, name in names.items():
        if key not in reached:
            raise _unreached_refusal(
                "backward(inputs=...) with respect to",
                name,
                "Leave inputs out, and freeze before the backward pass what is to get no gradient: "
                "parameter.requires_grad_(False).",
            )


def _name_of(parameter: Tensor) -> str | None:
    """The name of a parameter that is a shard, or was gathered; ``None`` for other tensors."""
    gathered: Any = getattr(parameter, "_fsdp_value", None)
    name: str | None = getattr(parameter, _NAME, None) if gathered is None else gathered.name
    return name


def _unreached_refusal(function: str, name: str, instead: str) -> UnsupportedCapabilityError:
    return UnsupportedCapabilityError(
        f"{function} {name!r}, which is sharded: outputs depend on what was gathered for the call that "
        f"has computed them, and autograd knows no way to what the module holds now.\n{instead}"
    )


def _is_value_of(gathered: Any) -> Callable[[Tensor], bool]:
    """Return a function that tells whether a leaf is a value of a gathered parameter."""
    return lambda leaf: getattr(leaf, "_fsdp_value", None) is gathered


def _refuse_hook(method: str, name: str, called: tuple[str, ...], hook: Callable[..., Any]) -> NoReturn:
    """Replaces a shard's method that registers hooks which its library does not call.

    Args:
        method: The method's name.
        name: The user's name of the parameter.
        called: The names of the methods whose hooks the library calls.
        hook: The argument of the user's call.
    """
    instead = "Read gradients in on_before_optimizer_step(), or under Fabric after fabric.backward()."
    if called:
        instead = (
            f"Write parameter.{called[0]}(hook), whose hook gets the parameter with its reduced gradient in "
            "parameter.grad."
        )
    raise UnsupportedCapabilityError(
        f"{method}() of {name!r}, which is sharded: its gradient is reduced to the shard without a call of the hook.\n"
        f"{instead}"
    )
