"""Where a launch-bound step spends its time in Python, under a strategy and by hand. A script that one rank runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from calls import calls_per_step
from contenders import STRATEGIES, contenders
from ranks import be_a_rank


def profile_contenders(strategy: str) -> dict[str, Any]:
    """Profile some steps of the strategy alone, then of the loop by hand alone.

    Both also run before, for nothing: a process's first training fills caches, such as DTensor's of operators, which
    has entries of its own for each mesh and, in torch 2.11, for each step's bias correction.

    The backward pass runs on this thread, which is the one that is profiled: on a card, autograd would call the hooks
    of FSDP on a thread of its own.

    Args:
        strategy: The strategy's name.
    """
    trains = contenders(strategy)
    names = [strategy, next(name for name in trains if name.endswith("by hand"))]
    with torch.autograd.set_multithreading_enabled(False):
        for name in names:
            calls_per_step(trains[name])
        return {name: calls_per_step(trains[name]) for name in names}


def table(profiles: dict[str, Any]) -> str:
    """The functions with the most time of their own, by how much more of it the first contender's step has.

    Args:
        profiles: What :func:`profile_contenders` returns.
    """
    ours, by_hand = (profiles[name]["functions"] for name in profiles)
    more = {name: ours.get(name, 0.0) - by_hand.get(name, 0.0) for name in {**ours, **by_hand}}
    lines = [f"microseconds per step, under the profiler: {', '.join(profiles)}, the difference, the function"]
    lines += [f"{name}: {profile['calls']:.0f} calls per step" for name, profile in profiles.items()]
    for name in sorted(more, key=lambda name: -more[name]):
        lines.append(f"{ours.get(name, 0.0):9.1f} {by_hand.get(name, 0.0):9.1f} {more[name]:+9.1f}  {name}")
    return "\n".join([*lines, "A function that one contender lacks is not among its first 60."]) + "\n"


def main() -> None:
    """Be the rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--table", type=Path, required=True, help="the file for the table")
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()

    def measure() -> dict[str, Any]:
        profiles = profile_contenders(words.strategy)
        words.table.write_text(table(profiles), encoding="utf-8")
        return {name: profile["calls"] for name, profile in profiles.items()}

    be_a_rank(measure, words.out)


if __name__ == "__main__":
    main()
