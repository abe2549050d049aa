"""What the tests of saves in the background run on ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpoint_ranks import KINDS, bits, sharded, started
from fsdp_core.checkpoint import async_save, fill, is_checkpoint, load, read_manifest, remove, save, verify
from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.errors import CheckpointError, CheckpointValueError
from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.testing.measuring.disks import disk
from fsdp_core.testing.refusals import refusal

OPTIONS: dict[str, Any] = {"strategy": "test", "kinds": KINDS}


def new_state(epoch: int = 3) -> dict[str, Any]:
    """Weights with a moment for each, a callback's tensor, and plain data that can be changed."""
    weights = sharded("flat")
    moments = {name: {"exp_avg": weight * 2} for name, weight in weights.items()}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": list(weights)}]}
    return {"model": weights, "optimizer": [optimizer], "best": torch.tensor(7.0), "history": [1, [2]], "epoch": epoch}


def change(state: dict[str, Any]) -> None:
    """Change everything in a state, in place."""
    with torch.no_grad():
        for tensor in (*state["model"].values(), state["best"]):
            tensor.zero_()
        for values in state["optimizer"][0]["state"].values():
            values["exp_avg"].zero_()
    state["optimizer"][0]["param_groups"][0]["lr"] = 0.0
    state["history"][1].append(3)


def assert_saved(path: Path, epoch: int = 3) -> None:
    """A checkpoint holds :func:`new_state`."""
    verify(path)
    nest, expected = load(path), new_state()
    saved_moments, moments = nest["optimizer"][0]["state"], expected["optimizer"][0]["state"]
    for name, weight in expected["model"].items():
        pairs = ((weight, nest["model"][name]), (moments[name]["exp_avg"], saved_moments[name]["exp_avg"]))
        for original, saved in pairs:
            filled = torch.zeros_like(original)
            fill(filled, saved)
            assert bits(filled) == bits(original), name
    assert (nest["best"].item(), nest["optimizer"][0]["param_groups"][0]["lr"]) == (7.0, 0.1)
    assert (nest["history"], nest["epoch"]) == ([1, [2]], epoch)


def change_while_written(path: Path) -> None:
    """Change everything as soon as the save has returned."""
    saves = AsyncSaves(started())
    with disk(opened=False) as slow:
        for epoch in (3, 4):  # into new memory, and into memory that was used before
            state = new_state(epoch)
            saves.save(path, state, **OPTIONS)
            change(state)
            assert epoch == 4 or not is_checkpoint(path)
            slow.opened.set()
            saves.wait()
            assert_saved(path, epoch)
            slow.opened.clear()
            dist.barrier()
    saves.close()


def save_twice(folder: Path) -> None:
    """Save twice, and let the first one be written only when the second has begun."""
    saves = AsyncSaves(started())
    with disk(opened=False) as slow:
        saves.save(folder / "first", new_state(), **OPTIONS)
        assert not is_checkpoint(folder / "first")
        threading.Timer(0.5, slow.opened.set).start()
        saves.save(folder / "second", new_state(), **OPTIONS)
        assert is_checkpoint(folder / "first")
        saves.close()
    assert_saved(folder / "second")


def fail_on_one_rank(path: Path, bad_rank: int) -> tuple[str, int]:
    """Overwrite a checkpoint on a disk that is full on one rank, and go on stepping; the error, and at which step."""
    runtime = started()
    saves = AsyncSaves(runtime)
    saves.save(path, new_state(), **OPTIONS)
    saves.wait()
    before = read_manifest(path).save_id
    message, raised_at = "", -1
    with disk(room=1000 if runtime.rank == bad_rank else None):
        saves.save(path, new_state(epoch=4), **OPTIONS)
        for step in range(10_000):
            try:
                saves.step()
            except CheckpointError as error:
                message, raised_at = f"{type(error).__name__}: {error}", step
                break
            if step % 3 == runtime.rank:  # one rank and then the other is ahead
                time.sleep(0.002)
            dist.all_reduce(torch.ones(1))  # a rank that raised at another step would leave the other one here
    for _ in range(3):  # once
        saves.step()
        saves.wait()
    assert read_manifest(path).save_id == before
    assert_saved(path)
    saves.save(path, new_state(epoch=5), **OPTIONS)
    saves.close()
    assert_saved(path, epoch=5)
    return message, raised_at


