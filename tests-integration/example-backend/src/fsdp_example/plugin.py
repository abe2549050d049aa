"""What fsdp-example provides, as plain data; imports neither torch nor Lightning."""

from __future__ import annotations

from fsdp_core import Capability, Option, StrategyInfo, hookimpl

__all__ = ["fsdp_strategies"]

_OPTIONS = {
    "activation_checkpointing_policy": (None, "Which modules recompute their activations: classes or a function."),
    "sync_each_batch": (False, "Reduce gradients on every micro-batch of an accumulation."),
    "state_dict_type": ("sharded", "How checkpoints are saved: 'sharded' (a folder) or 'full' (one file)."),
    "timeout": (None, "How long a collective waits for its peers, a timedelta."),
    "async_save": (False, "Write checkpoints in the background."),
    "accelerator": (None, "A Lightning Accelerator; None: Lightning chooses."),
    "parallel_devices": (None, "The devices of this host; None: Lightning chooses."),
    "cluster_environment": (None, "A Lightning ClusterEnvironment; None: Lightning chooses."),
    "checkpoint_io": (None, "A Lightning CheckpointIO, which full checkpoints go through."),
    "precision_plugin": (None, "Under Trainer: a Lightning Precision plugin."),
    "precision": (None, "Under Fabric: a Lightning Precision plugin."),
}


@hookimpl
def fsdp_strategies() -> list[StrategyInfo]:
    """The one name of this package."""
    return [
        StrategyInfo(
            name="zero1",
            summary="Whole parameters on every rank, optimizer state sharded (ZeRO-1), on the CPU.",
            trainer="fsdp_example.trainer:ZeRO1Strategy",
            fabric="fsdp_example.fabric:ZeRO1Strategy",
            accelerators=("cpu",),
            capabilities=frozenset(
                {
                    Capability.ACTIVATION_CHECKPOINTING,
                    Capability.CLIP_BY_NORM,
                    Capability.CLIP_BY_VALUE,
                    Capability.FULL_CHECKPOINT,
                    Capability.GRADIENT_ACCUMULATION,
                    Capability.MANUAL_OPTIMIZATION,
                    Capability.META_INIT,
                    Capability.SHARDED_CHECKPOINT,
                }
            ),
            options=tuple(Option(name=name, default=default, help=told) for name, (default, told) in _OPTIONS.items()),
            requires=("torch>=2.9", "lightning>=2.6.6"),
        )
    ]
