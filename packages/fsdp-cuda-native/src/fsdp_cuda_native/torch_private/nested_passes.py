"""Backward passes that FSDP1 does not expect: inside a forward pass, inside another one, or without gradients to keep.

FSDP1 expects each backward pass to begin at what the root has returned, to reach the output of a unit before the unit's
parameters, and to add to their gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import _post_forward_reshard, _pre_backward_hook, _unshard

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.sharding import guard_parameters, is_accumulated, outside_of_compilation, unguard_parameters
from fsdp_core.state import gathered_modules
from fsdp_cuda_native.torch_private.flat_parameters import (
    check_unwritten,
    finish_frozen,
    follow_frozen,
    handle_of,
    is_interrupted,
    keep_gathered,
    lacks_views,
    nodes_of,
    reduce_after_last,
    reduce_at,
    reduce_waiting,
    shows_parameters,
    tensors_in,
    times_each_written,
    units_of,
)

__all__ = ["NestedPasses"]


class NestedPasses:
    """Prepares a root's units for backward passes, before FSDP1 does.

    - ``torch.autograd.grad`` adds to no parameter's gradient. FSDP1 would set the gradients of the last step aside, and
      give them back only at the end of a pass of the whole root. Here units are gathered, and reduce nothing.
    - For a backward pass inside the root's forward pass, one of the root is begun; the forward pass then goes on.
    - So it is for a pass that reaches a unit, or its parameters, without passing through the root's output.
    - With ``create_graph=True`` a pass records a graph of its own. That holds parameters, and calls no hook of FSDP1
      when it is differentiated: all units stay gathered until they are resharded explicitly.

    Args:
        root: The root.
        is_running: Whether the root's forward pass is running.
        begin_inside: Begins a backward pass of the root inside its running forward pass.
    """

    def __init__(
        self, root: FullyShardedDataParallel, is_running: Callable[[], bool], begin_inside: Callable[[], None]
    ) -> None:
        self._root = weakref.ref(root)
        self.units = weakref.WeakSet({root, *units_of(root)})
        self._is_running = is_running
        self._begin_inside = begin_inside
        # backward passes by autograd's id of their graph task; -2 stands for none, -1 is autograd's for no pass
        self._last_task, self._accumulates = -2, False  # the pass for which accumulates() was answered, and the answer
        self._outer_task = self._inner_task = -2  # the pass of the root, and the last one inside it
        self._tasks_without_gradients: set[int] = set()
        self._task_of_unit = weakref.WeakKeyDictionary[FullyShardedDataParallel, int]()  # the last that reached a unit
        self_ref = weakref.ref(self)
        for unit in self.units:
            unit.module.register_forward_hook(partial(_hook_output, self_ref, weakref.ref(unit)))
            if handle_of(unit) is not None:
                unit.module.register_forward_pre_hook(partial(_hook_new_nodes, self_ref, weakref.ref(unit)))

    def follows(self) -> bool:
        """Whether calls of units are now recorded for backward passes, in which FSDP1 gathers."""
        return torch.is_grad_enabled() and self._root() not in gathered_modules

    def accumulates(self, further_nodes: Iterable[Any] = ()) -> bool:
        """Whether the backward pass that runs adds to gradients of flat parameters.

        Args:
            further_nodes: Nodes that may add to them, besides those of which FSDP1 knows.
        """
        task, nodes = torch._C._current_graph_task_id(), further_nodes
        if task != self._last_task:
            for unit in self.units:
                follow_frozen(unit)
            nodes = chain(further_nodes, (node for unit in self.units for node in nodes_of(unit)))
            # FSDP1 forgets all nodes at the end of another pass, such as one in a hook of this one's loss
            forgotten = filter(_has_forgotten_nodes, self.units)
            self._accumulates = any(is_accumulated(handle_of(unit).flat_param) for unit in forgotten)
            self._last_task = task
        if not self._accumulates:  # asked again with other nodes: the first unit that it reached may have been frozen
            self._accumulates = any(map(torch._C._will_engine_execute_node, nodes))
        return self._accumulates

    def is_idle(self) -> bool:
        """Whether neither a forward nor a backward pass of the root runs."""
        root: Any = self._root()
        idle = root.training_state == TrainingState.IDLE
        return bool(idle and torch._C._current_graph_task_id() not in self._tasks_without_gradients)

    def begin_at_loss(self) -> None:
        """Note a backward pass that FSDP1 begins at the root's output, or at a loss in place of that."""
        root = self._root()
        if root is not None and not is_interrupted(root):
            self._outer_task = self._task_of_unit[root] = torch._C._current_graph_task_id()

    def begin(self, unit: FullyShardedDataParallel, nodes: Iterable[Any]) -> None:
        """Prepare for a backward pass that has reached a unit.

        Args:
            unit: The unit.
            nodes: The nodes of the call that the pass has reached, which add to the gradient of the flat parameter.

        Raises:
            UnsupportedCapabilityError: The pass adds to gradients, and records its own graph.
        """
        root = self._root()
        records = torch.is_grad_enabled()  # off in a backward pass, unless it was given create_graph=True
        if root is None:
            return
        if records:
            keep_gathered(self.units, _gather_to_recompute)
        if not self.accumulates(nodes):
            if self._last_task not in self._tasks_without_gradients:
                self._tasks_without_gradients.add(self._last_task)
                end = partial(self._tasks_without_gradients.discard, self._last_task)
                torch.autograd.Variable._execution_engine.queue_callback(end)
            _gather_for_pass(unit)
            return
        if records:
            raise _recorded_refusal()
        if not is_interrupted(root):
            self._outer_task = self._last_task
            if self._is_running():
                self._begin_inside()
            elif unit is not root:
                reduce_waiting(root)
                torch.autograd.Variable._execution_engine.queue_callback(partial(finish_frozen, root))
                if handle_of(root) is not None:  # an earlier call of begin() may have taken the pass for another kind
                    handle_of(root)._ran_pre_backward_hook = False
                _pre_backward_hook(root, root.module, handle_of(root), None)
        elif self._last_task not in (self._outer_task, self._inner_task):
            # a pass inside a pass of the root, which frees the root that the rest of the outer pass needs
            self._inner_task = self._last_task
            torch.autograd.Variable._execution_engine.queue_callback(self.gather_again)
        handle = handle_of(unit)
        if handle is None:
            return
        if _has_begun(handle) and self._task_of_unit.get(unit) != self._last_task:  # but in a pass around this one
            handle._ran_pre_backward_hook = False
            unit.training_state = TrainingState.IDLE
        self._task_of_unit[unit] = self._last_task
        if _is_gathered(handle):
            return
        if _has_begun(handle):  # frozen: FSDP1 frees it when the pass has visited one of its calls
            _gather(unit)
        elif lacks_views(handle):
            handle._needs_pre_backward_unshard = False
            _gather(unit)
        else:
            handle._needs_pre_backward_unshard = True  # FSDP1 gathers it

    def gather_again(self) -> None:
        """Gather the root's own parameters for a call inside a backward pass, which may have freed them."""
        root = self._root()
        handle = None if root is None else handle_of(root)
        if root is None or handle is None:
            return
        if not handle.uses_sharded_strategy and shows_parameters(root) and not self._is_running():
            raise UnsupportedCapabilityError(
                "sharding_strategy='NO_SHARD' can't call the model in the backward pass after a step, in which FSDP1 "
                "would not reduce its gradients.\nWrite sharding_strategy='SHARD_GRAD_OP'."
            )
        if not _is_gathered(handle) or shows_parameters(root):
            _gather(root, anew=True)
        if self.follows():  # under mixed precision, what is gathered anew adds to the gradient at another node
            reduce_after_last(root)
            _hook_new_nodes(weakref.ref(self), self._root, root.module, ())

    def begin_at(self, unit: FullyShardedDataParallel, tensors: Iterable[Tensor]) -> None:
        """Prepare for backward passes that reach a unit at tensors which leave its call."""
        passes_ref, unit_ref = weakref.ref(self), weakref.ref(unit)

        def begin(_: Tensor) -> None:
            passes, unit = passes_ref(), unit_ref()
            if passes is not None and unit is not None:
                if times is not None:
                    check_unwritten(unit, times)
                passes.begin(unit, nodes)

        if handle_of(unit) is not None:
            times, nodes = times_each_written(unit), nodes_of(unit)
        else:  # a root without parameters of its own stands for all units
            times, nodes = None, [node for other_unit in self.units for node in nodes_of(other_unit)]
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(begin)

    def begin_at_parameters(self, unit: FullyShardedDataParallel, node: Any) -> None:
        """Prepare for a backward pass that is about to add to a unit's gradient, and may not have passed its output."""
        handle = handle_of(unit)
        if not handle.flat_param.requires_grad:  # frozen since the call: the node adds nothing
            return
        if torch.is_grad_enabled():
            raise _recorded_refusal()
        if not _has_begun(handle) or self._task_of_unit.get(unit) != torch._C._current_graph_task_id():
            self.begin(unit, [node])
            _pre_backward_hook(unit, unit.module, handle, None)
        reduce_at(unit, node)


