"""The floating-point operations of a step's matrix products, convolutions and attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

__all__ = ["flops_of"]

_ATEN = torch.ops.aten

#: Operators without a formula of torch's, with one that has the same: CPUs have attention of their own.
_SAME_AS = {
    "_scaled_dot_product_flash_attention_for_cpu": _ATEN._scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _ATEN._scaled_dot_product_flash_attention_backward,
    "_scaled_dot_product_fused_attention_overrideable": _ATEN._scaled_dot_product_flash_attention,
}
_FORMULAS: dict[Any, Any] = {
    **flop_registry,
    **{getattr(_ATEN, name): flop_registry[same] for name, same in _SAME_AS.items() if hasattr(_ATEN, name)},
}


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """The floating-point operations of an operator's call, a product and a sum being two; 0 of those that are cheap.

    By torch's own formulas (:mod:`torch.utils.flop_counter`), of shapes.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Those that were given by keyword.
        result: What it has returned.

    Example:
        >>> x, w = torch.ones(2, 3), torch.ones(3, 5)
        >>> flops_of(torch.ops.aten.mm.default, (x, w), {}, x @ w)
        60
    """
    formula = _FORMULAS.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
