"""A unit's parameters and buffers brought to the device, before they are sharded."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_core.sharding import let_go_of, materialize
from fsdp_xla.classic.runtime import XLARuntime
from fsdp_xla.torch_xla_private.units import parameter_of

__all__ = ["place"]


def place(modules: list[nn.Module], runtime: XLARuntime) -> None:
    """Bring what modules own to the device, with rank 0's values; tied parameters stay tied.

    Args:
        modules: Those of one unit. What they have on the meta device is made and initialized first.
        runtime: All of whose ranks call it.
    """
    with runtime.building():
        materialize(modules, torch.device("cpu"))
    device = runtime.device
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in moved:
                kept = let_go_of(parameter)
                if kept is not None:
                    data = torch.cat(runtime.gather_objects(kept.part)).view(kept.shape)
                else:
                    data = runtime.broadcast_object(parameter.data.cpu())
                new = parameter_of(data.to(device), parameter.requires_grad)
                new.__dict__.update(parameter.__dict__)
                moved[id(parameter)] = (new, parameter)
                # an optimizer that waits to be re-pointed still holds it: keep its shape, and not its memory
                parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
            module._parameters[name] = moved[id(parameter)][0]
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = runtime.broadcast_object(buffer.cpu()).to(device)
