"""The options of ``strategy="fsdp2"``, the same under Trainer and Fabric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fsdp_core import ProcessGroupRuntime
from fsdp_core.lightning import StrategyOptions
from fsdp_core.sharding import ActivationCheckpointingPolicy, WrapPolicy
from fsdp_fsdp2.backend import FSDP2Backend
from fsdp_fsdp2.migration import ALWAYS, OTHERS_OPTIONS
from fsdp_fsdp2.tensor_parallel import TensorParallelPlan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

__all__ = ["FSDP2Options"]


class FSDP2Options(StrategyOptions):
    """Constructor of both strategy classes. Core's adapters add the options that all strategies share.

    Args:
        auto_wrap_policy: Which submodules are gathered and freed together: a set of classes, a function
            ``module -> bool`` or one of torch's policies, ``"auto"`` for the blocks
            repeated in ``ModuleList`` s, or ``None`` for the root alone.
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass: a set of
            classes or a function ``module -> bool``.
        reshard_after_forward: Whether units free their parameters between forward and backward pass. An integer keeps
            them sharded over groups of that many ranks. ``None``: all reshard but the root and the last unit, which
            the backward pass needs first.
        cpu_offload: Whether shards, gradients and optimizer state live in host memory.
        mp_policy: A :class:`~torch.distributed.fsdp.MixedPrecisionPolicy`; overrides ``precision``.
        sync_each_batch: Whether gradients are reduced on every micro-batch of an accumulation, which keeps accumulated
            gradients sharded at the cost of more communication.
        data_parallel_size: The number of ranks that parameters, gradients and optimizer state are sharded over;
            ``"auto"`` for those that the other sizes leave.
        data_parallel_replicate_size: The number of replicas of these shards, for hybrid sharding: gradients are
            reduce-scattered within a replica and all-reduced across replicas. ``"auto"``: 1.
        context_parallel_size: The number of ranks that divide each batch along its sequence. Attention by
            :func:`~torch.nn.functional.scaled_dot_product_attention` sees the keys and values of all of them. They
            also shard what data-parallel ranks shard. ``"auto"``: 1.
        context_parallel_dims: By name of a batch's entry, its sequence dimension, such as ``{"input_ids": 1}``; entries
            of a tuple are named ``"0"``, ``"1"``, and so on. Other entries stay whole. ``None``: every tensor with two
            dimensions or more is split along dimension 1, if these sizes agree.
        tensor_parallel_size: The number of ranks that divide layers among them, for the same batch. ``"auto"``: 1.
        tp_plan: How layers are divided: by pattern of submodule names, in which ``*`` stands for one name between dots,
            a style of :mod:`torch.distributed.tensor.parallel`; or ``"auto"`` for the plan that the model brings, as
            those of transformers do. The model's own code sees the local part of what a divided layer returns, as with
            :func:`~torch.distributed.tensor.parallel.parallelize_module`.
        process_group_backend: As in :func:`torch.distributed.init_process_group`; chosen by device when ``None``.
    """

    backend: FSDP2Backend
    others_options: ClassVar = OTHERS_OPTIONS
    happens_anyway: ClassVar = ALWAYS

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks as torch's mesh, its axes named as the sizes are; axes of one rank can be looked up by name too."""
        return self.backend.device_mesh

    def __init__(
        self,
        *common: Any,
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
        process_group_backend: str | None = None,
        **others: Any,
    ) -> None:
        backend = FSDP2Backend(
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing_policy=activation_checkpointing_policy,
            reshard_after_forward=reshard_after_forward,
            cpu_offload=cpu_offload,
            mp_policy=mp_policy,
            sync_each_batch=sync_each_batch,
            data_parallel_size=data_parallel_size,
            data_parallel_replicate_size=data_parallel_replicate_size,
            context_parallel_size=context_parallel_size,
            context_parallel_dims=context_parallel_dims,
            tensor_parallel_size=tensor_parallel_size,
            tp_plan=tp_plan,
        )
        runtime = ProcessGroupRuntime(process_group_backend)
        super().__init__(backend, *common, strategy_name="fsdp2", runtime=runtime, **others)
