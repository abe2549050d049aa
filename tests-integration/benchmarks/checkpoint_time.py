"""Time, stall and memory of saving and loading, beside torch's own checkpoints. A script that each rank runs."""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contenders import STRATEGIES, Module
from device import ACCELERATOR, finish
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import be_a_rank
from step_time import compare
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformer import Size, batch, optimizer, transformer

import fsdp_core
from fsdp_core.checkpoint.format.safetensors_file import STAGING_BYTES

__all__ = ["DCP_STALL", "FOUR_GIGABYTES", "LARGE", "SMALL"]

#: Width and layers of 341 million parameters: with AdamW's moments 4.1 GB.
FOUR_GIGABYTES = Size(width=1024, layers=27, windows=1, context=16)

LARGE = Size(width=768, layers=12, windows=1, context=16)  # 85 million parameters: with AdamW's moments 1.02 GB
SMALL = Size(width=128, layers=4, windows=1, context=16)

#: How long torch's own asynchronous save holds its caller, which is measured if asked for.
DCP_STALL = "stall of an async save by torch DCP"

Step = Callable[[], Any]


class Trained:
    """A model and an optimizer that has stepped, sharded by one of our strategies."""

    def __init__(self, strategy: str, size: Size, **options: Any) -> None:
        made = fsdp_core.resolve(strategy, "fabric")(**options)
        self.fabric = Fabric(accelerator=ACCELERATOR, devices=dist.get_world_size(), strategy=made)
        self.fabric.launch()
        model = transformer(size)
        self.model, self.optimizer = self.fabric.setup(model, optimizer(model))
        self.fabric.backward(self.model(batch(size, 0, dist.get_rank()).to(self.fabric.device)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def for_dcp(self) -> dict[str, Any]:
        """The same state as torch's own checkpoints take it."""
        (sharded,) = self.fabric.strategy.roots  # type: ignore[attr-defined]
        # fsdp_native refuses state_dict() of shards; torch's own function asks FSDP1 for shards that say what they are
        vars(sharded.root).pop("state_dict", None)
        model, optimizers = get_state_dict(sharded.root, self.optimizer.optimizer)
        return {"model": model, "optimizer": optimizers}


def memory() -> tuple[int, int]:
    """The memory of this process in bytes: now, and at its peak since the last :func:`forget_peak`."""
    status = Path("/proc/self/status").read_text()
    now, peak = (re.search(rf"{name}:\s+(\d+) kB", status) for name in ("VmRSS", "VmHWM"))
    assert now is not None
    return 1024 * int(now[1]), 1024 * int((peak or now)[1])


def forget_peak() -> bool:
    """Let the peak begin anew; returns whether this system can do that, without which memory is not measured."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class Measured:
    """Seconds by what was done, slowest rank of each turn; and how far memory rose above where it stood."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.extra: dict[str, int] = {}

    def __call__(self, name: str, step: Step) -> None:
        """Do it once, all ranks together, with nothing left to write from before."""
        gc.collect()
        if dist.get_rank() == 0:
            os.sync()
        dist.barrier()
        before, _ = memory()
        has_peak = forget_peak()
        finish()
        began = time.perf_counter()
        step()
        finish()
        took = time.perf_counter() - began
        _, peak = memory()
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (took, peak - before))
        self.seconds.setdefault(name, []).append(max(each for each, _ in found))
        if has_peak:
            self.extra[name] = max(self.extra.get(name, 0), *(each for _, each in found))


def fresh(path: Path) -> str:
    """A path with nothing at it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    return str(path)


def shard_bytes(state: dict[str, Any]) -> int:
    """What this rank holds of a state."""
    total = 0
    for value in state.values():
        if isinstance(value, dict):
            total += shard_bytes(value)
        elif hasattr(value, "local_shards"):  # FSDP1 gives torch's older kind of sharded tensor
            total += sum(shard.tensor.nbytes for shard in value.local_shards())
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            total += local.nbytes
    return total


def save_and_load(
    strategy: str, size: Size, folder: Path, turns: int, *, dcp_stall: bool = False, deadline: float = inf
) -> dict[str, Any]:
    """Save and load in turn with torch's own, and save in the background.

    Args:
        strategy: The strategy's name.
        size: The model's size.
        folder: Where checkpoints are saved.
        turns: How many times each is timed, after a first time that is not.
        dcp_stall: Whether torch's own asynchronous save is timed, too.
        deadline: When there is time for nothing more, on the clock of :func:`time.monotonic`; for one rank only, since
            clocks of several would not agree. What was timed by then counts, even if that is the first time alone.
    """
    mine, behind = Trained(strategy, size), Trained(strategy, size, async_save=True)
    theirs = mine.for_dcp()
    places = {"save": folder / "ours", "save by torch DCP": folder / "dcp", "stall of an async save": folder / "behind"}
    ours_at, dcp_at, behind_at = map(str, places.values())
    saves: dict[str, Step] = {
        "save": lambda: mine.fabric.save(ours_at, mine.state),
        "save by torch DCP": lambda: dcp.save(theirs, checkpoint_id=dcp_at),
        "stall of an async save": lambda: behind.fabric.save(behind_at, behind.state),
    }
    background: list[Any] = []  # torch's own saves that are not complete
    if dcp_stall:
        places[DCP_STALL] = folder / "dcp-behind"
        saves[DCP_STALL] = lambda: background.append(dcp.async_save(theirs, checkpoint_id=str(places[DCP_STALL])))
    loads: dict[str, Step] = {
        "load": lambda: mine.fabric.load(ours_at, mine.state),
        "load by torch DCP": lambda: dcp.load(theirs, checkpoint_id=dcp_at),
    }
    measured, dice = Measured(), random.Random(0)
    first_time: dict[str, list[float]] = {}
    for turn in range(turns + 1):
        order = [*dice.sample(list(saves), len(saves)), *dice.sample(list(loads), len(loads))]
        if turn == 0 and deadline < inf:  # what is left out then is what counts least
            order = sorted(order, key=lambda name: "stall" in name)
        for name in order:
            if time.monotonic() > deadline:
                break
            if name in saves:
                fresh(places[name])
            measured(name, saves.get(name) or loads[name])
            behind.fabric.strategy.wait_for_saves()  # type: ignore[attr-defined]
            while background:
                background.pop().result()
            dist.barrier()
        if turn == 0:  # what is allocated once, and counts as memory, takes time only now
            first_time, measured.seconds = measured.seconds, {}
    shard = shard_bytes(theirs)
    counted = min((len(measured.seconds.get(name, ())) for name in first_time), default=0)
    seconds = {name: times[:counted] for name, times in measured.seconds.items()} if counted else first_time
    pairs = [
        ("save", "save by torch DCP"),
        ("load", "load by torch DCP"),
        ("stall of an async save", "save"),
        *([("stall of an async save", DCP_STALL)] if dcp_stall else []),
    ]
    return {
        "turns": counted,
        "shard": shard,
        "seconds": seconds,
        "medians": {name: median(each) for name, each in seconds.items()},
        "ratios": {f"{a} ÷ {b}": compare(seconds, a, b) for a, b in pairs if a in seconds and b in seconds},
        "extra memory": measured.extra,
        "extra memory ÷ (shard + staging)": {k: v / (shard + STAGING_BYTES) for k, v in measured.extra.items()},
    }


class Held:
    """Seconds for which the saves of one Trainer hold its training thread, if none is still running when one begins.

    A save waits for the one before, whose memory it uses: between steps of milliseconds that would be all it does.
    """

    def __init__(self, strategy: Any) -> None:
        self.seconds: list[float] = []
        self._wait = strategy.wait_for_saves
        strategy.save_checkpoint = self._timed(strategy.save_checkpoint, begins=True)
        if strategy.async_saves is not None:
            strategy.async_saves.finish_copying = self._timed(strategy.async_saves.finish_copying, begins=False)

    def _timed(self, call: Callable[..., Any], *, begins: bool) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if begins:
                self._wait()
                dist.barrier()  # the ranks' own differences are none of the save's
            began = time.perf_counter()
            result = call(*args, **options)
            took = time.perf_counter() - began
            if begins:
                self.seconds.append(took)
            elif self.seconds:
                self.seconds[-1] += took
            return result

        return timed


def held(strategy: str, size: Size, folder: Path, turns: int) -> dict[str, Any]:
    """How long saves hold a Trainer's training thread: until they return, and then before the next optimizer step."""
    by_kind: dict[str, list[float]] = {}
    for kind, asynchronous in (("save", False), ("training held by an async save", True)):
        made = fsdp_core.resolve(strategy, "trainer")(async_save=asynchronous)
        watched = Held(made)
        place = fresh(folder / kind.replace(" ", "-"))
        checkpoints = ModelCheckpoint(place, every_n_train_steps=2, save_top_k=1, monitor=None)
        data = (batch(size, step, dist.get_rank()) for step in range(2 * turns + 4))
        pl.Trainer(
            strategy=made,
            accelerator=ACCELERATOR,
            devices=dist.get_world_size(),
            max_epochs=1,
            callbacks=[checkpoints],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        ).fit(Module(size), data)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, watched.seconds[1 : turns + 1])  # the first allocates what the others use again
        by_kind[kind] = [max(turn) for turn in zip(*found, strict=True)]
    names = list(by_kind)[::-1]
    return {
        "seconds": by_kind,
        "medians": {name: median(each) for name, each in by_kind.items()},
        "ratios": {" ÷ ".join(names): compare(by_kind, *names)},
    }


