"""Kills a rank at each step of a scattered save, and looks at what is left of it in every place; a script.

Each save is of two processes forked from this one, which has torch imported already. What is saved before and after is
saved by threads.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint_ranks import on_threads
from fsdp_core.checkpoint import is_checkpoint, saving
from fsdp_core.checkpoint.storage import commit, local_target
from fsdp_core.checkpoint.storage.recognition import is_interrupted
from fsdp_core.checkpoint.tools.listing import find_checkpoints
from fsdp_core.errors import CheckpointFormatError
from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from kill_saves import fork_rank, wait_for
from versioned_saves import files_in, save_version, version_of

RANKS = 2

#: By name: the rank that is killed, what it does then, and whether it is killed before that or after.
STEPS: dict[str, tuple[int, Any, str, str]] = {
    "claimed by rank 0": (0, local_target.LocalTarget, "claim_for_first", "after"),
    "claimed": (1, local_target.LocalTarget, "claim", "after"),
    "recorded": (1, saving.PerHostSave, "write_part_record", "after"),
    "merged": (0, saving, "_write_state", "after"),
    "published": (1, local_target.LocalTarget, "publish", "after"),
    "before the commit": (0, commit.SaveTarget, "commit", "before"),
    "committed": (0, commit.SaveTarget, "commit", "after"),
    "before it is tidied": (1, local_target.LocalTarget, "remove_earlier_save", "before"),
}
COMPLETE = {"committed", "before it is tidied"}


def save_place(folder: Path, version: float, runtime: Runtime) -> None:
    save_version(folder / f"host{runtime.rank}" / "last.ckpt", version, runtime, scattered=True)


def version_in(paths: list[Path]) -> float | None:
    """The version that places hold together, every element of which says it; ``None`` if they hold none."""
    try:
        return version_of([path for path in paths if path.is_dir()])
    except CheckpointFormatError:
        return None


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(step: str, folder: Path, meeting: Path, rank: int) -> None:
    """Save version 2 as one of two ranks, of which one is killed; never returns."""
    victim, owner, name, when = STEPS[step]
    if rank == victim:
        real: Callable[..., Any] = getattr(owner, name)

        def until(*arguments: Any, **options: Any) -> Any:
            result = None if when == "before" else real(*arguments, **options)
            die()
            return result

        setattr(owner, name, until)
    runtime = ProcessGroupRuntime()
    runtime.rank, runtime.world_size = rank, RANKS
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    save_place(folder, 2.0, runtime)


def look(step: str, folder: Path, *, replacing: bool) -> dict[str, Any]:
    """Kill a save at one step; what a reader finds, and what is left after the next save."""
    places = [folder / f"host{rank}" / "last.ckpt" for rank in range(RANKS)]
    for place in places:
        place.parent.mkdir(parents=True)
    if replacing:
        assert on_threads(RANKS, lambda runtime: save_place(folder, 1.0, runtime)) == [None] * RANKS
    for pid in [fork_rank(kill_at, step, folder, folder / "meeting", rank) for rank in range(RANKS)]:
        wait_for(pid)
    (folder / "meeting").unlink(missing_ok=True)
    alone = [version_in([place]) for place in places if place.is_dir()]
    found = version_in(places) if any(place.is_dir() for place in places) else None
    states = sorted(one.state for place in places for one in find_checkpoints(place.parent))
    interrupted = [is_interrupted(place) for place in places if place.is_dir()]
    whole = [is_checkpoint(place) for place in places]
    results = on_threads(RANKS, lambda runtime: save_place(folder, 3.0, runtime))
    assert results == [None] * RANKS, results
    ids = {name.partition("/")[2][:12] for place in places for name in files_in(place) if name.startswith("model/")}
    (save_id,) = ids  # nothing of another save is left at the paths
    strange = [name for place in places for name in files_in(place) if save_id not in name and name != "manifest.json"]
    beside = sorted(found.name for place in places for found in place.parent.iterdir())
    after = version_in(places)
    return {"alone": alone, "found": found, "states": states, "interrupted": interrupted, "whole": whole,
            "after": after, "strange": strange, "beside": beside}  # fmt: skip


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    seen = {}
    for step in STEPS:
        for replacing in (True, False):
            if replacing or step in ("claimed", "published", "committed"):
                number = len(seen)
                seen[f"{step}, {'replacing' if replacing else 'new'}"] = look(
                    step, folder / f"{number}", replacing=replacing
                )
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
