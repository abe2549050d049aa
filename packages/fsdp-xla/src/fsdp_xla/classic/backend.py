"""Sharding with torch_xla's ``XlaFullyShardedDataParallel``, one rank per XLA device. Independent of Lightning.

torch_xla requires an optimizer to be created after the module is wrapped. Here it may be created before, as under every
strategy: ``rebind_optimizers`` re-points it to the shards. That is preferable, because the shards are 1-D and an
optimizer may look at shapes.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch_xla.runtime
from torch import Tensor, nn

from fsdp_core import Backend, Sharded, ShardingError, UnsupportedCapabilityError
from fsdp_core.sharding import (
    ShardingPlan,
    ShardPrecision,
    checkpoint_activations,
    detach_part,
    in_backward,
    kept_as_built,
    materialize,
    parameter_orders,
    put_in_place,
    select_units,
)
from fsdp_core.state import ChunkedTensor
from fsdp_xla.classic.lazy_state import gather_in_turn
from fsdp_xla.classic.options import XLAFSDPOptions
from fsdp_xla.classic.runtime import XLARuntime
from fsdp_xla.classic.sharded import XLASharded, call_in_backward_error
from fsdp_xla.optimizer_init import FirstSteps
from fsdp_xla.options import check_collectives
from fsdp_xla.recomputation import recompute
from fsdp_xla.torch_xla_private import devices as xla
from fsdp_xla.torch_xla_private import units
from fsdp_xla.torch_xla_private.units import WrappedUnit, XlaFullyShardedDataParallel, is_shard, parameter_of

__all__ = ["XLABackend"]


class XLABackend(Backend):
    """Keeps consecutive elements of every parameter on each rank, padded to a multiple of 128.

    :class:`~fsdp_xla.classic.options.XLAFSDPOptions` documents the options.
    """

    accelerators = ("xla",)
    runtime: XLARuntime

    options: XLAFSDPOptions

    def __init__(self, options: XLAFSDPOptions) -> None:
        super().__init__(options)
        self.first_steps = FirstSteps(lambda like: xla.as_data(torch.zeros(like.shape, dtype=like.dtype), like.device))

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

    def check_shardable(self, module: nn.Module) -> None:
        super().check_shardable(module)
        check_collectives(self.options.wrapper_arguments(), on_cpu=torch_xla.runtime.device_type() == "CPU")
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
            if parameter.ndim == 0 and self.options.shard_param_on_dim_0:
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

    def units(self, module: nn.Module) -> list[nn.Module]:
        return select_units(module, _as_torch_policy(self.options.auto_wrap_policy))

    def shard(self, module: nn.Module, plan: ShardingPlan | None = None) -> Sharded:
        self.runtime.claim(module)
        return super().shard(module, plan)

    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> XLASharded:
        checkpoint_activations(module, plan, recompute)
        for submodule in module.modules():
            forward = submodule.__dict__.get("forward")
            # A forward() that activation checkpointing or torch.compile has set lacks the attribute that torch_xla
            # reads.
            if forward is not None and not hasattr(forward, "__func__"):
                forward.__func__ = type(submodule).forward
        orders = parameter_orders(module.modules())
        buffers: list[tuple[nn.Module, str, Tensor]] = []
        root: XlaFullyShardedDataParallel | None = None
        for unit in plan.split_by_unit(module):
            _materialize_on_device(unit.own, self.runtime)
            buffers += [(m, name, buffer) for m in unit.own for name, buffer in m.named_buffers(recurse=False)]
            root = self._wrap_unit(unit.module)
            units.free_originals(root)
            if unit.module is not module:
                put_in_place(module, unit.module, root)
        assert root is not None
        if self.options.buffer_dtype is None:
            for owner, name, buffer in buffers:
                owner._buffers[name] = buffer  # undoes torch_xla's cast of all buffers to one dtype
        for shard in units.shards_of(root):
            # Registered, so that an optimizer over module.parameters() gets the root's own shards too.
            module.register_parameter(shard._name, shard)
        units.reduce_pending(root)
        units.watch_calls(root)
        units.follow_freezing(root)
        units.show_shards(root, module)
        root.register_forward_pre_hook(_before_call)
        gc.collect()
        xla.settle()
        return XLASharded(root, module, orders)

    def _wrap_unit(self, unit: nn.Module) -> XlaFullyShardedDataParallel:
        wrapped = XlaFullyShardedDataParallel(
            unit,
            **{
                "compute_dtype": self.precision.compute,
                # With pinned layouts, an all-gather is a sum over padding: no faster, and another program on each rank.
                "pin_layout_in_collective_ops": False,
                **self.options.wrapper_arguments(),
            },
        )
        if not wrapped.sharded_params:
            wrapped.coalesce_all_gather_ops = False  # gathering an empty list crashes XLA
        instance: Any = wrapped
        instance.__class__ = WrappedUnit.named_as(type(unit))
        return wrapped

    def rebind_optimizers(self, optimizers: Iterable[torch.optim.Optimizer], roots: Sequence[Sharded]) -> None:
        optimizers = list(optimizers)
        super().rebind_optimizers(optimizers, roots)
        optimizer_params = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
        if xla.put_in_order([parameter for parameter in optimizer_params if is_shard(parameter)]):
            xla.settle()

    def full_tensor(self, value: Any) -> Any:
        if self.options.sequential_save and isinstance(value, ChunkedTensor):
            return gather_in_turn(value, self.runtime)
        return super().full_tensor(value)


def _before_call(root: nn.Module, args: Any) -> None:
    units.follow_freezing(root)
    if in_backward() and units.waits_for_backward(root):
        raise call_in_backward_error()


def _materialize_on_device(modules: Sequence[nn.Module], runtime: XLARuntime) -> None:
    """Move a unit's parameters and buffers to the device, with rank 0's values; tied parameters stay tied.

    Args:
        modules: The unit's modules. What they have on the meta device is materialized first.
        runtime: The ranks, all of which must call it.
    """
    with runtime.building():
        materialize(modules, torch.device("cpu"))
    device = runtime.device
    # New and old parameters by the old one's id. The old one is kept, so that its id is not reused.
    new_and_old: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in new_and_old:
                part_of_rank = detach_part(parameter)
                if part_of_rank is not None:
                    data = torch.cat(runtime.gather_objects(part_of_rank.part)).view(part_of_rank.shape)
                else:
                    data = runtime.broadcast_object(parameter.data.cpu())
                new_parameter = parameter_of(data.to(device), parameter.requires_grad)
                new_parameter.__dict__.update(parameter.__dict__)
                new_and_old[id(parameter)] = (new_parameter, parameter)
                # An optimizer still holds the old parameter until it is re-pointed, so only its memory is freed.
                parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
            module._parameters[name] = new_and_old[id(parameter)][0]
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = runtime.broadcast_object(buffer.cpu()).to(device)


def _as_torch_policy(policy: Any) -> Any:
    """Adapt a torch_xla policy, which takes ``unwrapped_params``, to torch's signature."""
    if (
        not callable(policy)
        or isinstance(policy, type)
        or "unwrapped_params" not in inspect.signature(policy).parameters
    ):
        return policy

    def as_torch(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return bool(policy(module=module, recurse=recurse, unwrapped_params=nonwrapped_numel))

    return as_torch
