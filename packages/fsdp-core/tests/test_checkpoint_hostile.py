"""Folders made to do harm: nothing in them runs, nothing outside of them is read, and nothing waits or fills memory."""

from __future__ import annotations

import json
import os
import pickle
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hostile_reads
from conftest import Site
from damaged_folders import Payload, chunk_of, model_file, refused, reseal, rewrite, save_small, state_file
from fsdp_core.checkpoint import load, load_state_dict, verify
from fsdp_core.checkpoint.format import json_text
from fsdp_core.errors import CheckpointFormatError, CheckpointValueError
from fsdp_core.state.coverage import find_fault
from fsdp_core.testing.refusals import refusal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_small(tmp_path / "run" / "a.ckpt")


def pickled(folder: Path) -> bytes:
    return pickle.dumps(Payload(folder.parent / "it-ran"))


def outside(folder: Path) -> Path:
    """A secret beside the folder."""
    path = folder.parent / "secret"
    path.write_text('{"secret": 1}')
    return path


def replace_by(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def link(path: Path, to: Path) -> None:
    path.unlink()
    path.symlink_to(to)


def link_to_moved(path: Path, to: Path) -> None:
    path.rename(to)
    path.symlink_to(to)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def name_in_manifest(folder: Path, name: str) -> None:
    def change(content: dict[str, Any]) -> None:
        content["files"][name] = {"size": 13, "checksum": "xxh3:" + "0" * 16}
        chunk_of(content)["file"] = name

    rewrite(folder, change)


def name_secret(folder: Path, name: str) -> None:
    outside(folder)
    name_in_manifest(folder, name)


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def save_with_torch(folder: Path) -> None:
    torch.save(Payload(folder.parent / "it-ran"), model_file(folder))
    reseal(folder, model_file(folder))


def write_state(folder: Path, text: str) -> None:
    reseal(folder, replace_by(state_file(folder), text.encode()))


def write_header(folder: Path, header: dict[str, Any], size: int = 64) -> None:
    """Give the model's file a header of its own, and let the manifest agree with what it says of ``w``."""
    text = json.dumps(header).encode()
    reseal(folder, replace_by(model_file(folder), len(text).to_bytes(8, "little") + text + bytes(size)))


def change_tensor(folder: Path, **values: Any) -> None:
    rewrite(folder, lambda content: content["tensors"]["model/w"].update(values))


def staggered(count: int) -> list[dict[str, Any]]:
    """Chunks that begin one after another, and all overlap: comparing each with each would take minutes."""
    return [
        {"file": "x", "key": "x", "offsets": [i, 0], "lengths": [count, 1 + i % 2]} for i in range(count)
    ]  # fmt: skip


DEEP = 50_000

#: How a good folder is made hostile; each of these must be refused.
REFUSED: dict[str, Callable[[Path], object]] = {
    "a parent's file": lambda f: name_secret(f, "../secret"),
    "an absolute path": lambda f: name_in_manifest(f, str(outside(f))),
    "a parent of a folder": lambda f: name_secret(f, "model/../../secret"),
    "a URL": lambda f: name_in_manifest(f, f"file://{outside(f)}"),
    "a chained URL": lambda f: name_in_manifest(f, "simplecache::memory://secret"),
    "a link to a file": lambda f: link(model_file(f), outside(f)),
    "a link to a moved file": lambda f: link_to_moved(model_file(f), f.parent / "moved"),
    "a link to a moved folder": lambda f: link_to_moved(f / "model", f.parent / "moved"),
    "a link to the state": lambda f: link_to_moved(state_file(f), f.parent / "moved"),
    "a link for the manifest": lambda f: link_to_moved(f / "manifest.json", f.parent / "moved"),
    "a link to /dev/zero": lambda f: link(model_file(f), Path("/dev/zero")),
    "a link for the manifest to /dev/zero": lambda f: link(f / "manifest.json", Path("/dev/zero")),
    "a link to itself": lambda f: link(model_file(f), model_file(f)),
    "a pipe for a file": lambda f: pipe(model_file(f)),
    "a pipe for the state": lambda f: pipe(state_file(f)),
    "a pipe for the manifest": lambda f: pipe(f / "manifest.json"),
    "a folder for the manifest": lambda f: become_folder(f / "manifest.json"),
    "a pickle for the manifest": lambda f: replace_by(f / "manifest.json", pickled(f)),
    "a pickle for the state": lambda f: reseal(f, replace_by(state_file(f), pickled(f))),
    "a pickle for the weights": lambda f: reseal(f, replace_by(model_file(f), pickled(f))),
    "a file of torch for the weights": save_with_torch,
    "a header of 2**62 bytes": lambda f: reseal(
        f, replace_by(model_file(f), (2**62).to_bytes(8, "little") + model_file(f).read_bytes()[8:])
    ),
    "a deep header": lambda f: reseal(
        f, replace_by(model_file(f), DEEP.to_bytes(8, "little") + b"[" * DEEP)
    ),
    "a tensor of 2**40 elements": lambda f: write_header(
        f, {"model/w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    ),
    "a tensor of 2**40 elements in no bytes": lambda f: write_header(
        f, {"model/w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 64]}}
    ),
    "tensors over one another": lambda f: write_header(
        f, {n: {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]} for n in ("model/w", "model/b")}
    ),
    "2**40 elements in the manifest": lambda f: change_tensor(
        f, shape=[2**40], chunks=[{"file": "x", "key": "x", "offsets": [0], "lengths": [2**40]}]
    ),
    "a size of 10**4000": lambda f: change_tensor(f, shape=[10**4000, 0], chunks=[]),
    "thousands of overlapping chunks": lambda f: change_tensor(f, shape=[20_000, 2], chunks=staggered(10_000)),
    "64 dimensions": lambda f: change_tensor(
        f, shape=[2] * 50 + [1] * 14, chunks=[dict(chunk, offsets=[i % 2] * 50 + [0] * 14, lengths=[1] * 64)
                                              for i, chunk in enumerate(staggered(1000))]
    ),
    "a deep manifest": lambda f: replace_by(f / "manifest.json", b'{"format": "fsdp-checkpoint", "a": ' + b"[" * DEEP),
    "a deep state": lambda f: write_state(f, '{"a":' * DEEP + "1" + "}" * DEEP),
    "an integer of 5000 digits": lambda f: write_state(f, '{"a": 1' + "0" * 5000 + "}"),
    "an integer of 5000 digits in the manifest": lambda f: replace_by(
        f / "manifest.json", b'{"format": "fsdp-checkpoint", "format_version": 1' + b"0" * 5000 + b"}"
    ),
    "deep tuples": lambda f: write_state(f, '{"a":' + '{"$tuple":[' * DEEP + "]}" * DEEP + "}"),
    "deep sets": lambda f: write_state(f, '{"a":' + '{"$frozenset":[' * 900 + "]}" * 900 + "}"),
    "the same tensor a thousand times": lambda f: write_state(
        f, json.dumps({"a": [{"$tensor": "callbacks/best"}] * 1000})
    ),
    **{
        f"plain data {text}": lambda f, text=text: write_state(f, f'{{"a": {{{text}}}}}')
        for text in (
            '"$import": "os.system"', '"$timedelta": [1e400]', '"$timedelta": "x"', '"$dtype": "nn"', '"$dict": 3',
            '"$dtype": ["float32"]', '"$numpy": ["object", {"$tuple": [1]}]', '"$bytes": "%%"', '"$device": "rm -rf"',
            '"$set": [[1]]', '"$float": "import os"', '"$namespace": [[1, 2]]', '"$size": ["x"]', '"$datetime": "now"',
        )
    },
    "an unknown factory": lambda f: write_state(f, '{"a": {"$defaultdict": ["os.system", []]}}'),
    "numpy objects": lambda f: write_state(f, '{"a": {"$numpy": ["O", 1]}}'),
    "numpy's own parser": lambda f: write_state(f, '{"a": {"$numpy": ["(2**40,)f4", 1]}}'),
    "a dtype that is an attribute": lambda f: write_state(f, '{"a": {"$dtype": "__class__"}}'),
    "an array that is no tensor": lambda f: write_state(f, '{"a": {"$ndarray": {"$path": "/etc/passwd"}}}'),
    "a tensor by path": lambda f: write_state(f, '{"a": {"$tensor": "../secret"}}'),
    "a class for a namespace": lambda f: write_state(f, '{"a": {"$namespace": [["__class__", "os"]]}}'),
    "an unhashable key": lambda f: write_state(f, '{"a": {"$dict": [[[1], 2]]}}'),
}  # fmt: skip

#: What is strange, and may be read: it is data, and stays data.
READ: dict[str, Callable[[Path], object]] = {
    "more files than the manifest names": lambda f: [
        replace_by(f / name, pickled(f)) for name in ("data.pkl", ".metadata", "state.pt", "conftest.py", "__init__.py")
    ],
    "paths and devices": lambda f: write_state(
        f, '{"a": {"$path": "/etc/passwd"}, "b": {"$device": "cuda:7"}, "model": {"w": {"$saved": "model/w"}}}'
    ),
    "a link inside": lambda f: link_to_moved(model_file(f), f / "model" / "elsewhere.safetensors"),
}


def test_nothing_runs_and_nothing_outside_is_opened(site: Site, tmp_path: Path) -> None:
    good = save_small(tmp_path / "good" / "a.ckpt")
    folders = {name: save_small(tmp_path / str(i) / "a.ckpt") for i, name in enumerate({**REFUSED, **READ})}
    for name, make in {**REFUSED, **READ}.items():
        make(folders[name])
    done = site.fork(hostile_reads.__file__, str(good), *map(str, folders.values()))
    told = json.loads(done.stdout.splitlines()[-1])
    for name, folder in folders.items():
        what = told[str(folder)]
        assert what["seconds"] < 20, name
        for event, argument in what["events"]:
            assert event in hostile_reads.PATHS, (name, event, argument)
            assert not argument.isdigit(), (name, event, argument)
            assert Path(os.path.realpath(argument)).is_relative_to(folder), (name, event, argument)
            assert event in ("open", "os.listdir", "os.scandir"), (name, event, argument)
        ended = what["ended"]
        if name in REFUSED:
            assert ended["load"].startswith("refused: "), (name, ended)
            assert ended["load without verification"].startswith("refused: "), (name, ended)
        assert all(how == "read" or how.startswith("refused: ") for how in ended.values()), (name, ended)
        if name in READ:
            assert ended["load"] == ended["verify"] == "read", (name, ended)
        assert not (folder.parent / "it-ran").exists(), name
    # the hook sees what it must not see
    assert ["open", os.devnull] in told["control"]["events"]
    assert ["import", "there_is_no_such_module"] in told["control"]["events"]


def test_a_file_of_another_kind_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file.ckpt"
    torch.save({"state_dict": Payload(tmp_path / "it-ran")}, path)
    for read, message in ((load, "."), (verify, "."), (load_state_dict, "runs no code from a checkpoint")):
        refused(path, message, by=read)
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("dimensions", [2, 8])
def test_chunks_that_interleave_are_compared_in_linear_time(dimensions: int) -> None:
    count, rest = 10_000, (1,) * (dimensions - 2)
    none = (0,) * (dimensions - 2)
    shape = (count, count, *rest)
    # Each column is cut at another row, so that at every row all columns begin or end somewhere else.
    boxes = [((0, i, *none), (i, 1, *rest)) for i in range(1, count)]
    boxes += [((i, i, *none), (count - i, 1, *rest)) for i in range(count)]
    began = time.process_time()
    assert find_fault(shape, boxes) is None
    assert find_fault(shape, boxes[1:]) is not None
    offsets, lengths = boxes[-1]
    fault = find_fault(shape, [*boxes[:-1], ((0, *offsets[1:]), lengths)])  # as large, elsewhere
    assert fault is not None
    assert "leave a hole or overlap" in fault or "cover" in fault
    assert time.process_time() - began < 20


SMALL: dict[str, Callable[[Path, str], object]] = {
    "manifest": lambda f, text: replace_by(f / "manifest.json", f'{{"format": "fsdp-checkpoint", {text}}}'.encode()),
    "plain data": lambda f, text: write_state(f, f"{{{text}}}"),
}


@pytest.mark.parametrize("what", SMALL)
def test_json_that_would_fill_the_memory_is_not_parsed(folder: Path, what: str) -> None:
    SMALL[what](folder, '"a": [' + "{}," * (json_text.MAX_CONTAINERS + 1) + "0]")  # 25 MB, which become 600
    tracemalloc.start()
    try:
        refused(folder, "lists and objects, and the limit is 8388608")
        assert tracemalloc.get_traced_memory()[1] < 150 * 2**20
    finally:
        tracemalloc.stop()


def test_files_of_json_beyond_the_limit_are_not_read(folder: Path) -> None:
    os.truncate(folder / "manifest.json", json_text.MAX_JSON_BYTES + 1)  # holes
    refused(folder, f"it has {2**28 + 1} bytes, and the limit for a manifest is {2**28}")


def test_what_readers_would_refuse_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (10**4300, {10**4300: 1}, [{"a": (-(10**4300),)}]):
        with pytest.raises(CheckpointValueError, match="an integer of more than 4300 digits; save it as a string"):
            save_small(tmp_path / "a", {"model": {"w": torch.ones(1)}, "data": value})
    monkeypatch.setattr(json_text, "MAX_CONTAINERS", 30)
    with pytest.raises(
        CheckpointValueError, match="can't save this plain data, because readers would refuse it: it holds 42"
    ):
        save_small(tmp_path / "a", {"model": {"w": torch.ones(1)}, "data": [[]] * 38})
    monkeypatch.setattr(json_text, "MAX_CONTAINERS", 100)
    with pytest.raises(
        CheckpointValueError, match="a checkpoint of 40 chunks, because readers would refuse its manifest"
    ):
        save_small(tmp_path / "a", {"model": {f"w{i}": torch.ones(()) for i in range(40)}})
    assert not (tmp_path / "a").exists()


def test_no_message_reaches_a_terminal_raw(folder: Path) -> None:
    evil = "\x1b[2J\x9b31m\u202e"
    rewrite(folder, lambda content: content["files"].update({evil: {"size": 1, "checksum": "xxh3:" + "0" * 16}}))
    error = refusal(CheckpointFormatError, lambda: load(folder))
    rewrite(folder, lambda content: content["files"].pop(evil))
    rewrite(folder, lambda content: content["files"].update({evil[4:]: {"size": 1, "checksum": "xxh3:" + "0" * 16}}))
    with pytest.raises(CheckpointFormatError, match="is missing") as other:
        load(folder)
    for told in (error, str(other.value)):
        assert "31m" in told
        assert all(line.isprintable() for line in told.split("\n")), told
