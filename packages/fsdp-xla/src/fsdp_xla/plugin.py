"""What fsdp-xla provides, as plain data; imports neither torch nor Lightning."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from fsdp_core import Capability, Option, StrategyInfo, hookimpl

__all__ = ["fsdp_strategies", "why_not_here"]

_SHARED = (
    Option(
        name="async_save",
        default=False,
        help="Write checkpoints in the background: a save returns when this rank's part is copied to host memory.",
    ),
    Option(
        name="auto_wrap_policy",
        default="auto",
        help="What becomes a unit of its own: 'auto' (the blocks repeated in the model's ModuleLists), a set of module "
        "classes, or a callable, torch_xla's policies among them.",
    ),
    Option(
        name="activation_checkpointing_policy",
        default=None,
        help="Which modules recompute their activations in the backward: a set of module classes or a callable.",
    ),
    Option(
        name="state_dict_type",
        default="sharded",
        help="How checkpoints are saved: 'sharded' (a folder, every rank writes its part) or 'full' (one file).",
    ),
    Option(name="accelerator", default=None, help="A Lightning Accelerator; None: Lightning chooses."),
    Option(name="parallel_devices", default=None, help="The devices of this host; None: Lightning chooses."),
    Option(name="checkpoint_io", default=None, help="A Lightning CheckpointIO, which full checkpoints go through."),
    Option(
        name="precision", default=None, help="A Lightning Precision plugin; precision='bf16-mixed' is the usual way."
    ),
)

_RANKS = (
    Option(
        name="sequential_save",
        default=False,
        help="Let ranks of a host save one after another: host memory for a part of one rank's state, not for all.",
    ),
    Option(name="timeout", default=None, help="How long a rank waits for the others, a timedelta; None: half an hour."),
)

#: Handed to XlaFullyShardedDataParallel as they are.
_PASSED_ON = (
    Option(
        name="reshard_after_forward",
        default=True,
        help="Whether units free their parameters between forward and backward.",
    ),
    Option(name="flatten_parameters", default=False, help="Join a unit's parameters to one, for fewer collectives."),
    Option(name="execute_sharding_on_init", default=True, help="Shard at once, and free the full parameters."),
    Option(
        name="optimization_barrier_in_forward",
        default=True,
        help="Keep XLA from fusing a unit's forward with what is around it, which saves memory.",
    ),
    Option(name="optimization_barrier_in_backward", default=True, help="The same for its backward."),
    Option(name="sync_on_finalization", default=False, help="Run the forward and backward apart from the step."),
    Option(
        name="disable_reshard_on_root", default=True, help="Keep the root's parameters between forward and backward."
    ),
    Option(name="compute_dtype", default=None, help="The dtype to compute in; None: what precision= says."),
    Option(name="buffer_dtype", default=None, help="The dtype of floating-point buffers; None: they keep their own."),
    Option(name="fp32_reduce_scatter", default=False, help="Reduce gradients in fp32 where compute_dtype is another."),
    Option(
        name="shard_param_on_dim_0",
        default=False,
        help="Shard along the first dimension, without flattening; no 0-dim parameters then.",
    ),
    Option(
        name="pin_layout_in_collective_ops",
        default=False,
        help="Pin the layout in collectives; gathers by sums over padding then.",
    ),
    Option(name="reduce_scatter_bucket_size_mb", default=0, help="Reduce gradients in buckets of this size; 0: don't."),
    Option(name="coalesce_all_gather_ops", default=False, help="Gather a unit's parameters in one collective."),
)

_CLASSIC = StrategyInfo(
    name="xla_fsdp",
    summary="Fully sharded data parallel with torch_xla's XlaFullyShardedDataParallel, one rank per XLA device.",
    trainer="fsdp_xla.classic.trainer:XLAFSDPStrategy",
    fabric="fsdp_xla.classic.fabric:XLAFSDPStrategy",
    accelerators=("tpu", "cpu"),
    capabilities=frozenset(
        {
            Capability.ACTIVATION_CHECKPOINTING,
            Capability.CLIP_BY_NORM,
            Capability.CLIP_BY_VALUE,
            Capability.FULL_CHECKPOINT,
            Capability.GRADIENT_ACCUMULATION,
            Capability.MANUAL_OPTIMIZATION,
            Capability.META_INIT,
            Capability.MIXED_PRECISION,
            Capability.RESHARD_AFTER_FORWARD,
            Capability.SHARDED_CHECKPOINT,
            Capability.WRAP_POLICY,
        }
    ),
    options=(*_SHARED, *_RANKS, *_PASSED_ON),
    requires=("torch==2.9.*", "torch_xla==2.9.*", "lightning>=2.6.6"),
    probe="fsdp_xla.plugin:why_not_here",
)

_SPMD = replace(
    _CLASSIC,
    name="xla_fsdp_spmd",
    summary="Fully sharded data parallel with torch_xla's SPMD: one process drives all XLA devices of the host.",
    trainer="fsdp_xla.spmd.trainer:XLASPMDStrategy",
    fabric="fsdp_xla.spmd.fabric:XLASPMDStrategy",
    capabilities=_CLASSIC.capabilities - {Capability.RESHARD_AFTER_FORWARD},
    options=(
        *_SHARED,
        Option(
            name="tensor_parallel_size",
            default=1,
            help="How many devices share one part of the batch, and cut weights as tensor_plan says.",
        ),
        Option(
            name="tensor_plan",
            default=None,
            help="By pattern of parameter names, the dimension that those devices cut: {'*.up.weight': 0}.",
        ),
        Option(name="precision_plugin", default=None, help="Under Trainer: a Lightning Precision plugin."),
    ),
)


@hookimpl
def fsdp_strategies() -> list[StrategyInfo]:
    """The three names of this package."""
    return [
        _CLASSIC,
        replace(
            _CLASSIC,
            name="xla_fsdp_full",
            summary="xla_fsdp with checkpoints of one file, gathered on rank 0.",
            presets={"state_dict_type": "full"},
        ),
        _SPMD,
    ]


def why_not_here() -> str | None:
    """Why the strategies can't run on this machine, or ``None`` if they can. Looks for chips as torch_xla does."""
    device = os.environ.get("PJRT_DEVICE", "").upper()
    if device == "CPU" or (device in ("", "TPU") and _tpu_chips()):
        return None
    asked = f"PJRT_DEVICE is {device!r}" if device else "PJRT_DEVICE is not set"
    return (
        f"no TPU is attached to this machine, and {asked}; to try it on the CPU, set PJRT_DEVICE=CPU "
        "and CPU_NUM_DEVICES=2 (or more) before Python starts"
    )


_GOOGLE = "0x1ae0"


def _tpu_chips() -> int:
    """How many PCI devices of Google's there are."""
    found = 0
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        try:
            found += vendor.read_text().strip() == _GOOGLE
        except OSError:
            continue
    return found
