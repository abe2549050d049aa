"""The names of the mutants, as plain data; imports neither torch nor Lightning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_core import Capability, Option, StrategyInfo, hookimpl
from fsdp_core.testing.loopback.plugin import LOOPBACK
from mutants.faults import CAUGHT


def _info(fault: str, **changes: Any) -> StrategyInfo:
    return replace(
        LOOPBACK,
        name=f"loopback_{fault}",
        summary="Wrong on purpose.",
        trainer=f"mutants.strategies:trainer_{fault}",
        fabric=f"mutants.strategies:fabric_{fault}",
        **changes,
    )


#: What a mutant says of itself, where that is the fault.
CHANGES: dict[str, dict[str, Any]] = {
    "accelerator_claimed": {"accelerators": ("cuda", "cpu")},
    # of units, whose inputs are cast: without them, autocast may be all that casts
    "mixed_precision_claimed": {
        "capabilities": LOOPBACK.capabilities | {Capability.MIXED_PRECISION, Capability.WRAP_POLICY}
    },
    "sums_in_half": {"capabilities": LOOPBACK.capabilities | {Capability.MIXED_PRECISION}},
    "offload_claimed": {"capabilities": LOOPBACK.capabilities | {Capability.CPU_OFFLOAD}},
    "checkpointing_claimed": {
        "capabilities": LOOPBACK.capabilities | {Capability.ACTIVATION_CHECKPOINTING},
        "options": (*LOOPBACK.options, Option(name="activation_checkpointing_policy")),
    },
    "option_unclaimed": {"options": (*LOOPBACK.options, Option(name="activation_checkpointing_policy"))},
    "clip_by_norm_unclaimed": {"capabilities": LOOPBACK.capabilities - {Capability.CLIP_BY_NORM}},
    "default_differs": {
        "options": tuple(
            replace(option, default="full") if option.name == "state_dict_type" else option
            for option in LOOPBACK.options
        )
    },
    "probe_imports_torch": {"probe": "mutants.plugin:import_torch"},
}


@hookimpl
def fsdp_strategies() -> list[StrategyInfo]:
    """One for each fault."""
    return [_info(fault, **CHANGES.get(fault, {})) for fault in CAUGHT]


def import_torch() -> None:
    """Find that the strategy can run here, at too high a price."""
    import torch  # noqa: F401
