"""Sums of DTensors that wait for a reduction, which torch got wrong; and whether a loss is parallel."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch.utils
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._ops import _math_ops, _pointwise_ops

__all__ = ["is_loss_parallel"]


def _correct_sums_of_partials() -> None:
    """Let DTensors that wait for a reduction be reduced before they are added or multiplied, where it matters.

    Before torch 2.11 or so, norms are added rank by rank before they are reduced, which only sums may be; a number that
    is added to a sum is added once for each rank; and a norm times a negative number is positive.
    """
    math, pointwise = cast("Any", _math_ops), cast("Any", _pointwise_ops)
    norm_class = getattr(math, "_NormPartial", None)
    if norm_class is None or not norm_class(2).is_partial("sum"):
        return  # this torch no longer takes a norm for a sum
    op_strategies: dict[Any, Any] = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    aten = torch.ops.aten

    def strategy(linearity: int, op_schema: Any) -> Any:
        # linearity is torch's number: 1 for an addition, 2 for a multiplication, -1 to reduce arguments first
        args_placements = [
            arg.strategies[0].output_spec.placements for arg in op_schema.args_schema if hasattr(arg, "strategies")
        ]
        waits = any(placement.is_partial() for placements in args_placements for placement in placements)
        is_norm = any(isinstance(placement, norm_class) for placements in args_placements for placement in placements)
        is_linear = not is_norm and (linearity == 2 or len(args_placements) == 2)  # a sum of two DTensors
        if waits and not is_linear and op_schema.is_inplace_op():
            raise RuntimeError(
                f"{op_schema.op} on a DTensor that waits for a reduction is wrong in torch {torch.__version__}: "
                "write total = total + norm, without an operation in place."
            )
        return pointwise.pointwise_strategy(op_schema, linearity=linearity if is_linear else -1)

    for op, linearity in ((aten.add, 1), (aten.add_, 1), (aten.mul, 2), (aten.mul_, 2)):
        op_strategies[op.Tensor] = partial(strategy, linearity)


_correct_sums_of_partials()


def is_loss_parallel() -> bool:
    """Whether torch's ``loss_parallel()`` is on. The end of a nested one ends the outer one too."""
    return torch.ops.aten.nll_loss_forward.default in DTensor._op_dispatcher._custom_op_handlers
