"""A run under Fabric or Trainer has XLA do what a loop by hand has it do, and compile a program less."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_core.testing.oracle import FP32_TOLERANCE
from xla_process import ok, run_script

#: Of the script: steps after the warm ones.
STEPS = 8
DEVICES = 2


def counted(folder: Any, way: str, contender: str) -> dict[str, Any]:
    result: dict[str, Any] = ok(run_script("counted_steps.py", DEVICES, folder, way, contender), "counts")
    return result


@pytest.fixture(scope="module", params=["classic", "spmd"])
def by_hand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    return request.param, counted(tmp_path_factory.mktemp(f"{request.param}-by-hand"), request.param, "by hand")


@pytest.mark.parametrize("contender", ["fabric", "trainer"])
def test_a_program_less_and_as_many_executions_as_by_hand(by_hand: Any, contender: str, tmp_path: Any) -> None:
    way, expected = by_hand
    result = counted(tmp_path, way, contender)
    assert result["loss"] == pytest.approx(expected["loss"], abs=FP32_TOLERANCE)
    # by hand, a first step with the zeros of AdamW's state is another program than the second, where they are data
    assert result["programs"] == expected["programs"] - 1
    assert result["steps"] == expected["steps"]


def test_a_step_is_one_execution_of_each_rank_and_fetches_nothing(by_hand: Any) -> None:
    way, result = by_hand
    executions = STEPS * (DEVICES if way == "classic" else 1)
    assert result["steps"] == {"executions": executions, "compiles": 0, "TransferFromDeviceTime": 0}
