"""The options of ``strategy="fsdp2"``, the same under Trainer and Fabric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.sharding import (
    ActivationCheckpointingPolicy,
    SavedOps,
    ShardingOptions,
    WrapPolicy,
    describe_policy,
    option,
)
from fsdp_fsdp2.computation.activations import check_activations, described_ops
from fsdp_fsdp2.computation.compilation import check_compile, described_compile
from fsdp_fsdp2.computation.float8 import described_filter, described_float8
from fsdp_fsdp2.computation.prefetch_and_reshard import ReshardPolicy, check_depth, check_reshard, described_reshard
from fsdp_fsdp2.context_parallel.attention_and_losses import checked_dims
from fsdp_fsdp2.data_sampler import DataSampler, check_data_sampler
from fsdp_fsdp2.expert_parallel.plans import ExpertParallelPlan, check_expert_plan, described_experts
from fsdp_fsdp2.meshes import check_sized
from fsdp_fsdp2.tensor_parallel.loss import check_loss_parallel
from fsdp_fsdp2.tensor_parallel.styles import TensorParallelPlan, check_plan, described_plan
from fsdp_fsdp2.user_sharding.parallelize_fn import ParallelizeFunction, check_parallelize_fn

__all__ = ["FSDP2Options"]


@dataclass(frozen=True, kw_only=True)
class FSDP2Options(ShardingOptions):
    """The options of both strategy classes.

    Raises:
        UnsupportedCapabilityError: A value is not known, or contradicts another.
    """

    auto_wrap_policy: WrapPolicy | None = option("auto", part_of="units", describe=describe_policy)
    """Which submodules are gathered and freed together: a set of classes, a function ``module -> bool`` or one of
    torch's policies, ``"auto"`` for the blocks repeated in ``ModuleList`` s, or ``None`` for the root alone."""
    activation_checkpointing_policy: str | ActivationCheckpointingPolicy | None = option(
        None, part_of="units", describe=describe_policy
    )
    """Which submodules recompute their activations in the backward pass: a set of classes, a function ``module ->
    bool``, or ``"every_2"`` for every second repeated block, and so on."""
    activation_checkpointing_saves: SavedOps | None = option(None, part_of="units", describe=described_ops)
    """Which results recomputing submodules keep nevertheless: a list of operators, such as ``["aten.mm",
    "aten.addmm"]``, or a policy function as :func:`torch.utils.checkpoint.create_selective_checkpoint_contexts` takes
    it."""
    activation_memory_budget: float | None = option(None, part_of="units")
    """The share of activations that compiled units keep, from 0 to 1; the compiler chooses which. Replaces
    ``activation_checkpointing_policy``, and needs ``compile``."""
    activation_offload: bool = option(False, part_of="units")
    """Whether what units save for the backward pass is kept in host memory until then."""
    compile: bool | dict[str, Any] = option(False, part_of="units", describe=described_compile)
    """Whether each unit is compiled, before it is sharded; or a dict of :func:`torch.compile`'s keywords."""
    float8: Any = option(False, part_of="units", describe=described_float8)
    """Whether linear layers compute in float8, by torchao: ``True``, emulated on CPUs; or a
    ``torchao.float8.Float8LinearConfig``."""
    float8_filter: Callable[[nn.Module, str], bool] | None = option(None, part_of="units", describe=described_filter)
    """A function ``(module, name) -> bool`` that chooses the linear layers that compute in float8. ``None``: all whose
    dimensions are multiples of 16; others can't."""
    reshard_after_forward: bool | int | ReshardPolicy | None = option(None, part_of="units", describe=described_reshard)
    """Whether units free their parameters between forward and backward pass. An integer keeps them sharded over
    groups of that many ranks. ``None``: all reshard but the root and the last unit, which the backward pass needs
    first. Or a set of the units' classes that reshard, or a function of a unit that returns one of these values."""
    forward_prefetch_depth: int | None = option(None, part_of="units")
    """The number of units that are gathered ahead in the forward pass, in the order of their definition. ``None``:
    torch gathers none ahead."""
    backward_prefetch_depth: int | None = option(None, part_of="units")
    """The number of units that are gathered ahead in the backward pass. ``None``: torch gathers one ahead."""
    cpu_offload: bool | OffloadPolicy = option(False, part_of="units", argument="offload_policy")
    """Whether shards, gradients and optimizer state live in host memory."""
    mp_policy: MixedPrecisionPolicy | None = option(None, part_of="units")
    """A :class:`~torch.distributed.fsdp.MixedPrecisionPolicy`; overrides ``precision``."""
    sync_each_batch: bool | Literal["within_replica"] = False
    """Whether gradients are reduced on every micro-batch of an accumulation, which keeps accumulated gradients
    sharded at the cost of more communication. ``"within_replica"``, for several replicas: reduce-scattered on every
    micro-batch, and all-reduced across replicas once per optimizer step."""
    data_parallel_size: int | Literal["auto"] = "auto"
    """The number of ranks that parameters, gradients and optimizer state are sharded over; ``"auto"`` for those
    that the other sizes leave. This size and ``tensor_parallel_size`` may be given by position: ``FSDP2Strategy(4,
    2)``."""
    data_parallel_replicate_size: int | Literal["auto"] = "auto"
    """The number of replicas of these shards, for hybrid sharding: gradients are reduce-scattered within a replica
    and all-reduced across replicas. ``"auto"``: 1."""
    context_parallel_size: int | Literal["auto"] = "auto"
    """The number of ranks that divide each batch along its sequence. Attention by
    :func:`~torch.nn.functional.scaled_dot_product_attention` sees the keys and values of all of them. They also
    shard what data-parallel ranks shard. ``"auto"``: 1."""
    context_parallel_dims: Mapping[str, int] | None = None
    """By name of a batch's entry, its sequence dimension, such as ``{"input_ids": 1}``; entries of a tuple are
    named ``"0"``, ``"1"``, and so on. Other entries stay whole. ``None``: every tensor with two dimensions or more
    is split along dimension 1, if all have the same size there."""
    tensor_parallel_size: int | Literal["auto"] = "auto"
    """The number of ranks that divide layers among them, for the same batch. ``"auto"``: 1."""
    tp_plan: TensorParallelPlan | None = option(None, part_of="units", describe=described_plan)
    """How layers are divided: by pattern of submodule names, in which ``*`` stands for one name between dots, a
    style of :mod:`torch.distributed.tensor.parallel`; or ``"auto"`` for the plan that the model brings, as those of
    transformers do. The model's own code sees the local part of what a divided layer returns, as with
    :func:`~torch.distributed.tensor.parallel.parallelize_module`."""
    expert_parallel_size: int | Literal["auto"] = "auto"
    """The number of data-parallel ranks that divide the experts of a layer among them: a divisor of
    ``data_parallel_size``. Each rank has its own batch, and sends tokens to the ranks that have their experts.
    ``"auto"``: 1."""
    expert_parallel_plan: ExpertParallelPlan | None = option(None, part_of="units", describe=described_experts)
    """Which submodules hold experts, and how they are called: by pattern of submodule names, in which ``*`` stands for
    one name between dots, ``"top_k"`` for ``experts(tokens, indices, weights)``, or ``"sorted"`` for ``experts(tokens,
    counts)``. ``None``: those that the model's own plan names, as those of transformers do."""
    parallelize_fn: ParallelizeFunction | None = None
    """A function that shards the module instead of the options above, as ``parallelize_fn(module, device_mesh,
    **options)``: it calls ``parallelize_module`` and ``fully_shard`` and returns the module. It may take any of
    ``mp_policy``, ``offload_policy``, ``reshard_after_forward``, ``auto_wrap_policy``,
    ``activation_checkpointing_policy``, ``tp_plan`` and other options about units as keyword arguments."""
    loss_parallel: bool = False
    """Whether training steps and backward passes run inside torch's
    :func:`~torch.distributed.tensor.parallel.loss_parallel`, for a head whose plan divides the vocabulary:
    ``ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)``."""
    data_sampler: DataSampler | None = None
    """A function that returns the loader to use for each loader, such as one with a sampler of its own. It is
    called after Lightning has added its sampler, from which it can read the data-parallel rank
    (``loader.sampler.rank``, ``loader.sampler.num_replicas``)."""
    process_group_backend: str | None = None
    """As in :func:`torch.distributed.init_process_group`; chosen by device when ``None``."""

    def __post_init__(self) -> None:
        check_plan(self.tp_plan)
        _check_policies(self.cpu_offload, self.mp_policy)
        check_reshard(self.reshard_after_forward)
        check_depth("forward_prefetch_depth", self.forward_prefetch_depth)
        check_depth("backward_prefetch_depth", self.backward_prefetch_depth)
        self.saved_ops, self.compiler_keywords  # noqa: B018  # checks them
        checked_dims(self.context_parallel_dims)
        check_sized("context_parallel_size", self.sizes, context_parallel_dims=self.context_parallel_dims)
        check_sized("tensor_parallel_size", self.sizes, tp_plan=self.tp_plan)
        check_expert_plan(self.expert_parallel_plan)
        check_sized("expert_parallel_size", self.sizes, expert_parallel_plan=self.expert_parallel_plan)
        names = self.argument_names()
        check_parallelize_fn(self.parallelize_fn, [names[name] for name in self.changed_options()], names.values())
        check_loss_parallel(self.loss_parallel)
        check_sized("tensor_parallel_size", self.sizes, loss_parallel=self.loss_parallel)
        check_data_sampler(self.data_sampler)

    @cached_property
    def saved_ops(self) -> SavedOps | None:
        """The operators whose results are kept where activations are recomputed."""
        return check_activations(
            self.activation_checkpointing_policy,
            self.activation_checkpointing_saves,
            self.activation_memory_budget,
            self.activation_offload,
        )

    @cached_property
    def compiler_keywords(self) -> dict[str, Any] | None:
        """The keywords of :func:`torch.compile`; ``None`` if nothing is compiled."""
        return check_compile(self.compile, self.activation_memory_budget)

    @property
    def sizes(self) -> dict[str, int | Literal["auto"]]:
        """The sizes of the mesh, by option."""
        return {
            "data_parallel_size": self.data_parallel_size,
            "data_parallel_replicate_size": self.data_parallel_replicate_size,
            "context_parallel_size": self.context_parallel_size,
            "tensor_parallel_size": self.tensor_parallel_size,
            "expert_parallel_size": self.expert_parallel_size,
        }


def _check_policies(cpu_offload: object, mp_policy: object) -> None:
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
