"""The options of XlaFullyShardedDataParallel that the strategy passes on, and what to write instead of others."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from fsdp_core import UnsupportedCapabilityError

__all__ = [
    "ACCEPTED_NOOPS",
    "MIGRATION_HINTS",
    "SPMD_ACCEPTED_NOOPS",
    "SPMD_MIGRATION_HINTS",
    "check_collectives",
    "check_options",
    "check_sequential_save",
]

#: Values of other libraries' options that are accepted, because they describe what happens here.
ACCEPTED_NOOPS: Mapping[str, Collection[object]] = {
    "use_orig_params": (True,),
    "sync_module_states": (True,),
    "data_parallel_size": ("auto",),
    "context_parallel_size": (1,),
    "tensor_parallel_size": (1,),
}

#: The same for ``xla_fsdp_spmd``.
SPMD_ACCEPTED_NOOPS: Mapping[str, Collection[object]] = {
    "use_orig_params": (True,),
    "sync_module_states": (True,),
    "context_parallel_size": (1,),
    "data_parallel_size": ("auto",),
    "sharding_strategy": ("FULL_SHARD",),
    "flatten_parameters": (False,),
    "timeout": (None,),
    "sequential_save": (False,),
    "scattered_save": (False,),
}

#: What to write instead of the other options of torch_xla's wrapper, and of those of torch's FSDP.
MIGRATION_HINTS = {
    "auto_wrapper_callable": "Write activation_checkpointing_policy={MyBlock}, which needs no wrapper.",
    "param_init_fn": "Leave it out: a module built on the meta device is initialized by its reset_parameters().",
    "sharding_groups": "Leave it out: all ranks shard.",
    "sharding_rank": "Leave it out: all ranks shard.",
    "sharding_world_size": "Leave it out: all ranks shard.",
    # torch's FSDP
    "cpu_offload": "XLA keeps shards on its devices; use 'fsdp2_cpu_offload' for it.",
    "mixed_precision": "Write precision='bf16-mixed' to Trainer or Fabric.",
    "mp_policy": "Write precision='bf16-mixed' to Trainer or Fabric.",
    "sharding_strategy": "Write reshard_after_forward=True for 'FULL_SHARD', False for 'SHARD_GRAD_OP'.",
    "backward_prefetch": "Leave it out: XLA schedules the whole graph of a step.",
    "forward_prefetch": "Leave it out: XLA schedules the whole graph of a step.",
    "limit_all_gathers": "Leave it out: XLA schedules the whole graph of a step.",
    "sync_module_states": "Leave it out: rank 0's values always win.",
    "use_orig_params": "Write flatten_parameters=False, which is the default.",
    "device_mesh": "strategy='xla_fsdp_spmd' shards over a mesh.",
    "process_group": "Leave it out: all ranks shard.",
    "process_group_backend": "Leave it out: XLA has no process group.",
    "precision_plugin": "It is called precision here, for Trainer and Fabric alike.",
    "cluster_environment": "Leave it out: XLA numbers the ranks.",
    "data_parallel_size": "Leave it out: all ranks shard.",
    "context_parallel_size": "XLA strategies have no context parallelism: on GPUs, write strategy='fsdp2'.",
    "tensor_parallel_size": "XlaFullyShardedDataParallel has no tensor parallelism.",
}

#: What to write instead of other libraries' options for ``xla_fsdp_spmd``.
SPMD_MIGRATION_HINTS = {
    **{name: MIGRATION_HINTS[name] for name in ("cpu_offload", "mixed_precision", "mp_policy", "sync_module_states")},
    **{name: MIGRATION_HINTS[name] for name in ("backward_prefetch", "forward_prefetch", "limit_all_gathers")},
    **{name: MIGRATION_HINTS[name] for name in ("param_init_fn", "process_group_backend", "context_parallel_size")},
    "sharding_strategy": "Leave it out: parameters are always sharded, and XLA chooses when they are gathered.",
    "reshard_after_forward": "Leave it out: XLA chooses when parameters are gathered and freed.",
    "use_orig_params": "Leave it out: parameters always keep their names and shapes.",
    "flatten_parameters": "Leave it out: parameters always keep their names and shapes.",
    "data_parallel_size": "Leave it out: it is the number of devices divided by tensor_parallel_size.",
    "device_mesh": "Leave it out: the mesh spans all devices; tensor_parallel_size gives it a second axis.",
    "process_group": "Leave it out: one process drives all devices.",
    "cluster_environment": "Leave it out: one process drives all devices.",
    "timeout": "Leave it out: there is no other process to wait for.",
    "hang_timeout": "Leave it out: there is no other process to wait for.",
    "sequential_save": "Leave it out: one process saves for all devices.",
    "scattered_save": "Leave it out: one process saves for all devices.",
}


def check_options(options: Mapping[str, object]) -> None:
    """Refuse dtypes that are none, and combinations that XlaFullyShardedDataParallel can't handle.

    Raises:
        UnsupportedCapabilityError: An option is refused; the message names what to write instead.
    """
    for name in ("compute_dtype", "buffer_dtype"):
        dtype = options.get(name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UnsupportedCapabilityError(
                f"{name}={dtype!r} is no floating-point dtype of torch's.\n"
                f"Write {name}=torch.bfloat16, or leave it out."
            )
    if options.get("coalesce_all_gather_ops") and not options.get("shard_param_on_dim_0"):
        raise UnsupportedCapabilityError(
            "coalesce_all_gather_ops=True needs shard_param_on_dim_0=True: torch_xla 2.9 does not coalesce flat "
            "shards, and gathers an empty list, which ends the process with a segmentation fault.\n"
            "Write shard_param_on_dim_0=True too, or leave coalesce_all_gather_ops out."
        )


def check_collectives(options: Mapping[str, object], *, on_cpu: bool) -> None:
    """Refuse options that XLA's CPU client does not support.

    Raises:
        UnsupportedCapabilityError: Layouts would be pinned on the CPU.
    """
    if on_cpu and options.get("pin_layout_in_collective_ops"):
        raise UnsupportedCapabilityError(
            "pin_layout_in_collective_ops=True can't be used on the CPU, where collectives would wait for each other "
            "until XLA ends the process.\nLeave it out there; on a TPU it is passed on."
        )


def check_sequential_save(sequential_save: bool, async_save: bool) -> None:
    """Refuse to combine saving in turn, which needs little host memory, with saving in the background.

    Raises:
        UnsupportedCapabilityError: Both options are set.
    """
    if sequential_save and async_save:
        raise UnsupportedCapabilityError(
            "sequential_save=True can't be combined with async_save=True: a save in the background begins with a copy "
            "of every rank's shards in host memory, which sequential_save=True avoids.\n"
            "Write sequential_save=True where host memory is short, and async_save=True where it isn't."
        )
