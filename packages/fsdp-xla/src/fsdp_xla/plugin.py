"""What fsdp-xla provides, as plain data; imports neither torch nor Lightning."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from fsdp_core import Capability, StrategyInfo, hookimpl
from fsdp_core.plugins import options_in

__all__ = ["fsdp_strategies", "why_not_here"]

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
    options=options_in("fsdp_xla.classic.options:XLAFSDPOptions", left_out=("cluster_environment", "precision_plugin")),
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
    options=options_in(
        "fsdp_xla.spmd.options:XLASPMDOptions",
        left_out=("cluster_environment", "timeout", "hang_timeout", "scattered_save"),
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
    """The reason why the strategies can't run here, or ``None`` if they can. Detects TPU chips as torch_xla does."""
    device = os.environ.get("PJRT_DEVICE", "").upper()
    if device == "CPU" or (device in ("", "TPU") and _tpu_chips()):
        return None
    setting = f"PJRT_DEVICE is {device!r}" if device else "PJRT_DEVICE is not set"
    return (
        f"no TPU is attached to this machine, and {setting}; to try it on the CPU, set PJRT_DEVICE=CPU "
        "and CPU_NUM_DEVICES=2 (or more) before Python starts"
    )


_GOOGLE_VENDOR_ID = "0x1ae0"


def _tpu_chips() -> int:
    """The number of Google's PCI devices."""
    chips = 0
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        try:
            chips += vendor.read_text().strip() == _GOOGLE_VENDOR_ID
        except OSError:
            continue
    return chips
