"""No source runs anything, reads outside of its folder, or brings in what is neither plain data nor a tensor."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import io
import os
import pathlib
import pickle
import re
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_core.checkpoint import load
from fsdp_core.checkpoint.importing import import_checkpoint
from fsdp_core.checkpoint.importing.plain import PlainReader
from fsdp_core.checkpoint.importing.unpickling import unpickle
from fsdp_core.errors import CheckpointError, CheckpointFormatError, CheckpointValueError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Payload:
    """Runs a command wherever it is unpickled freely."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """The file that a payload makes, if it runs."""
    return tmp_path / "it-ran"


def plain_ckpt(path: Path, **more: Any) -> None:
    torch.save({"model": {"w": torch.ones(2, 2)}, **more}, path)


def saved_by_torch(folder: Path, **more: Any) -> None:
    dcp.save({"model": {"w": torch.ones(2, 2)}, **more}, checkpoint_id=folder, no_dist=True)


def in_metadata(folder: Path, payload: Payload) -> None:
    saved_by_torch(folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = payload
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def instead_of_metadata(folder: Path, payload: Payload) -> None:
    saved_by_torch(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(payload))


def in_a_tensors_place(folder: Path, payload: Payload) -> None:
    saved_by_torch(folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    blob = io.BytesIO()
    torch.save(payload, blob)
    for place in metadata.storage_data.values():
        place.relative_path, place.offset, place.length = "bad.distcp", 0, blob.tell()
    (folder / "bad.distcp").write_bytes(blob.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_meta_pt(folder: Path, payload: Payload) -> None:
    saved_by_torch(folder)
    torch.save({"pytorch-lightning_version": "2.6.0", "callbacks": payload}, folder / "meta.pt")


def in_xla_shards(folder: Path, payload: Payload) -> None:
    folder.mkdir()
    torch.save({"model": {"w": torch.ones(1)}, "shard_metadata": payload}, folder / "rank-0.pth")


HIDDEN: dict[str, Callable[[Path, Payload], None]] = {
    "ckpt": lambda path, payload: plain_ckpt(path, hyper_parameters={"a": payload}),
    "ckpt-alone": lambda path, payload: torch.save(payload, path),
    "ckpt-as-key": lambda path, payload: plain_ckpt(path, callbacks={payload: 1}),
    "dcp-object": lambda path, payload: saved_by_torch(path, extra=payload),
    "dcp-metadata": in_metadata,
    "dcp-no-metadata": instead_of_metadata,
    "dcp-tensor": in_a_tensors_place,
    "meta.pt": in_meta_pt,
    "xla": in_xla_shards,
}


@pytest.mark.parametrize("where", HIDDEN)
def test_a_payload_does_not_run(tmp_path: Path, proof: Path, where: str) -> None:
    HIDDEN[where](tmp_path / "old", Payload(proof))
    with pytest.raises(CheckpointError, match=r"posix\.system|nt\.system|no metadata|can't be a key"):
        import_checkpoint(tmp_path / "old", tmp_path / "new")
    assert not proof.exists()
    assert not (tmp_path / "new").exists()


def test_the_payloads_are_real(tmp_path: Path, proof: Path) -> None:
    HIDDEN["ckpt"](tmp_path / "old", Payload(proof))
    torch.load(tmp_path / "old", weights_only=False)
    assert proof.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'touch {}'\ntR.",
        b"(S'touch {}'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'touch {}'\no.",  # OBJ
        b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\nX\x08\x00\x00\x00__call__\x86RX\x00\x00\x00\x00\x85R.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x00\x85R.",  # STACK_GLOBAL
        b"\x80\x02ccollections\nOrderedDict\n}X\x03\x00\x00\x00popcos\nsystem\nsb.",  # BUILD on a name
    ],
    ids=["reduce", "inst", "obj", "getattr", "stack-global", "build"],
)
def test_opcodes_that_call(proof: Path, code: bytes) -> None:
    reader = PlainReader(size=100)
    try:
        reader.read(unpickle(code.replace(b"{}", str(proof).encode()), "it"))
        reader.check("it")
    except (CheckpointFormatError, CheckpointValueError):
        pass
    else:
        pytest.fail("it was read")
    assert not proof.exists()
    assert not isinstance(collections.OrderedDict.pop, type)


@pytest.mark.parametrize(
    "code",
    [
        b"\x80\x04K\x01r\xff\xff\xff\xff0K\x01.",  # a huge place in the memo
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",  # a huge bytearray
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\x00\x00\x00a.",  # a huge string
        b"\x80\x04\x95\xff\xff\xff\xff\xff\x00\x00\x00.",  # a huge frame
        b"\x80\x04" + b"(" * 100_000 + b".",
    ],
    ids=["memo", "bytearray", "string", "frame", "marks"],
)
def test_sizes_that_are_not_there(code: bytes) -> None:
    """Either it is refused, or read as the little that it is; the time limit and the memory of the test stand."""
    with contextlib.suppress(CheckpointFormatError):
        assert unpickle(code, "it") in (1, [])


@pytest.mark.parametrize("nest", ["deep", "wide"])
def test_nests_without_end(tmp_path: Path, nest: str) -> None:
    if nest == "deep":
        value: list[Any] = []
        value.append(value)
    else:
        value = ["x"] * 100
        for _ in range(20):
            value = [value] * 100
    plain_ckpt(tmp_path / "old", callbacks=value)
    with pytest.raises(CheckpointFormatError, match=r"far more values than|nested too deeply"):
        import_checkpoint(tmp_path / "old", tmp_path / "new")


@pytest.mark.parametrize("name", ["../outside", "{}", "sub/../../outside", "link", "C:\\outside", ""])
def test_paths_that_lead_outside(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "old"
    saved_by_torch(folder)
    (data,) = folder.glob("*.distcp")
    outside = tmp_path / "outside"
    data.rename(outside)
    (folder / "link").symlink_to(outside)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name.replace("{}", str(outside))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFormatError, match=r"outside of itself|outside of the checkpoint"):
        import_checkpoint(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_index_that_leads_outside(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../outside.safetensors"}}')
    with pytest.raises(CheckpointFormatError, match=r"names a file '../outside.safetensors' outside of itself"):
        import_checkpoint(folder, tmp_path / "new")


def rewritten(path: Path, change: Callable[[bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """A file of torch.save with its pickle changed."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"K\x02K\x02\x86", b"K\x02K\x63\x86", "beyond the 16 bytes of its storage"),  # its shape or its strides
        (b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x007", "lacks 'data/7'"),
        (b"FloatStorage", b"QuuuuStorage", "a storage of the kind 'QuuuuStorage'"),
        (b"_rebuild_tensor_v2", b"_rebuild_tensor_v9", r"torch\._utils\._rebuild_tensor_v9"),
    ],
    ids=["beyond", "other-file", "kind", "function"],
)
def test_tensors_that_are_not_there(tmp_path: Path, old: bytes, new: bytes, says: str) -> None:
    plain_ckpt(tmp_path / "old")
    rewritten(tmp_path / "old", lambda data: data.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=says):
        import_checkpoint(tmp_path / "old", tmp_path / "new")


