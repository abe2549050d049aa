"""Hooks on the user's parameters, called with gradients that FSDP1 has reduced."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.hooks import RemovableHandle

from fsdp_core import UnsupportedCapabilityError
from fsdp_cuda_native.torch_private.flat_parameters.units import handle_of

__all__ = ["enable_gradient_hooks", "refuse_use_outside"]


def enable_gradient_hooks(unit: FSDP) -> None:
    """Let ``register_post_accumulate_grad_hook`` of a unit's parameters call hooks after each reduction.

    FSDP1 gives parameters their gradients itself, after the end of the backward pass, where autograd calls no hook. But
    it steps optimizers that are to step in the backward pass (``_in_backward_optimizers``): hooks are put among these.

    Args:
        unit: The unit, whose parameters keep their identity (``use_orig_params=True``).
    """
    handle = handle_of(unit)
    for parameter in handle.flat_param._params or ():
        parameter.register_post_accumulate_grad_hook = partial(_register, weakref.ref(handle), weakref.ref(parameter))


def refuse_use_outside(unit: FSDP, names: Mapping[nn.Module, str]) -> None:
    """Refuse gradients of a unit's parameters that come from computing with them outside of its forward pass.

    A unit that is not sharded computes with views of its flat parameter, and FSDP1 reduces the gradient of that.
    What autograd adds to a parameter itself would be overwritten by the reduced gradient, or stay unreduced.

    Args:
        unit: The unit, which is not sharded.
        names: The user's names of modules.
    """
    flat = handle_of(unit).flat_param
    if flat._params is None:  # the flat parameter is the user's
        return
    for parameter, info in zip(flat._params, flat._param_infos, strict=True):
        required = parameter.requires_grad
        parameter.requires_grad_(True)  # torch places no hook otherwise, and a frozen parameter may be unfrozen later
        refuse: Any = partial(_refuse, f"{names[info.module]}.{info.param_name}".removeprefix("."))
        Tensor.register_hook(parameter, refuse)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(required)


def _refuse(name: str, gradient: Tensor) -> NoReturn:
    raise UnsupportedCapabilityError(
        f"a loss was computed with {name!r} outside of the forward() of the unit that it belongs to: under NO_SHARD, "
        "FSDP1 reduces only what a unit computes with, and would drop or not reduce this gradient.\n"
        "A penalty over all parameters belongs into the optimizer (weight_decay), and one on the parameters of a unit "
        "into the unit's own forward(). Or use auto_wrap_policy=None, with which it is right in training_step(); or "
        "strategy='ddp'."
    )


class _Hooks:
    """A parameter's hooks, which FSDP1 takes for an optimizer that steps in the backward pass.

    Args:
        parameter: The parameter, held weakly.
    """

    def __init__(self, parameter: weakref.ref[nn.Parameter]) -> None:
        self._parameter = parameter
        self.hooks: OrderedDict[int, Callable[[nn.Parameter], None]] = OrderedDict()

    def step(self) -> None:
        """Call the hooks."""
        parameter = self._parameter()
        if parameter is not None:
            for hook in list(self.hooks.values()):  # a hook may remove itself
                hook(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Keep the gradient, although FSDP1 asks to drop it: the user's hook decides."""


def _register(
    handle_ref: weakref.ref[Any], parameter_ref: weakref.ref[Any], hook: Callable[[nn.Parameter], None]
) -> RemovableHandle:
    """Replaces ``parameter.register_post_accumulate_grad_hook``."""
    handle: Any = handle_ref()
    parameter: Any = parameter_ref()
    if not parameter.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")  # as torch does
    optimizers: list[Any] = parameter.__dict__.setdefault("_in_backward_optimizers", [])
    if not optimizers:
        optimizers.append(_Hooks(parameter_ref))
    handle._has_optim_in_backward = True
    registered = RemovableHandle(optimizers[0].hooks)
    optimizers[0].hooks[registered.id] = hook
    return registered
