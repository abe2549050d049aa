"""A unit's parameters and buffers brought to the device, before they are sharded."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_core.materialize import materialize
from fsdp_xla.built_in_parts import BuiltInParts
from fsdp_xla.runtime import XLARuntime
from fsdp_xla.units import parameter_of

__all__ = ["place"]


def place(modules: list[nn.Module], built: BuiltInParts, runtime: XLARuntime) -> None:
    """Bring what modules own to the device, with rank 0's values; tied parameters stay tied.

    Args:
        modules: Those of one unit. What they have on the meta device is made and initialized first.
        built: Knows of parameters that were sharded as they were built.
        runtime: All of whose ranks call it.
    """
    with runtime.building():
        materialize(modules, torch.device("cpu"))
    device = runtime.device
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in moved:
                data = built.whole(parameter, runtime)
                if data is None:
                    data = runtime.broadcast_object(parameter.data.cpu())
                new = parameter_of(data.to(device), parameter.requires_grad)
                new.__dict__.update(parameter.__dict__)
                moved[id(parameter)] = (new, parameter)
                # an optimizer that waits to be re-pointed still holds it: keep its shape, and not its memory
                parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
            module._parameters[name] = moved[id(parameter)][0]
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = runtime.broadcast_object(buffer.cpu()).to(device)
