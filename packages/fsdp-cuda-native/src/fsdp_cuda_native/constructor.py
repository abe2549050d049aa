"""What both strategies of ``"fsdp_native"`` share: the name and the options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, overload

from fsdp_core.lightning import LightningOptions, ShardedStrategy, takes
from fsdp_core.sharding import ShardingOptions
from fsdp_cuda_native.backend import NativeBackend
from fsdp_cuda_native.options import ACCEPTED_VALUES, OTHER_OPTIONS, NativeOptions

__all__ = ["FURTHER_BY_POSITION", "NativeStrategy"]

#: The options that may be given by position, after those of the front end, as in Lightning 1.x.
FURTHER_BY_POSITION = (
    *("process_group_backend", "cpu_offload", "backward_prefetch", "mixed_precision", "activation_checkpointing"),
)


@dataclass(frozen=True, kw_only=True)
class _Options(NativeOptions, LightningOptions): ...


class NativeStrategy(ShardedStrategy):
    """The half of ``"fsdp_native"`` that is the same under Trainer and Fabric."""

    strategy_name = "fsdp_native"
    options_class: ClassVar[type[ShardingOptions]] = _Options
    backend_class = NativeBackend
    migration_hints: ClassVar = OTHER_OPTIONS
    accepted_noops: ClassVar = ACCEPTED_VALUES

    options: NativeOptions
    backend: NativeBackend

    @overload
    @takes(_Options)
    def __init__(self, **options: Any) -> None: ...
    @overload
    def __init__(self, first: object, /, *positional: Any, **options: Any) -> None: ...
    def __init__(self, *positional: Any, **options: Any) -> None:
        super().__init__(*positional, **options)
