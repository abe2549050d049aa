"""``fsdp checkpoint list``: what lies in a directory, whole or not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from cli_checkpoints import run, save_trained
from damaged_folders import save_alone
from fsdp_core.testing.refusals import assert_says
from versioned_saves import another_writer, save_interrupted, save_version


def interrupted(path: Path, monkeypatch: pytest.MonkeyPatch, **writer: Any) -> None:
    """Let a save end before it is committed, of this process or of another one."""
    with another_writer(monkeypatch, **writer) as patched:
        save_interrupted(patched, path, 5.0, "fsync", 5)


def listed(path: Path | str) -> dict[str, dict[str, Any]]:
    done = run("list", path, "--json")
    return {one["path"].rpartition("/")[2]: one for one in json.loads(done.stdout)}


def test_whole_damaged_and_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_alone(tmp_path / "a.ckpt", {"model": {"w": torch.ones(3)}, "trainer": {"global_step": 2}})
    shutil.copytree(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    next((tmp_path / "b.ckpt" / "model").iterdir()).unlink()
    shutil.copytree(tmp_path / "a.ckpt", tmp_path / "d.ckpt")
    (tmp_path / "d.ckpt" / "manifest.json").write_text('{"format": "fsdp-checkpoint", "format_version": 9}')
    interrupted(tmp_path / "c.ckpt", monkeypatch, pid=999_999_999)
    interrupted(tmp_path / "c.ckpt", monkeypatch, host="gpu-07")
    save_version(tmp_path / "e.ckpt", 1.0)  # which removes what is left of the writer that is gone
    interrupted(tmp_path / "c.ckpt", monkeypatch, pid=999_999_999)
    interrupted(tmp_path / "e.ckpt", monkeypatch, pid=os.getppid(), started=1)
    (tmp_path / "f.ckpt").write_bytes(b"a file")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    found = listed(tmp_path)
    halves = {one["remark"]: one for name, one in found.items() if name.startswith(".partial-")}
    assert {name for name in found if not name.startswith(".partial-")} == {"a.ckpt", "b.ckpt", "d.ckpt", "e.ckpt"}
    assert (found["a.ckpt"]["state"], found["a.ckpt"]["step"]) == ("whole", 2)
    files = [file for file in (tmp_path / "a.ckpt").rglob("*") if file.is_file() and "manifest" not in file.name]
    assert found["a.ckpt"]["bytes"] == sum(file.stat().st_size for file in files)
    assert found["b.ckpt"]["state"] == found["d.ckpt"]["state"] == "damaged"
    assert "missing, or of another size: model/" in found["b.ckpt"]["remark"]
    assert "version" in found["d.ckpt"]["remark"]
    assert found["e.ckpt"]["state"] == "whole"
    assert "files of other saves lie in it too" in found["e.ckpt"]["remark"]
    assert {one["state"] for one in halves.values()} == {"unfinished"}
    assert all(one["bytes"] > 0 and one["time"] for one in halves.values())
    elsewhere, gone = sorted(halves, key=lambda remark: "is gone" in remark)
    assert len(halves) == 2
    assert_says(gone, "by process 999999999 on", "which is gone: the next save to this directory removes it")
    assert "gpu-07, which may or may not be running" in elsewhere
    lines = run("list", tmp_path).stdout.splitlines()
    assert lines[0].split() == ["Name", "State", "Step", "Size", "Age"]
    assert len(lines) == 1 + len(found)
    assert any(line.split()[:3] == ["a.ckpt", "whole", "2"] for line in lines)


@pytest.mark.parametrize(
    ("saved", "step"),
    [
        ({"trainer": {"global_step": 2}, "step": 9}, 2),
        ({"global_step": 3, "step": 9}, 3),
        ({"step": 4}, 4),
        ({"step": True}, None),
        ({"step": torch.tensor(4)}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_step_that_is_shown(tmp_path: Path, saved: dict[str, Any], step: int | None) -> None:
    save_alone(tmp_path / "a.ckpt", {"model": {"w": torch.ones(3)}, **saved})
    assert listed(tmp_path)["a.ckpt"]["step"] == step


def test_in_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_core.checkpoint.tools.listing import find_checkpoints

    url = f"memory://{tmp_path.name}"
    save_version(f"{url}/a.ckpt", 1.0)
    save_version(f"{url}/b.ckpt", 1.0)
    fs, root = fsspec.core.url_to_fs(f"{url}/b.ckpt")
    fs.rm_file(f"{root}/manifest.json")
    found = {one.path.rpartition("/")[2]: (one.state, one.remark) for one in find_checkpoints(url)}
    assert found == {"a.ckpt": ("whole", "by test"), "b.ckpt": ("unfinished", "its writer is not recorded")}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "is not a directory. Check the path"),
        (lambda path: path.write_bytes(b""), "is not a directory. Check the path"),
        (save_trained, "is a checkpoint itself. Type `fsdp checkpoint inspect"),
    ],
)
def test_what_is_no_directory_of_checkpoints_is_said(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "a.ckpt")
    done = run("list", tmp_path / "a.ckpt", status=1)
    assert done.stdout == ""
    assert message in done.stderr


def test_a_directory_of_nothing(tmp_path: Path) -> None:
    assert run("list", tmp_path).stdout == f"no checkpoint of this format in {tmp_path}\n"