def errors_of_next_calls(folder: Path) -> list[str]:
    """What the next call but a step says of a failure; nothing is done by the call itself."""
    runtime, messages = started(), []
    calls: dict[str, Callable[[AsyncSaves], None]] = {
        "save": lambda saves: saves.save(folder / "other", new_state(), **OPTIONS),
        "wait": AsyncSaves.wait,
        "close": AsyncSaves.close,
    }
    for name, call in calls.items():
        saves = AsyncSaves(runtime)
        with disk(room=1000):
            saves.save(folder / name, new_state(), **OPTIONS)
            messages.append(refusal(CheckpointError, lambda call=call, saves=saves: call(saves)))  # type: ignore[misc]
        saves.close()
        assert not (folder / name).exists()
    assert not (folder / "other").exists()
    return messages


def remove_behind_a_save(folder: Path, fails: bool) -> list[str]:
    """Ask for a removal behind a save; gives what is there in the end."""
    runtime = started()
    save(folder / "old", new_state(), runtime=runtime, **OPTIONS)
    saves = AsyncSaves(runtime)
    with disk(opened=False, room=1000 if fails and runtime.rank else None) as slow:
        saves.save(folder / "new", new_state(), **OPTIONS)
        saves.run("removing old", lambda ranks: remove(folder / "old") if ranks.rank == 0 else None)
        assert is_checkpoint(folder / "old")
        assert not is_checkpoint(folder / "new")
        slow.opened.set()
        if fails:
            with pytest.raises(CheckpointError, match="No space left on device"):
                saves.wait()
        saves.close()
    return sorted(path.name for path in folder.iterdir())


def fail_in_a_job(path: Path) -> str:
    """Fail on rank 0 alone, in a job that is no save."""
    runtime = started()
    saves = AsyncSaves(runtime)
    if runtime.rank == 0:  # a folder that is no checkpoint
        path.mkdir()
        (path / "notes.txt").touch()
    saves.run("removing it", lambda ranks: remove(path) if ranks.rank == 0 else None)
    with pytest.raises(CheckpointError) as error:
        saves.wait()
    saves.close()
    return f"{type(error.value).__name__}: {error.value}"


def save_what_is_refused(path: Path) -> str:
    """A state that can't be saved is refused by the call itself, on all ranks."""
    runtime = started()
    saves, state = AsyncSaves(runtime), new_state()
    if runtime.rank == 1:
        state["hook"] = print
    message = refusal(CheckpointValueError, lambda: saves.save(path, state, **OPTIONS))
    saves.close()
    return message


def write_before_the_copy(path: Path) -> str:
    """Write to shards on one rank before their deferred copies are made."""
    runtime = started()
    saves, state = AsyncSaves(runtime), new_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_save, "_SECONDS_BEFORE_JOB", 1e6)  # the thread waits until somebody waits for it
        parts = list(map(local_tensor, state["model"].values()))  # when asked for later, the copies are made at once
        saves.save(path, state, deferred=lambda tensor: [tensor], **OPTIONS)
        if runtime.rank == 1:
            for part in parts:
                part.zero_()
        message = refusal(CheckpointError, saves.wait)
    assert not path.exists()
    saves.save(path, new_state(), **OPTIONS)  # the ranks are not out of step
    saves.close()
    assert_saved(path)
    return message


def die_while_writing(path: Path) -> None:
    """Rank 1 dies while it writes; rank 0 notes what is raised."""
    runtime = started()
    saves = AsyncSaves(runtime)
    with disk(opened=runtime.rank == 0) as used:
        saves.save(path, new_state(), **OPTIONS)
        if runtime.rank == 1:
            assert used.reached.wait(20)
            os._exit(3)
        try:
            saves.wait()
        except CheckpointError as error:
            path.with_suffix(".txt").write_text(str(error))
