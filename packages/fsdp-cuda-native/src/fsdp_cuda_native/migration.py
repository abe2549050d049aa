"""What to write instead of other libraries' options."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fsdp_core.plugins import refuse_unknown_options
from fsdp_cuda_native.options import DECIDED

__all__ = ["OTHER_OPTIONS", "refuse_others_options"]

#: What others' options may say, for it is what happens here.
ALWAYS: Mapping[str, Collection[object]] = {
    "sync_module_states": (True,),
    "flatten_parameters": (True,),
    "data_parallel_size": ("auto",),
    "tensor_parallel_size": (1,),
}

#: Options of fsdp2's, Lightning's and fairscale's strategies.
OTHER_OPTIONS: dict[str, str] = {
    **DECIDED,
    "reshard_after_forward": "Write sharding_strategy='FULL_SHARD' for True, 'SHARD_GRAD_OP' for False.",
    "mp_policy": "Write precision='bf16-mixed' to Trainer or Fabric, or give a mixed_precision.",
    "precision_plugin": "Under Fabric it is called precision.",
    "precision": "Write precision= to the Trainer; a plugin is called precision_plugin here.",
    "data_parallel_size": "Leave it out: all ranks shard; tensor parallelism is not part of 'fsdp_native'.",
    "tensor_parallel_size": "'fsdp_native' has no tensor parallelism.",
    "save_distributed_checkpoint": "Write state_dict_type='sharded', or 'full'.",
    "flatten_parameters": "Leave it out: parameters are always flattened. It belongs to 'ddp_fully_sharded'.",
}


def refuse_others_options(strategy: str, made: type, unknown: Mapping[str, object]) -> None:
    """Refuse options that neither the strategy nor FSDP1 has.

    Args:
        strategy: The name that users type.
        made: The strategy's class.
        unknown: What its constructor was given besides its own options.

    Raises:
        UnsupportedCapabilityError: There is any; the message says what to write in its place.
    """
    refuse_unknown_options(strategy, made, unknown, OTHER_OPTIONS, always=ALWAYS)
