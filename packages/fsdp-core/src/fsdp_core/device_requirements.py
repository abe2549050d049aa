"""What a kind of device that this package does not know must provide for torch's ``fully_shard`` and this package.

Each requirement is tried on the device, in the order in which a run meets it. Where one that is not needed is missing,
runs are slower, or one of their options is refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_core import devices

__all__ = ["REQUIREMENTS", "Requirement", "one_rank"]


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """Something that a kind of device must provide.

    Attributes:
        name: What it is.
        api: The functions of torch that provide it.
        purpose: What it is for.
        is_needed: Whether no run can do without.
        check: Raises if a device lacks it.
    """

    name: str
    api: str
    purpose: str
    is_needed: bool
    check: Callable[[torch.device], None]


def _check_registered(device: torch.device) -> None:
    if not torch.accelerator.is_available():
        raise LookupError("torch.accelerator.is_available() is False: there is no device")
    torch.accelerator.set_device_index(0)
    if torch.accelerator.current_device_index() != 0:
        raise ValueError("after set_device_index(0), current_device_index() is another")


def _check_module(device: torch.device) -> None:
    module = torch.get_device_module(device)
    missing = [name for name in ("current_device", "device_count", "set_device") if not hasattr(module, name)]
    if missing:
        raise AttributeError(f"torch.{device.type} has no {', '.join(missing)}")


def _check_tensors(device: torch.device) -> None:
    values = torch.arange(6.0).view(2, 3)
    on_device = values.to(device)
    if not torch.equal((on_device @ on_device.T).cpu(), values @ values.T):
        raise ValueError("a product of matrices is not the CPU's")
    storage = on_device.untyped_storage()
    storage.resize_(0)
    storage.resize_(values.nbytes)
    on_device.copy_(values)
    if not torch.equal(on_device.cpu(), values):
        raise ValueError("once its storage is freed and allocated again, a tensor does not hold what is written to it")


def _check_streams(device: torch.device) -> None:
    side, main = torch.Stream(device), torch.accelerator.current_stream(device)
    values = torch.ones(1024, device=device)
    side.wait_stream(main)
    with side:
        doubled = values * 2
        event = side.record_event()
    main.wait_event(event)
    doubled.record_stream(main)
    torch.Event(device).record(main)
    event.synchronize()
    if not torch.equal(doubled.cpu(), torch.full((1024,), 2.0)):
        raise ValueError("what a second stream has computed is not what the first reads after its event")


def _check_random_state(device: torch.device) -> None:
    devices.seed(device, 3)
    state = devices.random_state(device)
    first = torch.rand(4, device=device)
    devices.set_random_state(device, state)
    if not torch.equal(torch.rand(4, device=device), first):
        raise ValueError("numbers drawn from a restored state are others")


def _check_collectives(device: torch.device) -> None:
    devices.process_group_backend(device.type)
    group = dist.group.WORLD
    values = torch.arange(4.0, device=device)
    gathered, scattered = torch.empty_like(values), torch.empty_like(values)
    dist.all_reduce(values)
    dist.broadcast(values, 0)
    dist.all_gather_into_tensor(gathered, values, group=group)
    dist.reduce_scatter_tensor(scattered, gathered, op=dist.ReduceOp.AVG, group=group)
    dist.barrier()
    if not torch.equal(gathered.cpu(), torch.arange(4.0)):
        raise ValueError("collectives of a single rank change what they communicate")


def _check_all_to_all(device: torch.device) -> None:
    values = torch.arange(4.0, device=device)
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values)
    if not torch.equal(received.cpu(), torch.arange(4.0)):
        raise ValueError("all_to_all_single of a single rank changes what it communicates")


def _check_fully_shard(device: torch.device) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    inputs = torch.randn(3, 4)
    expected = torch.autograd.grad(plain(inputs).square().sum(), list(plain.parameters()))
    sharded = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(device)
    sharded.load_state_dict(plain.state_dict())
    mesh = init_device_mesh(device.type, (1,))
    for layer in (sharded[0], sharded):
        fully_shard(layer, mesh=mesh)
    sharded(inputs.to(device)).square().sum().backward()
    for parameter, gradient in zip(sharded.parameters(), expected, strict=True):
        if not isinstance(parameter.grad, DTensor):
            raise TypeError(f"the gradient of a shard is {type(parameter.grad).__name__}")
        torch.testing.assert_close(parameter.grad.full_tensor().cpu(), gradient, rtol=1e-3, atol=1e-3)
    torch.optim.AdamW(sharded.parameters(), fused=False).step()


def _check_pinned_memory(device: torch.device) -> None:
    pinned = torch.ones(1024, pin_memory=True)
    if not pinned.is_pinned():
        raise ValueError("torch.ones(..., pin_memory=True).is_pinned() is False")
    on_device = pinned.to(device, non_blocking=True)
    devices.record_event(device).synchronize()
    if not torch.equal(on_device.cpu(), pinned):
        raise ValueError("a non-blocking copy is not complete after an event that was recorded behind it")


def _check_autocast(device: torch.device) -> None:
    with torch.autocast(device.type, dtype=torch.bfloat16):
        product = nn.functional.linear(torch.ones(2, 3, device=device), torch.ones(4, 3, device=device))
    if product.dtype != torch.bfloat16:
        raise ValueError(f"within torch.autocast to torch.bfloat16, a product of matrices is {product.dtype}")


def _check_bf16(device: torch.device) -> None:
    if not devices.supports_bf16(device):
        raise ValueError(f"torch.{device.type}.is_bf16_supported() is False")
    torch.ones(4, device=device, dtype=torch.bfloat16).sum().cpu()


def _check_memory_figures(device: torch.device) -> None:
    torch.accelerator.memory.reset_peak_memory_stats(device)
    before = torch.accelerator.memory.max_memory_allocated(device)
    block = torch.empty(2**20, device=device, dtype=torch.uint8)
    if torch.accelerator.memory.max_memory_allocated(device) < before + block.nbytes:
        raise ValueError("an allocation does not show in max_memory_allocated()")


#: In the order in which they are tried.
REQUIREMENTS = (
    Requirement(
        name="accelerator",
        api="torch.utils.rename_privateuse1_backend, torch.accelerator",
        purpose="Trainer and Fabric find the device by its name",
        is_needed=True,
        check=_check_registered,
    ),
    Requirement(
        name="device module",
        api="torch._register_device_module",
        purpose="fully_shard and device meshes ask it for the current device",
        is_needed=True,
        check=_check_module,
    ),
    Requirement(
        name="tensors",
        api="aten operators, untyped_storage().resize_",
        purpose="gathered parameters are freed and allocated again in place",
        is_needed=True,
        check=_check_tensors,
    ),
    Requirement(
        name="streams",
        api="torch.Stream, torch.Event, Tensor.record_stream",
        purpose="gathers, reductions and copies for checkpoints run beside computation",
        is_needed=True,
        check=_check_streams,
    ),
    Requirement(
        name="random state",
        api="manual_seed, get_rng_state, set_rng_state of the device module",
        purpose="dropout, and resumes that draw the same numbers",
        is_needed=True,
        check=_check_random_state,
    ),
    Requirement(
        name="collectives",
        api='torch.distributed.Backend.register_backend(..., devices=["KIND"])',
        purpose="ranks gather parameters and reduce gradients",
        is_needed=True,
        check=_check_collectives,
    ),
    Requirement(
        name="fully_shard",
        api="torch.distributed.fsdp.fully_shard",
        purpose="a step equals the CPU's",
        is_needed=True,
        check=_check_fully_shard,
    ),
    Requirement(
        name="all-to-all",
        api="torch.distributed.all_to_all_single of the process group",
        purpose="optimizers that need whole matrices, and context parallelism",
        is_needed=False,
        check=_check_all_to_all,
    ),
    Requirement(
        name="pinned memory",
        api="HostAllocator, getPinnedMemoryAllocator of PrivateUse1HooksInterface",
        purpose="offload and asynchronous saves copy beside computation; without it, copies wait",
        is_needed=False,
        check=_check_pinned_memory,
    ),
    Requirement(
        name="autocast",
        api="torch.autocast, get_amp_supported_dtype of the device module",
        purpose='precision="bf16-mixed" and "16-mixed"',
        is_needed=False,
        check=_check_autocast,
    ),
    Requirement(
        name="bf16",
        api="is_bf16_supported of the device module",
        purpose='precision="bf16-true" and "bf16-mixed"',
        is_needed=False,
        check=_check_bf16,
    ),
    Requirement(
        name="memory figures",
        api="torch.accelerator.memory.memory_stats",
        purpose="DeviceStatsMonitor",
        is_needed=False,
        check=_check_memory_figures,
    ),
)


@contextmanager
def one_rank(kind: str) -> Iterator[None]:
    """A context in which this process is the only rank of a process group for a kind of device."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    dist.init_process_group(devices.process_group_backend(kind), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
