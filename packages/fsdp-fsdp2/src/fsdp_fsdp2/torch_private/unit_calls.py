"""What happens when a unit is called."""

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
from fsdp_fsdp2.torch_private.frozen_shards import take_requires_grad
from fsdp_fsdp2.torch_private.gathered_writes import GatheredWrites
from fsdp_fsdp2.torch_private.hooks import OF_FSDP, is_of_torch
from fsdp_fsdp2.torch_private.parameter_groups import has_run, param_groups_in
from fsdp_fsdp2.torch_private.recorded_graphs import free_written
from fsdp_fsdp2.torch_private.unused_parameters import UnusedParameters

__all__ = ["needs_argument", "watch_calls"]


#: Before torch 2.12 or so, what ends a unit's backward pass is a function that torch.func refuses altogether.
_IN_FUNCTIONS = "setup_context" in vars(RegisterPostBackwardFunction)

#: A transform in reverse runs hooks of the backward pass, which reduce gradients, with tensors of its own.
_REFUSED = RefusedTransforms(
    transforms=frozenset({"grad"} if _IN_FUNCTIONS else {"grad", "jvp", "vmap"}),
    duals=True,
    instead=(
        "Write torch.autograd.grad(), or torch.autograd.functional.vjp(), jvp(), jacobian() or hessian(), with "
        "create_graph=True if a loss is computed with it"
        + ("; torch.func.jvp(), jacfwd() and vmap() are right too." if _IN_FUNCTIONS else "; and for vmap(), a batch.")
    ),
)


def watch_calls(unit: FSDPModule, root: FSDPModule, writes: GatheredWrites, unused: UnusedParameters) -> None:
    """Register the hooks of a unit's calls right around those of ``fully_shard``.

    The user's hooks see what they would see without them.

    Args:
        unit: The unit, which may be called before the root ever is.
        root: The root.
        writes: What keeps writes to the unit's parameters.
        unused: What reduces its gradients.
    """
    module = cast("nn.Module", unit)
    state: Any = unit._get_fsdp_state()
    of_state = weakref.ref(state)

    def show(tensors: list[Tensor]) -> None:
        live_state = of_state()
        # in PRE_BACKWARD, its activations are recomputed
        if live_state is not None and live_state._training_state.name != "PRE_BACKWARD":
            live_state._register_pre_backward_hook(tensors)

    calls = UnitCalls(show, module.modules(), _REFUSED)
    of_root, of_writes, of_unused = weakref.ref(cast("Any", root)), weakref.ref(writes), weakref.ref(unused)
    ahead = partial(_before_unit, of_root, of_writes, of_unused, of_state, calls)
    before, after = module._forward_pre_hooks, module._forward_hooks
    enter = module.register_forward_pre_hook(ahead, with_kwargs=True).id
    begin = module.register_forward_pre_hook(partial(_begin_unit, calls), with_kwargs=True).id
    leave = module.register_forward_hook(calls.leave, always_call=True)
    _put_around(before, [enter], [begin])
    _put_around(after, [], [leave.id])


@outside_of_compilation
def _before_unit(
    of_root: weakref.ref[Any],
    of_writes: weakref.ref[GatheredWrites],
    of_unused: weakref.ref[UnusedParameters],
    of_state: weakref.ref[Any],
    calls: UnitCalls,
    unit: nn.Module,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any] | None:
    """What runs before the hook of ``fully_shard``."""
    _before_call(of_root, of_writes, of_unused, unit)
    calls.enter(unit, args, kwargs)
    unused, state = of_unused(), of_state()
    if unused is not None and state is not None:
        if recomputes():
            unused.call_in_backward(state)
        elif unused.is_interrupted() and (root := of_root()) is not None and unit is not root:
            _mend_before_call(root)
        if state._state_ctx.iter_forward_root is None:
            unused.begin_step()
    if not needs_argument:
        return None
    _gather_in_backward(of_state)
    return _add_argument(args, kwargs)


def _mend_before_call(root: Any) -> None:
    """Mend what an exception in a backward pass has left, which a step has caught before it calls another unit."""
    sharded = sharded_of(root)
    if sharded is None or root in gathered_modules:
        return
    if root in running_forwards:
        sharded.mend_inside()
    else:
        sharded.mend_interrupted()


@outside_of_compilation
def _begin_unit(calls: UnitCalls, unit: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """What runs after it."""
    replaced = _remove_argument(args, kwargs) if needs_argument else None
    calls.begin(unit, *(replaced or (args, kwargs)))
    return replaced


def _before_call(
    of: weakref.ref[Any], of_writes: weakref.ref[GatheredWrites], of_unused: weakref.ref[UnusedParameters], unit: Any
) -> None:
    """Let torch know the root before the first call of a unit, which would become a root of its own."""
    root, writes = of(), of_writes()
    if writes is not None and unit not in gathered_modules:
        writes.check_own()
        writes.enter()
        if (writes.stays_gathered or writes.is_of_root) and (unused := of_unused()) is not None and not recomputes():
            if writes.stays_gathered:
                free_written(unit, unused.recorded)
            take_requires_grad(unit)
    if root is not None and isinstance(unit, FSDPModule) and not has_run(unit):  # in gathered() it is none
        with torch.inference_mode(False):
            root._get_fsdp_state()._lazy_init()


#: Whether ``fully_shard`` fails on a GPU in a call without arguments. torch 2.13 looks whether there are any.
needs_argument = torch.__version__ < "2.13"

#: What torch gets as the argument of such a call.
_ARGUMENT = object()


def _gather_in_backward(of: weakref.ref[Any]) -> None:
    """Gather a unit that is called in a backward pass which has freed it before, as torch 2.13 does."""
    state = of()
    if state is not None and state._training_state.name == "PRE_BACKWARD":
        for group in param_groups_in(state):
            if not group.is_unsharded:
                group.unshard()
                group.wait_for_unshard()


def _add_argument(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Let torch's hook have an argument in a call without any, as that of the root in which a step runs.

    On a GPU, the hook moves the arguments to the device, and fails before torch 2.13 if there are none (IndexError).
    """
    return None if args or kwargs else ((_ARGUMENT,), {})


def _remove_argument(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Take back what :func:`_add_argument` has added."""
    return ((), {}) if len(args) == 1 and args[0] is _ARGUMENT and not kwargs else None


def _put_around(hooks: dict[int, Any], first: Sequence[int], second: Sequence[int]) -> None:
    """Put hooks before and after those of ``fully_shard``, and leave the others in their order."""
    order = [key for key in hooks if key not in (*first, *second)]
    of_fsdp = [index for index, key in enumerate(order) if is_of_torch(hooks[key], OF_FSDP)]
    order[of_fsdp[-1] + 1 : of_fsdp[-1] + 1] = second
    order[of_fsdp[0] : of_fsdp[0]] = first
    ordered_hooks = {key: hooks[key] for key in order}
    hooks.clear()
    hooks.update(ordered_hooks)
