"""torch's own sharding on the device, beside the CPU: the weights after three steps are the same, bit for bit."""

from __future__ import annotations

import pytest

from fake_ranks import run_ranks
from sharding_runs import CASES, FAULTS, compare_cases, compare_wrappers, count_step, find_faults, move_checkpoint

pytestmark = pytest.mark.everything

DELAYS = [(0, "all"), (20_000, "all"), (20_000, "default")]
OF_FOUR = ["hsdp", "tp"]
OF_TWO = [name for name in CASES if name not in OF_FOUR]


@pytest.mark.parametrize("delay", DELAYS)
def test_fully_shard_on_two_ranks(delay):
    for differences in run_ranks(compare_cases, OF_TWO, delay):
        assert differences == dict.fromkeys(OF_TWO, 0.0)


@pytest.mark.parametrize("delay", DELAYS)
def test_meshes_of_two_dimensions_on_four_ranks(delay):
    for differences in run_ranks(compare_cases, OF_FOUR, delay, size=4):
        assert differences == dict.fromkeys(OF_FOUR, 0.0)


@pytest.mark.parametrize("delay", DELAYS)
def test_wrappers(delay):
    for differences in run_ranks(compare_wrappers, delay):
        assert differences == {"ddp": 0.0, "fsdp1": 0.0}


def test_faults_in_fully_shard_are_seen():
    for is_right in run_ranks(find_faults):
        assert is_right == {"none": True} | {fault.__name__: False for fault in FAULTS}


@pytest.mark.parametrize(
    ("name", "host_syncs"),
    [
        ("plain", {}),
        ("prefetch", {}),
        ("bf16", {}),
        ("pinned offload", {"event": 15}),  # one for each parameter's gradient
        ("pageable offload", {"copy to the host": 15}),
    ],
)
def test_waits_of_a_step_of_fully_shard(name, host_syncs):
    for counts in run_ranks(count_step, name):
        assert counts == {"host_syncs": host_syncs, "inline": {}, "collectives": 8}


def test_checkpoints_move_between_the_device_and_the_cpu(tmp_path):
    assert run_ranks(move_checkpoint, str(tmp_path)) == [True, True]
