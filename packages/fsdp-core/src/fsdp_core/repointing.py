"""Letting an optimizer that was built over unsharded parameters hold the sharded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.parts import Layout, Part

__all__ = ["repoint"]


def repoint(
    optimizer: torch.optim.Optimizer, sharded: Callable[[nn.Parameter], nn.Parameter | None], layout: Layout
) -> torch.optim.Optimizer:
    """Let an optimizer that was built over the unsharded parameters hold the sharded ones, in place.

    Args:
        optimizer: The optimizer; it must not have stepped yet if it has to be changed.
        sharded: The sharded parameter for a parameter, which may be that itself; ``None`` for a foreign one.
        layout: What each sharded parameter has of the user's.

    Raises:
        OptimizerMismatchError: A parameter is foreign, or the optimizer has stepped over unsharded parameters, or
            parameters that share a sharded one are not all in the same group, or the optimizer would look at shapes
            that are not those that the user wrote.
    """
    groups: list[list[nn.Parameter]] = []
    counts: dict[nn.Parameter, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        now: dict[nn.Parameter, None] = {}
        for parameter in group["params"]:
            target = sharded(parameter)
            if target is None:
                raise OptimizerMismatchError(
                    f"param group {index} of {type(optimizer).__name__} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is none of the sharded model's, so training would leave it stale."
                    "\nBuild the optimizer from the parameters of the model that is set up: in Fabric "
                    "`model, optimizer = fabric.setup(model, optimizer)` over `model.parameters()`, in a "
                    "LightningModule `configure_optimizers` over `self.parameters()`."
                )
            if target is not parameter:
                if target in counts and target not in now:
                    raise _divided(optimizer, layout[target])
                counts[target] = counts.get(target, 0) + 1
            now[target] = None
        groups.append(list(now))
    _check_shapes(optimizer, groups, layout)
    if not counts:
        return optimizer
    for target, count in counts.items():
        if len(layout.get(target, ())) > 1 and count < len(layout[target]):
            raise _divided(optimizer, layout[target])
    if any(optimizer.state.values()):
        raise OptimizerMismatchError(
            f"{type(optimizer).__name__} has stepped over the unsharded parameters already, and its state can't follow "
            "them into shards.\nSet the model and the optimizer up before the first step."
        )
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = params
    optimizer.state.clear()
    return optimizer


#: Optimizers of torch that treat matrices otherwise than vectors.
_BY_SHAPE = ("Adafactor", "Muon")


def _check_shapes(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[nn.Parameter]], layout: Layout) -> None:
    if type(optimizer).__name__ not in _BY_SHAPE:
        return
    if any(tuple(held.shape) != part.shape for group in groups for held in group for part in layout[held]):
        raise OptimizerMismatchError(
            f"{type(optimizer).__name__} looks at each parameter's shape, and this strategy shows it 1-D shards: it "
            "would train something else without a word.\nUse strategy='fsdp2', or another optimizer."
        )


def _divided(optimizer: torch.optim.Optimizer, parts: Sequence[Part]) -> OptimizerMismatchError:
    told = ", ".join(repr(part.name) for part in parts[:5]) + (f" and {len(parts) - 5} more" if len(parts) > 5 else "")
    return OptimizerMismatchError(
        f"{told} are one flat parameter here, and {type(optimizer).__name__} has them in "
        "different param groups, or has not all of them.\n"
        "Write use_orig_params=True, which keeps every parameter its own; or give the optimizer all of them, in one "
        "group."
    )
