"""How many calls of functions a step makes, in Python and from Python into C. A script that each rank runs.

A count varies far less than time does (torch's hash tables compare a little more or less from run to run), so it
tells what time can't: whether a strategy does more in a step. One contender
in a process, for what torch remembers of one's tensors spares the next one some calls.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from pathlib import Path
from typing import Any

from contenders import STRATEGIES, Train, contenders
from ranks import be_a_rank
from step_time import SMALL
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["calls_per_step"]

FIRST, STEPS = 5, 40  # what is built once is there by then


#: How many functions are listed.
LISTED = 60


def calls_per_step(train: Train) -> dict[str, Any]:
    """Train, and count from the sixth step on.

    Returns:
        ``calls`` per step; and ``functions``, the microseconds that a step spends in each of those with the most time
        of their own, on this thread: on CUDA, autograd calls hooks on another.
    """
    profile = cProfile.Profile()

    def after_step(step: int, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> bool:
        if step == FIRST:
            profile.enable()
        if step < FIRST + STEPS:
            return True
        profile.disable()
        return False

    train(SMALL, after_step)
    stats: Any = pstats.Stats(profile)
    own = {f"{Path(file).name}:{line}({name})": row[2] for (file, line, name), row in stats.stats.items()}
    dearest = sorted(own, key=own.__getitem__, reverse=True)[:LISTED]
    return {
        "calls": stats.total_calls / STEPS,
        "functions": {name: round(1e6 * own[name] / STEPS, 1) for name in dearest},
    }


def main() -> None:
    """Be the rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--contender", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    train = contenders(args.strategy)[args.contender]
    be_a_rank(lambda: calls_per_step(train), args.out)


if __name__ == "__main__":
    main()
