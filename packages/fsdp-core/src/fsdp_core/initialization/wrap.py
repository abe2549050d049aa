"""``wrap``: marks a module as an FSDP unit where the model is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp.wrap import enable_wrap
from torch.distributed.tensor import DTensor

from fsdp_core.errors import ShardingError
from fsdp_core.torch_private.modules import is_flattened

__all__ = ["mark_by_torch_wrap", "marked", "options_of", "wrap"]

M = TypeVar("M", bound=nn.Module)

_MARK = "_fsdp_core_unit"

_when_marked: ContextVar[Callable[[nn.Module], None] | None] = ContextVar("_when_marked", default=None)
_by_torch_wrap: ContextVar[bool] = ContextVar("_by_torch_wrap", default=False)


def wrap(module: M) -> M:
    """Mark a module as an FSDP unit: its parameters are unsharded, used and resharded together.

    Call it where the model is built: in ``__init__``, in ``configure_model``, or under Fabric before ``setup``. Marked
    modules replace the units that ``auto_wrap_policy="auto"`` would choose; a policy of your own adds to them. Under
    strategies that don't shard, such as DDP or a single device, the mark has no effect.

    Args:
        module: A module that is called itself.

    Returns:
        The same module.

    Raises:
        ShardingError: The module is already sharded, or it is not a module, or it is a container that is never called.

    Example:
        >>> block = wrap(nn.Linear(4, 4))
        >>> type(block).__name__
        'Linear'
    """
    if not isinstance(module, nn.Module):
        raise ShardingError(f"wrap() got a {type(module).__name__}.\nGive it a module: wrap(MyBlock(...)).")
    if any(isinstance(p, DTensor) or is_flattened(p) for p in module.parameters()):
        raise ShardingError(
            f"wrap({type(module).__name__}) comes too late: its parameters are sharded already.\n"
            "Call it where the model is built: in __init__ or configure_model, or before fabric.setup()."
        )
    return _mark(module)


@contextmanager
def mark_by_torch_wrap() -> Iterator[None]:
    """Make torch's ``wrap`` mark modules too, with the options passed to it. Has no effect when nested."""
    if _by_torch_wrap.get():  # torch's enable_wrap can't be nested
        yield
        return
    token = _by_torch_wrap.set(True)
    try:
        with enable_wrap(wrapper_cls=_mark):
            yield
    finally:
        _by_torch_wrap.reset(token)


@contextmanager
def when_marked(callback: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call ``callback`` with each module that is marked in this context, by this thread."""
    token = _when_marked.set(callback)
    try:
        yield
    finally:
        _when_marked.reset(token)


def marked(root: nn.Module) -> list[nn.Module]:
    """The modules inside ``root`` that were marked."""
    return [m for m in root.modules() if m is not root and _MARK in m.__dict__]


def options_of(module: nn.Module) -> Mapping[str, Any]:
    """The options that torch's ``wrap`` was passed for a module, beyond the strategy's own options."""
    options: Mapping[str, Any] = module.__dict__.get(_MARK, {})
    return options


def _mark(module: M, **options: Any) -> M:
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise ShardingError(
            f"wrap() got a {type(module).__name__}, which is never called itself.\nWrap its members instead."
        )
    module.__dict__[_MARK] = options
    callback = _when_marked.get()
    if callback is not None:
        callback(module)
    return module
