"""The private names of torch that this package uses, and why. Tested with torch 2.9.0, 2.13.0 and 2.15.0."""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
import torch.utils
from torch import Tensor, nn
from torch._C._profiler import _RecordFunctionFast
from torch._functorch import config as functorch_config
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState, alloc_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._ops import _math_ops, _pointwise_ops
from torch.profiler import record_function

from fsdp_core import Runtime, ShardingError, UnsupportedCapabilityError
from fsdp_core.sharding import (
    GRADIENT_AXES,
    GatheredValue,
    RefusedTransforms,
    StepGradients,
    UnitCalls,
    WrittenValues,
    copy_refusal,
    forget_writes,
    is_accumulated,
    outside_of_compilation,
    outside_transforms,
    sharded_around,
    sharded_of,
    times_written,
    without_torch_function,
)
from fsdp_core.state import gathered_modules, running_forwards

__all__ = [
    "AssignedData",
    "BudgetedCompiler",
    "GatheredWrites",
    "Gathering",
    "PartlyReduced",
    "UnusedParameters",
    "abandon_forward",
    "allow_conversions",
    "finish_backward",
    "free_written",
    "gathered_parameters",
    "has_hooks",
    "has_run",
    "is_idle",
    "is_loss_parallel",
    "is_unshardable",
    "joined_axes",
    "offloaded_parameters",
    "one_for_each_state",
    "parameters_of",
    "recomputes",
    "reduces_gradients",
    "refuse_copies",
    "resume_forward",
    "set_unreduced_gradients",
    "side_by_side",
    "speed_up",
    "take_filled",
    "take_unfrozen",
    "unreduced_gradients",
    "watch_calls",
    "without_hooks",
    "written_since",
]


def is_unshardable(parameter: nn.Parameter) -> bool:
    """Whether ``fully_shard`` can't shard integers, as before torch 2.13.

    It would let shards require gradients first, which integers can't, and gather them in the dtype that units compute
    in.

    Args:
        parameter: A parameter.
    """
    shards = "is_floating_point" in FSDPParam.init_dtype_attrs.__code__.co_names
    return not (shards or parameter.is_floating_point() or parameter.is_complex())


class Gathering:
    """The FSDP parameter groups of some units, checked after every step for parameters that are still gathered.

    ``unit.reshard()`` checks this too, but is a hundred times slower, which is noticeable for models of many blocks.

    Args:
        units: The units.
    """

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        self._groups = [group for unit in units for group in _groups(unit)]

    def reshard(self) -> None:
        """Reshard the groups that are gathered, and those that were gathered ahead and not used.

        ``unit.reshard()`` leaves the latter as they are: their next forward pass, also after a step, would use what was
        gathered before.
        """
        for group in self._groups:
            if group._all_gather_result is not None:
                group.wait_for_unshard()
            if not group.is_sharded:
                type(group).reshard(group)  # also what RecordedGraphs keeps


_SHARD, _LOCAL_TENSOR = map(operator.attrgetter, ("sharded_param", "sharded_param._local_tensor"))
_STORAGE: Any = Tensor.untyped_storage


class AssignedData:
    """Detects ``parameter.data = …``, which has no effect on a DTensor, as opposed to updates of the shard.

    torch accepts the assignment silently: it replaces the storage of the DTensor itself, which has no memory, and
    leaves the local tensor as it was. An averaged teacher that is assigned this way would never change.

    Every parameter is checked before every forward pass of the root.

    Args:
        units: The units, which together hold all parameters to check.
    """

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        self._parameters = [parameter for unit in units for parameter in _parameters(unit)]
        self._seen: list[tuple[Any, Any, Any]] = [(None, None, None)] * len(self._parameters)
        self._held: list[Any] = []
        self.check()

    def check(self) -> None:
        """Check the shards.

        Raises:
            ShardingError: A parameter's ``.data`` was assigned.
        """
        with without_torch_function():
            # without a step of Python for each: torch returns the same object for a storage as long as that is held
            held = [*map(_STORAGE, map(_SHARD, self._parameters)), *map(_LOCAL_TENSOR, self._parameters)]
        if len(held) == len(self._held) and all(map(operator.is_, held, self._held)):
            return
        self._held = held
        for index, parameter in enumerate(self._parameters):
            shard = parameter.sharded_param
            # the storage is kept alive, or another could reuse its address
            storage, local = shard.untyped_storage(), shard._local_tensor
            before, storage_before, local_before = self._seen[index]
            if before is shard and local is local_before and storage._cdata != storage_before._cdata:
                name = parameter._param_fqn or parameter._module_info.param_name
                raise ShardingError(
                    f"{name!r} was given other values by an assignment to its .data, which changes nothing in a "
                    "sharded parameter: torch silently keeps the old values.\n"
                    "Write parameter.data.copy_(values) instead, or an in-place operation under torch.no_grad(), such "
                    "as average.lerp_(parameter, 0.1)."
                )
            self._seen[index] = (shard, storage, local)


