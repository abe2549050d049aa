"""torch's own sharding on the device, beside the CPU."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from sharding_runs import CASES, compare_cases, compare_wrappers, count_step, move_checkpoint

#: Weights of float32 differ by roundings alone; those computed in bfloat16 by as much as it rounds.
TOLERANCES = {name: 2e-3 if "bf16" in name else 1e-6 for name in CASES}
OF_TWO = [name for name in CASES if name not in ("hsdp", "tp")]


@pytest.mark.parametrize("delay", [0, 200])
def test_fully_shard_on_two_ranks(delay):
    for differences in run_ranks(compare_cases, OF_TWO, delay):
        assert {name: delta for name, delta in differences.items() if delta > TOLERANCES[name]} == {}


@pytest.mark.parametrize("delay", [0, 200])
def test_meshes_of_two_dimensions_on_four_ranks(delay):
    for differences in run_ranks(compare_cases, ["hsdp", "tp"], delay, size=4):
        assert {name: delta for name, delta in differences.items() if delta > TOLERANCES[name]} == {}


def test_step_of_fully_shard_never_waits_on_the_host():
    for counts in run_ranks(count_step):
        assert counts == {"host_syncs": {}, "inline": {}, "collectives": 8}


@pytest.mark.parametrize("delay", [0, 200])
def test_wrappers(delay):
    for differences in run_ranks(compare_wrappers, delay):
        assert all(delta <= 1e-6 for delta in differences.values()), differences


def test_checkpoints_move_between_the_device_and_the_cpu(tmp_path):
    assert run_ranks(move_checkpoint, str(tmp_path)) == [True, True]
