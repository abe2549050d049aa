"""Ranks that are threads of one process on XLA's CPU client, with matching collectives.

The client matches collectives by the id of the compiled program, so all ranks must run the same one: rank 0 compiles
and dispatches, and the others dispatch when the program is in their shared cache. A lock around both would deadlock,
because a dispatch may wait for the previous one, which waits for the other ranks.

This is a testing aid: it costs time in every step, and is used where ``PJRT_DEVICE=CPU`` and there are several ranks.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel as xla_fsdp
import torch_xla.runtime as xr
import torch_xla.utils.checkpoint as xla_checkpoint
from lightning.fabric import fabric as fabric_module
from lightning.fabric import wrappers as fabric_wrappers
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.utilities.migration import utils as migration
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from fsdp_core import StrategyUnavailableError
from fsdp_xla.cpu_ranks.host_operators import operators_on_the_host
from fsdp_xla.ranks.barrier import ThreadBarrier
from fsdp_xla.torch_xla_private.devices import compiled as _XLAC
from fsdp_xla.torch_xla_private.devices import random_numbers_kept, runtime_is_started

__all__ = ["Lockstep", "lockstep"]

#: Methods of Tensor that wait for a value. Operators that do are in :mod:`~fsdp_xla.cpu_ranks.host_operators`.
_FETCH_METHODS = ("cpu", "to", "tolist", "numpy")
#: What a rank does then, for the barrier's errors.
_FETCH_OPERATION = "waits for a value (.item(), print, if, a boolean mask)"
_COLLECTIVES = ("cross_replica_sum", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "all_reduce")
#: The client's asynchronous dispatch loses a rank about once in 200 steps.
_ENVIRONMENT = {"PJRT_CPU_ASYNC_CLIENT": "0"}
#: The variables with the sizes of the client's thread pools, which must have a thread for each rank.
_POOL_SIZE_VARIABLES = ("XLA_THREAD_POOL_SIZE", "NPROC")


class Lockstep:
    """Runs graphs on all ranks, each once the program is compiled.

    Args:
        barrier: The barrier of the ranks, also for all their other joint operations.
    """

    def __init__(self, barrier: ThreadBarrier) -> None:
        self._barrier = barrier
        self._compiled = threading.Event()
        self._counters_before: tuple[int, int, int] | None = None  # XLA's counters when the dispatch began

    def begin(self, after_failure: bool) -> None:
        """Clear what a failed run has left on this rank's device. Every rank calls it first.

        Args:
            after_failure: Whether a run has failed in this process.
        """
        device = _XLAC._xla_get_default_device()
        _XLAC._set_all_reduce_token(device, None)
        if after_failure:  # operations that the failed run left pending differ between ranks
            _XLAC._clear_pending_irs(device)

    def sync(self, wait: bool = False, reset_scope: bool = True, *, operation: str = "ends a step") -> None:
        """Do what ``torch_xla.sync`` does, on all ranks together."""
        device = _XLAC._xla_get_default_device()
        self.dispatch_together(
            lambda: _XLAC._xla_step_marker(device, [], wait=wait, reset_scope=reset_scope), operation
        )
        if xm.is_master_ordinal():
            xm.ms.save_metrics()
        context = xm._run_step_closures()
        _XLAC._set_all_reduce_token(context.device, None)

    def dispatch_together(self, dispatch: Callable[[], None], operation: str = "ends a step") -> None:
        """Call ``dispatch`` on every rank; on ranks other than 0 once rank 0's program is in the cache.

        Args:
            dispatch: Compiles and runs what this rank has recorded.
            operation: What the rank does, as the end of the sentence "rank 0 ..."; all ranks must do it.
        """
        rank = xr.global_ordinal()
        self._barrier.wait(rank, operation, self._prepare)
        try:
            if rank == 0:
                try:
                    dispatch()
                finally:
                    self._compiled.set()
            else:
                # All ranks that have arrived must dispatch, even if one fails now: an incomplete collective never ends.
                pause = 0.0005
                while not self._is_cached() and not self._compiled.wait(pause):
                    pause *= 1.1  # look less often if the program takes long to compile
                dispatch()
        except BaseException:
            self._barrier.abort()
            raise
        self._barrier.wait(rank, operation, self._forget_counters)

    def _forget_counters(self) -> None:
        self._counters_before = None

    def _prepare(self) -> None:
        # Collected on all ranks at once: graphs would differ if tensors were freed on one rank only.
        gc.collect()
        self._compiled.clear()
        self._counters_before = _compile_counters()

    def _is_cached(self) -> bool:
        """Whether rank 0 has looked up its program, and found it in the cache or compiled and added it."""
        assert self._counters_before is not None
        hits, misses, programs = _compile_counters()
        hits_before, misses_before, programs_before = self._counters_before
        if misses == misses_before:
            return hits > hits_before
        return programs > programs_before


def _compile_counters() -> tuple[int, int, int]:
    counter = _XLAC._xla_counter_value
    return (
        counter("CachedCompile") or 0,
        counter("UncachedCompile") or 0,
        _XLAC._xla_get_num_cached_compilation_graph(),
    )


@contextmanager
def lockstep(ranks: int, barrier: ThreadBarrier) -> Iterator[Lockstep]:
    """Context in which threads of this process can be the ranks of a run. All patches are undone afterwards.

    Args:
        ranks: The number of ranks.
        barrier: Their barrier.

    Raises:
        StrategyUnavailableError: XLA has been started without the settings that ranks need.
    """
    _check_environment(ranks)
    steps = Lockstep(barrier)
    with ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        stack.enter_context(operators_on_the_host())
        for owner in (torch_xla, torch_xla.torch_xla):
            patch(owner, "sync", steps.sync)
        patch(xm, "mark_step", steps.sync)
        for name in _FETCH_METHODS:
            patch(Tensor, name, _wrap_fetch(getattr(Tensor, name), steps))
        # These flags are global to the process, and each rank is a thread and needs its own.
        status = _StatusOfThread()
        for owner in (xla_checkpoint, xla_fsdp):
            patch(owner, "chkpt_status", status)
        # Fabric's hook checks a flag that another rank's backward pass may have set.
        patch(fabric_wrappers, "_backward_hook", lambda *_: None)
        shared_patches = _SharedPatches(vars(fabric_module)["_replace_dunder_methods"])
        for module in (fabric_module, data_connector):
            patch(module, "_replace_dunder_methods", shared_patches.patched)
        patch(migration, "_lock", _NoLock())
        # Lightning's patches for legacy checkpoints are left out: each rank would apply and remove them for all.
        patch(migration.pl_legacy_patch, "__enter__", lambda self: self)
        patch(migration.pl_legacy_patch, "__exit__", lambda *_: None)
        for function in {fabric_rank_zero_only, rank_zero_only}:
            patch(function, "rank", _RankOfThread())
        if not _is_frozen_elsewhere():
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        _XLAC._xla_get_num_cached_compilation_graph()  # creates the cache, which threads can't create concurrently
        yield steps


@functools.cache
def _is_frozen_elsewhere() -> bool:
    """Whether other code had frozen objects before the first launch; counting them visits each."""
    return gc.get_freeze_count() > 0


def _check_environment(ranks: int) -> None:
    if runtime_is_started():
        if os.environ.get("PJRT_CPU_ASYNC_CLIENT") != "0":
            raise StrategyUnavailableError(
                f"XLA has been used in this process before its {ranks} ranks start, without what they need on the CPU."
                "\nTouch no XLA device before trainer.fit() or fabric.launch(), or set PJRT_CPU_ASYNC_CLIENT=0 before "
                "Python starts."
            )
        return
    os.environ.update(_ENVIRONMENT)
    for variable in _POOL_SIZE_VARIABLES:
        os.environ.setdefault(variable, str(max(8, 2 * ranks)))


def _wrap_fetch(fetch: Callable[..., Any], steps: Lockstep) -> Callable[..., Any]:
    """Make a method that fetches values run pending collectives on all ranks first, as one program."""

    @functools.wraps(fetch)
    def fetch_when_run(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "xla" and not (fetch.__name__ == "to" and _stays_on_device(*args, **kwargs)):
            text = _XLAC._get_xla_tensors_text([self])
            if any(name in text for name in _COLLECTIVES):
                with random_numbers_kept():
                    steps.sync(operation=_FETCH_OPERATION)
        return fetch(self, *args, **kwargs)

    return fetch_when_run


def _stays_on_device(*args: Any, **kwargs: Any) -> bool:
    """Whether ``Tensor.to`` with these arguments, as a cast for instance, leaves a tensor on its XLA device.

    Example:
        >>> _stays_on_device(torch.float32), _stays_on_device("xla:0")
        (True, True)
        >>> _stays_on_device("cpu"), _stays_on_device(device=torch.device("cpu")), _stays_on_device(torch.zeros(2))
        (False, False, False)
        >>> _stays_on_device(dtype=torch.int8, copy=True)
        True
    """
    target = kwargs.get("device", kwargs.get("other", args[0] if args else None))
    if isinstance(target, Tensor):
        target = target.device
    return not isinstance(target, str | torch.device) or torch.device(target).type == "xla"


class _SharedPatches:
    """Lightning's patches of dataloader classes, shared by threads: active from the first entry to the last exit.

    Otherwise each thread would apply its patches over another's, and remove both.

    Args:
        patched: Lightning's context manager, which takes a class and the name of an argument.
    """

    def __init__(self, patched: Callable[..., AbstractContextManager[None]]) -> None:
        self._patch_class = patched
        self._lock = threading.Lock()
        self._active: dict[type, tuple[int, AbstractContextManager[None]]] = {}

    @contextmanager
    def patched(self, base_cls: type, store_explicit_arg: str | None = None) -> Iterator[None]:
        """A context in which a class and its subclasses are patched."""
        with self._lock:
            count, context = self._active.get(base_cls) or (0, self._patch_class(base_cls, store_explicit_arg))
            if not count:
                context.__enter__()
            self._active[base_cls] = count + 1, context
        try:
            yield
        finally:
            with self._lock:
                count, context = self._active.pop(base_cls)
                if count > 1:
                    self._active[base_cls] = count - 1, context
                else:
                    context.__exit__(None, None, None)


class _StatusOfThread(threading.local):
    in_chkpt_bwd = False


class _NoLock:
    """Replaces a lock that a rank would hold while it waits for the others."""

    def acquire(self) -> None:
        """Admit all ranks."""

    def release(self) -> None:
        """Nothing is held."""


@functools.total_ordering
class _RankOfThread:
    """The rank of the calling thread, in comparisons and as a string."""

    def __eq__(self, other: object) -> bool:
        return bool(xr.global_ordinal() == other)

    def __lt__(self, other: int) -> bool:
        return bool(xr.global_ordinal() < other)

    def __hash__(self) -> int:
        return hash(xr.global_ordinal())

    def __index__(self) -> int:
        return int(xr.global_ordinal())

    def __str__(self) -> str:
        return str(xr.global_ordinal())

    __int__, __repr__ = __index__, __str__
