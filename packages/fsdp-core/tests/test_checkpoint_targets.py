"""Targets that can't be written: said on every rank with what to do, nothing left behind, the old one still there."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import resource
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from checkpoint_ranks import started
from damaged_folders import limited_files
from fsdp_core.checkpoint import is_checkpoint, load_state_dict, remove, verify
from fsdp_core.checkpoint.importing import import_checkpoint
from fsdp_core.errors import CheckpointError, CheckpointExistsError
from fsdp_core.testing.launching.process_ranks import RankPool
from fsdp_core.testing.refusals import assert_says
from versioned_saves import save_version, version_of

#: Larger than what a limited process may write.
save_large = partial(save_version, shape=(4096, 16))
NOBODY = 65534


def everything(folder: Path) -> dict[str, str | bytes]:
    """What is in a folder, links and contents included."""
    found: dict[str, str | bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
    return found


def a_checkpoint(path: Path) -> None:
    save_large(path, 1.0)


def a_foreign_folder(path: Path) -> None:
    path.mkdir()
    (path / "model.bin").write_bytes(b"mine")


def a_foreign_manifest(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text('{"name": "an app"}')


def a_file(path: Path) -> None:
    path.write_bytes(b"an earlier full checkpoint")


def a_link(path: Path) -> None:
    a_checkpoint(path.with_name("other"))
    path.symlink_to("other")


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def a_parent_that_is_a_file(path: Path) -> None:
    path.parent.write_bytes(b"a file")


def a_section_that_is_a_file(path: Path) -> None:
    path.mkdir()
    (path / "model").write_bytes(b"mine")


def nothing(path: Path) -> None:
    return


EXISTS = "already exists, and overwrite=False: save to another path or pass overwrite=True"
FOREIGN = r"is a folder with something else in it \({}\), which a save does not replace: save to another path, or move"


#: By case: what makes the target, its name, whether it may be overwritten, and the error.
REFUSED: dict[str, tuple[Callable[[Path], None], str, bool, type[CheckpointError], str]] = {
    **{
        make.__name__: (make, "c", False, CheckpointExistsError, EXISTS)
        for make in (a_checkpoint, a_foreign_folder, a_file, a_link, a_dangling_link)
    },
    "a_foreign_folder_to_overwrite": (a_foreign_folder, "c", True, CheckpointExistsError, FOREIGN.format("model.bin")),
    "a_foreign_manifest": (a_foreign_manifest, "c", True, CheckpointExistsError, FOREIGN.format("manifest.json")),
    "a_section_that_is_a_file": (a_section_that_is_a_file, "c", True, CheckpointExistsError, FOREIGN.format("model")),
    "a_parent_that_is_a_file": (a_parent_that_is_a_file, "p/c", True, CheckpointError,
                                "p/c failed: .*A file exists where a folder must be: move"),
    "a_long_name": (nothing, "x" * 300, True, CheckpointError, "too long.*: use a shorter one"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_target_that_is_refused_stays_as_it_is(pool: RankPool, tmp_path: Path, case: str, ranks: int) -> None:
    make, name, overwrite, kind, message = REFUSED[case]
    make(tmp_path / name)
    before = everything(tmp_path)
    if ranks == 1:
        with pytest.raises(kind, match=message) as caught:
            save_large(tmp_path / name, 2.0, overwrite=overwrite)
        assert type(caught.value) is kind
        assert name in str(caught.value)
    else:
        errors = pool.run(2, fail_to_save, tmp_path / name, overwrite, None, timeout=40)
        assert (errors[0], errors[0][0]) == (errors[1], kind.__name__)
        with pytest.raises(kind, match=message):
            raise kind(errors[0][1])
    assert everything(tmp_path) == before


# --- The disk says no -----------------------------------------------------------------------------------------------


def fail_to_save(path: Path, overwrite: bool, limited_rank: int | None) -> tuple[str, str]:
    """Save on this rank, which may have no room; gives the error."""
    runtime = started()
    try:
        with limited_files(2**16 if runtime.rank == limited_rank else resource.RLIM_INFINITY):
            save_large(path, 2.0, runtime, overwrite=overwrite)
    except CheckpointError as error:
        return type(error).__name__, str(error)
    return "saved", ""


@pytest.mark.parametrize("limited_rank", [0, 1])
@pytest.mark.parametrize("make", [a_checkpoint, a_file, a_link, nothing], ids=lambda make: make.__name__)
def test_one_rank_of_two_has_no_room(
    pool: RankPool, tmp_path: Path, make: Callable[[Path], None], limited_rank: int
) -> None:
    path = tmp_path / "c"
    make(path)
    before = everything(tmp_path)
    errors = pool.run(2, fail_to_save, path, True, limited_rank, timeout=40)
    assert errors[0] == errors[1]
    kind, message = errors[0]
    assert kind == "CheckpointError"
    assert_says(message, "File too large", "ulimit -f", "use another path")
    assert f"(on rank {limited_rank} of 2, while writing {path}" in message
    assert everything(tmp_path) == before
    assert pool.run(2, fail_to_save, path, True, None, timeout=40) == [("saved", "")] * 2
    assert version_of(path) == 2.0


def as_nobody(work: Callable[..., Any], *args: Any) -> str:
    """Run ``work`` in a process that may not do what root may; gives the error that it raised."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run() -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        torch.set_num_threads(1)
        try:
            work(*args)
            theirs.send("nothing was raised")
        except Exception as error:
            theirs.send(f"{type(error).__name__}: {error}")

    process = context.Process(target=run, daemon=True)
    process.start()
    try:
        assert ours.poll(30), "the process did not answer"
        return str(ours.recv())
    finally:
        process.kill()
        process.join()


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own are their owner's."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.parametrize("make", [a_checkpoint, nothing], ids=lambda make: make.__name__)
def test_a_folder_that_this_user_may_not_write(open_path: Path, make: Callable[[Path], None]) -> None:
    path = open_path / "runs" / "c"
    path.parent.mkdir()
    make(path)
    before = everything(open_path)
    for folder in (path.parent, *(found for found in path.parent.rglob("*") if found.is_dir())):
        folder.chmod(0o555)
    message = as_nobody(save_large, path, 2.0)
    assert message.startswith(f"CheckpointError: writing {path} failed: PermissionError: ")
    assert "This user lacks permission for that: request it, or use another path." in message
    if make is a_checkpoint:
        message = as_nobody(remove, path)
        assert message.startswith(f"CheckpointError: can't remove {path}: PermissionError: ")
        assert "This user lacks permission for that: request it" in message
    for folder in (path.parent, *(found for found in path.parent.rglob("*") if found.is_dir())):
        folder.chmod(0o755)
    assert everything(open_path) == before
    if make is a_checkpoint:
        assert version_of(path) == 1.0


