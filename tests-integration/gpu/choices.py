"""What the command line can choose of a part: measurements, and tests. run.py reads it, and imports no torch."""

from __future__ import annotations

__all__ = ["ADAPTERS", "CLAUSES", "MEASUREMENTS", "MESHES", "clause_names"]

#: The measurements of ``speed``, most valuable first: a Llama of 1 B under ``fsdp2`` and ``fsdp_native``, the
#: launch-bound model, its profile, and LoRA of Llama 3 8B.
MEASUREMENTS = (
    "eager",
    "compiled",
    "launches",
    "native",
    "resolution",
    "lora",
    "profile",
    "native-launches",
    "native-compiled",
    "plain",
    "native-profile",
    "lora-compiled",
    "compiled-lightning",
)

#: Clauses of the conformance suite, most valuable first, and those of more than two ranks last but for one: each rank
#: that is started imports for as long as ten clauses take. All models of the suite have 0-dim and tied parameters.
CLAUSES = (
    "test_trainer_equals_plain[2-adamw_groups]",
    "test_fabric_equals_plain[2-sgd]",
    "test_clipping_by_norm_equals_plain[2]",
    "test_accumulation_equals_plain[2]",
    "test_saved_on_n_loaded_on_m[2-sharded-momentum]",
    "test_dtypes_under_trainer[bf16-mixed]",
    "test_dtypes_under_trainer[16-mixed]",
    "test_overflow_in_one_shard_skips_the_step_everywhere",
    "test_resume_is_exact[between two steps]",
    "test_what_is_changed_after_the_call_is_not_saved[sharded]",
    "test_manual_optimization[2]",
    "test_optimizer_of_whole_matrices_and_its_resume",
    "test_options_leave_numbers_alone[cpu_offload=True]",
    "test_an_exception_leaves_reduction_on[trainer]",
    "test_a_new_trainer_goes_on_after_an_exception",
    "test_whole_parameters_stay_equal[unfrozen later]",
    "test_clipping_by_value_equals_plain[2]",
    "test_each_optimizer_is_clipped_by_itself[2.0]",
    "test_resume_is_exact_under_fabric[sharded]",
    "test_resume_is_exact[between the micro-batches of a step]",
    "test_what_is_changed_after_the_call_is_not_saved[full]",
    "test_same_layout_goes_on_bit_for_bit",
    "test_full_state_dict",
    "test_gathered",
    "test_calls_outside_of_steps[without gradients]",
    "test_dtypes_under_fabric[bf16-true]",
    "test_dtypes_under_fabric[16-mixed]",
    "test_scaler_state_is_restored",
    "test_infinite_norm_sees_nan_of_another_rank",
    "test_activation_checkpointing_repeats_dropout",
    "test_batch_norm[bf16-mixed]",
    "test_meta_init[bf16-true]",
    "test_tied_parameters_are_trained_as_one",
    "test_on_another_number_of_ranks[2 to 1]",
    "test_stages_in_any_order[blocks]",
    "test_nothing_is_left_behind[trainer]",
    "test_trainer_equals_plain[4-momentum]",
    "test_saved_on_n_loaded_on_m[2-full-sgd]",
    "test_fabric_equals_plain[3-adamw_groups]",
)

#: Clauses of core's adapters, which every strategy runs alike.
ADAPTERS = (
    "test_callbacks_keep_what_they_keep_in_a_synchronous_run[True]",
    "test_a_rate_that_one_rank_changes[hook]",
    "test_predictions_of_uneven_numbers[loaders with a length]",
)

#: Tests of meshes: tensor parallelism, replicas, context parallelism.
MESHES = (
    "test_parallel_axes.py::test_training_equals_plain[trainer-tensor 2]",
    "test_context_parallel.py::test_trainer_in_every_stage[context 2]",
    "test_parallel_axes.py::test_training_equals_plain[trainer-replicate 2 x shard 2]",
    "test_parallel_axes.py::test_training_equals_plain[trainer-shard 2 x tensor 2]",
    "test_context_parallel.py::test_bf16_mixed",
    "test_parallel_axes.py::test_checkpoints_move_between_meshes[replicate 2 x shard 2-tensor 2]",
    "test_parallel_axes.py::test_training_equals_plain[accumulated-replicate 2 x shard 2]",
)


def clause_names() -> list[str]:
    """The names of the clauses without their parameters, in their order."""
    return list(dict.fromkeys(clause.split("[")[0] for clause in CLAUSES))
