"""Damaged, foreign and hostile folders: named before any weight changes, and nothing outside of them is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from fsdp_core.checkpoint import is_checkpoint, load, load_state_dict, read_manifest, save, verify
from fsdp_core.checkpoint.manifest import Manifest
from fsdp_core.errors import CheckpointFormatError, CheckpointMismatchError
from fsdp_core.runtime import ProcessGroupRuntime

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(6.0).reshape(3, 2), "b": torch.ones(3)},
    "callbacks": {"best": torch.tensor(0.5), "seen": 3},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "a.ckpt"
    save(path, STATE, runtime=ProcessGroupRuntime(), strategy="test", kinds={"model": "model"})
    return path


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as somebody would who knows the format, its checksum included."""
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    content.pop("checksum")
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    content["checksum"] = "xxh3:" + xxhash.xxh3_64_hexdigest(canonical)
    (folder / "manifest.json").write_text(json.dumps(content))


def chunk_of(content: dict[str, Any], key: str = "model/w") -> dict[str, Any]:
    found: dict[str, Any] = content["tensors"][key]["chunks"][0]
    return found


def model_file(folder: Path) -> Path:
    (path,) = (folder / "model").iterdir()
    return path


def state_file(folder: Path) -> Path:
    (path,) = folder.glob("state-*.json")
    return path


def test_the_manifest_is_readable_and_comes_back(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    manifest = read_manifest(folder)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.to_json() == text
    content = json.loads(text)
    assert content["tensors"]["model/w"]["shape"] == [3, 2]
    assert content["tensors"]["model/w"]["dtype"] == "float32"
    assert max(map(len, text.splitlines())) < 250
    assert content["versions"]["torch"] == str(torch.__version__)


def refused(folder: Path, message: str, error: type[Exception] = CheckpointFormatError) -> None:
    with pytest.raises(error, match=message):
        load(folder)


HOSTILE_NAMES = [
    "../outside.safetensors",
    "model/../../outside.safetensors",
    "/etc/passwd",
    "model//x.safetensors",
    "./x.safetensors",
    "..",
    "",
    "model\\..\\..\\x",
    "C:/x",
    "file:///etc/passwd",
    "x\x00.safetensors",
    "manifest.json",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_file_name_must_stay_inside(folder: Path, name: str) -> None:
    def change(content: dict[str, Any]) -> None:
        content["files"][name] = {"size": 1, "checksum": "xxh3:" + "0" * 16}
        chunk_of(content)["file"] = name

    rewrite(folder, change)
    refused(folder, "does not stay inside the checkpoint")
    with pytest.raises(CheckpointFormatError, match="does not stay inside the checkpoint"):
        verify(folder)


@pytest.mark.parametrize("name", HOSTILE_NAMES[:3])
@pytest.mark.parametrize("field", ["json", "tensors"])
def test_the_state_files_must_stay_inside(folder: Path, name: str, field: str) -> None:
    rewrite(folder, lambda content: content["state"].update({field: name}))
    refused(folder, "the state lies in .*, which is not among the files")


@pytest.mark.parametrize("link", ["file", "folder"])
def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path, link: str) -> None:
    secret = tmp_path / "secret"
    inner = folder / "model" if link == "folder" else model_file(folder)
    inner.rename(secret)
    inner.symlink_to(secret)
    refused(folder, f"is a link to {secret}.*, outside of the checkpoint. Nothing was read from it")
    with pytest.raises(CheckpointFormatError, match="outside of the checkpoint"):
        verify(folder)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(folder: Path) -> None:
    path = model_file(folder)
    path.unlink()
    os.mkfifo(path)
    refused(folder, f"model/{path.name} is missing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "-rank-00000.safetensors is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has [0-9]+ bytes instead of [0-9]+"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "has [0-9]+ bytes instead of [0-9]+"),
        (lambda path: path.write_bytes(b""), "has 0 bytes instead of"),
    ],
    ids=["missing", "truncated", "too_long", "empty"],
)
@pytest.mark.parametrize("which", [model_file, state_file], ids=["model", "state"])
def test_a_missing_or_cut_file_is_named(
    folder: Path, which: Callable[[Path], Path], change: Callable[[Path], object], message: str
) -> None:
    change(which(folder))
    message = message if which is model_file else message.replace("-rank-00000.safetensors", "")
    refused(folder, message)
    refused(folder, "Restore these files, or load an earlier checkpoint")
    with pytest.raises(CheckpointFormatError, match=message):
        verify(folder)
    with pytest.raises(CheckpointFormatError, match=message):
        load_state_dict(folder)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(bytes(data))


