"""How the suite checks refusals: error messages that say what was requested, why it fails and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fsdp_core.sharding.sharded import Sharded
from fsdp_core.testing.state import full_state

__all__ = ["assert_says", "assert_unchanged", "refusal", "result_or_refusal", "was_refused"]

T = TypeVar("T")

_INSTEAD = "instead of a refusal:"


def refusal(error: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> str:
    """Return the exception that a call raises as text for :func:`assert_says`, which a rank can always return.

    Example:
        >>> refusal(ValueError, lambda: int("x"))
        "invalid literal for int() with base 10: 'x'"
        >>> refusal(TypeError, lambda: int("x"))
        "instead of a refusal: ValueError: invalid literal for int() with base 10: 'x'"
    """
    try:
        call()
    except error as expected_error:
        return str(expected_error)
    except Exception as other_error:
        return f"{_INSTEAD} {type(other_error).__name__}: {other_error}"
    return f"{_INSTEAD} nothing was raised"


def result_or_refusal(error: type[Exception] | tuple[type[Exception], ...], work: Callable[[], T]) -> T | str:
    """Return a function's result; or the exception that it raises with its notes, as text for :func:`assert_says`.

    Example:
        >>> result_or_refusal(ValueError, lambda: int("7")), result_or_refusal(ValueError, lambda: int("x"))
        (7, "invalid literal for int() with base 10: 'x'")
    """
    try:
        return work()
    except error as expected_error:
        return "\n".join([str(expected_error), *getattr(expected_error, "__notes__", ())])
    except Exception as other_error:
        return f"{_INSTEAD} {type(other_error).__name__}: {other_error}"


def was_refused(message: str) -> bool:
    """Whether a text from :func:`refusal` is a refusal."""
    return not message.startswith(_INSTEAD)


def assert_says(message: str, *words: str) -> None:
    """Assert that a text is a refusal and contains all parts: what was requested, why it fails, what to type next."""
    assert was_refused(message), message
    for word in words:
        assert word in message, f"{word!r} is not in:\n{message}"


def assert_unchanged(strategy: Any, before: Mapping[str, Tensor], sharded: Sharded | None = None) -> None:
    """Assert that a refusal has left the module unchanged. All ranks must call it.

    Args:
        strategy: The strategy of a Trainer or Fabric.
        before: The full state by name, from before the call.
        sharded: The root; the only one when ``None``.
    """
    state_after = full_state(strategy, sharded)
    assert state_after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(state_after[name], tensor), f"{name} was changed by what was refused"
