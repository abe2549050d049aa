"""No source runs anything, reads outside of its folder, or brings in what is neither plain data nor a tensor."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import pickle
import random
import re
import sys
import tracemalloc
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from damaged_folders import Payload, import_refused
from fsdp_core.checkpoint import load, load_state_dict
from fsdp_core.checkpoint.importing import import_checkpoint, memory_budget
from fsdp_core.checkpoint.importing.plain import PlainReader
from fsdp_core.checkpoint.importing.unpickling import unpickle
from fsdp_core.errors import CheckpointError, CheckpointExistsError, CheckpointFormatError, CheckpointValueError
from fsdp_core.testing.refusals import refusal
from test_checkpoint_plain_data import PLAIN

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """The file that a payload makes, if it runs."""
    return tmp_path / "it-ran"


def plain_ckpt(path: Path, **more: Any) -> None:
    torch.save({"model": {"w": torch.ones(2, 2)}, **more}, path)


def imported(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """What an import gives of what is saved beside a model."""
    plain_ckpt(tmp_path / "old", **more)
    import_checkpoint(tmp_path / "old", tmp_path / "new")
    return load(tmp_path / "new")


def saved_by_torch(folder: Path, **more: Any) -> None:
    dcp.save({"model": {"w": torch.ones(2, 2)}, **more}, checkpoint_id=folder, no_dist=True)


@contextlib.contextmanager
def changed_metadata(folder: Path) -> Iterator[Any]:
    """The metadata of a checkpoint of torch's, to be changed."""
    saved_by_torch(folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    yield metadata
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_metadata(folder: Path, payload: Payload) -> None:
    with changed_metadata(folder) as metadata:
        metadata.planner_data = payload


def instead_of_metadata(folder: Path, payload: Payload) -> None:
    saved_by_torch(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(payload))


def in_a_tensors_place(folder: Path, payload: Payload) -> None:
    with changed_metadata(folder) as metadata:
        blob = io.BytesIO()
        torch.save(payload, blob)
        for chunk in metadata.storage_data.values():
            chunk.relative_path, chunk.offset, chunk.length = "bad.distcp", 0, blob.tell()
        (folder / "bad.distcp").write_bytes(blob.getvalue())


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
    import_refused(tmp_path / "old", r"posix\.system|nt\.system|no metadata|can't be a key", CheckpointError)
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
    reader = PlainReader()
    try:
        reader.read(unpickle(code.replace(b"{}", str(proof).encode()), "it"))
        reader.raise_if_refused("it")
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
def test_nests_without_end(tmp_path: Path, nest: str, little_memory: Any) -> None:
    if nest == "deep":
        value: list[Any] = []
        value.append(value)
    else:
        value = ["x"] * 100
        for _ in range(20):
            value = [value] * 100
    plain_ckpt(tmp_path / "old", callbacks=value)
    import_refused(tmp_path / "old", r"far more values than|nested too deeply")


@pytest.mark.parametrize("name", ["../outside", "{}", "sub/../../outside", "link", "C:\\outside", ""])
def test_paths_that_lead_outside(tmp_path: Path, name: str) -> None:
    folder, outside = tmp_path / "old", tmp_path / "outside"
    with changed_metadata(folder) as metadata:
        (data,) = folder.glob("*.distcp")
        data.rename(outside)
        (folder / "link").symlink_to(outside)
        for chunk in metadata.storage_data.values():
            chunk.relative_path = name.replace("{}", str(outside))
    is_link = name == "link"
    import_refused(folder, r"outside of the source(.|\n)*`cp -rL .* COPY`" if is_link else "outside of itself")


def test_a_file_that_this_user_may_not_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that follows links, which is the advice for a link, would not help."""
    folder = tmp_path / "old"
    with changed_metadata(folder):
        (data,) = folder.glob("*.distcp")
    stat = os.stat

    def refuse_data(path: Any, **options: Any) -> os.stat_result:
        if path == str(data):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse_data)
    message = refusal(CheckpointFormatError, lambda: import_checkpoint(folder, tmp_path / "new"))
    assert f"can't read {data}: PermissionError" in message
    assert "cp -rL" not in message


def test_an_index_that_leads_outside(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../outside.safetensors"}}')
    import_refused(folder, r"names a file '../outside.safetensors' outside of itself")


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
        (b"FloatStorage", b"QuuuuStorage", "a storage of unknown type 'QuuuuStorage'"),
        (b"_rebuild_tensor_v2", b"_rebuild_tensor_v9", r"torch\._utils\._rebuild_tensor_v9"),
    ],
    ids=["beyond", "other-file", "kind", "function"],
)
def test_tensors_that_are_not_there(tmp_path: Path, old: bytes, new: bytes, says: str) -> None:
    plain_ckpt(tmp_path / "old")
    rewritten(tmp_path / "old", lambda data: data.replace(old, new, 1))
    import_refused(tmp_path / "old", says, CheckpointError)


def test_archives_that_grow(tmp_path: Path) -> None:
    plain_ckpt(tmp_path / "old")
    rewritten(tmp_path / "old", lambda data: data, zipfile.ZIP_DEFLATED)
    import_refused(tmp_path / "old", r"compressed or encrypted")


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_comes_through(tmp_path: Path, value: Any) -> None:
    got = imported(tmp_path, data=value)["data"]
    assert (type(got), got, repr(got)) == (type(value), value, repr(value))


def test_tensors_and_arrays_come_through(tmp_path: Path) -> None:
    data = [torch.arange(3), numpy.arange(6.0).reshape(2, 3).T]
    for got, want in zip(imported(tmp_path, data=data)["data"], data, strict=True):
        assert type(got) is type(want)
        assert (got == want).all()


def test_attributes_of_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "lightning.fabric.utilities.data"
    attributes = type("AttributeDict", (dict,), {"__module__": module})
    for name in ("lightning", module):  # without importing it, which takes seconds
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[module], "AttributeDict", attributes, raising=False)
    nest = imported(tmp_path, hyper_parameters=attributes(lr=0.1, inner=attributes(a=1)))
    assert nest["hyper_parameters"] == {"lr": 0.1, "inner": {"a": 1}}


def test_what_is_not_plain_is_named_with_its_path(tmp_path: Path) -> None:
    parameters = {"lr": 0.1, "loss": nn.CrossEntropyLoss(), "act/fn": torch.relu, "deep": [{"kind": argparse.Action}]}
    plain_ckpt(tmp_path / "old", hyper_parameters=parameters)
    message = refusal(CheckpointValueError, lambda: import_checkpoint(tmp_path / "old", tmp_path / "new"))
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


# -- what is small and would become large ------------------------------------------------------------------------------


def without_end(*shape: int) -> torch.Tensor:
    """One element, again and again."""
    return torch.ones(1).expand(*shape)


def piece_without_end(folder: Path) -> None:
    """A checkpoint of torch's whose one tensor claims to be of 2**50 elements, as does the piece that it is in."""
    with changed_metadata(folder) as metadata:
        entry = metadata.state_dict_metadata["model.w"]
        entry.size = entry.chunks[0].sizes = torch.Size((2**50,))
        entry.chunks[0].offsets = torch.Size((0,))
        blob = io.BytesIO()
        torch.save(without_end(2**50), blob)
        ((index, place),) = metadata.storage_data.items()
        place.relative_path, place.offset, place.length = "bad.distcp", 0, blob.tell()
        metadata.storage_data = {type(index)(fqn="model.w", offset=torch.Size((0,))): place}
        (folder / "bad.distcp").write_bytes(blob.getvalue())


LARGE: dict[str, Callable[[Path], None]] = {
    "a model's": lambda path: torch.save({"model": {"w": without_end(2**50)}}, path),
    "in two dimensions": lambda path: torch.save({"model": {"w": torch.ones(9).expand(2**40, 9)}}, path),
    "over one another": lambda path: torch.save({"model": {"w": torch.ones(2**13).unfold(0, 2**12, 1)}}, path),
    "an optimizer's": lambda path: plain_ckpt(
        path, optimizer={"state": {0: {"m": without_end(2**25)}}, "param_groups": [{"params": [0]}]}
    ),
    "of plain data": lambda path: plain_ckpt(path, callbacks={"best": without_end(2**50)}),
    "many": lambda path: plain_ckpt(path, callbacks=[without_end(2**16 + i) for i in range(200)]),
    "a piece": piece_without_end,
}


@pytest.mark.parametrize("kind", LARGE)
def test_tensors_that_would_fill_the_disk(tmp_path: Path, kind: str) -> None:
    LARGE[kind](tmp_path / "old")
    with pytest.raises(CheckpointError, match=r"than 16 times their stored bytes|which is too few") as error:
        import_checkpoint(tmp_path / "old", tmp_path / "new")
    assert str(tmp_path / "old") in str(error.value)
    assert not (tmp_path / "new").exists()


def test_expanded_and_tied_tensors_are_still_imported(tmp_path: Path) -> None:
    block = torch.ones(2**17)
    torch.save(
        {"model": {"mask": without_end(1, 1, 512, 512), **{f"blocks.{i}.w": block for i in range(64)}}},
        tmp_path / "old",
    )
    import_checkpoint(tmp_path / "old", tmp_path / "new")
    weights = load_state_dict(tmp_path / "new")
    assert (weights["mask"].shape, len(weights)) == ((1, 1, 512, 512), 65)
    assert sum(file.stat().st_size for file in (tmp_path / "new").rglob("*") if file.is_file()) < 2**21


def test_the_same_bytes_under_many_names(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    dcp.save({"model": {f"w{i}": torch.ones(64, 64) for i in range(9)}}, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = min(metadata.storage_data.values(), key=lambda place: place.offset)
    os.truncate(folder / place.relative_path, place.length)
    metadata.storage_data = dict.fromkeys(metadata.storage_data, place)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    import_refused(folder, "the metadata lists more than these, so some for several names")


def times(code: bytes, count: int) -> bytes:
    """A list of what is made again and again."""
    return b"(" + code * count + b"l"


def doubled(times: int) -> bytes:
    """A tuple of a tuple that it holds twice, and so on."""
    return b")" + b"2\x86" * times


K = 2**10
#: Operations of a pickle by what they make.
GROWING: dict[str, bytes] = {
    "sets": times(b"\x8f", 40 * K),
    "dicts": times(b"}", 60 * K),
    "lists": times(b"]", 60 * K),
    "tuples": times(b")", 30 * K),
    "nested tuples": times(b")" + b"\x85" * 9, 4 * K),
    "the same tuple twice": doubled(60),
    "the same tuple as a key": b"}" + doubled(60) + b"Ns",
    "the same tuple in a set": b"\x8f(" + doubled(60) + b"\x90",
    "a reference to what is large": doubled(60) + b"Q",
    "the same text": b"(X\x00\x40\x00\x00" + b"a" * 2**14 + b"q\x77" + b"h\x77" * 400 + b"l",
    "the memo": b"N" + b"\x94" * 70 * K,
    "huge places in the memo": b"N" + b"".join(b"r" + (i * 7919 % 2**32).to_bytes(4, "little") for i in range(50 * K)),
    "long integers": times(b"\x8b\x00\x04\x00\x00" + b"\x7f" * 1024, 2 * K),
    "marks": b"(" * 70 * K + b"1" * 70 * K + b"N",
    "frames": b"N" + b"\x95\xff\xff\xff\xff\xff\xff\xff\x00" * K,
    "objects": b"ccollections\nOrderedDict\nq\x770" + times(b"h\x77)R", 20 * K),
    "names": times(b"ca\nb\n", 20 * K),
    "wide characters": b"X" + (3 * K**2).to_bytes(4, "little") + b"\xf0\x9f\x98\x80" + b"a" * (3 * K**2 - 4),
    "bytes": times(b"C\x01a", 20 * K),
}
HARMLESS = {"frames"}  # of which nothing is made


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], contextlib.AbstractContextManager[None]]:
    """Imports that may take 4 times their source and 8 MiB instead of 64, and must keep to it."""
    monkeypatch.setattr(memory_budget, "_SPARE_BYTES", 8 * K**2)

    @contextlib.contextmanager
    def limited(source: Path) -> Iterator[None]:
        tracemalloc.start()
        try:
            yield
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 4 * source.stat().st_size + 8 * K**2

    return limited


@pytest.mark.parametrize("what", GROWING)
def test_pickles_that_would_fill_the_memory(tmp_path: Path, what: str, little_memory: Any) -> None:
    source = tmp_path / "old"
    plain_ckpt(source, callbacks=1234)
    rewritten(source, lambda data: data.replace(b"M\xd2\x04", GROWING[what], 1))  # in the place of 1234
    with little_memory(source):
        told = ""
        try:
            import_checkpoint(source, tmp_path / "new")
        except CheckpointFormatError as error:
            told = str(error)
    assert ("of memory, 4 times its size" in told or "outside of its pickle" in told) == (what not in HARMLESS), told
    assert str(source) in told or not told


def test_a_zip_of_nothing_but_names(tmp_path: Path, little_memory: Any) -> None:
    plain_ckpt(tmp_path / "old")
    with zipfile.ZipFile(tmp_path / "old", "a") as archive:
        for number in range(20_000):
            archive.filelist.append(zipfile.ZipInfo(f"{number:x}"))
            archive.filelist[-1].header_offset = archive.filelist[-1].CRC = 0
        archive._didModify = True  # type: ignore[attr-defined]
    with (
        little_memory(tmp_path / "old"),
        pytest.raises(CheckpointFormatError, match="far more values than it has bytes"),
    ):
        import_checkpoint(tmp_path / "old", tmp_path / "new")


def test_thousands_of_small_tensors_are_imported(tmp_path: Path) -> None:
    """What is charged for a tensor is not so much that small models would be refused."""
    more = {f"w{i}": torch.zeros(1) for i in range(1000)}
    assert imported(tmp_path, more=more, text="a" * 2**22, data=bytes(2**22))["data"] == bytes(2**22)
    assert len(load_state_dict(tmp_path / "new", key="more")) == 1000


def test_integers_without_end(tmp_path: Path) -> None:
    for i, value in enumerate((2**80_000, {2**80_000: 1}, [(1, (2**80_000,))])):
        plain_ckpt(tmp_path / f"{i}.pt", data=value)
        import_refused(tmp_path / f"{i}.pt", rf"{i}\.pt can't be read .* an integer of more than 4300 digits")
    assert imported(tmp_path, data=-(10**4300) + 1)["data"] == -(10**4300) + 1


def test_ranks_without_end(tmp_path: Path) -> None:
    metadata = {"rank": 0, "world_size": 2**60, "shard_info": {}, "flatten_info": {}}
    (tmp_path / "old").mkdir()
    torch.save({"model": {"_fsdp_shard_0": torch.ones(1)}, "shard_metadata": metadata}, tmp_path / "old" / "a.pth")
    import_refused(tmp_path / "old", f"old lacks the shards of rank 1, 2, .*, 20 of {2**60}")


def test_a_header_as_large_as_the_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with (tmp_path / "old" / "model.safetensors").open("wb") as file:
        file.write((2**36 - 8).to_bytes(8, "little") + b"{")
        file.truncate(2**36)  # a file of holes
    import_refused(tmp_path / "old", "a header of 68719476728 bytes does not fit")


# -- where it goes, and what is said -----------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["old/new", "old", "old/../old/a/b", "."])
def test_nothing_is_written_into_the_source(tmp_path: Path, out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved_by_torch(tmp_path / "old")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointExistsError, match=r"choose (another path|a path outside of it)"):
        import_checkpoint("old", out, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def hole(folder: Path) -> None:
    """A tensor of torch's checkpoint that is larger than what is there of it."""
    with changed_metadata(folder) as metadata:
        metadata.state_dict_metadata["model.w"].size = torch.Size((9, 2))


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


WRONG: dict[str, Callable[[Path], object]] = {
    "deep": lambda path: plain_ckpt(path, data=nested(400)),
    "a name twice": lambda path: torch.save({"w": torch.ones(2), "_orig_mod.w": torch.ones(2)}, path),
    "another optimizer": lambda path: plain_ckpt(
        path, optimizer={"state": {0: {"m": torch.ones(7)}}, "param_groups": [{"params": [0]}]}
    ),
    "no optimizer": lambda path: torch.save(
        {"state_dict": {"w": torch.ones(2)}, "optimizer_states": [3], "pytorch-lightning_version": "2.6.6"}, path
    ),
    "no model": lambda path: torch.save({"a": 1}, path),
    "a hole": hole,
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_name_the_source(tmp_path: Path, what: str) -> None:
    WRONG[what](tmp_path / "old")
    import_refused(tmp_path / "old", re.escape(str(tmp_path / "old")), CheckpointError)


def changed(data: bytes, draw: random.Random) -> bytes:
    """A pickle with a few bytes that are others, or taken from elsewhere in it."""
    content = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        at, length = draw.randrange(len(content)), draw.randrange(1, 9)
        start = draw.randrange(len(content))
        new = content[start : start + length] if draw.random() < 0.5 else bytes([draw.randrange(256)])
        content[at : at + (0 if draw.random() < 0.2 else len(new))] = new
    return bytes(content)


def test_whatever_is_changed_ends_in_one_of_our_errors(tmp_path: Path) -> None:
    """Whatever is changed in a file's or a folder's pickle: it is imported, or one of our errors says what is wrong."""
    state = {"model": {"w": torch.ones(2, 2), "b": torch.ones(2)}, "list": [1, {"a": (None, 2.5)}], "epoch": 3}
    torch.save({**state, "pytorch-lightning_version": "2.6.6", "state_dict": state["model"]}, tmp_path / "ckpt")
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata, refused = (tmp_path / "dcp" / ".metadata").read_bytes(), list[tuple[int, bool, str]]()
    for seed in range(120):
        draw, source = random.Random(seed), tmp_path / f"old-{seed}"
        if seed % 2:
            source.write_bytes((tmp_path / "ckpt").read_bytes())
            rewritten(source, lambda data, draw=draw: changed(data, draw))  # type: ignore[misc]
        else:
            source = tmp_path / "dcp"
            (source / ".metadata").write_bytes(changed(metadata, draw))
        try:
            import_checkpoint(source, tmp_path / f"new-{seed}")
        except CheckpointError as error:
            refused.append((seed, str(source) in str(error), str(error)))
    assert len(refused) > 40
    assert [told for told in refused if not told[1]] == []
