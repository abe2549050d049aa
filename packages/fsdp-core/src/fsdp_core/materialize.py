"""Giving a module built on the meta device real memory and its initial values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fsdp_core.errors import ShardingError

__all__ = ["has_meta", "materialize"]


def has_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer of ``module`` has no memory yet."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def materialize(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Allocate the parameters and buffers that ``modules`` own directly, and initialise them, in place.

    Tied parameters stay tied as long as all their owners are among ``modules``.

    Args:
        modules: The modules, each taken without its children, in the order in which they draw from the random
            generator.
        device: Where to allocate.

    Raises:
        ShardingError: A module owns tensors on the meta device, but has no ``reset_parameters``.
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
                    empty = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        reset()
