"""What the name ``loopback`` stands for, as plain data; imports neither torch nor Lightning."""

from __future__ import annotations

from fsdp_core import Capability, Option, StrategyInfo, hookimpl

__all__ = ["LOOPBACK", "fsdp_strategies"]

LOOPBACK = StrategyInfo(
    name="loopback",
    summary="Parameters sharded by hand over gloo, for tests and as an example.",
    trainer="fsdp_core.testing.loopback.trainer:LoopbackTrainerStrategy",
    fabric="fsdp_core.testing.loopback.fabric:LoopbackFabricStrategy",
    accelerators=("cpu",),
    capabilities=frozenset(
        {
            Capability.CLIP_BY_NORM,
            Capability.CLIP_BY_VALUE,
            Capability.FULL_CHECKPOINT,
            Capability.GRADIENT_ACCUMULATION,
            Capability.MANUAL_OPTIMIZATION,
            Capability.META_INIT,
            Capability.SHARDED_CHECKPOINT,
        }
    ),
    options=(
        Option(name="state_dict_type", default="sharded", help="'sharded' (a folder) or 'full' (one file)."),
        Option(name="timeout", default=None, help="How long a collective waits for its peers, a timedelta."),
        Option(name="async_save", default=False, help="Write checkpoints in the background."),
        Option(name="accelerator", default=None, help="A Lightning Accelerator; None: Lightning chooses."),
        Option(name="parallel_devices", default=None, help="The devices of this host; None: Lightning chooses."),
        Option(name="cluster_environment", default=None, help="A Lightning ClusterEnvironment."),
        Option(name="checkpoint_io", default=None, help="A Lightning CheckpointIO, for full checkpoints."),
        Option(name="precision_plugin", default=None, help="Under Trainer: a Lightning Precision plugin."),
        Option(name="precision", default=None, help="Under Fabric: a Lightning Precision plugin."),
    ),
    requires=("torch>=2.9", "lightning>=2.6.6"),
)


@hookimpl
def fsdp_strategies() -> list[StrategyInfo]:
    """The one name."""
    return [LOOPBACK]
