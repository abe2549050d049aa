"""Saves that go on in the background: what they copy, what waits for them, and how a failure is told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import async_save_ranks
from checkpoint_ranks import ThreadRuntime, bits, on_threads
from conftest import Site
from fsdp_core.checkpoint import Chunk, ChunkedTensor, SavedTensor, chunked, is_checkpoint, load, save
from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.checkpoint.planning import Plan, plan_save
from fsdp_core.checkpoint.staging import Staging
from fsdp_core.errors import CheckpointError, UnsupportedCapabilityError
from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from fsdp_core.state.dtypes import SAFETENSORS_NAMES
from fsdp_core.testing.launching.calls import RankError
from fsdp_core.testing.launching.process_ranks import RankPool
from fsdp_core.testing.launching.processes import interruptible
from fsdp_core.testing.refusals import assert_says


class TestStaging:
    def test_tensors_of_every_kind_are_copied(self) -> None:
        originals = {
            "scalar": torch.tensor(3.0),
            "empty": torch.empty(0, 3),
            "strided": torch.arange(24.0).reshape(4, 6)[::2, 1::2],
            "transposed": torch.arange(6).reshape(2, 3).T,
            "expanded": torch.ones(1, 3).expand(4, 3),
            "negated": torch.imag(torch.tensor([1 + 2j, 3j]).conj()),
            **{str(dtype): torch.zeros(3).to(dtype) for dtype in SAFETENSORS_NAMES},
        }
        copies = Staging().copy(Plan(tensors=dict(originals)), rank=0).tensors
        assert copies.keys() == originals.keys()
        for name, original in originals.items():
            assert (copies[name].shape, copies[name].dtype) == (original.shape, original.dtype)
            assert copies[name].is_contiguous()
            assert bits(copies[name]) == bits(original.resolve_neg().contiguous()), name
            assert original.numel() == 0 or copies[name].data_ptr() != original.data_ptr()

    def test_shared_memory_is_copied_once(self) -> None:
        weight = torch.ones(4, 3)
        state = {"model": {"in": weight, "out": weight.detach(), "rows": weight[:2]}}
        plan = Staging().copy(plan_save(state, {"model": "model"}, {}, rank=0), rank=0)
        places = [tensor.chunks[0].data for tensor in plan.stored.values()]
        assert all(isinstance(place, torch.Tensor) for place in places)
        first, second, rows = [place.data_ptr() for place in places if isinstance(place, torch.Tensor)]
        assert first == second != rows

    def test_deferred_copies_are_made_when_they_are_finished(self) -> None:
        weight, buffer = torch.ones(2), torch.ones(3)
        staging = Staging()
        plan = Plan(tensors={"weight": weight, "buffer": buffer})
        copies = staging.copy(plan, rank=0, deferred=lambda tensor: [tensor] if tensor is weight else None).tensors
        copies["weight"].fill_(5.0)  # the memory of what is not copied yet
        staging.finish()
        weight.zero_()
        buffer.zero_()
        staging.wait()
        assert (copies["weight"].tolist(), copies["buffer"].tolist()) == ([1.0, 1.0], [1.0, 1.0, 1.0])

    def test_write_before_a_deferred_copy_is_reported(self) -> None:
        weight = torch.ones(2)
        state = {"model": {"weight": weight}}
        staging = Staging()
        staging.copy(plan_save(state, {"model": "model"}, {}, rank=0), rank=0, deferred=lambda tensor: [tensor])
        weight[:1].zero_()  # through a view
        with pytest.raises(CheckpointError, match="'model/weight' was written to while it was being"):
            staging.wait()

    @pytest.mark.parametrize(
        "weight",
        [
            torch.zeros(()),
            torch.full((5, 300, 7), torch.nan),
            torch.zeros(40, 60, dtype=torch.bfloat16).T[1:],
            torch.zeros(1000, dtype=torch.complex128).conj(),
            torch.zeros(300, dtype=torch.float8_e4m3fn),
            torch.zeros(300, dtype=torch.bool),
        ],
        ids=["scalar", "nan", "strided", "complex", "float8", "bool"],
    )
    @pytest.mark.parametrize("where", ["nowhere", "first", "last", "run"])
    def test_write_through_data_before_a_deferred_copy_is_reported(self, weight: torch.Tensor, where: str) -> None:
        weight = weight.clone() if weight.is_contiguous() else weight.mT.clone().mT if weight.ndim > 1 else weight
        staging, elements = Staging(), weight.numel()
        staging.copy(Plan(tensors={"weight": weight}), rank=0, deferred=lambda tensor: [tensor])
        # any run of more than a fifteenth of the elements is found
        begin = {"nowhere": elements, "first": 0, "last": elements - 1, "run": elements // 3}[where]
        length = elements // 15 + 1 if where == "run" else 1
        for index in range(begin, min(begin + length, elements)):
            place = torch.unravel_index(torch.tensor(index), weight.shape)
            weight.data[tuple(one.item() for one in place)] = 1
        assert weight._version == 0
        if where == "nowhere":
            staging.wait()
            return
        with pytest.raises(CheckpointError, match=r"perhaps through \.data"):
            staging.wait()

    def test_memory_is_used_again(self) -> None:
        staging = Staging()

        def pointers(*sizes: int) -> list[int]:
            plan = Plan(tensors={str(i): torch.ones(size) for i, size in enumerate(sizes)})
            return [tensor.data_ptr() for tensor in staging.copy(plan, rank=0).tensors.values()]

        first = pointers(1000, 50)
        assert (pointers(1000, 50), pointers(10, 5)[0], pointers(1000, 50)) == (first, first[0], first)

    def test_other_tensors_get_other_memory(self) -> None:
        staging = Staging()
        states = [
            {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4)},
            {"a": torch.arange(6.0).reshape(3, 2), "b": torch.arange(4)},
            {"a": torch.arange(6).reshape(3, 2), "b": torch.arange(4)},
            {"b": torch.arange(4), "a": torch.arange(6).reshape(3, 2)},
        ]
        for state in [*states, *reversed(states)]:
            for _ in range(2):
                copies = staging.copy(Plan(tensors=dict(state)), rank=0).tensors
                assert all(copies[name].dtype == state[name].dtype for name in state)
                assert all(torch.equal(copies[name], state[name]) for name in state)
        staging.free()
        assert staging._blocks == staging._memory_of_layout == []

    def test_large_parts_lie_in_several_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fsdp_core.checkpoint.staging._BLOCK_BYTES", 1024)
        tensors = {str(i): torch.full((100 + i,), float(i)) for i in range(7)}
        tensors["large"] = torch.arange(2000.0)
        staging = Staging()
        copies = staging.copy(Plan(tensors=dict(tensors)), rank=0).tensors
        assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())
        blocks = [block.numel() for block in staging._blocks]
        assert max(blocks) < 8192 + 64
        assert sum(blocks) < sum(tensor.nbytes for tensor in tensors.values()) + 64 * len(tensors)

    def test_only_what_this_rank_writes_is_copied(self) -> None:
        whole, replica = torch.ones(2), torch.ones(2)
        model = {"first": chunked(whole, rank=0), "second": chunked(replica, rank=1)}
        state = {"model": model, "small": torch.ones(3)}
        staging = Staging()
        plan = staging.copy(plan_save(state, {"model": "model"}, {}, rank=1), rank=1)
        assert (plan.tensors, plan.stored["model/second"].chunks) == ({}, ())
        assert sum(block.numel() for block in staging._blocks) == 64

    def test_lazy_tensors_are_not_copied(self, tmp_path: Path) -> None:
        first = {"model": {"w": torch.arange(12.0).reshape(4, 3)}}
        options: dict[str, Any] = {"strategy": "test", "kinds": {"model": "model"}}
        save(tmp_path / "one", first, runtime=ProcessGroupRuntime(), **options)
        source = load(tmp_path / "one")["model"]["w"]
        assert isinstance(source, SavedTensor)
        saves = AsyncSaves(ProcessGroupRuntime())
        saves.save(tmp_path / "two", {"model": {"w": source}}, **options)
        assert saves._staging._blocks == []
        saves.close()
        assert torch.equal(load(tmp_path / "two")["model"]["w"].full(), first["model"]["w"])


class Awaited(threading.Event):
    """Notes how it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.waits = threading.Event(), list[tuple[bool, float | None]]()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append((self.is_set(), timeout))
        self.reached.set()
        return super().wait(timeout)


