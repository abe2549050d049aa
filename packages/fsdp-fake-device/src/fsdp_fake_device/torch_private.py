"""The private names of torch that the device needs."""

from __future__ import annotations

import types

import torch

__all__ = ["make_stream", "register_device_module"]


def register_device_module(name: str, module: types.ModuleType) -> None:
    """Make a module ``torch.NAME``, which ``torch.get_device_module`` gives.

    Args:
        name: Of the device.
        module: What ``torch.cuda`` is of CUDA.
    """
    torch._register_device_module(name, module)


def make_stream(device: int, stream_id: int) -> torch.Stream:
    """An existing stream.

    Args:
        device: The number of its device.
        stream_id: Its number there.
    """
    device_type = torch._C._autograd.DeviceType.PrivateUse1.value
    return torch.Stream(stream_id=stream_id, device_index=device, device_type=device_type)
