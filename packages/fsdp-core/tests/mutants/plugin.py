"""The names of the mutants, as plain data; imports neither torch nor Lightning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_core import Capability, Option, StrategyInfo, hookimpl
from fsdp_core.testing.loopback.plugin import LOOPBACK

#: Each fault; the mutant is ``loopback_<fault>``.
FAULTS = (
    # numbers
    "gradients_not_reduced",
    "gradients_summed",
    "gradients_halved",
    "gradients_off_by_one",
    "gradients_of_few_dropped",
    "mean_over_users",
    "unused_zeroed",
    "second_backward_dropped",
    "call_overwrites",
    "decided_in_forward",
    "sums_in_half",
    "buffers_of_own",
    "padding_in_norm",
    "tail_truncated",
    "parameters_stale",
    "frozen_trained",
    "unfreezing_lost",
    "tied_untied",
    "rank_0_not_heard",
    "left_gathered",
    "memory_kept",
    "parts_not_put_together",
    # optimizers
    "optimizer_stale",
    "optimizer_foreign",
    "group_options_lost",
    # clipping
    "norm_local",
    "infinite_norm_local",
    "norm_of_other_order",
    "norm_of_all",
    "norm_nonfinite",
    "nonfinite_local",
    "signal_not_told",
    "rates_not_compared",
    "predictions_padded",
    "clip_value_ignored",
    # accumulation
    "micro_batches_twice",
    "micro_batches_lost",
    "sync_left_off",
    "sync_left_off_by_exceptions",
    "no_sync_ignored",
    "evaluation_forgets_micro_batches",
    "zero_grad_forgets_shards_alone",
    "steps_without_reduction",
    "pieces_unguarded",
    # loops
    "stale_in_forward",
    "requires_grad_not_followed",
    "gradients_hidden_in_step",
    "writes_unwatched",
    "interrupted_counts",
    "calls_drop_gradients",
    "interruption_unnoticed",
    # what users do with a sharded module
    "ranks_not_compared",
    "pieces_shown",
    "containers_copied",
    "late_parameters_taken",
    # checkpoints
    "state_off_by_one",
    "names_wrapped",
    "buffer_not_saved",
    "buffer_not_restored",
    "moment_not_saved",
    "options_not_restored",
    "late_groups_left_alone",
    "moments_of_frozen_dropped",
    "weights_loaded_beside_optimizer",
    "moments_by_position",
    "random_numbers_not_restored",
    "async_save_not_copied",
    "saved_group_divided",
    "gradients_not_restored",
    "strict_ignored",
    "changed_before_check",
    "saved_apart",
    "terms_forgotten",
    # leftovers
    "group_left_open",
    "thread_left_running",
    "variable_left_set",
    "file_left_behind",
    "module_kept",
    "models_kept",
    # what the plugin says
    "signature_differs",
    "accelerator_claimed",
    "accelerator_unclaimed",
    "mixed_precision_claimed",
    "offload_claimed",
    "checkpointing_claimed",
    "clip_by_norm_unclaimed",
    "option_unclaimed",
    "default_differs",
    "probe_imports_torch",
)


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
    "mixed_precision_claimed": {"capabilities": LOOPBACK.capabilities | {Capability.MIXED_PRECISION}},
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
        ),
    },
    "probe_imports_torch": {"probe": "mutants.plugin:import_torch"},
}


@hookimpl
def fsdp_strategies() -> list[StrategyInfo]:
    """One for each fault."""
    return [_info(fault, **CHANGES.get(fault, {})) for fault in FAULTS]


def import_torch() -> None:
    """Find that the strategy can run here, at too high a price."""
    import torch  # noqa: F401