class TestHeadStart:
    def test_thread_waits_for_its_head_start_unless_awaited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fsdp_core.checkpoint.async_save._SECONDS_BEFORE_JOB", 300)  # more than a test may take
        saves, begun = AsyncSaves(ProcessGroupRuntime()), threading.Event()
        saves._is_awaited = awaited = Awaited()
        for _ in range(2):
            begun.clear()
            awaited.reached.clear()
            saves.run("beginning", lambda _: begun.set())
            assert awaited.reached.wait(60)
            assert awaited.waits.pop() == (False, 300)  # so it stays there until somebody waits
            assert not begun.is_set()
            saves.wait()
            assert begun.is_set()
        saves.run("beginning", lambda _: begun.clear())
        saves.close()
        assert not begun.is_set()


class TestRanks:
    def test_later_changes_are_not_saved(self, pool: RankPool, tmp_path: Path) -> None:
        pool.run(2, async_save_ranks.change_while_written, tmp_path / "it", timeout=60)

    def test_the_second_save_waits_for_the_first(self, pool: RankPool, tmp_path: Path) -> None:
        pool.run(2, async_save_ranks.save_twice, tmp_path, timeout=60)

    @pytest.mark.parametrize("bad_rank", [0, 1])
    def test_a_failure_is_raised_by_all_ranks_at_one_step_and_once(
        self, pool: RankPool, tmp_path: Path, bad_rank: int
    ) -> None:
        for i in range(3):
            path = tmp_path / str(i)
            first, second = pool.run(2, async_save_ranks.fail_on_one_rank, path, bad_rank, timeout=60)
            assert first == second
            message, _ = first
            assert message.startswith(f"CheckpointError: saving {path} in the background has failed:")
            assert_says(message, "No space left on device", f"on rank {bad_rank} of 2", "There is no space left: free")

    def test_next_call_raises_the_failure(self, pool: RankPool, tmp_path: Path) -> None:
        for messages in pool.run(2, async_save_ranks.errors_of_next_calls, tmp_path, timeout=60):
            assert all("No space left on device" in message for message in messages)

    @pytest.mark.parametrize("fails", [False, True])
    def test_removal_waits_for_the_save_before_it(self, pool: RankPool, tmp_path: Path, fails: bool) -> None:
        left = pool.run(2, async_save_ranks.remove_behind_a_save, tmp_path, fails, timeout=60)
        assert left[0] == (["old"] if fails else ["new"])

    def test_failure_on_rank_0_is_raised_on_all_ranks(self, pool: RankPool, tmp_path: Path) -> None:
        first, second = pool.run(2, async_save_ranks.fail_in_a_job, tmp_path / "it", timeout=60)
        assert first == second
        assert first.startswith("CheckpointExistsError: removing it in the background has failed")

    def test_a_refusal_does_not_wait(self, pool: RankPool, tmp_path: Path) -> None:
        for message in pool.run(2, async_save_ranks.save_what_is_refused, tmp_path / "it", timeout=60):
            assert "'hook'" in message
            assert "in the background" not in message
        assert not (tmp_path / "it").exists()

    def test_write_on_one_rank_is_raised_on_all_ranks(self, pool: RankPool, tmp_path: Path) -> None:
        first, second = pool.run(2, async_save_ranks.write_before_the_copy, tmp_path / "it", timeout=60)
        assert first == second
        assert_says(first, "was written to while it was being copied", "on rank 1 of 2")

    def test_a_rank_that_dies_is_a_failure(self, pool: RankPool, tmp_path: Path) -> None:
        path = tmp_path / "it.ckpt"
        with pytest.raises(RankError, match="the process died with exit code 3"):
            pool.run(2, async_save_ranks.die_while_writing, path, timeout=30)
        assert "in the background has failed" in path.with_suffix(".txt").read_text()
        assert not is_checkpoint(path)


