"""How long a step would take on the devices that are here: from what was rehearsed, and what small programs take."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_core import devices
from fsdp_core.errors import ShardingError
from fsdp_core.rehearsal.forks import Failed, call_in_forks
from fsdp_core.rehearsal.planning import Outcome

__all__ = ["Speeds", "expected_seconds", "measure_speeds"]

#: Rows and columns of the matrices whose product is measured. A step's are between these, or larger.
_SMALL, _LARGE = 128, 1024

#: Elements of a large tensor, and of one whose operations take no longer than they take to call.
_MANY, _FEW = 1 << 22, 8

#: How often a program is repeated at least, and for how many seconds: one that communicates, as often on each rank.
_REPEATED, _SECONDS = 16, 0.1

#: Contents that an optimizer reads and writes in place in each step, which allocates nothing.
_UPDATED = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What programs of a few operations take on a device, while all devices run them.

    Attributes:
        small_products: Floating-point operations per second in products of small matrices.
        large_products: The same, of large matrices.
        sums: Bytes per second that sums of large tensors write.
        operation: Seconds of an operation on few elements, with its part of the backward pass.
        gathers: Bytes per second that a rank receives in all-gathers of large tensors.
        gather: Seconds of an all-gather of few elements.
    """

    small_products: float
    large_products: float
    sums: float
    operation: float
    gathers: float = float("inf")
    gather: float = 0.0


def expected_seconds(outcome: Outcome, speeds: Speeds) -> tuple[float, float]:
    """The least and the most that an optimizer step is expected to take, in seconds.

    The least: products at their best, beside communication. The most: products at their worst, writing each tensor,
    calling each operation, and communication, one after the other.

    Args:
        outcome: What was rehearsed.
        speeds: What was measured.

    Example:
        >>> step = Outcome(code="", strategy="", ranks=2, flops=1000, sent_bytes=50, operations=5, written_bytes=200)
        >>> expected_seconds(step, Speeds(small_products=100, large_products=500, sums=100, operation=0.1, gathers=100))
        (2.0, 13.0)
    """
    updated = sum(outcome.by_content.get(content, 0) for content in _UPDATED)
    sent = outcome.sent_bytes / speeds.gathers
    slow, fast = sorted((speeds.small_products, speeds.large_products))  # small ones may stay in a cache
    least = max(outcome.flops / fast, sent)
    most = (
        outcome.flops / slow
        + (outcome.written_bytes + updated) / speeds.sums
        + outcome.operations * speeds.operation
        + sent
        + sum(outcome.calls.values()) * speeds.gather
    )
    return least, most


def measure_speeds(ranks: int, precision: object = None) -> Speeds:
    """Measure what is here, each rank in a process that is forked for it, all at once.

    Args:
        ranks: The number of ranks, each on a device of its own; on CPUs they share the host's cores.
        precision: The ``precision`` of a Trainer or Fabric, whose dtype the products have.

    Raises:
        ShardingError: A rank has failed, or there are fewer devices.
    """
    dtype = _dtype_of(precision)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        calls = [partial(_measure, rank, ranks, store, dtype) for rank in range(ranks)]
        measured = call_in_forks(calls, seconds=120.0)
    speeds = [each for each in measured if isinstance(each, Speeds)]
    if failed := [each for each in measured if isinstance(each, Failed)]:
        raise ShardingError(f"the devices' speeds could not be measured: {failed[0].words}\nPlan without --time.")
    return min(speeds, key=lambda each: each.large_products)


def _dtype_of(precision: object) -> torch.dtype:
    words = str(precision)
    if "bf16" in words:
        return torch.bfloat16
    return torch.float16 if "16" in words else torch.float64 if "64" in words else torch.float32


def _measure(rank: int, ranks: int, store: Path, dtype: torch.dtype) -> Speeds:
    kind = devices.accelerator_kind() if torch.accelerator.is_available() else None
    device = torch.device("cpu") if kind is None else torch.device(kind, rank)
    if kind is not None:
        devices.select(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if ranks > 1:
        backend = devices.process_group_backend(device.type)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    few = torch.ones(_FEW, device=device, requires_grad=True)
    many = torch.ones(_MANY, device=device)
    small, large = (torch.ones(size, size, dtype=dtype, device=device) for size in (_SMALL, _LARGE))
    gathers, gather = float("inf"), 0.0
    if ranks > 1:
        # under its new name, where torch has that
        gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        received = torch.empty(ranks * _MANY, device=device)
        received_few = torch.empty(ranks * _FEW, device=device)
        of_few = few.detach()
        gather = _seconds_of(lambda: gather_into(received_few, of_few), device, together=True)
        seconds = _seconds_of(lambda: gather_into(received, many), device, together=True)
        gathers = many.nbytes * (ranks - 1) / seconds
    speeds = Speeds(
        small_products=2 * _SMALL**3 / _seconds_of(lambda: small @ small, device),
        large_products=2 * _LARGE**3 / _seconds_of(lambda: large @ large, device),
        sums=many.nbytes / _seconds_of(lambda: many + many, device),
        operation=_seconds_of(lambda: (few + few).sum().backward(), device) / 4,
        gathers=gathers,
        gather=gather,
    )
    if ranks > 1:
        dist.destroy_process_group()
    return speeds


def _seconds_of(call: Callable[[], object], device: torch.device, *, together: bool = False) -> float:
    """The median of what a call takes; as often on each rank, if they call it together."""
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < _REPEATED or (not together and time.perf_counter() - began < _SECONDS):
        started = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])
