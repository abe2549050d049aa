"""Sharding with torch's ``fully_shard`` (FSDP2). Knows no Lightning."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from fsdp_core import Backend, ShardingError, UnsupportedCapabilityError
from fsdp_core.sharding import (
    ActivationCheckpointingPolicy,
    ComparedShards,
    ReplicatedParameters,
    ShardPrecision,
    StepGradients,
    StepWrites,
    WrapPolicy,
    checkpoint_activations,
    describe_policy,
    kept_as_built,
    options_of,
    place,
    select_units,
    stays_whole,
)
from fsdp_core.state import HeldGradients, SavedTensor, clean_name, gathered_modules, give_back, refuse_half_gradients
from fsdp_fsdp2.torch_private import (
    AssignedData,
    Gathering,
    UnusedParameters,
    abandon_forward,
    finish_backward,
    gathered_parameters,
    gathered_shards,
    is_interrupted,
    set_unreduced_gradients,
    take_unfrozen,
    unreduced_gradients,
    without_hooks,
)

__all__ = ["FSDP2Backend"]


class FSDP2Backend(Backend):
    """Shards parameters along their first axis over all ranks, unit by unit.

    0-dim parameters, which ``fully_shard`` refuses, stay whole on every rank.

    Args:
        auto_wrap_policy: Which submodules are units of their own: a set of classes, a callable, ``"auto"`` for the
            blocks repeated in the model's ``ModuleList`` s, or ``None``. The root comes last, with what is left.
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass.
        reshard_after_forward: Whether units free their parameters between forward and backward pass. An integer keeps
            them sharded over groups of so many ranks. ``None``: all do but the root and the last unit, which the
            backward pass needs first.
        cpu_offload: Whether shards, gradients and optimizer state live in host memory. An
            :class:`~torch.distributed.fsdp.OffloadPolicy` is taken as it is.
        mp_policy: Dtypes of computation and reduction, instead of those that the precision implies.
        sync_each_batch: Whether gradients are reduced on every micro-batch of an accumulation. It keeps accumulated
            gradients sharded, for more communication.
    """

    # by root, and not by backend, for a root outlives the strategy that sharded it
    _replicated: ClassVar[weakref.WeakKeyDictionary[nn.Module, ReplicatedParameters]] = weakref.WeakKeyDictionary()
    _interrupted: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
    _units: ClassVar[weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[FSDPModule]]] = weakref.WeakKeyDictionary()
    _gathering: ClassVar[weakref.WeakKeyDictionary[nn.Module, Gathering]] = weakref.WeakKeyDictionary()
    _assigned: ClassVar[weakref.WeakKeyDictionary[nn.Module, AssignedData]] = weakref.WeakKeyDictionary()
    _unused: ClassVar[weakref.WeakKeyDictionary[nn.Module, UnusedParameters]] = weakref.WeakKeyDictionary()
    _steps: ClassVar[weakref.WeakKeyDictionary[nn.Module, StepGradients]] = weakref.WeakKeyDictionary()
    _shards: ClassVar[weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]]] = weakref.WeakKeyDictionary()

    def __init__(
        self,
        *,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        reshard_after_forward: bool | int | None = None,
        cpu_offload: bool | OffloadPolicy = False,
        mp_policy: MixedPrecisionPolicy | None = None,
        sync_each_batch: bool = False,
    ) -> None:
        super().__init__()
        _check_options(reshard_after_forward, cpu_offload, mp_policy)
        self.auto_wrap_policy = auto_wrap_policy
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.mp_policy = mp_policy
        self.sync_each_batch = sync_each_batch
        self._mesh: DeviceMesh | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """The 1-D mesh of all ranks, its axis named ``"shard"``."""
        if self._mesh is None:
            self._mesh = init_device_mesh(
                self.runtime.device.type, (self.runtime.world_size,), mesh_dim_names=("shard",)
            )
        return self._mesh

    def terms(self) -> dict[str, Any]:
        return {
            **super().terms(),
            "auto_wrap_policy": describe_policy(self.auto_wrap_policy),
            "activation_checkpointing_policy": describe_policy(self.activation_checkpointing_policy),
            "reshard_after_forward": self.reshard_after_forward,
            "cpu_offload": self.cpu_offload,
            "mp_policy": self.mp_policy,
        }

    def effective_precision(self, precision: ShardPrecision) -> ShardPrecision:
        if self.mp_policy is None:
            return precision
        return replace(
            precision, compute=self.mp_policy.param_dtype, reduce=self.mp_policy.reduce_dtype, autocast=False
        )

    @contextmanager
    def wrap_context(self) -> Iterator[None]:
        with super().wrap_context(), kept_as_built(vars(self).get("runtime")):
            yield

    def units(self, module: nn.Module) -> list[nn.Module]:
        return select_units(module, self.auto_wrap_policy)

    def shard(self, module: nn.Module) -> nn.Module:
        if self.is_sharded(module):
            self._check_not_interrupted(module)
            return module
        self._check(module)
        self.remember(module)
        units = self.units(module)
        checkpoint_activations(module, self.activation_checkpointing_policy)
        sharded: set[nn.Module] = set()
        kept_whole: list[nn.Parameter] = []
        compute = self._mp_policy().param_dtype
        for unit in (*units, module):
            own = [m for m in unit.modules() if m not in sharded]
            sharded.update(own)
            place(own, self.runtime)
            whole = {p for m in own for p in m.parameters(recurse=False) if stays_whole(m, p, compute)}
            replaced = {p for m in own for p in m.parameters(recurse=False)} - whole
            _check_dtypes(unit, replaced)
            fully_shard(
                unit,
                mesh=self.mesh,
                reshard_after_forward=self._reshards(unit, module, units),
                mp_policy=self._mp_policy(),
                offload_policy=self._offload_policy(),
                ignored_params=whole or None,
            )
            for parameter in replaced:
                # an optimizer that waits to be re-pointed still holds it: keep its shape, and not its memory
                parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
            kept_whole += whole
            give_back()
        in_order = [p for p in module.parameters() if any(p is w for w in kept_whole)]
        if in_order:
            self._replicated[module] = ReplicatedParameters(in_order, module, self.runtime)
        self._units[module] = weakref.WeakSet(_fsdp(unit) for unit in (*units, module))
        self._gathering[module] = Gathering(self._units[module])
        self._unused[module] = UnusedParameters([_fsdp(unit) for unit in (*units, module)], self.runtime)
        self._steps[module] = StepGradients(module)
        self._assigned[module] = AssignedData(self._units[module])
        module.register_forward_pre_hook(_check_assigned, prepend=True)
        if compute is not None:
            module.register_forward_pre_hook(_take_unfrozen_units, prepend=True)
        self._shards[module] = dict(module.named_parameters())
        self.mark_sharded(module)
        return module

    def _reshards(self, unit: nn.Module, root: nn.Module, units: Sequence[nn.Module]) -> bool | int | None:
        if self.reshard_after_forward is False:
            return False
        if unit is root:
            return None  # a root that frees its parameters would have none left when a step method calls its forward
        if self.reshard_after_forward is None and unit is units[-1]:
            return False  # it would be gathered again at once
        return self.reshard_after_forward

    @contextmanager
    def unmanaged(self, module: nn.Module) -> Iterator[None]:
        with super().unmanaged(module), without_hooks(module):
            yield

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        root, replicated = _fsdp(module), self._replicated.get(module)
        if self.sync_each_batch:
            yield
            return
        root.set_requires_gradient_sync(False)
        if replicated is not None:
            replicated.sync = False
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)
            if replicated is not None:
                replicated.sync = True

    def reshard(self, module: nn.Module) -> None:
        self._gathering[module].reshard()

    def suspend_forward(self, module: nn.Module, loss: Tensor | None = None) -> None:
        if loss is not None:  # else a step over the shards, and hooks before it that look at gradients
            self._steps[module].on = False
            self._unused[module].begin()

    def resume_forward(self, module: nn.Module) -> None:
        root, step = _fsdp(module), self._steps[module]
        step.on = False
        finish_backward(root, self._unused[module])
        self.reshard(module)  # all units: one that is kept after forward and got no gradient would be stale
        root.unshard()
        for unit in self._units[module]:
            for gathered, shard in gathered_parameters(unit):
                step.follow(gathered, shard, is_part=False)
        step.on = True

    def watch_writes(self, module: nn.Module) -> StepWrites | None:
        names = {part: clean_name(name) for name, part in module.named_modules()}
        return ComparedShards(one for unit in self._units[module] for one in gathered_shards(unit, names))

    def follow_requires_grad(self, module: nn.Module) -> None:
        shards = self._shards[module]
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(shards[name].requires_grad)
        for unit in self._units[module]:
            take_unfrozen(unit)  # to gather a root anew whose parameters are frozen makes it forget its dtypes

    def reset(self, module: nn.Module) -> None:
        self._unused[module].forget()
        reset = getattr(module, "reset_iter_state", None)
        if reset is not None:
            reset()
        else:
            self._interrupted.add(module)

    def abandon_forward(self, module: nn.Module) -> None:
        abandon_forward(_fsdp(module), self._units[module])

    def mend_interrupted(self, module: nn.Module) -> None:
        if is_interrupted(_fsdp(module)):
            refuse_half_gradients(module, self._shards[module].values())
            self.reset(module)

    def accumulated_gradients(self, module: nn.Module) -> HeldGradients:
        self.reshard(module)  # gathered parameters have gradients too, those that are found below
        held = super().accumulated_gradients(module)
        layout = self.layout(module)
        for unit in self._units[module]:
            held.own.update((layout[shard][0].name, grad) for shard, grad in unreduced_gradients(unit))
        return held

    def forget_unreduced(self, module: nn.Module, names: Collection[str]) -> None:
        given_up = {id(shard) for name, shard in self._shards[module].items() if clean_name(name) in names}
        for unit in self._units[module]:
            for shard, gradient in unreduced_gradients(unit):
                if id(shard) in given_up:
                    gradient.zero_()

    def restore_gradients(
        self, module: nn.Module, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        self.reshard(module)
        layout = self.layout(module)
        shards: dict[str, nn.Parameter] = {part.name: p for p, (part,) in layout.items() if isinstance(p, DTensor)}
        at_parameters = {name: read for name, read in own.items() if name not in shards}
        super().restore_gradients(module, at_parameters, reduced)
        unreduced = {shards[name]: read for name, read in own.items() if name in shards}
        for unit in module.modules():  # in one order on every rank, for each is gathered
            if isinstance(unit, FSDPModule):
                set_unreduced_gradients(_fsdp(module), unit, unreduced)
        self._unused[module].expect()

    def _check_not_interrupted(self, module: nn.Module) -> None:
        if module in self._interrupted:
            raise ShardingError(
                f"an exception has interrupted a step of {type(module).__name__}, and torch {torch.__version__} can't "
                "bring a sharded module back from that: its next losses would be wrong.\n"
                "Build the module anew and load a checkpoint, or upgrade to torch 2.13, which can."
            )

    def _check(self, module: nn.Module) -> None:
        self.check_shardable(module)
        name = type(module).__name__
        for fqn, submodule in module.named_modules():
            if isinstance(submodule, FSDPModule):
                raise ShardingError(
                    f"{name} is already sharded: fully_shard was applied to {fqn or 'the root'!r}.\n"
                    "Remove the fully_shard calls and give the strategy auto_wrap_policy={MyBlock} instead; "
                    "or keep them and use Lightning's ModelParallelStrategy."
                )
            if options_of(submodule):
                raise UnsupportedCapabilityError(
                    f"wrap({fqn}, {', '.join(f'{k}=...' for k in options_of(submodule))}) "
                    "has options, which 'fsdp2' takes for the whole model.\n"
                    "Give them to the strategy and write wrap(module), or use strategy='fsdp_native'."
                )
        size = self.reshard_after_forward
        if type(size) is int and (size < 1 or self.runtime.world_size % size):
            raise UnsupportedCapabilityError(
                f"reshard_after_forward={size} does not divide the {self.runtime.world_size} ranks into groups.\n"
                "Write a number that divides them, or True, False, or None: all but the root and the last unit reshard."
            )

    def _mp_policy(self) -> MixedPrecisionPolicy:
        if self.mp_policy is not None:
            return self.mp_policy
        return MixedPrecisionPolicy(param_dtype=self.precision.compute, reduce_dtype=self.precision.reduce)

    def _offload_policy(self) -> OffloadPolicy:
        if isinstance(self.cpu_offload, OffloadPolicy):
            return self.cpu_offload
        return CPUOffloadPolicy(pin_memory=self.runtime.device.type == "cuda") if self.cpu_offload else OffloadPolicy()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check_assigned(root: nn.Module, args: Any) -> None:
    assigned = FSDP2Backend._assigned.get(root)
    if assigned is not None and root not in gathered_modules:  # a copy of a root has none
        for unit in FSDP2Backend._units[root]:
            assigned.check(unit)


def _take_unfrozen_units(root: nn.Module, args: Any) -> None:
    if root not in gathered_modules:
        for unit in FSDP2Backend._units.get(root, ()):  # none of a copy
            take_unfrozen(unit)


def _check_dtypes(unit: nn.Module, parameters: set[nn.Parameter]) -> None:
    dtypes = {p.dtype for p in parameters if p.requires_grad}
    if len(dtypes) > 1:
        named = {p.dtype: name for name, p in unit.named_parameters() if p in parameters and p.requires_grad}
        told = ", ".join(f"{name!r} in {dtype}" for dtype, name in named.items())
        raise ShardingError(
            f"one unit of sharding, {type(unit).__name__}, holds trainable parameters of several dtypes: {told}.\n"
            "Convert them to one dtype, or make units of them that hold one each, with auto_wrap_policy."
        )


def _check_options(reshard_after_forward: object, cpu_offload: object, mp_policy: object) -> None:
    if not isinstance(reshard_after_forward, bool | int | None):
        raise UnsupportedCapabilityError(
            f"reshard_after_forward={reshard_after_forward!r} is not known to 'fsdp2'.\n"
            "Write True, False, None (all but the root and the last unit reshard), or the number of ranks to shard "
            "over."
        )
    if not isinstance(cpu_offload, bool | OffloadPolicy):
        raise UnsupportedCapabilityError(
            f"cpu_offload={cpu_offload!r} is not known to 'fsdp2'.\n"
            "Write cpu_offload=True, or a torch.distributed.fsdp.CPUOffloadPolicy; "
            "FSDP1's CPUOffload belongs to 'fsdp_native'."
        )
    if not isinstance(mp_policy, MixedPrecisionPolicy | None):
        raise UnsupportedCapabilityError(
            f"mp_policy={mp_policy!r} is not known to 'fsdp2'.\n"
            "Write precision='bf16-mixed' in its place, or give a torch.distributed.fsdp.MixedPrecisionPolicy; "
            "FSDP1's MixedPrecision belongs to 'fsdp_native'."
        )


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule), f"{type(module).__name__} was not sharded by this backend"
    return module
