"""How far layer norms under SPMD, and torch's own in fp32, are from fp64 on the CPU: outputs and gradients."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

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


def main(out: str) -> None:
    from spmd_runs import new_fabric

    fabric: Any = new_fabric({})
    fabric.setup(torch.nn.LayerNorm(8))
    found = {}
    for name, (shape, axes, weighted, biased) in CASES.items():
        torch.manual_seed(1)
        of = shape[-axes:]
        # far from 0, where rounding shows; and exact in bf16, so that only what is computed can differ
        x, weight, bias = (torch.randn(shape) * 3 + 20).bfloat16(), torch.rand(of) + 0.5, torch.randn(of)
        given = [x, weight.bfloat16() if weighted else None, bias.bfloat16() if biased else None]
        want = normed("cpu", torch.float64, given, axes)
        found[name, "torch"] = _off(normed("cpu", torch.float32, given, axes), want)
        for dtype in (torch.float32, torch.bfloat16):
            got = normed(fabric.device, dtype, given, axes)
            found[name, str(dtype)] = _off(got, want)
    torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