def _recorded_refusal() -> UnsupportedCapabilityError:
    return UnsupportedCapabilityError(
        "loss.backward(create_graph=True) adds gradients that can be differentiated to parameters, which FSDP1 "
        "reduces in a way that can't be.\n"
        "Write torch.autograd.grad(loss, inputs, create_graph=True), use its result in the loss, and call "
        "backward() on that; or use strategy='fsdp2'."
    )


def _has_forgotten_nodes(unit: FullyShardedDataParallel) -> bool:
    """Whether a unit is trained, but FSDP1 knows no node that adds to its gradient."""
    handle = handle_of(unit)
    return handle is not None and handle.flat_param.requires_grad and not nodes_of(unit)


def _has_begun(handle: Any) -> bool:
    """Whether FSDP1 has prepared a unit for a backward pass."""
    return bool(getattr(handle, "_ran_pre_backward_hook", False))  # missing before the first forward pass has ended


def _is_gathered(handle: Any) -> bool:
    flat = handle.flat_param
    return not handle.uses_sharded_strategy or flat.data_ptr() != flat._local_shard.data_ptr()


def _gather(unit: FullyShardedDataParallel, *, anew: bool = False) -> None:
    """Gather a unit for a backward pass.

    Args:
        unit: The unit.
        anew: Whether modules get new views of the flat parameter, instead of those of the forward pass.
    """
    handle, stream = handle_of(unit), unit._unshard_stream
    training_state = handle._training_state
    # FSDP1 makes new views in a forward pass, and uses those of the forward pass in a backward pass
    handle._training_state = (
        HandleTrainingState.FORWARD if anew or lacks_views(handle) else HandleTrainingState.BACKWARD_PRE
    )
    _unshard(unit, handle, stream, unit._pre_unshard_stream)
    unit._device_handle.current_stream().wait_stream(stream)
    handle._training_state = training_state


