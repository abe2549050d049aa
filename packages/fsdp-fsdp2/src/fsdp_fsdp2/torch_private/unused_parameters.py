"""Backward passes in which ranks use different parameters, and which all ranks end alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.utils
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from fsdp_core import Runtime
from fsdp_core.sharding import GRADIENT_AXES, StepGradients, is_accumulated, without_torch_function
from fsdp_fsdp2.torch_private import frozen_shards
from fsdp_fsdp2.torch_private.forward_passes import end_backward, resume_states, running_states
from fsdp_fsdp2.torch_private.frozen_shards import update_requires_grad
from fsdp_fsdp2.torch_private.gathered_values import ENTER_UNIT, follow_gathered
from fsdp_fsdp2.torch_private.ordered_gathers import begin_step, order_gathers, wait_for_copies
from fsdp_fsdp2.torch_private.parameter_groups import (
    has_gradient,
    param_groups_in,
    param_groups_of,
    set_accumulated_gradient,
    trainable_params,
)
from fsdp_fsdp2.torch_private.partly_reduced import PartlyReduced
from fsdp_fsdp2.torch_private.recorded_graphs import RecordedGraphs

__all__ = ["UnusedParameters", "finish_backward"]


class UnusedParameters:
    """Lets ranks use different parameters of one unit, such as a layer's experts, and keeps their gradients correct.

    ``fully_shard`` reduces those gradients of a unit together that exist on this rank. If ranks have gradients of
    different parameters, their inputs to the reduce-scatter don't match: one parameter's gradient is added to another's
    if the sizes agree, and gloo aborts the process if they don't. Therefore a parameter without a gradient takes part
    with zeros, in every unit that was reached by this backward pass, or by an earlier one that did not reduce.

    A parameter that no rank has used must have no gradient afterwards, as in plain torch. There can be one only if
    every rank has unused parameters, which :class:`_RanksWithUnused` finds out without a collective. Once it is so,
    ranks exchange on the host which parameters they have used, after this and each later backward pass. Only a rank
    with unused ones waits for the result.

    A unit that was called several times is reduced when the backward pass has visited it as many times, and at each
    visit after that, since a function may call the unit again in its own ``backward``. At which visit autograd delivers
    a gradient depends on the calls in which this rank has used the parameter: if ranks reduced at every visit, they
    would issue different numbers of collectives.

    A backward pass may run inside a forward pass of the root or of a unit: for an adversarial example, a penalty, or
    with manual optimization. At its end torch makes all units idle, and reshards them. Then the running forward passes
    go on as they were (:func:`resume_states`). In ``torch.autograd.grad``, which adds to no parameter's gradient,
    nothing is reduced.

    torch 2.13 can fill in zeros too (``set_reduce_scatter_unused_params``), but it passes them to the optimizer, which
    then applies weight decay and momentum to parameters that no rank has used.

    Args:
        units: The units, the root last; in the same order on every rank.
        runtime: The ranks.
        step: The gradients that gathered parameters show inside a forward pass of the root.
        on_inner_pass_end: Called after each backward pass inside a forward pass that has added to gradients.

    Attributes:
        is_end_due: Whether a backward pass inside the root's forward pass has begun, and not ended yet.
        partly: The gradients that wait for the all-reduce across replicas.
        recorded_graphs: The units that stay gathered for the graph of a backward pass.
    """

    def __init__(
        self,
        units: Sequence[FSDPModule],
        runtime: Runtime,
        step: StepGradients,
        on_inner_pass_end: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        root = units[-1]
        self._step = step
        self._on_inner_pass_end = on_inner_pass_end
        self._groups = [group for unit in units for group in param_groups_of(unit)]
        self._root_groups = list(param_groups_of(root))

        # the backward pass that runs, or the last one
        self._calls: dict[Any, int] = {}  # how often each unit was called
        self._visits: dict[Any, int] = {}  # how often the backward pass has visited it
        self._are_calls_over = False  # then the next call counts from 1 again
        self._unreduced_groups: set[Any] = set()  # those with gradients that no reduction has taken yet
        self._is_ending = False
        self._accumulates = False
        self._graph_task_id = -2  # autograd's id of the pass for which _accumulates holds; -1 is its id of no pass
        self.is_end_due = False
        self.partly = PartlyReduced()

        # the agreement on what was used
        self._peers = runtime.along(*GRADIENT_AXES)
        self._ranks_with_unused = _RanksWithUnused(runtime, self._peers)
        self._has_unused_everywhere = False  # whether each rank has had unused parameters, so that ranks exchange which
        parameters = [parameter for group in self._groups for parameter in group.fsdp_params]
        self._index = {parameter: index for index, parameter in enumerate(parameters)}
        self._zero_filled: dict[int, _ZeroFilled] = {}  # by the parameter's index
        self._last_exchange: _Exchange | None = None

        weak_self = weakref.ref(self)  # units hold no strong reference: a cycle would delay the release of memory
        for group in self._groups:
            weak_group = weakref.ref(group)
            group.pre_forward = partial(_pre_forward, weak_self, weak_group)
            group.pre_backward = partial(_pre_backward, weak_self, weak_group)
            group.post_backward = partial(_post_backward, weak_self, weak_group)
        self._state_of_group: dict[Any, weakref.ref[Any]] = {}  # without the root and units of several modules
        for unit in units:
            state: Any = unit._get_fsdp_state()
            # torch queues the callback of the unit whose output a backward pass reaches first
            state._root_post_backward_final_callback = partial(_final_callback, weak_self, weakref.ref(state))
            if unit is not root and len(state._modules) == 1:
                for group in param_groups_in(state):
                    self._state_of_group[group] = weakref.ref(state)
        root_state: Any = root._get_fsdp_state()
        self._context: Any = root_state._state_ctx  # from the first call on, that of all units
        self.recorded_graphs = RecordedGraphs(self._groups, weakref.ref(root_state))
        for group in self._groups:
            follow_gathered(group, root_state if group in self._root_groups else None)
        order_gathers(self._groups)

    def count(self, group: Any) -> None:
        """Record a call of a unit: a backward pass visits it once per call.

        Modules that a user has sharded together are called one after the other; for torch that is one call.
        """
        if group._training_state is TrainingState.FORWARD:
            return  # the call of another module of the unit has begun it
        frozen_shards.carry_requires_grad(group)
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # otherwise it is a recomputation
            if self._are_calls_over:
                self._calls.clear()  # not at the end of the pass: another one may visit the same calls
                self._are_calls_over = False
            self._calls[group] = self._calls.get(group, 0) + 1

    def begin_step(self) -> None:
        """Record that a unit is called while no other is running, at which torch lets its streams wait."""
        begin_step(self._groups)

    def is_interrupted(self) -> bool:
        """Whether an exception has ended a backward pass. To be asked outside of backward passes only."""
        return bool(self._context.post_backward_final_callback_queued)

    def begin(self) -> None:
        """Record that a backward pass begins inside the root's forward pass, for which autograd calls no hook."""
        self.is_end_due = True
        self._unreduced_groups.update(self._root_groups)

    def pre_backward(self) -> None:
        """Record that a backward pass has reached a unit."""
        self._step.on = False
        if torch.is_grad_enabled():  # off in a backward pass, unless it was given create_graph=True
            self.recorded_graphs.begin()

    def post_backward(self, group: Any, *args: Any) -> None:
        """Reduce a unit's gradients unless the backward pass visits it again, and free its parameters.

        There is nothing to do for a unit that was never called. torch would fail on it while micro-batches accumulate
        in a reduce dtype of their own.
        """
        self._step.on = False  # the pass may have reached the output of no unit
        was_never_gathered = any(not hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params)
        if was_never_gathered:
            return
        if group.reduce_grads and not self.accumulates():
            _post_backward_without_reduction(group, *args)
            return
        if group._training_state is TrainingState.PRE_BACKWARD:
            self._visits[group] = self._visits.get(group, 0) + 1
            self._unreduced_groups.add(group)
            state_ref = self._state_of_group.get(group)
            state = None if state_ref is None else state_ref()
            if state is not None:  # or torch would take another call in this pass for a recomputation
                state._training_state = TrainingState.IDLE
        if self.recorded_graphs and not self._is_ending:
            # Another visit may follow: autograd orders nodes by numbers that each thread counts for itself, and on an
            # accelerator a backward pass records its graph in a thread of its own. The end of the pass reduces.
            self._unreduced_groups.add(group)
            _post_backward_without_reduction(group, *args)
            return
        is_unreduced = (
            group in self._unreduced_groups
            or self.partly.must_all_reduce(group)
            or any(has_gradient(parameter) for parameter in group.fsdp_params)
        )
        is_last_visit = self._is_ending or self._visits.get(group, 0) >= self._calls.get(group, 0)
        if not group.reduce_grads or not is_unreduced:
            type(group).post_backward(group, *args)
        elif is_last_visit:
            self._unreduced_groups.discard(group)
            self._fill_with_zeros(group)
            self.partly.check(group)
            type(group).post_backward(group, *args)
            self.partly.record_waiting(group)
        else:
            _post_backward_without_reduction(group, *args)

    def call_in_backward(self, state: Any) -> None:
        """Record a call of a unit inside a backward pass, for which yet another backward pass may run inside that.

        torch takes it for the recomputation of a call that the pass has yet to visit. If the pass has visited the unit
        already, as can happen to the root and to modules that are sharded together, the end of the pass reduces it
        again.
        """
        if state._training_state is not TrainingState.PRE_BACKWARD:
            return
        for group in param_groups_in(state):
            if group._training_state is not TrainingState.PRE_BACKWARD:
                group._training_state = TrainingState.IDLE
                self._unreduced_groups.add(group)

    def accumulates(self) -> bool:
        """Whether the backward pass that runs adds to gradients: ``torch.autograd.grad`` only returns some."""
        graph_task_id = torch._C._current_graph_task_id()
        if not self._accumulates and graph_task_id != self._graph_task_id:
            for group in self._groups:
                update_requires_grad(group)
            self._accumulates = graph_task_id == -1 or self._accumulates_in_gathered() or _reaches_leaf()
            self._graph_task_id = graph_task_id
        return self._accumulates  # true also if only a pass inside this one does

    def _accumulates_in_gathered(self) -> bool:
        return any(
            is_accumulated(parameter._unsharded_param)
            for group in self._groups
            for parameter in trainable_params(group)
        )

    def finish(self, state: Any) -> None:
        """End a backward pass: reduce what is pending, and agree on what was used. All ranks must call it."""
        self._step.on = False  # a pass in a hook of this one's loss may have set it, and no unit was reached since
        accumulates = self.accumulates()
        states_in_forward = running_states(state)
        outermost_state = state._state_ctx.iter_forward_root
        # torch reshards at the end of the pass, but the forward passes that go on need their parameters
        groups_to_keep = [group for running_state in states_in_forward for group in param_groups_in(running_state)]
        if self.recorded_graphs:
            groups_to_keep = self._groups
        reshard_settings = [group.reshard_after_backward for group in groups_to_keep]
        self._is_ending = True
        try:
            for group in groups_to_keep:
                group.reshard_after_backward = False
            end_backward(state)
        finally:
            self._is_ending = False
            for group, setting in zip(groups_to_keep, reshard_settings, strict=True):
                group.reshard_after_backward = setting
        wait_for_copies(self._groups)  # torch waits for gradients on the host, but a pass may have returned them
        if accumulates:
            self._agree()
        else:
            self._are_calls_over = True
            self._visits.clear()
        self._accumulates = False
        if states_in_forward:
            resume_states(states_in_forward, outermost_state)
            self.show_gradients()
            on_inner_pass_end = self._on_inner_pass_end()
            if accumulates and on_inner_pass_end is not None:
                on_inner_pass_end()
        self.recorded_graphs.end(is_last=not states_in_forward)

    def show_gradients(self) -> None:
        """Let parameters that are gathered inside a forward pass of the root show the gradients of their shards."""
        for group in self._groups:
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    self._step.follow(parameter._unsharded_param, parameter.sharded_param, is_part=False)
        self._step.on = True

    def reduce_all_later(self) -> None:
        """Let the next reduction take all units: they were given gradients that came from no backward pass."""
        self._unreduced_groups.update(self._groups)

    def _fill_with_zeros(self, group: Any) -> None:
        """Give zero gradients to the parameters that this rank has not used."""
        if not self._zero_filled and group.all_reduce_grads and _has_new_gradients(group):
            return
        trainable = trainable_params(group)
        used = [parameter for parameter in trainable if has_gradient(parameter)]
        unused = [parameter for parameter in trainable if not has_gradient(parameter)]
        for parameter in used:
            self._zero_filled.pop(self._index[parameter], None)
        for parameter in unused:
            gathered = parameter._unsharded_param
            # None stands for the dtype of the parameter, which is the only one in older versions of torch
            gradient_dtype = getattr(gathered, "grad_dtype", None)
            gathered.grad = torch.zeros_like(gathered, dtype=gradient_dtype)
            is_unused_in_step = parameter not in self.partly.used
            if group.all_reduce_grads and is_unused_in_step:
                shard = parameter.sharded_param
                zero_filled = _ZeroFilled(shard, had_gradient=shard.grad is not None)
                self._zero_filled.setdefault(self._index[parameter], zero_filled)
                if not self._has_unused_everywhere:
                    self._ranks_with_unused.count_rank()
        if not group.all_reduce_grads:
            self.partly.used.update(used)
        self._share_accumulation_dtype(trainable)

    def _share_accumulation_dtype(self, parameters: Sequence[Any]) -> None:
        """Convert new gradients to the reduce dtype if those of earlier micro-batches have it: all must agree."""
        accumulated = [parameter.unsharded_accumulated_grad for parameter in parameters]
        dtypes = [gradient.dtype for gradient in accumulated if gradient is not None]
        if not dtypes:
            return
        for parameter in parameters:
            if parameter.unsharded_accumulated_grad is None:
                gathered = parameter._unsharded_param
                set_accumulated_gradient(parameter, gathered.grad.to(dtypes[0]))
                gathered.grad = None

    def _agree(self) -> None:
        """Remove the zero gradients of parameters that no rank has used."""
        zero_filled = self._zero_filled
        self._zero_filled = {}
        self._are_calls_over = True
        self.is_end_due = False
        self._visits.clear()
        if not any(group.reduce_grads and group.all_reduce_grads for group in self._groups):
            return
        self.partly.used.clear()
        if self._ranks_with_unused.end_pass():
            self._has_unused_everywhere = True
        if not self._has_unused_everywhere and self._peers.world_size > 1:
            return  # one rank has used all parameters
        is_used = torch.ones(len(self._index), dtype=torch.uint8)
        is_used[list(zero_filled)] = 0
        if self._peers.world_size > 1:
            # on the host, so that the step need not wait for the device; if there is a backend for that
            has_host_backend = self._peers.device.type == "cpu" or "cpu" in dist.get_backend_config()
            if not has_host_backend:
                is_used = is_used.to(self._peers.device)
            work = dist.all_reduce(is_used, dist.ReduceOp.MAX, group=self._peers.process_group, async_op=True)
            self._last_exchange = _Exchange(work, is_used)
        if not zero_filled:
            return  # a rank that has used everything informs the others, and needs no result
        if self._last_exchange is not None:
            self._last_exchange.work.wait()
        for index, (shard, had_gradient) in zero_filled.items():
            if not had_gradient and not is_used[index]:
                shard.grad = None

    def forget(self) -> None:
        """Forget unreduced gradients, and all passes, after an exception."""
        self._calls.clear()
        self._visits.clear()
        self._unreduced_groups.clear()
        for group in self._groups:
            for parameter in group.fsdp_params:
                if has_gradient(parameter):
                    set_accumulated_gradient(parameter, None)
                    parameter._unsharded_param.grad = None
        self._ranks_with_unused.take_back()
        self.partly.forget()
        self.recorded_graphs.release()
        self._zero_filled = {}
        self.is_end_due = False
        self._accumulates = False

    @contextmanager
    def all_reduced(self, root: FSDPModule) -> Iterator[None]:
        """A context in which shards have the gradients that wait for an all-reduce. All ranks must enter it.

        Within it the accumulation has ended, as by a backward pass that reaches no parameter. On exit it goes on.
        """
        waiting = self.partly.waiting_gradients()
        does_any_rank_wait = any(self._peers.gather_objects(bool(waiting)))
        if not does_any_rank_wait:
            yield
            return
        used = set(self.partly.used)
        state = root._get_fsdp_state()
        shards = [parameter.sharded_param for group in self._groups for parameter in group.fsdp_params]
        own_gradients = [(shard, shard.grad) for shard in shards]
        for shard, grad in own_gradients:
            shard.grad = None if grad is None else grad.clone()  # torch adds to it in place
        settings = [(group, group.reduce_grads, group.all_reduce_grads) for group in self._groups]
        try:
            for group, *_ in settings:
                group.reduce_grads = group.all_reduce_grads = True
            self.finish(state)
            yield
        finally:
            for group, reduces, all_reduces in settings:
                group.reduce_grads, group.all_reduce_grads = reduces, all_reduces
            for shard, grad in own_gradients:
                shard.grad = grad
            self.partly.put_back(waiting, used)


