"""Checks of units and of their ``wrap`` options, before FSDP1 sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from fsdp_core import ShardingError, UnsupportedCapabilityError
from fsdp_core.sharding import options_of
from fsdp_core.state import clean_name
from fsdp_cuda_native.options import check_mixed_precision, parse_member

__all__ = ["check_not_wrapped", "check_unit", "unit_options"]

#: Options that ``wrap`` may set for one unit. FSDP1 requires the others to be the same in all units.
UNIT_OPTIONS = ("mixed_precision", "backward_prefetch", "forward_prefetch")


def unit_options(name: str, module: nn.Module) -> dict[str, Any]:
    """The ``wrap`` options of one module, as ``FullyShardedDataParallel`` takes them.

    Args:
        name: The module's name, for messages.
        module: The module. Without ``wrap`` it has no options.

    Raises:
        UnsupportedCapabilityError: An option can't be set per unit, or its value is invalid.
    """
    options = dict(options_of(module))
    unknown = [option for option in options if option not in UNIT_OPTIONS]
    if unknown:
        raise UnsupportedCapabilityError(
            f"wrap({name}, {unknown[0]}=...): 'fsdp_native' takes {unknown[0]} for the whole model.\n"
            f"Give it to the strategy. A unit of its own can have: {', '.join(UNIT_OPTIONS)}."
        )
    check_mixed_precision(options.get("mixed_precision"))
    if options.get("backward_prefetch") is not None:
        options["backward_prefetch"] = parse_member("backward_prefetch", BackwardPrefetch, options["backward_prefetch"])
    return options


def check_unit(
    root: nn.Module,
    unit: nn.Module,
    unit_modules: Sequence[nn.Module],
    replicated: Sequence[nn.Parameter],
    *,
    use_orig_params: bool,
) -> None:
    """Refuse a unit whose parameters can't be flattened into one.

    Args:
        root: The module that holds the unit, for names.
        unit: The unit.
        unit_modules: Its modules that are in no other unit.
        replicated: Parameters that are not flattened.
        use_orig_params: Whether optimizers hold the original parameters.

    Raises:
        ShardingError: Parameters are integers or complex, or differ in dtype; or, without ``use_orig_params``, only
            some of them are trainable.
    """
    own_ids = {id(p) for m in unit_modules for p in m.parameters(recurse=False)}
    flattened_ids = own_ids - {id(p) for p in replicated}
    named = [(name, p) for name, p in unit.named_parameters() if id(p) in flattened_ids]
    integers = [p for _, p in named if not (p.is_floating_point() or p.is_complex())]
    if integers:
        dtype = integers[0].dtype
        name = next(clean_name(name) for name, p in root.named_parameters() if p is integers[0])
        raise ShardingError(
            f"{name!r} of {type(unit).__name__} is in {dtype}, and FSDP1 flattens no integers.\n"
            "Use strategy='fsdp2', which shards frozen integer parameters as they are; or keep it whole on every rank, "
            "with ignored_states=[parameter] or as a buffer."
        )
    if any(p.is_complex() for _, p in named):
        name = next(clean_name(name) for name, p in root.named_parameters() if p.is_complex())
        raise ShardingError(
            f"{name!r} of {type(unit).__name__} is complex, and FSDP1 flattens no complex parameters.\n"
            "Use strategy='fsdp2', with auto_wrap_policy={ItsModule}, which makes a unit of it; or keep "
            "torch.view_as_real(values) as the parameter, and compute with torch.view_as_complex(parameter)."
        )
    example_by_dtype = {p.dtype: name for name, p in named}
    if len(example_by_dtype) > 1:
        listing = ", ".join(f"{name!r} in {dtype}" for dtype, name in example_by_dtype.items())
        raise ShardingError(
            f"one unit of sharding, {type(unit).__name__}, holds parameters of several dtypes: {listing}.\n"
            "Convert them to one dtype, or make units of them that hold one each, with auto_wrap_policy."
        )
    example_by_requires_grad = {p.requires_grad: name for name, p in named}
    if len(example_by_requires_grad) > 1 and not use_orig_params:
        trained, frozen = example_by_requires_grad[True], example_by_requires_grad[False]
        raise ShardingError(
            f"one unit of sharding, {type(unit).__name__}, holds trainable parameters ({trained!r}) and frozen "
            f"ones ({frozen!r}), which one flat parameter can't.\n"
            "Write use_orig_params=True, or make units of them that hold one kind each, with auto_wrap_policy."
        )


def check_not_wrapped(module: nn.Module) -> None:
    """Refuse a module that is already wrapped, or whose ``wrap`` options can't be set per unit.

    Raises:
        ShardingError: It contains a ``FullyShardedDataParallel``.
        UnsupportedCapabilityError: A ``wrap`` option can't be set per unit.
    """
    for name, submodule in module.named_modules():
        if isinstance(submodule, FSDP):
            raise ShardingError(
                f"{type(module).__name__} is already sharded: {name or 'the root'!r} is a FullyShardedDataParallel.\n"
                "Write fsdp_core.wrap(module) instead of FullyShardedDataParallel(module, ...), or leave both out "
                "and give the strategy auto_wrap_policy={MyBlock}."
            )
        unit_options(name, submodule)
