"""Bringing a module to its device with rank 0's values, and giving what was built on the meta device its first ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.errors import ShardingError

__all__ = ["materialize", "place"]


def place(
    modules: Sequence[nn.Module], device: torch.device, init: Callable[[nn.Module], object] | None = None
) -> None:
    """Bring what ``modules`` own directly to ``device``, with rank 0's values. All ranks must call it.

    Args:
        modules: The modules, each taken without its children.
        device: Where to.
        init: Gives a module that was built on the meta device memory and values, in the place of :func:`materialize`.
    """
    if init is None:
        materialize(modules, device)
    for module in modules:
        if init is not None and any(p.is_meta for p in module.parameters(recurse=False)):
            init(module)
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device).contiguous()
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                # ranks seeded differently would shard a model that no rank ever had
                dist.broadcast(tensor.data, src=0)


def materialize(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Allocate the parameters and buffers that ``modules`` own directly, and initialise them, in place.

    Tied parameters stay tied as long as all their owners are among ``modules``.

    Args:
        modules: The modules, each taken without its children, in the order in which they draw from the random
            generator.
        device: Where to allocate.

    Raises:
        ShardingError: A module owns tensors on the meta device, but has no ``reset_parameters``, or one that leaves a
            tensor unfilled.
    """
    made: dict[int, nn.Parameter] = {}
    kept: list[nn.Parameter] = []  # a freed parameter's id could be given to another
    for module in modules:
        if not any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            continue
        # torch's own MultiheadAttention and Transformer spell it with an underscore
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if not callable(reset):
            raise ShardingError(
                f"{type(module).__name__} was built on the meta device, but has no reset_parameters() to fill it.\n"
                "Write that method, or build the model without empty_init / torch.device('meta')."
            )
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                kept.append(parameter)
                if id(parameter) not in made:
                    empty = _unfilled_like(parameter, device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                module._buffers[name] = _unfilled_like(buffer, device)
        reset()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
                raise ShardingError(
                    f"{type(module).__name__} was built on the meta device, and its reset_parameters() left {name!r} "
                    "unfilled.\nFill it there, or build the model without empty_init / torch.device('meta')."
                )


def _unfilled_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory marked as not yet given a value: NaN, where the dtype has it."""
    empty = torch.zeros_like(tensor, device=device)
    return empty.fill_(torch.nan) if tensor.is_floating_point() else empty
