"""Options that torch_xla's wrapper is given: each turned on, on two ranks; those that end the process are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_core.testing.oracle import FP32_TOLERANCE, HALF_TOLERANCE, momentum, train_plain
from option_runs import STEPS, Rows
from xla_process import error, ok, run_script

#: What trains as plain torch does.
SAME = (
    "execute_sharding_on_init",
    "optimization_barrier_in_forward",
    "optimization_barrier_in_backward",
    "sync_on_finalization",
    "disable_reshard_on_root",
    "reduce_scatter_bucket_size_mb",
    "shard_param_on_dim_0",
    "coalesce_all_gather_ops",
    "coalesced, units without parameters",
    "torch_xla's size policy",
    "torch_xla's transformer policy",
)

#: What computes in another dtype: those of an activation and of the buffer.
IN_HALF = {
    "compute_dtype": ["torch.bfloat16", "torch.float32"],
    "fp32_reduce_scatter": ["torch.bfloat16", "torch.float32"],
    "buffer_dtype": ["torch.float32", "torch.bfloat16"],
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_script("option_runs.py", 2, tmp_path_factory.mktemp("options"))


def assert_trained(result: dict[str, Any], tolerance: float) -> None:
    losses, weights = train_plain(STEPS, momentum, net=Rows())
    assert result["losses"] == pytest.approx(losses, abs=tolerance)
    assert result["weights"].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(result["weights"][name].float(), value, atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize("case", SAME)
def test_numbers_stay_what_they_are(two: dict[str, Any], case: str) -> None:
    result = ok(two, case)
    assert result["dtypes"] == ["torch.float32"] * 2
    assert_trained(result, FP32_TOLERANCE)


@pytest.mark.parametrize("case", IN_HALF)
def test_dtypes_are_those_asked_for(two: dict[str, Any], case: str) -> None:
    result = ok(two, case)
    assert result["dtypes"] == IN_HALF[case]
    assert_trained(result, HALF_TOLERANCE)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("coalesced without rows", ["coalesce_all_gather_ops=True", "shard_param_on_dim_0=True"]),
        ("pin_layout_in_collective_ops", ["pin_layout_in_collective_ops=True", "on the CPU", "Leave it out"]),
    ],
)
def test_what_would_end_the_process_is_refused(two: dict[str, Any], case: str, words: list[str]) -> None:
    told = error(two, case)
    assert "UnsupportedCapabilityError" in told
    for word in words:
        assert word in told
