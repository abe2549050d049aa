"""Layer norms are recorded in another way under SPMD, and are what torch's own are."""

from __future__ import annotations

import pytest
import torch

from fsdp_core.testing.oracle import FP32_TOLERANCE
from spmd_layer_norms import CASES
from xla_process import start

#: bf16 has 8 bits, and rounding is off by half a unit in the last: of the result, and of the gradient coming in.
BF16_ROUNDING = 2**-8


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[float]]:
    out = tmp_path_factory.mktemp("layer_norms") / "out.pt"
    results: dict[tuple[str, str], list[float]] = start("spmd_layer_norms.py", out).finish()
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_torchs(
    found: dict[tuple[str, str], list[float]], case: str, dtype: torch.dtype
) -> None:
    off = found[case, str(dtype)]
    bound = BF16_ROUNDING if dtype == torch.bfloat16 else FP32_TOLERANCE
    # far from 0, and of one element, torch's own rounding is larger than that
    assert all(ours <= max(bound, 2 * torchs) for ours, torchs in zip(off, found[case, "torch"], strict=True)), off
