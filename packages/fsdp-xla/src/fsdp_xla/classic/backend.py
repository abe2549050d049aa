"""Sharding with torch_xla's ``XlaFullyShardedDataParallel``, one rank per XLA device. Knows no Lightning.

Joint set-up of module and optimizer works, and an optimizer from before the set-up follows its parameters, as under
every strategy. torch_xla asks for the optimizer after the module; ``repoint`` needs no such order, and shards that
are 1-D make the joint set-up the better one.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch_xla.runtime
from torch import Tensor, nn

from fsdp_core import Backend, ShardingError, UnsupportedCapabilityError
from fsdp_core.sharding import (
    ActivationCheckpointingPolicy,
    ShardPrecision,
    StepWrites,
    WrapPolicy,
    checkpoint_activations,
    clip_grads_by_norm,
    describe_policy,
    kept_as_built,
    select_units,
)
from fsdp_core.state import (
    ChunkedTensor,
    HeldGradients,
    Layout,
    Part,
    SavedTensor,
    aliases,
    clean_name,
    load_optimizer_state,
    optimizer_state,
    state_by_name,
)
from fsdp_xla.classic.accumulated_gradients import forget_in_units, held_by_units, restore_to_units
from fsdp_xla.classic.host_state import HostOptimizer, flat_on_host
from fsdp_xla.classic.lazy_state import DeviceFlat, gathered_in_turn, read_late
from fsdp_xla.classic.runtime import XLARuntime
from fsdp_xla.classic.unflattened import layout_of, named_members, note_order, put_in_place, user_module, written
from fsdp_xla.classic.unit_placement import place
from fsdp_xla.optimizer_init import FirstSteps
from fsdp_xla.options import check_collectives, check_options
from fsdp_xla.recomputation import recompute
from fsdp_xla.torch_xla_private import devices as xla
from fsdp_xla.torch_xla_private import units
from fsdp_xla.torch_xla_private.units import XlaFullyShardedDataParallel, is_shard

__all__ = ["XLABackend"]


class XLABackend(Backend):
    """Keeps of every parameter a run of its elements on each rank, padded to a multiple of 128.

    Args:
        auto_wrap_policy: Which submodules are units of their own: a set of classes, a callable, ``"auto"`` for the
            blocks repeated in the model's ``ModuleList`` s, or ``None``. The root comes last, with what is left.
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass.
        sequential_save: Whether state is copied to the host only when it is written, for ranks that write in turn.
        **options: Options of ``XlaFullyShardedDataParallel``; what is ``None`` is left to it.

    Raises:
        UnsupportedCapabilityError: An option is none of torch_xla's, or is set by something else.
    """

    accelerators = ("xla",)
    runtime: XLARuntime

    def __init__(
        self,
        *,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        sequential_save: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        options = {name: value for name, value in options.items() if value is not None}
        check_options(options)
        self.auto_wrap_policy = auto_wrap_policy
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.sequential_save = sequential_save
        #: Roots with backward passes or steps inside their forward pass.
        self._by_hand: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.first_steps = FirstSteps(lambda like: xla.as_data(torch.zeros(like.shape, dtype=like.dtype), like.device))
        self.options = options

    def terms(self) -> dict[str, Any]:
        return {
            **super().terms(),
            "auto_wrap_policy": describe_policy(self.auto_wrap_policy),
            "activation_checkpointing_policy": describe_policy(self.activation_checkpointing_policy),
            **self.options,
        }

    def effective_precision(self, precision: ShardPrecision) -> ShardPrecision:
        if precision.storage is not torch.float32 or precision.scaled:
            raise UnsupportedCapabilityError(
                f"precision={precision.name!r} can't be used with 'xla_fsdp': XlaFullyShardedDataParallel keeps its "
                "shards in fp32, and has no gradient scaler.\n"
                "Write precision='bf16-mixed', or '32-true'; strategy='xla_fsdp_spmd' can keep its shards in bf16."
            )
        return precision

    # -- building and sharding -------------------------------------------------------------------------------------

    @contextmanager
    def wrap_context(self) -> Iterator[None]:
        with self.runtime.building(), super().wrap_context(), kept_as_built(self.runtime):
            yield

    def units(self, module: nn.Module) -> list[nn.Module]:
        return select_units(module, _as_torch_policy(self.auto_wrap_policy))

    def shard(self, module: nn.Module) -> nn.Module:
        self.runtime.claim(module)
        if self.is_sharded(module):
            known: nn.Module = _root_of(module)
            return known
        self._check(module)
        self.remember(module)
        chosen = self.units(module)
        checkpoint_activations(module, self.activation_checkpointing_policy, recompute)
        for submodule in module.modules():
            forward = submodule.__dict__.get("forward")
            if forward is not None and not hasattr(forward, "__func__"):  # of activation checkpointing, or compiled
                forward.__func__ = type(submodule).forward  # torch_xla looks for it
        note_order(module.modules())
        sharded: set[nn.Module] = set()
        buffers: list[tuple[nn.Module, str, Tensor]] = []
        root: nn.Module | None = None
        for unit in (*chosen, module):
            own = [
                m
                for m in unit.modules()
                if m not in sharded and not isinstance(m, XlaFullyShardedDataParallel) and not _is_flattener(m)
            ]
            sharded.update(own)
            place(own, self.runtime)
            buffers += [(m, name, buffer) for m in own for name, buffer in m.named_buffers(recurse=False)]
            root = self._wrapped(unit)
            units.let_go_of_wholes(root)
            if unit is not module:
                put_in_place(module, unit, root)
        assert root is not None
        if "buffer_dtype" not in self.options:
            for owner, name, buffer in buffers:
                owner._buffers[name] = buffer  # at the dtype that it has; torch_xla casts all to one
        for shard in units.shards_of(root):
            # the root's own, or an optimizer over module.parameters() would leave them as they are
            module.register_parameter(shard._name, shard)
        units.reduce_what_waits(root)
        units.follow_freezing(root)
        root.register_forward_pre_hook(lambda root, _: units.follow_freezing(root))
        gc.collect()
        xla.settle()
        module.__dict__[_ROOT] = (root,)  # in a tuple, so that it becomes no submodule
        self.mark_sharded(module)
        self.mark_sharded(root)
        return root

    def _check(self, module: nn.Module) -> None:
        check_collectives(self.options, on_cpu=torch_xla.runtime.device_type() == "CPU")
        self.check_shardable(module)
        if type(module).forward is nn.Module.forward:
            raise ShardingError(
                f"{type(module).__name__} has no forward(), for which XlaFullyShardedDataParallel gathers parameters.\n"
                "Write a forward() that calls its parts, and call the module that the set-up returns."
            )
        for fqn, parameter in module.named_parameters():
            if parameter.dtype != torch.float32:
                raise ShardingError(
                    f"parameter {fqn!r} is in {parameter.dtype}, and XlaFullyShardedDataParallel keeps its shards in "
                    "torch.float32.\nLeave the model in that one dtype and write precision='bf16-mixed', or use "
                    "strategy='xla_fsdp_spmd'."
                )
            if parameter.ndim == 0 and self.options.get("shard_param_on_dim_0"):
                raise UnsupportedCapabilityError(
                    f"parameter {fqn!r} is 0-dim, and shard_param_on_dim_0=True shards along the first dimension.\n"
                    "Leave shard_param_on_dim_0 out, or give the parameter the shape (1,)."
                )
        for fqn, submodule in module.named_modules():
            if isinstance(submodule, XlaFullyShardedDataParallel):
                raise ShardingError(
                    f"{type(module).__name__} is already sharded: {fqn or 'the root'!r} is an "
                    "XlaFullyShardedDataParallel.\nRemove it, and give the strategy auto_wrap_policy={MyBlock} instead."
                )

    def _wrapped(self, unit: nn.Module) -> XlaFullyShardedDataParallel:
        wrapped = XlaFullyShardedDataParallel(
            unit,
            **{
                "compute_dtype": self.precision.compute,
                # the other kind of all-gather is made of sums over padding: no faster, and never the same on two ranks
                "pin_layout_in_collective_ops": False,
                **self.options,
            },
        )
        if not wrapped.sharded_params:
            wrapped.coalesce_all_gather_ops = False  # it would gather an empty list, which XLA doesn't survive
        return wrapped

    def written_module(self, root: nn.Module) -> nn.Module:
        return user_module(root)

    @contextmanager
    def as_written(self, module: nn.Module) -> Iterator[None]:
        root = _root_of(module)
        with written(root) as by_name:
            for name, parameter in by_name.items():
                self._note_written(user_module(root), name, parameter)
            yield

    @contextmanager
    def unmanaged(self, module: nn.Module) -> Iterator[None]:
        user = user_module(_root_of(module))
        with super().unmanaged(module):
            root = user.__dict__.pop(_ROOT)  # which a copy of it would copy too
            try:
                yield
            finally:
                user.__dict__[_ROOT] = root

    def layout(self, module: nn.Module) -> Layout:
        return layout_of(_root_of(module))

    def repoint(self, optimizers: Iterable[torch.optim.Optimizer], modules: Sequence[nn.Module]) -> None:
        optimizers = list(optimizers)
        super().repoint(optimizers, modules)
        held = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
        if xla.put_in_order([parameter for parameter in held if is_shard(parameter)]):
            xla.settle()

    # -- steps -----------------------------------------------------------------------------------------------------

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        return units.no_reduction(_root_of(module))

    def reshard(self, module: nn.Module) -> None:
        if _root_of(module) in self._by_hand:
            self._by_hand.discard(_root_of(module))
            units.end_step(_root_of(module))
        units.free_gathered(_root_of(module))

    def suspend_forward(self, module: nn.Module, loss: Tensor | None = None) -> None:
        root = _root_of(module)
        self._by_hand.add(root)
        if loss is not None:  # an optimizer's step needs nothing
            units.suspend_forward(root)

    def resume_forward(self, module: nn.Module) -> None:
        self._by_hand.add(_root_of(module))
        units.resume_forward(_root_of(module))

    def watch_writes(self, module: nn.Module) -> StepWrites | None:
        root = _root_of(module)
        return units.Writes(root, lambda: root in self._by_hand)

    def follow_requires_grad(self, module: nn.Module) -> None:
        self._by_hand.add(_root_of(module))
        units.follow_requires_grad(_root_of(module))

    def reset(self, module: nn.Module) -> None:
        self._by_hand.discard(_root_of(module))
        units.reset(_root_of(module))

    def holds_part(self, parameter: Tensor) -> bool:
        return is_shard(parameter)

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
            runtime=self.runtime.in_graph(),
            is_sharded=self.holds_part,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    # -- state -----------------------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        root = _root_of(module)
        self.reshard(root)
        xla.settle()
        held: dict[str, ChunkedTensor] = {}
        for shard, parts in self.layout(root).items():
            here = DeviceFlat(shard, parts).part if self.sequential_save else _on(flat_on_host(shard))
            held.update((part.name, here(part)) for part in parts)
        with self.as_written(root):
            user = user_module(root)
            state = {clean_name(name): value for name, value in type(user).state_dict(user).items()}
            first = aliases(user)
        found: dict[str, Any] = {}
        for name, value in state.items():
            known = first.get(name, name)
            if known in held:
                found[name] = held[known]
            else:
                found[name] = xla.on_host(value) if isinstance(value, Tensor) else value
        return found

    def load_model_state(
        self, module: nn.Module, state: Mapping[str, Any], strict: bool = True, *, check_only: bool = False
    ) -> None:
        late, self.sequential_save = self.sequential_save, False  # what is read into has to be in memory
        try:
            super().load_model_state(module, state, strict, check_only=check_only)
        finally:
            self.sequential_save = late

    def adopt_model_state(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        root = _root_of(module)
        flats: dict[nn.Parameter, Tensor] = {}
        for name, member in named_members(root):
            if name in state:
                if member.shard not in flats:
                    flats[member.shard] = flat_on_host(member.shard)
                at = member.offset
                for chunk in state[name].chunks:
                    flats[member.shard][at : at + chunk.data.numel()] = chunk.data.reshape(-1)
                    at += chunk.data.numel()
        for shard in xla.in_order(flats):  # which they are to stay in
            xla.replace(shard, flats[shard].view(shard.shape))
        for name, buffer in user_module(root).named_buffers():
            loaded = state.get(clean_name(name))
            if isinstance(loaded, Tensor):
                xla.replace(buffer, loaded)
        xla.settle()

    def accumulated_gradients(self, module: nn.Module) -> HeldGradients:
        root = _root_of(module)
        self.reshard(root)
        xla.settle()
        return held_by_units(root, self.layout(root))

    def forget_unreduced(self, module: nn.Module, names: Collection[str]) -> None:
        forget_in_units(_root_of(module), names)

    def restore_gradients(
        self, module: nn.Module, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        root = _root_of(module)
        self.reshard(root)
        restore_to_units(root, self.layout(root), own, reduced, self.runtime)
        xla.settle()

    def optimizer_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self.reshard(module)
        xla.settle()
        layout = self.layout(module)
        host: Any = HostOptimizer(optimizer, layout, late=self.sequential_save)
        described = optimizer_state(host, host.layout, self.runtime)
        return read_late(described, optimizer, layout) if self.sequential_save else described

    def load_optimizer_state(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        *,
        check_only: bool = False,
    ) -> None:
        self.reshard(module)
        xla.settle()
        host: Any = HostOptimizer(optimizer, self.layout(module), with_state=False)
        load_optimizer_state(host, host.layout, state, check_only=check_only)
        if check_only:
            return
        host.complete(state_by_name(host, host.layout, state)["state"])
        host.give_back()
        xla.settle()

    def full_tensor(self, value: Any) -> Any:
        if self.sequential_save and isinstance(value, ChunkedTensor):
            return gathered_in_turn(value, self.runtime)
        return super().full_tensor(value)


_ROOT = "_fsdp_xla_root"


def _root_of(module: nn.Module) -> XlaFullyShardedDataParallel:
    """The root that stands for a module, or the root itself."""
    if isinstance(module, XlaFullyShardedDataParallel):
        return module
    (root,) = module.__dict__[_ROOT]
    assert isinstance(root, XlaFullyShardedDataParallel)
    return root


def _on(flat: Tensor) -> Callable[[Part], Any]:
    return lambda part: part.of(flat)


def _is_flattener(module: nn.Module) -> bool:
    return type(module).__name__ == "XlaFlattenParamsWrapper"


def _as_torch_policy(policy: Any) -> Any:
    """Let a policy of torch_xla's, which counts ``unwrapped_params``, be asked as torch's are."""
    if (
        not callable(policy)
        or isinstance(policy, type)
        or "unwrapped_params" not in inspect.signature(policy).parameters
    ):
        return policy

    def as_torch(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return bool(policy(module=module, recurse=recurse, unwrapped_params=nonwrapped_numel))

    return as_torch
