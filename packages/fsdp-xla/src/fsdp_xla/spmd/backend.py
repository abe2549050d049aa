"""Sharding with torch_xla's SPMD: XLA's partitioner shards marked tensors. Independent of Lightning."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_core import Backend, Sharded, UnsupportedCapabilityError
from fsdp_core.sharding import (
    ParameterPlan,
    ShardingPlan,
    ShardPrecision,
    checkpoint_activations,
    materialize,
    options_of,
    select_units,
)
from fsdp_core.state import ChunkedTensor, named_parameters
from fsdp_xla.optimizer_init import FirstSteps
from fsdp_xla.recomputation import recompute
from fsdp_xla.spmd.boundaries import Boundaries
from fsdp_xla.spmd.options import XLASPMDOptions, plain_plan
from fsdp_xla.spmd.partitioning import PartitionSpec, batch_spec, parameter_spec, planned_dims, replicated_spec
from fsdp_xla.spmd.runtime import FSDP_AXIS, XLASPMDRuntime
from fsdp_xla.spmd.sharded import XLASPMDSharded
from fsdp_xla.spmd.shards import HostShards, layout_on_devices
from fsdp_xla.torch_xla_private.sharded_tensors import is_marked, mark, mark_as, sharding_of

__all__ = ["XLASPMDBackend"]


class XLASPMDBackend(Backend):
    """Shards parameters over the devices of this host, in place: each is marked along one of its dimensions.

    There is one rank, which sees full tensors; XLA places their shards. Parameters that don't divide evenly are padded,
    and 0-dim parameters are replicated on every device.

    :class:`~fsdp_xla.spmd.options.XLASPMDOptions` documents the options. Between units, activations are sharded
    along the batch, and gradients are completed.
    """

    accelerators: ClassVar[tuple[str, ...]] = ("xla",)

    options: XLASPMDOptions

    def __init__(self, options: XLASPMDOptions) -> None:
        super().__init__(options)
        self.first_steps = FirstSteps(_zeros_like)
        self._optimizers_with_hook: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @property
    def spmd(self) -> XLASPMDRuntime:
        """The runtime, which holds the mesh."""
        assert isinstance(self.runtime, XLASPMDRuntime), "XLASPMDBackend runs on an XLASPMDRuntime"
        return self.runtime

    def sharding_config(self) -> dict[str, Any]:
        return {**super().sharding_config(), "mesh": dict(self.spmd.device_mesh.shape())}

    def effective_precision(self, precision: ShardPrecision) -> ShardPrecision:
        if torch.float16 in (precision.storage, precision.compute):
            raise UnsupportedCapabilityError(
                f"precision={precision.name!r} can't be used with 'xla_fsdp_spmd': XLA devices compute in bfloat16, "
                "and in float16 neither natively nor with a scaler.\n"
                "Write precision='bf16-mixed', 'bf16-true' or '32-true'."
            )
        return precision

    # -- sharding --------------------------------------------------------------------------------------------------

    def check_shardable(self, module: nn.Module) -> None:
        super().check_shardable(module)
        if plain_plan(self.options.tensor_plan) and self.spmd.tensor_parallel_size == 1:
            raise UnsupportedCapabilityError(
                "tensor_plan says how to shard weights along the mesh axis 'model', and there is none.\n"
                "Write tensor_parallel_size=2 (or more) too, or leave tensor_plan out."
            )
        for name, submodule in module.named_modules():
            if options_of(submodule):
                raise UnsupportedCapabilityError(
                    f"wrap({name}, {', '.join(f'{k}=...' for k in options_of(submodule))}) has options, which "
                    "'xla_fsdp_spmd' takes for the whole model.\nGive them to the strategy and write wrap(module)."
                )

    def units(self, module: nn.Module) -> list[nn.Module]:
        return select_units(module, self.options.auto_wrap_policy)

    def details(self, module: nn.Module, units: Sequence[nn.Module]) -> dict[str, dict[str, Any]]:
        return {"divided dimension": planned_dims(module, plain_plan(self.options.tensor_plan))}

    def local_numels(self, parameters: Sequence[ParameterPlan]) -> list[int] | None:
        """Return the sizes of the first device's shards, to which the other devices pad theirs."""
        if self.options.tensor_plan:
            return None
        shards = self.spmd.device_mesh.shape()[FSDP_AXIS]
        numels = []
        for parameter in parameters:
            spec = parameter_spec(parameter.shape, shards)
            sizes = zip(parameter.shape, spec, strict=True)
            numels.append(prod(-(-size // shards) if axis == FSDP_AXIS else size for size, axis in sizes))
        return numels

    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> XLASPMDSharded:
        checkpoint_activations(module, plan, recompute)
        planned_dim_of = plan.details["divided dimension"]
        dims = {id(parameter): planned_dim_of.get(name) for name, parameter in named_parameters(module)}
        sharded_parameters: dict[int, nn.Parameter] = {}
        replaced_parameters: list[nn.Parameter] = []  # kept alive: a freed parameter's id could be reused
        units = plan.split_by_unit(module)
        for unit in units:
            own_tensors = (
                t for submodule in unit.own for t in (*submodule.parameters(False), *submodule.buffers(False))
            )
            if any(tensor.is_meta for tensor in own_tensors):
                dims.update(_materialize(unit.own, dims))
            for submodule in unit.own:
                self._shard_parameters(submodule, dims, sharded_parameters, replaced_parameters)
        module.to(self.runtime.device)  # moves what is neither parameter nor buffer, such as metrics
        boundaries = Boundaries(module, [unit.module for unit in units[:-1]], self.spmd.device_mesh)
        sharded = XLASPMDSharded(module, boundaries)
        self.spmd.settle()
        return sharded

    def _shard_parameters(
        self,
        module: nn.Module,
        dims: Mapping[int, int | None],
        sharded_parameters: dict[int, nn.Parameter],
        replaced_parameters: list[nn.Parameter],
    ) -> None:
        """Put a module's own parameters and buffers on the devices, in shards. Tied parameters stay tied."""
        shards = self.spmd.device_mesh.shape()[FSDP_AXIS]
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in sharded_parameters:
                spec = parameter_spec(tuple(parameter.shape), shards, dims.get(id(parameter)))
                on_devices = nn.Parameter(self.move_and_mark(parameter.detach(), spec), parameter.requires_grad)
                on_devices.__dict__.update(parameter.__dict__)  # attributes that users have set on parameters
                sharded_parameters[id(parameter)] = on_devices
                replaced_parameters.append(parameter)
                # An optimizer still holds the old parameter until it is re-pointed, so only its memory is freed.
                parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
            setattr(module, name, sharded_parameters[id(parameter)])
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                setattr(module, name, self.move_and_mark(buffer, replicated_spec(buffer.ndim)))

    def move_and_mark(self, tensor: Tensor, spec: PartitionSpec) -> Tensor:
        """Move a tensor to the devices, and mark it, so that each gets only its shard."""
        moved = tensor.to(self.runtime.device)
        if not is_marked(moved):
            mark_as(moved, self.spmd.device_mesh, spec)
        return moved

    def shard_batch(self, tensor: Tensor) -> Tensor:
        """Shard a batch's tensor along its first dimension, which XLA pads if necessary. CPU tensors are unchanged."""
        if tensor.device.type != "xla":
            return tensor
        return self.move_and_mark(tensor, batch_spec(tensor.ndim) if tensor.ndim and 0 not in tensor.shape else ())

    def rebind_optimizers(self, optimizers: Iterable[torch.optim.Optimizer], roots: Sequence[Sharded]) -> None:
        optimizers = list(optimizers)
        super().rebind_optimizers(optimizers, roots)
        for optimizer in optimizers:
            if optimizer not in self._optimizers_with_hook:
                self._optimizers_with_hook.add(optimizer)
                optimizer.register_step_post_hook(self._lay_out_state)
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        # Looked up now, because within a step a parameter may be the output of a recomputation's
                        # barrier, whose layout XLA doesn't know.
                        _layouts[parameter] = layout_on_devices(parameter)

    def _lay_out_state(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Shard new state of an optimizer like its parameters. The partitioner might choose another layout."""
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.device.type == "xla" and not is_marked(value):
                    self._mark_state(value, parameter)

    def _mark_state(self, value: Tensor, parameter: Tensor) -> None:
        if value.shape == parameter.shape:
            mark(value, sharding_of(parameter))
        else:
            mark_as(value, self.spmd.device_mesh, replicated_spec(value.ndim))

    def full_tensor(self, value: Any) -> Any:
        if isinstance(value, ChunkedTensor):
            full = torch.empty(value.shape, dtype=value.dtype)
            for chunk in value.chunks:
                box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.data.shape, strict=True))
                full[box] = cast(Tensor, chunk.data)
            return full
        return super().full_tensor(value)


#: The device layouts of optimizers' parameters.
_layouts = WeakTensorKeyDictionary()


def _materialize(modules: Sequence[nn.Module], dims: Mapping[int, int | None]) -> dict[int, int | None]:
    """Materialize modules from the meta device, and return the planned dimensions of the new parameters."""
    owners = [
        (module, name, dims.get(id(p))) for module in modules for name, p in module.named_parameters(recurse=False)
    ]
    materialize(modules, torch.device("cpu"))
    return {id(module._parameters[name]): dim for module, name, dim in owners}


def _zeros_like(parameter: Tensor) -> Tensor | None:
    layout = _layouts.get(parameter)
    return None if layout is None else HostShards(layout).tensor()
