"""Operators that need their input on the host, for ranks that are threads on XLA's CPU client.

``.item()``, indexing with a boolean mask, ``torch.unique`` and the like fetch their input inside torch, where each rank
would compile and run separately what it has recorded so far. Here they fetch it through ``Tensor.cpu``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

__all__ = ["operators_on_the_host"]

_OPERATORS = (
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "histc",
    "masked_select",
    "median",
    "median.dim",
    "multinomial",
    "nonzero",
    "repeat_interleave.Tensor",
    "unique_consecutive",
    "unique_dim",
    "view_copy.dtype",  # torch_xla has none: its fallback counts what it does in a map that threads can't share
)


@contextmanager
def operators_on_the_host() -> Iterator[None]:
    """Context in which these operators get their input through ``Tensor.cpu``, on every thread."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the operator is already registered
        for name in _OPERATORS:
            library.impl(name, _on_the_host(name), "XLA", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _on_the_host(name: str) -> Callable[..., Any]:
    name, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, name), overload or "default")

    def compute(*args: Any, **kwargs: Any) -> Any:
        device = next(arg.device for arg in args if isinstance(arg, Tensor) and arg.device.type == "xla")
        args, kwargs = apply_to_collection((args, kwargs), Tensor, lambda tensor: tensor.cpu())
        return apply_to_collection(operator(*args, **kwargs), Tensor, lambda tensor: tensor.to(device))

    return compute
