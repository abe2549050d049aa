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

from contenders import STRATEGIES, Train, contenders
from ranks import be_a_rank
from step_time import SMALL
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["calls_per_step"]

FIRST, STEPS = 5, 40  # what is built once is there by then


def calls_per_step(train: Train) -> float:
    """Train, and count from the sixth step on."""
    profile = cProfile.Profile()

    def after_step(step: int, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> bool:
        if step == FIRST:
            profile.enable()
        if step < FIRST + STEPS:
            return True
        profile.disable()
        return False

    train(SMALL, after_step)
    return pstats.Stats(profile).total_calls / STEPS  # type: ignore[attr-defined]


def main() -> None:
    """Be the rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--contender", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    train = contenders(args.strategy)[args.contender]
    be_a_rank(lambda: {"calls": calls_per_step(train)}, args.out)


if __name__ == "__main__":
    main()
