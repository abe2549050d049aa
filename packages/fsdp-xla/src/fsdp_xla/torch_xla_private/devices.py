"""The names of torch_xla that this package uses and that are private or untyped, and why.

Tested with torch_xla 2.9.0.

Running a program must not advance random numbers (``random_numbers_kept``). XLA takes every run for a step, and derives
the next step's seed from the one with which the last step began. So a save, a read of a value or a recomputation within
a step would change what dropout draws from then on. To prevent it, each run restores the generator to its state before
the run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

# Flattens and unflattens nested tensors; torch has no public name for it.
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch_xla._internal import pjrt

from fsdp_core import StrategyUnavailableError
from fsdp_xla.ranks.communicator import Communicator, StoreCommunicator, ThreadCommunicator

__all__ = [
    "RankHere",
    "all_gather",
    "all_reduce",
    "as_data",
    "check_autograd",
    "communicator_of_ranks",
    "compiled",
    "computes_all_gradients",
    "default_device",
    "in_order",
    "on_host",
    "put_in_order",
    "random_numbers_kept",
    "random_state",
    "rank_here",
    "reduce_scatter",
    "replace",
    "run_on_processes",
    "run_on_threads",
    "runtime_is_started",
    "set_default_device",
    "set_random_state",
    "settle",
    "start_alone",
    "sync",
    "this_thread",
    "tree_flatten",
    "tree_unflatten",
]

#: torch_xla's compiled module, also for the lockstep of ranks on the CPU.
compiled: Any = torch_xla._XLAC

#: Thread-local: ``is_rank``, whether a rank runs in this thread; ``communicator``, the rank's if ranks are threads.
this_thread = threading.local()


class RankHere(NamedTuple):
    """The rank that runs in this thread.

    Attributes:
        rank: Its global rank.
        local_rank: Its rank on this host.
        host: The index of this host.
        world_size: The number of ranks.
    """

    rank: int
    local_rank: int
    host: int
    world_size: int


def rank_here() -> RankHere | None:
    """The rank that runs in this thread; ``None`` before ranks are started."""
    if not getattr(this_thread, "is_rank", False):
        return None
    return RankHere(xr.global_ordinal(), xr.local_ordinal(), xr.host_index(), xr.world_size())


def run_on_threads(
    function: Callable[[], object],
    interrupts: Sequence[Callable[[], None]] = (),
) -> None:
    """Call ``function`` on a thread for each device of this process, with replication over them.

    ``torch_xla.launch`` does this for one process, but sets no replication on the CPU, so that its collectives reduce
    nothing. Nor can its threads be interrupted.

    Args:
        function: The function. It must not raise.
        interrupts: Called at the first keyboard interrupt, at the second, and so on, while the threads are still
            waited for. One more interrupt abandons them.

    Raises:
        KeyboardInterrupt: There was an interrupt.
    """
    added_variables = {"PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT"} - set(os.environ)
    end_events: list[threading.Event] = []

    def run_rank(device: str, end_event: threading.Event) -> None:
        try:
            compiled._xla_set_default_device(device)
            xr._init_world_size_ordinal()
            this_thread.is_rank = True
            function()
        finally:
            end_event.set()

    try:
        pjrt.initialize_multiprocess(0, 1)
        devices = xm.get_xla_supported_devices()
        _start_autograd(torch.device(devices[0]))
        for device in devices:
            end_events.append(threading.Event())
            threading.Thread(target=run_rank, args=(device, end_events[-1]), daemon=True).start()
        _wait_for(end_events, interrupts)
    finally:
        for variable in added_variables:
            os.environ.pop(variable, None)


def _start_autograd(device: torch.device) -> None:
    """Take this process's first backward pass, which starts autograd's threads, before ranks do so at the same time.

    In a forked process torch then also makes its engine anew, which is not safe: about one start in fifty of three
    ranks crashed or hung in ``Engine::start_device_threads`` (torch 2.9.0).
    """
    with suppress(RuntimeError):  # each rank raises this error in check_autograd()
        _take_backward_pass(device)


def _take_backward_pass(device: torch.device) -> None:
    torch.zeros((), device=device, requires_grad=True).clone().backward()  # recorded, and never run


def _wait_for(events: Sequence[threading.Event], interrupts: Sequence[Callable[[], None]]) -> None:
    actions = iter(interrupts)
    interrupt: KeyboardInterrupt | None = None
    for event in events:
        while not event.is_set():
            try:
                event.wait(0.5)  # with a limit, since a signal that comes just before the wait is seen only after it
            except KeyboardInterrupt as error:
                interrupt = error
                action = next(actions, None)
                if action is None:
                    raise
                action()
    if interrupt is not None:
        raise interrupt


def run_on_processes(function: Callable[[], object]) -> None:
    """Call ``function`` in a process for each TPU chip of this host, forked from this one.

    The processes inherit the function from this one, because torch_xla would pickle it, and nested functions can't be.
    """
    _functions_of_processes.append(function)
    try:
        xmp.spawn(_rank_of_process, start_method="fork")
    finally:
        _functions_of_processes.pop()


_functions_of_processes: list[Callable[[], object]] = []


def _rank_of_process(_: int) -> None:
    this_thread.is_rank = True
    _functions_of_processes[-1]()


def default_device() -> torch.device:
    """The XLA device of this rank."""
    device: torch.device = torch_xla.device()
    return device


def set_default_device(device: torch.device) -> None:
    """Make ``device`` this thread's default device."""
    compiled._xla_set_default_device(str(device))


