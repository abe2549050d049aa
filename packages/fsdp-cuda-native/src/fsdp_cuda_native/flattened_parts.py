"""Parts of units under ``use_orig_params=False``: FSDP1 leaves modules inside a unit without own parameters.

A *part* is a module inside a unit that is no unit. Its parameters are in the unit's flat parameter. While the unit is
freed, the part has none, and holds views whose memory is freed as plain attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from types import MethodType
from typing import Any, NamedTuple, NoReturn, cast

from torch import Tensor, nn

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.sharding import outside_of_compilation, without_torch_function

__all__ = ["RunningCalls", "refuse_parts", "refuse_use_while_freed"]

#: The attribute of a part with its :class:`_Lacking`.
_LACKING = "_fsdp_cuda_native_lacking"

_INSTEAD = (
    "Leave use_orig_params=False out; or let it be a unit of its own, with auto_wrap_policy; or loop over the "
    "parameters of the whole model, or of units. For values, read within fsdp_core.gathered(module)."
)


class RunningCalls:
    """Counts the running calls of parts and units: the model's own ``forward()`` may loop over their parameters.

    Attributes:
        depth: How many are running, one inside the other.
    """

    def __init__(self) -> None:
        self.depth = 0

    def count_calls(self, module: nn.Module) -> None:
        """Count the running calls of a module."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    @outside_of_compilation
    def _begin(self, *_: Any) -> None:
        self.depth += 1

    @outside_of_compilation
    def _end(self, *_: Any) -> None:
        self.depth -= 1


class _Lacking(NamedTuple):
    """What a part lacks.

    Attributes:
        name: The user's name of the part.
        parameters: The part's parameters in the unit's flat parameter, each by its module and its name there.
        running: The calls during which the part may lack them.
    """

    name: str
    parameters: Sequence[tuple[nn.Module, str]]
    running: RunningCalls


def refuse_parts(part: nn.Module, name: str, lacking: Sequence[tuple[nn.Module, str]], running: RunningCalls) -> None:
    """Refuse to loop over a part's parameters, of which FSDP1 leaves none, and to freeze them: nothing would happen.

    Args:
        part: The part.
        name: The user's name of the part.
        lacking: Each parameter of the part that is in a unit's flat parameter, by its module and its name there.
        running: The running calls of parts and units. During these nothing is refused.
    """
    running.count_calls(part)
    part.__dict__[_LACKING] = _Lacking(name, lacking, running)
    part.__dict__["requires_grad_"] = partial(_refuse_freezing, name)
    part.__dict__["named_parameters"] = MethodType(_named_parameters, part)  # which parameters() and zero_grad() call


def _named_parameters(
    self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    lacking: _Lacking = self.__dict__[_LACKING]
    absent = [
        attribute
        for owner, attribute in lacking.parameters
        # within gathered() and as_user_wrote() parameters are there
        if (recurse or owner is self) and attribute not in owner._parameters
    ]
    if absent and not lacking.running.depth:
        raise UnsupportedCapabilityError(
            f"parameters() of {lacking.name!r} would lack {absent[0]!r}, and what loops over them would leave that "
            f"out: it is a part of a flat parameter of a module around it.\n{_INSTEAD}"
        )
    return type(self).named_parameters(self, prefix, recurse, remove_duplicate)


def _refuse_freezing(name: str, requires_grad: bool = True) -> NoReturn:
    raise UnsupportedCapabilityError(
        f"requires_grad_() of {name!r} would freeze or unfreeze a part of a flat parameter, which is trained as a "
        "whole or not at all.\n"
        "Leave use_orig_params=False out; or let it be a unit of its own, with auto_wrap_policy."
    )


#: Methods and attributes that need no memory: they stay allowed on a view whose memory is freed.
_SAFE_METHODS = frozenset(
    {"size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex", "ndimension", "nelement"}
    | {"requires_grad_", "get_device", "__len__", "__hash__", "untyped_storage", "data_ptr", "storage_offset"}
)
_SAFE_ATTRIBUTES = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "_version"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "itemsize", "nbytes"),
    )
)


class _FreedView:
    """A view of a flat parameter, which a module still holds in place of its parameter when the memory is freed.

    torch ends the process if something is computed with it then.
    """

    _fsdp_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            is_safe = func in _SAFE_ATTRIBUTES or getattr(func, "__name__", "") in _SAFE_METHODS
            views = () if is_safe else _views_in((args, kwargs or {}))
            for view in views:
                tensor = cast("Tensor", view)
                if tensor.numel() and not tensor.untyped_storage().size():
                    raise UnsupportedCapabilityError(
                        f"{view._fsdp_name!r} was used outside of the forward() of the unit that it belongs to: it is "
                        f"a part of a flat parameter, whose memory is freed there.\n{_INSTEAD}"
                    )
            return func(*args, **(kwargs or {}))


@cache
def _freed_class(tensor_class: type[Tensor]) -> type[Tensor]:
    return type("FreedView", (_FreedView, tensor_class), {})


def _views_in(values: Any) -> Iterator[_FreedView]:
    if isinstance(values, _FreedView):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _views_in(value)
    elif isinstance(values, Mapping):
        yield from _views_in(list(values.values()))


def refuse_use_while_freed(view: Tensor, name: str) -> None:
    """Refuse from now on to compute with a view while its memory is freed, on which torch would crash.

    Args:
        view: The view, which a module holds in place of a parameter.
        name: The user's name of the parameter.
    """
    instance: Any = view
    if not isinstance(view, _FreedView):
        instance.__class__ = _freed_class(type(view))
        instance._fsdp_name = name
