"""Two jobs that save to one path, and readers of a path that is saved to: whatever the order, one is whole there."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from click.testing import CliRunner

from checkpoint_ranks import ThreadRuntime, on_threads
from damaged_folders import refused
from fsdp_core.checkpoint import (
    compare,
    consolidate_safetensors,
    describe,
    is_checkpoint,
    load,
    load_state_dict,
    remove,
    reshard,
    save,
    verify,
)
from fsdp_core.checkpoint.storage import commit, rereading, writers
from fsdp_core.checkpoint.storage import local_or_remote_folder as folder
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder
from fsdp_core.cli import checkpoint as command
from fsdp_core.errors import CheckpointError, CheckpointExistsError, CheckpointFormatError
from fsdp_core.lightning.checkpoints.full.opening import read_full_state
from versioned_saves import (
    Stop,
    another_writer,
    files_in,
    interrupt,
    is_tidy,
    save_interrupted,
    save_version,
    version_of,
)

TOLD = r"another job has (saved|removed).*\n?.*Give each job paths of its own"


# -- orders ------------------------------------------------------------------------------------------------------------


class Turns:
    """Threads that take turns, one at a time, at whatever touches a filesystem; the order is a seed's."""

    def __init__(self, seed: int) -> None:
        self._choice, self._changed = random.Random(seed), threading.Condition()
        self._waiting: set[int] = set()
        self._threads: set[int] = set()
        self._turn: int | None = None

    def wait(self) -> None:
        """Let others go first, as often as the order has it."""
        me = threading.get_ident()
        if me not in self._threads:
            return
        with self._changed:
            self._waiting.add(me)
            self._choose()
            assert self._changed.wait_for(lambda: self._turn == me, timeout=20)
            self._waiting.discard(me)
            self._turn = None

    def _choose(self) -> None:
        if self._turn is None and self._waiting and self._waiting == self._threads:
            self._turn = self._choice.choice(sorted(self._waiting, key=self._order.__getitem__))
            self._changed.notify_all()

    def run(self, *jobs: Callable[[], Any]) -> list[Any]:
        """Run jobs at once; what each has returned or raised."""
        results: list[Any] = [None] * len(jobs)
        self._order: dict[int, int] = {}
        begun = threading.Barrier(len(jobs))

        def work(number: int) -> None:
            with self._changed:
                self._threads.add(threading.get_ident())
                self._order[threading.get_ident()] = number
            begun.wait(timeout=20)
            try:
                results[number] = jobs[number]()
            except BaseException as error:
                results[number] = error
            with self._changed:
                self._threads.discard(threading.get_ident())
                self._choose()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        return results


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Turns]:
    """Lets all that touches a filesystem take turns, in the order of a seed."""
    now = [Turns(0)]

    def gate(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def gated(*args: Any, **kwargs: Any) -> Any:
            now[0].wait()
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, gated)

    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "listdir", "walk"):
        gate(os, name)
    for name in ("read", "mark", "size", "remove", "files", "kind"):
        gate(Folder, name)
    monkeypatch.setattr(folder.time, "sleep", lambda seconds: now[0].wait())  # who waits for a lock gives way

    def of_seed(seed: int) -> Turns:
        now[0] = Turns(seed)
        return now[0]

    return of_seed


def check_outcome(path: Any, two: Any, three: Any, seed: int) -> None:
    """Of two jobs that have saved 2 and 3, one that has reported success stays, and others are told."""
    failed = {value: error for value, error in ((2.0, two), (3.0, three)) if error is not None}
    assert version_of(path) in {2.0, 3.0} - set(failed), seed
    for error in failed.values():
        with pytest.raises(CheckpointExistsError, match=TOLD):
            raise error


def nothing(path: Path) -> None:
    return


def a_file(path: Path) -> None:
    path.write_bytes(b"an earlier full checkpoint")


def a_link(path: Path) -> None:
    save_version(path.with_name("linked.ckpt"), 9.0)
    path.symlink_to("linked.ckpt")


def a_checkpoint(path: Any) -> None:
    save_version(path, 1.0)


