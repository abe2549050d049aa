"""What to write in the place of FSDP1's options, as Lightning's ``FSDPStrategy`` takes them."""

from __future__ import annotations

__all__ = ["FSDP1_OPTIONS"]

FSDP1_OPTIONS: dict[str, str] = {
    "sharding_strategy": "Parameters are always sharded: leave FULL_SHARD out; for SHARD_GRAD_OP write "
    "reshard_after_forward=False.",
    "mixed_precision": "Write precision='bf16-mixed' to Trainer or Fabric, or give an mp_policy.",
    "use_orig_params": "Leave it out: parameters always keep their names and shapes.",
    "sync_module_states": "Leave it out: rank 0's values always win.",
    "limit_all_gathers": "Leave it out: memory is bounded without it.",
    "forward_prefetch": "Leave it out: fully_shard chooses.",
    "backward_prefetch": "Leave it out: fully_shard chooses.",
    "activation_checkpointing": "Write activation_checkpointing_policy={MyBlock}.",
}
