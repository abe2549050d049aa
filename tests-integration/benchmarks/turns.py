"""Let several training loops take steps in turn, in one process per rank, and time each step."""

from __future__ import annotations

import math
import os
import random
import threading
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist
from contenders import Step
from device import finish, prepare_thread
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Turn", "take_turns"]

LEAST_TURNS = 3  # of which there is a median


class Turn:
    """One training loop in a thread of its own that takes one step each time it is told to.

    Only one thread runs at any moment, and the order is the same on every rank, so collectives of different loops
    never mix.

    Attributes:
        name: What to call it.
        seconds: How long each timed step took on this rank.
        cpu_seconds: The processor time of all threads of this rank during each step.
        losses: The loss of each timed step on this rank.
    """

    def __init__(self, name: str, train: Callable[[Step], None]) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.losses: list[Tensor] = []
        self._train, self._go, self._done = train, threading.Semaphore(0), threading.Semaphore(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def warm_up(self) -> None:
        """Build everything and take the first step."""
        self._thread.start()
        self._done.acquire()

    def step(self) -> None:
        """Take one step, and time it from the moment when all ranks are ready for it until the device is done."""
        finish()
        dist.barrier()
        started, cpu_started = time.perf_counter(), time.process_time()
        self._go.release()
        self._done.acquire()
        finish()
        self.seconds.append(time.perf_counter() - started)
        self.cpu_seconds.append(time.process_time() - cpu_started)

    def stop(self) -> None:
        """End the loop."""
        self._stopping = True
        self._go.release()
        self._thread.join()

    def _after_step(self, step: int, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> bool:
        if step:
            self.losses.append(loss)
        self._done.release()
        self._go.acquire()
        return not self._stopping

    def _run(self) -> None:
        prepare_thread()
        try:
            self._train(self._after_step)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the other ranks wait in a collective; their launcher ends them


def take_turns(loops: list[Turn], *, turns: int, deadline: float = math.inf) -> None:
    """Have every loop take ``turns`` timed steps, one step at a time, in an order shuffled for each turn.

    A spell in which the machine is slower then meets all loops alike. What the shuffling can't level out is the order
    in which they warm up, which is that of the list: it decides where in memory each lies.

    Args:
        loops: Who takes turns.
        turns: How many there are.
        deadline: After three turns none begins later than this, on the clock of :func:`time.monotonic`. For one rank
            alone: several would not agree.
    """
    for loop in loops:
        loop.warm_up()
    for loop in loops:  # the first step after a warm-up still allocates: optimizer state, buffers
        loop.step()
        loop.seconds.clear()
        loop.cpu_seconds.clear()
        loop.losses.clear()
    dice = random.Random(0)
    for turn in range(turns):
        if turn >= LEAST_TURNS and time.monotonic() > deadline:
            break
        for loop in dice.sample(loops, len(loops)):
            loop.step()
    for loop in loops:
        loop.stop()
