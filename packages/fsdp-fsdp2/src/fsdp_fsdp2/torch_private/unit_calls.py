"""The hooks that run right before and after those of ``fully_shard`` when a unit is called."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch.utils
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction

from fsdp_core.sharding import RefusedTransforms, UnitCalls, outside_of_compilation, sharded_of
from fsdp_core.state import gathered_modules, running_forwards
from fsdp_fsdp2.torch_private.forward_passes import recomputes
from fsdp_fsdp2.torch_private.frozen_shards import follow_shards
from fsdp_fsdp2.torch_private.gathered_writes import GatheredWrites
from fsdp_fsdp2.torch_private.hooks import OF_FSDP, is_of_torch
from fsdp_fsdp2.torch_private.parameter_groups import has_run, param_groups_in, param_groups_of
from fsdp_fsdp2.torch_private.recorded_graphs import free_written
from fsdp_fsdp2.torch_private.unused_parameters import UnusedParameters

__all__ = ["needs_argument", "watch_calls"]


#: Whether torch.func accepts the autograd function that ends a unit's backward pass, as from torch 2.12 or so on.
_CAN_TRANSFORM = "setup_context" in vars(RegisterPostBackwardFunction)

#: ``"grad"`` is refused in any version: it runs hooks that reduce gradients with tensors that it has wrapped.
_REFUSED = RefusedTransforms(
    transforms=frozenset({"grad"} if _CAN_TRANSFORM else {"grad", "jvp", "vmap"}),
    duals=True,
    instead=(
        "Write torch.autograd.grad(), or torch.autograd.functional.vjp(), jvp(), jacobian() or hessian(), with "
        "create_graph=True if a loss is computed with it"
        + ("; torch.func.jvp(), jacfwd() and vmap() are right too." if _CAN_TRANSFORM else "; and for vmap(), a batch.")
    ),
)


def watch_calls(unit: FSDPModule, root: FSDPModule, writes: GatheredWrites, unused: UnusedParameters) -> None:
    """Register hooks of a unit's calls right around those of ``fully_shard``: the user's hooks notice none of them.

    Args:
        unit: The unit, which may be called before the root ever is.
        root: The root.
        writes: What keeps writes to the unit's parameters.
        unused: What reduces its gradients.
    """
    module = cast("nn.Module", unit)
    state: Any = unit._get_fsdp_state()
    state_ref = weakref.ref(state)

    def register_with_outputs(tensors: list[Tensor]) -> None:
        live_state = state_ref()
        # in PRE_BACKWARD, activations are recomputed
        if live_state is not None and live_state._training_state.name != "PRE_BACKWARD":
            live_state._register_pre_backward_hook(tensors)

    calls = UnitCalls(register_with_outputs, module.modules(), _REFUSED)
    root_ref, writes_ref, unused_ref = weakref.ref(cast("Any", root)), weakref.ref(writes), weakref.ref(unused)
    run_before = partial(_run_before_fully_shard, root_ref, writes_ref, unused_ref, state_ref, calls)
    run_after = partial(_run_after_fully_shard, calls)
    before = module.register_forward_pre_hook(run_before, with_kwargs=True)
    after = module.register_forward_pre_hook(run_after, with_kwargs=True)
    go_on = module.register_forward_hook(partial(_go_on_after_call_inside, state_ref))
    leave = module.register_forward_hook(calls.leave, always_call=True)
    _put_around_torchs(module._forward_pre_hooks, [before.id], [after.id])
    _put_around_torchs(module._forward_hooks, [go_on.id], [leave.id])


@outside_of_compilation
def _run_before_fully_shard(
    root_ref: weakref.ref[Any],
    writes_ref: weakref.ref[GatheredWrites],
    unused_ref: weakref.ref[UnusedParameters],
    state_ref: weakref.ref[Any],
    calls: UnitCalls,
    unit: nn.Module,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any] | None:
    """Runs before the forward-pre-hook of ``fully_shard``."""
    _prepare_parameters(root_ref, writes_ref, unused_ref, unit)
    calls.enter(unit, args, kwargs)
    unused, state = unused_ref(), state_ref()
    if unused is not None and state is not None:
        if recomputes():
            unused.call_in_backward(state)
        elif unused.is_interrupted() and (root := root_ref()) is not None and unit is not root:
            _mend_before_call(root)
        if state._state_ctx.iter_forward_root is None:  # no unit's call is running
            unused.begin_step()
    if not needs_argument:
        return None
    _gather_in_backward(state_ref)
    return _add_argument(args, kwargs)


@outside_of_compilation
def _go_on_after_call_inside(state_ref: weakref.ref[Any], unit: nn.Module, args: Any, output: Any) -> None:
    """Runs before the forward hook of ``fully_shard``, which frees parameters in a unit that is idle.

    A call of the unit inside its own has made it idle, as ``self(batch)`` in ``training_step`` does, which runs inside
    one of the module. Parameters that stay gathered until the backward pass would be freed, and gathered once more.
    """
    state = state_ref()
    if state is not None and state._training_state.name == "IDLE" and not recomputes():
        for group in param_groups_in(state):
            if group.is_unsharded:
                group._training_state = type(group._training_state).FORWARD


def _mend_before_call(root: Any) -> None:
    """Recover from an exception in a backward pass that the user's step has caught, before it calls a unit."""
    sharded = sharded_of(root)
    if sharded is None or root in gathered_modules:
        return
    if root in running_forwards:
        sharded.mend_inside()
    else:
        sharded.mend_interrupted()


