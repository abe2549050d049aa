"""What is at the path, and what is left of it: the old checkpoint or the new one, whole, and nothing besides."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from damaged_folders import refused
from fsdp_core.checkpoint import is_checkpoint, remove
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder
from fsdp_core.checkpoint.storage.writers import new_writer
from fsdp_core.errors import CheckpointError, CheckpointExistsError
from versioned_saves import files_in, interrupt, is_tidy, save_interrupted, save_version, version_of


def test_an_overwrite_leaves_only_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folders" / "last.ckpt"
    for value in (1.0, 2.0, 3.0):
        save_version(path, value, overwrite=value > 1)
        assert version_of(path) == value
        assert is_tidy(path)


@pytest.mark.parametrize("kind", ["file", "link_to_file", "link_to_checkpoint", "dangling_link"])
def test_a_file_or_link_gives_way_once_the_new_one_is_whole(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "last.ckpt", tmp_path / "epoch=1.ckpt"
    if kind == "file":
        path.write_bytes(b"an earlier full checkpoint")
    elif kind == "link_to_file":
        other.write_bytes(b"x")
        path.symlink_to(other)
    else:
        if kind == "link_to_checkpoint":
            save_version(other, 7.0)
        path.symlink_to(other)
    save_version(path, 1.0)
    assert version_of(path) == 1.0
    assert not path.is_symlink()
    assert is_tidy(path)
    if kind == "link_to_file":
        assert other.read_bytes() == b"x"
    if kind == "link_to_checkpoint":  # what the link pointed to is another checkpoint, and stays
        assert version_of(other) == 7.0


@pytest.mark.parametrize("step", ["commit", "move_to", "writing"])
def test_a_failure_leaves_a_file_as_it_was(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"an earlier full checkpoint")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("injected")

    monkeypatch.setattr(Folder, step, fail)
    with pytest.raises(CheckpointError, match="injected"):
        save_version(path, 1.0)
    assert path.read_bytes() == b"an earlier full checkpoint"
    assert [found.name for found in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("content", ["notes.txt", "model/weights.bin", ".metadata", "manifest.json"])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c"
    (path / content).parent.mkdir(parents=True)
    (path / content).write_text("{}")
    with pytest.raises(CheckpointExistsError, match=rf"something else in it \({content}\).*save to another path"):
        save_version(path, 1.0)
    with pytest.raises(CheckpointExistsError, match=r"is not a checkpoint of this format .*, so it was not removed"):
        remove(path)
    assert files_in(path) == {content}


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    save_version(tmp_path, 1.0)
    assert version_of(tmp_path) == 1.0


def test_files_of_the_user_stay_through_overwrites_and_removal(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_version(path, 1.0)
    (path / "notes.txt").write_text("mine")
    (path / "model" / "tokenizer.json").write_text("mine")
    save_version(path, 2.0)
    assert version_of(path) == 2.0
    remove(path)
    assert files_in(path) == {"notes.txt", "model/tokenizer.json"}


def test_files_behind_a_link_are_not_removed(tmp_path: Path) -> None:
    save_version(tmp_path / "other", 1.0)
    save_version(tmp_path / "c", 2.0)
    for file in (tmp_path / "c" / "optimizer").iterdir():
        file.unlink()
    (tmp_path / "c" / "optimizer").rmdir()
    (tmp_path / "c" / "optimizer").symlink_to(tmp_path / "other" / "optimizer")
    remove(tmp_path / "c")
    assert version_of(tmp_path / "other") == 1.0


def test_nothing_is_saved_behind_a_link(tmp_path: Path) -> None:
    """A load would not follow it."""
    save_version(tmp_path / "c", 1.0)
    (tmp_path / "c" / "model").rename(tmp_path / "elsewhere")
    (tmp_path / "c" / "model").symlink_to(tmp_path / "elsewhere")
    before = files_in(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"'model/.* is a link to .*elsewhere, outside of the checkpoint"):
        save_version(tmp_path / "c", 2.0)
    assert files_in(tmp_path / "elsewhere") == before
    (tmp_path / "c" / "model").unlink()
    (tmp_path / "linked").symlink_to("c")
    save_version(tmp_path / "linked", 3.0)
    assert version_of(tmp_path / "linked") == 3.0


@pytest.mark.parametrize("at", range(1, 14))
def test_whatever_sync_fails_one_whole_checkpoint_is_there(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    save_version(path, 1.0)
    before = files_in(path)
    with monkeypatch.context() as patched:
        interrupt(patched, os, "fsync", at, OSError(5, "Input/output error"))
        with pytest.raises(CheckpointError, match="Input/output error"):
            save_version(path, 2.0)
    # The manifest's replacement counts, whatever fails after it.
    if version_of(path) == 1.0:
        assert files_in(path) == before
    else:
        assert version_of(path) == 2.0
    save_version(path, 3.0)
    assert version_of(path) == 3.0
    assert is_tidy(path)


@pytest.mark.parametrize(
    ("name", "at"),
    [
        *(("fsync", at) for at in range(1, 15)),
        *((name, at) for name in ("replace", "unlink", "makedirs") for at in range(1, 5)),
    ],
)
def test_whatever_instant_a_save_ends_at_one_whole_checkpoint_is_there(
    tmp_path: Path, name: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    save_version(path, 1.0)
    save_interrupted(monkeypatch, path, 2.0, name, at)
    assert version_of(path) in (1.0, 2.0)
    save_version(path, 3.0)  # the next save removes what the interrupted one has left
    assert version_of(path) == 3.0
    assert is_tidy(path)


@pytest.mark.parametrize("at", range(1, 15))
def test_an_interrupted_first_save_is_no_checkpoint_and_the_next_one_is(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    save_interrupted(monkeypatch, path, 2.0, "fsync", at)
    if is_checkpoint(path):
        assert version_of(path) == 2.0
    else:
        assert not path.exists()  # no search for checkpoints finds it, nor a part of it
        assert not [other.name for other in tmp_path.iterdir() if not other.name.startswith(".partial-")]
        refused(path, "the path does not exist")
    save_version(path, 3.0)
    assert version_of(path) == 3.0
    assert is_tidy(path)


@pytest.mark.parametrize("name", ["rename", "unlink", "fsync"])
@pytest.mark.parametrize("at", [1, 2, 6, 10])
def test_a_file_in_the_way_is_never_lost(tmp_path: Path, name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"old")
    save_interrupted(monkeypatch, path, 2.0, name, at)
    if is_checkpoint(path):
        assert version_of(path) == 2.0
    else:
        # It is under its name, or, between two renames, beside it.
        kept = [path, *tmp_path.glob("last.ckpt.*.replaced")]
        assert [file.read_bytes() for file in kept if file.is_file()] == [b"old"]
    save_version(path, 3.0)
    assert version_of(path) == 3.0
    assert not list(tmp_path.glob(".partial*"))


def test_what_others_have_put_into_the_folder_of_an_interrupted_save_stays(tmp_path: Path) -> None:
    save_version(tmp_path / "last.ckpt", 1.0)
    left, empty, link, file = (tmp_path / replace(new_writer(digit * 12), started=1).partial for digit in "abcd")
    for folder in (left, empty):
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "aaaaaaaaaaaa-rank-00000.safetensors").write_bytes(b"ours")
        (folder / "state-aaaaaaaaaaaa.json").write_bytes(b"ours")
    (left / "notes").mkdir()
    (left / "notes" / "mine.txt").write_text("mine")
    (left / "model" / "weights.bin").write_text("mine")
    link.symlink_to(tmp_path / "elsewhere")
    shutil.copytree(left, tmp_path / "elsewhere")
    file.write_text("mine")
    save_version(tmp_path / "last.ckpt", 2.0)
    assert version_of(tmp_path / "last.ckpt") == 2.0
    assert not empty.exists()
    assert {str(path.relative_to(left)) for path in left.rglob("*") if path.is_file()} == {
        "notes/mine.txt", "model/weights.bin"
    }  # fmt: skip
    assert len([path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()]) == 4
    assert (link.is_symlink(), file.read_text()) == (True, "mine")


def save_without_manifest(path: Path, value: float) -> None:
    save_version(path, value)
    (path / "manifest.json").unlink()


@pytest.mark.parametrize(
    "make", [save_version, save_without_manifest, lambda path, _: Path(path).write_bytes(b"x"), lambda *_: None]
)
def test_remove_leaves_nothing(tmp_path: Path, make: Callable[[Path, float], Any]) -> None:
    make(tmp_path / "c", 1.0)
    remove(tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_remove_of_a_link_keeps_what_it_points_to(tmp_path: Path) -> None:
    save_version(tmp_path / "c", 1.0)
    (tmp_path / "last").symlink_to("c")
    assert is_checkpoint(tmp_path / "last")
    assert version_of(tmp_path / "last") == 1.0
    remove(tmp_path / "last")
    assert version_of(tmp_path / "c") == 1.0