def test_archives_that_grow(tmp_path: Path) -> None:
    plain_ckpt(tmp_path / "old")
    rewritten(tmp_path / "old", lambda data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointFormatError, match=r"compressed or encrypted"):
        import_checkpoint(tmp_path / "old", tmp_path / "new")


PLAIN = {
    "none": None,
    "numbers": [True, 3, 2**80, -1.5, float("inf"), 1 + 2j],
    "text": ("a", "ü\x00\n", b"\x00\xff", b""),
    "sets": [{1, "a"}, frozenset((1, 2))],
    "ordered": collections.OrderedDict(b=1, a=2),
    "counted": collections.Counter("abca"),
    "default": collections.defaultdict(list, a=[1]),
    "keys": {1: "a", (1, "b"): "c", None: "d"},
    "times": [
        datetime.timedelta(1, 2, 3),
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        datetime.date(2026, 1, 2),
        datetime.time(3, 4),
    ],
    "path": pathlib.Path("a/b"),
    "namespace": argparse.Namespace(lr=0.1, inner=argparse.Namespace(a=1)),
    "torch": [torch.Size((1, 2)), torch.float16, torch.device("cpu"), torch.arange(3)],
    "numpy": [numpy.float64(1.5), numpy.int64(3), numpy.bool_(True), numpy.arange(6.0).reshape(2, 3).T],
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_data_comes_through(tmp_path: Path, name: str) -> None:
    plain_ckpt(tmp_path / "old", data=PLAIN[name])
    import_checkpoint(tmp_path / "old", tmp_path / "new")
    got, want = load(tmp_path / "new")["data"], PLAIN[name]
    if name in ("torch", "numpy"):
        for mine, theirs in zip(got, want, strict=True):  # type: ignore[arg-type]
            assert type(mine) is type(theirs)
            equal = mine == theirs
            assert equal.all() if hasattr(equal, "all") else equal
    else:
        assert (type(got), got) == (type(want), want)


def test_attributes_of_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "lightning.fabric.utilities.data"
    attributes = type("AttributeDict", (dict,), {"__module__": module})
    for name in ("lightning", module):  # without importing it, which takes seconds
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[module], "AttributeDict", attributes, raising=False)
    plain_ckpt(tmp_path / "old", hyper_parameters=attributes(lr=0.1, inner=attributes(a=1)))
    import_checkpoint(tmp_path / "old", tmp_path / "new")
    assert load(tmp_path / "new")["hyper_parameters"] == {"lr": 0.1, "inner": {"a": 1}}


def test_what_is_not_plain_is_named_with_its_path(tmp_path: Path) -> None:
    parameters = {"lr": 0.1, "loss": nn.CrossEntropyLoss(), "act/fn": torch.relu, "deep": [{"kind": argparse.Action}]}
    plain_ckpt(tmp_path / "old", hyper_parameters=parameters)
    with pytest.raises(CheckpointValueError) as refused:
        import_checkpoint(tmp_path / "old", tmp_path / "new")
    message = str(refused.value)
    assert "'hyper_parameters/loss': torch.nn.modules.loss.CrossEntropyLoss" in message
    assert "'hyper_parameters/deep/0/kind': argparse.Action, which is code" in message
    (command,) = re.findall("`(--drop.*?)`, or", message)
    paths = re.findall(r"--drop (\S+)", command)
    assert paths == ["hyper_parameters/loss", "hyper_parameters/act%2Ffn", "hyper_parameters/deep/0/kind"]
    import_checkpoint(tmp_path / "old", tmp_path / "new", drop=paths)
    assert load(tmp_path / "new")["hyper_parameters"] == {"lr": 0.1, "deep": [{}]}
    import_checkpoint(tmp_path / "old", tmp_path / "weights", weights_only=True)
    assert list(load(tmp_path / "weights")) == ["model"]


def test_a_path_that_leads_to_nothing(tmp_path: Path) -> None:
    plain_ckpt(tmp_path / "old", hyper_parameters={"lr": 1})
    with pytest.raises(CheckpointValueError, match=r"nothing to drop at 'hyper_parameters/lx'.*holds: model, hyper"):
        import_checkpoint(tmp_path / "old", tmp_path / "new", drop=["hyper_parameters/lx"])