class WithSideChannel(ThreadRuntime):
    """Ranks that are threads, and can talk in pairs of threads."""

    meetings: tuple[threading.Barrier, list[Any]]

    def side_channel(self) -> Runtime:
        return ThreadRuntime(self.rank, self.world_size, *self.meetings)


def test_ranks_may_be_threads(tmp_path: Path) -> None:
    WithSideChannel.meetings = (threading.Barrier(3), [None] * 3)
    rows = torch.arange(9.0).reshape(3, 3)

    def work(runtime: WithSideChannel) -> None:
        saves = AsyncSaves(runtime)
        row = Chunk(offsets=(runtime.rank, 0), data=rows[runtime.rank : runtime.rank + 1].clone())
        state = {"model": {"w": ChunkedTensor(shape=(3, 3), dtype=rows.dtype, chunks=(row,))}}
        saves.save(tmp_path / "it", state, strategy="test", kinds={"model": "model"})
        assert isinstance(row.data, torch.Tensor)
        row.data.zero_()
        saves.close()

    assert on_threads(3, work, WithSideChannel) == [None] * 3
    assert torch.equal(load(tmp_path / "it")["model"]["w"].full(), rows)


def test_ranks_without_a_side_channel_are_refused(tmp_path: Path) -> None:
    saves = AsyncSaves(ThreadRuntime(0, 1, threading.Barrier(1), [None]))
    with pytest.raises(UnsupportedCapabilityError, match="ThreadRuntime has no second channel"):
        saves.save(tmp_path / "it", {"epoch": 1}, strategy="test", kinds={})
    saves.close()


