"""What an optimizer does over whole parameters in one process, and what no rank could do alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.sharding.observed_communication import Communicates
from fsdp_core.sharding.optimizer_trial.copies import requires_closure, takes_closure
from fsdp_core.sharding.optimizer_trial.courses import Ran, course, ends_alike
from fsdp_core.sharding.optimizer_trial.small_tensors import Kind, as_it_is

__all__ = ["DIFFERENTIATES", "stepped_whole"]

#: The losses of a trial that looks whether they matter: rising and falling, as no two of them are alike.
_VARIED = (8.0, 3.0, 5.0, 0.1)

#: What is said of optimizers that need gradients with a graph.
DIFFERENTIATES = (
    "differentiates gradients once more, and those of shards know nothing of how they were computed. Use another "
    "optimizer, such as AdamW."
)


def stepped_whole(
    optimizer: torch.optim.Optimizer,
    kinds: Mapping[nn.Parameter, Kind],
    doing: Callable[[str], None],
    *,
    is_torchs: bool,
) -> tuple[Ran | None, Exception | None]:
    """Let a copy of an optimizer step over whole small tensors.

    It steps with a closure only if it has to.

    Args:
        optimizer: The optimizer. It is not changed.
        kinds: What represents its parameters.
        doing: Called with what is tried from now on.
        is_torchs: Whether it is one of torch's, whose closures are known.

    Returns:
        Its steps; or why it fails there too.

    Raises:
        OptimizerMismatchError: Its steps depend on losses or on random numbers, or differentiate, or communicate.
    """
    name = type(optimizer).__name__
    doing("its steps over whole parameters")
    by_closure, can_close = requires_closure(optimizer), takes_closure(optimizer)
    try:
        whole = course(optimizer, kinds, as_it_is, by_closure=by_closure)
    except Communicates:
        raise OptimizerMismatchError(
            f"{name} communicates in its step, as if every process had whole parameters: it expects to run without "
            "sharding, and would wait for ranks that do something else.\n"
            "Use one for a single device instead, such as torch.optim.Muon; or another optimizer, such as AdamW."
        ) from None
    except Exception as raised:
        if "does not require grad" in str(raised):
            raise OptimizerMismatchError(f"{name} {DIFFERENTIATES}") from None
        if by_closure or not can_close:
            return None, raised
        try:  # it says that it can do without, and can't
            whole = course(optimizer, kinds, as_it_is, by_closure=True)
        except Exception:
            return None, raised
    if whole.drew:
        doing("whether its steps depend on random numbers")
        other = course(optimizer, kinds, as_it_is, by_closure=whole.by_closure, seed=1)
        if not ends_alike(whole, other):
            raise OptimizerMismatchError(
                f"{name} draws random numbers in its step, and ranks would draw others for their shards than one "
                "process does for whole parameters.\nUse an optimizer that draws none, such as AdamW."
            )
    if not can_close or is_torchs:
        return whole, None
    doing("whether its steps depend on the loss")
    try:
        varied = course(optimizer, kinds, as_it_is, by_closure=True, losses=_VARIED)
        if ends_alike(whole, varied):
            return whole, None
        level = whole if whole.by_closure else course(optimizer, kinds, as_it_is, by_closure=True)
    except Exception:  # it fails with a closure
        return whole, None
    if not ends_alike(level, varied):
        raise OptimizerMismatchError(
            f"{name} scales its steps by the loss that its closure returns, and each rank has the loss of its own part "
            "of the batch: ranks would make different steps of one.\n"
            "Use an optimizer that does not look at the loss, such as AdamW."
        )
    return whole, None
