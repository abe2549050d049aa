"""What one flat parameter can't be made of, found before FSDP1 tries."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_core.errors import ShardingError

__all__ = ["UNIT_OPTIONS", "check_unit"]

#: Options that torch's ``wrap`` may give to one unit.
UNIT_OPTIONS = ("mixed_precision", "backward_prefetch", "forward_prefetch", "limit_all_gathers")


def check_unit(
    unit: nn.Module, own: Sequence[nn.Module], whole: Sequence[nn.Parameter], *, use_orig_params: bool
) -> None:
    """Refuse a unit whose parameters can't be flattened into one.

    Args:
        unit: The unit.
        own: Its modules that are in no other unit.
        whole: Parameters that stay out of it.
        use_orig_params: Whether parameters remain the optimizer's.

    Raises:
        ShardingError: They differ in dtype; or, without ``use_orig_params``, only some of them are trainable.
    """
    out = {id(p) for p in whole}
    inside = {id(p) for m in own for p in m.parameters(recurse=False)} - out
    named = [(name, p) for name, p in unit.named_parameters() if id(p) in inside]
    by_dtype = {p.dtype: name for name, p in named}
    if len(by_dtype) > 1:
        told = ", ".join(f"{name!r} in {dtype}" for dtype, name in by_dtype.items())
        raise ShardingError(
            f"one unit of sharding, {type(unit).__name__}, holds parameters of several dtypes: {told}.\n"
            "Convert them to one dtype, or make units of them that hold one each, with auto_wrap_policy."
        )
    by_grad = {p.requires_grad: name for name, p in named}
    if len(by_grad) > 1 and not use_orig_params:
        raise ShardingError(
            f"one unit of sharding, {type(unit).__name__}, holds trainable parameters ({by_grad[True]!r}) and frozen "
            f"ones ({by_grad[False]!r}), which one flat parameter can't.\n"
            "Write use_orig_params=True, or make units of them that hold one kind each, with auto_wrap_policy."
        )
