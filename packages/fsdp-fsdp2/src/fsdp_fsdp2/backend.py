"""Sharding with torch's ``fully_shard`` (FSDP2). Independent of Lightning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from fsdp_core import Backend, Sharded, ShardingError, UnsupportedCapabilityError
from fsdp_core.sharding import (
    ActivationCheckpointingPolicy,
    Mesh,
    ShardPrecision,
    WrapPolicy,
    checkpoint_activations,
    describe_policy,
    kept_as_built,
    options_of,
    place,
    select_units,
    sharded_of,
    stays_whole,
)
from fsdp_core.state import give_back
from fsdp_fsdp2.context_parallel import ContextParallel, check_splittable, checked_dims
from fsdp_fsdp2.meshes import device_mesh, sharding_mesh
from fsdp_fsdp2.sharded import FSDP2Sharded
from fsdp_fsdp2.tensor_parallel import (
    TensorParallelPlan,
    check_plan,
    described_plan,
    missing_plan,
    styles_of,
    tensor_parallelize,
    tie_again,
)

__all__ = ["FSDP2Backend"]


class FSDP2Backend(Backend):
    """Shards parameters along their first axis over the data-parallel ranks, unit by unit.

    Before that, layers that a plan names are divided among tensor-parallel ranks. 0-dim parameters, which
    ``fully_shard`` rejects, are replicated on every rank.

    :class:`~fsdp_fsdp2.constructor.FSDP2Options` documents the keyword arguments.
    """

    def __init__(
        self,
        *,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        reshard_after_forward: bool | int | None = None,
        cpu_offload: bool | OffloadPolicy = False,
        mp_policy: MixedPrecisionPolicy | None = None,
        sync_each_batch: bool = False,
        data_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_replicate_size: int | Literal["auto"] = "auto",
        context_parallel_size: int | Literal["auto"] = "auto",
        context_parallel_dims: Mapping[str, int] | None = None,
        tensor_parallel_size: int | Literal["auto"] = "auto",
        tp_plan: TensorParallelPlan | None = None,
    ) -> None:
        super().__init__()
        check_plan(tp_plan)
        _check_options(reshard_after_forward, cpu_offload, mp_policy)
        self.auto_wrap_policy = auto_wrap_policy
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.mp_policy = mp_policy
        self.sync_each_batch = sync_each_batch
        self.sizes = {
            "data_parallel_size": data_parallel_size,
            "data_parallel_replicate_size": data_parallel_replicate_size,
            "context_parallel_size": context_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
        }
        self.context_parallel_dims = checked_dims(context_parallel_dims)
        self.tp_plan = tp_plan
        self._device_mesh: DeviceMesh | None = None
        self._sharding_mesh: DeviceMesh | None = None

    def mesh(self, world_size: int) -> Mesh:
        mesh = Mesh.of(world_size, **self.sizes)
        if mesh.tensor_parallel > 1 and self.tp_plan is None:
            raise missing_plan(mesh.tensor_parallel)
        return mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks as torch's mesh. All ranks must access it the first time: it creates process groups."""
        if self._device_mesh is None:
            self._device_mesh = device_mesh(self.runtime)
        return self._device_mesh

    @property
    def _fsdp_mesh(self) -> DeviceMesh:
        """The axes that ``fully_shard`` shards and replicates over; the context-parallel one shards as well."""
        if self._sharding_mesh is None:
            self._sharding_mesh = sharding_mesh(self.device_mesh, self.runtime.mesh)
        return self._sharding_mesh

    def terms(self) -> dict[str, Any]:
        return {
            **super().terms(),
            "auto_wrap_policy": describe_policy(self.auto_wrap_policy),
            "activation_checkpointing_policy": describe_policy(self.activation_checkpointing_policy),
            "reshard_after_forward": self.reshard_after_forward,
            "cpu_offload": self.cpu_offload,
            "mp_policy": self.mp_policy,
            "mesh": self.runtime.mesh.described(),
            "tp_plan": described_plan(self.tp_plan),
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

    def shard(self, module: nn.Module) -> Sharded:
        known = sharded_of(module)
        if isinstance(known, FSDP2Sharded):
            known.check_not_interrupted()
        return super().shard(module)

    def shard_module(self, module: nn.Module) -> FSDP2Sharded:
        self._check(module)
        if self.sequence is not None:
            check_splittable(module)
        units = self.units(module)
        size = self.runtime.mesh.tensor_parallel
        styles = {} if self.tp_plan is None or size == 1 else styles_of(module, self.tp_plan, size)
        ties = _ties(module) if styles else []
        checkpoint_activations(module, self.activation_checkpointing_policy)
        sharded: set[nn.Module] = set()
        kept_whole: list[nn.Parameter] = []
        compute = self._mp_policy().param_dtype
        for unit in (*units, module):
            own = [m for m in unit.modules() if m not in sharded]
            sharded.update(own)
            place(own, self.runtime)
            before = {p for m in own for p in m.parameters(recurse=False)}
            if styles:
                tensor_parallelize(own, styles, self.device_mesh["tensor_parallel"])
            if unit is module:
                tie_again(ties, module)
            whole = {p for m in own for p in m.parameters(recurse=False) if stays_whole(m, p, compute)}
            replaced = {p for m in own for p in m.parameters(recurse=False)} - whole
            _check_dtypes(unit, replaced)
            fully_shard(
                unit,
                mesh=self._fsdp_mesh,
                reshard_after_forward=self._reshards(unit, module, units),
                mp_policy=self._mp_policy(),
                offload_policy=self._offload_policy(),
                ignored_params=whole or None,
            )
            for parameter in before - whole:
                # an optimizer that is re-pointed later still holds it: keep its shape, but free its memory
                parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
            kept_whole += whole
            give_back()
        in_order = [p for p in module.parameters() if any(p is w for w in kept_whole)]
        sharded_module = FSDP2Sharded(module, units, in_order, casts=compute is not None, runtime=self.runtime)
        sharded_module.context = None if self.sequence is None else ContextParallel(module)
        return sharded_module

    def _reshards(self, unit: nn.Module, root: nn.Module, units: Sequence[nn.Module]) -> bool | int | None:
        if self.reshard_after_forward is False:
            return False
        if unit is root:
            return None  # a root that reshards would have no parameters when a step method calls its forward
        if self.reshard_after_forward is None and unit is units[-1]:
            return False  # it would be gathered again immediately
        return self.reshard_after_forward

    def _check(self, module: nn.Module) -> None:
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
        ranks = self.runtime.mesh.size(("data_parallel", "context_parallel"))
        if type(size) is int and (size < 1 or ranks % size):
            raise UnsupportedCapabilityError(
                f"reshard_after_forward={size} does not divide the {ranks} ranks into groups.\n"
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


def _ties(root: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The modules and names under which each shared parameter is registered."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


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
            "Write precision='bf16-mixed' instead, or give a torch.distributed.fsdp.MixedPrecisionPolicy; "
            "FSDP1's MixedPrecision belongs to 'fsdp_native'."
        )
