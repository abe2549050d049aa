"""A root sharded by ``fully_shard``: its steps, unreduced gradients, and calls outside a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_core import Runtime, Sharded, ShardingError
from fsdp_core.sharding import (
    GRADIENT_AXES,
    ReplicatedParameters,
    StepGradients,
    outside_of_compilation,
    sharded_of,
)
from fsdp_core.state import HeldGradients, SavedTensor, clean_name, gathered_modules, refuse_half_gradients
from fsdp_fsdp2.expert_parallel.sharding import is_of_experts, mean_over_peers, whole_gradient
from fsdp_fsdp2.tensor_parallel.unplanned_gradients import check_unplanned
from fsdp_fsdp2.torch_private.conversions import allow_conversions
from fsdp_fsdp2.torch_private.data_writes import follow_data_of_shards
from fsdp_fsdp2.torch_private.forward_passes import abandon_forward, is_idle, resume_forward
from fsdp_fsdp2.torch_private.frozen_shards import init_dtypes_if_unfrozen
from fsdp_fsdp2.torch_private.gathered_values import written_since
from fsdp_fsdp2.torch_private.gathered_writes import GatheredWrites
from fsdp_fsdp2.torch_private.hooks import refuse_copies, without_hooks
from fsdp_fsdp2.torch_private.parameter_groups import (
    AssignedData,
    Gathering,
    gathered_parameters,
    has_run,
    param_groups_of,
    set_unreduced_gradients,
    unreduced_gradients,
)
from fsdp_fsdp2.torch_private.profiling import speed_up
from fsdp_fsdp2.torch_private.recorded_graphs import free_written
from fsdp_fsdp2.torch_private.state_dicts import follow_state_dicts
from fsdp_fsdp2.torch_private.unit_calls import watch_calls
from fsdp_fsdp2.torch_private.unused_parameters import UnusedParameters, finish_backward

if TYPE_CHECKING:
    from fsdp_fsdp2.backend import FSDP2Backend
    from fsdp_fsdp2.context_parallel.attention_and_losses import ContextParallel

__all__ = ["FSDP2Sharded"]


def _name_as_user_class(cls: type[FSDPModule]) -> None:
    """Give the class that ``fully_shard`` has derived from a user's class the name of that, for reprs and messages."""
    user_class = next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))
    cls.__name__, cls.__qualname__ = user_class.__name__, user_class.__qualname__


