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
    "data_parallel_size": ("auto",),
    "tensor_parallel_size": (1,),
    "context_parallel_size": (1,),
    "sequence_parallel": (False,),
}

OTHERS_OPTIONS: Mapping[str, str] = {
    "sharding_strategy": "Parameters are always sharded: leave FULL_SHARD out; for SHARD_GRAD_OP write "
    "reshard_after_forward=False.",
    "mixed_precision": "Write precision='bf16-mixed' to Trainer or Fabric, or give an mp_policy.",
    "use_orig_params": "Leave it out: parameters always keep their names and shapes.",
    "sync_module_states": "Leave it out: rank 0's values always win.",
    "limit_all_gathers": "Leave it out: memory is bounded without it.",
    "forward_prefetch": "Leave it out: fully_shard chooses.",
    "backward_prefetch": "Leave it out: fully_shard chooses.",
    "activation_checkpointing": "Write activation_checkpointing_policy={MyBlock}.",
    # ModelParallelStrategy's and NeMo's
    "data_parallel_size": "Leave it out: all ranks shard.",
    "tensor_parallel_size": "'fsdp2' has no tensor parallelism yet: leave it out, or use ModelParallelStrategy.",
    "context_parallel_size": "'fsdp2' has no context parallelism: leave it out.",
    "parallelize_fn": "Units come from auto_wrap_policy or fsdp_core.wrap(); there is no tensor parallelism yet.",
    "tp_shard_plan": "'fsdp2' has no tensor parallelism yet: leave it out, or use ModelParallelStrategy.",
    "custom_tp_plan": "'fsdp2' has no tensor parallelism yet: leave it out, or use ModelParallelStrategy.",
    "sequence_parallel": "'fsdp2' has no tensor parallelism yet, and so no sequence parallelism: leave it out.",
    "data_sampler": "Give the sampler to your DataLoader, and write Trainer(use_distributed_sampler=False) if it "
    "divides the data between ranks itself.",
    "use_hf_tp_plan": "'fsdp2' has no tensor parallelism yet: leave it out, or use ModelParallelStrategy.",
    "device_mesh": "Leave it out: the mesh spans all ranks.",
    "save_distributed_checkpoint": "Write state_dict_type='sharded', which is the default, or 'full'.",
    "offload_policy": "Write cpu_offload=CPUOffloadPolicy(...), or True.",
    "ckpt_save_optimizer": "Write save_weights_only=True to ModelCheckpoint.",
    "ckpt_load_optimizer": "Load weights alone with load_from_checkpoint().",
    "ckpt_load_strict": "Write self.strict_loading = False in the LightningModule.",
}
