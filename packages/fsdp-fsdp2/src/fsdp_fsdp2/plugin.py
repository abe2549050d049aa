"""What fsdp-fsdp2 provides, as plain data; imports neither torch nor Lightning."""

from __future__ import annotations

import sys
from dataclasses import replace

from fsdp_core import Capability, Option, StrategyInfo, hookimpl

__all__ = ["fsdp_strategies", "why_not_here"]

_OPTIONS = (
    Option(
        name="auto_wrap_policy",
        default="auto",
        help="What becomes a unit of its own: 'auto' (the blocks repeated in the model's ModuleLists), a set of module "
        "classes, or a callable that tells by module.",
    ),
    Option(
        name="activation_checkpointing_policy",
        default=None,
        help="Which modules recompute their activations in the backward: a set of module classes or a callable.",
    ),
    Option(
        name="reshard_after_forward",
        default=None,
        help="Whether a unit frees its full parameters between forward and backward; None: all but the root and the "
        "last unit do.",
    ),
    Option(name="cpu_offload", default=False, help="Keep shards, gradients and optimizer state in host memory."),
    Option(
        name="mp_policy",
        default=None,
        help="A torch MixedPrecisionPolicy, which wins over the precision string; None: what precision= says.",
    ),
    Option(
        name="sync_each_batch",
        default=False,
        help="Reduce gradients on every micro-batch of an accumulation: slower, but no unsharded gradients are kept.",
    ),
    Option(
        name="state_dict_type",
        default="sharded",
        help="How checkpoints are saved: 'sharded' (a folder, every rank writes its part) or 'full' (one file).",
    ),
    Option(
        name="process_group_backend",
        default=None,
        help="As in torch.distributed.init_process_group; None: NCCL with gloo on CUDA, gloo on the CPU.",
    ),
    Option(name="timeout", default=None, help="How long a collective waits for its peers, a timedelta."),
    Option(
        name="async_save",
        default=False,
        help="Write checkpoints in the background: a save returns when this rank's part is copied to host memory.",
    ),
    Option(name="accelerator", default=None, help="A Lightning Accelerator; None: Lightning chooses."),
    Option(name="parallel_devices", default=None, help="The devices of this host; None: Lightning chooses."),
    Option(name="cluster_environment", default=None, help="A Lightning ClusterEnvironment; None: Lightning chooses."),
    Option(name="checkpoint_io", default=None, help="A Lightning CheckpointIO, which full checkpoints go through."),
    Option(name="precision_plugin", default=None, help="Under Trainer: a Lightning Precision plugin."),
    Option(name="precision", default=None, help="Under Fabric: a Lightning Precision plugin."),
)

_FSDP2 = StrategyInfo(
    name="fsdp2",
    summary="Fully sharded data parallel with torch's fully_shard (FSDP2).",
    trainer="fsdp_fsdp2.trainer:FSDP2Strategy",
    fabric="fsdp_fsdp2.fabric:FSDP2Strategy",
    accelerators=("cuda", "cpu"),
    capabilities=frozenset(Capability),
    options=_OPTIONS,
    requires=("torch>=2.9", "lightning>=2.6.6"),
    probe="fsdp_fsdp2.plugin:why_not_here",
)


@hookimpl
def fsdp_strategies() -> list[StrategyInfo]:
    """The two names of this package."""
    return [
        _FSDP2,
        replace(
            _FSDP2,
            name="fsdp2_cpu_offload",
            summary="fsdp2 with shards, gradients and optimizer state in host memory.",
            presets={"cpu_offload": True},
        ),
    ]


def why_not_here() -> str | None:
    """Why fsdp2 can't run on this machine, or ``None`` if it can: torch needs gloo for the CPU side of its groups."""
    platform: str = sys.platform
    if platform in ("linux", "darwin", "win32"):
        return None
    return f"torch has no gloo on the platform {platform!r}, and fsdp2 needs it; use Linux, macOS or Windows"
