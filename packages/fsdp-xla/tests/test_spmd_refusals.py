"""What xla_fsdp_spmd can't do is refused before anything is trained, with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from xla_process import results_of, start


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("spmd_refusals")
    found: dict[str, tuple[str, str]] = results_of("spmd_refusals.py", folder / "results.pt", str(folder))
    return found


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("devices", "StrategyUnavailableError", ["devices=3", "XLA has 4", "CPU_NUM_DEVICES=3", "write devices=4"]),
        ("nodes", "UnsupportedCapabilityError", ["num_nodes=2", "one host", "strategy='xla_fsdp'"]),
        ("mesh", "UnsupportedCapabilityError", ["tensor_parallel_size=3", "4 devices", "divides 4"]),
        ("size", "UnsupportedCapabilityError", ["tensor_parallel_size=0", "Write 1, or more"]),
        ("plan without an axis", "UnsupportedCapabilityError", ["tensor_plan", "tensor_parallel_size=2"]),
        ("plan of nothing", "ShardingError", ["tensor_plan['*.top.weight']", "inp.weight, blocks.0"]),
        ("plan of no dimension", "ShardingError", ["tensor_plan['*.up.*']=1", "'blocks.0.up.bias'", "(7,)"]),
        ("16-true", "UnsupportedCapabilityError", ["precision='16-true'", "bf16-mixed"]),
        ("16-mixed", "UnsupportedCapabilityError", ["precision='16-mixed'", "gradient_scaling"]),
        ("cpu_offload", "UnsupportedCapabilityError", ["cpu_offload"]),
        ("reshard_after_forward", "UnsupportedCapabilityError", ["reshard_after_forward"]),
        ("unknown option", "UnsupportedCapabilityError", ["process_group_backend"]),
        ("cuda", "MisconfigurationException", ["CUDA"]),
        ("policy", "ShardingError", ["{LSTM}", "matches no submodule of Net"]),
        ("checkpointing", "ShardingError", ["activation_checkpointing_policy=Block", "{Block}"]),
        ("foreign optimizer", "OptimizerMismatchError", ["none of the sharded model's"]),
        ("other terms", "ShardingError", ["sharded before, on other terms", "auto_wrap_policy"]),
    ],
)
def test_it_is_refused(results: dict[str, tuple[str, str]], case: str, error: str, words: list[str]) -> None:
    raised, message = results[case]
    assert raised == error, message
    for word in words:
        assert word in message


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("spmd_starts")
    cases = {"started_without_spmd": 4, "after_a_backward_pass": 4, "devices_left_open": None, "seeded_again": 4}
    begun = {case: start("spmd_starts.py", folder / case, case, devices=n) for case, n in cases.items()}
    return {case: process.finish() for case, process in begun.items()}


def test_xla_used_without_spmd_is_refused(starts: dict[str, Any]) -> None:
    error, message = starts["started_without_spmd"]
    assert error == "StrategyUnavailableError", message
    assert "torch_xla.runtime.use_spmd()" in message


def test_a_process_whose_autograd_knows_no_xla_is_refused(starts: dict[str, Any]) -> None:
    error, message = starts["after_a_backward_pass"]
    assert error == "StrategyUnavailableError", message
    assert "torch_xla.runtime.use_spmd(); torch_xla.sync()" in message


def test_devices_say_how_many_the_cpu_has(starts: dict[str, Any]) -> None:
    assert starts["devices_left_open"] == {"mesh": {"fsdp": 3}, "world": 1, "variable": "3"}


def test_a_seed_counts_for_the_devices_each_time_it_is_set(starts: dict[str, Any]) -> None:
    first, again, other, third = starts["seeded_again"]
    assert first == again == third != other
