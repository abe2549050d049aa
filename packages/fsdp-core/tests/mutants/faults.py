"""The table of the mutants: what each is called and what finds it; imports nothing."""

from __future__ import annotations

LOSSES, STATE = "losses == pytest.approx", "torch.testing.assert_close(state[name]"

#: Each fault, for which the mutant is ``loopback_<fault>``: the clause that finds it, and a part of what it says.
CAUGHT: dict[str, tuple[str, str]] = {
    # numbers
    "gradients_not_reduced": ("test_trainer_equals_plain[2-sgd]", LOSSES),
    "gradients_summed": ("test_trainer_equals_plain[2-sgd]", LOSSES),
    "gradients_halved": ("test_trainer_equals_plain[3-sgd]", LOSSES),
    "gradients_off_by_one": ("test_trainer_equals_plain[2-sgd]", LOSSES),
    "gradients_of_few_dropped": ("test_ranks_use_different_parameters[unused on one rank-each step]", LOSSES),
    "mean_over_users": ("test_ranks_use_different_parameters[an expert for each rank-each step]", LOSSES),
    "unused_zeroed": ("test_ranks_use_different_parameters[unused on all ranks-each step]", STATE),
    "second_backward_dropped": ("test_order_of_passes[two forward passes, then two backward passes]", STATE),
    "call_overwrites": ("test_a_unit_that_is_called_twice", STATE),
    "decided_in_forward": ("test_order_of_passes[a forward pass within no_backward_sync]", STATE),
    "sums_in_half": ("test_gradients_are_added_in_full_precision[over micro-batches]", 'state["layer.bias"]'),
    "buffers_of_own": ("test_rank_zeros_buffers_win", "(saved, unsaved) =="),
    "ranks_seeded_alike": ("test_setup_leaves_random_numbers_alone", "has changed what this rank draws next"),
    "padding_in_norm": ("test_clipping_by_norm_equals_plain[2]", LOSSES),
    "tail_truncated": ("test_trainer_equals_plain[2-sgd]", LOSSES),
    "parameters_stale": ("test_trainer_equals_plain[2-sgd]", LOSSES),
    "frozen_trained": ("test_trainer_equals_plain[2-sgd]", LOSSES),
    "unfreezing_lost": ("test_a_block_unfrozen_after_an_evaluation", "assert losses == "),
    "plan_unties": ("test_plan_is_what_is_sharded[as it is]", "to plan has changed the module"),
    "plan_miscounts": ("test_plan_is_what_is_sharded[as it is]", "bytes were planned, and"),
    "tied_untied": ("test_tied_parameters_are_trained_as_one", LOSSES),
    "rank_0_not_heard": ("test_rank_zeros_values_win", LOSSES),
    "left_gathered": ("test_evaluation_leaves_nothing_unsharded[as it is]", "elements, the ranks hold"),
    "parts_not_put_together": (
        "test_marked_layers_have_the_values_of_the_unsharded_model[fabric]",
        "is not what one process builds",
    ),
    "memory_kept": ("test_setup_leaves_no_whole_weight", "assert largest < "),
    # optimizers
    "optimizer_stale": (
        "test_fabrics_optimizer_from_before_sharding_is_rebound[True]",
        "as it was before the model was sharded",
    ),
    "optimizer_foreign": ("test_optimizers_over_other_parameters_are_refused", "not module.losses"),
    "group_options_lost": ("test_trainer_equals_plain[2-adamw_groups]", LOSSES),
    # clipping
    "norm_local": ("test_clipping_by_norm_equals_plain[2]", LOSSES),
    "infinite_norm_local": ("test_infinite_norm_sees_nan_of_another_rank", "nothing was raised"),
    "norm_of_other_order": ("test_each_optimizer_is_clipped_by_itself[3.0]", "norms == pytest.approx"),
    "norm_of_all": ("test_each_optimizer_is_clipped_by_itself[2.0]", "norms == pytest.approx"),
    "norm_nonfinite": ("test_error_if_nonfinite_is_honoured", "nothing was raised"),
    "signal_not_told": ("test_a_signal_to_one_rank_under_fabric", "were not told to end after the same step"),
    "rates_not_compared": ("test_a_rate_that_one_rank_changes[scheduler]", "assert step == 2"),
    "predictions_padded": ("test_predictions_of_uneven_numbers[loaders with a length]", "predictions for"),
    "nonfinite_local": ("test_all_ranks_stop_before_a_step_that_is_not_finite[False]", "nothing was raised"),
    "clip_value_ignored": ("test_clipping_by_value_equals_plain[2]", LOSSES),
    # accumulation
    "micro_batches_twice": ("test_accumulation_equals_plain[2]", LOSSES),
    "micro_batches_lost": ("test_accumulation_equals_plain[2]", LOSSES),
    "sync_left_off": ("test_no_backward_sync_leaves_sync_on[True]", "norm == pytest.approx"),
    "sync_left_off_by_exceptions": ("test_an_exception_leaves_reduction_on[backend]", LOSSES),
    "evaluation_forgets_micro_batches": ("test_pairs_of_options[2 of 2]", "differ from one unsharded process"),
    "no_sync_ignored": ("test_accumulation_skips_the_reduction[as it is]", "accumulated == (times"),
    "zero_grad_forgets_shards_alone": ("test_order_of_passes[zero_grad within an accumulation]", STATE),
    "steps_without_reduction": ("test_a_step_inside_an_accumulation", "torch.testing.assert_close(state[name]"),
    "pieces_unguarded": (
        "test_torchs_functions_on_gradients_under_fabric[clipped-before the step]",
        "outcome[0] == pytest.approx(want[0]",
    ),
    "micro_batches_weighed_alike": ("test_mean_over_all_tokens_of_a_step[trainer]", LOSSES),
    "tokens_of_own": ("test_means_over_different_tokens_are_added", STATE),
    "tokens_not_restored": ("test_counts_are_restored_amid_a_step", "one of them is of a loss without token_mean()"),
    # loops
    "stale_in_forward": ("test_manual_optimization[2]", "has written to"),
    "requires_grad_not_followed": ("test_manual_optimization[2]", "does not require grad"),
    "writes_unwatched": ("test_weights_that_are_clamped[in a step by hand]", LOSSES),
    "gradients_hidden_in_step": ("test_torchs_functions_on_gradients_inside_a_step", "outcome[0] == pytest.approx"),
    "interrupted_counts": ("test_whole_parameters_stay_equal_after_an_exception", "gains == pytest.approx"),
    "calls_drop_gradients": ("test_calls_leave_shards_and_gradients_alone[its model]", STATE),
    "interruption_unnoticed": ("test_an_interrupted_backward_pass", STATE),
    # what users do with a sharded module
    "ranks_not_compared": ("test_ranks_with_different_models", "instead of a refusal"),
    "pieces_shown": ("test_state_dicts_are_whole_or_refused", "shows net.inp.weight of (6, 6) as (18,)"),
    "containers_copied": ("test_what_blocks_exchange", "blocks exchange a list"),
    "late_parameters_taken": ("test_late_parameters_are_refused_under_fabric", "nothing was raised"),
    # checkpoints
    "state_off_by_one": ("test_trainer_equals_plain[2-sgd]", "can't be gathered"),
    "names_wrapped": ("test_odd_names", "wrapped.aweight"),
    "late_groups_left_alone": (
        "test_param_groups_that_are_added_late[in hooks-sharded]",
        'resumed["rates"] == uninterrupted["rates"]',
    ),
    "frozen_as_built": ("test_what_was_not_trained_is_left_out", "a frozen parameter that was written to is left out"),
    "buffer_not_saved": ("test_saved_on_n_loaded_on_m[2-sharded-momentum]", "a part is not in its state"),
    "buffers_saved_of_last_rank": ("test_rank_zeros_buffers_are_saved[sharded]", "and not rank 0's"),
    "buffer_not_restored": (
        "test_saved_on_n_loaded_on_m[2-sharded-momentum]",
        'torch.equal(got["model"][name], tensor)',
    ),
    "moment_not_saved": (
        "test_saved_on_n_loaded_on_m[2-sharded-momentum]",
        'got["optimizer"].keys() == want["optimizer"].keys()',
    ),
    "options_not_restored": ("test_a_checkpoint_wins_over_what_it_is_loaded_into", STATE),
    "moments_of_frozen_dropped": ("test_a_checkpoint_wins_over_what_it_is_loaded_into", STATE),
    "weights_loaded_beside_optimizer": (
        "test_loaded_weights_are_trained_by_an_optimizer_that_is_older",
        "write within fsdp_core.gathered(module, modifier_rank=0)",
    ),
    "moments_by_position": ("test_fabric_knows_an_optimizers_state_by_name", "'momentum_buffer')"),
    "saved_group_divided": ("test_another_models_checkpoint_under_trainer[MoreGroups-sharded]", "nothing was raised"),
    "random_numbers_not_restored": ("test_resume_is_exact[between two steps]", 'got["losses"] == want["losses"]'),
    "async_save_not_copied": (
        "test_what_is_changed_after_the_call_is_not_saved[sharded]",
        "torch.equal(saved[name], tensor)",
    ),
    "gradients_not_restored": ("test_accumulated_gradients[{}]", 'got["losses"] == want["losses"]'),
    "strict_ignored": ("test_another_models_weights_without_an_optimizer[Renamed]", "nothing was raised"),
    "changed_before_check": (
        "test_another_models_checkpoint_under_trainer[Renamed-sharded]",
        "was changed by what was refused",
    ),
    "saved_apart": ("test_ranks_that_name_different_paths", "rank 1 was told to save to"),
    "terms_forgotten": ("test_a_sharded_module_keeps_its_precision[bf16-true]", "instead of a refusal"),
    # leftovers
    "group_left_open": ("test_nothing_is_left_behind[trainer]", "{'process groups': "),
    "thread_left_running": ("test_nothing_is_left_behind[trainer]", "{'threads': ['Thread-"),
    "variable_left_set": ("test_nothing_is_left_behind[trainer]", "{'environment variables': ['LOOPBACK']} != "),
    "file_left_behind": ("test_nothing_is_left_behind[trainer]", "{'files': ['tmp"),
    "module_kept": ("test_what_nobody_holds_is_gone[fabric]", "alive == []"),
    "models_kept": ("test_what_nobody_holds_is_gone[fabric]", "the module that was trained"),
    # what the plugin says
    "signature_differs": ("test_a_sharded_root_is_asked_as_the_contract_says", "'clip_value' is called 'limit' there"),
    "accelerator_claimed": (
        "test_plugin_and_backend_name_the_same_accelerators[trainer]",
        "the plugin names 'cuda', and the backend runs on no such device",
    ),
    "accelerator_unclaimed": (
        "test_plugin_and_backend_name_the_same_accelerators[fabric]",
        "the backend runs on 'cuda', and the plugin names no such accelerator",
    ),
    "clip_by_norm_unclaimed": ("test_what_is_not_declared_is_refused[clip_by_norm-trainer]", "nothing was raised"),
    "option_unclaimed": ("test_no_option_asks_for_what_is_not_declared", "activation_checkpointing_policy"),
    "offload_claimed": ("test_options_leave_numbers_alone[cpu_offload=True]", "has no option 'cpu_offload'"),
    "checkpointing_claimed": (
        "test_activation_checkpointing_needs_no_wrap_policy[as it is]",
        "assert [3, 3] == [6, 6]",
    ),
    "mixed_precision_claimed": (
        "test_weights_and_inputs_are_cast_before_a_block_sees_them[bf16-mixed]",
        'got["weight"]',
    ),
    "default_differs": ("test_the_options_are_the_constructors_arguments[trainer-precision]", "'full'"),
    "probe_imports_torch": ("test_listing_imports_neither_torch_nor_lightning", "'torch'"),
}
