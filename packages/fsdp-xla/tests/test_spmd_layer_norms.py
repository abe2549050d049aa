"""Layer norms are recorded in another way under SPMD, and are what torch's own are: outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from fsdp_core.testing.oracle import FP32_TOLERANCE
from launching import LaunchingSPMD
from spmd_runs import new_fabric

#: bf16 has 8 bits, and rounding is off by half a unit in the last: of the result, and of the gradient coming in.
BF16_ROUNDING = 2**-8

#: By name: a shape, how many axes are normed, and whether there are a weight and a bias.
CASES: dict[str, tuple[tuple[int, ...], int, bool, bool]] = {
    "affine": ((8, 5, 12), 1, True, True),
    "over two axes": ((8, 5, 12), 2, True, True),
    "without weight and bias": ((8, 12), 1, False, False),
    "one element": ((8, 1), 1, True, True),
    "without bias": ((8, 12), 1, True, False),
}


def normed(device: Any, dtype: torch.dtype, given: list[Tensor | None], axes: int) -> list[Tensor]:
    """The output and all gradients, in fp64 on the host."""
    leaves = [None if one is None else one.to(dtype).to(device).requires_grad_() for one in given]
    x, weight, bias = leaves
    assert x is not None
    output = layer_norm(x, x.shape[-axes:], weight, bias)
    assert output.dtype == dtype
    slopes = torch.linspace(-1, 1, output.numel()).reshape(output.shape).bfloat16()
    (output * slopes.to(dtype).to(device)).sum().backward()
    return [one.detach().cpu().double() for one in (output, *(leaf.grad for leaf in leaves if leaf is not None))]


def _off(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [float(((a - b).abs() / (1 + b.abs().max())).max()) for a, b in zip(got, want, strict=True)]


def off(shape: tuple[int, ...], axes: int, weighted: bool, biased: bool, dtype: torch.dtype) -> list[list[float]]:
    """How far layer norms under SPMD, and torch's own in fp32, are from fp64 on the CPU."""
    fabric: Any = new_fabric({})
    fabric.setup(torch.nn.LayerNorm(8))
    torch.manual_seed(1)
    of = shape[-axes:]
    # far from 0, where rounding shows; and exact in bf16, so that only what is computed can differ
    x, weight, bias = (torch.randn(shape) * 3 + 20).bfloat16(), torch.rand(of) + 0.5, torch.randn(of)
    given = [x, weight.bfloat16() if weighted else None, bias.bfloat16() if biased else None]
    want = normed("cpu", torch.float64, given, axes)
    got = normed(fabric.device, dtype, given, axes), normed("cpu", torch.float32, given, axes)
    return [_off(one, want) for one in got]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_torchs(spmd: LaunchingSPMD, case: str, dtype: torch.dtype) -> None:
    ours, torchs = spmd.call(4, off, *CASES[case], dtype)
    bound = BF16_ROUNDING if dtype == torch.bfloat16 else FP32_TOLERANCE
    # far from 0, and of one element, torch's own rounding is larger than that
    assert all(one <= max(bound, 2 * its) for one, its in zip(ours, torchs, strict=True)), ours
