"""The time of a stream of weights beside that of one collective of the same bytes, in turn.

Type ``python tests-integration/benchmarks/weight_stream_time.py [STRATEGY]``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import fsdp_core
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.measuring.memory import Deep
from fsdp_core.testing.training import new_fabric

TURNS = 9
BLOCKS, WIDTH = 24, 1024  # 192 MiB


def measure(strategy: str, world_size: int) -> dict[str, list[float]]:
    """The seconds of each contender, by turn."""
    torch.set_num_threads(1)
    fabric = new_fabric(strategy, world_size)
    with oracle.seeded(1):
        model = fabric.setup(Deep(BLOCKS, WIDTH))
    runtime = fsdp_core.ProcessGroupRuntime()
    nbytes = sum(tensor.nbytes for _, tensor in fsdp_core.stream_weights(model))
    share = torch.zeros(nbytes // world_size, dtype=torch.uint8)
    sent = fsdp_core.SentWeights()
    list(fsdp_core.stream_weights(model, changed_since=sent))

    def stream(**arguments: Any) -> None:
        for _, _tensor in fsdp_core.stream_weights(model, **arguments):
            pass

    contenders: dict[str, Callable[[], Any]] = {
        "one collective": lambda: runtime.all_gather(share),
        "stream, 1GiB": stream,
        "stream, 8MiB": lambda: stream(budget="8MiB"),
        "stream, in bfloat16": lambda: stream(dtype="bfloat16"),
        "stream of nothing changed": lambda: stream(changed_since=sent),
        "full_state_dict": lambda: fsdp_core.full_state_dict(model),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(TURNS):
        for name, contender in contenders.items():
            fabric.barrier()
            start = time.perf_counter()
            contender()
            seconds[name].append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    with RankPool() as pool:
        for world_size in (2, 4):
            seconds, *_ = pool.run(world_size, measure, *(sys.argv[1:] or ["fsdp2"]), world_size, timeout=300)
            base = seconds["one collective"]
            for name, turns in seconds.items():
                ratios = sorted(one / own for one, own in zip(base, turns, strict=True))
                print(f"{world_size} ranks, {name}: {statistics.median(turns) * 1000:.0f} ms; speed ÷ one collective: "
                      f"{statistics.median(ratios):.2f} ({ratios[1]:.2f} to {ratios[-2]:.2f})")  # fmt: skip