@outside_of_compilation
def _gather_to_recompute(unit_ref: weakref.ref[FullyShardedDataParallel], module: nn.Module, args: Any) -> None:
    """Gather a unit for a call of a module inside a backward pass, such as activation checkpointing makes."""
    unit = unit_ref()
    if unit is not None and torch._C._current_graph_task_id() != -1 and shows_parameters(unit):
        _gather(unit, anew=True)


def _gather_for_pass(unit: FullyShardedDataParallel) -> None:
    """Gather a unit until the end of a backward pass that adds to no gradients, and let FSDP1 do nothing in it."""
    state: Any = unit
    handle = handle_of(unit)
    has_begun = state._post_backward_callback_queued if handle is None else _has_begun(handle)
    was_gathered = handle is None or _is_gathered(handle)
    if has_begun and was_gathered:
        return
    # a flat parameter that optimizers hold is guarded while it is a piece, but FSDP1 gathers from it
    guarded = [] if was_gathered else unguard_parameters([handle.flat_param])
    if not was_gathered:
        _gather(unit)
    else:  # the pass around this one may have gathered it ahead
        unit._device_handle.current_stream().wait_stream(unit._unshard_stream)
    if handle is None:  # a root without parameters of its own
        state._post_backward_callback_queued = True
    else:
        handle._ran_pre_backward_hook = True
    states = unit.training_state, None if handle is None else handle._training_state
    end = partial(_end_pass, unit, states, guarded, had_begun=has_begun, was_gathered=was_gathered)
    torch.autograd.Variable._execution_engine.queue_callback(end)