class _ZeroFilled(NamedTuple):
    """A parameter that takes part in a reduction with zeros.

    Attributes:
        shard: Its shard.
        had_gradient: Whether the shard had a gradient before, to which the zeros are added.
    """

    shard: nn.Parameter
    had_gradient: bool


class _Exchange(NamedTuple):
    """An exchange of what ranks have used.

    Attributes:
        work: What ``torch.distributed`` returned for it, to wait for.
        is_used: The tensor that is exchanged. It must live until the exchange has ended.
    """

    work: Any
    is_used: Tensor


class _RanksWithUnused:
    """Counts the ranks that have unused parameters in a backward pass, without a collective.

    Such a rank counts itself in the process group's store, once per backward pass, before it joins the reduction of a
    unit with unused parameters. When its reductions have ended, every rank has joined all of them, so the count is
    final. A rank that uses all parameters, as every rank does in most trainings, does nothing.

    Args:
        runtime: All ranks.
        peers: The ranks that reduce gradients together.
    """

    def __init__(self, runtime: Runtime, peers: Runtime) -> None:
        self._peers = peers
        self._pass_number = 0
        self._is_counted = False
        self._last_key: str | None = None
        if peers.world_size > 1:
            self._store: Any = dist.distributed_c10d._get_default_store()
            # the same on all ranks, since they shard the same modules with this store
            module_number = self._store.add(f"fsdp2/modules of rank {runtime.rank}", 1)
            first_peer = min(runtime.mesh.peers(runtime.rank, GRADIENT_AXES))
            self._name = f"fsdp2/lacking/{module_number}/{first_peer}"

    def _key(self) -> str:
        return f"{self._name}/{self._pass_number}"

    def count_rank(self) -> None:
        """Count this rank. Called before it joins a reduction."""
        if not self._is_counted and self._peers.world_size > 1:
            self._store.add(self._key(), 1)
            self._is_counted = True

    def take_back(self) -> None:
        """Take this rank's count back after an exception in the backward pass, which will be run again."""
        if self._is_counted:
            self._store.add(self._key(), -1)
            self._is_counted = False

    def end_pass(self) -> bool:
        """End a backward pass.

        Returns:
            Whether all ranks have counted themselves. If this rank has not, that is known without the store.
        """
        if not self._is_counted:
            self._pass_number += 1
            return False
        key = self._key()
        self._is_counted = False
        self._pass_number += 1
        if self._peers.device.type != "cpu":
            torch.accelerator.current_stream(self._peers.device).synchronize()  # until reductions have ended
        if self._last_key is not None:  # all ranks have joined a later reduction, and read it before
            self._store.delete_key(self._last_key)
        self._last_key = key
        counted_ranks: int = self._store.add(key, 0)
        return counted_ranks == self._peers.world_size


