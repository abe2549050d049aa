"""Units whose gradients a backward pass does not reduce by itself, since it does not reach their parameters.

FSDP1 reduces in ``_post_backward_hook``, when the flat parameter gets a gradient. In two cases it gets none.

A rank's data may use none of a unit's parameters, and that of other ranks may: these would wait, or exchange the next
unit's gradients with this rank's. Such a unit is *unused*: here the rank reduces zeros when the backward pass arrives
at the unit's inputs, where it has a hook. An input may be the output of another unit, or of the same one, as of a layer
that is skipped. One tensor would have two hooks then, which run in the order of the forward pass, not of the backward
pass. Therefore inputs are replaced by views. Outputs that are inputs are replaced as well: their hook gathers the
parameters, and at the input it would run too late, after the backward pass of all else that the unit computes from that
input.

With ``no_sync()`` gradients of earlier micro-batches wait at flat parameters, and the backward pass that is to reduce
them may not visit a unit that has some. ``_post_backward_final_callback`` then fails an assertion; or, if the unit also
has reduced gradients, or is not sharded, ranks would silently go on with different gradients. Such a unit is *waiting*:
here the pass reduces it at its end, before FSDP1's own end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import _post_backward_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_core.sharding import cast_inputs
from fsdp_cuda_native.torch_private.flat_parameters.frozen import finish_frozen_units
from fsdp_cuda_native.torch_private.flat_parameters.reduction_hooks import has_hook, nodes_of, reduce_at_last_node
from fsdp_cuda_native.torch_private.flat_parameters.units import handle_of, is_in_backward, units_in_passes
from fsdp_cuda_native.torch_private.passes.unit_calls import tensors_in

__all__ = ["call_after_pass", "queue_waiting", "reduce_waiting_after", "register_unused_hooks", "register_waiting_hook"]

#: The attribute of a unit that says whether the running call is its first one since the last backward pass.
_IS_FIRST_CALL = "_fsdp_first_call"
#: The attribute of a unit with the inputs of its running call that require gradients.
_INPUTS = "_fsdp_cuda_native_inputs"

#: What most modules are called with besides tensors.
_PLAIN = frozenset({type(None), bool, int, float, str})


def register_unused_hooks(unit: FSDP) -> None:
    """Let a unit take part in the reduction of its gradients even if this rank has used none of its parameters."""
    if handle_of(unit) is not None:
        unit.register_forward_pre_hook(_view_inputs, with_kwargs=True)
        unit.module.register_forward_pre_hook(partial(_reduce_after_all_calls, weakref.ref(unit)))
        unit.module.register_forward_hook(_view_returned_inputs, with_kwargs=True)
        unit.register_forward_hook(_reduce_at_inputs, with_kwargs=True)


def _view_inputs(unit: FSDP, args: Any, kwargs: Any) -> Any:
    """Replace the inputs of a unit by views, for hooks that are this call's alone."""
    handle = handle_of(unit)
    # the first call is that at which a backward pass leaves the unit: FSDP1 has no hook before it
    unit.__dict__[_IS_FIRST_CALL] = not has_hook(handle.flat_param)
    if not torch.is_grad_enabled():
        return None
    inputs: list[Tensor] = []
    unit.__dict__[_INPUTS] = inputs
    policy = unit.mixed_precision
    if (
        # FSDP1 casts nothing in a recomputation, which it expects to begin inside of the unit, not around the root
        handle._training_state == HandleTrainingState.BACKWARD_PRE
        and policy.param_dtype is not None
        and policy.cast_forward_inputs
        and not handle._force_full_precision
    ):
        args, kwargs = cast_inputs(policy.param_dtype, args, kwargs)
    return (
        tuple([_viewed(value, inputs) for value in args]),
        {name: _viewed(value, inputs) for name, value in kwargs.items()},
    )