def _end_pass(
    unit: FullyShardedDataParallel,
    states: tuple[Any, Any],
    guarded: Sequence[Tensor],
    *,
    had_begun: bool,
    was_gathered: bool,
) -> None:
    """Leave a unit as it was before :func:`_gather_for_pass`."""
    state: Any = unit
    handle = handle_of(unit)
    if handle is None:
        state._post_backward_callback_queued = had_begun
        state.training_state = TrainingState.IDLE
        return
    state.training_state, handle._training_state = states
    if not was_gathered:
        training_state = handle._training_state
        handle._training_state = HandleTrainingState.FORWARD  # in which FSDP1 reshards as after a forward pass
        _post_forward_reshard(unit, handle)
        handle._training_state = training_state
        if not _is_gathered(handle):
            guard_parameters(guarded)
    handle._ran_pre_backward_hook = had_begun
    handle._needs_pre_backward_unshard = True


@outside_of_compilation
def _hook_output(
    passes_ref: weakref.ref[NestedPasses],
    unit_ref: weakref.ref[FullyShardedDataParallel],
    module: nn.Module,
    args: Any,
    output: Any,
) -> None:
    passes, unit = passes_ref(), unit_ref()
    if passes is not None and unit is not None and passes.follows():
        passes.begin_at(unit, [output] if isinstance(output, Tensor) else tensors_in(output))


@outside_of_compilation
def _hook_new_nodes(
    passes_ref: weakref.ref[NestedPasses],
    unit_ref: weakref.ref[FullyShardedDataParallel],
    module: nn.Module,
    args: Any,
) -> None:
    passes, unit = passes_ref(), unit_ref()
    if passes is not None and unit is not None and passes.follows():
        for node in _new_nodes(unit):
            node.register_prehook(partial(_begin_at_parameters, passes_ref, unit_ref))


def _begin_at_parameters(
    passes_ref: weakref.ref[NestedPasses], unit_ref: weakref.ref[FullyShardedDataParallel], gradients: Any
) -> None:
    passes, unit = passes_ref(), unit_ref()
    if passes is not None and unit is not None:
        passes.begin_at_parameters(unit, torch._C._current_autograd_node())


#: The attribute of a unit with the id of the first hook of its nodes, and how many of these nodes have our hook.
_HOOKED_NODES = "_fsdp_cuda_native_hooked_nodes"


def _new_nodes(unit: FullyShardedDataParallel) -> Sequence[Any]:
    """Those of :func:`nodes_of` a unit that were added since its last call."""
    nodes = nodes_of(unit)
    if not nodes:
        return ()
    hook = handle_of(unit).flat_param._post_backward_hook_state[1]
    hook_id = getattr(hook, "first", hook).id  # unlike the id of a node, never used again
    last_hook_id, hooked = unit.__dict__.get(_HOOKED_NODES, (None, 0))
    unit.__dict__[_HOOKED_NODES] = hook_id, len(nodes)
    return nodes[hooked:] if last_hook_id == hook_id else nodes