def _has_new_gradients(group: Any) -> bool:
    """Whether each parameter of a unit has a gradient of this backward pass, and none waits from an earlier one."""
    with without_torch_function():
        for parameter in group.fsdp_params:
            if parameter._unsharded_param.grad is None or parameter.unsharded_accumulated_grad is not None:
                return False
    return True


def _pre_forward(unused_ref: weakref.ref[UnusedParameters], group_ref: weakref.ref[Any], *args: Any) -> Any:
    """Replaces ``group.pre_forward``."""
    group = group_ref()
    unused = unused_ref()
    assert group is not None  # it is the caller
    if unused is not None:
        unused.count(group)
    if not torch.is_inference_mode_enabled():
        return type(group).pre_forward(group, *args)
    with torch.inference_mode(False), torch.no_grad():  # or the gathered tensors, used again in training, were unfit
        return type(group).pre_forward(group, *args)


def _pre_backward(unused_ref: weakref.ref[UnusedParameters], group_ref: weakref.ref[Any], *args: Any) -> None:
    """Replaces ``group.pre_backward``."""
    unused = unused_ref()
    group: Any = group_ref()
    if unused is not None:
        unused.pre_backward()
    enter = vars(group).get(ENTER_UNIT)
    if enter is not None:
        enter()
    type(group).pre_backward(group, *args)