def an_interrupted_save(path: Path) -> None:
    save_version(path, 1.0)
    (path / "manifest.json").unlink()


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no_locks"])
@pytest.mark.parametrize("before", [nothing, a_checkpoint, a_file, a_link, an_interrupted_save])
def test_of_two_jobs_one_stays_whole_and_the_other_is_told(
    tmp_path: Path,
    turns: Callable[[int], Turns],
    before: Callable[[Path], None],
    locks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not locks:
        monkeypatch.setattr(folder, "_lock_folder", lambda path: None)
    for seed in range(8):
        path = tmp_path / str(seed) / "last.ckpt"
        path.parent.mkdir()
        before(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if not locks or before is an_interrupted_save else "error")
            two, three = turns(seed).run(partial(save_version, path, 2.0), partial(save_version, path, 3.0))
        check_outcome(path, two, three, seed)
        if locks and before is not an_interrupted_save:
            assert is_tidy(path), seed
        assert not list(path.parent.glob(".partial*"))
        if before is a_link:
            assert version_of(path.with_name("linked.ckpt")) == 9.0


@pytest.mark.parametrize("before", [nothing, a_checkpoint])
def test_in_an_object_store_too(turns: Callable[[int], Turns], before: Callable[[Any], None]) -> None:
    for seed in range(8):
        url = f"memory:///{uuid4().hex}/last.ckpt"
        before(url)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            two, three = turns(seed).run(partial(save_version, url, 2.0), partial(save_version, url, 3.0))
        check_outcome(url, two, three, seed)


def test_a_save_and_a_removal(tmp_path: Path, turns: Callable[[int], Turns]) -> None:
    """As where two runs share a directory, and the top-k of one removes what the other is saving."""
    for seed in range(8):
        path = tmp_path / str(seed) / "epoch=1.ckpt"
        save_version(path, 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved, removed = turns(seed).run(partial(save_version, path, 2.0), partial(remove, path))
        assert removed is None or isinstance(removed, CheckpointError), seed
        assert saved is None or isinstance(saved, CheckpointError), seed
        if is_checkpoint(path):
            assert version_of(path) in (1.0, 2.0), seed
        elif saved is None:
            assert removed is None


def at_call(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], Any]) -> list[str]:
    """Act once, before the ``number``-th time that a folder is read, listed, written to or removed from; what was."""
    calls: list[str] = []

    def patch(name: str) -> None:
        function = getattr(Folder, name)

        def noting(self: Folder, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == number:
                act()
            return function(self, *args, **kwargs)

        monkeypatch.setattr(Folder, name, noting)

    for name in ("read", "files", "size", "writing", "commit", "remove", "mark", "move_to"):
        patch(name)
    return calls


@pytest.mark.parametrize("before", [nothing, a_checkpoint])
def test_a_whole_save_within_another(
    tmp_path: Path, before: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it happens, the checkpoint of one of the two stays, and its job alone has reported success last."""
    monkeypatch.setattr(folder, "_lock_folder", lambda path: None)  # or the one within would wait for the one around it
    seen, number = {True: 0, False: 0}, 0
    while True:
        number += 1
        path = tmp_path / str(number) / "last.ckpt"
        before(path)
        with monkeypatch.context() as patched:
            patched.setattr(warnings, "warn", lambda *args, **kwargs: None)
            calls = at_call(patched, number, partial(save_version, path, 3.0))
            was_refused = True
            with contextlib.suppress(CheckpointExistsError):
                save_version(path, 2.0)
                was_refused = False
        if len(calls) < number:  # it was over before
            break
        seen[was_refused] += 1
        assert version_of(path) == 3.0 if was_refused else version_of(path) in (2.0, 3.0)
        assert not was_refused or is_tidy(path)
    assert seen[True] >= 5
    assert seen[False] >= 2


def test_ranks_of_two_jobs(tmp_path: Path) -> None:
    """Ranks write into the folder that rank 0 has chosen, whatever another job's ranks do."""
    path, state, kinds = tmp_path / "last.ckpt", {"model": {"w": torch.ones(3)}}, {"model": "model"}

    def work(runtime: ThreadRuntime) -> None:
        job = runtime.rank // 2
        runtime.world_size, runtime.rank = 2, runtime.rank % 2
        runtime._meeting, runtime._table = meetings[job], tables[job]
        save(path, state, runtime=runtime, strategy="test", kinds=kinds)

    for _ in range(5):
        meetings, tables = [threading.Barrier(2) for _ in range(2)], [[None, None] for _ in range(2)]
        results = on_threads(4, work)
        assert [type(results[0]), type(results[2])] == [type(results[1]), type(results[3])]
        assert None in (results[0], results[2])
        for error in results:
            assert error is None or isinstance(error, CheckpointExistsError)
        verify(path)
    assert is_tidy(path)


# -- what is left of others --------------------------------------------------------------------------------------------


GONE, ELSEWHERE = {"pid": 999_999_999}, {"host": "gpu-07"}


@pytest.mark.parametrize(("writer", "left"), [(GONE, False), (ELSEWHERE, True), ({"started": 1}, False)])
def test_half_folders_are_removed_when_their_writer_is_gone(
    tmp_path: Path, writer: dict[str, Any], left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with another_writer(monkeypatch, **writer) as patched:
        save_interrupted(patched, tmp_path / "epoch=1.ckpt", 5.0, "fsync", 4)
        (half,) = tmp_path.iterdir()
        (half / "notes.txt").write_text("mine")
        save_interrupted(patched, tmp_path / "epoch=2.ckpt", 5.0, "fsync", 4)
    assert len(list(tmp_path.iterdir())) == 2
    save_version(tmp_path / "epoch=3.ckpt", 3.0)
    assert len(list(tmp_path.glob(".partial*"))) == (2 if left else 1)
    assert (half / "notes.txt").read_text() == "mine"  # no save has written it
    assert left or files_in(half) == {"notes.txt"}


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("writer", [GONE, ELSEWHERE])
def test_files_in_a_checkpoint_are_removed_when_their_writer_is_gone(
    tmp_path: Path, writer: dict[str, Any], committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that a save had replaced, which ended before it removed them."""
    path = tmp_path / "last.ckpt"
    save_version(path, 1.0)
    with another_writer(monkeypatch, **writer) as patched:
        if committed:
            patched.setattr(commit.SaveTarget, "remove_leftovers", lambda *args: None)
            save_version(path, 5.0)
        else:
            save_interrupted(patched, path, 5.0, "fsync", 6)
    assert version_of(path) == (5.0 if committed else 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_version(path, 3.0)
    assert version_of(path) == 3.0
    messages = [str(warning.message) for warning in caught]
    messages = [message for message in messages if "it also holds files of another save" in message]
    if writer is GONE:
        assert is_tidy(path)
        assert not messages
    else:
        assert len(messages) == 1
        assert committed or "on gpu-07, of which nothing is known here), which are kept" in messages[0]


def test_a_removal_that_is_interrupted_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {at: tmp_path / f"{at}.ckpt" for at in (1, 2, 4)}
    for path in paths.values():
        save_version(path, 1.0)
    for at, path in paths.items():
        with monkeypatch.context() as patched:
            interrupt(patched, os, "unlink", at)
            with contextlib.suppress(Stop):
                remove(path)
        assert not path.exists()
    assert len(list(tmp_path.iterdir())) == 3
    save_version(tmp_path / "next.ckpt", 2.0)
    assert [found.name for found in tmp_path.iterdir()] == ["next.ckpt"]


def test_a_manifest_that_can_not_be_read_when_a_save_fails_may_be_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing is removed: the save may have been committed all the same."""
    path = tmp_path / "last.ckpt"
    save_version(path, 1.0)
    read = Folder.read

    def fails(self: Folder, name: str, *args: Any) -> bytes:
        if committed:
            raise OSError(5, "Input/output error")
        return read(self, name, *args)

    def commit(self: Folder, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        committed.append(True)

    plain, committed = Folder.commit, list[bool]()
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "read", fails)
        patched.setattr(Folder, "commit", commit)
        with pytest.raises(CheckpointError, match="Input/output error"):
            save_version(path, 2.0)
    assert version_of(path) == 2.0


# -- readers -----------------------------------------------------------------------------------------------------------


def read_fully(path: Path) -> float:
    nest = load(path)
    (value,) = {float(one) for saved in nest["model"].values() for one in saved.full().flatten()} | {nest["step"]}
    return value


def run_command(path: Path) -> float:
    done = CliRunner().invoke(command, ["verify", str(path)])
    assert done.exit_code == 0, done.output
    return 0.0


READERS: dict[str, Callable[[Path], float]] = {
    "load": read_fully,
    "load_state_dict": lambda path: float(load_state_dict(path)["b"][0]),
    "verify": lambda path: verify(path) or 0.0,
    "read_full_state": lambda path: float(read_full_state(path)["best"]),
    "describe": lambda path: describe(path) and 0.0,
    "compare": lambda path: float(bool(compare(path, path))),
    "consolidate": lambda path: consolidate_safetensors(path, path.with_name("out"), overwrite=True) and 0.0,
    "reshard": lambda path: reshard(path, path.with_name("again"), files=2, overwrite=True) and 0.0,
    "the command verify": run_command,
}


@pytest.mark.parametrize("reader", READERS)
def test_reader_begins_anew_if_the_checkpoint_is_replaced(
    tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever that happens: each reader gives the old one or the new one, and takes neither for damaged."""
    path, number = tmp_path / "last.ckpt", 0
    monkeypatch.setattr(folder, "_lock_folder", lambda path: None)  # or a save within reshard's would wait for it
    while True:
        number += 1
        save_version(path, 1.0)
        with monkeypatch.context() as patched:
            calls = at_call(patched, number, lambda: save_version(path, 2.0))
            assert READERS[reader](path) in (0.0, 1.0, 2.0)
        if len(calls) < number:
            break
    assert number > 4


def test_loaded_checkpoint_is_readable_after_its_replacement(tmp_path: Path) -> None:
    save_version(tmp_path / "c", 1.0)
    nest = load(tmp_path / "c")
    save_version(tmp_path / "c", 2.0)
    assert [float(saved.full().sum()) for saved in nest["model"].values()] == [12.0, 2.0]


def test_replaced_checkpoint_is_not_called_damaged(tmp_path: Path) -> None:
    url = f"memory:///{uuid4().hex}/c"
    save_version(url, 1.0)
    nest = load(url)
    save_version(url, 2.0)
    with pytest.raises(CheckpointFormatError, match=r"another run has replaced or removed memory://.* since the load"):
        nest["model"]["w"].full()


def test_reader_gives_up_after_max_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, values = tmp_path / "c", iter(range(2, 1000))
    save_version(path, 1.0)
    read = Folder.size
    inside: list[bool] = []
    monkeypatch.setattr(rereading, "_PAUSE_SECONDS", 0)

    def replaced(self: Folder, name: str) -> int | None:
        if name.startswith("model/") and not inside:
            inside.append(True)
            save_version(path, float(next(values)))
            inside.clear()
        return read(self, name)

    monkeypatch.setattr(Folder, "size", replaced)
    for reader in (load, load_state_dict, verify):
        refused(path, r"was replaced 20 times while it was read.*No fault of the checkpoint is known", by=reader)


def test_ranks_begin_anew_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank reads the old manifest, another the new one."""
    path, once = tmp_path / "c", threading.Lock()
    save_version(path, 1.0)
    read, meeting = Folder.read, threading.Barrier(2)
    done: list[bool] = []

    def replaced(self: Folder, name: str, *args: Any) -> bytes:
        data = read(self, name, *args)
        if name == "manifest.json" and threading.current_thread() is not threading.main_thread():
            with once:
                first, _ = not done, done.append(True)
            if first:
                save_alone(2.0)
        return data

    def save_alone(value: float) -> None:
        thread = threading.Thread(target=save_version, args=(path, value))
        with monkeypatch.context() as patched:
            patched.setattr(Folder, "read", read)
            thread.start()
            thread.join()

    monkeypatch.setattr(Folder, "read", replaced)
    nests = on_threads(2, lambda runtime: load(path, runtime=runtime))
    assert [float(nest["step"]) for nest in nests] == [2.0, 2.0], nests
    assert meeting.n_waiting == 0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing here is about what outlives a power cut, and a disk that others use takes long to say that it has it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    yield
    assert not writers._running_saves  # every save and removal has ended
