"""What a rank sends, receives and calls for does not grow with the number of ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint_ranks import ThreadRuntime, on_threads
from chunked_tensors import rank_rows
from damaged_folders import save_alone
from fsdp_core.checkpoint import fill_all, load, merging, run_on_all
from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.checkpoint.shared_folder import check_shared
from fsdp_core.errors import CheckpointError
from fsdp_core.initialization.sharded_init import check_same_parts
from fsdp_core.sharding.agreement.same_model import check_same
from fsdp_core.sharding.agreement.same_packages import check_same_packages, versions_of
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.testing.loopback.backend import LoopbackBackend
from fsdp_core.testing.refusals import refusal

WORLDS = (2, 4, 16)
TENSORS = 40
#: Places and sizes of boxes are numbers, which have more digits in larger worlds.
DIGITS = 48


class RecordingRuntime(ThreadRuntime):
    """Counts calls, and the bytes that a runtime has to send and receive for them, as pickles."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    def _note(self, call: str, *objects: Any) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        self.bytes[call] = self.bytes.get(call, 0) + sum(len(pickle.dumps(one)) for one in objects)

    def gather_objects(self, obj: Any) -> list[Any]:
        gathered = super().gather_objects(obj)
        self._note("gather_objects", obj, *gathered)
        return gathered

    def gather_objects_to(self, obj: Any, dst: int = 0) -> list[Any] | None:
        gathered = ThreadRuntime.gather_objects(self, obj)
        self._note("gather_objects_to", obj, *(gathered if self.rank == dst else ()))
        return gathered if self.rank == dst else None

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        told = ThreadRuntime.gather_objects(self, obj)[src]
        self._note("broadcast_object", told)
        return told

    def total(self, numbers: Sequence[int]) -> list[int]:
        self._note("total", list(numbers))
        return [sum(one) for one in zip(*ThreadRuntime.gather_objects(self, list(numbers)), strict=True)]

    def side_channel(self) -> RecordingRuntime:
        return self  # these tests never use both at the same time


def rows_of(rank: int, ranks: int) -> dict[str, Any]:
    """As many tensors as ranks hold of a model: a row of each."""
    row = rank_rows(torch.full((1, 3), float(rank)), rank, ranks)
    return {f"layers.{number}.weight": row.clone() for number in range(TENSORS)}


def measured(world: int, path: Path, what: str) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Calls and bytes of each rank."""

    def work(runtime: RecordingRuntime) -> Any:
        STEPS[what](runtime, path)
        return runtime.calls, runtime.bytes

    results = on_threads(world, work, RecordingRuntime)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def set_up(runtime: RecordingRuntime, path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    backend = LoopbackBackend()
    backend.bind(runtime, ShardPrecision())
    plan = backend.plan(model)
    check_same(runtime, "Sequential", plan.describe())
    check_same_parts(model, runtime)
    backend.shard(model, plan)


def meet_on_hosts(runtime: RecordingRuntime, path: Path) -> None:
    check_same_packages(runtime, versions_of(LoopbackBackend))
    check_shared(path, runtime)


def save_once(runtime: RecordingRuntime, path: Path, **options: bool) -> None:
    save_alone(path, {"model": rows_of(runtime.rank, runtime.world_size)}, runtime=runtime, **options)


def save_before(runtime: RecordingRuntime, path: Path) -> None:
    save_once(runtime, path)
    runtime.calls.clear()
    runtime.bytes.clear()


def save_again(runtime: RecordingRuntime, path: Path) -> None:
    save_before(runtime, path)
    save_once(runtime, path)


def save_in_turn(runtime: RecordingRuntime, path: Path) -> None:
    runtime.local_rank = runtime.rank % 2
    save_once(runtime, path, one_after_another=True)


def save_in_background(runtime: RecordingRuntime, path: Path) -> None:
    saves = AsyncSaves(runtime)
    model = rows_of(runtime.rank, runtime.world_size)
    saves.save(path, {"model": model}, strategy="test", kinds={"model": "model"})
    saves.wait()
    saves.close()


def save_scattered(runtime: RecordingRuntime, path: Path) -> None:
    save_once(runtime, path / f"rank{runtime.rank:05d}" / "run.ckpt", scattered=True)


def load_all(runtime: RecordingRuntime, path: Path) -> None:
    save_before(runtime, path)
    model = rows_of(runtime.rank, runtime.world_size)
    for one in model.values():
        one.chunks[0].data.zero_()
    fill_all(model, load(path, runtime=runtime)["model"])
    assert all(bool((one.chunks[0].data == runtime.rank).all()) for one in model.values())


STEPS = {
    "set-up": set_up,
    "several hosts": meet_on_hosts,
    "first save": save_once,
    "second save": save_again,
    "save in turn": save_in_turn,
    "save in background": save_in_background,
    "scattered save": save_scattered,
    "load": load_all,
}


@pytest.mark.parametrize("what", STEPS)
def test_ranks_other_than_the_first_send_and_receive_as_much_in_any_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(merging, "MOST_LISTED", 0)
    of_worlds = {world: measured(world, tmp_path / f"{world}", what) for world in WORLDS}
    calls, bytes_ = of_worlds[2][1]
    assert calls
    for world in WORLDS[1:]:
        for rank in (1, world - 1):
            assert of_worlds[world][rank][0] == calls, "the number of calls"
            assert "gather_objects" not in of_worlds[world][rank][0]
            for call, count in of_worlds[world][rank][1].items():
                assert abs(count - bytes_[call]) <= DIGITS, call
    if what == "second save":
        first = measured(2, tmp_path / "2 again", "first save")[1][1]["gather_objects_to"]
        assert bytes_["gather_objects_to"] < first


def told_of_failures(world: int, failure: Callable[[int], str | None]) -> set[str]:
    """What ranks raise, of which those fail that have a failure."""

    def work(runtime: ThreadRuntime) -> str:
        def step() -> None:
            if message := failure(runtime.rank):
                raise OSError(message)

        return refusal(CheckpointError, lambda: run_on_all(runtime, "writing", step))

    return set(on_threads(world, work))


@pytest.mark.parametrize("world", [2, 200])
def test_a_failure_is_told_to_all_in_few_words(world: int) -> None:
    (told,) = told_of_failures(world, lambda rank: f"disk {rank} is gone" if rank % 2 else None)
    assert told.startswith("writing failed: OSError: disk 1 is gone.")
    assert f"on rank 1 of {world}" in told
    if world == 200:
        assert told.count("another rank: ") == 16
        assert told.endswith("… and 83 other messages")
        assert len(told) < 3000


def test_the_ranks_of_one_message_are_not_all_listed() -> None:
    (told,) = told_of_failures(100, lambda rank: "the disk is gone" if rank else None)
    assert "63, 64 and 35 more of 100, while writing" in told
