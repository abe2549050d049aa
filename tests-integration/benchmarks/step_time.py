"""Time per step of the same training by hand and by strategies of Lightning's Trainer. A script that each rank runs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from math import ceil, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from contenders import HandShardedModule, Module, Step, by_hand, by_trainer, model_parallel
from ranks import be_a_rank
from transformer import Size
from turns import Turn, take_turns

__all__ = ["compare"]

PAIRS = [("fsdp2", "by hand"), ("fsdp2", "ModelParallelStrategy"), ("by hand, again", "by hand")]


def ours(strategy: str, size: Size, after_step: Step) -> None:
    """Train by name."""
    by_trainer(size, after_step, strategy, Module(size))


def model_parallel_trainer(size: Size, after_step: Step) -> None:
    """Train with Lightning's ModelParallelStrategy."""
    by_trainer(size, after_step, model_parallel(), HandShardedModule(size))


def compare(seconds: dict[str, list[float]], numerator: str, denominator: str, rounds: int) -> dict[str, float]:
    """How much longer one contender's steps take than another's, step by step.

    Each step's ratio is of two steps that ran within a second or so of each other.

    Args:
        seconds: Time of each step by contender, in the order in which they ran.
        numerator: The contender asked about.
        denominator: The one it is compared with.
        rounds: In how many consecutive parts to look at the steps for the spread.

    Returns:
        ``ratio``, the median over all steps; ``from`` and ``to``, between which the true median lies with 95 %
        confidence, by the order statistics of independent ratios; ``low`` and ``high``, the least and greatest median
        of a round.
    """
    ratios = [a / b for a, b in zip(seconds[numerator], seconds[denominator], strict=True)]
    length = len(ratios) // rounds
    medians = [median(ratios[i * length : (i + 1) * length]) for i in range(rounds)]
    ranked, half = sorted(ratios), 0.98 * sqrt(len(ratios))
    first, last = max(0, int(len(ratios) / 2 - half)), min(len(ratios) - 1, ceil(len(ratios) / 2 + half))
    return {
        "ratio": median(ratios),
        "from": ranked[first],
        "to": ranked[last],
        "low": min(medians),
        "high": max(medians),
    }


def measure(strategy: str, size: Size, rounds: int, steps: int) -> dict[str, Any]:
    """Let the contenders take turns.

    The loop by hand takes part twice: the ratio of a thing to itself shows what the method can tell apart.
    """
    names = {"fsdp2": partial(ours, strategy, size), "ModelParallelStrategy": partial(model_parallel_trainer, size)}
    names |= {"by hand": partial(by_hand, size), "by hand, again": partial(by_hand, size)}
    turns = [Turn(name, train) for name, train in names.items()]
    take_turns(turns, rounds=rounds, steps=steps)

    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, {turn.name: (turn.seconds, turn.cpu_seconds) for turn in turns})
    # A step is over when the slowest rank is through; the work is that of all ranks.
    seconds = {name: [max(of) for of in zip(*(rank[name][0] for rank in by_rank), strict=True)] for name in names}
    cpu_seconds = {name: [sum(of) for of in zip(*(rank[name][1] for rank in by_rank), strict=True)] for name in names}
    losses = {turn.name: torch.stack(turn.losses) for turn in turns}
    apart = max(float((loss - losses["by hand"]).abs().max()) for loss in losses.values())
    if apart > 1e-4:
        raise RuntimeError(f"the contenders don't train the same: their losses differ by {apart:.1e}")
    return {
        "size": asdict(size),
        "rounds": rounds,
        "steps per round": steps,
        "milliseconds": {name: 1000 * median(times) for name, times in seconds.items()},
        "losses differ by": apart,
        "ratios": {f"{a} / {b}": compare(seconds, a, b, rounds) for a, b in PAIRS},
        "cpu ratios": {f"{a} / {b}": compare(cpu_seconds, a, b, rounds) for a, b in PAIRS},
        "seconds": seconds,
    }


def main() -> None:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="fsdp2")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    be_a_rank(lambda: measure(args.strategy, Size(), args.rounds, args.steps), args.out)


if __name__ == "__main__":
    main()
