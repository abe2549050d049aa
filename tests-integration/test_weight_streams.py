"""Streams of weights over ranks: the memory that they take, and what goes wrong while one runs."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_core
from forked_scripts import run_forked
from fsdp_core.errors import CheckpointMismatchError, ShardingError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.measuring.memory import Deep, is_measurable, peak_of
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import new_fabric

BUDGET = 8 * 2**20
LARGEST = 1024 * 1024 * 4  # a weight of a block of width 1024
_M_MMAP_THRESHOLD = -3  # of malloc.h
SLACK = 1.5 * 2**20  # what an allocator rounds up, and Python objects


def deep(fabric: Any, blocks: int, width: int) -> Any:
    with oracle.seeded(1):
        return fabric.setup(Deep(blocks, width))


def iterate(model: Any, budget: int) -> int:
    """Iterate over a stream without keeping a tensor; returns the number of bytes."""
    nbytes = 0
    for _, tensor in fsdp_core.stream_weights(model, budget=budget):
        nbytes += tensor.nbytes
        del tensor
    return nbytes


def extra_memory(strategy: str, options: dict[str, Any], world_size: int) -> list[tuple[int, int]]:
    """The peaks of host memory above what was used before, and the bytes that were streamed, by budget."""
    # glibc keeps freed blocks of less than a threshold, which grows to that of what is freed unless it is set
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 65536)
    fabric = new_fabric(strategy, world_size, options)
    model = deep(fabric, 4, 1024)  # 32 MiB
    measured = []
    for budget in (BUDGET, 2**20):  # the second is smaller than the largest tensor
        iterate(model, budget)  # what is allocated only once
        nbytes: list[int] = []
        measured.append((peak_of(lambda: nbytes.append(iterate(model, budget))), nbytes[0]))  # noqa: B023
    return measured


@pytest.mark.drawn
@pytest.mark.skipif(not is_measurable(), reason="only Linux tells the peak memory")
@pytest.mark.parametrize(
    ("strategy", "options", "world_size"),
    [
        ("fsdp2", {}, 2),
        ("fsdp_native", {}, 2),
        ("fsdp2", {"data_parallel_replicate_size": 2, "data_parallel_size": 1}, 2),
    ],
    ids=["fsdp2", "fsdp_native", "replicas"],
)
def test_a_stream_takes_its_budget_and_the_largest_tensor(
    ranks: RankPool, strategy: str, options: dict[str, Any], world_size: int
) -> None:
    for measured in ranks.run(world_size, extra_memory, strategy, options, world_size):
        for (peak, nbytes), budget in zip(measured, (BUDGET, 2**20), strict=True):
            assert nbytes == 8 * (1024 * 1024 + 1024) * 4
            assert peak <= budget + LARGEST + SLACK, f"{peak} bytes with a budget of {budget}"


def faults(strategy: str) -> Any:
    """What this rank is told while weights change within a stream, and what follows one that was left early."""
    fabric = new_fabric(strategy, 2)
    model = deep(fabric, 2, 64)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stream = fsdp_core.stream_weights(model, budget=1)
    next(stream)
    optimizer.step()
    messages = [refusal(ShardingError, lambda: list(stream))]
    for _ in fsdp_core.stream_weights(model, budget=1):
        if fabric.global_rank:
            break  # the other rank goes on
    sent = fsdp_core.SentWeights()
    list(fsdp_core.stream_weights(model, changed_since=sent))

    def refused(error: type[Exception], **arguments: Any) -> None:
        messages.append(refusal(error, lambda: fsdp_core.stream_weights(model, **arguments)))

    refused(ShardingError, budget=2**20 + fabric.global_rank)
    refused(
        CheckpointMismatchError, dtype="float16", changed_since=sent if fabric.global_rank else fsdp_core.SentWeights()
    )
    streamed = dict(fsdp_core.stream_weights(model))
    used: Any = fabric.strategy
    differing = [name for name, value in full_state(used).items() if not torch.equal(streamed[name], value)]
    return messages, differing


@pytest.mark.drawn
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp_native"])
def test_what_goes_wrong_within_a_stream_is_told_on_every_rank(ranks: RankPool, strategy: str) -> None:
    for (changed, other_budget, other_receiver), differing in ranks.run(2, faults, strategy):
        assert_says(changed, "weights were written to between two tensors", "before the next step")
        assert_says(
            other_budget, "rank 1 called stream_weights() with another model or other arguments", "Pass the same"
        )
        assert_says(other_receiver, "dtype=None, and this one has names=None, dtype=torch.float16", "on rank 1 of 2")
        assert differing == []


EXAMPLE = Path(__file__).parent.parent / "docs/examples/weights_to_another_process.py"


def test_the_page_shows_the_example() -> None:
    page = (EXAMPLE.parent.parent / "checkpoints.md").read_text(encoding="utf-8")
    assert f"```python\n{EXAMPLE.read_text(encoding='utf-8')}```" in page


def test_another_process_has_the_weights_of_each_step(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    output = run_forked(tmp_path / "script.py", "fsdp2", folder=tmp_path)
    steps = re.findall(r"^step (\d): sent (.+); it answers (\S+)$", output, flags=re.MULTILINE)
    assert [(step, names) for step, names, _ in steps] == [
        ("1", "0.weight, 0.bias, 2.weight, 2.bias"),
        ("2", "2.weight, 2.bias"),
        ("3", "2.weight, 2.bias"),
    ]
    assert f"trained: {steps[-1][2]}" in output
    assert len({answer for _, _, answer in steps}) == 3
