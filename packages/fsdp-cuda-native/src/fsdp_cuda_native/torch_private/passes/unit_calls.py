"""The calls of a unit: where FSDP1 looks for the tensors that leave them, and calls that end by an exception.

FSDP1 registers the hooks that begin a unit's backward pass (``_register_pre_backward_hooks``) on the tensors in what
the unit returns; it looks into lists, dictionaries, dataclasses and sets, and not into objects or what a unit leaves in
an attribute. Through such a tensor a backward pass would reach a unit whose parameters are freed. Core's
:class:`~fsdp_core.sharding.UnitCalls` finds all tensors that leave a call, and they get the same hooks here. A call
that ends by an exception leaves FSDP1's states in the middle of a forward pass, in which it does not expect a backward
pass: they are reset.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import _post_forward_reshard, _register_pre_backward_hooks
from torch.utils._pytree import tree_leaves

from fsdp_core.sharding import RefusedTransforms, UnitCalls
from fsdp_cuda_native.torch_private.flat_parameters.units import handle_of

__all__ = ["tensors_in", "watch_calls"]

#: These transforms wrap the flat parameter. FSDP1 then resizes the memory of a wrapper, on which torch crashes.
_REFUSED = RefusedTransforms(
    transforms=frozenset({"grad", "jvp", "vmap"}),
    instead=(
        "Write torch.autograd.grad(), or torch.autograd.functional.vjp(), jvp(), jacobian() or hessian(), with "
        "create_graph=True if a loss is computed with it; and instead of vmap(), call it with the batch. "
        "strategy='fsdp2' gathers in torch.func.jvp(), jacfwd() and vmap()."
    ),
)


def watch_calls(unit: FSDP, before_hooks: Callable[[FSDP, list[Tensor]], None]) -> None:
    """Register the hooks of a unit's calls, around what FSDP1 does in its forward pass.

    Args:
        unit: The unit.
        before_hooks: Called with the unit and tensors that leave its call where FSDP1 does not look, such as in
            objects, before FSDP1's hooks are registered with these.
    """
    unit_ref = weakref.ref(unit)
    register_hooks = partial(_register_hooks, unit_ref, before_hooks)
    calls = UnitCalls(register_hooks, unit.module.modules(), _REFUSED, partial(_abandon_call, unit_ref))
    unit.register_forward_pre_hook(calls.enter, with_kwargs=True, prepend=True)
    unit.module.register_forward_pre_hook(calls.begin, with_kwargs=True, prepend=True)
    unit.register_forward_hook(calls.leave, always_call=True)


def _register_hooks(
    unit_ref: weakref.ref[FSDP], before_hooks: Callable[[FSDP, list[Tensor]], None], tensors: list[Tensor]
) -> None:
    unit = unit_ref()
    if unit is not None:
        before_hooks(unit, tensors)
        _register_pre_backward_hooks(unit, unit.module, tensors, handle_of(unit))


def _abandon_call(unit_ref: weakref.ref[FSDP]) -> None:
    """Make a unit idle that an exception has left in the middle of a call: a backward pass may reach an earlier call.

    A call of the root that ends by an exception makes all units idle elsewhere.
    """
    unit = unit_ref()
    handle = None if unit is None else handle_of(unit)
    if unit is None or handle is None or unit._is_root:
        return
    if (handle._training_state, unit.training_state) == (HandleTrainingState.FORWARD, TrainingState.FORWARD_BACKWARD):
        _post_forward_reshard(unit, handle)
        unit.training_state = TrainingState.IDLE
        handle._training_state = HandleTrainingState.IDLE


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors in what a module returns, also those in dataclasses and sets, where FSDP1 finds them too."""
    if isinstance(output, Tensor):
        return [output]
    tensors: list[Tensor] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif isinstance(leaf, set):
            tensors += tensors_in(list(leaf))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            tensors += tensors_in([getattr(leaf, field.name) for field in fields(leaf)])
    return tensors
