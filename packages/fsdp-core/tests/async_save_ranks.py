"""What the tests of saves in the background run on ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_ranks import KINDS, bits, sharded, started
from fsdp_core.checkpoint import async_save, fill, is_checkpoint, load, read_manifest, remove, save, verify
from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.errors import CheckpointError, CheckpointValueError
from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.testing.measuring.disks import disk
from fsdp_core.testing.refusals import refusal


def state_of(weights: dict[str, Tensor], epoch: int = 3) -> dict[str, Any]:
    """A state with a moment for each weight, a callback's tensor and plain data that can be changed."""
    moments = {name: {"exp_avg": weight * 2} for name, weight in weights.items()}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": list(weights)}]}
    return {"model": weights, "optimizer": [optimizer], "best": torch.tensor(7.0), "history": [1, [2]], "epoch": epoch}


def as_given(state: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a save."""
    return {"state": state, "strategy": "test", "kinds": KINDS}


def change(state: dict[str, Any]) -> None:
    """Change everything in a state, in place."""
    with torch.no_grad():
        for tensor in (*state["model"].values(), state["best"]):
            tensor.zero_()
        for values in state["optimizer"][0]["state"].values():
            values["exp_avg"].zero_()
    state["optimizer"][0]["param_groups"][0]["lr"] = 0.0
    state["history"][1].append(3)


def assert_unchanged(path: Path, epoch: int = 3) -> None:
    """A checkpoint holds what :func:`state_of` gives."""
    verify(path)
    nest, expected = load(path), state_of(sharded("flat"))
    for name, weight in expected["model"].items():
        for want, got in (
            (weight, nest["model"][name]),
            (expected["optimizer"][0]["state"][name]["exp_avg"], nest["optimizer"][0]["state"][name]["exp_avg"]),
        ):
            held = torch.zeros_like(want)
            fill(held, got)
            assert bits(held) == bits(want), name
    assert (nest["best"].item(), nest["optimizer"][0]["param_groups"][0]["lr"]) == (7.0, 0.1)
    assert (nest["history"], nest["epoch"]) == ([1, [2]], epoch)


def changed_while_written(path: Path) -> None:
    """Change everything as soon as the save has returned."""
    saves = AsyncSaves(started())
    with disk(opened=False) as slow:
        for epoch in (3, 4):  # into new memory, and into memory that was used before
            state = state_of(sharded("flat"), epoch)
            saves.save(path, **as_given(state))
            change(state)
            assert epoch == 4 or not is_checkpoint(path)
            slow.opened.set()
            saves.wait()
            assert_unchanged(path, epoch)
            slow.opened.clear()
            dist.barrier()
    saves.close()


def second_waits(folder: Path) -> None:
    """Save twice, and let the first one be written only when the second has begun."""
    saves, state = AsyncSaves(started()), state_of(sharded("flat"))
    with disk(opened=False) as slow:
        saves.save(folder / "first", **as_given(state))
        assert not is_checkpoint(folder / "first")
        threading.Timer(0.5, slow.opened.set).start()
        saves.save(folder / "second", **as_given(state))
        assert is_checkpoint(folder / "first")
        saves.close()
    assert_unchanged(folder / "second")


def goes_on_while_written(path: Path) -> None:
    """Save to a disk that writes nothing before the steps that come after the save are over."""
    saves, state = AsyncSaves(started()), state_of(sharded("flat"))
    with disk(opened=False) as slow:
        saves.save(path, **as_given(state))
        for _ in range(20):  # the ranks' own collectives go on meanwhile
            saves.step()
            dist.all_reduce(torch.ones(100))
        assert not is_checkpoint(path)
        slow.opened.set()
        saves.close()
    assert_unchanged(path)


def fails_on_one_rank(path: Path, bad_rank: int) -> dict[str, Any]:
    """Overwrite a checkpoint on a disk that is full on one rank, and go on stepping."""
    runtime = started()
    saves = AsyncSaves(runtime)
    saves.save(path, **as_given(state_of(sharded("flat"))))
    saves.wait()
    before = read_manifest(path).save_id
    told, at = "", -1
    with disk(room=1000 if runtime.rank == bad_rank else None):
        saves.save(path, **as_given(state_of(sharded("flat"), epoch=4)))
        for step in range(10_000):
            try:
                saves.step()
            except CheckpointError as error:
                told, at = f"{type(error).__name__}: {error}", step
                break
            if step % 3 == runtime.rank:  # one rank and then the other is ahead
                time.sleep(0.002)
            dist.all_reduce(torch.ones(1))  # a rank that raised at another step would leave the other one here
    for _ in range(3):  # once
        saves.step()
        saves.wait()
    assert read_manifest(path).save_id == before
    assert_unchanged(path)
    saves.save(path, **as_given(state_of(sharded("flat"), epoch=5)))
    saves.close()
    assert_unchanged(path, epoch=5)
    return {"told": told, "at": at}


def told_by(path: Path, call: str) -> str:
    """What the next call but a step tells of a failure; nothing is done by the call itself."""
    saves = AsyncSaves(started())
    with disk(room=1000):
        saves.save(path, **as_given(state_of(sharded("flat"))))
        other = partial(saves.save, path.with_name("other"), **as_given(state_of(sharded("flat"))))
        calls: dict[str, Callable[[], None]] = {"save": other, "wait": saves.wait, "close": saves.close}
        error = refusal(CheckpointError, lambda: calls[call]())
    saves.close()
    assert not path.exists()
    assert not path.with_name("other").exists()
    return error


def removed_in_order(folder: Path, fails: bool) -> list[str]:
    """Ask for a removal behind a save; gives what is there in the end."""
    runtime = started()
    state = state_of(sharded("flat"))
    save(folder / "old", runtime=runtime, **as_given(state))
    saves = AsyncSaves(runtime)
    with disk(opened=False, room=1000 if fails and runtime.rank else None) as slow:
        saves.save(folder / "new", **as_given(state))
        saves.run("removing old", lambda ranks: remove(folder / "old") if ranks.rank == 0 else None)
        assert is_checkpoint(folder / "old")
        assert not is_checkpoint(folder / "new")
        slow.opened.set()
        if fails:
            with pytest.raises(CheckpointError, match="No space left on device"):
                saves.wait()
        saves.close()
    return sorted(path.name for path in folder.iterdir())


def fails_in_a_job(path: Path) -> str:
    """A job that fails on rank 0 alone; gives what is told."""
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


def refused(path: Path) -> str:
    """A state that can't be saved is refused by the call itself, on all ranks."""
    runtime = started()
    saves = AsyncSaves(runtime)
    state = state_of(sharded("flat"))
    if runtime.rank == 1:
        state["hook"] = print
    error = refusal(CheckpointValueError, lambda: saves.save(path, **as_given(state)))
    saves.close()
    return error


def written_to_on_one_rank(path: Path) -> str:
    """Write to shards on one rank before their deferred copies are made; gives what is told."""
    runtime = started()
    saves, state = AsyncSaves(runtime), state_of(sharded("flat"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_save, "_HEAD_START", 1e6)  # the thread waits until somebody waits for it
        parts = list(map(local_tensor, state["model"].values()))  # when asked for later, the copies are made at once
        saves.save(path, deferred=lambda tensor: [tensor], **as_given(state))
        if runtime.rank == 1:
            for part in parts:
                part.zero_()
        error = refusal(CheckpointError, lambda: saves.wait())
    assert not path.exists()
    saves.save(path, **as_given(state_of(sharded("flat"))))  # the ranks are not out of step
    saves.close()
    assert_unchanged(path)
    return error


def leaves_no_trace(path: Path) -> tuple[int, int, int, list[str]]:
    """How many process groups there are before, while and after saves; and the threads that are left."""
    runtime = started()
    sharded("flat")  # makes the mesh's groups
    world = dist.distributed_c10d._world
    saves = AsyncSaves(runtime)
    before = len(world.pg_map)
    for _ in range(2):  # a closed one begins anew
        saves.save(path, **as_given(state_of(sharded("flat"))))
        during = len(world.pg_map)
        saves.close()
        saves.close()
        assert saves._staging._blocks == []
    runtime.barrier()
    return before, during, len(world.pg_map), [t.name for t in threading.enumerate() if t.name.startswith("fsdp-save")]


def a_rank_dies(path: Path) -> None:
    """Rank 1 dies while it writes; rank 0 notes what it is told."""
    runtime = started()
    saves = AsyncSaves(runtime)
    with disk(opened=runtime.rank == 0) as used:
        saves.save(path, **as_given(state_of(sharded("flat"))))
        if runtime.rank == 1:
            assert used.reached.wait(20)
            os._exit(3)
        try:
            saves.wait()
        except CheckpointError as error:
            path.with_suffix(".txt").write_text(str(error))
