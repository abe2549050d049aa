"""Each mechanism of a rehearsal, switched off, is noticed by a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import test_cuda_rules
import test_rehearsal
from fsdp_core.rehearsal import caching_allocator, collectives, cuda_rules, known_values, memory, modules_on_fakes
from fsdp_core.rehearsal.caching_allocator import CachingAllocator
from fsdp_core.rehearsal.collectives import Collective
from fsdp_core.rehearsal.known_values import KnownValues
from fsdp_core.rehearsal.memory import MemoryMode, StepRecord
from fsdp_core.torch_private.fake_tensors import operator_name


def answers(*names: str) -> Callable[[], None]:
    def check() -> None:
        for name in names:
            for is_known in (True, False):
                test_rehearsal.test_integers_are_computed_and_floats_assumed(name, is_known)

    return check


def check_written() -> None:
    test_rehearsal.test_what_is_written_to_a_known_tensor_is_not_written_to_the_users()
    test_rehearsal.test_an_integer_that_floats_were_written_to_is_not_known_any_more()


def check_packed() -> None:
    for is_known, rows in ((True, 8), (False, 15)):
        test_rehearsal.test_sequences_are_packed_by_their_lengths(is_known, rows)


def check_sent() -> None:
    for name, sent in (("all-gather", 75), ("all-reduce", 150), ("broadcast", 100)):
        test_rehearsal.test_bytes_that_a_rank_sends(name, sent)


def check_autocast() -> None:
    for name in test_cuda_rules.AUTOCAST:
        test_cuda_rules.test_autocast_computes_in_float32_what_cuda_has_on_its_lists(name)


def check_loop() -> None:
    test_rehearsal.test_a_loop_that_runs_until_a_value_is_small_ends()


Switch = Callable[[pytest.MonkeyPatch], None]


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for a mechanism that is switched off."""


def off(owner: Any, name: str, replacement: Any = nothing) -> Switch:
    return lambda patch: patch.setattr(owner, name, replacement)


def without(table: dict[Any, Any], key: Any) -> Switch:
    return lambda patch: patch.delitem(table, key)


#: What answers for an operator: the questions that need it.
QUESTIONS_OF = {
    "_local_scalar_dense": answers("item", "condition"),
    "nonzero": answers("nonzero"),
    "_unique2": answers("unique"),
    "masked_select": answers("masked_select"),
    "index": answers("mask"),
    "equal": answers("equal"),
    "repeat_interleave": answers("repetitions"),
    "bincount": answers("counts"),
    "_grouped_mm": test_rehearsal.test_products_of_groups_of_rows_have_their_shapes,
    "_pack_padded_sequence": check_packed,
    "_ctc_loss": check_packed,
}

