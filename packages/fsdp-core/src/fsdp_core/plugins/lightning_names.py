"""Lightning's own strategy names, known without importing Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fsdp_core.plugins.strategy_info import FrontEnd

__all__ = ["LIGHTNINGS_OWN", "TAKEN_OVER", "kept_by_lightning"]

_OFFLOADED = ("_stage_2_offload", "_stage_3_offload", "_stage_3_offload_nvme")
_BOTH = (
    *("auto", "fsdp", "fsdp_cpu_offload", "single_tpu", "single_xla", "xla"),
    *("ddp", "ddp_find_unused_parameters_true", "ddp_fork", "ddp_notebook", "ddp_spawn"),
    *("deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"),
    *(f"deepspeed{how}" for how in _OFFLOADED),
)
_TRAINERS = (
    *("ddp_find_unused_parameters_false", "single_device", "xla_debug"),
    *(f"ddp_{start}_find_unused_parameters_false" for start in ("fork", "notebook", "spawn")),
    *(f"ddp_{start}_find_unused_parameters_true" for start in ("fork", "notebook", "spawn")),
)
_FABRICS = ("deepspeed_stage_1_offload", "dp", "xla_fsdp")

LIGHTNINGS_OWN: Mapping[str, tuple[FrontEnd, ...]] = MappingProxyType(
    {
        **dict.fromkeys(_BOTH, ("trainer", "fabric")),
        **dict.fromkeys(_TRAINERS, ("trainer",)),
        **dict.fromkeys(_FABRICS, ("fabric",)),
    }
)
"""Lightning 2.6.6's names, with the front ends that have each; ``"auto"`` is in none of its registries."""

TAKEN_OVER = "xla_fsdp"
"""The only one of Lightning's names (under Fabric) that a package of this project replaces."""


def kept_by_lightning(name: str, package: str | None = None) -> tuple[FrontEnd, ...]:
    """The front ends under which Lightning keeps a name, whoever claims it.

    Args:
        name: A strategy name.
        package: The canonical name of the distribution that claims it: fsdp-xla gets Fabric's ``"xla_fsdp"``.

    Example:
        >>> kept_by_lightning("ddp"), kept_by_lightning("dp"), kept_by_lightning("fsdp2")
        (('trainer', 'fabric'), ('fabric',), ())
        >>> kept_by_lightning("xla_fsdp", "fsdp-xla"), kept_by_lightning("xla_fsdp", "another")
        ((), ('fabric',))
    """
    return () if (name, package) == (TAKEN_OVER, "fsdp-xla") else LIGHTNINGS_OWN.get(name, ())
