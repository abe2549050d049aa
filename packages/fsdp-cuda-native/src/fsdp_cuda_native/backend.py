"""Sharding with torch's ``FullyShardedDataParallel`` (FSDP1). Independent of Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from fsdp_core import Backend, UnsupportedCapabilityError
from fsdp_core.sharding import (
    ParameterPlan,
    ShardingPlan,
    ShardPrecision,
    StepInputs,
    checkpoint_activations,
    describe_policy,
    is_part,
    kept_as_built,
    modules_by_unit,
    parameter_orders,
    place,
    put_in_place,
    select_recomputed,
    select_units,
    stays_whole,
)
from fsdp_core.state import clean_name, give_back
from fsdp_cuda_native.meshes import mesh_arguments
from fsdp_cuda_native.options import HYBRID, NativeOptions
from fsdp_cuda_native.sharded import NativeSharded
from fsdp_cuda_native.torch_private.flat_parameters.flattening import flattening_parts
from fsdp_cuda_native.torch_private.passes.unvisited_units import register_unused_hooks
from fsdp_cuda_native.unit_checks import check_not_wrapped, check_unit, unit_options
from fsdp_cuda_native.wrappers import WrappedUnit, cast_inputs_of_calls, module_to_wrap, renew_parameters

__all__ = ["NativeBackend"]


class NativeBackend(Backend):
    """Flattens the parameters of each unit into one flat parameter, of which each rank holds consecutive elements.

    0-dim parameters, which FSDP1 rejects, and ignored parameters are replicated on every rank, and their gradients are
    averaged.

    :class:`~fsdp_cuda_native.options.NativeOptions` documents the options.
    """

    owner_compute = True
    accelerators = ("any", "cpu")

    options: NativeOptions

    def __init__(self, options: NativeOptions) -> None:
        super().__init__(options)
        #: What :meth:`_mesh_arguments` has returned: groups are made once.
        self._made_mesh_arguments: dict[str, Any] | None = None

    def sharding_config(self) -> dict[str, Any]:
        policy = describe_policy(self.options.checkpointing_policy)
        return {**super().sharding_config(), "activation_checkpointing_policy": policy}

    def effective_precision(self, precision: ShardPrecision) -> ShardPrecision:
        if self.options.mixed_precision is None:
            return precision
        policy = self.options.mixed_precision
        return replace(precision, compute=policy.param_dtype, reduce=policy.reduce_dtype, autocast=False)

    def refuse_unreduced_gradients(self) -> None:
        """Refuse to accumulate gradients without reducing them, where FSDP1 can't keep them.

        Raises:
            UnsupportedCapabilityError: Nothing is sharded, and units compute in half precision.
        """
        compute = self._mixed_precision().param_dtype
        is_unsharded = self.options.strategy is ShardingStrategy.NO_SHARD
        if is_unsharded and self.options.use_orig_params and compute not in (None, self.precision.storage):
            raise UnsupportedCapabilityError(
                "sharding_strategy='NO_SHARD' can't accumulate gradients without reducing them under mixed precision: "
                f"FSDP1 would give parameters in {self.precision.storage} gradients in {compute}, which torch "
                "refuses.\n"
                "Write sync_each_batch=True, or sharding_strategy='FULL_SHARD'; or use strategy='ddp'."
            )

    @property
    def offloads_from_device(self) -> bool:
        """Whether shards live in host memory, and are gathered on an accelerator.

        On the CPU, shards live in host memory anyway; torch would allocate memory pinned for an accelerator. On an
        accelerator, gradients are reduced on every micro-batch: unreduced ones would be of all elements, and on the
        device, and FSDP1 lets parameters on the host have no such gradients.
        """
        return self.options.offloads and self.runtime.device.type != "cpu"

    # -- building and sharding -------------------------------------------------------------------------------------

    @contextmanager
    def wrap_context(self) -> Iterator[None]:
        runtime = vars(self).get("runtime") if self.options.strategy is not ShardingStrategy.NO_SHARD else None
        with super().wrap_context(), kept_as_built(runtime):
            yield

    def plan(self, module: nn.Module) -> ShardingPlan:
        plan = super().plan(module)
        options_by_unit = plan.details.get(_UNIT_OPTIONS, {})
        # local_numels() aligns by the strategy's dtype, and these units are gathered in one of their own
        unsized = {clean_name(name) for name, options in options_by_unit.items() if "mixed_precision" in options}
        parameters = {
            name: replace(parameter, local_numel=None) if parameter.unit in unsized else parameter
            for name, parameter in plan.parameters.items()
        }
        return replace(plan, parameters=parameters) if unsized else plan

    def check_shardable(self, module: nn.Module) -> None:
        super().check_shardable(module)
        check_not_wrapped(module)

    def units(self, module: nn.Module) -> list[nn.Module]:
        return select_units(module, self.options.auto_wrap_policy)

    def replicated(self, module: nn.Module) -> list[nn.Parameter]:
        ignored = {inner for ignored in self._ignored(nn.Module) for inner in ignored.modules()}
        compute = self._mixed_precision().param_dtype
        return self._ignored(nn.Parameter) + [
            parameter
            for owner in module.modules()
            for parameter in owner.parameters(recurse=False)
            if owner in ignored or stays_whole(owner, parameter, compute)
        ]

    def recomputed(self, module: nn.Module) -> list[nn.Module]:
        return select_recomputed(module, self.options.checkpointing_policy)

    def details(self, module: nn.Module, units: Sequence[nn.Module]) -> dict[str, dict[str, Any]]:
        replicated = self.replicated(module)
        for unit, unit_modules in modules_by_unit(units, module):
            check_unit(module, unit, unit_modules, replicated, use_orig_params=self.options.use_orig_params)
        by_name = {name: unit_options(name, submodule) for name, submodule in module.named_modules()}
        return {_UNIT_OPTIONS: {name: options for name, options in by_name.items() if options}}

    def local_numels(self, parameters: Sequence[ParameterPlan]) -> list[int] | None:
        """How many elements of each parameter of a unit this rank holds.

        FSDP1 puts the parameters one after the other, each at a multiple of 16 bytes with ``use_orig_params``, and
        divides all of it evenly between the ranks.
        """
        if not self.shards:
            return [parameter.numel for parameter in parameters]
        if self.options.strategy in HYBRID or self.options.process_group is not None:
            return None  # over which ranks is known when they have met
        gathered_dtype = self._mixed_precision().param_dtype or parameters[0].dtype
        align = 16 // gathered_dtype.itemsize if self.options.use_orig_params else 1
        starts = list(accumulate((-(-p.numel // align) * align for p in parameters), initial=0))
        total = starts[-2] + parameters[-1].numel  # the last parameter is not padded
        shard_size = -(-total // self.runtime.world_size)
        shard_start = self.runtime.rank * shard_size
        return [
            max(0, min(start + parameter.numel, shard_start + shard_size) - max(start, shard_start))
            for start, parameter in zip(starts, parameters, strict=False)  # the last start is the end of all
        ]

    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> NativeSharded:
        checkpoint_activations(module, plan)
        orders = parameter_orders(module.modules())
        replicated: list[nn.Parameter] = []
        root: FSDP | None = None
        units = plan.split_by_unit(module)
        for unit in units:  # inner units first, the root last
            kept_in_parts = {parameter for parameter in unit.parameters() - unit.replicated() if is_part(parameter)}
            place(unit.own, self.runtime, self.options.param_init_fn, leave=partial(_is_in, kept_in_parts))
            replicated += unit.replicated()
            parts = renew_parameters(unit.own, replicated, self.runtime.device)
            called = module_to_wrap(module, unit.module)
            with flattening_parts(parts):
                root = self._wrap(called, replicated)
            del parts
            give_back()  # the memory of what was flattened, to the device
            register_unused_hooks(root)
            if unit.module is not module:
                put_in_place(module, called, root)
        assert root is not None
        root.check_is_root()  # now, before anything is moved, so that shards get their final memory
        self._cast_inputs(module, [owner for owner in units[-1].own if owner is not module], root)
        return NativeSharded(root, module, orders, replicated, self.runtime)

    def _cast_inputs(self, module: nn.Module, unit_modules: Iterable[nn.Module], root: FSDP) -> None:
        """Cast the arguments of the user's module; with ``mixed_precision``, also of modules that a step calls."""
        policy = self.options.mixed_precision
        if policy is None:
            cast_inputs_of_calls(module, self._mixed_precision())
        elif policy.param_dtype is not None and policy.cast_root_forward_inputs:
            StepInputs(module, [*unit_modules, *FSDP.fsdp_modules(root)[1:]], policy.param_dtype)

    # -- arguments for torch ---------------------------------------------------------------------------------------

    @property
    def shards(self) -> bool:
        """Whether ranks hold different elements of flat parameters."""
        return self.options.strategy is not ShardingStrategy.NO_SHARD and self.runtime.world_size > 1

    def _ignored(self, cls: type[Any]) -> list[Any]:
        """The modules, or the parameters, that the user's options say to ignore."""
        ignored = [*(self.options.ignored_modules or ()), *(self.options.ignored_states or ())]
        return [each for each in ignored if isinstance(each, cls)]

    def _mesh_arguments(self) -> dict[str, Any]:
        """The arguments of ``FullyShardedDataParallel`` that say over which ranks to shard."""
        if self._made_mesh_arguments is None:
            has_policy = self.options.auto_wrap_policy not in ("auto", None)
            self._made_mesh_arguments = mesh_arguments(self.options, self.runtime, has_policy=has_policy)
        return self._made_mesh_arguments

    def group_to_shard_over(self) -> Any:
        """The process group over which parameters are sharded; ``None`` for all ranks."""
        mesh = self._mesh_arguments().get("device_mesh")
        if mesh is not None:
            return mesh.get_group(mesh.ndim - 1)
        group = self._mesh_arguments().get("process_group")
        return group[0] if isinstance(group, tuple) else group  # the pair of hybrid sharding: to shard, to replicate

    def _mixed_precision(self) -> MixedPrecision:
        if self.options.mixed_precision is not None:
            return self.options.mixed_precision
        return MixedPrecision(
            param_dtype=self.precision.compute, reduce_dtype=self.precision.reduce, cast_forward_inputs=True
        )

    def _wrap(self, unit: nn.Module, replicated: list[nn.Parameter]) -> FSDP:
        with warnings.catch_warnings():
            # one rank has nothing to shard, which needs no warning
            warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
            wrapped = FSDP(
                unit,
                **{
                    **self._mesh_arguments(),
                    "sharding_strategy": self.options.strategy,
                    "cpu_offload": CPUOffload(offload_params=self.offloads_from_device),
                    "backward_prefetch": self.options.prefetch,
                    "mixed_precision": self._mixed_precision(),
                    "device_id": self.runtime.device,
                    "forward_prefetch": self.options.forward_prefetch,
                    "limit_all_gathers": self.options.limit_all_gathers,
                    "use_orig_params": self.options.use_orig_params,
                    "ignored_states": list(replicated) or None,
                    **unit_options("", unit),
                },
            )
        instance: Any = wrapped
        # only now: what FSDP1 sets while it builds a wrapper is not the module's
        instance.__class__ = WrappedUnit.named_as(type(unit))
        return wrapped


#: The topic in the plan's details under which the ``wrap`` options of units stand, by the name of the unit.
_UNIT_OPTIONS = "wrap() options"


def _is_in(parameters: Collection[nn.Parameter], owner: nn.Module, parameter: nn.Parameter) -> bool:
    return parameter in parameters
