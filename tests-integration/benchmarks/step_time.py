"""Time per step of the same training by name, by Lightning's own strategy and by hand. A script that each rank runs."""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import asdict
from functools import partial
from math import ceil, inf, sqrt
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
import torch.distributed as dist
from contenders import STRATEGIES, Train, contenders
from ranks import be_a_rank
from transformer import Size
from turns import Turn, take_turns
from ways import WAYS, contenders_of

__all__ = ["compare", "joined", "mirrored"]

SMALL = Size(width=16, windows=1, context=8)  # as many blocks, and next to nothing to compute


def mirrored(names: list[str]) -> list[str]:
    """An order in which each takes part twice, once as early as the other time late: A B C C B A.

    A loop's place in the order of warming up moves its time by a percent or two. Two loops of each contender, in
    places of the same sum, cancel that.
    """
    return [*names, *reversed(names)]


def compare(seconds: dict[str, list[float]], numerator: str, denominator: str) -> dict[str, float]:
    """How much longer one contender's steps take than another's, turn by turn.

    Each ratio is of steps that ran within a few seconds of each other.

    Args:
        seconds: Time of each turn's step by contender.
        numerator: The contender asked about.
        denominator: The one it is compared with.

    Returns:
        ``ratio``, the median over all turns; ``from`` and ``to``, between which the true median lies with 95 %
        confidence, by the order statistics of independent ratios.
    """
    ratios = sorted(a / b for a, b in zip(seconds[numerator], seconds[denominator], strict=True))
    middle, half = len(ratios) / 2, 0.98 * sqrt(len(ratios))
    first, last = max(0, int(middle - half)), min(len(ratios) - 1, ceil(middle + half))
    return {"ratio": median(ratios), "from": ratios[first], "to": ratios[last]}


def by_contender(loops: list[Turn], times: list[list[float]]) -> dict[str, list[float]]:
    """For each contender and turn, the geometric mean of what its two loops took."""
    twins: dict[str, list[list[float]]] = {}
    for loop, of in zip(loops, times, strict=True):
        twins.setdefault(loop.name, []).append(of)
    return {name: [geometric_mean(turn) for turn in zip(*both, strict=True)] for name, both in twins.items()}


def measure(
    trains: dict[str, Train], size: Size, turns: int, seed: int, *, beside_itself: bool = True, deadline: float = inf
) -> dict[str, Any]:
    """Let the contenders take turns, in one process per rank.

    The loop by hand is two of them, unless it is to be one: the ratio of a thing to itself shows what the method can
    tell apart.

    Args:
        trains: The contenders by name: one of this project's strategies, Lightning's own if it is compared, and the
            loop by hand.
        size: What to train.
        turns: How many steps of each are timed.
        seed: Decides in which order they are built.
        beside_itself: Whether the loop by hand is two of the contenders.
        deadline: As :func:`turns.take_turns` takes it, for one rank alone.
    """
    mine, *lightnings, loop = trains
    again = f"{loop}, again"
    if beside_itself:
        trains[again] = trains[loop]
    order = random.Random(seed).sample(list(trains), len(trains))
    loops = [Turn(name, partial(trains[name], size)) for name in mirrored(order)]
    take_turns(loops, turns=turns, deadline=deadline)

    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, [(loop.seconds, loop.cpu_seconds) for loop in loops])
    # A step is over when the slowest rank is through; the work is that of all ranks.
    seconds = [[max(of) for of in zip(*(rank[i][0] for rank in by_rank), strict=True)] for i in range(len(loops))]
    cpu_seconds = [[sum(of) for of in zip(*(rank[i][1] for rank in by_rank), strict=True)] for i in range(len(loops))]
    losses = torch.stack([torch.stack(loop.losses) for loop in loops])
    apart = float((losses.amax(0) - losses.amin(0)).max())
    wall, cpu = by_contender(loops, seconds), by_contender(loops, cpu_seconds)
    milliseconds = {name: 1000 * median(times) for name, times in wall.items()}
    if apart > 1e-4:
        raise RuntimeError(
            f"the contenders don't train the same: their losses differ by {apart:.1e}; milliseconds: {milliseconds}"
        )
    pairs = [(mine, loop), *((mine, one) for one in lightnings), *([(again, loop)] if beside_itself else [])]
    return {
        "size": asdict(size),
        "turns": len(loops[0].seconds),
        "losses differ by": apart,
        "milliseconds": milliseconds,
        "ratios": {f"{a} ÷ {b}": compare(wall, a, b) for a, b in pairs},
        "ratios of processor time": {f"{a} ÷ {b}": compare(cpu, a, b) for a, b in pairs},
        "seconds": [{"contender": loop.name, "steps": times} for loop, times in zip(loops, seconds, strict=True)],
    }


def joined(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Several rounds, each of fresh processes, as one figure.

    Where a process has laid out its memory moves all steps of a contender by about a percent, so that the turns of one
    round are not independent of each other. Rounds are: what counts is the median of theirs.

    Args:
        rounds: What :func:`measure` gave.
    """
    first = rounds[0]

    def over_rounds(key: str, pair: str) -> dict[str, float]:
        ratios = [of[key][pair]["ratio"] for of in rounds]
        return compare({"it": ratios, "one": [1.0] * len(ratios)}, "it", "one")

    return {
        "size": first["size"],
        "turns": [of["turns"] for of in rounds],
        "losses differ by": max(of["losses differ by"] for of in rounds),
        "milliseconds": {name: median(of["milliseconds"][name] for of in rounds) for name in first["milliseconds"]},
        **{
            key: {pair: over_rounds(key, pair) for pair in first[key]} for key in ("ratios", "ratios of processor time")
        },
        "rounds": rounds,
    }


def main() -> None:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--way", choices=WAYS, help="how fsdp2 trains, besides its defaults; without Lightning's own")
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--small", action="store_true", help="next to nothing to compute: what a step costs anyway")
    parser.add_argument("--once", action="store_true", help="do not compare the loop by hand with itself")
    parser.add_argument("--seconds", type=float, default=inf, help="no turn begins after that, but for three; one rank")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    trains = contenders(args.strategy) if args.way is None else contenders_of(WAYS[args.way])
    size = SMALL if args.small else Size()
    timed = partial(measure, trains, size, args.turns, args.seed, beside_itself=not args.once, deadline=deadline)
    be_a_rank(timed, args.out)


if __name__ == "__main__":
    main()