#: By name: how a mechanism is switched off, and what notices it.
MUTANTS: dict[str, tuple[Switch, Callable[[], None]]] = {
    **{
        f"no answer for {operator_name(operator)}": (
            without(known_values._ANSWERS, operator),
            QUESTIONS_OF[operator_name(operator)],
        )
        for operator in known_values._ANSWERS
    },
    "nothing is computed beside": (off(KnownValues, "_compute_beside"), answers("comparison", "item")),
    "no usual answers": (off(KnownValues, "_follow_usual_answer"), answers("not finite")),
    "the same answer for ever": (off(KnownValues, "_decide", lambda *args: True), check_loop),
    "nothing is known": (off(KnownValues, "know"), answers("item")),
    "nothing is told": (off(KnownValues, "assume"), answers("item")),
    "known values are not copied": (
        off(KnownValues, "know", lambda self, fake, real: self._real_of.__setitem__(fake, real)),
        check_written,
    ),
    "values are known for ever": (off(known_values, "is_mutable", lambda operator: False), check_written),
    "no arrays": (off(KnownValues, "to_numpy"), answers("array")),
    "padding as torch writes it": (
        off(modules_on_fakes, "_RecurrentFunctions", lambda functions: functions),
        check_packed,
    ),
    "orders as torch inverts them": (off(modules_on_fakes, "_invert_permutation"), check_packed),
    "no exchanges of objects": (
        off(modules_on_fakes, "_EXCHANGES", {}),
        test_rehearsal.test_imagined_ranks_give_the_objects_of_this_one,
    ),
    "DDP's first buckets": (
        off(modules_on_fakes, "_assign_as_rebuilt", lambda module, assign: assign),
        test_rehearsal.test_gradients_are_in_the_buckets_of_ddp_after_its_first_step,
    ),
    "random numbers without bounds": (
        off(known_values, "_bounds_of_drawing"),
        test_rehearsal.test_a_random_number_is_taken_to_be_between_its_bounds,
    ),
    "no storages": (off(MemoryMode, "_meet"), test_rehearsal.test_memory_of_operations),
    "no sizes": (off(MemoryMode, "_resize"), test_rehearsal.test_memory_of_operations),
    "no resized storages": (off(MemoryMode, "_resized"), test_rehearsal.test_memory_of_operations),
    "no contents": (off(MemoryMode, "take"), test_rehearsal.test_memory_of_operations),
    "all of one phase": (
        off(memory, "_CONTENT_OF_PHASE", dict.fromkeys(memory._CONTENT_OF_PHASE, "other")),
        test_rehearsal.test_memory_of_operations,
    ),
    "a step without a beginning": (
        off(MemoryMode, "begin_step"),
        test_rehearsal.test_a_view_does_not_refill_a_storage_that_was_freed,
    ),
    "a step without an end": (off(MemoryMode, "end_step"), test_rehearsal.test_a_recomputed_unit_allocates_activations),
    "contents without a past": (
        off(StepRecord, "_contents_after", lambda self, count, device: {"other": 1}),
        test_rehearsal.test_memory_of_operations,
    ),
    "collectives without memory": (
        off(MemoryMode, "_communicate"),
        test_rehearsal.test_collectives_are_noticed_with_their_bytes,
    ),
    "no collectives": (
        off(memory, "collective_of", lambda *args: None),
        test_rehearsal.test_collectives_are_noticed_with_their_bytes,
    ),
    "groups without ranks": (
        off(collectives, "_group_of", lambda args: None),
        test_rehearsal.test_collectives_are_noticed_with_their_bytes,
    ),
    **{
        f"no {name} by {start}": (
            off(collectives, "_NAMES", tuple(row for row in collectives._NAMES if row[0] != start)),
            test_rehearsal.test_collectives_are_noticed_with_their_bytes,
        )
        for start, name in collectives._NAMES
        if start not in ("all_reduce", "all_to_all", "shard_dim_alltoall")  # of functional collectives
    },
    "all bytes are sent": (off(Collective, "sent", property(lambda self: self.nbytes)), check_sent),
    "no lists of optimizers": (
        off(cuda_rules, "foreach_utils", torch.nn),
        test_cuda_rules.test_optimizers_keep_lists_of_temporaries,
    ),
    "no autocast to float32": (off(cuda_rules, "IN_FLOAT32", ()), check_autocast),
    "no float32 by a dtype": (off(cuda_rules, "TO_FLOAT32", ()), check_autocast),
    "sizes are not rounded": (
        off(caching_allocator, "_ROUNDING", 1),
        test_cuda_rules.test_the_allocator_rounds_and_keeps_segments,
    ),
    "free blocks are not found": (
        off(CachingAllocator, "_set_free"),
        test_cuda_rules.test_the_allocator_rounds_and_keeps_segments,
    ),
    "segments of the blocks' sizes": (
        off(caching_allocator, "_segment_size", lambda size: size),
        test_cuda_rules.test_the_allocator_rounds_and_keeps_segments,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mechanism_that_is_switched_off_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    switch_off, check = MUTANTS[name]
    switch_off(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - any failure of the check notices it
        check()
