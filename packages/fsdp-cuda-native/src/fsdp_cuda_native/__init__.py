"""``strategy="fsdp_native"`` for Lightning: torch's ``FullyShardedDataParallel`` (FSDP1) on CUDA and CPU.

A script needs no import of this package: the name is enough. To set an option, import the class instead::

    from fsdp_cuda_native import DDPFullyShardedNativeStrategy      # for lightning.pytorch.Trainer
    trainer = Trainer(strategy=DDPFullyShardedNativeStrategy(cpu_offload=True), devices=2)

    from fsdp_cuda_native.fabric import NativeFSDPStrategy          # for lightning.fabric.Fabric
    fabric = Fabric(strategy=NativeFSDPStrategy(sharding_strategy="SHARD_GRAD_OP"), devices=2)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_cuda_native import fabric
    from fsdp_cuda_native.fairscale import DDPFullyShardedStrategy
    from fsdp_cuda_native.trainer import DDPFullyShardedNativeStrategy

    __version__: str

__all__ = ["DDPFullyShardedNativeStrategy", "DDPFullyShardedStrategy", "__version__", "fabric"]


def __getattr__(name: str) -> object:
    value: object
    match name:
        case "DDPFullyShardedNativeStrategy":
            value = import_module(f"{__name__}.trainer").DDPFullyShardedNativeStrategy
        case "DDPFullyShardedStrategy":
            value = import_module(f"{__name__}.fairscale").DDPFullyShardedStrategy
        case "fabric":
            value = import_module(f"{__name__}.fabric")
        case "__version__":
            value = import_module("importlib.metadata").version("fsdp-cuda-native")
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
