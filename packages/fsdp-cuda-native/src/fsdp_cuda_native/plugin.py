"""What fsdp-cuda-native provides, as plain data; imports neither torch nor Lightning."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from fsdp_core import Capability, Option, StrategyInfo, hookimpl

__all__ = ["fsdp_strategies", "why_not_here"]

_SHARED = (
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

_NATIVE = (
    Option(name="cpu_offload", default=False, help="Keep shards in host memory: a bool, or torch's CPUOffload."),
    Option(
        name="backward_prefetch",
        default="BACKWARD_PRE",
        help="When the next unit is gathered in the backward: 'BACKWARD_PRE', 'BACKWARD_POST', or None: when needed.",
    ),
    Option(
        name="mixed_precision",
        default=None,
        help="A torch MixedPrecision, which wins over the precision string; None: what precision= says.",
    ),
    Option(
        name="activation_checkpointing",
        default=None,
        help="A module class or a list of them; the older spelling of activation_checkpointing_policy.",
    ),
    Option(
        name="sharding_strategy",
        default="FULL_SHARD",
        help="'FULL_SHARD', 'SHARD_GRAD_OP', 'HYBRID_SHARD', 'HYBRID_SHARD_ZERO2' or 'NO_SHARD', or torch's enum.",
    ),
    Option(
        name="use_orig_params",
        default=True,
        help="Let optimizers hold the parameters; False: one flat parameter for each unit.",
    ),
    Option(name="ignored_modules", default=None, help="Modules to keep whole on every rank, gradients averaged."),
    Option(name="ignored_states", default=None, help="Modules or parameters to keep whole on every rank."),
    Option(
        name="device_mesh",
        default=None,
        help="A DeviceMesh or its shape; for hybrid sharding (replicas, ranks of each).",
    ),
    Option(
        name="process_group",
        default=None,
        help="The ranks to shard over; for hybrid sharding a pair, with those to replicate over.",
    ),
    Option(name="param_init_fn", default=None, help="Fills a module built on the meta device."),
    Option(name="forward_prefetch", default=False, help="Gather the next unit before it is needed in the forward."),
    Option(name="limit_all_gathers", default=True, help="Bound memory by gathering at most two units ahead."),
)

_FAIRSCALE = (
    Option(
        name="sharding_strategy",
        default=None,
        help="As fsdp_native's; None: 'FULL_SHARD', or what reshard_after_forward says.",
    ),
    Option(name="flatten_parameters", default=True, help="True only: parameters are always flattened."),
    Option(
        name="reshard_after_forward",
        default=True,
        help="Whether units free their parameters between forward and backward; fairscale's sharding_strategy.",
    ),
    Option(name="move_grads_to_cpu", default=None, help="None only: gradients follow cpu_offload."),
    Option(
        name="fp32_reduce_scatter", default=None, help="Reduce in fp32, and not in compute_dtype, if that is given."
    ),
    Option(name="compute_dtype", default=None, help="The dtype to compute in; None: what precision= says."),
    Option(name="bucket_cap_mb", default=25, help="25 only: there are no buckets."),
    Option(
        name="min_num_params",
        default=None,
        help="The size from which a submodule is a unit of its own; None: the repeated blocks are.",
    ),
    Option(name="state_dict_to_cpu", default=True, help="True only."),
)

_FSDP1 = StrategyInfo(
    name="fsdp_native",
    summary="Fully sharded data parallel with torch's FullyShardedDataParallel (FSDP1).",
    trainer="fsdp_cuda_native.trainer:DDPFullyShardedNativeStrategy",
    fabric="fsdp_cuda_native.fabric:NativeFSDPStrategy",
    accelerators=("cuda", "cpu"),
    capabilities=frozenset(Capability),
    options=_NATIVE + _SHARED,
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
            options=_FAIRSCALE + tuple(one for one in _FSDP1.options if one.name != "sharding_strategy"),
        ),
    ]


def why_not_here() -> str | None:
    """Why fsdp_native can't run on this machine, or ``None`` if it can."""
    platform: str = sys.platform
    if platform not in ("linux", "darwin", "win32"):
        return f"torch has no gloo on the platform {platform!r}, and fsdp_native needs it; use Linux, macOS or Windows"
    torch = find_spec("torch")
    places = list(torch.submodule_search_locations or ()) if torch is not None else []
    if not any((Path(place) / _FSDP1_FILE).exists() for place in places):
        return (
            "this torch no longer ships FullyShardedDataParallel (FSDP1); use strategy 'fsdp2', pip install fsdp-fsdp2"
        )
    return None


_FSDP1_FILE = "distributed/fsdp/fully_sharded_data_parallel.py"
