"""Sharding with torch's ``FullyShardedDataParallel`` (FSDP1). Independent of Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
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
    ShardPrecision,
    StepInputs,
    WrapPolicy,
    checkpoint_activations,
    describe_policy,
    is_part,
    kept_as_built,
    parameter_orders,
    place,
    put_in_place,
    select_units,
    stays_whole,
)
from fsdp_core.state import give_back
from fsdp_cuda_native.meshes import ranks_to_shard_over
from fsdp_cuda_native.options import FSDP_OPTIONS, check_options, classes_to_checkpoint, named_member, wants_offload
from fsdp_cuda_native.sharded import NativeSharded
from fsdp_cuda_native.torch_private import flat_parameters as torch_private
from fsdp_cuda_native.unit_checks import check_not_wrapped, check_unit, unit_options
from fsdp_cuda_native.wrappers import WrappedUnit, called_for, cast_inputs_of, renew_parameters

__all__ = ["NativeBackend"]


class NativeBackend(Backend):
    """Flattens the parameters of each unit into one flat parameter, of which each rank holds consecutive elements.

    0-dim parameters, which FSDP1 rejects, and ignored parameters are replicated on every rank, and their gradients are
    averaged.

    Args:
        auto_wrap_policy: Which submodules are units of their own: a set of classes, a callable, ``"auto"`` for the
            blocks repeated in the model's ``ModuleList`` s, or ``None``. The root comes last, with what is left.
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass.
        activation_checkpointing: The same, as a class or a list of classes.
        cpu_offload: Whether shards, gradients and optimizer state live in host memory.
        backward_prefetch: When the next unit's parameters are gathered in the backward pass; ``None``: when needed.
        mixed_precision: Dtypes of computation and reduction; overrides the precision.
        sync_each_batch: Whether gradients are reduced on every micro-batch of an accumulation. It keeps accumulated
            gradients sharded at the cost of more communication.
        **options: Those of :data:`fsdp_cuda_native.options.FSDP_OPTIONS`.
    """

    owner_compute = True

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
        """Whether optimizers hold the original parameters instead of one flat parameter per unit."""
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

    def check_waiting(self) -> None:
        """Refuse to accumulate gradients that wait for their reduction, where FSDP1 can't keep them.

        Raises:
            UnsupportedCapabilityError: Nothing is sharded, and units compute in half precision.
        """
        compute = self._mixed_precision().param_dtype
        whole = self.sharding_strategy is ShardingStrategy.NO_SHARD
        if whole and self.use_orig_params and compute not in (None, self.precision.storage):
            raise UnsupportedCapabilityError(
                "sharding_strategy='NO_SHARD' can't accumulate gradients without reducing them under mixed precision: "
                f"FSDP1 would give parameters in {self.precision.storage} gradients in {compute}, which torch "
                "refuses.\n"
                "Write sync_each_batch=True, or sharding_strategy='FULL_SHARD'; or use strategy='ddp'."
            )

    # -- building and sharding -------------------------------------------------------------------------------------

    @contextmanager
    def wrap_context(self) -> Iterator[None]:
        runtime = vars(self).get("runtime") if self.sharding_strategy is not ShardingStrategy.NO_SHARD else None
        with super().wrap_context(), kept_as_built(runtime):
            yield

    def units(self, module: nn.Module) -> list[nn.Module]:
        return select_units(module, self.auto_wrap_policy)

    def shard_module(self, module: nn.Module) -> NativeSharded:
        check_not_wrapped(module)
        units = self.units(module)
        checkpoint_activations(module, self.activation_checkpointing_policy)
        orders = parameter_orders(module.modules())
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
            check_unit(module, unit, own, whole, use_orig_params=self.use_orig_params)
            kept = renew_parameters(own, whole, self.runtime.device)
            with torch_private.flattening_parts(kept):
                root = self._wrapped(unit, whole)
            del kept
            give_back()
            torch_private.reduce_unused(root)
            if unit is not module:
                put_in_place(module, unit, root)
        assert root is not None
        root.check_is_root()  # now, before anything is moved, so that shards get their final memory
        self._cast_inputs(module, [m for m in own if m is not module], root)
        return NativeSharded(root, module, orders, whole, self.runtime)

    def _cast_inputs(self, module: nn.Module, own: Iterable[nn.Module], root: FullyShardedDataParallel) -> None:
        """Cast the arguments of the user's module; with ``mixed_precision``, also of modules that a step calls."""
        policy = self.mixed_precision
        if policy is None:
            cast_inputs_of(module, self._mixed_precision())
        elif policy.param_dtype is not None and policy.cast_root_forward_inputs:
            StepInputs(module, [*own, *FullyShardedDataParallel.fsdp_modules(root)[1:]], policy.param_dtype)

    # -- arguments for torch ---------------------------------------------------------------------------------------

    @property
    def shards(self) -> bool:
        """Whether ranks hold different elements of flat parameters."""
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

    def group_to_shard_over(self) -> Any:
        """The process group over which parameters are sharded; ``None`` for all ranks."""
        mesh = self._ranks_to_shard_over()
        group = mesh.get("process_group")
        if "device_mesh" in mesh:
            group = mesh["device_mesh"].get_group(mesh["device_mesh"].ndim - 1)
        return group[0] if isinstance(group, tuple) else group

    def _mixed_precision(self) -> MixedPrecision:
        if self.mixed_precision is not None:
            return self.mixed_precision
        return MixedPrecision(
            param_dtype=self.precision.compute, reduce_dtype=self.precision.reduce, cast_forward_inputs=True
        )

    def _wrapped(self, unit: nn.Module, whole: list[nn.Parameter]) -> FullyShardedDataParallel:
        # on the CPU, shards live in host memory already; torch would allocate memory pinned for an accelerator
        offload = self.cpu_offload and self.runtime.device.type != "cpu"
        with warnings.catch_warnings():
            # one rank has nothing to shard, which needs no warning
            warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
            wrapped = FullyShardedDataParallel(
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
        instance: Any = wrapped
        instance.__class__ = WrappedUnit
        return wrapped
