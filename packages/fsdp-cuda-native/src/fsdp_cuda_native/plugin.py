"""What fsdp-cuda-native provides, as plain data; imports neither torch nor Lightning."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from fsdp_core import Capability, StrategyInfo, hookimpl
from fsdp_core.plugins import options_in

__all__ = ["fsdp_strategies", "why_not_here"]

#: Where FullyShardedDataParallel is, within torch.
_FSDP1_FILE = "distributed/fsdp/fully_sharded_data_parallel.py"

_FSDP1 = StrategyInfo(
    name="fsdp_native",
    summary="Fully sharded data parallel with torch's FullyShardedDataParallel (FSDP1).",
    trainer="fsdp_cuda_native.trainer:DDPFullyShardedNativeStrategy",
    fabric="fsdp_cuda_native.fabric:NativeFSDPStrategy",
    accelerators=("any", "cpu"),
    capabilities=frozenset(Capability),
    options=options_in("fsdp_cuda_native.options:NativeOptions"),
    requires=("torch>=2.9", "lightning>=2.6.6"),
    probe="fsdp_cuda_native.plugin:why_not_here",
)


@hookimpl
def fsdp_strategies() -> list[StrategyInfo]:
    """The three names of this package."""
    return [
        _FSDP1,
        replace(
            _FSDP1,
            name="fsdp_native_full_shard_offload",
            summary="fsdp_native with shards, gradients and optimizer state in host memory.",
            presets={"cpu_offload": True},
        ),
        replace(
            _FSDP1,
            name="ddp_fully_sharded",
            summary="fsdp_native under the name and with the options that fairscale's users know.",
            trainer="fsdp_cuda_native.fairscale:DDPFullyShardedStrategy",
            fabric="fsdp_cuda_native.fairscale:FabricFullyShardedStrategy",
            options=options_in("fsdp_cuda_native.fairscale:FairscaleOptions", "fsdp_cuda_native.options:NativeOptions"),
        ),
    ]


def why_not_here() -> str | None:
    """The reason why fsdp_native can't run on this machine, or ``None`` if it can."""
    platform: str = sys.platform
    if platform not in ("linux", "darwin", "win32"):
        return f"torch has no gloo on the platform {platform!r}, and fsdp_native needs it; use Linux, macOS or Windows"
    torch_spec = find_spec("torch")  # does not import torch
    directories = list(torch_spec.submodule_search_locations or ()) if torch_spec is not None else []
    if not any((Path(directory) / _FSDP1_FILE).exists() for directory in directories):
        return (
            "this torch no longer ships FullyShardedDataParallel (FSDP1); use strategy 'fsdp2', pip install fsdp-fsdp2"
        )
    return None
