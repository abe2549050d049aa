"""The options of ``strategy="fsdp_native"``, the same under Trainer and Fabric."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from fsdp_core import ProcessGroupRuntime
from fsdp_core.lightning import StrategyOptions
from fsdp_core.sharding import ActivationCheckpointingPolicy, WrapPolicy
from fsdp_cuda_native.backend import NativeBackend
from fsdp_cuda_native.options import ALWAYS, OTHER_OPTIONS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

__all__ = ["NativeOptions"]


class NativeOptions(StrategyOptions):
    """Constructor of both strategy classes. Core's adapters add the options that all strategies share.

    The first five options may be given by position, after those that the front ends name, as in Lightning 1.x.

    Args:
        process_group_backend: As in :func:`torch.distributed.init_process_group`; chosen by device when ``None``.
        cpu_offload: Whether shards, gradients and optimizer state live in host memory: a bool, or torch's
            :class:`~torch.distributed.fsdp.CPUOffload`.
        backward_prefetch: When the next unit is gathered in the backward pass: torch's enum, or ``"BACKWARD_PRE"``,
            ``"BACKWARD_POST"``; ``None``: when it is needed.
        mixed_precision: A :class:`~torch.distributed.fsdp.MixedPrecision`; overrides ``precision``.
        activation_checkpointing: A class of modules that recompute their activations in the backward pass, or a list
            of classes.
        auto_wrap_policy: Which submodules are gathered and freed together: a set of classes, a function
            ``module -> bool`` or one of torch's policies, ``"auto"`` for the blocks repeated in ``ModuleList`` s,
            or ``None`` for the root alone.
        activation_checkpointing_policy: As ``activation_checkpointing``, a set of classes or a function
            ``module -> bool``.
        sync_each_batch: Whether gradients are reduced on every micro-batch of an accumulation, which keeps accumulated
            gradients sharded at the cost of more communication.
        sharding_strategy: One of torch's :class:`~torch.distributed.fsdp.ShardingStrategy`, or its name:
            ``"FULL_SHARD"``, ``"SHARD_GRAD_OP"``, ``"HYBRID_SHARD"``, ``"HYBRID_SHARD_ZERO2"``, ``"NO_SHARD"``.
        use_orig_params: Whether optimizers hold the original parameters instead of one flat parameter per unit.
        ignored_modules: Modules that are replicated on every rank, with gradients averaged.
        ignored_states: The same; takes parameters too.
        process_group: The ranks to shard over; for hybrid sharding a pair, with those to replicate over.
        device_mesh: The same as a mesh, or as its shape; for hybrid sharding (replicas, ranks of each).
        param_init_fn: Initializes a module that was built on the meta device.
        forward_prefetch: Whether the next unit is gathered before it is needed in the forward pass.
        limit_all_gathers: Whether at most two units are gathered ahead, to bound memory.

    Raises:
        UnsupportedCapabilityError: An option is unknown, or contradicts another.
    """

    backend: NativeBackend
    others_options: ClassVar = OTHER_OPTIONS
    happens_anyway: ClassVar = ALWAYS
    #: The name that users type.
    called: ClassVar[str] = "fsdp_native"

    def __init__(
        self,
        process_group_backend: str | None = None,
        cpu_offload: bool | CPUOffload | None = False,
        backward_prefetch: BackwardPrefetch | str | None = "BACKWARD_PRE",
        mixed_precision: MixedPrecision | None = None,
        activation_checkpointing: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
        *common: Any,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        sync_each_batch: bool = False,
        sharding_strategy: ShardingStrategy | str = "FULL_SHARD",
        use_orig_params: bool = True,
        ignored_modules: Iterable[nn.Module] | None = None,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        process_group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None = None,
        device_mesh: DeviceMesh | tuple[int, ...] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        **others: Any,
    ) -> None:
        backend = NativeBackend(
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing_policy=activation_checkpointing_policy,
            activation_checkpointing=activation_checkpointing,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            sync_each_batch=sync_each_batch,
            sharding_strategy=sharding_strategy,
            use_orig_params=use_orig_params,
            ignored_modules=ignored_modules,
            ignored_states=ignored_states,
            process_group=process_group,
            device_mesh=device_mesh,
            param_init_fn=param_init_fn,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
        )
        runtime = ProcessGroupRuntime(process_group_backend)
        super().__init__(backend, *common, strategy_name=self.called, runtime=runtime, **others)
