"""What to write instead of the options of Lightning's FSDPStrategy and ModelParallelStrategy, and of NeMo's."""

from __future__ import annotations

from collections.abc import Collection, Mapping

__all__ = ["ALWAYS", "OTHERS_OPTIONS"]

#: Values of other libraries' options that are accepted, because they describe what happens here.
ALWAYS: Mapping[str, Collection[object]] = {
    "sharding_strategy": ("FULL_SHARD",),
    "use_orig_params": (True,),
    "sync_module_states": (True,),
    "limit_all_gathers": (True,),
    "sequence_parallel": (False,),
}

OTHERS_OPTIONS: Mapping[str, str] = {
    "sharding_strategy": "Parameters are always sharded: leave FULL_SHARD out; for SHARD_GRAD_OP write "
    "reshard_after_forward=False, and for HYBRID_SHARD data_parallel_replicate_size=2.",
    "mixed_precision": "Write precision='bf16-mixed' to Trainer or Fabric, or give an mp_policy.",
    "use_orig_params": "Leave it out: parameters always keep their names and shapes.",
    "sync_module_states": "Leave it out: rank 0's values always win.",
    "limit_all_gathers": "Leave it out: memory is bounded without it.",
    "forward_prefetch": "Write forward_prefetch_depth=1, or leave it out: torch chooses.",
    "backward_prefetch": "Write backward_prefetch_depth=1, or leave it out: torch chooses.",
    "activation_checkpointing": "Write activation_checkpointing_policy={MyBlock}.",
    # ModelParallelStrategy's and NeMo's
    "tp_shard_plan": "Write tp_plan={pattern: style}, or tp_plan='auto' for the model's own.",
    "custom_tp_plan": "Write tp_plan={pattern: style}, or tp_plan='auto' for the model's own.",
    "sequence_parallel": "Give the norms SequenceParallel() in tp_plan, and their neighbours layouts that divide the "
    "sequence.",
    "use_hf_tp_plan": "Write tp_plan={pattern: style}, or tp_plan='auto' for the model's own.",
    "device_mesh": "Write the sizes of its axes: data_parallel_replicate_size, data_parallel_size, "
    "context_parallel_size, tensor_parallel_size.",
    "save_distributed_checkpoint": "Write state_dict_type='sharded', which is the default, or 'full'.",
    "offload_policy": "Write cpu_offload=CPUOffloadPolicy(...), or True.",
    "ckpt_save_optimizer": "Write save_weights_only=True to ModelCheckpoint.",
    "ckpt_load_optimizer": "Load weights alone with load_from_checkpoint().",
    "ckpt_load_strict": "Write self.strict_loading = False in the LightningModule.",
}
