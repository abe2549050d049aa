"""What both strategies of ``"xla_fsdp"`` share: the name, the options and the ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, overload

from lightning.fabric.plugins import ClusterEnvironment

from fsdp_core.lightning import LightningOptions, ShardedStrategy, takes
from fsdp_core.sharding import ShardingOptions
from fsdp_xla.classic.backend import XLABackend
from fsdp_xla.classic.options import XLAFSDPOptions
from fsdp_xla.classic.runtime import XLARuntime
from fsdp_xla.lightning.cluster_environment import XLADeviceRanks, XLARanks
from fsdp_xla.options import ACCEPTED_NOOPS, MIGRATION_HINTS

__all__ = ["XLAFSDPRanks"]


@dataclass(frozen=True, kw_only=True)
class _Options(XLAFSDPOptions, LightningOptions): ...


class XLAFSDPRanks(XLADeviceRanks, ShardedStrategy):
    """The half of ``"xla_fsdp"`` that is the same under Trainer and Fabric."""

    strategy_name = "xla_fsdp"
    options_class: ClassVar[type[ShardingOptions]] = _Options
    backend_class = XLABackend
    #: The positional arguments of Fabric's ``XLAFSDPStrategy``, in its order.
    positional: ClassVar[Sequence[str]] = (
        *("accelerator", "parallel_devices", "checkpoint_io", "precision", "auto_wrap_policy"),
        *("activation_checkpointing_policy", "state_dict_type", "sequential_save"),
    )
    left_out: ClassVar[Collection[str]] = ("cluster_environment", "precision_plugin")
    migration_hints: ClassVar = MIGRATION_HINTS
    accepted_noops: ClassVar = ACCEPTED_NOOPS

    options: XLAFSDPOptions
    backend: XLABackend
    runtime: XLARuntime

    @overload
    @takes(_Options)
    def __init__(self, **options: Any) -> None: ...
    @overload
    def __init__(self, first: object, /, *positional: Any, **options: Any) -> None: ...
    def __init__(self, *positional: Any, **options: Any) -> None:
        super().__init__(*positional, **options)
        self.sequential_save = self.options.sequential_save  # core's strategy asks for it

    def new_cluster_environment(self) -> ClusterEnvironment:
        return XLARanks()

    def new_runtime(self) -> XLARuntime:
        return XLARuntime()
