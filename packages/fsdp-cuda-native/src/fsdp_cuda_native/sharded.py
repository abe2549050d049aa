"""A root of torch's ``FullyShardedDataParallel`` (FSDP1): its steps and its state. Independent of Lightning."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

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
from fsdp_cuda_native.accumulated_gradients import forget, held_by_units, restore_to_units
from fsdp_cuda_native.torch_private import flat_parameters as torch_private
from fsdp_cuda_native.torch_private.gradient_hooks import call_gradient_hooks, refuse_use_outside
from fsdp_cuda_native.torch_private.nested_passes import NestedPasses
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
    root: FullyShardedDataParallel

    def __init__(
        self,
        root: FullyShardedDataParallel,
        module: nn.Module,
        orders: ParameterOrders,
        replicated: Sequence[nn.Parameter],
        runtime: Runtime,
    ) -> None:
        super().__init__(root, module)
        self._orders = orders
        self._layout: tuple[tuple[nn.Parameter, ...], Layout] | None = None
        self._units = tuple(torch_private.units_of(root))
        self._steps = StepGradients(root)
        names = {part: clean_name(name) for name, part in module.named_modules()}
        self._writes = [torch_private.GatheredWrites(unit, names, self.written_values) for unit in self._units]
        # set while the root's forward pass runs, after a backward pass or a step was taken inside of it
        self._pending: list[torch_private.Pending] | None = None
        self._is_by_hand = self._is_suspended = False
        self._forget_loss: Callable[[], None] | None = None
        self._times_written = 0
        self._root_unit = [unit for unit in self._units if unit is root]  # empty if the root has no own parameters
        self._passes = NestedPasses(root, lambda: root in running_forwards, self._begin_inside)
        for unit in self._units:
            unit.register_forward_hook(partial(_follow_gathered, self))
            torch_private.watch_calls(unit, partial(_begin_at, weakref.ref(self._passes)))
            call_gradient_hooks(unit)
            if torch_private.is_sharded(unit):
                torch_private.place_pieces(unit, names)
            else:
                refuse_use_outside(unit, names)
            keep_gradients_of_frozen(unit)
        torch_private.unguard_during_calls(self._units)
        torch_private.refuse_parts_of(root, names)
        torch_private.reduce_left_out(root)
        if root in self._units:
            root.register_forward_pre_hook(partial(_gather_anew, weakref.ref(self)), prepend=True)
        self.reshard()
        in_order = [p for p in module.parameters() if any(p is each for each in replicated)]
        self._replicated = ReplicatedParameters(in_order, root, runtime, self.asks_accumulates) if in_order else None
        module.register_forward_hook(_leave_gradients)
        module.register_forward_hook(_forget_after_backward)
        root.register_forward_hook(_forget_pending)

    # -- structure -------------------------------------------------------------------------------------------------

    @contextmanager
    def unsharded_view(self) -> Iterator[None]:
        self.reshard()
        for unit in self._units:
            torch_private.write_back(unit)
        with as_user_wrote(self.root, self._orders) as by_name:
            self.record_parameter_names(by_name.items())
            yield

    def layout(self) -> Layout:
        self.reshard()
        parameters = tuple(self.module.parameters())
        known_parameters, layout = self._layout or ((), None)
        # a save calls this four times, and the layout changes only if the user replaces a parameter
        if (
            layout is None
            or len(parameters) != len(known_parameters)
            or any(a is not b for a, b in zip(parameters, known_parameters, strict=True))
        ):
            layout = layout_of(self.root)
            self._layout = (parameters, layout)
        return layout

    def is_shard(self, parameter: Tensor) -> bool:
        return self.backend.shards and is_flattened(parameter)

    def is_guarded_shard(self, parameter: Tensor) -> bool:
        return self.backend.options.use_orig_params and self.is_shard(parameter)

    def aliases(self) -> dict[str, str]:
        self.reshard()
        if self.backend.options.use_orig_params and not any(
            any(torch_private.tied_members(unit)) for unit in self._units
        ):
            return aliases(self.module)  # each parameter exists separately, and none has two names in one unit
        return super().aliases()

    # -- steps -----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        # offloaded shards have no place for unreduced gradients, which are whole
        if self.backend.options.sync_each_batch or self.backend.offloads_from_device:
            yield
            return
        self.backend.check_waiting()
        if self._replicated is not None:
            self._replicated.sync = False
        try:
            with torch_private.no_reduction(self.root):
                yield
        finally:
            if self._replicated is not None:
                self._replicated.sync = True

    def reshard(self) -> None:
        for unit in self._units:
            torch_private.reshard(unit)
            if self._pending is None:  # else a backward pass inside the forward pass needs them
                torch_private.forget_views(unit)

    def suspend_forward(self, loss: Tensor | None = None) -> None:
        if any(unit.forward_prefetch for unit in self._units):
            # after a step inside the forward pass torch would take units that were gathered ahead for current
            raise UnsupportedCapabilityError(
                "forward_prefetch=True can't be combined with manual optimization, whose steps are taken while units "
                "are gathered ahead.\nLeave forward_prefetch out."
            )
        self._is_by_hand = True
        if loss is None or not loss.requires_grad:
            self._suspend(loss)
            return
        self._forget_loss = torch_private.watch_hooks(loss)
        loss.register_hook(partial(_suspend_again, weakref.ref(self)))  # ahead of FSDP1's, which is placed next
        self._suspend(loss)
        self._is_suspended = True

    def _suspend(self, loss: Tensor | None) -> None:
        self._steps.on = False
        if self._pending is None:
            self._pending = []
        torch_private.suspend_forward(self.root, loss, self._pending)

    def resume_forward(self) -> None:
        forget, self._forget_loss = self._forget_loss, None
        if forget is not None:
            forget()
        self._resume()

    def _resume(self) -> None:
        self._is_suspended = False
        if self._pending is None:
            self._pending = []
        torch_private.resume_forward(self.root, self._pending)
        self._times_written = self._times_shards_written()
        self._follow(self.root)
        self._steps.on = True

    def show_gradients(self) -> None:
        self._steps.on = True
        self._follow(self.root)

    def _begin_inside(self) -> None:
        """Begin a backward pass of the root inside its running forward pass, which then goes on."""
        torch_private.begin_inside(self.root, self._suspend, self._go_on)

    def _go_on(self) -> None:
        self._resume()
        self.inner_pass_ended()

    def stepped_inside(self) -> None:
        self._resume()

    def follow_written_shards(self) -> None:
        if self._times_shards_written() != self._times_written:
            if not self.backend.options.use_orig_params:  # users write to the root's flat parameter while gathered
                self._keep_root()
            self.resume_forward()

    def _keep_root(self) -> None:
        for writes in self._writes:
            if writes.is_of(self.root):
                writes.keep(is_counted=True)

    def _times_shards_written(self) -> int:
        """How often the shards were written to of those units that stay gathered between two calls in a step."""
        stay = self._units if self.backend.options.strategy in torch_private.STAY_GATHERED else self._root_unit
        return sum(map(torch_private.times_shards_written, stay))

    def is_idle(self) -> bool:
        return self._passes.is_idle()

    def accumulates(self) -> bool:
        return self._passes.accumulates()

    @property
    def called_hooks(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("register_post_accumulate_grad_hook",) if self.backend.options.use_orig_params else ()

    @property
    def keeps_graph(self) -> bool:  # type: ignore[override]
        return any(torch_private.is_kept(unit) for unit in self._units)

    @property
    def has_freed_parameters_of_graph(self) -> bool:  # type: ignore[override]
        return any(torch_private.was_kept(unit) for unit in self._units)

    def gather_again(self) -> None:
        self._passes.gather_again()

    def leaves(self) -> Iterable[Tensor]:
        return [*self.root.parameters(), *self._gathered_shards(), *map(torch_private.flat_parameter_of, self._units)]

    def _gathered_shards(self) -> Iterator[nn.Parameter]:
        return (shard for unit in self._units for _, shard, _ in torch_private.gathered_parameters(unit))

    def keep_writes(self) -> None:
        for writes in self._writes:
            is_of_root = writes.is_of(self.root)
            if is_of_root:
                writes.check_own()  # other units do when they are called
                if self.root in running_forwards:
                    writes.note_writes_to_flat()
            # a step by hand is over shards, after which the root is gathered, and followed, anew
            writes.keep(is_counted=is_of_root or self._pending is None)

    def follow_requires_grad(self) -> None:
        if torch_private.follow_requires_grad(self.root):
            self.resume_forward()
        for writes in self._writes:
            writes.freeze()

    def reset(self) -> None:
        for unit in self._units:
            drop_gradients(unit)
        torch_private.reset(self.root)
        if self._replicated is not None:
            self._replicated.forget()
        self._forget_pending()

    def abandon_forward(self) -> None:
        torch_private.abandon_forward(self.root)

    @property
    def is_interrupted(self) -> bool:
        replicated = self._replicated
        if self._is_suspended or torch_private.is_interrupted(self.root):
            return True
        return replicated is not None and replicated.interrupted

    def mend_interrupted(self) -> None:
        if self.is_interrupted:
            self._steps.on = False
            refuse_half_gradients(self.module, chain(self.root.parameters(), self._gathered_shards()))
            self.reset()
        elif not self.backend.shards:
            # a unit that the last backward pass did not visit still shows its unsharded views, which torch would
            # take for parameters that the user has assigned
            for unit in self._units:
                torch_private.reshard(unit, keeps=True)

    def mend_inside(self) -> None:
        is_by_hand = self._is_by_hand  # which the default resets, while the manual step goes on
        super().mend_inside()
        self._is_by_hand = is_by_hand

    def clip_norm(
        self,
        parameters: Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
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
            first = aliases(module)
        parts = {name: part.of(flat) for name, part, flat in local_parts(self.root)}
        return {name: parts.get(first.get(name, name), value) for name, value in state.items()}

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
        gradients, flattened = held_by_units(self.root, self.runtime), {name for name, _ in named_members(self.root)}
        for parameter, (part, *_) in self.layout().items():
            if part.name not in flattened and parameter.grad is not None:  # kept whole
                gradients.own[part.name] = parameter.grad
        return gradients

    def forget_unreduced(self, names: Collection[str]) -> None:
        forget(self.root, names)  # also within the root's forward pass

    def restore_gradients(
        self, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        self.reshard()
        flattened = {name for name, _ in named_members(self.root)}
        unflattened = {name: read for name, read in own.items() if name not in flattened}
        super().restore_gradients(unflattened, {n: grad for n, grad in reduced.items() if n not in flattened})
        restore_to_units(self.root, own, reduced, self.runtime)

    # -- called by hooks -------------------------------------------------------------------------------------------

    def _follow(self, unit: FullyShardedDataParallel) -> None:
        """Let parameters that a unit has gathered inside a manual step show the gradients of their shards."""
        if (self._pending is not None or self._steps.on) and unit in self._units:
            for gathered, shard, is_part in torch_private.gathered_parameters(unit):
                self._steps.follow(gathered, shard, is_part=is_part)

    def _forget_pending(self) -> None:
        self._is_by_hand = self._is_suspended = False
        pending, self._pending = self._pending, None
        if pending is not None:
            torch_private.forget_pending(self.root, pending)


@outside_of_compilation
def _follow_gathered(sharded: NativeSharded | None, unit: FullyShardedDataParallel, args: Any, output: Any) -> None:
    if sharded is not None:  # None in the hooks of a deep copy
        sharded._follow(unit)


@outside_of_compilation
def _gather_anew(of: weakref.ref[NativeSharded], root: FullyShardedDataParallel, args: Any) -> None:
    """Free what the root has kept of a forward pass whose backward pass is to come, if shards were written to since.

    Under Fabric parameters are shards between two forward passes, and what is written to them would not be seen.
    """
    sharded = of()
    if sharded is not None and sharded.is_idle():
        before, sharded._times_written = sharded._times_written, sharded._times_shards_written()
        if sharded._times_written != before:
            torch_private.free_before_call(root)


def _begin_at(of: weakref.ref[NestedPasses], unit: FullyShardedDataParallel, tensors: list[Tensor]) -> None:
    passes = of()
    if passes is not None and passes.follows():
        passes.begin_at(unit, tensors)


def _suspend_again(of: weakref.ref[NativeSharded], _: Tensor) -> None:
    """Suspend the forward pass again, if a hook of the loss has run backward passes: each has resumed it at its end."""
    sharded = of()
    if sharded is not None:
        sharded._passes.begin_at_loss()
    if sharded is not None and not sharded.is_idle() and not torch_private.is_interrupted(sharded.root):
        with torch.enable_grad():
            sharded._suspend(None)
        torch_private.expect_backward(sharded.root)


def _leave_gradients(module: nn.Module, args: Any, output: Any) -> None:
    """Keep FSDP1 from restoring gradients that ``zero_grad()`` has cleared in the forward pass."""
    sharded = sharded_of(module)
    if isinstance(sharded, NativeSharded) and sharded._pending is not None:
        torch_private.leave_gradients(sharded.root)


def _forget_pending(root: nn.Module, args: Any, output: Any) -> None:
    """Let units wait no longer at the end of a forward pass that no backward pass follows."""
    sharded = sharded_of(root)
    if (
        isinstance(sharded, NativeSharded)
        and sharded._pending is not None
        and (sharded._is_by_hand or not any(tensor.requires_grad for tensor in torch_private.tensors_in(output)))
    ):
        sharded._forget_pending()


def _forget_after_backward(module: nn.Module, args: Any, output: Any) -> None:
    """Let pending units wait until the backward pass of the whole forward pass has ended too."""
    sharded = sharded_of(module)
    if isinstance(sharded, NativeSharded) and sharded._pending is not None and not sharded._is_by_hand:
        torch_private.at_end_of_backward(sharded.root, output, sharded._forget_pending)
