"""The parameters that shards have replaced, which other references than the model's may still hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from fsdp_core.devices import IS_OF_KIND
from fsdp_core.errors import ShardingError
from fsdp_core.torch_private.tensors import without_torch_function

__all__ = ["ReplacedParameter", "mark_replaced"]


class ReplacedParameter(nn.Parameter):
    """A parameter of the unsharded model, after sharding: it has its shape, and refuses to be computed with.

    An optimizer that is rebound to shards later asks it for its shape. Any computation would be with memory that was
    freed, or with values that are not trained any more.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Allow what asks for a tensor's properties, and raise otherwise."""
        if func in _ALLOWED:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        _refuse_use(_find_replaced([args, kwargs]), getattr(func, "__name__", "") or str(func))

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedParameter:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_use(self, "pickling")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReplacedParameter of {self.__dict__.get(_NAME)!r}, which is sharded"


#: What an optimizer that is set up later, and torch, ask of a parameter without computing with it.
_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim"),
    *IS_OF_KIND,
)
_METHODS = (
    *("size", "dim", "numel", "nelement", "ndimension", "__len__", "__hash__"),
    *("is_floating_point", "is_complex", "element_size", "get_device", "untyped_storage"),
)
_ALLOWED: frozenset[Any] = frozenset(
    {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {getattr(Tensor, name) for name in _METHODS}
)

_NAME = "_fsdp_core_name"


def mark_replaced(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Let parameters that shards have replaced refuse to be computed with, for whoever still holds them.

    Args:
        parameters: Each with the name that it had in the model.

    Example:
        >>> import torch
        >>> old = nn.Parameter(torch.ones(2))
        >>> mark_replaced([("weight", old)])
        >>> old.shape
        torch.Size([2])
        >>> old.sum()
        Traceback (most recent call last):
            ...
        fsdp_core.errors.ShardingError: sum of 'weight', as it was before the model was sharded: ...
    """
    for name, parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = ReplacedParameter
            parameter.__dict__[_NAME] = name


def _find_replaced(values: Any) -> ReplacedParameter | None:
    """The first parameter among arguments, in containers too, that shards have replaced."""
    if isinstance(values, ReplacedParameter):
        return values
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            parameter = _find_replaced(value)
            if parameter is not None:
                return parameter
    return None


def _refuse_use(parameter: ReplacedParameter | None, action: str) -> NoReturn:
    name = None if parameter is None else parameter.__dict__.get(_NAME)
    raise ShardingError(
        f"{action} of {name!r}, as it was before the model was sharded: something outside the model's parameters, such "
        "as a list, a closure or a callback, has kept it, and its values are not trained any more.\n"
        f"Read it from its module each time (model.{name}), inside a forward pass of the unit that it belongs to; or "
        "register it a second time where it is used, as a tied parameter (self.other = linear.weight in __init__)."
    )
