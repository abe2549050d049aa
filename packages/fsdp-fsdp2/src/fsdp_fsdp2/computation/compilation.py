"""torch.compile, unit by unit, before sharding; and the share of activations that compiled units keep."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_core import ShardingError, UnsupportedCapabilityError
from fsdp_core.state import unwrap_compiled
from fsdp_fsdp2.torch_private.compilation import BudgetedCompiler

__all__ = ["CompiledForward", "check_compile", "compile_units", "described_compile"]

#: The keywords of :func:`torch.compile`: all its parameters but the first, the model.
_KEYWORDS = tuple(inspect.signature(torch.compile).parameters)[1:]

#: The backends that choose by a memory budget what they keep for the backward pass.
_BUDGETED = ("inductor", "aot_eager", "aot_eager_decomp_partition")


def check_compile(compile: object, budget: object) -> dict[str, Any] | None:
    """Read the options ``compile`` and ``activation_memory_budget``.

    Args:
        compile: Whether to compile, or keywords of :func:`torch.compile`.
        budget: The share of activations that is kept, between 0 and 1; ``None`` for what the compiler chooses.

    Returns:
        The keywords; ``None`` if nothing is compiled.

    Raises:
        UnsupportedCapabilityError: A value is not known, or the options contradict each other.
    """
    if not isinstance(compile, bool | Mapping):
        raise UnsupportedCapabilityError(
            f"compile={compile!r} is not known to 'fsdp2'.\n"
            "Write compile=True, or a dict of torch.compile's keywords, such as {'mode': 'max-autotune-no-cudagraphs'}."
        )
    keywords = described_compile(compile)
    unknown = [name for name in keywords or () if name not in _KEYWORDS]
    if unknown:
        raise UnsupportedCapabilityError(
            f"compile has {', '.join(map(repr, unknown))}, which torch.compile does not take.\n"
            f"Its keywords are {', '.join(_KEYWORDS)}."
        )
    backend = (keywords or {}).get("backend", "inductor")
    if isinstance(backend, str) and "backend" in (keywords or {}):
        backends = torch.compiler.list_backends(exclude_tags=())
        if backend not in backends:
            raise UnsupportedCapabilityError(
                f"compile has backend={backend!r}, which is none of torch's.\nWrite one of {', '.join(backends)}."
            )
    if budget is not None:
        _check_budget(budget, keywords, backend)
    return keywords


def described_compile(compile: object) -> dict[str, Any] | None:
    """The keywords that the option stands for, as plain data; ``None`` if nothing is compiled."""
    if isinstance(compile, Mapping):
        return dict(compile)
    return {} if compile else None


def _check_budget(budget: object, keywords: dict[str, Any] | None, backend: object) -> None:
    if type(budget) not in (int, float) or not 0 <= budget <= 1:  # type: ignore[operator]
        raise UnsupportedCapabilityError(
            f"activation_memory_budget={budget!r} is no share of the activations.\n"
            "Write a number from 0 (recompute all that can be) to 1 (keep what the compiler would keep)."
        )
    if keywords is None:
        raise UnsupportedCapabilityError(
            f"activation_memory_budget={budget!r} is for compiled units: it is torch's compiler that chooses what to "
            "recompute.\nAdd compile=True, or write activation_checkpointing_policy instead."
        )
    if backend not in _BUDGETED:
        raise UnsupportedCapabilityError(
            f"activation_memory_budget={budget!r} has no effect on the backend {backend!r} of torch.compile.\n"
            f"Write one of {', '.join(map(repr, _BUDGETED))}, or leave the budget out."
        )


class CompiledForward:
    """A module's ``forward``, compiled. A copy and a pickle of it are the original ``forward``.

    ``fully_shard``'s hooks stay outside of what is compiled. ``module.compile()`` would include them, and compiles
    nothing at all in a module that recomputes its activations.

    Args:
        forward: The module's ``forward``.
        keywords: Those of :func:`torch.compile`.
    """

    def __init__(self, forward: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
        self.original = forward
        self._compiled = torch.compile(forward, **keywords)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _return_original, (self.original,)


def _return_original(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def compile_units(
    root: nn.Module, units: Sequence[nn.Module], keywords: Mapping[str, Any] | None, budget: float | None
) -> None:
    """Compile the ``forward`` of each unit. Names and classes of modules don't change.

    Args:
        root: The module that holds the units.
        units: The units.
        keywords: Those of :func:`torch.compile`; ``None`` to compile nothing.
        budget: The share of the activations that is kept; ``None`` for what the compiler chooses.

    Raises:
        ShardingError: There are no units, or the user has compiled one.
    """
    if keywords is None:
        return
    if not units:
        raise ShardingError(
            f"compile compiles units, and {type(root).__name__} has none but itself.\n"
            "Name the class of its blocks with auto_wrap_policy={MyBlock}, or compile the parts of the model yourself."
        )
    compiled_ids = {id(unwrap_compiled(m)) for m in root.modules() if unwrap_compiled(m) is not m}
    for unit in units:
        compiled_inside = [m for m in unit.modules() if id(m) in compiled_ids or is_compiled_in_place(m)]
        if compiled_inside:
            raise ShardingError(
                f"compile would compile a {type(unit).__name__}, in which a {type(compiled_inside[0]).__name__} is "
                "compiled already.\nLeave out either the option compile, or torch.compile in the model."
            )
    if budget is not None:
        other_keywords = {name: keywords[name] for name in keywords if name not in ("backend", "mode", "options")}
        backends_keywords = {name: keywords.get(name) for name in ("mode", "options", "dynamic")}
        backend = BudgetedCompiler(budget, keywords.get("backend", "inductor"), **backends_keywords)
        keywords = {**other_keywords, "backend": backend}
    for unit in units:
        unit.forward = CompiledForward(unit.forward, keywords)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module.__dict__.get("_compiled_call_impl") is not None