class FSDP2Sharded(Sharded):
    """A module whose units, and then the module itself, were sharded by ``fully_shard``.

    Args:
        module: The module.
        units: Its units in the order in which they were sharded, without the module itself.
        replicated: Its replicated parameters.
        casts: Whether units compute in a dtype other than that of their shards.
        runtime: The ranks.

    Attributes:
        units: The units, the root last.
        shards: The sharded parameters by the module's names.
        replicated: The replicated parameters; ``None`` if there are none.
        step: The gradients that gathered parameters show inside a manual step.
        gathering: Reshards units that are gathered.
        unused: Reduces gradients of parameters that this rank's backward pass does not reach.
        assigned: Detects assignments to the ``.data`` of sharded parameters.
        context: Makes attention see the whole sequence; ``None`` without context parallelism.
        is_unrecoverable: Whether an exception has ended a step under a torch that can't recover a module from it.
    """

    backend: FSDP2Backend
    called_hooks = ("register_post_accumulate_grad_hook",)
    trains_in_evaluation = True

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        replicated: Sequence[nn.Parameter],
        *,
        casts: bool,
        runtime: Runtime,
    ) -> None:
        super().__init__(module)
        self._fsdp = _as_fsdp_module(module)
        peers = runtime.along(*GRADIENT_AXES)
        self.replicated: ReplicatedParameters | None = None
        if replicated:
            self.replicated = ReplicatedParameters(replicated, module, peers, self.asks_accumulates)
        self.units = [_as_fsdp_module(unit) for unit in (*units, module)]
        for unit in self.units:
            _name_as_user_class(type(unit))
            speed_up(unit)
        self.gathering = Gathering(self.units)
        self.step = StepGradients(module)
        self.unused = UnusedParameters(self.units, runtime, self.step, WeakMethod(self.inner_pass_ended))
        self.assigned = AssignedData(self.units)
        follow_data_of_shards()  # of all in this process
        self.shards = dict(module.named_parameters())
        names = {parameter: clean_name(name) for name, parameter in self.shards.items()}
        self._writes = [GatheredWrites(unit, self._fsdp, names, self.written_values) for unit in self.units]
        self.is_unrecoverable = False
        self.context: ContextParallel | None = None
        allow_conversions(module, self.units)
        for unit, writes in zip(self.units, self._writes, strict=True):
            watch_calls(unit, self._fsdp, writes, self.unused)
            refuse_copies(unit)
        follow_state_dicts(self.units, self.unused)
        module.register_forward_pre_hook(_check_assigned_data, prepend=True)
        if casts:
            module.register_forward_pre_hook(_init_dtypes_of_unfrozen, prepend=True)

    def check_recoverable(self) -> None:
        """Refuse to continue after an exception in a step from which torch can't recover the module.

        Raises:
            ShardingError: There was such an exception.
        """
        if self.is_unrecoverable:
            user_class = next(cls for cls in type(self.root).__mro__ if not issubclass(cls, FSDPModule))
            raise ShardingError(
                f"an exception has interrupted a step of {user_class.__name__}, and torch {torch.__version__} "
                "can't recover a sharded module from that: its next losses would be wrong.\n"
                "Build the module again and load a checkpoint, or upgrade to torch 2.13, which can recover it."
            )

    @contextmanager
    def unmanaged(self) -> Iterator[None]:
        with super().unmanaged(), without_hooks(self.root):
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        root, replicated = self._fsdp, self.replicated
        if self.backend.options.sync_each_batch is True:
            yield
            return
        within_replica = self.backend.options.sync_each_batch == "within_replica"
        set_sync = root.set_requires_all_reduce if within_replica else root.set_requires_gradient_sync
        set_sync(False)
        if replicated is not None:
            replicated.sync = False
        try:
            yield
        finally:
            set_sync(True)
            if replicated is not None:
                replicated.sync = True

    def check_gradients(self, parameters: Iterable[Tensor]) -> None:
        check_unplanned(parameters, self.layout(), self.runtime)

    def reshard(self) -> None:
        self.unused.recorded_graphs.release()
        self.gathering.reshard()

    def end_forward(self) -> None:
        self.unused.show_gradients()

    def suspend_forward(self, loss: Tensor | None = None) -> None:
        if loss is not None:  # otherwise an optimizer steps, whose hooks may still read the gradients that are shown
            self.step.on = False
            self.unused.begin()

    def resume_forward(self) -> None:
        self.step.on = False
        finish_backward(self._fsdp, self.unused)
        self.reshard()  # also units that stay gathered after their forward pass: their values may be old now
        resume_forward(self._fsdp)
        self.unused.show_gradients()

    def follow_written_shards(self) -> None:
        has_freed = free_written(param_groups_of(self._fsdp), self.unused.recorded_graphs)
        if has_freed:
            resume_forward(self._fsdp)
            self.unused.show_gradients()

    def stepped_inside(self) -> None:
        self.resume_forward()

    def show_gradients(self) -> None:
        self.unused.show_gradients()

    def is_idle(self) -> bool:
        return is_idle(self._fsdp)

    def accumulates(self) -> bool:
        return self.unused.accumulates()

    @property
    def keeps_graph(self) -> bool:  # type: ignore[override]
        return bool(self.unused.recorded_graphs)

    @property
    def has_freed_parameters_of_graph(self) -> bool:  # type: ignore[override]
        return self.unused.recorded_graphs.has_freed

    def leaves(self) -> Iterable[Tensor]:
        return [*self.root.parameters(), *self.shards.values(), *gathered_parameters(self.units)]

    def written_since_gathered(self, numel: int, times: int) -> list[str]:
        written_shards = chain.from_iterable(written_since(unit, numel, times) for unit in self.units)
        ids = set(map(id, written_shards))
        return [clean_name(name) for name, shard in self.shards.items() if id(shard) in ids]

    def keep_writes(self) -> None:
        for writes in self._writes:
            if writes.is_of_root:
                writes.check_own()  # other units do when they are called
            writes.keep()

    def follow_requires_grad(self) -> None:
        for name, parameter in self.root.named_parameters():
            parameter.requires_grad_(self.shards[name].requires_grad)
        for unit in self.units:
            init_dtypes_if_unfrozen(unit)  # a root that was frozen when it was gathered again has got none

    def reset(self) -> None:
        self.unused.forget()
        if self.replicated is not None:
            self.replicated.forget()
        if not has_run(self._fsdp):
            return
        reset_iter_state = getattr(self.root, "reset_iter_state", None)  # from torch 2.13 on
        if reset_iter_state is not None:
            reset_iter_state()
        else:
            self.is_unrecoverable = True

    def abandon_forward(self) -> None:
        abandon_forward(self._fsdp, self.units)

    @property
    def is_interrupted(self) -> bool:
        return self.unused.is_interrupted() or (self.replicated is not None and self.replicated.interrupted)

    def mend_interrupted(self) -> None:
        if self.is_interrupted:
            refuse_half_gradients(self.root, self.shards.values(), incomplete=bool(self.unused.partly))
            self.reset()
            self.check_recoverable()

    def accumulated_gradients(self) -> HeldGradients:
        self.reshard()  # or the gradients of gathered parameters would be collected, instead of the shards'
        with self.unused.all_reduced(self._fsdp):
            gradients = super().accumulated_gradients()
        layout = self.layout()
        for unit in self.units:
            for shard, grad in unreduced_gradients(unit):
                is_part = isinstance(grad, DTensor) and is_of_experts(grad)
                gradients.own[layout[shard][0].name] = whole_gradient(grad) if is_part else grad
        return gradients

    def model_state(self) -> dict[str, Any]:
        self.reshard()
        state = super().model_state()
        for name, value in state.items():
            has_elements = type(value) is Tensor and value.numel() > 0 and not value.is_meta
            if has_elements and not value.untyped_storage().nbytes():
                raise ShardingError(
                    f"{name!r} is a parameter that was gathered when it got this name, after the model was sharded, as "
                    "torch.nn.utils.prune and parametrizations do: its memory was its unit's, which has freed it.\n"
                    "Call these before fabric.setup(), or in configure_model(). To set values to zero later, write "
                    "with fsdp_core.gathered(module, modifier_rank=0)."
                )
        return state

    def forget_unreduced(self, names: Collection[str]) -> None:
        shard_ids = {id(shard) for name, shard in self.shards.items() if clean_name(name) in names}
        self.unused.partly.zero(shard_ids)
        for unit in self.units:
            for shard, gradient in unreduced_gradients(unit):
                if id(shard) in shard_ids:
                    gradient.zero_()

    def restore_gradients(
        self, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        self.reshard()
        self.unused.partly.forget()
        layout = self.layout()
        # without the replicated parameters, which are no DTensors
        shards: dict[str, nn.Parameter] = {part.name: p for p, (part,) in layout.items() if isinstance(p, DTensor)}
        own = mean_over_peers(own, shards, self.runtime)
        of_replicated = {name: read for name, read in own.items() if name not in shards}
        super().restore_gradients(of_replicated, reduced)
        unreduced = {shards[name]: read for name, read in own.items() if name in shards}
        for unit in self.root.modules():  # each unit is gathered, so the order must be the same on every rank
            if isinstance(unit, FSDPModule):
                set_unreduced_gradients(self._fsdp, unit, unreduced)
        self.unused.reduce_all_later()


@outside_of_compilation
def _check_assigned_data(root: nn.Module, args: Any) -> None:
    sharded = sharded_of(root)  # a copy of a root has none
    if isinstance(sharded, FSDP2Sharded) and root not in gathered_modules:
        sharded.assigned.check()


def _init_dtypes_of_unfrozen(root: nn.Module, args: Any) -> None:
    sharded = sharded_of(root)
    if isinstance(sharded, FSDP2Sharded) and root not in gathered_modules:
        for unit in sharded.units:
            init_dtypes_if_unfrozen(unit)


def _as_fsdp_module(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule), f"{type(module).__name__} was not sharded by this backend"
    return module
