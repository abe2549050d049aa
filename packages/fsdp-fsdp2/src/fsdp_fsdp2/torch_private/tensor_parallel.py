"""What torch's tensor parallelism lacks, and what it does not say."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch.utils
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._ops import _math_ops, _pointwise_ops

__all__ = ["is_loss_parallel"]


def _add_rightly() -> None:
    """Let DTensors that wait for a reduction be added up as they are, before torch 2.11 or so.

    Until then, norms are added rank by rank before they are reduced, as only sums may be, a number that is added to a
    sum is added once for each rank, and a norm times a negative number is positive.
    """
    math, pointwise = cast("Any", _math_ops), cast("Any", _pointwise_ops)
    of_norms = getattr(math, "_NormPartial", None)
    if of_norms is None or not of_norms(2).is_partial("sum"):
        return
    op_strategies: dict[Any, Any] = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    aten = torch.ops.aten

    def strategy(linearity: int, op_schema: Any) -> Any:
        args_placements = [
            each.strategies[0].output_spec.placements for each in op_schema.args_schema if hasattr(each, "strategies")
        ]
        waits = any(placement.is_partial() for placements in args_placements for placement in placements)
        is_norm = any(isinstance(placement, of_norms) for placements in args_placements for placement in placements)
        is_linear = not is_norm and (linearity == 2 or len(args_placements) == 2)
        if waits and not is_linear and op_schema.is_inplace_op():
            raise RuntimeError(
                f"{op_schema.op} on a DTensor that waits for a reduction is wrong in torch {torch.__version__}: "
                "write total = total + norm, without an operation in place."
            )
        return pointwise.pointwise_strategy(op_schema, linearity=linearity if is_linear else -1)

    for op, linearity in ((aten.add, 1), (aten.add_, 1), (aten.mul, 2), (aten.mul_, 2)):
        op_strategies[op.Tensor] = partial(strategy, linearity)


_add_rightly()


def is_loss_parallel() -> bool:
    """Whether torch's ``loss_parallel()`` is on. It does not nest: the end of an inner one ends the outer one."""
    return torch.ops.aten.nll_loss_forward.default in DTensor._op_dispatcher._custom_op_handlers
