"""Random numbers of shards: each shard has its own, and ranks that hold the same shard have the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_core import devices

__all__ = ["DRAWING_FUNCTIONS", "draw_for_shard", "send_to_replicas"]

#: Functions that draw numbers, as torch shows them to ``__torch_function__``.
DRAWING_FUNCTIONS = frozenset(
    {"normal_", "uniform_", "random_", "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_"}
    | {"log_normal_", "poisson", "rand_like", "randn_like", "randint_like", "dropout", "dropout_", "native_dropout"}
    | {"alpha_dropout", "alpha_dropout_", "rrelu", "rrelu_"}
)

#: An odd number of 62 bits that spreads the numbers of shards over all seeds.
_SPREAD = 0x1E3779B97F4A7C15

_LARGEST_SEED = 2**62


@contextmanager
def draw_for_shard(index: int, device: torch.device, generator: torch.Generator | None = None) -> Iterator[None]:
    """Context in which torch's generators draw numbers of one shard.

    Ranks that were seeded alike would otherwise draw the same numbers for different shards; and where shards differ in
    size, draw more on some ranks than on others, so that they would not draw alike any more. After the context, the
    generators are where they would be after one number was drawn.

    Args:
        index: The index of the shard.
        device: Where the numbers are drawn.
        generator: Decides which they are, instead of torch's generator of the host.

    Example:
        >>> draws = []
        >>> for index in (0, 1, 0):
        ...     _ = torch.manual_seed(0)
        ...     with draw_for_shard(index, torch.device("cpu")):
        ...         draws.append(float(torch.rand(())))
        >>> draws[0] == draws[2], draws[0] == draws[1]
        (True, False)
    """
    drawn = int(torch.randint(_LARGEST_SEED, (), generator=generator, device=generator.device if generator else "cpu"))
    seed = (drawn + index * _SPREAD) % _LARGEST_SEED
    host_state = torch.get_rng_state()
    device_state = devices.random_state(device) if devices.is_accelerator(device) else None
    torch.default_generator.manual_seed(seed)
    if device_state is not None:
        devices.seed(device, seed)
    try:
        yield
    finally:
        torch.set_rng_state(host_state)
        if device_state is not None:
            devices.set_random_state(device, device_state)


@torch.no_grad()
def send_to_replicas(tensors: Iterable[Tensor], replicas: Any) -> None:
    """Let ranks that hold the same shard have what the first of them has drawn for it.

    Args:
        tensors: What was drawn; plain tensors.
        replicas: The process group of these ranks.
    """
    for tensor in tensors:
        if tensor.numel():
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, group=replicas, group_src=0)
            if not sent.is_set_to(tensor):
                tensor.detach().copy_(sent)
