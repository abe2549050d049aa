"""What to write instead of the options of Lightning's FSDPStrategy and ModelParallelStrategy, and of NeMo's."""

from __future__ import annotations

from collections.abc import Collection, Mapping

__all__ = ["ACCEPTED_VALUES", "MIGRATION_HINTS"]

#: By option of another library, the values that are accepted and ignored, because they describe what happens here.
ACCEPTED_VALUES: Mapping[str, Collection[object]] = {
    "sharding_strategy": ("FULL_SHARD",),
    "use_orig_params": (True,),
    "sync_module_states": (True,),
    "limit_all_gathers": (True,),
    "sequence_parallel": (False,),
    # what NeMo's strategy has by default
    "offload_policy": (None,),
    **dict.fromkeys(("custom_tp_plan", "tp_shard_plan"), (None,)),
    "use_hf_tp_plan": (True, False),
    **dict.fromkeys(("ckpt_save_optimizer", "ckpt_load_optimizer"), (True,)),
    "ckpt_load_strict": (None,),
}

#: By option of another library, what to write instead.
MIGRATION_HINTS: Mapping[str, str] = {
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
    **dict.fromkeys(("tp_size", "tensor_model_parallel_size"), "Write tensor_parallel_size=2."),
    **dict.fromkeys(("cp_size", "context_parallel_degree"), "Write context_parallel_size=2."),
    **dict.fromkeys(("dp_size", "dp_shard_size"), "Write data_parallel_size=2, or leave it out."),
    **dict.fromkeys(("dp_replicate_size", "hsdp", "num_replicas"), "Write data_parallel_replicate_size=2."),
    **dict.fromkeys(
        ("pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size"),
        "Pipeline parallelism is not supported: leave it out, and use tensor_parallel_size or "
        "data_parallel_replicate_size.",
    ),
    **dict.fromkeys(
        ("expert_model_parallel_size", "ep_size"),
        "Write expert_parallel_size=2, a divisor of the data-parallel ranks: it adds none.",
    ),
    # DistributedDataParallel's and FSDP's
    "find_unused_parameters": "Leave it out: parameters without gradients are found anyway.",
    "static_graph": "Leave it out: the graph may change from step to step.",
    "gradient_as_bucket_view": "Leave it out: gradients are sharded.",
    **dict.fromkeys(
        ("ignored_modules", "ignored_parameters", "ignored_states", "ignored_params"),
        "Leave it out: frozen modules can be sharded too. strategy='fsdp_native' takes ignored_modules and "
        "ignored_states, which stay whole on every rank.",
    ),
    "device_mesh": "Write the sizes of its axes: data_parallel_replicate_size, data_parallel_size, "
    "context_parallel_size, tensor_parallel_size.",
    # DeepSpeed's and accelerate's
    **dict.fromkeys(
        ("stage", "zero_stage"),
        "Leave it out: parameters, gradients and optimizer state are sharded, as in ZeRO 3; "
        "reshard_after_forward=False keeps parameters gathered until the backward pass.",
    ),
    **dict.fromkeys(
        (
            "offload_optimizer",
            "offload_parameters",
            "offload_optimizer_device",
            "offload_params_device",
            "offload_params",
        ),
        "Write cpu_offload=True, for parameters, gradients and optimizer state together.",
    ),
    **dict.fromkeys(
        ("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "min_num_params"),
        "Write auto_wrap_policy={Block}, with the class of the model's layers.",
    ),
    "cpu_ram_efficient_loading": "Leave it out: no rank holds all of a model that is built in configure_model().",
    "fsdp_version": "Leave it out: this is FSDP2; FSDP1 is strategy='fsdp_native'.",
    "config": "There is no configuration file: write the options themselves.",
    "device_id": "Leave it out: accelerator= and devices= of the Trainer or Fabric choose the devices.",
    "param_init_fn": "Leave it out: reset_parameters() of the modules, or their constructor, initialises each shard.",
    **dict.fromkeys(
        ("mesh", "parallelism_config"),
        "Write the sizes of its axes: data_parallel_replicate_size, data_parallel_size, context_parallel_size, "
        "tensor_parallel_size.",
    ),
    "save_distributed_checkpoint": "Write state_dict_type='sharded', which is the default, or 'full'.",
    "offload_policy": "Write cpu_offload=CPUOffloadPolicy(...), or True.",
    "ckpt_save_optimizer": "Write save_weights_only=True to ModelCheckpoint.",
    "ckpt_load_optimizer": "Load weights alone with load_from_checkpoint().",
    "ckpt_load_strict": "Write self.strict_loading = False in the LightningModule.",
}
