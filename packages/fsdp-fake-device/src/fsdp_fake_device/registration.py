"""Makes the device known to torch."""

from __future__ import annotations

import atexit
import datetime
import sys
import types
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from fsdp_fake_device import device_module, torch_private
from fsdp_fake_device.extension import extension

DEVICE, BACKEND = "fake", "fakeccl"


def register() -> None:
    """Name the device, and register its module, its methods of tensors and its process groups."""
    rename_privateuse1_backend(DEVICE)
    torch_private.register_device_module(DEVICE, _make_module())
    generate_methods_for_privateuse1_backend(for_storage=True)
    if dist.is_available():
        dist.Backend.register_backend(BACKEND, _make_group, devices=[DEVICE])
    atexit.register(extension.shut_down)


def _make_module() -> types.ModuleType:
    names = [name for name in vars(device_module) if not name.startswith("__") or name == "__getattr__"]
    module = types.ModuleType(f"torch.{DEVICE}", device_module.__doc__)
    module.__dict__.update({name: getattr(device_module, name) for name in names})
    module.__dict__["default_generators"] = device_module.default_generators()
    sys.modules[module.__name__] = module
    return module


def _make_group(store: Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(PrefixStore(BACKEND, store), rank, size, timeout)
    return extension.make_process_group(gloo, rank, size, timeout)