def _post_backward(unused_ref: weakref.ref[UnusedParameters], group_ref: weakref.ref[Any], *args: Any) -> None:
    """Replaces ``group.post_backward``."""
    group = group_ref()
    unused = unused_ref()
    if group is not None and unused is not None:
        unused.post_backward(group, *args)
    elif group is not None:
        type(group).post_backward(group, *args)


def _final_callback(unused_ref: weakref.ref[UnusedParameters], state_ref: weakref.ref[Any]) -> None:
    """Replaces the callback of ``fully_shard`` for the end of a backward pass."""
    state = state_ref()
    unused = unused_ref()
    if state is not None and unused is not None:
        unused.finish(state)
    elif state is not None:
        end_backward(state)


def _post_backward_without_reduction(group: Any, *args: Any) -> None:
    reduces = group.reduce_grads
    group.reduce_grads = False
    try:
        type(group).post_backward(group, *args)
    finally:
        group.reduce_grads = reduces
    group._training_state = TrainingState.IDLE  # the end of the backward pass handles it again


def _reaches_leaf() -> bool:
    """Whether the backward pass that runs adds to the gradient of a leaf, seen from the node that is running."""
    node: Any = torch._C._current_autograd_node()
    while node is not None and not hasattr(node, "variable"):
        next_nodes = [next_node for next_node, _ in node.next_functions if next_node is not None]
        node = next_nodes[0] if next_nodes else None
    return node is not None and is_accumulated(node.variable)


def finish_backward(root: FSDPModule, unused: UnusedParameters) -> None:
    """End a backward pass inside the root's forward pass, if autograd has not: reduce what is left, and reshard.

    ``fully_shard`` queues that when a gradient reaches the output of a unit whose call has ended. A backward pass that
    uses only the root's own parameters reaches none, so their gradients would never arrive at the shards. If autograd
    has ended the pass on some ranks, these don't exchange a second time what they have used.
    """
    state: Any = root._get_fsdp_state()
    if unused.is_end_due:
        unused.finish(state)
    else:
        end_backward(state)