SCRIPT = """
import multiprocessing, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.testing.measuring.disks import disk

path, how = Path(sys.argv[1]), sys.argv[2]
runtime = ProcessGroupRuntime()
runtime.start(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), address="127.0.0.1", port=sys.argv[3])
saves = AsyncSaves(runtime)
entered = disk(seconds=300 if how == "interrupted" else 0.5, room=1000 if how == "full" else None)
entered.__enter__()
saves.save(path, {"model": {"w": torch.ones(100, 100)}}, strategy="test", kinds={"model": "model"})
# as remote filesystems do to look up a host; Python closes all executors while it ends
saves.run("using an executor", lambda ranks: print(ThreadPoolExecutor(1).submit(str, "looked up").result(), flush=True))
if how == "forked":
    child = multiprocessing.get_context("fork").Process(target=print, args=("child",))
    child.start()
    child.join(20)
    assert child.exitcode == 0, child.exitcode
if how == "raises":
    raise ZeroDivisionError("in the script")
if how == "dropped":
    del saves
print("the script ends", flush=True)
"""


def _words(folder: Path, how: str) -> tuple[str, ...]:
    """Write the script, and the rest of its command line."""
    (folder / "script.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(folder / "script.py"), str(folder / "it"), how, str(probe.getsockname()[1])


class TestEndOfTheInterpreter:
    @pytest.mark.parametrize(("how", "status"), [("dropped", 0), ("raises", 1), ("forked", 0)])
    def test_it_waits(self, site: Site, how: str, status: int) -> None:
        if how == "forked" and not hasattr(os, "fork"):
            pytest.skip("this system has no fork")
        done = site.fork(*_words(site.path, how), check=False)
        assert done.returncode == status, done.stderr + done.stdout
        assert is_checkpoint(site.path / "it")
        assert ("ZeroDivisionError" in done.stderr) == (how == "raises")
        assert "looked up" in done.stdout
        assert "terminate called" not in done.stderr

    def test_unraised_failure_is_printed_at_exit(self, site: Site) -> None:
        done = site.fork(*_words(site.path, "full"), check=False)
        assert "the script ends" in done.stdout
        assert done.returncode == 1, done.stderr
        assert_says(done.stderr, "in the background has failed", "No space left on device")
        assert not is_checkpoint(site.path / "it")

    @pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send to one process")
    def test_an_interrupt_ends_the_wait(self, tmp_path: Path) -> None:
        with interruptible():
            process = subprocess.Popen(
                [sys.executable, *_words(tmp_path, "interrupted")],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )
        assert process.stdout is not None
        assert "the script ends" in process.stdout.readline()
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)  # the disk takes 300 s
        assert process.returncode == 130, err
        assert "interrupted before a checkpoint was complete" in err