def test_every_flipped_byte_is_found_and_its_file_named(folder: Path) -> None:
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        before = path.read_bytes()
        for position in range(0, len(before), 7):
            flip(path, position)
            with pytest.raises(CheckpointFormatError, match=path.name.replace(".", r"\.")):
                verify(folder)
            with pytest.raises(CheckpointFormatError):
                load(folder, verify=True)
            path.write_bytes(before)
    verify(folder)


def test_a_flipped_byte_in_the_plain_data_is_found_by_every_load(folder: Path) -> None:
    path = state_file(folder)
    path.write_bytes(path.read_bytes().replace(b'"seen": 3', b'"seen": 4'))
    refused(folder, f"{path.name}: its checksum is .*: it was changed")


def test_swapped_shards_are_found(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    state = {"model": {"w": STATE["model"]["w"] + 1, "b": torch.ones(3)}, "callbacks": STATE["callbacks"]}
    save(other, state, runtime=ProcessGroupRuntime(), strategy="test", kinds={"model": "model"})
    model_file(folder).write_bytes(model_file(other).read_bytes())
    with pytest.raises(CheckpointFormatError, match=r"has the checksum xxh3:.* instead of xxh3:"):
        load(folder, verify=True)


def test_verify_tells_how_far_it_is(folder: Path) -> None:
    seen: dict[str, int] = {}
    verify(folder, on_bytes=lambda name, count: seen.update({name: seen.get(name, 0) + count}))
    assert seen == {name: entry.size for name, entry in read_manifest(folder).files.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format_version=2), "has format version 2, and .* reads version 1: pip install --upgrade"),
        (lambda c: c.update(format_version="1"), "has format version '1'"),
        (lambda c: c.pop("format_version"), "has format version None"),
        (lambda c: c.update(format="other"), "it is not one of ours"),
        (lambda c: c.pop("tensors"), "it lacks 'tensors'"),
        (lambda c: c.pop("files"), "it lacks 'files'"),
        (lambda c: c.update(tensors=[1]), "of the wrong type"),
        (lambda c: c.update(files=None), "of the wrong type"),
        (lambda c: c.update(world_size="2"), "'2' is no whole number"),
        (lambda c: c.update(save_id="../../x"), "no save has the id"),
        (lambda c: c.update(kinds={"model": "code"}), "neither 'model' nor 'optimizer'"),
        (lambda c: c.update(aliases={"model/x": "model/nothing"}), "stands for 'model/nothing', which is not among"),
        (lambda c: c["tensors"]["model/w"].update(shape=[3, 3]), r"tensor 'model/w': nothing covers \[0:3, 2:3\]"),
        (lambda c: c["tensors"]["model/w"].update(shape=[3, -2]), "tensor 'model/w': no tensor has the shape"),
        (lambda c: c["tensors"]["model/w"].update(shape=[3, 2**62]), "tensor 'model/w': no tensor has the shape"),
        (lambda c: c["tensors"]["model/w"].update(shape=[1] * 5000), "tensor 'model/w': no tensor has the shape"),
        (lambda c: c["tensors"]["model/w"].update(shape="32"), "tensor 'model/w': '3' is no whole number"),
        (lambda c: c["tensors"]["model/w"].update(dtype="object"), "tensor 'model/w': 'object' is no dtype"),
        (lambda c: c["tensors"]["model/w"].update(chunks=[]), "tensor 'model/w': nothing covers"),
        (lambda c: c["tensors"]["model/w"]["chunks"].append(chunk_of(c)), "tensor 'model/w': two chunks cover"),
        (lambda c: chunk_of(c).update(offsets=[1, 0]), "tensor 'model/w': .* does not lie inside"),
        (lambda c: chunk_of(c).update(file="model/other"), "lies in 'model/other', which is not among the files"),
        (lambda c: chunk_of(c).update(key="model/b"), r"should be 'model/b' in .*, but the file holds \(3,\) float32"),
        (lambda c: chunk_of(c).update(key="model/x"), "should be 'model/x' in .*, but the file holds nothing by that"),
        (lambda c: c["tensors"]["model/w"].update(dtype="int32"), "but the file holds .* float32"),
    ],
    ids=range(25),
)
def test_a_manifest_that_does_not_fit_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    rewrite(folder, change)
    refused(folder, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"{", "manifest.json"),
        (b"[]", "it is not one of ours"),
        (b"\xff\xfe\xfa", "manifest.json"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "manifest.json"),
    ],
    ids=["empty", "cut", "list", "no_text", "deep", "huge_number"],
)
def test_a_manifest_that_is_no_manifest_is_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / "manifest.json").write_bytes(content)
    refused(folder, message)


