"""The same on XLA's CPU devices and, by ``nox -s hardware -- xla``, on a TPU: losses and weights as plain torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everywhere import CASES, train_plain
from fsdp_core.testing.oracle import FP32_TOLERANCE, HALF_TOLERANCE
from xla_process import ok, on_hardware, run_script

#: A TPU multiplies matrices of fp32 in bf16, unless it is told otherwise.
TOLERANCE = HALF_TOLERANCE if on_hardware() else FP32_TOLERANCE


@pytest.fixture(scope="module", params=CASES)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, run_script("everywhere.py", 2, folder, request.param)


def test_it_trains_saves_and_loads(results: tuple[str, dict[str, Any]]) -> None:
    losses, weights = train_plain()
    kind, found = results
    for case in CASES[kind]:
        result = ok(found, case)
        expected = losses if case.startswith("fabric") else sum(losses) / len(losses)
        assert result["losses"] == pytest.approx(expected, abs=TOLERANCE), case
        assert list(result["weights"]) == list(weights)
        for name, value in weights.items():
            torch.testing.assert_close(result["weights"][name], value, atol=TOLERANCE, rtol=0)