@outside_of_compilation
def _run_after_fully_shard(calls: UnitCalls, unit: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Runs after the forward-pre-hook of ``fully_shard``."""
    replaced = _remove_argument(args, kwargs) if needs_argument else None
    calls.begin(unit, *(replaced or (args, kwargs)))
    return replaced


def _prepare_parameters(
    root_ref: weakref.ref[Any],
    writes_ref: weakref.ref[GatheredWrites],
    unused_ref: weakref.ref[UnusedParameters],
    unit: Any,
) -> None:
    """Let a unit compute with the current values of its own parameters, and let torch know its root."""
    root, writes = root_ref(), writes_ref()
    if writes is not None and unit not in gathered_modules:
        writes.check_own()
        writes.enter()
        unused = unused_ref()
        stays_gathered = writes.stays_gathered or (unused is not None and bool(unused.recorded_graphs))
        if (stays_gathered or writes.is_of_root) and unused is not None and not recomputes():
            if stays_gathered and not writes.is_of_root:
                free_written(param_groups_of(unit), unused.recorded_graphs)
            follow_shards(unit)
    if root is not None and isinstance(unit, FSDPModule) and not has_run(unit):  # within gathered() it is no FSDPModule
        with torch.inference_mode(False):
            root._get_fsdp_state()._lazy_init()  # or torch would make the first unit that is called a root


#: Whether ``fully_shard`` fails on a GPU in a call without arguments, as before torch 2.13.
needs_argument = torch.__version__ < "2.13"

#: The argument that torch gets in such a call.
_ARGUMENT = object()


def _gather_in_backward(state_ref: weakref.ref[Any]) -> None:
    """Gather a unit that a backward pass calls after it has freed it, as torch does from 2.13 on."""
    state = state_ref()
    if state is not None and state._training_state.name == "PRE_BACKWARD":
        for group in param_groups_in(state):
            if not group.is_unsharded:
                group.unshard()
                group.wait_for_unshard()


def _add_argument(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Add an argument to a call without any, such as that of the root in which a step runs.

    On a GPU, torch's hook moves arguments to the device, and before torch 2.13 raises IndexError if there are none.
    """
    return None if args or kwargs else ((_ARGUMENT,), {})


def _remove_argument(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Take back what :func:`_add_argument` has added."""
    return ((), {}) if len(args) == 1 and args[0] is _ARGUMENT and not kwargs else None


def _put_around_torchs(hooks: dict[int, Any], before: Sequence[int], after: Sequence[int]) -> None:
    """Put hooks right before and after those of ``fully_shard``, and leave the others in their order.

    Args:
        hooks: The hooks of a module, by their id.
        before: The ids of those to put before.
        after: The ids of those to put after.
    """
    order = [key for key in hooks if key not in (*before, *after)]
    torchs_indices = [index for index, key in enumerate(order) if is_of_torch(hooks[key], OF_FSDP)]
    first, end = torchs_indices[0], torchs_indices[-1] + 1
    order = [*order[:first], *before, *order[first:end], *after, *order[end:]]
    ordered_hooks = {key: hooks[key] for key in order}
    hooks.clear()
    hooks.update(ordered_hooks)