def computes_all_gradients() -> bool:
    """Whether the running backward pass computes the gradients of all parameters, as ``loss.backward()`` does."""
    return bool(torch.autograd._is_checkpoint_valid())


def start_alone() -> torch.device:
    """Initialize one device of this process, without peers."""
    pjrt.initialize_singleprocess()
    return default_device()


def check_autograd(device: torch.device, strategy: str, instead: str) -> None:
    """Refuse a process whose autograd engine has started without XLA: it has no queue for the device's gradients.

    Args:
        device: An XLA device.
        strategy: The strategy's name.
        instead: What to do instead, as a sentence.

    Raises:
        StrategyUnavailableError: A backward pass was taken before XLA was started.
    """
    try:
        _take_backward_pass(device)
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise StrategyUnavailableError(
            f"{strategy!r} can't start: this process took a backward pass before XLA was started, and torch looks up "
            f"the devices only once.\n{instead}"
        ) from error


def replace(tensor: Tensor, value: Tensor) -> None:
    """Replace a device tensor's value by a host tensor. A copy would be a graph to compile.

    torch_xla's own function to replace a tensor can't be used: results of in-place operations reappear.
    """
    tensor.data = value.to(tensor.device)


def in_order(tensors: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Sort device tensors by XLA's tensor id, which is the order of a program's outputs."""
    return sorted(tensors, key=compiled._xla_get_tensor_id)


def put_in_order(tensors: Sequence[nn.Parameter]) -> bool:
    """Renumber device tensors in XLA so that their ids are in the given order.

    An optimizer's step updates its parameters one by one, which puts them into its own order. If they begin in another
    order, the programs of the first micro-batches differ from later ones.

    Returns:
        Whether they were in another order, so that copies of them are now pending.
    """
    if all(tensor is ordered for tensor, ordered in zip(tensors, in_order(tensors), strict=True)):
        return False
    for tensor in tensors:
        tensor.data = tensor.detach().clone()
    return True


def as_data(value: Tensor, device: torch.device) -> Tensor:
    """Copy a value to the device such that programs never take it for a constant, as they do for 0 and 1."""
    (copy,) = xm.send_cpu_data_to_device([value], str(device))
    assert isinstance(copy, Tensor)
    return copy


def runtime_is_started() -> bool:
    """Whether XLA's runtime runs in this process, with a fixed number of devices. No public name reports it."""
    return bool(compiled._xla_runtime_is_initialized())


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Context in which running programs does not advance random numbers.

    The module's docstring says why they would advance.
    """
    seed = xm.get_rng_state()
    yield
    xm.set_rng_state(seed)


def sync(wait: bool = False) -> None:
    """Run what has been recorded. ``torch_xla.sync`` is looked up at each call: the lockstep of threads replaces it.

    Args:
        wait: Whether to wait for completion: only then can state be read or replaced.
    """
    with random_numbers_kept():
        torch_xla.sync(wait=wait)


def settle() -> None:
    """Run what is pending, and wait for completion."""
    sync(wait=True)


def on_host(tensor: Tensor) -> Tensor:
    """The tensor's values in host memory."""
    return tensor.detach().cpu()


def all_reduce(tensor: Tensor, op: str) -> Tensor:
    """Reduce over all ranks, in the graph."""
    reductions = {"sum": xm.REDUCE_SUM, "max": xm.REDUCE_MAX, "min": xm.REDUCE_MIN, "mean": xm.REDUCE_SUM}
    scale = 1.0 / xr.world_size() if op == "mean" else 1.0
    reduced: Tensor = xm.all_reduce(reductions[op], tensor, scale=scale, pin_layout=False)
    return reduced


def all_gather(tensor: Tensor) -> Tensor:
    """Concatenate the ranks' tensors along the first axis, in the graph."""
    gathered: Tensor = xm.all_gather(tensor, dim=0, pin_layout=False)
    return gathered


def reduce_scatter(tensor: Tensor, world_size: int) -> Tensor:
    """Sum over all ranks and keep this rank's row, in the graph, which is the same on every rank."""
    row: Tensor = xm.reduce_scatter(
        xm.REDUCE_SUM, tensor, scale=1.0, scatter_dim=0, shard_count=world_size, pin_layout=False
    )
    return row


def random_state(device: torch.device) -> int:
    """The state of the device's generator: its seed, which every draw advances."""
    return int(xm.get_rng_state(str(device)))


def set_random_state(device: torch.device, state: int) -> None:
    """Set the device's generator."""
    xm.set_rng_state(int(state), str(device))


def communicator_of_ranks(
    rank: int, world_size: int, address: str, port: int, timeout: timedelta | None
) -> Communicator:
    """This rank's communicator: in this process if ranks are its threads, otherwise a store at rank 0's address."""
    thread_communicator: ThreadCommunicator | None = getattr(this_thread, "communicator", None)
    if thread_communicator is not None:
        if timeout is not None:
            thread_communicator.barrier.timeout = timeout
        return thread_communicator
    store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout or timedelta(minutes=30))
    return StoreCommunicator(store, world_size)
