"""Ranks that are threads of one process, on XLA's CPU client: what makes their collectives meet.

The client matches the parts of a collective by the id of the compiled program, so all ranks must run the very same one:
rank 0 compiles and dispatches, and the others do when the program is in the cache that they share. A lock around the
whole would deadlock, for a dispatch may wait for the last one to end, which waits for the other ranks.

This is a testing aid: it costs time in every step, and is used where ``PJRT_DEVICE=CPU`` and there are several ranks.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel as xla_fsdp
import torch_xla.runtime as xr
import torch_xla.utils.checkpoint as xla_checkpoint
from lightning.fabric import wrappers as fabric_wrappers
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities.migration import utils as migration
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from fsdp_core.errors import StrategyUnavailableError
from fsdp_xla.meeting import RankLostError
from fsdp_xla.torch_xla_private import compiled as _XLAC
from fsdp_xla.torch_xla_private import runtime_is_started

__all__ = ["Lockstep", "lockstep"]

_FETCHES = ("cpu", "to", "item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__")
_COLLECTIVES = ("cross_replica_sum", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "all_reduce")
#: The client's asynchronous dispatch loses a rank about once in 200 steps, and its pools must hold a thread per rank.
_ENVIRONMENT = {"PJRT_CPU_ASYNC_CLIENT": "0"}
_POOLS = ("XLA_THREAD_POOL_SIZE", "NPROC")


class Lockstep:
    """Runs graphs on all ranks, each when the program is there.

    Args:
        ranks: How many there are.
    """

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._compiled = threading.Event()
        self._before = (0, 0, 0)

    def begin(self) -> None:
        """Leave behind what a run that failed has left on this rank's device; every rank calls it first."""
        _XLAC._set_all_reduce_token(_XLAC._xla_get_default_device(), None)

    def sync(self, wait: bool = False, reset_scope: bool = True) -> None:
        """What ``torch_xla.sync`` does, on all ranks together."""
        device = _XLAC._xla_get_default_device()
        self.together(lambda: _XLAC._xla_step_marker(device, [], wait=wait, reset_scope=reset_scope))
        if xm.is_master_ordinal():
            xm.ms.save_metrics()
        context = xm._run_step_closures()
        _XLAC._set_all_reduce_token(context.device, None)

    def together(self, dispatch: Callable[[], None]) -> None:
        """Call ``dispatch`` on every rank; on others than rank 0 when rank 0's program is in the cache."""
        if self._wait() == 0:
            # what one rank's collector frees and another's doesn't makes their graphs differ
            gc.collect()
            self._compiled.clear()
            self._before = _cache()
        self._wait()
        try:
            if xr.global_ordinal() == 0:
                try:
                    dispatch()
                finally:
                    self._compiled.set()
            else:
                while not self._compiled.is_set() and not self._is_there() and not self._barrier.broken:
                    time.sleep(0.0005)
                dispatch()
        except BaseException:
            self.break_up()
            raise
        self._wait()

    def break_up(self) -> None:
        """Let every rank that waits, or is going to, raise."""
        self._barrier.abort()

    def _is_there(self) -> bool:
        hits, misses, programs = _cache()
        hits_before, misses_before, programs_before = self._before
        if misses == misses_before:
            return hits > hits_before
        return programs > programs_before

    def _wait(self) -> int:
        try:
            return self._barrier.wait()
        except threading.BrokenBarrierError:
            raise RankLostError("another rank has failed.\nSee the other rank's error.") from None


def _cache() -> tuple[int, int, int]:
    counter = _XLAC._xla_counter_value
    return (
        counter("CachedCompile") or 0,
        counter("UncachedCompile") or 0,
        _XLAC._xla_get_num_cached_compilation_graph(),
    )


@contextmanager
def lockstep(ranks: int) -> Iterator[Lockstep]:
    """A context in which threads of this process can be the ranks of a run. Everything is as it was afterwards.

    Raises:
        StrategyUnavailableError: XLA has been started without what ranks need.
    """
    _check_environment(ranks)
    steps = Lockstep(ranks)
    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        for owner in (torch_xla, torch_xla.torch_xla):
            put(owner, "sync", steps.sync)
        put(xm, "mark_step", steps.sync)
        for name in _FETCHES:
            put(Tensor, name, _fetching(getattr(Tensor, name), steps))
        # both are of the process, and ranks are threads
        status = _StatusOfThread()
        for owner in (xla_checkpoint, xla_fsdp):
            put(owner, "chkpt_status", status)
        put(
            fabric_wrappers, "_backward_hook", lambda *_: None
        )  # looks at a flag that another rank's backward pass sets
        put(migration, "_lock", _Patched())
        put(migration.pl_legacy_patch, "__enter__", _once(migration.pl_legacy_patch.__enter__))
        put(migration.pl_legacy_patch, "__exit__", lambda *_: None)
        for function in {fabric_rank_zero_only, rank_zero_only}:
            put(function, "rank", _RankOfThread())
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        _XLAC._xla_get_num_cached_compilation_graph()  # makes the cache, which threads could not make at once
        yield steps


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
    for pool in _POOLS:
        os.environ.setdefault(pool, str(max(8, 2 * ranks)))


def _fetching(fetch: Callable[..., Any], steps: Lockstep) -> Callable[..., Any]:
    """A fetch of what a collective is still to give would compile a program on each rank by itself."""

    @functools.wraps(fetch)
    def fetch_when_run(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "xla" and any(one in _XLAC._get_xla_tensors_text([self]) for one in _COLLECTIVES):
            steps.sync()
        return fetch(self, *args, **kwargs)

    return fetch_when_run


class _StatusOfThread(threading.local):
    in_chkpt_bwd = False


class _Patched:
    """In the place of a lock that a rank would hold while it waits for the others."""

    def acquire(self) -> None:
        """Let all ranks in."""

    def release(self) -> None:
        """Nothing is held."""


def _once(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Lightning's patches for old checkpoints, which ours are not, would be put on and taken off by every rank."""
    return lambda self: self


class _RankOfThread:
    """The rank of the thread that asks: equal to it, and written as it is."""

    def __eq__(self, other: object) -> bool:
        return bool(xr.global_ordinal() == other)

    def __hash__(self) -> int:
        return hash(xr.global_ordinal())

    def __index__(self) -> int:
        return int(xr.global_ordinal())

    def __str__(self) -> str:
        return str(xr.global_ordinal())

    __int__, __repr__ = __index__, __str__
