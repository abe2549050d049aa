"""torch's own sharding on the device, beside the CPU: the weights after three steps are the same, bit for bit."""

from __future__ import annotations

from itertools import product

import pytest

from fake_ranks import run_ranks
from sharding_runs import (
    CASES,
    DELAYS,
    FAULTS,
    compare_cases,
    compare_wrappers,
    count_steps,
    find_faults,
    move_checkpoint,
)

pytestmark = pytest.mark.everything

OF_FOUR = ["hsdp", "tp"]
OF_TWO = [name for name in CASES if name not in OF_FOUR]


def test_fully_shard_on_two_ranks():
    for differences in run_ranks(compare_cases, OF_TWO):
        assert differences == dict.fromkeys(product(OF_TWO, DELAYS), 0.0)


def test_meshes_of_two_dimensions_on_four_ranks():
    for differences in run_ranks(compare_cases, OF_FOUR, size=4):
        assert differences == dict.fromkeys(product(OF_FOUR, DELAYS), 0.0)


def test_wrappers():
    for differences in run_ranks(compare_wrappers):
        assert differences == dict.fromkeys(product(("ddp", "fsdp1"), DELAYS), 0.0)


def test_faults_in_fully_shard_are_seen():
    for is_right in run_ranks(find_faults):
        assert is_right == {"none": True} | {fault.__name__: False for fault in FAULTS}


def test_waits_of_a_step_of_fully_shard():
    host_syncs = {
        "plain": {},
        "prefetch": {},
        "bf16": {},
        "pinned offload": {"event": 15},  # one for each parameter's gradient
        "pageable offload": {"copy to the host": 15},
    }
    want = {name: {"host_syncs": of_case, "inline": {}, "collectives": 8} for name, of_case in host_syncs.items()}
    assert run_ranks(count_steps, list(host_syncs)) == [want, want]


def test_checkpoints_move_between_the_device_and_the_cpu(tmp_path):
    assert run_ranks(move_checkpoint, str(tmp_path)) == [True, True]
