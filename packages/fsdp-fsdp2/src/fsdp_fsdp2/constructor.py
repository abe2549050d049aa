"""What both strategies of ``"fsdp2"`` share: their options, and what they do with loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, overload

from fsdp_core.lightning import LightningOptions, ShardedStrategy, takes
from fsdp_core.sharding import ShardingOptions
from fsdp_fsdp2.backend import FSDP2Backend
from fsdp_fsdp2.data_sampler import apply_data_sampler
from fsdp_fsdp2.meshes import sizes_by_position
from fsdp_fsdp2.migration import ACCEPTED_VALUES, MIGRATION_HINTS
from fsdp_fsdp2.options import FSDP2Options

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FSDP2Ranks"]


@dataclass(frozen=True, kw_only=True)
class _Options(FSDP2Options, LightningOptions): ...


class FSDP2Ranks(ShardedStrategy):
    """A base of both strategies named ``"fsdp2"``: what is the same under Trainer and Fabric."""

    strategy_name = "fsdp2"
    options_class: ClassVar[type[ShardingOptions]] = _Options
    backend_class = FSDP2Backend
    migration_hints: ClassVar = MIGRATION_HINTS
    accepted_noops: ClassVar = ACCEPTED_VALUES

    options: FSDP2Options
    backend: FSDP2Backend

    @overload
    @takes(_Options)
    def __init__(self, **options: Any) -> None: ...
    @overload
    def __init__(self, first: object, /, *positional: Any, **options: Any) -> None: ...
    def __init__(self, *positional: Any, **options: Any) -> None:
        super().__init__(*positional, **options)

    def _arguments_by_name(self, positional: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(keywords)
        if positional and isinstance(positional[0], int | str):  # sizes, as in Lightning's ModelParallelStrategy
            sizes = {name: keywords.get(name, "auto") for name in ("data_parallel_size", "tensor_parallel_size")}
            values.update(zip(sizes, sizes_by_position(positional, sizes), strict=True))
            positional = ()
        is_tensor_parallel = values.get("tensor_parallel_size", "auto") not in (1, "auto")
        if values.get("use_hf_tp_plan") and values.get("tp_plan") is None and is_tensor_parallel:
            values["tp_plan"] = "auto"
        return super()._arguments_by_name(positional, values)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks as torch's mesh. Its axes are named like the options of sizes; those of one rank are there too."""
        return self.backend.device_mesh

    def process_dataloader(self, dataloader: Any) -> Any:
        """Apply ``data_sampler`` to a loader, before the front end prepares it."""
        adapter: Any = super()
        return adapter.process_dataloader(apply_data_sampler(self.options.data_sampler, dataloader))
