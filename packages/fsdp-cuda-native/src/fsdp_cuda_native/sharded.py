"""A root of torch's ``FullyShardedDataParallel`` (FSDP1): its steps and its state. Independent of Lightning.

The root is FSDP1's wrapper of the user's module. Under the Trainer a whole ``training_step`` runs inside the root's
``forward()``, and with manual optimization backward passes and optimizer steps do so too. FSDP1 allows neither, so the
forward pass is *suspended* before each and *resumed* after it. Units that a suspended forward pass has used may still
be reached by a later backward pass: they are *pending*.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from fsdp_core import Runtime, Sharded, UnsupportedCapabilityError
from fsdp_core.sharding import (
    ParameterOrders,
    ReplicatedParameters,
    StepGradients,
    clip_grads_by_norm,
    is_flattened,
    outside_of_compilation,
    sharded_of,
)
from fsdp_core.state import (
    HeldGradients,
    Layout,
    SavedTensor,
    aliases,
    clean_name,
    refuse_half_gradients,
    running_forwards,
)
from fsdp_cuda_native.accumulated_gradients import gradients_of_units, restore_to_units, zero_gradients
from fsdp_cuda_native.options import STAY_GATHERED
from fsdp_cuda_native.torch_private.flat_parameters import flattening, frozen, resharding, units
from fsdp_cuda_native.torch_private.flat_parameters.gathered_writes import GatheredWrites
from fsdp_cuda_native.torch_private.flat_parameters.handles import use_own_methods
from fsdp_cuda_native.torch_private.flat_parameters.written_shards import count_writes
from fsdp_cuda_native.torch_private.gradient_hooks import enable_gradient_hooks, refuse_use_outside
from fsdp_cuda_native.torch_private.passes import suspended_forwards, unit_calls, unvisited_units
from fsdp_cuda_native.torch_private.passes.nested_passes import NestedPasses
from fsdp_cuda_native.torch_private.unit_gradients import drop_gradients, keep_gradients_of_frozen
from fsdp_cuda_native.unflattened import as_user_wrote, layout_of, local_parts, named_members

if TYPE_CHECKING:
    from fsdp_cuda_native.backend import NativeBackend

__all__ = ["NativeSharded"]


class NativeSharded(Sharded):
    """A module whose units FSDP1 has wrapped and flattened.

    Args:
        root: FSDP1's wrapper of the user's module.
        module: The user's module.
        orders: The original order of parameters in its modules.
        replicated: The parameters that no unit has flattened, in any order.
        runtime: The ranks over which their gradients are averaged.
    """

    backend: NativeBackend
    root: FSDP

    def __init__(
        self,
        root: FSDP,
        module: nn.Module,
        orders: ParameterOrders,
        replicated: Sequence[nn.Parameter],
        runtime: Runtime,
    ) -> None:
        super().__init__(root, module)
        self._orders = orders
        #: What :meth:`layout` has returned last, and the module's parameters then.
        self._layout: Layout | None = None
        self._layout_parameters: list[nn.Parameter] = []
        self._units = tuple(units.units_of(root))
        #: Lets parameters that are gathered inside a step show the gradients of their shards.
        self._step_gradients = StepGradients(root)
        #: The pending units; ``None`` while the root's forward pass has not been suspended.
        self._pending: list[suspended_forwards.PendingUnit] | None = None
        #: Whether core has suspended the running forward pass, as manual optimization does. A pass that autograd runs
        #: inside of it, without a word to core, suspends it too, and does not set this.
        self._is_manual_step = False
        #: Whether a loss was given to a backward pass that has not ended: if nothing runs, an exception has ended it.
        self._is_suspended_at_loss = False
        #: Removes the hooks that FSDP1 has added to that loss.
        self._remove_hooks_of_loss: Callable[[], None] | None = None
        #: How often shards had been written to when those that stay gathered were gathered.
        self._gathered_write_count = 0
        names = {part: clean_name(name) for name, part in module.named_modules()}
        for unit in self._units:
            use_own_methods(unit)
        self._writes = [GatheredWrites(unit, names, self.written_values) for unit in self._units]
        self._passes = NestedPasses(root, lambda: root in running_forwards, self._begin_backward_inside)
        for unit in self._units:
            self._prepare_unit(unit, names)
        flattening.unguard_during_calls(self._units)
        flattening.refuse_parts_of(root, names)
        unvisited_units.register_waiting_hook(root)
        if root in self._units:  # else the root has no parameters of its own
            root.register_forward_pre_hook(partial(_free_written_root, weakref.ref(self)), prepend=True)
        self.reshard()
        # reduced in the order of the module, which is the same on all ranks
        in_order = [p for p in module.parameters() if any(p is each for each in replicated)]
        self._replicated = ReplicatedParameters(in_order, root, runtime, self.asks_accumulates) if in_order else None
        module.register_forward_hook(_leave_gradients)
        module.register_forward_hook(_forget_pending_after_backward)
        root.register_forward_hook(_forget_pending_without_backward)

    def _prepare_unit(self, unit: FSDP, names: Mapping[nn.Module, str]) -> None:
        unit.register_forward_hook(partial(_show_gradients_after_call, self))
        unit_calls.watch_calls(unit, partial(_watch_tensors, weakref.ref(self._passes)))
        enable_gradient_hooks(unit)
        if units.is_sharded(unit):
            flattening.place_pieces(unit, names)
        else:
            refuse_use_outside(unit, names)
        keep_gradients_of_frozen(unit)

    # -- structure -------------------------------------------------------------------------------------------------

    @contextmanager
    def unsharded_view(self) -> Iterator[None]:
        self.reshard()
        for unit in self._units:
            resharding.write_back(unit)
        with as_user_wrote(self.root, self._orders) as stand_ins:
            self.record_parameter_names(stand_ins.items())
            yield

    def layout(self) -> Layout:
        self.reshard()
        parameters = list(self.module.parameters())
        # a save calls this four times, and the layout changes only if the user replaces a parameter
        if self._layout is None or list(map(id, parameters)) != list(map(id, self._layout_parameters)):
            self._layout = layout_of(self.root)
            self._layout_parameters = parameters
        return self._layout

    def is_shard(self, parameter: Tensor) -> bool:
        return self.backend.shards and is_flattened(parameter)

    def is_guarded_shard(self, parameter: Tensor) -> bool:
        return self.backend.options.use_orig_params and self.is_shard(parameter)

    def aliases(self) -> dict[str, str]:
        self.reshard()
        has_ties = any(any(units.tied_members(unit)) for unit in self._units)
        if self.backend.options.use_orig_params and not has_ties:
            return aliases(self.module)  # each parameter exists separately, and none has two names in one unit
        return super().aliases()

    # -- steps -----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        # offloaded shards have no place for unreduced gradients, which have all elements and are on the device
        if self.backend.options.sync_each_batch or self.backend.offloads_from_device:
            yield
            return
        self.backend.refuse_unreduced_gradients()
        if self._replicated is not None:
            self._replicated.sync = False
        try:
            with suspended_forwards.no_reduction(self.root):
                yield
        finally:
            if self._replicated is not None:
                self._replicated.sync = True

    def reshard(self) -> None:
        for unit in self._units:
            resharding.reshard(unit)
            if self._pending is None:  # else a backward pass inside the forward pass needs the views
                resharding.release_views(unit)

    def suspend_forward(self, loss: Tensor | None = None) -> None:
        if any(unit.forward_prefetch for unit in self._units):
            # after a step inside the forward pass torch would take units that were gathered ahead for current
            raise UnsupportedCapabilityError(
                "forward_prefetch=True can't be combined with manual optimization, whose steps are taken while units "
                "are gathered ahead.\nLeave forward_prefetch out."
            )
        self._is_manual_step = True
        if loss is None or not loss.requires_grad:
            self._suspend(loss)
            return
        self._remove_hooks_of_loss = suspended_forwards.note_hooks_of(loss)
        loss.register_hook(partial(_suspend_again, weakref.ref(self)))  # ahead of FSDP1's, which is placed next
        self._suspend(loss)
        self._is_suspended_at_loss = True

    def _suspend(self, loss: Tensor | None) -> None:
        self._step_gradients.on = False
        if self._pending is None:
            self._pending = []
        suspended_forwards.suspend_forward(self.root, loss, self._pending)

    def resume_forward(self) -> None:
        if self._remove_hooks_of_loss is not None:
            self._remove_hooks_of_loss()
            self._remove_hooks_of_loss = None
        self._resume()

    def _resume(self) -> None:
        self._is_suspended_at_loss = False
        if self._pending is None:
            self._pending = []
        suspended_forwards.resume_forward(self.root, self._pending)
        self._gathered_write_count = self._count_writes()
        self.show_gradients()

    def show_gradients(self) -> None:
        self._step_gradients.on = True
        self._show_gradients_of(self.root)

    def _show_gradients_of(self, unit: FSDP) -> None:
        """Let parameters that a unit has gathered inside a manual step show the gradients of their shards."""
        if (self._pending is not None or self._step_gradients.on) and unit in self._units:
            for view, shard in units.gathered_views(unit):
                self._step_gradients.follow(view, shard, is_part=units.is_sharded(unit))

    def _begin_backward_inside(self) -> None:
        """Begin a backward pass of the root inside its running forward pass, which then goes on."""
        suspended_forwards.begin_backward_inside(self.root, self._suspend, self._resume_after_inner_pass)

    def _resume_after_inner_pass(self) -> None:
        self._resume()
        self.inner_pass_ended()

    def stepped_inside(self) -> None:
        self._resume()

    def follow_written_shards(self) -> None:
        if self._count_writes() == self._gathered_write_count:
            return
        if not self.backend.options.use_orig_params:  # users write to the root's flat parameter while it is gathered
            for writes in self._writes:
                if writes.is_of(self.root):
                    writes.keep(trusts_count=True)
        self.resume_forward()

    def _count_writes(self) -> int:
        """How often the shards were written to of those units that stay gathered between two calls in a step."""
        all_stay = self.backend.options.strategy in STAY_GATHERED  # else the root alone does
        return sum(count_writes(unit) for unit in self._units if all_stay or unit is self.root)

    def is_idle(self) -> bool:
        return self._passes.is_idle()

    def accumulates(self) -> bool:
        return self._passes.adds_gradients()

    @property
    def called_hooks(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("register_post_accumulate_grad_hook",) if self.backend.options.use_orig_params else ()

    @property
    def keeps_graph(self) -> bool:  # type: ignore[override]
        return any(map(resharding.is_kept, self._units))

    @property
    def has_freed_parameters_of_graph(self) -> bool:  # type: ignore[override]
        return any(map(resharding.was_kept, self._units))

    def gather_again(self) -> None:
        self._passes.gather_again()

    def leaves(self) -> Iterable[Tensor]:
        flat_params = [units.handle_of(unit).flat_param for unit in self._units]
        return [*self.root.parameters(), *self._gathered_shards(), *flat_params]

    def _gathered_shards(self) -> Iterator[nn.Parameter]:
        """The optimizer's parameters in whose place modules hold views now."""
        return (shard for unit in self._units for _, shard in units.gathered_views(unit))

    def keep_writes(self) -> None:
        for writes in self._writes:
            is_of_root = writes.is_of(self.root)
            if is_of_root:
                writes.check_own()  # other units do when they are called
                if self.root in running_forwards:
                    writes.note_writes_to_flat()
            # a manual step is over shards, after which the root is gathered, and followed, anew
            writes.keep(trusts_count=is_of_root or self._pending is None)

    def follow_requires_grad(self) -> None:
        if frozen.follow_requires_grad(self.root):
            self.resume_forward()
        for writes in self._writes:
            writes.frozen_views.detach_frozen()

    def reset(self) -> None:
        for unit in self._units:
            drop_gradients(unit)
        suspended_forwards.reset_units(self.root)
        if self._replicated is not None:
            self._replicated.forget()
        self._forget_pending()

    def abandon_forward(self) -> None:
        suspended_forwards.make_units_idle(self.root)

    @property
    def is_interrupted(self) -> bool:
        if self._is_suspended_at_loss or units.is_in_backward(self.root):
            return True
        return self._replicated is not None and self._replicated.interrupted

    def mend_interrupted(self) -> None:
        if self.is_interrupted:
            self._step_gradients.on = False
            refuse_half_gradients(self.module, chain(self.root.parameters(), self._gathered_shards()))
            self.reset()
        elif not self.backend.shards:
            # a unit that the last backward pass did not visit still shows its unsharded views, which torch would
            # take for parameters that the user has assigned
            for unit in self._units:
                resharding.reshard(unit, keeps=True)

    def mend_inside(self) -> None:
        is_manual_step = self._is_manual_step
        super().mend_inside()  # which resets that, while the manual step goes on
        self._is_manual_step = is_manual_step

    def clip_norm(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        return clip_grads_by_norm(
            parameters,
            max_norm,
            runtime=self.runtime,
            is_sharded=self.is_shard,
            group=self.backend.group_to_shard_over(),
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    # -- state -----------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        module = self.module
        with self.unsharded_view():
            state = {clean_name(name): value for name, value in type(module).state_dict(module).items()}
            first_names = aliases(module)  # by the further names of tied parameters
        parts = {name: part.of(shard) for name, part, shard in local_parts(self.root)}
        return {name: parts.get(first_names.get(name, name), value) for name, value in state.items()}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if not self.backend.options.use_orig_params:
            # flat parameters come unit by unit, but loading by index expects the module's own order
            with self.unsharded_view():
                named = self.module.named_parameters(remove_duplicate=False)
                order = {clean_name(name): number for number, (name, _) in enumerate(named)}
            for group in state["param_groups"]:
                group["params"].sort(key=order.__getitem__)
        return state

    def accumulated_gradients(self) -> HeldGradients:
        self.reshard()
        gradients = gradients_of_units(self.root, self.runtime)
        flattened = {name for name, _ in named_members(self.root)}
        for parameter, (part, *_) in self.layout().items():
            if part.name not in flattened and parameter.grad is not None:  # replicated
                gradients.own[part.name] = parameter.grad
        return gradients

    def forget_unreduced(self, names: Collection[str]) -> None:
        zero_gradients(self.root, names)  # also within the root's forward pass

    def restore_gradients(
        self, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        self.reshard()
        flattened = {name for name, _ in named_members(self.root)}
        own_of_replicated = {name: read for name, read in own.items() if name not in flattened}
        super().restore_gradients(own_of_replicated, {n: grad for n, grad in reduced.items() if n not in flattened})
        restore_to_units(self.root, own, reduced, self.runtime)

    def _forget_pending(self) -> None:
        """End the step: nothing is suspended, and no unit waits for a backward pass."""
        self._is_manual_step = False
        self._is_suspended_at_loss = False
        if self._pending is not None:
            suspended_forwards.forget_pending(self.root, self._pending)
            self._pending = None


# Hooks of modules. They are functions: a deep copy of the module has the hooks too, but no NativeSharded.


@outside_of_compilation
def _show_gradients_after_call(sharded: NativeSharded | None, unit: FSDP, args: Any, output: Any) -> None:
    if sharded is not None:  # None in the hooks of a deep copy
        sharded._show_gradients_of(unit)


@outside_of_compilation
def _free_written_root(sharded_ref: weakref.ref[NativeSharded], root: FSDP, args: Any) -> None:
    """Free what the root has kept of a forward pass whose backward pass is to come, if shards were written to since.

    Under Fabric parameters are shards between two forward passes, and what is written to them would not be seen.
    """
    sharded = sharded_ref()
    if sharded is not None and sharded.is_idle():
        count_before = sharded._gathered_write_count
        sharded._gathered_write_count = sharded._count_writes()
        if sharded._gathered_write_count != count_before:
            resharding.free_idle_root(root)


def _watch_tensors(passes_ref: weakref.ref[NestedPasses], unit: FSDP, tensors: list[Tensor]) -> None:
    passes = passes_ref()
    if passes is not None and passes.follows_calls():
        passes.watch_tensors(unit, tensors)


def _suspend_again(sharded_ref: weakref.ref[NativeSharded], _: Tensor) -> None:
    """Suspend the forward pass again, if a hook of the loss has run backward passes: each has resumed it at its end."""
    sharded = sharded_ref()
    if sharded is None:
        return
    sharded._passes.note_pass_of_root()
    if not sharded.is_idle() and not units.is_in_backward(sharded.root):
        with torch.enable_grad():
            sharded._suspend(None)
        suspended_forwards.expect_backward(sharded.root)


def _leave_gradients(module: nn.Module, args: Any, output: Any) -> None:
    """Keep FSDP1 from restoring gradients that ``zero_grad()`` has cleared in the forward pass."""
    sharded = sharded_of(module)
    if isinstance(sharded, NativeSharded) and sharded._pending is not None:
        suspended_forwards.leave_gradients(sharded.root)


def _forget_pending_after_backward(module: nn.Module, args: Any, output: Any) -> None:
    """Let pending units wait until the backward pass that begins at the module's output has ended too.

    A manual step has no such pass.
    """
    sharded = sharded_of(module)
    if isinstance(sharded, NativeSharded) and sharded._pending is not None and not sharded._is_manual_step:
        unvisited_units.call_after_pass(sharded.root, output, sharded._forget_pending)


def _forget_pending_without_backward(root: nn.Module, args: Any, output: Any) -> None:
    """Let units wait no longer at the end of a forward pass that no backward pass follows."""
    sharded = sharded_of(root)
    if isinstance(sharded, NativeSharded) and sharded._pending is not None:
        has_backward = any(tensor.requires_grad for tensor in unit_calls.tensors_in(output))
        if sharded._is_manual_step or not has_backward:
            sharded._forget_pending()
