"""Calls functions of the conformance suite on XLA's CPU devices, in the process of their ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch_xla.runtime as xr
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fsdp_core.testing import Answer, RankContext, answer_of, set_rank_context
from fsdp_xla.ranks.launch import run_ranks
from fsdp_xla.torch_xla_private import devices as xla
from fsdp_xla.torch_xla_private.sharded_tensors import is_marked, local_boxes

__all__ = ["OnAllDevices", "OnThreads", "on_all_devices", "on_threads"]


class OnThreads(RankContext):
    """Each rank is a thread of this process, or the process where there is one rank."""

    own_generators: ClassVar[bool] = False

    @property
    def rank(self) -> int:
        rank_of_thread = xla.rank_here()
        return 0 if rank_of_thread is None else rank_of_thread.rank

    def mean(self, tensor: Tensor) -> Tensor:
        communicator = getattr(xla.this_thread, "communicator", None)
        if communicator is None:
            return tensor
        return torch.stack(communicator.all_gather_object(self.rank, tensor)).mean(0)

    def settle(self) -> None:
        xla.sync(wait=True)

    def local_bytes(self, tensor: Tensor) -> int:
        return _memory(tensor, math.prod(tensor.shape))  # numel() does not change when a tensor is freed


class OnAllDevices(RankContext):
    """This process is the only rank and drives all devices. Sizes are those of one device's part."""

    @property
    def rank(self) -> int:
        return 0

    def shares(self, world_size: int) -> int:
        return 1

    def mean(self, tensor: Tensor) -> Tensor:
        return tensor

    def local_bytes(self, tensor: Tensor) -> int:
        return _memory(tensor, self.local_numel(tensor))

    def local_numel(self, tensor: Tensor) -> int:
        if tensor.device.type != "xla" or not is_marked(tensor):
            return tensor.numel()
        return max(math.prod(max(0, length) for length in lengths) for _, _, lengths in local_boxes(tensor))


def on_threads(world_size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Answer]:
    """Call a function on a thread for each device, all in lockstep."""
    set_rank_context(OnThreads())
    if world_size == 1:
        return [answer_of(lambda: _on_host(function(*arguments)))]
    answers: dict[int, Answer] = {}

    def call_on_rank(own_arguments: tuple[Any, ...]) -> None:
        rank_here = xla.rank_here()
        assert rank_here is not None
        answer = answers[rank_here.rank] = answer_of(lambda: _on_host(function(*own_arguments)))
        if not answer[0]:
            raise RuntimeError("this rank has failed")  # so that no other waits for it

    answer_of_run = answer_of(partial(run_ranks, world_size, call_on_rank, arguments))
    return [answers.get(rank, answer_of_run) for rank in range(world_size)]


def on_all_devices(world_size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Answer]:
    """Call a function once, and return its answer for each device."""
    set_rank_context(OnAllDevices())
    if not xr.is_spmd():
        xr.use_spmd()  # for the rest of the process, which runs only clauses of SPMD
    return [answer_of(lambda: _on_host(function(*copy.deepcopy(arguments))))] * world_size


def _memory(tensor: Tensor, numel_on_device: int) -> int:
    """The bytes of a tensor. XLA's tensors have no storage that reports its size."""
    try:
        is_on_xla = tensor.device.type == "xla"
    except RuntimeError as error:
        if "does not have a device" not in str(error):
            raise
        return 0  # listed by the garbage collector while another rank's thread creates it
    return numel_on_device * tensor.element_size() if is_on_xla else tensor.untyped_storage().nbytes()


def _on_host(value: Any) -> Any:
    return apply_to_collection(value, Tensor, xla.on_host, allow_frozen=True)