def test_what_this_user_may_not_read_is_not_called_damaged(open_path: Path) -> None:
    path = open_path / "runs" / "c"
    a_checkpoint(path)
    (file,) = (path / "model").iterdir()
    torch.save({"w": torch.ones(2)}, open_path / "old.pt")
    reads: dict[Path, dict[Callable[..., Any], str]] = {
        file: {verify: str(file), load_state_dict: str(file)},
        path / "model": {verify: str(file), load_state_dict: str(file)},
        path / "manifest.json": {
            **dict.fromkeys((verify, load_state_dict), str(path)),
            **dict.fromkeys((remove, imported, is_checkpoint), str(path / "manifest.json")),
            partial(save_large, version=2.0): str(path / "manifest.json"),
        },
        path.parent: {verify: str(path), load_state_dict: str(path), imported: str(path)},
        open_path / "old.pt": {imported: str(open_path / "old.pt")},
    }
    for closed, by in reads.items():
        mode = closed.stat().st_mode
        closed.chmod(0)
        for read, named in by.items():
            message = as_nobody(read, open_path / "old.pt" if closed.suffix == ".pt" else path)
            assert f"can't read {named}" in message, (closed, message)
            assert_says(message, "PermissionError", "This user lacks permission for that: request it")
            assert not re.search("damage|missing|nothing|backup|Check the path", message), message
        closed.chmod(mode)
    assert version_of(path) == 1.0


def imported(source: Path) -> None:
    import_checkpoint(source, "/nowhere")


def test_a_filesystem_that_takes_no_files() -> None:
    with pytest.raises(
        CheckpointError, match=r"writing /proc/self/c failed: .*No such file|writing /proc/self/c failed: "
    ):
        save_large("/proc/self/c", 1.0)


class Full(MemoryFileSystem):  # type: ignore[misc]
    """A store in memory that fails as a test says: with which error, at files of which names."""

    protocol = "full"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    error: OSError | None = None
    at = ""

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        stream = super()._open(path, mode=mode, **kwargs)
        if mode == "wb" and Full.error is not None and Full.at in path:
            stream.write(b"half of it")
            raise Full.error
        return stream

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if Full.error is not None and Full.at in path:
            raise Full.error
        super().pipe_file(path, value, mode=mode, **kwargs)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    fsspec.register_implementation("full", Full, clobber=True)
    yield "full:///runs/c"
    Full.store.clear()
    Full.pseudo_dirs[:] = [""]
    Full.error = None


@pytest.mark.parametrize("at", ["model/", "state-", "manifest.json"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            r"No space left on device.*There is no space left: free some",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), r"Disk quota exceeded.*There is no space left: free some"),
        (PermissionError("Access Denied"), r"Access Denied.*This user lacks permission for that: request it"),
        (OSError(errno.EROFS, "Read-only file system"), r"Read-only file system.*It is mounted read-only: use"),
        (OSError("connection reset"), r"connection reset.*Check the disk or the connection, and try again"),
    ],
    ids=["full", "quota", "permission", "read_only", "connection"],
)
@pytest.mark.parametrize("old", [True, False])
def test_errors_of_filesystems_are_explained(full: str, at: str, error: OSError, message: str, old: bool) -> None:
    if old:
        save_large(full, 1.0)
    before = {name: file.getvalue() for name, file in Full.store.items()}
    Full.error, Full.at = error, at
    doing = "writing" if at == "model/" else "committing"
    with pytest.raises(CheckpointError, match=f"^{doing} {full} failed: {type(error).__name__}: .*{message}"):
        save_large(full, 2.0)
    Full.error = None
    assert {name: file.getvalue() for name, file in Full.store.items()} == before
    if old:
        assert version_of(full) == 1.0
    save_large(full, 3.0)
    assert version_of(full) == 3.0
