"""What stands in a state dict for a tensor that the checkpoint leaves out, where a plain module loads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.state.digests import digest_of
from fsdp_core.state.saved_tensor import SavedTensor

__all__ = ["InBase", "stand_in_for"]

#: What may be asked of it: it has no values.
_FACTS = ("shape", "dtype", "device", "layout", "requires_grad", "is_meta", "is_sparse", "is_quantized", "is_nested")


class InBase(Tensor):
    """A tensor without values. Copied into a tensor that has the values which were saved, it leaves that as it is.

    So ``load_state_dict`` of a module that was built from the base succeeds, and that of another module fails.
    """

    saved: SavedTensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func is Tensor.copy_ and isinstance(args[1], InBase):
            args[1]._compare_with(args[0])
            return args[0]
        getter = getattr(func, "__self__", None)  # a property's __get__ belongs to it
        is_fact = getattr(getter, "__name__", None) in _FACTS or name in ("size", "dim", "numel", "is_floating_point")
        if is_fact or name in ("is_complex", "element_size", "__len__", "__hash__"):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        stand_in = next(value for value in args if isinstance(value, InBase))
        stand_in.saved.full()  # raises, and says what to type
        raise AssertionError

    def _compare_with(self, target: Tensor) -> None:
        with torch.no_grad():
            own_digest = digest_of(target.detach().to(self.saved.dtype))
        if own_digest != self.saved.digest:
            raise CheckpointMismatchError(
                f"the checkpoint was saved without what was not trained, and this module has another base: "
                f"{self.saved.key!r} has other values in it than in the run that saved ({own_digest} and not "
                f"{self.saved.digest}). Build the module from the base that the run began with, before it is restored."
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"InBase({self.saved.key!r})"


def stand_in_for(saved: SavedTensor, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what stands for a left-out tensor in a state dict.

    Args:
        saved: The handle that a load has returned.
        move: Moves a tensor to the device that the state dict is loaded to.
    """
    stand_in = move(torch.zeros((), dtype=saved.dtype)).expand(saved.shape).as_subclass(InBase)
    stand_in.saved = saved
    return stand_in