def _viewed(value: Any, inputs: list[Tensor]) -> Any:
    """A value with views of its tensors that require gradients, which are appended to ``inputs``."""
    if _needs_no_view(value):
        return value

    def view(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        inputs.append(tensor.view_as(tensor))
        return inputs[-1]

    return view(value) if isinstance(value, Tensor) else tree_map_only(Tensor, view, value)


def _needs_no_view(value: Any) -> bool:
    """Whether a value certainly holds no tensor that requires a gradient, from a look at tensors and tuples alone."""
    if isinstance(value, Tensor):
        return not value.requires_grad
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_needs_no_view, value)))


def _reduce_after_all_calls(unit_ref: weakref.ref[FSDP], module: nn.Module, args: Any) -> None:
    """Reduce a unit's gradients when a backward pass has visited all of the unit's calls that it goes through."""
    unit = unit_ref()
    if unit is None or not torch.is_grad_enabled():
        return
    if handle_of(unit)._training_state == HandleTrainingState.IDLE:  # called within gathered(), by itself
        return
    if not unit.__dict__.get(_IS_FIRST_CALL, True):
        reduce_at_last_node(unit)


def _view_returned_inputs(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Replace outputs that are inputs by views of them."""
    if not torch.is_grad_enabled():
        return None
    leaves = [output] if type(output) is Tensor else tree_leaves(output)
    output_ids = {id(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}
    if not output_ids:
        return None
    arguments = [*args, *kwargs.values()]
    # mostly so; tree_leaves() takes longer than this look
    are_leaves = all(isinstance(value, Tensor) or _needs_no_view(value) for value in arguments)
    returned_ids = output_ids.intersection(map(id, arguments if are_leaves else tree_leaves(arguments)))
    if not returned_ids:
        return None
    return tree_map_only(Tensor, lambda leaf: leaf.view_as(leaf) if id(leaf) in returned_ids else leaf, output)


def _reduce_at_inputs(unit: FSDP, args: Any, kwargs: Any, output: Any) -> None:
    """Let a backward pass that has arrived at the unit's inputs reduce its gradients, if nothing else does."""
    handle = handle_of(unit)
    inputs = unit.__dict__.pop(_INPUTS, [])  # not args: the unit may have put outputs into a list that is one of them
    if torch.is_grad_enabled() and handle.flat_param.requires_grad and unit.__dict__[_IS_FIRST_CALL]:
        reduce = partial(_reduce_if_unused, unit, handle)
        if len(inputs) == 1:  # the usual call; torch's hook on several tensors costs more
            inputs[0].register_hook(reduce)
        elif inputs:
            register_multi_grad_hook(inputs, reduce)


def _reduce_if_unused(unit: FSDP, handle: Any, _: Any) -> None:
    """Reduce zeros, or what earlier micro-batches left, if the backward pass reaches none of a unit's parameters."""
    if handle._training_state != HandleTrainingState.BACKWARD_PRE:
        return  # the pass has reduced its gradient, or not reached its output
    if any(map(torch._C._will_engine_execute_node, nodes_of(unit))):
        return  # the pass will still reach its parameters through another call
    if unit._sync_gradients:
        _reduce_accumulated(unit)
    else:  # wait for a reduction with a gradient of zeros, as ranks that have used the parameters wait with theirs
        _fill_gradient(handle)
        handle.flat_param._post_backward_called = True
        if handle._use_orig_params:
            handle._use_unsharded_grad_views()


def _reduce_accumulated(unit: FSDP) -> None:
    """Reduce what a gathered unit has accumulated, or zeros if it has accumulated nothing."""
    handle = handle_of(unit)
    _fill_gradient(handle)
    with torch.no_grad():
        _post_backward_hook(unit, handle, handle.flat_param)


def _fill_gradient(handle: Any) -> None:
    """Give a gathered flat parameter a gradient of zeros, unless earlier micro-batches have left one."""
    flat = handle.flat_param
    if flat.grad is None:
        dtype = handle._fwd_bwd_param_dtype
        flat.grad = torch.zeros(flat._unpadded_unsharded_size, dtype=dtype, device=handle.device)


def register_waiting_hook(root: FSDP) -> None:
    """Let a backward pass that reduces gradients also reduce those of units that it does not visit."""
    root.module.register_forward_hook(partial(_reduce_waiting_after_call, weakref.ref(root)))


def _reduce_waiting_after_call(root_ref: weakref.ref[FSDP], module: nn.Module, args: Any, output: Any) -> None:
    root = root_ref()
    if root is not None and torch.is_grad_enabled():
        reduce_waiting_after(root, output)


def reduce_waiting_after(root: FSDP, output: Any) -> None:
    """Let a backward pass that begins at an output reduce what waits, before FSDP1's own end of the pass.

    FSDP1 queues that in hooks of the same tensors, which it registers after these.
    """
    _hook_tensors(output, partial(_queue_end, root))


def _hook_tensors(output: Any, hook: Callable[[Tensor], None]) -> None:
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(hook)


def _queue_end(root: FSDP, _: Tensor) -> None:
    if not is_in_backward(root):  # else another tensor's hook has queued it
        queue_waiting(root)
        torch.autograd.Variable._execution_engine.queue_callback(partial(finish_frozen_units, root))


def call_after_pass(root: FSDP, output: Any, function: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass of the root that begins at what it has returned."""
    if torch.is_grad_enabled():
        _hook_tensors(output, partial(_queue_function, root, function))


def _queue_function(root: FSDP, function: Callable[[], None], _: Tensor) -> None:
    if not is_in_backward(root) and _adds_gradients(root):
        torch.autograd.Variable._execution_engine.queue_callback(function)


def queue_waiting(root: FSDP) -> None:
    """Reduce units with accumulated gradients at the end of the running backward pass, if it does not visit them."""
    state: Any = root
    waiting = [unit for unit in units_in_passes(root) if _has_waiting(unit)]
    if state._sync_gradients and waiting and _adds_gradients(root):
        torch.autograd.Variable._execution_engine.queue_callback(partial(_reduce_all_waiting, waiting))


def _adds_gradients(root: FSDP) -> bool:
    """Whether the backward pass that runs adds to gradients of flat parameters: ``torch.autograd.grad`` does not."""
    return any(torch._C._will_engine_execute_node(node) for unit in units_in_passes(root) for node in nodes_of(unit))


def _has_waiting(unit: FSDP) -> bool:
    """Whether a unit has gradients that no backward pass has reduced, and ``zero_grad()`` has not cleared.

    The answer is the same on all ranks.
    """
    handle = handle_of(unit)
    flat = handle.flat_param
    if not getattr(flat, "_post_backward_called", False):
        return False
    if handle._training_state != HandleTrainingState.BACKWARD_POST:  # the pass that runs has not visited it
        # zero_grad() may have cleared the gradient, of which FSDP1 learns here
        handle._reset_flat_param_grad_info_if_needed()
        flat._post_backward_called = flat.grad is not None
    return bool(flat._post_backward_called)


def _reduce_all_waiting(waiting_units: Sequence[FSDP]) -> None:
    """Reduce the units that the pass has not reduced, in states as if it had just reached them."""
    for unit in waiting_units:
        handle: Any = handle_of(unit)
        if _is_reduced(handle):
            continue
        unit.training_state = TrainingState.FORWARD_BACKWARD
        handle._training_state = HandleTrainingState.BACKWARD_PRE
        handle.prepare_gradient_for_backward()
        _reduce_accumulated(unit)


def _is_reduced(handle: Any) -> bool:
    """Whether a backward pass has reduced the gradient of a unit for which :func:`_has_waiting` was true.

    FSDP1's training state does not always tell: a call of the unit inside the pass changes it.
    """
    flat = handle.flat_param
    if not flat.requires_grad:  # frozen since then: the pass itself reduces nothing
        return flat.grad is None
    if handle._training_state == HandleTrainingState.BACKWARD_POST:
        return True
    if not handle.uses_sharded_strategy:  # a reduced gradient looks the same, and may be averaged again
        return False
    return bool(flat.grad is None or flat.grad.shape != flat._unpadded_unsharded_size)