class UnusedParameters:
    """Lets ranks use different parameters of one unit, such as a layer's experts, and keeps their gradients correct.

    ``fully_shard`` reduces the gradients of a unit that exist on this rank together. If ranks have gradients of
    different parameters, their inputs to the reduce-scatter don't match: one parameter's gradient is added to another's
    if the sizes agree, and gloo aborts the process if they don't. Therefore a parameter without a gradient takes part
    with zeros, in every unit that was reached by this backward pass, or by an earlier one that did not reduce. A
    parameter that no rank has used has no gradient afterwards, as in plain torch. There can be one only if every rank
    has unused parameters; :class:`_Lacking` finds out whether, without a collective while one rank uses all. Then, and
    from then on, ranks exchange on the host which parameters they have used, once per backward pass, and only a rank
    with unused ones waits for the result.

    A unit that was called several times is reduced when the backward pass has visited it as many times, and at each
    visit after that: a function whose own backward pass runs inside of it may call the unit again. At which visit
    autograd delivers a gradient depends on the calls in which this rank has used the parameter, so ranks that reduced
    at every visit would issue different numbers of collectives.

    A backward pass may run inside a forward pass, of the root or of a unit: for an adversarial example, a penalty, or
    with manual optimization. At its end torch makes all units idle, and reshards them. The forward passes that are
    running then go on as they were (:func:`_go_on`). ``torch.autograd.grad`` adds to no parameter's gradient, so
    nothing is reduced in it.

    torch 2.13 can fill in zeros too (``set_reduce_scatter_unused_params``), but it passes them to the optimizer, which
    then applies weight decay and momentum to parameters that no rank has used.

    Args:
        units: The units, the root last; in the same order on every rank.
        runtime: The ranks.
        step: What gathered parameters show as their gradients inside a forward pass of the root.
        ended: Called after each backward pass inside a forward pass that has added to gradients.

    Attributes:
        due: Whether a backward pass inside the root's forward pass has begun whose end autograd has not reported.
        partly: The gradients that wait for the all-reduce across replicas.
        recorded: The units that the graph of a backward pass needs.
    """

    def __init__(
        self,
        units: Sequence[FSDPModule],
        runtime: Runtime,
        step: StepGradients,
        ended: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        self._peers = runtime.along(*GRADIENT_AXES)
        self._lacking = _Lacking(runtime, self._peers)
        self._exchanges = False
        self._index: dict[Any, int] = {}
        self._filled: dict[int, tuple[nn.Parameter, bool]] = {}
        self._calls: dict[Any, int] = {}
        self._visits: dict[Any, int] = {}
        self._waiting: set[Any] = set()
        self._ending = self._ended = self.due = False
        self._step, self._inside_ended = step, ended
        self._accumulates, self._task = False, -2
        self.partly = PartlyReduced()
        self._root = list(_groups(units[-1]))
        self._groups = [group for unit in units for group in _groups(unit)]
        for group in self._groups:  # by weak references, or a cycle would delay the release of memory
            for parameter in group.fsdp_params:
                self._index[parameter] = len(self._index)
            group.pre_forward = partial(_count_first, weakref.ref(self), weakref.ref(group))
            group.pre_backward = partial(_note_first, weakref.ref(self), weakref.ref(group))
            group.post_backward = partial(_fill_first, weakref.ref(self), weakref.ref(group))
        self._count = len(self._index)
        self._telling: tuple[Any, Tensor] | None = None  # held until the next one: it may still be running
        self._called_again: dict[Any, weakref.ref[Any]] = {}
        for unit in units:  # torch queues that of the unit whose output a backward pass reaches first
            state: Any = unit._get_fsdp_state()
            state._root_post_backward_final_callback = partial(_agree_last, weakref.ref(self), weakref.ref(state))
            if unit is not units[-1] and len(state._modules) == 1:
                self._called_again.update((group, weakref.ref(state)) for group in _groups_of(state))
        root_state: Any = units[-1]._get_fsdp_state()
        self._context: Any = root_state._state_ctx  # that of all units from the first call on
        self.recorded = RecordedGraphs(self._groups, weakref.ref(root_state))
        for group in self._groups:
            _follow_gathered(group, state if group in self._root else None)

    def count(self, group: Any) -> None:
        """Record a call of a unit: a backward pass visits it once per call.

        Modules that a user has sharded together are called one by one, which is one call for torch.
        """
        if group._training_state is TrainingState.FORWARD:
            return
        _carry_requires_grad(group)
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # otherwise it is a recomputation
            if self._ended:
                self._calls.clear()  # not earlier: another backward pass may visit the same calls
                self._ended = False
            self._calls[group] = self._calls.get(group, 0) + 1

    def is_interrupted(self) -> bool:
        """Whether a backward pass has begun and not ended. Asked outside of such passes."""
        return bool(self._context.post_backward_final_callback_queued)

    def begin(self) -> None:
        """Record that a backward pass begins inside the root's forward pass, for which autograd calls no hook."""
        self.due = True
        self._waiting.update(self._root)

    def pre_backward(self) -> None:
        """Record that a backward pass has reached a unit."""
        self._step.on = False
        if torch.is_grad_enabled():  # off in a backward pass, unless it was given create_graph=True
            self.recorded.begin()

    def post_backward(self, group: Any, *args: Any) -> None:
        """Reduce a unit's gradients unless the backward pass visits it again, and free its parameters.

        A unit that no forward pass has called yet has nothing to do, but torch would look for its gradients while
        micro-batches accumulate in a reduce dtype of their own, and fail.
        """
        self._step.on = False  # the pass may have reached the output of no unit
        if not all(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params):
            return
        if group.reduce_grads and not self.accumulates():
            _post_backward_without_reduction(group, *args)
            return
        if group._training_state is TrainingState.PRE_BACKWARD:
            self._visits[group] = self._visits.get(group, 0) + 1
            self._waiting.add(group)
            if (of := self._called_again.get(group)) is not None and (state := of()) is not None:
                state._training_state = TrainingState.IDLE  # torch would take another call for a recomputation
        waits = group in self._waiting or self.partly.waits(group) or any(_has_gradient(p) for p in group.fsdp_params)
        if not group.reduce_grads or not waits:
            type(group).post_backward(group, *args)
        elif self._ending or self._visits.get(group, 0) >= self._calls.get(group, 0):
            self._waiting.discard(group)
            self._fill(group)
            self.partly.check(group)
            type(group).post_backward(group, *args)
            self.partly.keep(group)
        else:
            _post_backward_without_reduction(group, *args)

    def call_in_backward(self, state: Any) -> None:
        """Record a call of a unit in a backward pass, which may be differentiated in another one inside of that.

        To torch, which takes the call for the recomputation of one that the pass has still to visit, it is no call. If
        the pass has visited the root, or modules that are sharded together, the end of the pass reduces them again.
        """
        for group in _groups_of(state):
            if state._training_state is TrainingState.PRE_BACKWARD is not group._training_state:
                group._training_state = TrainingState.IDLE
                self._waiting.add(group)

    def accumulates(self) -> bool:
        """Whether the backward pass that runs adds to gradients: ``torch.autograd.grad`` only returns some."""
        task = torch._C._current_graph_task_id()
        if not self._accumulates and task != self._task:
            for group in self._groups:
                _update_requires_grad(group)
            gathered = (p._unsharded_param for group in self._groups for p in _trainable(group))
            self._accumulates = task == -1 or any(map(is_accumulated, gathered)) or _reaches_leaf()
            self._task = task
        return self._accumulates  # also if it is one inside of this one that does

    def finish(self, state: Any) -> None:
        """End a backward pass: reduce what is pending, and agree on what was used. All ranks must call it."""
        self._step.on = False  # a pass in a hook of this one's loss may have ended, and this one have reached no unit
        accumulates, running = self.accumulates(), _running(state)
        iteration = state._state_ctx.iter_forward_root
        kept = self._groups if self.recorded else [group for one in running for group in _groups_of(one)]
        settings = [(group, group.reshard_after_backward) for group in kept]
        self._ending = True
        try:
            for group, _ in settings:
                group.reshard_after_backward = False
            _end_backward(state)
        finally:
            self._ending = False
            for group, reshards in settings:
                group.reshard_after_backward = reshards
        if accumulates:
            self._agree()
        else:
            self._ended = True
            self._visits.clear()
        self._accumulates = False
        if running:
            _go_on(running, iteration)
            self.show_gradients()
            if accumulates and (call := self._inside_ended()) is not None:
                call()
        self.recorded.end(is_last=not running)

    def show_gradients(self) -> None:
        """Let parameters that are gathered inside a forward pass of the root show the gradients of their shards."""
        for group in self._groups:
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    self._step.follow(parameter._unsharded_param, parameter.sharded_param, is_part=False)
        self._step.on = True

    def expect(self) -> None:
        """Reduce all units at the next opportunity: they hold gradients that came from no backward pass."""
        self._waiting.update(self._groups)

    def _fill(self, group: Any) -> None:
        """Give zero gradients to the parameters that this rank has not used."""
        if not self._filled and group.all_reduce_grads and _has_new_gradients(group):
            return
        trainable = _trainable(group)
        without = [p for p in trainable if not _has_gradient(p)]
        for parameter in trainable if self._filled else ():
            if parameter not in without:
                self._filled.pop(self._index[parameter], None)
        for parameter in without:
            gathered = parameter._unsharded_param
            gathered.grad = torch.zeros_like(gathered, dtype=getattr(gathered, "grad_dtype", None))
            shard = parameter.sharded_param
            if group.all_reduce_grads and parameter not in self.partly.used:
                self._filled.setdefault(self._index[parameter], (shard, shard.grad is None))
                if not self._exchanges:
                    self._lacking.tell()
        if not group.all_reduce_grads:
            self.partly.used.update(p for p in trainable if p not in without)
        # gradients of earlier micro-batches are in the reduce dtype, and all must share one dtype
        dtypes = {p.unsharded_accumulated_grad.dtype for p in trainable if p.unsharded_accumulated_grad is not None}
        for parameter in trainable if dtypes else ():
            if parameter.unsharded_accumulated_grad is None:
                _set_accumulated(parameter, parameter._unsharded_param.grad.to(next(iter(dtypes))))
                parameter._unsharded_param.grad = None

    def _agree(self) -> None:
        """Remove the zero gradients of parameters that no rank has used."""
        filled, self._filled, self._ended, self.due = self._filled, {}, True, False
        self._visits.clear()
        if not any(group.reduce_grads and group.all_reduce_grads for group in self._groups):
            return
        self.partly.used.clear()
        everywhere = self._lacking.end()
        self._exchanges = self._exchanges or everywhere
        if not self._exchanges and self._peers.world_size > 1:
            return  # one rank has used all parameters
        used = torch.ones(self._count, dtype=torch.uint8)
        used[list(filled)] = 0
        if self._peers.world_size > 1:
            # on the host, or the step would wait for the device; on the device if no host backend is available
            on_host = self._peers.device.type == "cpu" or "cpu" in dist.get_backend_config()
            used = used if on_host else used.to(self._peers.device)
            group = self._peers.process_group
            self._telling = dist.all_reduce(used, dist.ReduceOp.MAX, group=group, async_op=True), used
        if not filled:
            return  # a rank that has used everything informs the others, and needs no result
        if self._telling is not None:
            self._telling[0].wait()
        for index, (shard, had_none) in filled.items():
            if had_none and not used[index]:
                shard.grad = None

    def forget(self) -> None:
        """Reset, whatever an exception has interrupted."""
        self._calls.clear()
        self._visits.clear()
        self._waiting.clear()
        for parameter in (parameter for group in self._groups for parameter in group.fsdp_params):
            if _has_gradient(parameter):
                _set_accumulated(parameter, None)
                parameter._unsharded_param.grad = None
        self._lacking.take_back()
        self.partly.forget()
        self.recorded.release()
        self._filled, self.due, self._accumulates = {}, False, False

    @contextmanager
    def all_reduced(self, root: FSDPModule) -> Iterator[None]:
        """A context in which the shards have the gradients that wait for an all-reduce. All ranks must enter it.

        It ends the accumulation as a backward pass that reaches no parameter would, and takes that back on exit.
        """
        waiting = self.partly.take()
        if not any(self._peers.gather_objects(bool(waiting))):
            yield
            return
        used, state = set(self.partly.used), root._get_fsdp_state()
        shards = [parameter.sharded_param for group in self._groups for parameter in group.fsdp_params]
        before = [(shard, shard.grad) for shard in shards]
        for shard, grad in before:
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
            for shard, grad in before:
                shard.grad = grad
            self.partly.put_back(waiting, used)


class RecordedGraphs:
    """Keeps units gathered for backward passes that record their own graph, as with ``create_graph=True``.

    That graph holds the parameters, and reaches none of the unit's outputs when it is differentiated, where
    ``fully_shard`` would gather: it would compute with memory that was freed. So all units stay gathered from such a
    pass on, until the end of the next one that records nothing. The end of one that reaches no output either is queued
    by hooks of the parameters.

    Args:
        groups: The parameter groups of all units.
        of_root: The root's state.

    Attributes:
        has_freed: Whether parameters were freed that such a graph may still hold.
    """

    def __init__(self, groups: Sequence[Any], of_root: weakref.ref[Any]) -> None:
        self._groups, self._of_root = groups, of_root
        self._hooks: dict[Any, Any] = {}
        self._kept: set[Any] = set()
        self._records = self._exists = self.has_freed = False
        for group in groups:
            group.reshard = partial(_reshard_unless_kept, weakref.ref(self), weakref.ref(group))

    def __bool__(self) -> bool:
        return self._exists

    def begin(self) -> None:
        """Record that the backward pass that runs records its own graph."""
        self._records = self._exists = True
        for parameter in (p for group in self._groups for p in _trainable(group)):
            if parameter in self._hooks or not parameter._unsharded_param.requires_grad:
                continue
            end = partial(_end_anyway, self._of_root)
            self._hooks[parameter] = _register_with_gathered(parameter._unsharded_param, end)

    def end(self, *, is_last: bool) -> None:
        """End a backward pass.

        Args:
            is_last: Whether no forward pass goes on after it.
        """
        if is_last and not self._records:
            self.release()
        self._records = False

    def keep(self, group: Any) -> bool:
        """Whether a unit that torch would reshard is kept."""
        if self._exists and group._training_state in (TrainingState.FORWARD, TrainingState.POST_BACKWARD):
            self._kept.add(group)
            return True
        return False

    def release(self) -> None:
        """Reshard what was kept. A graph that still holds it raises when it is differentiated."""
        self._records = self._exists = False
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        kept, self._kept = self._kept, set()
        for group in kept:
            if not group.is_sharded:
                self.has_freed = True
                group.reshard()
                gathered = [parameter._unsharded_param for parameter in group.fsdp_params]
                increment_version(gathered)
                for each in gathered:
                    forget_writes(each)


def _reshard_unless_kept(recorded: weakref.ref[RecordedGraphs], of: weakref.ref[Any]) -> None:
    own = recorded()
    group: Any = of()
    if own is None or not own.keep(group):
        type(group).reshard(group)


class _Lacking:
    """Whether every rank has unused parameters in a backward pass, found out without a collective.

    A rank that has some counts itself, once per backward pass, in the process group's store, before it joins the
    reduction of the unit that they are in. When its own reductions have ended, every rank has joined all of them, so
    the count is final. A rank that uses all parameters, as in most trainings every rank does, does nothing.

    Args:
        runtime: All ranks.
        peers: Those that reduce gradients together.
    """

    def __init__(self, runtime: Runtime, peers: Runtime) -> None:
        self._peers = peers
        self._pass, self._told = 0, False
        self._before: str | None = None
        if peers.world_size > 1:
            self._store: Any = dist.distributed_c10d._get_default_store()
            # the same on all ranks, since they shard the same modules with this store
            number = self._store.add(f"fsdp2/modules of rank {runtime.rank}", 1)
            self._name = f"fsdp2/lacking/{number}/{min(runtime.mesh.peers(runtime.rank, GRADIENT_AXES))}"

    def _key(self) -> str:
        return f"{self._name}/{self._pass}"

    def tell(self) -> None:
        """Count this rank. Called before it joins a reduction."""
        if not self._told and self._peers.world_size > 1:
            self._store.add(self._key(), 1)
            self._told = True

    def take_back(self) -> None:
        """Forget a backward pass that an exception has ended, and that is run again."""
        if self._told:
            self._store.add(self._key(), -1)
            self._told = False

    def end(self) -> bool:
        """End a backward pass: whether all ranks have counted themselves."""
        told, self._told = self._told, False
        key = self._key() if told else None
        self._pass += 1
        if key is None:
            return False
        if self._peers.device.type != "cpu":
            torch.get_device_module(self._peers.device).current_stream().synchronize()  # it waits for reductions
        if self._before is not None:  # all ranks have read it: they have joined a later reduction
            self._store.delete_key(self._before)
        self._before = key
        return bool(self._store.add(key, 0) == self._peers.world_size)


class PartlyReduced:
    """Gradients that are reduced within a replica and wait for the all-reduce across replicas.

    ``fully_shard`` keeps them per unit in one flat tensor, in the order of the parameters that had gradients, without
    saying which these were. It would add the flat tensor of other parameters to it, and leaves it behind for a later
    step if the last backward pass of an accumulation does not reach the unit.

    Attributes:
        used: The parameters for which this rank has computed a gradient since the last all-reduce.
    """

    def __init__(self) -> None:
        self.used: set[Any] = set()
        self._members: dict[Any, list[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._members)

    def waits(self, group: Any) -> bool:
        """Whether a unit must take part in this all-reduce even if no backward pass reaches it."""
        return group.all_reduce_grads and group in self._members

    def check(self, group: Any) -> None:
        """Refuse to add gradients of other parameters than those that wait.

        Raises:
            ShardingError: Parameters of the unit were frozen or unfrozen since the last micro-batch.
        """
        members = self._members.get(group)
        if members is not None and (changed := set(_trainable(group)).symmetric_difference(members)):
            name = min(parameter._param_fqn or parameter._module_info.param_name for parameter in changed)
            raise ShardingError(
                f"{name!r} was frozen or unfrozen between two micro-batches of one optimizer step, whose gradients "
                "wait for the all-reduce across replicas: sync_each_batch='within_replica' keeps them per unit in one "
                "tensor.\nFreeze it after the step or optimizer.zero_grad(), or write sync_each_batch=False or True."
            )

    def keep(self, group: Any) -> None:
        """Record what waits after a unit was reduced."""
        if group._partial_reduce_output is None:
            self._members.pop(group, None)
        else:
            self._members[group] = _trainable(group)

    def zero(self, shards: Collection[int]) -> None:
        """Give up the gradients of some parameters.

        Args:
            shards: The ids of their shards.
        """
        self.used = {parameter for parameter in self.used if id(parameter.sharded_param) not in shards}
        for group, members in list(self._members.items()):
            sizes = [parameter.padded_sharded_param_size.numel() for parameter in members]
            for parameter, part in zip(members, group._partial_reduce_output.split(sizes), strict=True):
                if id(parameter.sharded_param) in shards:
                    part.zero_()
            if all(id(parameter.sharded_param) in shards for parameter in members):
                group._partial_reduce_output = None
                del self._members[group]

    def forget(self) -> None:
        """Give up all of them."""
        for group in self._members:
            group._partial_reduce_output = None
        self._members.clear()
        self.used.clear()

    def take(self) -> dict[Any, tuple[list[Any], Tensor]]:
        """All that waits, for :meth:`put_back`."""
        return {group: (members, group._partial_reduce_output) for group, members in self._members.items()}

    def put_back(self, waiting: Mapping[Any, tuple[list[Any], Tensor]], used: set[Any]) -> None:
        """Let gradients wait again that were taken."""
        self.used = used
        for group, (members, flat) in waiting.items():
            self._members[group], group._partial_reduce_output = members, flat


def _trainable(group: Any) -> list[Any]:
    """The parameters of a unit that can have a gradient: all of them get one in :class:`UnusedParameters`."""
    return [p for p in group.fsdp_params if hasattr(p, "_unsharded_param") and p.sharded_param.requires_grad]


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks are registered on the module itself."""
    kinds: Any = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(kinds) or bool(module._state_dict_hooks or module._load_state_dict_pre_hooks)


class BudgetedCompiler:
    """A backend of :func:`torch.compile` that keeps a share of the activations.

    torch takes the share from a setting of the process when it compiles. It would also use graphs again that were
    compiled with another share, for another model of the same classes, if the backend were the same object.

    Args:
        share: The share, from 0 to 1.
        backend: The name of the backend that compiles.
        mode: As in :func:`torch.compile`, for inductor.
        options: As in :func:`torch.compile`, for inductor.
        dynamic: As in :func:`torch.compile`.
    """

    def __init__(self, share: float, backend: str = "inductor", *, mode: Any, options: Any, dynamic: Any) -> None:
        self._share = share
        if backend == "inductor":
            self._compile: Any = torch._TorchCompileInductorWrapper(mode, options, dynamic)
        else:
            self._compile = torch._TorchCompileWrapper(backend, mode, options, dynamic)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=self._share):
            return self._compile(graph, inputs)


_GRADIENT, _WAITING = map(operator.attrgetter, ("_unsharded_param.grad", "unsharded_accumulated_grad"))


def _has_new_gradients(group: Any) -> bool:
    """Whether each parameter of a unit has a gradient of this backward pass, and none waits from an earlier one."""
    with without_torch_function():
        gradients = list(map(_GRADIENT, group.fsdp_params))
    waiting = map(_WAITING, group.fsdp_params)
    return all(map(operator.is_not, gradients, repeat(None))) and all(map(operator.is_, waiting, repeat(None)))


def _has_gradient(parameter: Any) -> bool:
    gathered = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None)


def _count_first(unused: weakref.ref[UnusedParameters], of: weakref.ref[Any], *args: Any) -> Any:
    group, counting = of(), unused()
    assert group is not None  # it is the caller
    if counting is not None:
        counting.count(group)
    if not torch.is_inference_mode_enabled():
        return type(group).pre_forward(group, *args)
    with torch.inference_mode(False), torch.no_grad():  # what is gathered now is gathered again in training
        return type(group).pre_forward(group, *args)


def _note_first(unused: weakref.ref[UnusedParameters], of: weakref.ref[Any], *args: Any) -> None:
    own = unused()
    group: Any = of()
    if own is not None:
        own.pre_backward()
    if (enter := vars(group).get(_ENTER)) is not None:
        enter()
    type(group).pre_backward(group, *args)


def _fill_first(unused: weakref.ref[UnusedParameters], of: weakref.ref[Any], *args: Any) -> None:
    group, filling = of(), unused()
    if group is not None and filling is not None:
        filling.post_backward(group, *args)
    elif group is not None:
        type(group).post_backward(group, *args)


def _agree_last(unused: weakref.ref[UnusedParameters], of: weakref.ref[Any]) -> None:
    state, agreeing = of(), unused()
    if state is not None and agreeing is not None:
        agreeing.finish(state)
    elif state is not None:
        _end_backward(state)


def _post_backward_without_reduction(group: Any, *args: Any) -> None:
    reduces, group.reduce_grads = group.reduce_grads, False
    try:
        type(group).post_backward(group, *args)
    finally:
        group.reduce_grads = reduces
    group._training_state = type(group._training_state).IDLE  # the end of the backward pass handles it again


def _reaches_leaf() -> bool:
    """Whether the backward pass that runs adds to the gradient of a leaf that the running node leads to."""
    node: Any = torch._C._current_autograd_node()
    while node is not None and not hasattr(node, "variable"):
        node = next((after for after, _ in node.next_functions if after is not None), None)
    return node is not None and is_accumulated(node.variable)


def _running(state: Any) -> list[Any]:
    """The states of the modules whose forward pass is running."""
    states = state._state_ctx.all_states
    return [one for one in states if one._training_state.name == "FORWARD" and len(one._modules) == 1]


def _go_on(states: Sequence[Any], iteration: Any) -> None:
    """Let forward passes go on that a backward pass inside them has ended for torch.

    Args:
        states: The states of their modules.
        iteration: The state of the module that was called first.
    """
    for state in states:
        for group in _groups_of(state):
            group.unshard()
            group.wait_for_unshard()
            group._training_state = type(group._training_state).FORWARD
        state._training_state = type(state._training_state).FORWARD
        state._state_ctx.iter_forward_root = iteration


def resume_forward(root: FSDPModule) -> None:
    """Let the root's forward pass go on after a backward pass or an optimizer's step by hand."""
    state: Any = root._get_fsdp_state()
    _go_on([state], state)


def is_idle(root: FSDPModule) -> bool:
    """Whether neither a forward nor a backward pass of the root runs."""
    state: Any = root._get_fsdp_state()
    return bool(state._training_state.name == "IDLE")


_SEEN, _WRITTEN = "_fsdp_fsdp2_requires_grad", "_fsdp_fsdp2_times_written"
_OUTDATED = "_fsdp_fsdp2_outdated"
_KEEP, _ENTER = "_fsdp_fsdp2_keep", "_fsdp_fsdp2_enter"
_PLACES, _COPIED = "_fsdp_fsdp2_places", "_fsdp_fsdp2_copied"

#: Whether shards, and what modules hold instead by state of a unit, require gradients.
_REQUIRED = operator.attrgetter("sharded_param.requires_grad")
_HELD = {
    ShardedState.UNSHARDED: operator.attrgetter("_unsharded_param.requires_grad"),
    ShardedState.SHARDED_POST_FORWARD: operator.attrgetter("_sharded_post_forward_param.requires_grad"),
}


def _follow_gathered(group: Any, root: Any | None) -> None:
    """Follow what a step does to a unit's gathered parameters.

    Args:
        group: The unit's parameter group.
        root: The root's state, if the unit is the root.
    """
    of_root = None if root is None else weakref.ref(root)
    vars(group)[_PLACES] = _places(group)
    group._to_unsharded = partial(_note_gathered, weakref.ref(group), of_root)
    group._to_sharded = partial(_carry_and_free, weakref.ref(group), "_to_sharded")
    if _is_of_one_rank(group):
        group.wait_for_unshard = partial(_wait_for_copies, weakref.ref(group))
    group._to_sharded_post_forward = partial(_carry_and_free, weakref.ref(group), "_to_sharded_post_forward")


#: What torch's methods do for each parameter that :func:`_show_at_once` and :func:`_free_at_once` do in one loop.
_DONE_AT_ONCE = {
    FSDPParam.to_unsharded: {
        *("set_requires_grad_if_needed", "sharded_param", "_unsharded_param", "_setattr_on_modules", "sharded_state"),
        *("ShardedState", "SHARDED_POST_FORWARD", "_sharded_post_forward_param", "_sharded_post_forward_param_data"),
        "UNSHARDED",
    },
    FSDPParam.to_sharded: {
        *("_setattr_on_modules", "sharded_param", "free_unsharded_param", "ShardedState", "SHARDED", "sharded_state"),
    },
    FSDPParam.free_unsharded_param: {
        *("compiled_autograd_enabled", "_unsharded_param", "untyped_storage", "resize_"),
        *("itertools", "chain", "all_gather_outputs", "_unsharded_inner_tensors", "free_storage"),
    },
}


def _places(group: Any) -> list[tuple[Any, list[tuple[nn.Module, str]]]] | None:
    """A unit's parameters, each with the modules that hold it and its names there; ``None`` if torch is to replace it.

    torch looks each time whether a module's class sets attributes in a way of its own, which is settled when the module
    is sharded.
    """
    if any(not does >= set(method.__code__.co_names) for method, does in _DONE_AT_ONCE.items()):
        return None
    places = []
    for parameter in group.fsdp_params:
        of = parameter._module_info
        held_by = [(of.module, of.param_name), *zip(of.shared_modules, of.shared_param_names, strict=True)]
        kinds: list[Any] = [type(module) for module, _ in held_by]
        sets_as_all = all(kind.__setattr__ is nn.Module.__setattr__ for kind in kinds)
        if not sets_as_all or type(parameter) is not FSDPParam:
            return None
        places.append((parameter, held_by))
    return places


#: Whether autograd's graphs are being compiled, where torch frees in another way. Not from torch 2.13 or so on.
_compiles_autograd: Callable[[], bool] = getattr(_fsdp_common, "compiled_autograd_enabled", lambda: False)


def _is_shown_at_once(group: Any) -> bool:
    """Whether a unit is sharded that was gathered before, and of which nothing is unusual."""
    own = vars(group)
    places = own[_PLACES]
    was_gathered = places and _SEEN in own and "to_unsharded" not in vars(places[0][0])
    return was_gathered and group._sharded_state is ShardedState.SHARDED


def _show_at_once(group: Any) -> bool:
    """Let modules hold the gathered parameters of a unit, in one loop. Nothing if there is more to do than that."""
    if not _is_shown_at_once(group):
        return False
    own = vars(group)
    places = own[_PLACES]
    with without_torch_function():
        required = list(map(_REQUIRED, group.fsdp_params))
        if required != list(map(_HELD[ShardedState.UNSHARDED], group.fsdp_params)):
            return False
    for parameter, held_by in places:
        for module, name in held_by:
            module._parameters[name] = parameter._unsharded_param
        parameter.sharded_state = ShardedState.UNSHARDED
    group._sharded_state = ShardedState.UNSHARDED
    own[_SEEN] = required
    return True


def _free_at_once(group: Any) -> bool:
    """Let modules hold the shards of a unit, and free what is gathered, in one loop. Otherwise nothing."""
    places = vars(group)[_PLACES]
    if not places or group._sharded_state is not ShardedState.UNSHARDED or _compiles_autograd():
        return False
    for parameter, held_by in places:
        for module, name in held_by:
            module._parameters[name] = parameter.sharded_param
        for tensor in (*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors):
            storage = tensor.untyped_storage()
            if storage.size():
                storage.resize_(0)
        parameter.sharded_state = ShardedState.SHARDED
    group._sharded_state = ShardedState.SHARDED
    return True


def _is_of_one_rank(group: Any) -> bool:
    """Whether torch gathers a unit by a copy of each parameter, since it is sharded over no other rank."""
    copies = {"all_gather_inputs", "init_all_gather_outputs", "alloc_storage", "copy_"}
    waits = inspect.unwrap(type(group).wait_for_unshard)
    return copies <= set(waits.__code__.co_names) and getattr(group.mesh_info, "shard_mesh_size", 1) == 1


def _wait_for_copies(of: weakref.ref[Any]) -> None:
    """Gather a unit that is sharded over no other rank: by one copy of all parameters, not two kernels for each."""
    group: Any = of()
    if group._all_gather_result is None or not _copy_at_once(group):
        type(group).wait_for_unshard(group)
        return
    vars(group)[_COPIED], group.fsdp_params = group.fsdp_params, []
    try:
        type(group).wait_for_unshard(group)  # what else it does: events, and _note_gathered()
    finally:
        _take_copied(group)


def _copy_at_once(group: Any) -> bool:
    """Copy the shards of a unit to what is gathered of it, in its dtype. Nothing if that is not all there is to do."""
    if not _is_shown_at_once(group) or _compiles_autograd() or torch._C._functorch.maybe_current_level() is not None:
        return False
    outputs, shards = [], []
    for parameter in group.fsdp_params:
        is_extended = hasattr(parameter.sharded_param._local_tensor, "fsdp_pre_all_gather")
        if is_extended or parameter.offload_to_cpu or len(parameter.all_gather_outputs) != 1:
            return False
        outputs.append(parameter.all_gather_outputs[0])
        shards.append(parameter._sharded_param_data)
    for output in outputs:
        alloc_storage(output)
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(outputs)):
        torch._foreach_copy_(outputs, shards)
    return True


def _take_copied(group: Any) -> None:
    if (parameters := vars(group).pop(_COPIED, None)) is not None:
        group.fsdp_params = parameters


def _note_gathered(of: weakref.ref[Any], of_root: weakref.ref[Any] | None) -> None:
    group: Any = of()
    _take_copied(group)
    _carry_requires_grad(group)
    if not _show_at_once(group):
        type(group)._to_unsharded(group)
        if of_root is not None and _SEEN not in vars(group):
            for parameter in group.fsdp_params:
                gathered = parameter._unsharded_param
                if gathered.is_floating_point() or gathered.is_complex():
                    required = gathered.requires_grad
                    with outside_transforms():
                        gathered.requires_grad_(True)  # a hook can't be placed otherwise
                        _register_with_gathered(gathered, partial(_end_inside, of_root))
                        gathered.requires_grad_(required)
        vars(group)[_SEEN] = list(map(_HELD[ShardedState.UNSHARDED], group.fsdp_params))
    _follow_written(group)


_TIMES_WRITTEN = operator.attrgetter("sharded_param._version", "sharded_param._local_tensor._version")


def _times_written(group: Any) -> list[tuple[int, int]]:
    """How often each shard of a unit was written to: by operations on the DTensor, and on what it holds."""
    try:
        return list(map(_TIMES_WRITTEN, group.fsdp_params))
    except RuntimeError:  # of inference tensors, whose writes nobody counts
        return []


def _follow_written(group: Any) -> None:
    """Count writes to shards as writes to what is gathered of them now, after it was gathered from others before.

    A graph that has saved that raises in torch, as in one process, instead of computing with other values.
    """
    attributes = vars(group)
    before, now = attributes.get(_WRITTEN), _times_written(group)
    if now == before:
        return
    attributes[_WRITTEN] = now
    if before:
        written = [p for p, one, other in zip(group.fsdp_params, before, now, strict=False) if one != other]
        gathered = [parameter._unsharded_param for parameter in written]
        increment_version(gathered)
        for each in gathered:
            if (value := getattr(each, "_fsdp_value", None)) is not None:
                value.times += 1  # no write of the user's that the shards lack
        attributes[_OUTDATED] = written


def gathered_parameters(units: Iterable[FSDPModule]) -> list[Tensor]:
    """What units gather, and have gathered once, whether or not it has memory now."""
    parameters = (parameter for unit in units for parameter in _parameters(unit))
    return [parameter._unsharded_param for parameter in parameters if hasattr(parameter, "_unsharded_param")]


def written_since(unit: FSDPModule, numel: int, times: int) -> Iterator[nn.Parameter]:
    """The shards of a unit that were written to between its last two all-gathers of different values.

    Args:
        unit: The unit.
        numel: The number of elements of the whole parameter.
        times: How often what is gathered was written to.
    """
    for group in _groups(unit):
        for parameter in vars(group).get(_OUTDATED, ()):
            gathered = parameter._unsharded_param
            if gathered.numel() == numel and times_written(gathered) == times:
                yield parameter.sharded_param


def free_written(unit: FSDPModule, recorded: RecordedGraphs) -> bool:
    """Free a unit whose shards were written to since it was gathered: it still is, or is sharded over fewer ranks.

    A graph that needs what was gathered raises when it is differentiated, as it does in plain torch.

    Args:
        unit: The unit.
        recorded: What keeps units gathered for a graph.

    Returns:
        Whether one was freed.
    """
    freed = False
    for group in _groups(unit):
        before, now = vars(group).get(_WRITTEN), _times_written(group)
        if group.is_sharded or before is None or now == before:
            continue
        recorded.release()
        group._to_sharded()  # reshard() does nothing in a forward pass of a unit that stays gathered after it
        freed = True
    return freed


def _register_with_gathered(gathered: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Register a hook of what is gathered: the method of the tensor itself registers the user's with its shard."""
    register: Any = Tensor.register_post_accumulate_grad_hook
    return register(gathered, hook)


def _end_inside(of: weakref.ref[Any], gathered: Tensor) -> None:
    """Let torch end a backward pass inside the root's forward pass that reaches the output of no unit."""
    state = of()
    if state is not None and state._training_state.name == "FORWARD":
        state._register_root_post_backward_final_callback()


def _end_anyway(of: weakref.ref[Any], gathered: Tensor) -> None:
    """Let torch end a backward pass that reaches parameters and may reach no output."""
    if (state := of()) is not None:
        state._register_root_post_backward_final_callback()


def _carry_and_free(of: weakref.ref[Any], name: str) -> None:
    group: Any = of()
    _carry_requires_grad(group)
    if (keep := vars(group).get(_KEEP)) is not None:
        keep()
    if name != "_to_sharded" or not _free_at_once(group):
        getattr(type(group), name)(group)
        if name == "_to_sharded_post_forward" and _FORGETS_FROZEN:
            for parameter in group.fsdp_params:
                parameter._sharded_post_forward_param.requires_grad_(parameter.sharded_param.requires_grad)


#: Whether shards over fewer ranks, which modules hold after the forward pass, all require gradients, as before torch
#: 2.13 or so: the frozen ones too, which :func:`_carry_requires_grad` would take for unfrozen.
_FORGETS_FROZEN = "requires_grad" not in FSDPParam.to_sharded_post_forward.__code__.co_names


def _carry_requires_grad(group: Any) -> None:
    """Copy ``requires_grad`` to shards from gathered parameters whose own was changed since they were gathered.

    ``fully_shard`` copies it from the shard when it gathers, and never back: a unit that stays gathered, as the last
    one and the root do, or sharded over fewer ranks, would forget that it was unfrozen.
    """
    seen, state = vars(group).get(_SEEN), group._sharded_state
    if not seen or state is ShardedState.SHARDED:
        return
    with without_torch_function():  # a method of the parameters' class, if they are of a subclass, is not asked for
        now = list(map(_HELD[state], group.fsdp_params))
    if now == seen:
        return
    for parameter, before, required in zip(group.fsdp_params, seen, now, strict=True):
        if required != before:
            parameter.sharded_param.requires_grad_(required)
    vars(group)[_SEEN] = now


def _take_requires_grad(unit: FSDPModule) -> None:
    """Let what a unit still has gathered, and what its next call computes with, be frozen as its shards are now."""
    for group in _groups(unit):
        if group.is_unsharded:
            _carry_requires_grad(group)
            _follow_shards(group)


def _update_requires_grad(group: Any) -> None:
    """Let the gathered parameters of a unit and its shards agree on ``requires_grad``, whatever was changed last.

    A parameter that was frozen for a call and is unfrozen has a frozen gathered parameter until it is gathered again.
    """
    _carry_requires_grad(group)
    if group.is_unsharded:
        _follow_shards(group)
        return
    try:
        with without_torch_function():
            if list(map(_REQUIRED, group.fsdp_params)) == list(map(_HELD[ShardedState.UNSHARDED], group.fsdp_params)):
                return
    except AttributeError:  # of one that was never gathered
        pass
    for parameter in _trainable(group):
        if not parameter._unsharded_param.requires_grad:
            parameter._unsharded_param.requires_grad_(True)


def _follow_shards(group: Any) -> None:
    """Let what a unit has gathered be frozen and unfrozen as its shards were, which modules show between passes."""
    seen, required = vars(group).get(_SEEN), list(map(_REQUIRED, group.fsdp_params))
    if seen is None or required == seen:
        return
    for parameter, requires in zip(group.fsdp_params, required, strict=True):
        parameter._unsharded_param.requires_grad_(requires)
    vars(group)[_SEEN] = required


def finish_backward(root: FSDPModule, unused: UnusedParameters) -> None:
    """Do what ``fully_shard`` does at the end of a backward pass: reduce what is left, and reshard.

    ``fully_shard`` registers this as a callback when a gradient reaches the output of a unit that has run forward. A
    backward pass inside the root's forward pass that uses only the root's own parameters reaches no such output, so
    their gradients would never arrive at the shards. A second call has no effect: ranks exchange what they have used
    only once, even if autograd has run the callback on some of them.
    """
    state: Any = root._get_fsdp_state()
    if unused.due:
        unused.finish(state)
    else:
        _end_backward(state)


def _end_backward(state: Any) -> None:
    """Call the callback that ``fully_shard`` registers for the end of a backward pass.

    From torch 2.15 on the callback expects a mode that its registration sets, and clears it; set here if missing.
    """
    context = state._state_ctx
    if getattr(context, "manual_backward_finalization_active", False) is None:
        context.manual_backward_finalization_active = context.manual_backward_finalization
    type(state)._root_post_backward_final_callback(state)


def take_unfrozen(unit: FSDPModule) -> None:
    """Let a unit that was entirely frozen reduce gradients in the right dtype from now on.

    ``fully_shard`` chooses the dtype at the first forward pass, from the parameters that are trainable then. A unit
    without any gets no dtype, and under mixed precision its first backward pass after unfreezing fails.
    """
    for group in _groups(unit):
        chosen = getattr(group, "_orig_dtype", None) is not None
        if not chosen and any(p.sharded_param.requires_grad for p in group.fsdp_params):
            group._init_mp_dtypes()


class GatheredWrites:
    """Keeps what users write to a unit's parameters while they are gathered: it goes to the shards when they are freed.

    Args:
        unit: The unit.
        root: The root.
        names: What the user calls its parameters.
        values: Gets what was written.

    Attributes:
        is_of_root: Whether the unit is the root.
        stays_gathered: Whether it is another that stays gathered, or sharded over fewer ranks, between its forward and
            its backward pass.
    """

    def __init__(
        self, unit: FSDPModule, root: FSDPModule, names: Mapping[nn.Parameter, str], values: WrittenValues
    ) -> None:
        self._values = values
        self._gathered = [(p, GatheredValue(names[p.sharded_param])) for p in _parameters(unit)]
        self._parameters = [parameter for parameter, _ in self._gathered]
        self._places = [parameter._module_info for parameter in self._parameters]
        for parameter, value in self._gathered:
            value.shard = partial(_shard_of, weakref.ref(parameter))
        own = weakref.ref(self)
        for index, (parameter, _) in enumerate(self._gathered):
            # by weak references, or a cycle would delay the release of memory
            parameter.to_unsharded = partial(_follow_after, own, weakref.ref(parameter), index)
        self._by_group: list[tuple[Any, list[Any], list[GatheredValue]]] = []
        values_of = dict(self._gathered)
        for index, group in enumerate(_groups(unit)):
            self._by_group.append((group, list(group.fsdp_params), [values_of[p] for p in group.fsdp_params]))
            vars(group)[_KEEP] = partial(_keep_before, own, index)
        module = cast("nn.Module", unit)
        self.is_of_root = unit is root
        self.stays_gathered = not self.is_of_root and any(
            not group._reshard_after_forward or group._use_post_forward_mesh for group in _groups(unit)
        )
        self._kept = [] if unit is root else [group for group in _groups(unit) if not group._reshard_after_forward]
        for group in self._kept:
            vars(group)[_ENTER] = partial(_enter_before, own)
        if self._kept:
            module.register_forward_hook(partial(_leave, own))

    def check_own(self) -> None:
        """Refuse a call with other parameters than the unit's own."""
        held = [place.module._parameters.get(place.param_name) for place in self._places]
        if all(map(operator.is_, held, map(_SHARD, self._parameters))):
            return
        for (parameter, value), other in zip(self._gathered, held, strict=True):
            if other is not parameter.sharded_param:
                known = (getattr(parameter, name, None) for name in ("_unsharded_param", "_sharded_post_forward_param"))
                value.check_own(other, *known)

    def enter(self) -> None:
        """Take parameters back for the unit, at the beginning of a pass, or to free them."""
        for parameter, value in self._gathered if self._kept else ():
            if hasattr(parameter, "_unsharded_param"):
                value.enter(parameter._unsharded_param)

    def leave(self) -> None:
        """End one, after which its parameters stay gathered."""
        for group in self._kept:
            for parameter, value in self._gathered:
                if parameter not in group.fsdp_params or parameter.sharded_state is not ShardedState.UNSHARDED:
                    continue
                if not isinstance(parameter._unsharded_param, DTensor):  # tensor parallelism's meet others anyway
                    let_go = partial(_let_go, weakref.ref(group), weakref.ref(parameter))
                    value.leave(parameter._unsharded_param, let_go)

    def follow(self, index: int) -> None:
        """Follow a parameter that was gathered for the first time. The object is the same from now on."""
        parameter, value = self._gathered[index]
        del parameter.to_unsharded
        value.follow(parameter._unsharded_param)

    def keep(self, group: int | None = None) -> None:
        """Keep what was written until now.

        Args:
            group: The index of the only group of parameters to look at.
        """
        for own, parameters, values in self._by_group[slice(None) if group is None else slice(group, group + 1)]:
            if not parameters or parameters[0].sharded_state is not ShardedState.UNSHARDED:
                continue  # all of a group are in one state
            if _is_unwritten(parameters, values):
                continue
            for parameter, value in zip(parameters, values, strict=True):
                if value.is_written(parameter._unsharded_param):
                    self._keep_of(parameter, value)
            if _WRITTEN in vars(own):
                vars(own)[_WRITTEN] = _times_written(own)  # by what is gathered, which need not be gathered again

    def _keep_of(self, parameter: Any, value: GatheredValue) -> None:
        gathered = parameter._unsharded_param
        is_counted = value.is_counted(times_written(gathered))
        value.taken(gathered)
        whole = gathered._local_tensor if isinstance(gathered, DTensor) else gathered
        shard = parameter.sharded_param._local_tensor
        # of a part that tensor parallelism has left to this rank, ranks compare the name
        shown = whole.new_zeros(1) if isinstance(gathered, DTensor) else whole
        value.keep(_own_part(parameter, whole), shard, shown, self._values, is_counted=is_counted)


_VERSION = operator.attrgetter("_unsharded_param._version")
_TIMES, _IS_NOTED = operator.attrgetter("times"), operator.attrgetter("is_noted")


def _is_unwritten(parameters: list[Any], values: list[GatheredValue]) -> bool:
    """Whether none of a group's gathered parameters can have been written to, without a call of Python for each."""
    try:
        with without_torch_function():
            counted = list(map(_VERSION, parameters))
    except RuntimeError:  # of inference tensors
        return False
    return counted == list(map(_TIMES, values)) and not any(map(_IS_NOTED, values))


def _follow_after(of: weakref.ref[GatheredWrites], of_parameter: weakref.ref[Any], index: int) -> None:
    writes, parameter = of(), of_parameter()
    assert parameter is not None  # it is the caller
    type(parameter).to_unsharded(parameter)
    if writes is not None:
        writes.follow(index)


def _keep_before(of: weakref.ref[GatheredWrites], group: int) -> None:
    if (writes := of()) is not None:
        writes.keep(group)
        writes.enter()


def _enter_before(of: weakref.ref[GatheredWrites]) -> None:
    if (writes := of()) is not None:
        writes.enter()


@outside_of_compilation
def _leave(of: weakref.ref[GatheredWrites], *_: Any) -> None:
    if (writes := of()) is not None and not recomputes():
        writes.leave()


def _shard_of(of: weakref.ref[Any]) -> nn.Parameter:
    parameter: Any = of()
    shard: nn.Parameter = parameter.sharded_param
    return shard


def _let_go(of: weakref.ref[Any], of_parameter: weakref.ref[Any]) -> nn.Parameter:
    group, parameter = of(), of_parameter()
    assert group is not None and parameter is not None
    group.reshard()
    shard: nn.Parameter = parameter.sharded_param
    return shard


def _own_part(parameter: Any, whole: Tensor) -> Tensor | None:
    """This rank's part of a gathered parameter; ``None`` for another library's class, which gathers in its own way."""
    if hasattr(parameter._sharded_local_tensor, "fsdp_post_all_gather"):
        return None
    mesh, dim = parameter.mesh_info, parameter.fsdp_placement.dim
    parts = torch.chunk(whole.detach(), mesh.shard_mesh_size, dim)
    if mesh.shard_mesh_rank < len(parts):
        part: Tensor = parts[mesh.shard_mesh_rank]
        return part
    shard: Tensor = parameter.sharded_param._local_tensor
    return torch.empty_like(shard, dtype=whole.dtype)  # no elements


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


def speed_up(unit: FSDPModule) -> None:
    """Let ``fully_shard`` do for a unit what it does, in less time: by torch's own code, without two detours.

    Around a dozen times per unit and step it names for profilers what it does, by an operator that takes ten
    microseconds whether one runs or not, which is as long as a small kernel; without a profiler, names are left out
    here. And hooks tell ``torch.compile`` at each call to leave them out, which takes nearly as long; here they do so
    where something is being compiled.

    Args:
        unit: The unit.
    """
    if not getattr(torch._dynamo.config, "skip_fsdp_hooks", True):  # the user wants them to be compiled
        return
    state: Any = unit._get_fsdp_state()
    for each in (state, *_groups(unit)):
        kind: Any = type(each)
        each.__class__ = _faster_class(kind)
    module = cast("nn.Module", unit)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            if getattr(hook, "__self__", None) is state:
                hooks[key] = getattr(state, hook.__name__)


def _name_for_profilers(name: str) -> Any:
    """What ``record_function`` is while a profiler runs, and otherwise a context that does next to nothing."""
    return (record_function if torch._C._autograd._profiler_enabled() else _RecordFunctionFast)(name)


class _Torch:
    """torch, to functions that look for ``record_function`` in there."""

    profiler = SimpleNamespace(record_function=_name_for_profilers)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_NAMING = {"record_function": _name_for_profilers, "torch": _Torch()}
_NAMED = "_fsdp_fsdp2_"


@functools.cache
def _faster_class(kind: Any) -> Any:
    """A class with the methods of one of torch's, in which those that are slow without need are faster."""
    if _IS_FASTER in vars(kind):
        return kind
    faster: dict[str, Any] = {_IS_FASTER: True, "__module__": kind.__module__}
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        function = method.__func__ if isinstance(method, staticmethod) else method
        if isinstance(function, FunctionType) and (own := _faster(function)) is not function:
            faster[name] = staticmethod(own) if isinstance(method, staticmethod) else own
    return type(kind.__name__, (kind,), faster)


_IS_FASTER = "_fsdp_fsdp2_is_faster"


def _faster(function: FunctionType) -> FunctionType:
    """A function of torch's by the same code, for which names cost nothing, and being left out of compilation neither.

    Returns:
        The function itself if it does neither.
    """
    inner = getattr(function, "__wrapped__", None)
    cells, code = function.__closure__ or (), function.__code__
    if isinstance(inner, FunctionType):
        faster = _faster(inner)
        if {"_dynamo", "disable"} <= set(code.co_names):
            return cast("FunctionType", outside_of_compilation(faster))
        if faster is inner:
            return function
        cells = tuple(CellType(faster) if cell.cell_contents is inner else cell for cell in cells)
    elif "record_function" not in code.co_names:
        return function
    else:
        # in the same module, whose functions others may replace, by names of our own
        asked = "torch" if "profiler" in code.co_names else "record_function"
        function.__globals__.setdefault(_NAMED + asked, _NAMING[asked])
        code = code.replace(co_names=tuple(_NAMED + name if name == asked else name for name in code.co_names))
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells or None)
    own.__kwdefaults__ = function.__kwdefaults__
    return cast("FunctionType", functools.update_wrapper(own, function))


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
        own = of_state()
        if own is not None and own._training_state.name != "PRE_BACKWARD":  # otherwise, its activations are recomputed
            own._register_pre_backward_hook(tensors)

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
            _take_requires_grad(unit)
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
        for group in _groups_of(state):
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


def refuse_copies(unit: FSDPModule) -> None:
    """Let a copy of a unit raise what to write instead. torch's own refusal says to save its state dict."""

    def refuse(module: FSDPModule, memo: dict[int, Any]) -> NoReturn:
        around = sharded_around(cast("nn.Module", module))
        raise copy_refusal(_users_class(module).__name__, "fully_shard" if around is None else around[0].strategy_name)

    type(unit).__deepcopy__ = refuse  # type: ignore[attr-defined]


def _users_class(module: FSDPModule) -> type:
    """The class that ``fully_shard`` has put its own in front of."""
    return type(module).__bases__[1]


def _put_around(hooks: dict[int, Any], first: Sequence[int], second: Sequence[int]) -> None:
    """Put hooks before and after those of ``fully_shard``, and leave the others in their order."""
    order = [key for key in hooks if key not in (*first, *second)]
    of_fsdp = [place for place, key in enumerate(order) if _is_of_torch(hooks[key], _OF_FSDP)]
    order[of_fsdp[-1] + 1 : of_fsdp[-1] + 1] = second
    order[of_fsdp[0] : of_fsdp[0]] = first
    kept = {key: hooks[key] for key in order}
    hooks.clear()
    hooks.update(kept)


@contextmanager
def without_hooks(root: nn.Module) -> Iterator[None]:
    """Context in which calls, state dicts and copies of a root's modules are those of the user's modules alone.

    The order of hooks is preserved.
    """
    taken: list[tuple[Any, int, Any]] = []
    classes: list[tuple[nn.Module, type]] = []
    states: list[tuple[nn.Module, str, Any]] = []
    for module in root.modules():
        for name in _HOOKS:
            hooks = getattr(module, name)
            taken += [(hooks, key, hook) for key, hook in hooks.items() if _is_of_torch(hook)]
        if isinstance(module, FSDPModule):
            classes.append((module, type(module)))
        # a copy of the module would include these, process groups and all
        states += [(module, key, module.__dict__.pop(key)) for key in (STATE_KEY, REGISTRY_KEY) if key in vars(module)]
    for hooks, key, _ in taken:
        hooks[key] = _nothing
    for module, _ in classes:
        module.__class__ = _users_class(cast(FSDPModule, module))  # FSDP's refuses copies
    try:
        yield
    finally:
        for module, name, state in states:
            module.__dict__[name] = state
        for module, kind in classes:
            module.__class__ = kind
        for hooks, key, hook in taken:
            hooks[key] = hook


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


_OF_FSDP = ("torch.distributed.fsdp._fully_shard",)


def _is_of_torch(hook: Any, modules: tuple[str, ...] = (*_OF_FSDP, "torch.distributed.tensor.")) -> bool:
    """Whether ``fully_shard`` or tensor parallelism has registered a hook."""
    function = getattr(hook, "hook", hook)  # torch wraps some
    return str(getattr(function, "__module__", "")).startswith(modules)


def abandon_forward(root: FSDPModule, units: Iterable[FSDPModule]) -> None:
    """Make units idle after an exception in a forward pass, as torch does, and leave gradients unchanged."""
    for unit in units:
        state: Any = unit._get_fsdp_state()
        state._training_state = type(state._training_state).IDLE
        getattr(state, "_modules_to_run_forward", set()).clear()
        for group in _groups(unit):
            if group._all_gather_result is not None:
                group.wait_for_unshard()
            group._training_state = type(group._training_state).IDLE
    root_state: Any = root._get_fsdp_state()
    root_state._state_ctx.iter_forward_root = None


def _nothing(*args: Any) -> None:
    """Replaces a hook."""


def unreduced_gradients(unit: FSDPModule) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The gradients that a unit has accumulated without reducing them, each with its shard.

    ``fully_shard`` keeps them at the unsharded parameters, which no public API exposes while they are sharded, or, if
    it reduces in a dtype other than the compute dtype, in tensors of its own.
    """
    for parameter in _parameters(unit):
        grad = parameter.unsharded_accumulated_grad
        if grad is None and hasattr(parameter, "_unsharded_param"):
            grad = parameter._unsharded_param.grad
        if isinstance(grad, DTensor):  # ranks that divide a sequence each have a part of the sum
            grad = grad.redistribute(placements=parameter._unsharded_param.placements)
        if grad is not None:
            yield parameter.sharded_param, grad


def set_unreduced_gradients(
    root: FSDPModule, unit: FSDPModule, gradients: Mapping[nn.Parameter, Callable[[], Tensor]]
) -> None:
    """Restore gradients that :func:`unreduced_gradients` returned. All ranks must call it.

    Args:
        root: The root.
        unit: One of its units, whose gradients are replaced. It is unsharded once, because the parameters that hold
            the gradients don't exist before.
        gradients: Functions that read a gradient, by its shard.
    """
    root._get_fsdp_state()._lazy_init()
    unit.unshard()
    for parameter in _parameters(unit):
        _set_accumulated(parameter, None)
        parameter._unsharded_param.grad = None
        read = gradients.get(parameter.sharded_param)
        if read is None:
            continue
        gathered = parameter._unsharded_param
        grad = read().to(gathered.device, copy=True).view(gathered.shape)
        if isinstance(gathered, DTensor):
            grad = distribute_tensor(grad, gathered.device_mesh, gathered.placements, src_data_rank=None)
        if grad.dtype == gathered.dtype:
            gathered.grad = grad
        else:
            _set_accumulated(parameter, grad.to(parameter.reduce_dtype or gathered.dtype))
    unit.reshard()


def _set_accumulated(parameter: Any, grad: Tensor | None) -> None:
    """Set the gradient in which unreduced micro-batches accumulate in a dtype other than the parameter's.

    From torch 2.15 on that is the unsharded parameter's own gradient, whose ``grad_dtype`` may differ.
    """
    if isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
        gathered = parameter._unsharded_param
        gathered.grad = None if grad is None else grad.to(gathered.grad_dtype or gathered.dtype)
    else:
        parameter.unsharded_accumulated_grad = grad


def one_for_each_state(units: Iterable[nn.Module]) -> list[nn.Module]:
    """One module for each call of ``fully_shard``, which may have been given several modules to gather together."""
    found: dict[int, nn.Module] = {}
    for unit in units:
        state: Any = unit._get_fsdp_state() if isinstance(unit, FSDPModule) else unit
        found.setdefault(id(state), unit)
    return list(found.values())


def has_run(unit: FSDPModule) -> bool:
    """Whether a unit was called, as a root or in one, after which no other module can become its root."""
    state: Any = unit._get_fsdp_state()
    return state._is_root is not None


def parameters_of(unit: FSDPModule) -> list[nn.Parameter]:
    """The sharded parameters that a unit gathers."""
    return [parameter.sharded_param for parameter in _parameters(unit)]


def reduces_gradients(unit: FSDPModule) -> bool:
    """Whether a unit's backward pass reduces its gradients over all ranks that have them."""
    return all(group.reduce_grads and group.all_reduce_grads for group in _groups(unit))


def offloaded_parameters(unit: FSDPModule) -> list[nn.Parameter]:
    """Those of a unit's parameters that its offload policy keeps in host memory."""
    return [parameter.sharded_param for parameter in _parameters(unit) if parameter.offload_to_cpu]


def take_filled(unit: FSDPModule) -> None:
    """Let a unit use the parameters that its modules have now, and pad them for communication as it needs them.

    ``fully_shard`` does so in methods of its modules that convert all parameters, and in its first forward pass.
    """
    for parameter in _parameters(unit):
        parameter.reset_sharded_param()


def _groups(unit: FSDPModule) -> list[Any]:
    return _groups_of(unit._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one group before torch 2.11
    return [group for group in groups if group is not None]


def _parameters(unit: FSDPModule) -> Iterator[Any]:
    return (parameter for group in _groups(unit) for parameter in group.fsdp_params)


def joined_axes(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The axes of a slice of a mesh as one axis of this name.

    ``fully_shard`` shards over one axis, and context-parallel ranks share in that. A second mesh of other axes would
    not do: torch combines a DTensor's meshes, as with tensor parallelism, only if they are slices of one.
    """
    return mesh._flatten(name)


def side_by_side(outer: DeviceMesh, inner: DeviceMesh, root: DeviceMesh) -> DeviceMesh:
    """Two slices of one mesh as a mesh of two axes. Before torch 2.10, joined axes can be sliced by name instead."""
    if hasattr(DeviceMesh, "_concatenate"):
        return DeviceMesh._concatenate([outer, inner])
    both: DeviceMesh = root[(*(outer.mesh_dim_names or ()), *(inner.mesh_dim_names or ()))]
    return both


def _add_rightly() -> None:
    """Let DTensors that wait for a reduction be added up as they are, before torch 2.11 or so.

    Until then, norms are added rank by rank before they are reduced, as only sums may be, a number that is added to a
    sum is added once for each rank, and a norm times a negative number is positive.
    """
    math, pointwise = cast("Any", _math_ops), cast("Any", _pointwise_ops)
    of_norms = getattr(math, "_NormPartial", None)
    if of_norms is None or not of_norms(2).is_partial("sum"):
        return
    op_strategies: dict[Any, Any] = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    aten = torch.ops.aten

    def strategy(linearity: int, op_schema: Any) -> Any:
        given = [
            each.strategies[0].output_spec.placements for each in op_schema.args_schema if hasattr(each, "strategies")
        ]
        waits = any(placement.is_partial() for placements in given for placement in placements)
        is_norm = any(isinstance(one, of_norms) for placements in given for one in placements)
        is_linear = not is_norm and (linearity == 2 or len(given) == 2)
        if waits and not is_linear and op_schema.is_inplace_op():
            raise RuntimeError(
                f"{op_schema.op} on a DTensor that waits for a reduction is wrong in torch {torch.__version__}: "
                "write total = total + norm, without an operation in place."
            )
        return pointwise.pointwise_strategy(op_schema, linearity=linearity if is_linear else -1)

    for op, linearity in ((aten.add, 1), (aten.add_, 1), (aten.mul, 2), (aten.mul_, 2)):
        op_strategies[op.Tensor] = partial(strategy, linearity)


_add_rightly()


def is_loss_parallel() -> bool:
    """Whether torch's ``loss_parallel()`` is on. It does not nest: the end of an inner one ends the outer one."""
    return torch.ops.aten.nll_loss_forward.default in DTensor._op_dispatcher._custom_op_handlers


def recomputes() -> bool:
    """Whether a backward pass is running in this thread, in which activation checkpointing may recompute a module."""
    return torch._C._current_graph_task_id() != -1


def allow_conversions(root: nn.Module, units: Iterable[FSDPModule]) -> None:
    """Let ``to()``, ``cpu()``, ``float()`` and the like leave parameters as they are where they change nothing.

    torch exchanges a DTensor with what it was converted to, even if that is the same. It refuses to if there is a weak
    reference to it, in words that lead nowhere; and strategies find the names of shards by such references. Inside the
    root's forward pass it also expects shards where units are gathered.

    Args:
        root: The root.
        units: Its units, itself included.
    """
    for unit in units:
        vars(unit)["_apply"] = MethodType(partial(_apply, weakref.ref(root)), unit)
    swap: Any = torch.utils.swap_tensors
    if not (isinstance(swap, partial) and swap.func is _swap_changed):
        torch.utils.swap_tensors = partial(_swap_changed, swap)


def _apply(of: weakref.ref[nn.Module], unit: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    if of() in running_forwards:  # gathered parameters refuse what changes them
        return super(FSDPModule, unit)._apply(fn, recurse)
    return type(unit)._apply(unit, fn, recurse)


def _swap_changed(swap: Any, t1: Tensor, t2: Tensor) -> None:
    if isinstance(t1, DTensor) and isinstance(t2, DTensor):
        if _are_same(t1, t2):
            return
        if isinstance(t1, nn.Parameter) and weakref.getweakrefs(t1):
            raise UnsupportedCapabilityError(
                "a sharded module can't be converted to another device or dtype, as by module.to(), half() or cpu(): "
                "optimizers and checkpoints hold its shards as they are.\n"
                "Convert it before the strategy shards it, or write precision='bf16-true'. For its values elsewhere, "
                "fsdp_core.full_state_dict(module) gives them to rank 0."
            )
    swap(t1, t2)


def _are_same(a: DTensor, b: DTensor) -> bool:
    """Whether two DTensors are the same shard in the same memory."""
    one, other = a.to_local().detach(), b.to_local().detach()
    return (
        a.device_mesh == b.device_mesh
        and a.placements == b.placements
        and a.shape == b.shape
        and one.dtype == other.dtype
        and one.device == other.device
        and one.stride() == other.stride()
        and one.data_ptr() == other.data_ptr()
    )