def test_a_huge_header_is_refused_without_reading_it(folder: Path) -> None:
    path = model_file(folder)
    data = (2**62).to_bytes(8, "little") + path.read_bytes()[8:]
    path.write_bytes(data)
    refused(folder, "is no safetensors file: a header of 4611686018427387904 bytes does not fit")


@pytest.mark.parametrize(
    "content",
    ['{"model": {"$saved": "model/nothing"}}', '{"x": {"$tensor": "../x"}}', '{"x": {"$saved": ["a"]}}', "[1]",
     '{"x": {"$import": "os"}}', "[" * 100_000, '{"x": {"$tensor": {"$dict": []}}}', '{"$tuple": [1, 2]}'],
    ids=range(8),
)  # fmt: skip
def test_plain_data_that_does_not_fit_is_refused(folder: Path, content: str) -> None:
    path = state_file(folder)
    path.write_text(content)
    entry = {"size": len(content), "checksum": "xxh3:" + xxhash.xxh3_64_hexdigest(content.encode())}
    rewrite(folder, lambda manifest: manifest["files"].update({path.name: entry}))
    refused(folder, "state")


def test_what_is_no_checkpoint_is_said(tmp_path: Path, folder: Path) -> None:
    refused(tmp_path / "nothing", "no checkpoint at .*nothing: there is nothing. Check the path")
    (tmp_path / "file.ckpt").write_bytes(b"x")
    refused(tmp_path / "file.ckpt", "is a file, but a sharded checkpoint is a folder with a manifest.json")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "the folder is empty")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "weights.bin").write_bytes(b"x")
    refused(tmp_path / "foreign", "is not a checkpoint of this format: it has no manifest.json .there is weights.bin")
    (folder / "manifest.json").unlink()
    refused(folder, "a save began and was interrupted before it was published .* Load an earlier checkpoint")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    refused(tmp_path / "dangling", "there is nothing")
    assert not any(map(is_checkpoint, tmp_path.iterdir()))


def test_a_key_that_is_not_there_lists_the_models(folder: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"no model under 'generator' in .*a.ckpt. Models in it: 'model'"):
        load_state_dict(folder, "generator")


def test_a_file_that_shrinks_after_the_load_began_is_an_error(folder: Path) -> None:
    bias = load(folder)["model"]["b"]
    path = model_file(folder)
    os.truncate(path, path.stat().st_size - 12)
    with pytest.raises(CheckpointFormatError, match="it was changed since the load began"):
        bias.full()
