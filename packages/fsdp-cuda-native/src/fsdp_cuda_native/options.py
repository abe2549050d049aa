"""FSDP1's options, as users write them and as torch takes them, and what to write instead of other libraries'."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from fsdp_core import UnsupportedCapabilityError

__all__ = [
    "ALWAYS",
    "FSDP_OPTIONS",
    "HYBRID",
    "OTHER_OPTIONS",
    "check_mixed_precision",
    "check_options",
    "classes_to_checkpoint",
    "named_member",
    "wants_offload",
]

#: Options of ``FullyShardedDataParallel`` that are passed through, with this package's defaults.
FSDP_OPTIONS: Mapping[str, Any] = {
    "sharding_strategy": "FULL_SHARD",
    "use_orig_params": True,
    "ignored_modules": None,
    "ignored_states": None,
    "process_group": None,
    "device_mesh": None,
    "param_init_fn": None,
    "forward_prefetch": False,
    "limit_all_gathers": True,
}

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

#: Values of other libraries' options that are accepted, because they describe what happens here.
ALWAYS: Mapping[str, Collection[object]] = {
    "sync_module_states": (True,),
    "flatten_parameters": (True,),
    "data_parallel_size": ("auto",),
    "context_parallel_size": (1,),
    "tensor_parallel_size": (1,),
}

#: What to write instead of FSDP1's options that the strategy decides, and of fsdp2's, Lightning's and fairscale's.
OTHER_OPTIONS: Mapping[str, str] = {
    "device_id": "Leave it out: Lightning's `devices` says where each rank runs.",
    "sync_module_states": "Leave it out: rank 0's values always win.",
    "reshard_after_forward": "Write sharding_strategy='FULL_SHARD' for True, 'SHARD_GRAD_OP' for False.",
    "mp_policy": "Write precision='bf16-mixed' to Trainer or Fabric, or give a mixed_precision.",
    "precision_plugin": "Under Fabric it is called precision.",
    "precision": "Write precision= to the Trainer; a plugin is called precision_plugin here.",
    "data_parallel_size": "Leave it out: all ranks shard; tensor parallelism is not part of 'fsdp_native'.",
    "context_parallel_size": "'fsdp_native' has no context parallelism: write strategy='fsdp2'.",
    "tensor_parallel_size": "'fsdp_native' has no tensor parallelism.",
    "save_distributed_checkpoint": "Write state_dict_type='sharded', or 'full'.",
    "flatten_parameters": "Leave it out: parameters are always flattened. It belongs to 'ddp_fully_sharded'.",
}

E = TypeVar("E", ShardingStrategy, BackwardPrefetch)


def named_member(option: str, enum: type[E], value: E | str) -> E:
    """Return a member of one of torch's enums, given itself or its case-insensitive name.

    Raises:
        UnsupportedCapabilityError: There is no such member.

    Example:
        >>> named_member("sharding_strategy", ShardingStrategy, "shard_grad_op")
        <ShardingStrategy.SHARD_GRAD_OP: 2>
    """
    if isinstance(value, enum):
        return value
    names = {member.name.strip("_"): member for member in enum}
    found = names.get(str(value).upper().strip("_"))
    if found is None:
        raise UnsupportedCapabilityError(
            f"{option}={value!r} is not known to 'fsdp_native'.\nWrite one of: {', '.join(map(repr, names))}."
        )
    return found


def wants_offload(cpu_offload: bool | CPUOffload | None) -> bool:
    """Whether to keep shards in host memory; ``None``, the default of other strategies, means no.

    Raises:
        UnsupportedCapabilityError: The value is neither a bool nor FSDP1's ``CPUOffload``.
    """
    if cpu_offload is None:
        return False
    if isinstance(cpu_offload, CPUOffload):
        return bool(cpu_offload.offload_params)
    if isinstance(cpu_offload, bool):
        return cpu_offload
    raise UnsupportedCapabilityError(
        f"cpu_offload={cpu_offload!r} is not known to 'fsdp_native'.\n"
        "Write cpu_offload=True, or a torch.distributed.fsdp.CPUOffload; "
        "FSDP2's CPUOffloadPolicy belongs to 'fsdp2'."
    )


def classes_to_checkpoint(
    old: type[nn.Module] | Iterable[type[nn.Module]] | None, policy: object
) -> frozenset[type[nn.Module]] | None:
    """Read ``activation_checkpointing``, the older spelling of ``activation_checkpointing_policy``.

    Args:
        old: One module class, or several.
        policy: The value of the newer option.

    Raises:
        UnsupportedCapabilityError: ``old`` is not a module class, or both options are used.
    """
    if old is None:
        return None
    if policy is not None:
        raise UnsupportedCapabilityError(
            "activation_checkpointing and activation_checkpointing_policy are two spellings of one option.\n"
            "Write activation_checkpointing_policy={MyBlock} alone."
        )
    classes = (old,) if isinstance(old, type) else tuple(old) if isinstance(old, Iterable) else (old,)
    wrong = [one for one in classes if not (isinstance(one, type) and issubclass(one, nn.Module))]
    if wrong or not classes:
        raise UnsupportedCapabilityError(
            f"activation_checkpointing={old!r} is not a class of modules.\n"
            "Write activation_checkpointing=MyBlock, a list of classes, "
            "or activation_checkpointing_policy with a function."
        )
    return frozenset(classes)


def check_mixed_precision(mixed_precision: object) -> None:
    """Check that the value is FSDP1's ``MixedPrecision`` or ``None``.

    Raises:
        UnsupportedCapabilityError: It is neither.
    """
    if not isinstance(mixed_precision, MixedPrecision | None):
        raise UnsupportedCapabilityError(
            f"mixed_precision={mixed_precision!r} is not known to 'fsdp_native'.\n"
            "Write precision='bf16-mixed' instead, or give a torch.distributed.fsdp.MixedPrecision; "
            "FSDP2's MixedPrecisionPolicy belongs to 'fsdp2'."
        )


def check_options(
    options: Mapping[str, Any], *, mixed_precision: object, sync_each_batch: object, offload: bool
) -> None:
    """Refuse options that contradict each other, or that torch does not accept.

    Args:
        options: Those of :data:`FSDP_OPTIONS`, the sharding strategy as an enum.
        mixed_precision: The option of that name.
        sync_each_batch: Whether gradients are reduced on every micro-batch.
        offload: Whether shards live in host memory.

    Raises:
        UnsupportedCapabilityError: An option is refused.
    """
    if options["ignored_modules"] is not None and options["ignored_states"] is not None:
        raise UnsupportedCapabilityError(
            "ignored_modules and ignored_states are an old and a new spelling of one option.\n"
            "Write ignored_states alone; it takes modules as well as parameters."
        )
    if options["process_group"] is not None and options["device_mesh"] is not None:
        raise UnsupportedCapabilityError(
            "process_group and device_mesh both specify the ranks to shard over.\nWrite device_mesh alone."
        )
    check_mixed_precision(mixed_precision)
    if not isinstance(options["device_mesh"], DeviceMesh | tuple | None):
        raise UnsupportedCapabilityError(
            f"device_mesh={options['device_mesh']!r} is not a mesh.\n"
            "Write a DeviceMesh, or its shape: device_mesh=(2, 4) makes 2 replicas that shard over 4 ranks each."
        )
    if not isinstance(sync_each_batch, bool):
        raise UnsupportedCapabilityError(
            f"sync_each_batch={sync_each_batch!r} is neither True nor False.\n"
            "Write False to reduce gradients once per optimizer step, or True to reduce them on every micro-batch."
        )
    if sync_each_batch and offload:
        raise UnsupportedCapabilityError(
            "sync_each_batch=True can't be combined with cpu_offload: FSDP1 would replace the gradients of earlier "
            "micro-batches instead of adding to them.\nLeave out one of the two, or use strategy='fsdp2'."
        )
