"""Sharding with torch's ``fully_shard`` (FSDP2). Independent of Lightning."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from fsdp_core import Backend, Sharded, ShardingError, UnsupportedCapabilityError
from fsdp_core.sharding import (
    Mesh,
    MeshAxis,
    ParameterPlan,
    ShardingPlan,
    ShardPrecision,
    StepInputs,
    UnitModules,
    can_pin_memory,
    checkpoint_activations,
    describe_policy,
    kept_as_built,
    marked,
    modules_by_unit,
    offload_activations,
    options_of,
    place,
    plan_module,
    recompute_all_but,
    select_units,
    sharded_of,
    stays_whole,
)
from fsdp_core.state import clean_name, give_back
from fsdp_fsdp2.computation.activations import modules_to_offload
from fsdp_fsdp2.computation.compilation import compile_units
from fsdp_fsdp2.computation.float8 import check_float8, compute_in_float8
from fsdp_fsdp2.computation.prefetch_and_reshard import (
    prefetch,
    reshards,
)
from fsdp_fsdp2.context_parallel.attention_and_losses import ContextParallel, check_splittable
from fsdp_fsdp2.expert_parallel.plans import Contract, check_combination, check_units, experts_of
from fsdp_fsdp2.expert_parallel.sharding import divide_experts, sharded_dim, sharded_dim_of
from fsdp_fsdp2.expert_parallel.tokens import ExpertForward
from fsdp_fsdp2.meshes import check_sync, device_mesh, expert_sharding_mesh, sharding_mesh
from fsdp_fsdp2.options import FSDP2Options
from fsdp_fsdp2.sharded import FSDP2Sharded
from fsdp_fsdp2.tensor_parallel.model_plans import own_plan, own_units
from fsdp_fsdp2.tensor_parallel.styles import (
    explain_errors,
    missing_plan,
    return_no_view,
    styles_of,
    tensor_parallelize,
    tie_again,
)
from fsdp_fsdp2.torch_private.parameter_groups import (
    is_unshardable,
    offloaded_parameters,
    parameters_of,
    reset_sharded_params,
)
from fsdp_fsdp2.torch_private.rank_chunks import chunks_when_used
from fsdp_fsdp2.user_sharding.built_parameters import follow_building, note_built
from fsdp_fsdp2.user_sharding.initial_values import materialize_sharded, refuse_changed_on_meta
from fsdp_fsdp2.user_sharding.parallelize_fn import call_parallelize_fn
from fsdp_fsdp2.user_sharding.takeover import (
    check_meshes,
    check_no_context_parallel,
    check_not_run,
    check_reduces,
    innermost_first,
    is_divided,
    is_sharded_by_user,
    refuse_dtensors_outside_units,
    refuse_options_with_own_sharding,
    units_of_user,
)

__all__ = ["FSDP2Backend"]


class FSDP2Backend(Backend):
    """Shards parameters along their first axis over the data-parallel ranks, unit by unit.

    Before that, layers that a plan names are divided among tensor-parallel ranks. 0-dim parameters, which
    ``fully_shard`` rejects, are replicated on every rank.

    :class:`~fsdp_fsdp2.options.FSDP2Options` documents the options.
    """

    owner_compute = True

    options: FSDP2Options

    def __init__(self, options: FSDP2Options) -> None:
        super().__init__(options)
        self.context_parallel_dims = options.context_parallel_dims
        self._device_mesh: DeviceMesh | None = None
        self._sharding_mesh: DeviceMesh | None = None
        self._expert_mesh: DeviceMesh | None = None

    def mesh(self, world_size: int) -> Mesh:
        mesh = Mesh.of(world_size, **self.options.sizes)
        check_sync(self.options.sync_each_batch, mesh)
        reshard = self.options.reshard_after_forward
        check_combination(
            mesh,
            {
                "compile": self.options.compile,
                "parallelize_fn": self.options.parallelize_fn,
                "reshard_after_forward": reshard if type(reshard) is int else None,
            },
        )
        check_float8(self.options.float8, self.options.float8_filter, mesh.tensor_parallel > 1)
        return mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks as torch's mesh. All ranks must access it the first time: it creates process groups."""
        if "runtime" not in vars(self):
            raise ShardingError(
                "the device mesh was asked for before the ranks have joined.\n"
                "Under Fabric, call fabric.launch() first; under the Trainer, ask in configure_model() or later."
            )
        if self._device_mesh is None:
            self._device_mesh = device_mesh(self.runtime)
        return self._device_mesh

    @property
    def _fsdp_mesh(self) -> DeviceMesh:
        """The axes that ``fully_shard`` shards and replicates over; the context-parallel one shards as well."""
        if self._sharding_mesh is None:
            self._sharding_mesh = sharding_mesh(self.device_mesh, self.runtime.mesh)
        return self._sharding_mesh

    @property
    def _fsdp_mesh_of_experts(self) -> DeviceMesh:
        """The axes that ``fully_shard`` shards and replicates experts over that are divided along another axis."""
        if self._expert_mesh is None:
            self._expert_mesh = expert_sharding_mesh(self.device_mesh, self.runtime.mesh)
        return self._expert_mesh

    def sharding_config(self) -> dict[str, Any]:
        function = self.options.parallelize_fn
        return {
            **super().sharding_config(),
            "mesh": self.runtime.mesh.described(),
            "parallelize_fn": None if function is None else describe_policy(function),
        }

    def effective_precision(self, precision: ShardPrecision) -> ShardPrecision:
        if self.options.mp_policy is None:
            return precision
        return replace(
            precision,
            compute=self.options.mp_policy.param_dtype,
            reduce=self.options.mp_policy.reduce_dtype,
            autocast=False,
        )

    @contextmanager
    def wrap_context(self) -> Iterator[None]:
        with super().wrap_context(), kept_as_built(vars(self).get("runtime")):
            yield

    def init_context(self, empty: bool = False) -> AbstractContextManager[Any]:
        if empty:
            follow_building()
        return super().init_context(empty)

    # -- planning --------------------------------------------------------------------------------------------------

    def plan(self, module: nn.Module) -> ShardingPlan:
        plan = super().plan(module)
        if not is_sharded_by_user(module):
            return self._with_sizes_of_experts(plan)
        parameters = {name: replace(p, local_numel=None) for name, p in plan.parameters.items()}
        return replace(plan, parameters=parameters)  # the user may have sharded along any axis

    def _with_sizes_of_experts(self, plan: ShardingPlan) -> ShardingPlan:
        """The plan with the number of elements that this rank keeps of experts' parameters."""
        experts = plan.details.get(_EXPERTS, {})
        mesh = self.runtime.mesh
        axes: tuple[MeshAxis, ...] = ("expert_data_parallel", "context_parallel")
        ranks, index = mesh.size(axes), mesh.coordinate(self.runtime.rank, axes)

        def resized(parameter: ParameterPlan) -> ParameterPlan:
            shape = (parameter.shape[0] // mesh.expert_parallel, *parameter.shape[1:])
            length = shape[sharded_dim(shape, ranks)]
            local_numel = _local_length(length, ranks, index) * math.prod(shape) // length
            return replace(parameter, local_numel=local_numel, divided_by=mesh.expert_parallel)

        parameters = {name: resized(p) if p.unit in experts else p for name, p in plan.parameters.items()}
        return replace(plan, parameters=parameters)

    def check_shardable(self, module: nn.Module) -> None:
        super().check_shardable(module)
        if is_sharded_by_user(module):
            options_given = [name for name in self.options.changed_options() if name not in _OPTIONS_BESIDE_UNITS]
            if self.options.parallelize_fn:
                options_given.append("parallelize_fn")
            refuse_options_with_own_sharding(module, options_given)
            check_no_context_parallel(self.runtime.mesh, "a module that its own code shards")
            _check_sharded_by_user(module)
        if self.options.parallelize_fn is not None:
            check_no_context_parallel(self.runtime.mesh, "parallelize_fn")
            if marked(module):
                raise ShardingError(
                    f"{type(module).__name__} has layers that are marked by wrap(), and parallelize_fn replaces what "
                    "would make units of them.\n"
                    "Leave wrap() out and call fully_shard in parallelize_fn, or leave that out."
                )
        self._check_modules(module)

    def _check_modules(self, module: nn.Module) -> None:
        if self.sequence is not None:
            check_splittable(module)
        for fqn, submodule in module.named_modules():
            if options_of(submodule):
                raise UnsupportedCapabilityError(
                    f"wrap({fqn}, {', '.join(f'{k}=...' for k in options_of(submodule))}) "
                    "has options, which 'fsdp2' takes for the whole model.\n"
                    "Give them to the strategy and write wrap(module), or use strategy='fsdp_native'."
                )

    def units(self, module: nn.Module) -> list[nn.Module]:
        users_units = units_of_user(module)
        if users_units or self.options.parallelize_fn is not None or isinstance(module, FSDPModule):
            return users_units
        models_units = own_units(module) if self.options.auto_wrap_policy == "auto" else None
        units = select_units(module, self.options.auto_wrap_policy) if models_units is None else models_units
        experts = {name: module.get_submodule(name) for name in self._contracts_of_experts(module)}
        check_units(units, experts)
        chosen = {*units, *experts.values()}
        return [part for part in innermost_first(module, set()) if part in chosen] if experts else units

    def _contracts_of_experts(self, module: nn.Module) -> dict[str, Contract]:
        """The submodules whose experts are divided, by name, and how each is called."""
        size = self.runtime.mesh.expert_parallel
        return experts_of(module, self.options.expert_parallel_plan, size) if size > 1 else {}

    def replicated(self, module: nn.Module) -> list[nn.Parameter]:
        compute = self._mp_policy().param_dtype
        return [
            parameter
            for owner in module.modules()
            for parameter in owner.parameters(recurse=False)
            if stays_whole(owner, parameter, compute)
        ]

    def recomputed(self, module: nn.Module) -> Sequence[nn.Module]:
        return () if self.options.parallelize_fn is not None else super().recomputed(module)

    def details(self, module: nn.Module, units: Sequence[nn.Module]) -> dict[str, dict[str, Any]]:
        """The styles of divided layers, which units reshard, and how the user has sharded parameters."""
        is_by_function = self.options.parallelize_fn is not None
        replicated = self.replicated(module)
        for unit, unit_modules in modules_by_unit(units, module):
            if not isinstance(unit, FSDPModule):
                _check_bases(type(unit))
                if not is_by_function:  # a function makes its units later
                    _check_dtypes(unit, unit_modules, replicated)
        names = {submodule: name for name, submodule in module.named_modules()}
        ranks = self.runtime.mesh.size(("data_parallel", "context_parallel"))
        policy = None if is_by_function else self.options.reshard_after_forward
        resharding = reshards(policy, module, units, ranks, self.runtime.mesh.tensor_parallel)
        return {
            _STYLE: {} if is_by_function else self._styles(module),
            _EXPERTS: {} if is_by_function else self._contracts_of_experts(module),
            _RESHARDING: {names[unit]: value for unit, value in resharding.items()},
            _PLACEMENTS: {
                clean_name(name): f"{parameter.placements} of {tuple(parameter.device_mesh.shape)}"
                for name, parameter in module.named_parameters()
                if isinstance(parameter, DTensor)
            },
        }

    def local_numels(self, parameters: Sequence[ParameterPlan]) -> list[int] | None:
        mesh = self.runtime.mesh
        if self.options.parallelize_fn is not None or mesh.tensor_parallel > 1:
            return None  # a style of the user's own may divide parameters in any way
        axes: tuple[MeshAxis, ...] = ("data_parallel", "context_parallel")
        ranks, index = mesh.size(axes), mesh.coordinate(self.runtime.rank, axes)
        numels = []
        for parameter in parameters:
            rows = parameter.shape[0]
            numels.append(_local_length(rows, ranks, index) * (parameter.numel // rows))
        return numels

    def _styles(self, module: nn.Module) -> dict[str, ParallelStyle]:
        """The style of each submodule that the plan divides, by name."""
        size = self.runtime.mesh.tensor_parallel
        if size == 1:
            return {}
        if self.options.tp_plan is None:
            if not is_sharded_by_user(module):
                raise missing_plan(size)
            return {}
        return dict(styles_of(module, self.options.tp_plan, size).values())

    # -- sharding --------------------------------------------------------------------------------------------------

    def prepare(self, module: nn.Module, plan: ShardingPlan) -> ShardingPlan:
        """Let the user's own function shard the module, or convert layers to float8."""
        if self.options.parallelize_fn is None:
            compute_in_float8(module, self.options.float8, self.options.float8_filter, self.runtime.device)
            return plan
        note_built(module)
        # modules on the meta device get their values when they are sharded
        place([part for part in module.modules() if not _has_meta_tensors(part)], self.runtime)
        call_parallelize_fn(self.options.parallelize_fn, module, self.device_mesh, self._function_arguments(module))

        def check_result(module: nn.Module) -> None:
            Backend.check_shardable(self, module)
            self._check_modules(module)
            _check_sharded_by_user(module)
            for unit, unit_modules in modules_by_unit(self.units(module), module):
                if not isinstance(unit, FSDPModule):
                    _check_dtypes(unit, unit_modules, self.replicated(module))
            if self.runtime.mesh.tensor_parallel > 1 and not is_sharded_by_user(module):
                raise missing_plan(self.runtime.mesh.tensor_parallel)

        return plan_module(
            module,
            plan.config,
            check=check_result,
            units=self.units,
            replicated=self.replicated,
            details=self.details,
            local_numels=self.local_numels,
        )

    def _function_arguments(self, module: nn.Module) -> Mapping[str, Any]:
        """The keyword arguments of ``parallelize_fn``."""
        plan = self.options.tp_plan
        return {
            **self.options.arguments(),
            "mp_policy": self._mp_policy(),
            "offload_policy": self._offload_policy(),
            "tp_plan": own_plan(module) if plan == "auto" else plan,
            "activation_checkpointing_saves": self.options.saved_ops,
            "compile": self.options.compiler_keywords,
        }

    def shard(self, module: nn.Module, plan: ShardingPlan | None = None) -> Sharded:
        already_sharded = sharded_of(module)
        if isinstance(already_sharded, FSDP2Sharded):
            already_sharded.check_recoverable()
        return super().shard(module, plan)

    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> FSDP2Sharded:
        is_by_function = self.options.parallelize_fn is not None
        is_by_user = is_sharded_by_user(module)
        if is_by_user:
            check_meshes(module, self.runtime, self._fsdp_mesh)
            size = self.runtime.mesh.tensor_parallel
            # parallelize_fn has applied the plan already, or it has not
            will_apply_plan = self.options.tp_plan is not None and not is_by_function
            if size > 1 and not will_apply_plan and not is_divided(module, self.runtime):
                raise missing_plan(size)
        users_units = [part for part in module.modules() if isinstance(part, FSDPModule)]
        offloaded_ids = {id(parameter) for unit in users_units for parameter in offloaded_parameters(unit)}
        styles = {module.get_submodule(name): (name, style) for name, style in plan.details[_STYLE].items()}
        names = {submodule: name for name, submodule in module.named_modules()}
        ties = [[_find_owner(module, name) for name in tied] for tied in plan.ties()] if styles else []
        units = plan.split_by_unit(module)
        unit_modules = [unit.module for unit in units[:-1]]
        experts = {module.get_submodule(name): name for name in plan.details[_EXPERTS]}
        for part, name in experts.items():
            group = self.device_mesh["expert_parallel"].get_group()
            part.forward = ExpertForward(
                part, plan.details[_EXPERTS][name], name, group, is_rehearsed=self.runtime.is_rehearsed
            )
        if not is_by_function:
            self._wrap_forward(module, plan, unit_modules)
        for unit in units:
            if is_by_user:
                materialize_sharded(unit.own, module, self.runtime, offloaded_ids)
            else:
                place(unit.own, self.runtime)
            unsharded_params = unit.parameters()
            users_attributes = [  # of parameters, such as hints to optimizers, which the shards are to have too
                (owner, name, dict(vars(parameter)))
                for owner in unit.own
                for name, parameter in _plain_parameters(owner)
                if vars(parameter)
            ]
            if styles:
                tensor_parallelize(unit.own, styles, self.device_mesh["tensor_parallel"])
                ties_of_unit = [owners for owners in ties if _first_module_of(owners) in unit.own]
                tie_again(ties_of_unit, module)
            if unit.module in experts:
                divide_experts(unit.module, self.device_mesh["expert_parallel"])
            if unit.module in styles:
                return_no_view(unit.module)
            if not isinstance(unit.module, FSDPModule):  # otherwise the user has applied fully_shard to it
                self._fully_shard(
                    unit, plan.details[_RESHARDING][names[unit.module]], holds_experts=unit.module in experts
                )
                _free_replaced(unsharded_params - unit.parameters())
                for owner, name, attributes in users_attributes:
                    vars(getattr(owner, name)).update(attributes)
            give_back()
        if not is_by_function:
            prefetch(module, unit_modules, self.options.forward_prefetch_depth, self.options.backward_prefetch_depth)
        for fsdp_module in users_units:
            reset_sharded_params(fsdp_module)
        sharded_ids = {id(p) for part in module.modules() if isinstance(part, FSDPModule) for p in parameters_of(part)}
        kept_whole = [p for p in module.parameters() if id(p) not in sharded_ids]
        refuse_dtensors_outside_units(module, kept_whole, is_planned=bool(styles))
        if styles:
            explain_errors(module)
        casts = self._mp_policy().param_dtype is not None or is_by_user  # the user's fully_shard may cast
        sharded = FSDP2Sharded(module, unit_modules, kept_whole, casts=casts, runtime=self.runtime)
        sharded.context = None if self.sequence is None else ContextParallel(module)
        policy = self.options.mp_policy
        if policy is not None and policy.param_dtype is not None and policy.cast_forward_inputs:
            StepInputs(module, [part for part in units[-1].own if part is not module], policy.param_dtype)
        return sharded

    def _fully_shard(self, unit: UnitModules, reshard: bool | int | None, *, holds_experts: bool) -> None:
        """Apply ``fully_shard`` to a unit, except for the parameters that stay whole."""
        policy = self._mp_policy()
        mesh = self._fsdp_mesh_of_experts if holds_experts else self._fsdp_mesh
        placement = None
        if holds_experts:
            placement = sharded_dim_of(self.runtime.mesh.size(("expert_data_parallel", "context_parallel")))
            # what the unit around computes in, such as weights of a router in fp32, goes to experts and back as it is
            policy = replace(policy, cast_forward_inputs=False, output_dtype=None)
        unsharded = unit.replicated() | set(filter(is_unshardable, unit.parameters()))
        sharded = unit.parameters() - unsharded
        if any(parameter.is_complex() for parameter in sharded):  # torch would fail to reduce them in a real dtype
            policy = replace(policy, param_dtype=None, reduce_dtype=None)
        with chunks_when_used():
            fully_shard(
                unit.module,
                mesh=mesh,
                reshard_after_forward=reshard,
                shard_placement_fn=placement,
                mp_policy=policy,
                offload_policy=self._offload_policy(),
                ignored_params=unsharded or None,
            )

    def _wrap_forward(self, module: nn.Module, plan: ShardingPlan, units: Sequence[nn.Module]) -> None:
        """Set up what begins when a unit is called: activation checkpointing, compilation, offload."""
        checkpoint_activations(module, plan, recompute_all_but(self.options.saved_ops))
        compile_units(module, units, self.options.compiler_keywords, self.options.activation_memory_budget)
        if self.options.activation_offload:
            offload_activations(modules_to_offload(module, units), pin_memory=can_pin_memory(self.runtime.device.type))

    def _mp_policy(self) -> MixedPrecisionPolicy:
        if self.options.mp_policy is not None:
            return self.options.mp_policy
        return MixedPrecisionPolicy(param_dtype=self.precision.compute, reduce_dtype=self.precision.reduce)

    def _offload_policy(self) -> OffloadPolicy:
        if isinstance(self.options.cpu_offload, OffloadPolicy):
            return self.options.cpu_offload
        return (
            CPUOffloadPolicy(pin_memory=can_pin_memory(self.runtime.device.type))
            if self.options.cpu_offload
            else OffloadPolicy()
        )


#: Options that apply beside units that the user has sharded.
_OPTIONS_BESIDE_UNITS = ("activation_checkpointing_policy", "activation_checkpointing_saves")


#: The keys of the plan's details: the style of each divided layer, how experts that are divided are called, whether
#: each unit reshards, and the placements and shape of mesh of each parameter that the user has sharded.
_STYLE, _EXPERTS, _RESHARDING, _PLACEMENTS = "tensor-parallel style", "experts", "resharding", "placement"


def _local_length(length: int, ranks: int, index: int) -> int:
    """The part of a dimension that a rank keeps.

    Rounded up, as in :func:`torch.chunk`: the last ranks have less, or nothing.
    """
    length_per_rank = -(-length // ranks)
    return max(0, min(length_per_rank, length - index * length_per_rank))


def _check_sharded_by_user(module: nn.Module) -> None:
    """Refuse a module that the user has sharded, and then changed or used so that sharding can't be completed."""
    check_not_run(module)
    check_reduces(module)
    refuse_changed_on_meta(module)


def _check_bases(cls: type[nn.Module]) -> None:
    """Refuse a class to whose instances ``fully_shard`` can't give another class, derived from ``FSDPModule`` and it.

    Python refuses to if the two lay out memory differently, as where the first base is a class without attributes.
    """
    if _can_become_fsdp_module(cls):
        return
    module_classes = [base for base in reversed(cls.__mro__) if issubclass(base, nn.Module)]
    unfit = next(module_class for module_class in module_classes if not _can_become_fsdp_module(module_class))
    first, *other_bases = [base.__name__ for base in unfit.__bases__]
    raise ShardingError(
        f"{cls.__name__} can't be sharded by fully_shard, which changes the class of a module: Python refuses that "
        f"where {first} is the first base.\nWrite class {unfit.__name__}({', '.join([*other_bases, first])}), modules "
        "first; or use strategy='fsdp_native'."
    )


class _QuietFSDPModule(FSDPModule):
    """``FSDPModule`` for a trial: ``__init_subclass__`` and ``__del__`` of the user's class are not called."""

    def __init_subclass__(cls) -> None:
        pass

    def __del__(self) -> None:
        pass


def _can_become_fsdp_module(cls: type[nn.Module]) -> bool:
    try:
        subclass = type(cls.__name__, (_QuietFSDPModule, cls), {})
        instance: object = object.__new__(subclass)
        object.__setattr__(instance, "__class__", cls)
    except TypeError:
        return False
    object.__setattr__(instance, "__class__", subclass)  # with whose __del__ it ends
    return True


def _has_meta_tensors(module: nn.Module) -> bool:
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in tensors)


def _plain_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A module's own parameters that are no DTensors yet, by each of their names."""
    named = module.named_parameters(recurse=False, remove_duplicate=False)
    return [(name, parameter) for name, parameter in named if not isinstance(parameter, DTensor)]


def _free_replaced(replaced: Iterable[nn.Parameter]) -> None:
    """Free the memory of replaced parameters, but keep their shape: an optimizer holds them until it is re-pointed."""
    for parameter in replaced:
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.new_empty(()).expand(parameter.shape)


def _first_module_of(owners: Sequence[tuple[nn.Module, str]]) -> nn.Module:
    """The first of the modules that hold a tied parameter."""
    module, _ = owners[0]
    return module


def _find_owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and the parameter's name there."""
    path, _, attribute = name.rpartition(".")
    return root.get_submodule(path), attribute


def _check_dtypes(unit: nn.Module, unit_modules: Sequence[nn.Module], replicated: Collection[nn.Parameter]) -> None:
    """Refuse a unit whose trained parameters differ in dtype.

    Args:
        unit: The unit.
        unit_modules: Its modules that are in no other unit.
        replicated: Parameters that it does not shard.

    Raises:
        ShardingError: Their dtypes differ.
    """
    own = {id(parameter) for part in unit_modules for parameter in part.parameters(recurse=False)}
    sharded = own - {id(parameter) for parameter in replicated}
    trained = {p.dtype: name for name, p in unit.named_parameters() if id(p) in sharded and p.requires_grad}
    if len(trained) > 1:
        listing = ", ".join(f"{name!r} in {dtype}" for dtype, name in trained.items())
        raise ShardingError(
            f"one unit of sharding, {type(unit).__name__}, holds trainable parameters of several dtypes: {listing}.\n"
            "Convert them to one dtype, or make units of them that hold one each, with auto_wrap_policy."
        )
