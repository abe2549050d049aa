"""Ranks on XLA's CPU devices, for the conformance suite: threads in lockstep, or SPMD's one process.

Example:
    .. code-block:: python

        from fsdp_core.testing.suite import StrategySuite
        from fsdp_xla.testing import SPMDRanks, ThreadRanks


        class TestXLA(StrategySuite):
            strategy = "xla_fsdp"
            rank_pool = ThreadRanks
"""

from __future__ import annotations

from typing import ClassVar

from fsdp_core.testing import Failure, OneProcessRanks, RankKind, StartMethod

__all__ = ["COMPUTED_ONCE", "QUICK", "SPMDRanks", "ThreadRanks"]

#: A value of ``XLA_FLAGS`` that reduces compile time to a quarter, with the same results.
QUICK = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",  # programs are small, and other processes use the other cores
    ]
)

#: Keeps torch from computing the shape of each result a second time in Python, to compare it with the device's.
COMPUTED_ONCE = {"TORCH_DISABLE_FUNCTIONALIZATION_META_REFERENCE": "1"}


class _XLARanks(OneProcessRanks):
    start_method: ClassVar[StartMethod] = "forkserver"  # torch_xla reads its variables at the first use of a device
    patience: ClassVar[float] = 2.5  # most of the time is spent compiling

    def environment(self, world_size: int) -> dict[str, str]:
        threads = str(max(8, 2 * world_size))
        return {
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(world_size),
            "PJRT_CPU_ASYNC_CLIENT": "0",
            "XLA_THREAD_POOL_SIZE": threads,
            "NPROC": threads,
            "XLA_FLAGS": QUICK,
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **COMPUTED_ONCE,
        }


class ThreadRanks(_XLARanks):
    """One rank per XLA device, each a thread: for ``xla_fsdp``."""

    kind: ClassVar[RankKind] = "threads"
    caller: ClassVar[str] = "fsdp_xla.testing.calling:on_threads"

    def follows_from_another(self, failure: Failure) -> bool:
        """Whether the rank failed because it lost another rank."""
        return "RankLostError" in failure.summary


class SPMDRanks(_XLARanks):
    """One process for all XLA devices: for ``xla_fsdp_spmd``."""

    kind: ClassVar[RankKind] = "one controller"
    keeps: ClassVar[tuple[str, ...]] = ("XLA_USE_SPMD",)
    caller: ClassVar[str] = "fsdp_xla.testing.calling:on_all_devices"
