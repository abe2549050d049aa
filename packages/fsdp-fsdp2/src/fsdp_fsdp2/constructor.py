"""The options of ``strategy="fsdp2"``, the same under Trainer and Fabric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import nn

from fsdp_core import ProcessGroupRuntime
from fsdp_core.lightning import StrategyOptions
from fsdp_core.sharding import ActivationCheckpointingPolicy, SavedOps, WrapPolicy
from fsdp_fsdp2.backend import FSDP2Backend
from fsdp_fsdp2.computation.prefetch_and_reshard import ReshardPolicy
from fsdp_fsdp2.data_sampler import DataSampler, check_data_sampler, sampled_by
from fsdp_fsdp2.meshes import check_sized, sizes_by_position
from fsdp_fsdp2.migration import ALWAYS, OTHERS_OPTIONS
from fsdp_fsdp2.tensor_parallel.loss import check_loss_parallel
from fsdp_fsdp2.tensor_parallel.styles import TensorParallelPlan
from fsdp_fsdp2.user_sharding.parallelize_fn import ParallelizeFunction

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
            classes, a function ``module -> bool``, or ``"every_2"`` for every second repeated block, and so on.
        activation_checkpointing_saves: Which results they keep all the same: a list of operators, such as
            ``["aten.mm", "aten.addmm"]``, or a policy function as
            :func:`torch.utils.checkpoint.create_selective_checkpoint_contexts` takes it.
        activation_memory_budget: Instead of a policy, the share of activations that compiled units keep, from 0 to 1;
            the compiler chooses which. Needs ``compile``.
        activation_offload: Whether what units save for the backward pass is kept in host memory until then.
        compile: Whether each unit is compiled, before it is sharded; or a dict of :func:`torch.compile`'s keywords.
        float8: Whether linear layers compute in float8, by torchao: ``True``, emulated on CPUs; or a
            ``torchao.float8.Float8LinearConfig``.
        float8_filter: A function ``(module, name) -> bool`` of linear layers that do. ``None``: all. Only those whose
            dimensions are multiples of 16 can.
        reshard_after_forward: Whether units free their parameters between forward and backward pass. An integer keeps
            them sharded over groups of that many ranks. ``None``: all reshard but the root and the last unit, which
            the backward pass needs first. Or a set of the units' classes that reshard, or a function of a unit that
            returns one of these values.
        forward_prefetch_depth: The number of units that are gathered ahead in the forward pass, in the order of their
            definition. ``None``: torch gathers none ahead.
        backward_prefetch_depth: The same for the backward pass. ``None``: torch gathers one ahead.
        cpu_offload: Whether shards, gradients and optimizer state live in host memory.
        mp_policy: A :class:`~torch.distributed.fsdp.MixedPrecisionPolicy`; overrides ``precision``.
        sync_each_batch: Whether gradients are reduced on every micro-batch of an accumulation, which keeps accumulated
            gradients sharded at the cost of more communication. ``"within_replica"``, for several replicas:
            reduce-scattered on every micro-batch, and all-reduced across replicas once per optimizer step.
        data_parallel_size: The number of ranks that parameters, gradients and optimizer state are sharded over;
            ``"auto"`` for those that the other sizes leave. This size and ``tensor_parallel_size`` may be given by
            position: ``FSDP2Strategy(4, 2)``.
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
        parallelize_fn: A function that shards the module instead of the options above, as
            ``parallelize_fn(module, device_mesh, **options)``: it calls ``parallelize_module`` and ``fully_shard`` and
            returns the module. It may take any of ``mp_policy``, ``offload_policy``, ``reshard_after_forward``,
            ``auto_wrap_policy``, ``activation_checkpointing_policy``, ``tp_plan`` and other options about units as
            keyword arguments.
        loss_parallel: Whether training steps and backward passes run inside torch's
            :func:`~torch.distributed.tensor.parallel.loss_parallel`, for a head whose plan divides the vocabulary:
            ``ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)``.
        data_sampler: A function that returns the loader to use for each loader, such as one with a sampler of its own.
            It is called after Lightning has added its sampler, from which it can read the data-parallel rank
            (``loader.sampler.rank``, ``loader.sampler.num_replicas``).
        process_group_backend: As in :func:`torch.distributed.init_process_group`; chosen by device when ``None``.
    """

    backend: FSDP2Backend
    others_options: ClassVar = OTHERS_OPTIONS
    happens_anyway: ClassVar = ALWAYS

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks as torch's mesh, its axes named as the sizes are; axes of one rank can be looked up by name too."""
        return self.backend.device_mesh

    def process_dataloader(self, dataloader: Any) -> Any:
        """Apply ``data_sampler`` to a loader, before the front end prepares it."""
        adapter: Any = super()
        return adapter.process_dataloader(sampled_by(self.data_sampler, dataloader))

    def __init__(
        self,
        *common: Any,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        activation_checkpointing_saves: SavedOps | None = None,
        activation_memory_budget: float | None = None,
        activation_offload: bool = False,
        compile: bool | dict[str, Any] = False,
        float8: Any = False,
        float8_filter: Callable[[nn.Module, str], bool] | None = None,
        reshard_after_forward: bool | int | ReshardPolicy | None = None,
        forward_prefetch_depth: int | None = None,
        backward_prefetch_depth: int | None = None,
        cpu_offload: bool | OffloadPolicy = False,
        mp_policy: MixedPrecisionPolicy | None = None,
        sync_each_batch: bool | Literal["within_replica"] = False,
        data_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_replicate_size: int | Literal["auto"] = "auto",
        context_parallel_size: int | Literal["auto"] = "auto",
        context_parallel_dims: Mapping[str, int] | None = None,
        tensor_parallel_size: int | Literal["auto"] = "auto",
        tp_plan: TensorParallelPlan | None = None,
        parallelize_fn: ParallelizeFunction | None = None,
        loss_parallel: bool = False,
        data_sampler: DataSampler | None = None,
        process_group_backend: str | None = None,
        **others: Any,
    ) -> None:
        if common and isinstance(common[0], int | str):  # as the other strategies that are called so have them first
            given = {"data_parallel_size": data_parallel_size, "tensor_parallel_size": tensor_parallel_size}
            data_parallel_size, tensor_parallel_size = sizes_by_position(common, given)
            common = ()
        if tp_plan is None and others.get("use_hf_tp_plan") and tensor_parallel_size not in (1, "auto"):
            tp_plan = "auto"
        backend = FSDP2Backend(
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing_policy=activation_checkpointing_policy,
            activation_checkpointing_saves=activation_checkpointing_saves,
            activation_memory_budget=activation_memory_budget,
            activation_offload=activation_offload,
            compile=compile,
            float8=float8,
            float8_filter=float8_filter,
            reshard_after_forward=reshard_after_forward,
            forward_prefetch_depth=forward_prefetch_depth,
            backward_prefetch_depth=backward_prefetch_depth,
            cpu_offload=cpu_offload,
            mp_policy=mp_policy,
            sync_each_batch=sync_each_batch,
            data_parallel_size=data_parallel_size,
            data_parallel_replicate_size=data_parallel_replicate_size,
            context_parallel_size=context_parallel_size,
            context_parallel_dims=context_parallel_dims,
            tensor_parallel_size=tensor_parallel_size,
            tp_plan=tp_plan,
            parallelize_fn=parallelize_fn,
        )
        check_loss_parallel(loss_parallel)
        check_sized("tensor_parallel_size", backend.sizes, loss_parallel=loss_parallel)
        self.loss_parallel = loss_parallel
        self.data_sampler = check_data_sampler(data_sampler)
        runtime = ProcessGroupRuntime(process_group_backend)
        super().__init__(backend, *common, strategy_name="fsdp2", runtime=runtime, **others)
