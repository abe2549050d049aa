"""Sharding with torch's ``FullyShardedDataParallel`` (FSDP1). Knows no Lightning."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

from fsdp_core import Backend, UnsupportedCapabilityError
from fsdp_core.sharding import (
    ActivationCheckpointingPolicy,
    ComparedShards,
    ReplicatedParameters,
    ShardPrecision,
    StepGradients,
    StepWrites,
    WrapPolicy,
    checkpoint_activations,
    clip_grads_by_norm,
    describe_policy,
    is_flattened,
    is_part,
    kept_as_built,
    place,
    select_units,
    stays_whole,
)
from fsdp_core.state import HeldGradients, Layout, SavedTensor, aliases, clean_name, give_back, refuse_half_gradients
from fsdp_cuda_native.accumulated_gradients import held_by_units, restore_to_units
from fsdp_cuda_native.inputs import cast_inputs_of
from fsdp_cuda_native.meshes import ranks_to_shard_over
from fsdp_cuda_native.options import FSDP_OPTIONS, check_options, classes_to_checkpoint, named_member, wants_offload
from fsdp_cuda_native.torch_private import flat_parameters as torch_private
from fsdp_cuda_native.torch_private.unit_gradients import drop_gradients
from fsdp_cuda_native.unflattened import layout_of, local_parts, named_members, note_order, stand_ins, unwrapped
from fsdp_cuda_native.unit_checks import check_not_wrapped, check_unit, unit_options
from fsdp_cuda_native.wrappers import called_for, put_in_place, renew_parameters

__all__ = ["NativeBackend"]


class NativeBackend(Backend):
    """Flattens the parameters of each unit into one, of which every rank keeps a run of elements.

    0-dim parameters, which FSDP1 refuses, and those that it is told to ignore stay whole on every rank, and their
    gradients are averaged.

    Args:
        auto_wrap_policy: Which submodules are units of their own: a set of classes, a callable, ``"auto"`` for the
            blocks repeated in the model's ``ModuleList`` s, or ``None``. The root comes last, with what is left.
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass.
        activation_checkpointing: The same as a class or a list of classes.
        cpu_offload: Whether shards, gradients and optimizer state live in host memory.
        backward_prefetch: When the next unit's parameters are gathered in the backward pass; ``None``: when needed.
        mixed_precision: Dtypes of computation and reduction, instead of those that the precision implies.
        sync_each_batch: Whether gradients are reduced on every micro-batch of an accumulation. It keeps accumulated
            gradients sharded, for more communication.
        **options: Those of :data:`fsdp_cuda_native.options.FSDP_OPTIONS`.
    """

    # by root, and not by backend, for a root outlives the strategy that sharded it
    _replicated: ClassVar[weakref.WeakKeyDictionary[nn.Module, ReplicatedParameters]] = weakref.WeakKeyDictionary()
    _units: ClassVar[weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[FullyShardedDataParallel]]] = (
        weakref.WeakKeyDictionary()
    )
    _steps: ClassVar[weakref.WeakKeyDictionary[nn.Module, StepGradients]] = weakref.WeakKeyDictionary()
    # of roots whose forward pass was suspended and is still going on
    _pending: ClassVar[weakref.WeakKeyDictionary[nn.Module, list[torch_private.Pending]]] = weakref.WeakKeyDictionary()

    def __init__(
        self,
        *,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        activation_checkpointing: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
        cpu_offload: bool | CPUOffload | None = False,
        backward_prefetch: BackwardPrefetch | str | None = "BACKWARD_PRE",
        mixed_precision: MixedPrecision | None = None,
        sync_each_batch: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        given = {**FSDP_OPTIONS, **options}
        self.sharding_strategy = named_member("sharding_strategy", ShardingStrategy, given["sharding_strategy"])
        self.backward_prefetch = (
            None
            if backward_prefetch is None
            else named_member("backward_prefetch", BackwardPrefetch, backward_prefetch)
        )
        self.cpu_offload = wants_offload(cpu_offload)
        check_options(given, mixed_precision=mixed_precision, sync_each_batch=sync_each_batch, offload=self.cpu_offload)
        self.auto_wrap_policy = auto_wrap_policy
        self.activation_checkpointing_policy = (
            classes_to_checkpoint(activation_checkpointing, activation_checkpointing_policy)
            or activation_checkpointing_policy
        )
        self.mixed_precision = mixed_precision
        self.sync_each_batch = sync_each_batch
        self.options = given
        self._ranks: dict[str, Any] | None = None

    @property
    def use_orig_params(self) -> bool:
        """Whether an optimizer holds each parameter, and not one flat parameter for each unit."""
        return bool(self.options["use_orig_params"])

    def terms(self) -> dict[str, Any]:
        return {
            **super().terms(),
            "auto_wrap_policy": describe_policy(self.auto_wrap_policy),
            "activation_checkpointing_policy": describe_policy(self.activation_checkpointing_policy),
            "cpu_offload": self.cpu_offload,
            "backward_prefetch": self.backward_prefetch,
            "mixed_precision": self.mixed_precision,
            **self.options,
            "sharding_strategy": self.sharding_strategy,
        }

    def effective_precision(self, precision: ShardPrecision) -> ShardPrecision:
        if self.mixed_precision is None:
            return precision
        policy = self.mixed_precision
        return replace(precision, compute=policy.param_dtype, reduce=policy.reduce_dtype, autocast=False)

    # -- building and sharding -------------------------------------------------------------------------------------

    @contextmanager
    def wrap_context(self) -> Iterator[None]:
        runtime = vars(self).get("runtime") if self.sharding_strategy is not ShardingStrategy.NO_SHARD else None
        with super().wrap_context(), kept_as_built(runtime):
            yield

    def units(self, module: nn.Module) -> list[nn.Module]:
        return select_units(module, self.auto_wrap_policy)

    def shard(self, module: nn.Module) -> nn.Module:
        if self.is_sharded(module):
            return _root_of(module)
        self.check_shardable(module)
        check_not_wrapped(module)
        self.remember(module)
        units = self.units(module)
        checkpoint_activations(module, self.activation_checkpointing_policy)
        note_order(module.modules())
        ignored = {m for one in self._ignored(nn.Module) for m in one.modules()}
        whole: list[nn.Parameter] = self._ignored(nn.Parameter)
        given, compute = set(whole), self._mixed_precision().param_dtype

        def is_whole(owner: nn.Module, parameter: nn.Parameter) -> bool:
            return owner in ignored or stays_whole(owner, parameter, compute)

        sharded: set[nn.Module] = set()
        root: FullyShardedDataParallel | None = None
        for unit in (*(called_for(module, unit) for unit in units), module):
            own = [m for m in unit.modules() if m not in sharded and not isinstance(m, FullyShardedDataParallel)]
            sharded.update(own)
            place(
                own,
                self.runtime,
                self.options["param_init_fn"],
                leave=lambda owner, p: is_part(p) and p not in given and not is_whole(owner, p),
            )
            for owner in own:
                whole += [p for p in owner.parameters(recurse=False) if is_whole(owner, p)]
            check_unit(unit, own, whole, use_orig_params=self.use_orig_params)
            kept = renew_parameters(own, whole, self.runtime.device)
            with torch_private.flattening_parts(kept):
                root = self._wrapped(unit, whole)
            del kept
            give_back()
            torch_private.reduce_unused(root)
            if unit is not module:
                put_in_place(module, unit, root)
        assert root is not None
        root.check_is_root()  # now, while nothing has moved: shards get the memory that they keep
        self._units[root] = weakref.WeakSet(torch_private.units_of(root))
        self._steps[root] = StepGradients(root)
        for unit in self._units[root]:
            unit.register_forward_hook(_follow_gathered)
        self.reshard(root)
        in_order = [p for p in module.parameters() if any(p is w for w in whole)]
        if in_order:
            self._replicated[root] = ReplicatedParameters(in_order, root, self.runtime)
        cast_inputs_of(module, self._mixed_precision())
        module.register_forward_hook(_leave_gradients)
        root.register_forward_hook(_forget_pending)
        module.__dict__[_ROOT] = (root,)  # in a tuple, so that it becomes no submodule
        self.mark_sharded(module)
        self.mark_sharded(root)
        return root

    def written_module(self, root: nn.Module) -> nn.Module:
        return root.module if isinstance(root, FullyShardedDataParallel) else root

    @contextmanager
    def as_written(self, module: nn.Module) -> Iterator[None]:
        root = _root_of(module)
        self.reshard(root)
        with stand_ins(root) as by_name, unwrapped(root.module):
            for name, parameter in by_name.items():
                self._note_written(root.module, name, parameter)
            yield

    @contextmanager
    def unmanaged(self, module: nn.Module) -> Iterator[None]:
        written = _root_of(module).module
        with super().unmanaged(module):
            root = written.__dict__.pop(_ROOT)  # which a copy of it would copy too
            try:
                yield
            finally:
                written.__dict__[_ROOT] = root

    def layout(self, module: nn.Module) -> Layout:
        root = _root_of(module)
        self.reshard(root)
        held = tuple(root.module.parameters())
        known: tuple[nn.Parameter, ...]
        found: Layout | None
        known, found = root.__dict__.get(_LAYOUT, ((), None))
        # a save asks for it four times, and it changes only if the user puts another parameter instead of one
        if found is None or len(held) != len(known) or any(a is not b for a, b in zip(held, known, strict=True)):
            found = layout_of(root)
            root.__dict__[_LAYOUT] = (held, found)
        return found

    # -- steps -----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        root = _root_of(module)
        replicated = self._replicated.get(root)
        if self.sync_each_batch:
            yield
            return
        if replicated is not None:
            replicated.sync = False
        try:
            with torch_private.no_reduction(root):
                yield
        finally:
            if replicated is not None:
                replicated.sync = True

    def reshard(self, module: nn.Module) -> None:
        root = _root_of(module)
        for unit in self._units[root]:
            torch_private.reshard(unit)
            if root not in self._pending:
                torch_private.forget_views(unit)

    def suspend_forward(self, module: nn.Module, loss: Tensor | None = None) -> None:
        root = _root_of(module)
        if any(unit.forward_prefetch for unit in self._units[root]):
            # torch would take units that it has gathered ahead for current after a step inside the forward pass
            raise UnsupportedCapabilityError(
                "forward_prefetch=True can't be combined with manual optimization, whose steps are taken while units "
                "are gathered ahead.\nLeave forward_prefetch out."
            )
        self._steps[root].on = False
        torch_private.suspend_forward(root, loss, self._pending.setdefault(root, []))

    def resume_forward(self, module: nn.Module) -> None:
        root = _root_of(module)
        torch_private.resume_forward(root, self._pending.setdefault(root, []))
        _follow_gathered(root, None, None)
        self._steps[root].on = True

    def watch_writes(self, module: nn.Module) -> StepWrites | None:
        root = _root_of(module)
        names = {part: clean_name(name) for name, part in root.module.named_modules()}
        return ComparedShards(torch_private.gathered_shard(unit, names) for unit in self._units[root])

    def follow_requires_grad(self, module: nn.Module) -> None:
        root = _root_of(module)
        if torch_private.follow_requires_grad(root):
            self.resume_forward(root)

    def reset(self, module: nn.Module) -> None:
        root = _root_of(module)
        for unit in self._units[root]:
            drop_gradients(unit)
        torch_private.reset(root)
        _forget_pending(root, None, None)

    def abandon_forward(self, module: nn.Module) -> None:
        torch_private.abandon_forward(_root_of(module))

    def mend_interrupted(self, module: nn.Module) -> None:
        root = _root_of(module)
        if torch_private.is_interrupted(root):
            refuse_half_gradients(root.module, root.parameters())
            self.reset(root)

    def holds_part(self, parameter: Tensor) -> bool:
        return self._shards and is_flattened(parameter)

    def clip_norm(
        self,
        parameters: Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        mesh = self._ranks_to_shard_over()
        group = mesh.get("process_group")
        if "device_mesh" in mesh:
            group = mesh["device_mesh"].get_group(mesh["device_mesh"].ndim - 1)
        return clip_grads_by_norm(
            parameters,
            max_norm,
            runtime=self.runtime,
            is_sharded=self.holds_part,
            group=group[0] if isinstance(group, tuple) else group,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    # -- state -----------------------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        root = _root_of(module)
        with self.as_written(root):
            state = {clean_name(name): value for name, value in type(root.module).state_dict(root.module).items()}
            first = aliases(root.module)
        parts = {name: part.of(flat) for name, part, flat in local_parts(root)}
        return {name: parts.get(first.get(name, name), value) for name, value in state.items()}

    def aliases(self, module: nn.Module) -> dict[str, str]:
        root = _root_of(module)
        self.reshard(root)
        if self.use_orig_params and not any(any(torch_private.tied_members(unit)) for unit in self._units[root]):
            return aliases(root.module)  # each parameter is there by itself, and none has two names inside one unit
        return super().aliases(root)

    def optimizer_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(module, optimizer)
        if not self.use_orig_params:
            # flat parameters come unit by unit; who loads the state by number has the module's own order
            root = _root_of(module)
            with self.as_written(root):
                named = root.module.named_parameters(remove_duplicate=False)
                order = {clean_name(name): number for number, (name, _) in enumerate(named)}
            for group in state["param_groups"]:
                group["params"].sort(key=order.__getitem__)
        return state

    def accumulated_gradients(self, module: nn.Module) -> HeldGradients:
        root = _root_of(module)
        self.reshard(root)
        held, flattened = held_by_units(root, self.runtime), {name for name, _ in named_members(root)}
        for parameter, (part, *_) in self.layout(root).items():
            if part.name not in flattened and parameter.grad is not None:  # kept whole
                held.own[part.name] = parameter.grad
        return held

    def restore_gradients(
        self, module: nn.Module, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        root = _root_of(module)
        self.reshard(root)
        flattened = {name for name, _ in named_members(root)}
        whole = {name: read for name, read in own.items() if name not in flattened}
        super().restore_gradients(root, whole, {n: grad for n, grad in reduced.items() if n not in flattened})
        restore_to_units(root, own, reduced)

    # -- what is handed to torch -----------------------------------------------------------------------------------

    @property
    def _shards(self) -> bool:
        return self.sharding_strategy is not ShardingStrategy.NO_SHARD and self.runtime.world_size > 1

    def _ignored(self, kind: type[Any]) -> list[Any]:
        given = [*(self.options["ignored_modules"] or ()), *(self.options["ignored_states"] or ())]
        return [one for one in given if isinstance(one, kind)]

    def _ranks_to_shard_over(self) -> dict[str, Any]:
        if self._ranks is None:
            self._ranks = ranks_to_shard_over(
                self.sharding_strategy,
                self.options["process_group"],
                self.options["device_mesh"],
                self.auto_wrap_policy not in ("auto", None),
                self.runtime,
            )
        return self._ranks

    def _mixed_precision(self) -> MixedPrecision:
        if self.mixed_precision is not None:
            return self.mixed_precision
        return MixedPrecision(
            param_dtype=self.precision.compute, reduce_dtype=self.precision.reduce, cast_forward_inputs=True
        )

    def _wrapped(self, unit: nn.Module, whole: list[nn.Parameter]) -> FullyShardedDataParallel:
        # the CPU's shards live in host memory as it is; torch would ask for memory pinned for an accelerator
        offload = self.cpu_offload and self.runtime.device.type != "cpu"
        with warnings.catch_warnings():
            # one rank has nothing to shard, which needs no telling
            warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
            return FullyShardedDataParallel(
                unit,
                **{
                    **self._ranks_to_shard_over(),
                    "sharding_strategy": self.sharding_strategy,
                    "cpu_offload": CPUOffload(offload_params=offload),
                    "backward_prefetch": self.backward_prefetch,
                    "mixed_precision": self._mixed_precision(),
                    "device_id": self.runtime.device,
                    "forward_prefetch": self.options["forward_prefetch"],
                    "limit_all_gathers": self.options["limit_all_gathers"],
                    "use_orig_params": self.use_orig_params,
                    "ignored_states": list(whole) or None,
                    **unit_options("", unit),
                },
            )


_ROOT = "_fsdp_cuda_native_root"
_LAYOUT = "_fsdp_cuda_native_layout"


def _root_of(module: nn.Module) -> FullyShardedDataParallel:
    """The root that stands for a module of the user's, or the root itself."""
    if isinstance(module, FullyShardedDataParallel):
        return module
    assert _ROOT in module.__dict__, f"{type(module).__name__} was not sharded by this backend"
    root: FullyShardedDataParallel = module.__dict__[_ROOT][0]
    return root


def _leave_gradients(module: nn.Module, args: Any, output: Any) -> None:
    (root,) = module.__dict__.get(_ROOT, (None,))  # a copy has none
    if root in NativeBackend._pending:
        torch_private.leave_gradients(root)


def _follow_gathered(unit: nn.Module, args: Any, output: Any) -> None:
    """Let what a unit has gathered inside a step by hand show the gradients of its shards."""
    for root in NativeBackend._pending:
        if unit in NativeBackend._units[root]:
            for gathered, shard, is_part in torch_private.gathered_parameters(_root_of(unit)):
                NativeBackend._steps[root].follow(gathered, shard, is_part=is_part)


def _forget_pending(root: nn.Module, args: Any, output: Any) -> None:
    pending = NativeBackend._pending.pop(root, None)
    if pending is not None:
        torch_private.forget_pending(_root_of(root), pending)