def reshard(strategy: str, size: Size, folder: Path, turns: int) -> dict[str, Any]:
    """Load what another number of ranks has saved in turn with what this number has."""
    mine, measured, dice = Trained(strategy, size), Measured(), random.Random(0)
    mine.fabric.save(fresh(folder / "same"), mine.state)
    loads: dict[str, Step] = {
        "load of another layout": lambda: mine.fabric.load(str(folder / "ours"), mine.state),
        "load of the same layout": lambda: mine.fabric.load(str(folder / "same"), mine.state),
    }
    for turn in range(turns + 1):
        for name in dice.sample(list(loads), len(loads)):
            measured(name, loads[name])
        if turn == 0:
            measured.seconds.clear()
    names = list(loads)
    return {
        "seconds": measured.seconds,
        "medians": {name: median(each) for name, each in measured.seconds.items()},
        "ratios": {" ÷ ".join(names): compare(measured.seconds, *names)},
    }


def main() -> None:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--turns", type=int, required=True)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--small", dest="size", action="store_const", const=SMALL, default=LARGE)
    sizes.add_argument("--four-gigabytes", dest="size", action="store_const", const=FOUR_GIGABYTES)
    parser.add_argument("--dcp-stall", action="store_true", help="time torch's own asynchronous save, too")
    parser.add_argument("--reshard", action="store_true")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    saved_and_loaded = partial(save_and_load, dcp_stall=args.dcp_stall)
    measure = held if args.held else reshard if args.reshard else saved_and_loaded
    be_a_rank(lambda: measure(args.strategy, args.size, args.folder, args.turns), args.out)


if __name__ == "__main__":
    main()
