"""What a strategy may declare that it can do, and what users write to ask for it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

__all__ = ["Capability"]


class Capability(StrEnum):
    """What a strategy can do. Declared capabilities are tested to work, undeclared ones are tested to raise.

    ``MANUAL_OPTIMIZATION`` applies to the Trainer only. It is ``automatic_optimization=False``: backward passes and
    steps inside the training step, and so inside the root's forward pass. Under Fabric every loop is the user's own,
    with backward passes and steps after the forward pass; there is nothing to declare, and nothing is refused.

    Example:
        >>> Capability("cpu_offload").text, Capability.CPU_OFFLOAD.asked_by, Capability.CLIP_BY_NORM.option
        ('Shards and optimizer state stay in host memory.', 'cpu_offload=…', None)
    """

    ACTIVATION_CHECKPOINTING = "activation_checkpointing"
    CLIP_BY_NORM = "clip_by_norm"
    CLIP_BY_VALUE = "clip_by_value"
    CPU_OFFLOAD = "cpu_offload"
    FULL_CHECKPOINT = "full_checkpoint"
    GRADIENT_ACCUMULATION = "gradient_accumulation"
    GRADIENT_SCALING = "gradient_scaling"
    MANUAL_OPTIMIZATION = "manual_optimization"
    META_INIT = "meta_init"
    MIXED_PRECISION = "mixed_precision"
    RESHARD_AFTER_FORWARD = "reshard_after_forward"
    SHARDED_CHECKPOINT = "sharded_checkpoint"
    WRAP_POLICY = "wrap_policy"

    @property
    def text(self) -> str:
        """What it is, in one sentence."""
        return _MEANINGS[self].text

    @property
    def option(self) -> str | None:
        """The strategy's option that requests it, or ``None`` if something else does."""
        return _MEANINGS[self].option

    @property
    def asked_by(self) -> str:
        """What users write to request it."""
        return _MEANINGS[self].asked_by


class _Meaning(NamedTuple):
    text: str
    asked_by: str
    option: str | None = None


_MEANINGS = {
    Capability.ACTIVATION_CHECKPOINTING: _Meaning(
        "Blocks recompute their activations in the backward pass.",
        "activation_checkpointing_policy=…",
        "activation_checkpointing_policy",
    ),
    Capability.CLIP_BY_NORM: _Meaning(
        "Gradients are clipped by their norm over all ranks.",
        "Trainer(gradient_clip_val=…), fabric.clip_gradients(max_norm=…)",
    ),
    Capability.CLIP_BY_VALUE: _Meaning(
        "Gradients are clipped one by one.",
        "Trainer(gradient_clip_val=…, gradient_clip_algorithm='value'), fabric.clip_gradients(clip_val=…)",
    ),
    Capability.CPU_OFFLOAD: _Meaning("Shards and optimizer state stay in host memory.", "cpu_offload=…", "cpu_offload"),
    Capability.FULL_CHECKPOINT: _Meaning(
        "Checkpoints are one file with whole tensors, as without sharding.", "state_dict_type='full'", "state_dict_type"
    ),
    Capability.GRADIENT_ACCUMULATION: _Meaning(
        "A step takes several micro-batches.", "Trainer(accumulate_grad_batches=…), fabric.no_backward_sync(…)"
    ),
    Capability.GRADIENT_SCALING: _Meaning(
        "Losses are scaled for fp16, and steps with overflow are skipped on all ranks.", "precision='16-mixed'"
    ),
    Capability.MANUAL_OPTIMIZATION: _Meaning(
        "The training step runs backward passes and steps by itself.", "self.automatic_optimization = False"
    ),
    Capability.META_INIT: _Meaning(
        "A module built on the meta device is materialised when it is sharded.",
        "configure_model() under the Trainer, fabric.init_module(empty_init=True)",
    ),
    Capability.MIXED_PRECISION: _Meaning(
        "Weights are stored in one dtype and computed with in another.", "precision='bf16-mixed', '16-mixed'"
    ),
    Capability.RESHARD_AFTER_FORWARD: _Meaning(
        "Whether units are freed between the forward and the backward pass can be chosen.",
        "reshard_after_forward=…",
        "reshard_after_forward",
    ),
    Capability.SHARDED_CHECKPOINT: _Meaning(
        "Checkpoints are folders; each rank writes its part.", "state_dict_type='sharded'", "state_dict_type"
    ),
    Capability.WRAP_POLICY: _Meaning(
        "The user chooses which modules are FSDP units.", "auto_wrap_policy=…", "auto_wrap_policy"
    ),
}
