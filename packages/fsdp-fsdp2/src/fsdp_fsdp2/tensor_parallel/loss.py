"""Loss parallelism: cross entropy over logits whose vocabulary is divided among tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fsdp_core import UnsupportedCapabilityError
from fsdp_fsdp2.torch_private.tensor_parallel import is_loss_parallel

__all__ = ["check_loss_parallel", "with_parallel_loss"]


def check_loss_parallel(option: object) -> None:
    """Refuse what is neither true nor false.

    Raises:
        UnsupportedCapabilityError: It is something else.
    """
    if not isinstance(option, bool):
        raise UnsupportedCapabilityError(
            f"loss_parallel={option!r} is not known to 'fsdp2'.\n"
            "Write True or False; tp_plan says which layer keeps its vocabulary divided."
        )


@contextmanager
def with_parallel_loss(enabled: bool = True) -> Iterator[None]:
    """A context in which cross entropy is computed over sharded logits, without gathering them.

    It is torch's :func:`~torch.distributed.tensor.parallel.loss_parallel`, with three differences: it may be nested, an
    exception ends it, and losses, which are the same on all ranks, become plain tensors, which can be logged and added
    to others. The backward pass must run in such a context too.

    Args:
        enabled: Whether to do anything.
    """
    if not enabled:
        yield
        return
    with _in_loss_parallel(), _PlainLosses():
        yield


@contextmanager
def _in_loss_parallel() -> Iterator[None]:
    if is_loss_parallel():  # as in a backward pass inside of a training step
        yield
        return
    context = loss_parallel()
    context.__enter__()
    try:
        yield
    finally:
        if is_loss_parallel():  # the user's own may have ended it
            context.__exit__(None, None, None)  # as without an exception, on which torch's would leave it on


class _PlainLosses(TorchFunctionMode):
    """Makes plain tensors of the losses that are DTensors with the same value on every rank."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        loss = func(*args, **(kwargs or {}))
        # looked up in each call: context parallelism replaces these functions
        is_loss = func is functional.cross_entropy or func is functional.nll_loss
        if is_loss and isinstance(loss, DTensor) and all(isinstance(p, Replicate) for p in loss.placements):
            return loss.to_local().clone()  # fully_shard warns about a view that a root returns
        return loss
