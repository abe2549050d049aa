"""The format as docs/checkpoint-format.md writes it down: its schema, tables and example, and a reader made from it."""

from __future__ import annotations

import argparse
import ast
import base64
import copy
import dataclasses
import json
import re
import shutil
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from torch import Tensor

import format_reader
from checkpoint_ranks import on_threads
from damaged_folders import save_alone
from format_reader import Checkpoint, canonical, checksum
from fsdp_core.checkpoint import (
    Chunk,
    ChunkedTensor,
    Manifest,
    SavedTensor,
    chunked,
    load,
    load_state_dict,
    read_manifest,
    verify,
)
from fsdp_core.checkpoint.format import plain_data
from fsdp_core.checkpoint.format.file_names import is_ours
from fsdp_core.checkpoint.format.places import group_places
from fsdp_core.checkpoint.storage.recognition import is_checkpoint
from fsdp_core.checkpoint.storage.writers import new_writer
from fsdp_core.errors import CheckpointFormatError, CheckpointValueError
from fsdp_core.runtime import Runtime
from fsdp_core.state.digests import digest_of
from fsdp_core.state.dtype_names import ITEM_BYTES, STORED_NAMES
from fsdp_core.state.dtypes import DTYPES
from fsdp_core.state.layout import FlatRange, Part
from fsdp_core.state.left_out import LeftOut

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "checkpoint-format.md").read_text(encoding="utf-8")
SCHEMA = json.loads((DOCS / "checkpoint-manifest.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def tied(_: Runtime) -> dict[str, Any]:
    return {"model": {"wte.weight": torch.arange(12.0).reshape(4, 3), "norm.bias": torch.ones(3)}, "epoch": 1}


def trained(_: Runtime) -> dict[str, Any]:
    weights = OrderedDict(w=torch.randn(4, 3), frozen=torch.randn(2), scale=torch.tensor(0.5))
    values = {"w": {"step": torch.tensor(3.0), "exp_avg": torch.randn(4, 3)}, "scale": {"exp_avg": torch.tensor(1.0)}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["w", "scale"]}, {"lr": torch.tensor(1e-3), "params": []}]
    return {"model": weights, "optimizer": [{"state": values, "param_groups": groups}], "best": torch.tensor([1.0])}


def every_dtype(_: Runtime) -> dict[str, Any]:
    data = torch.arange(16).reshape(4, 4)
    tensors: dict[str, Tensor] = {name: data.to(dtype) for name, dtype in DTYPES.items()}
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    return {"model": tensors, "small": {"bf16": special.bfloat16(), "fp32": special, "scalar": torch.tensor(7)}}


def odd_shapes(_: Runtime) -> dict[str, Any]:
    shapes = [(), (0,), (0, 3), (2, 0, 4), (1,), (1, 1, 1, 1, 1, 1)]
    return {"model": {f"shape{shape}": torch.ones(shape) for shape in shapes}}


# Some are in another order as UTF-16 units than as characters; others mean something elsewhere.
ODD_NAMES = [
    "\r", "1", "\x80", "ö", "€", "😂", "דּ", "a/b", "a%2Fb", "100%", "w@0", "w", '"', "\\", "\x7f", "\u2028", "", "/",
    "..", "../../x", "$saved", "$tensor", "__metadata__", "a b", "ключ", "\n", "\x00", "~", "@0,0", "w@0,0",
    "__class__", "manifest.json", "state", "param_groups", "%", "a.b", "C:\\x",
]  # fmt: skip


def odd_names(_: Runtime) -> dict[str, Any]:
    model = {name: torch.tensor([float(index)]) for index, name in enumerate(ODD_NAMES)}
    moments = {name: {"exp_avg": value + 50} for name, value in model.items()}
    optimizer = {"state": moments, "param_groups": [{"params": list(model)}]}
    tensors = {name: value + 100 for name, value in model.items()}
    return {"model": model, "optimizer": [optimizer], **tensors, "x/y": {"€": [1]}}


def no_tensors(_: Runtime) -> dict[str, Any]:
    return {"epoch": 3, "name": "x"}


def nothing(_: Runtime) -> dict[str, Any]:
    return {}


def flat_ranges(runtime: Runtime) -> dict[str, Any]:
    """A rank's part of parameters that were flattened and cut without regard to rows; the first rank has the least."""
    whole = {"cube": torch.arange(105.0).reshape(3, 5, 7), "w@0": torch.arange(9.0), "w": torch.arange(9.0) * 2}
    parts: dict[str, Any] = {"scale": torch.tensor(2.0)}
    for name, tensor in whole.items():
        start, end = (tensor.numel() * rank**2 // runtime.world_size**2 for rank in (runtime.rank, runtime.rank + 1))
        run = FlatRange(offset=0, start=start, length=end - start)
        part = Part(name=name, shape=tuple(tensor.shape), range=run)
        parts[name] = part.of(tensor.reshape(-1)[start:end].clone())
    rest = (
        parts["cube"]
        if runtime.rank
        else ChunkedTensor(shape=(3, 5, 7), dtype=torch.float32, chunks=parts["cube"].chunks)
    )
    return {"model": parts, "elsewhere": [rest]}


def every_tag(runtime: Runtime) -> dict[str, Any]:
    counts: defaultdict[str, int] = defaultdict(int)
    counts["a"] = 1
    return {
        "json": [None, True, False, 0, -3, 2**80, 0.1, 1.0, -0.0, 1e300, 5e-324, "€😂\ud800", ""],
        "tuple": (1, (2.5,)),
        "sets": [{1, "a"}, frozenset({(1, 2)})],
        "dicts": {1: "int", (1, 2): "tuple", None: 0, "$x": 1},
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "counter": Counter("abracadabra"),
        "defaultdicts": [counts, defaultdict(None, {1: 2})],
        "namespace": argparse.Namespace(lr=0.1, layers=(1, 2)),
        "floats": [float("nan"), float("inf"), -float("inf")],
        "complex": [1.5 - 2j, complex(float("inf"), -0.0)],
        "bytes": bytes(range(256)),
        "path": PurePosixPath("/data/x"),
        "times": [timedelta(days=-1, seconds=3, microseconds=7), datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)],
        "dates": [datetime(2026, 1, 2, 3, 4), date(2026, 1, 2), time(3, 4, 5)],
        "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])],
        "numpy": [np.float32(0.1), np.int64(-1), np.bool_(True), np.complex64(1 + 2j), np.arange(6.0).reshape(2, 3)],
        "tensor": torch.arange(3),
        "sharded": ChunkedTensor(
            shape=(3,), dtype=torch.int64, chunks=(Chunk(offsets=(0,), data=torch.arange(3)),), replica=runtime.rank
        ),
    }  # fmt: skip


def left_out(_: Runtime) -> dict[str, Any]:
    base = torch.arange(6.0).reshape(2, 3)
    absent = LeftOut(shape=(2, 3), dtype=base.dtype, digest=digest_of(base))
    return {"model": {"wte.weight": absent, "lora.weight": torch.ones(2)}}


STATES: dict[str, tuple[Callable[[Runtime], dict[str, Any]], int]] = {
    **{make.__name__: (make, 1) for make in (tied, trained, every_dtype, odd_shapes, odd_names, no_tensors, nothing)},
    "left_out": (left_out, 2),
    "flat_ranges": (flat_ranges, 3),
    "every_tag": (every_tag, 2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, (make, ranks) in STATES.items():
        path = tmp_path_factory.mktemp("format") / name
        aliases = {"model/lm_head.weight": "model/wte.weight"} if make in (tied, left_out) else {}

        def work(runtime: Runtime, path: Path = path, make: Any = make, aliases: Any = aliases) -> None:
            save_alone(path, make(runtime), runtime=runtime, aliases=aliases, versions={"x": "1"})

        assert on_threads(ranks, work) == [None] * ranks
        found[name] = path
    return found


def content_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return content


# --- What saves write fits the schema -------------------------------------------------------------------------------


def test_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", STATES)
def test_manifests_fit_the_schema(folders: dict[str, Path], name: str) -> None:
    VALIDATOR.validate(content_of(folders[name]))


def test_unknown_members_are_ignored_but_part_of_the_checksum(folders: dict[str, Path], tmp_path: Path) -> None:
    def add(content: dict[str, Any]) -> None:
        content["x-note"] = {"by": ["somebody", 1, True, None, {}]}
        content["tensors"]["model/wte.weight"]["x-note"] = "€"
        content["tensors"]["model/wte.weight"]["chunks"][0]["x-note"] = 1
        next(iter(content["files"].values()))["x-note"] = []

    folder = changed(folders["tied"], tmp_path, add)
    VALIDATOR.validate(content_of(folder))
    assert same(load(folder), Checkpoint(folder).state)
    text = (folder / "manifest.json").read_text().replace("somebody", "somebodY")
    (folder / "manifest.json").write_text(text)
    assert refused(folder) == [True, True]


# --- A reader made from the page reads what we read -----------------------------------------------------------------


def test_the_reader_imports_nothing_of_ours() -> None:
    tree = ast.parse(Path(str(format_reader.__file__)).read_text())
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
             for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]  # fmt: skip
    assert {str(name).split(".")[0] for name in names} == {
        "__future__", "base64", "collections", "itertools", "json", "math", "numpy", "pathlib", "re", "struct",
        "typing", "xxhash",
    }  # fmt: skip


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor as the independent reader gives it."""
    if tensor.dtype == torch.bfloat16:
        return tensor.float().numpy()  # type: ignore[no-any-return]
    return (tensor.view(torch.uint8) if "float8" in str(tensor.dtype) else tensor).numpy()  # type: ignore[no-any-return]


def same(ours: Any, theirs: Any) -> bool:
    """Whether two nests are equal, to the bit and to the type, but for what the other reader leaves as text."""
    if isinstance(ours, SavedTensor) and ours.digest is not None:
        facts = {"shape": list(ours.shape), "dtype": str(ours.dtype)[6:], "digest": ours.digest}
        return bool(theirs == ("$left out", facts))
    if isinstance(ours, (SavedTensor, Tensor, np.ndarray)):
        array = (
            ours if isinstance(ours, np.ndarray) else as_array(ours.full() if isinstance(ours, SavedTensor) else ours)
        )
        there = (theirs.shape, theirs.dtype, theirs.tobytes()) if hasattr(theirs, "tobytes") else None
        return (array.shape, array.dtype, array.tobytes()) == there
    if isinstance(ours, argparse.Namespace):
        return same(vars(ours), theirs)
    if isinstance(ours, dict):
        keys = list(ours) == list(theirs) and type(ours) is type(theirs)
        factories = getattr(ours, "default_factory", None) is getattr(theirs, "default_factory", None)
        return keys and factories and all(same(item, theirs[key]) for key, item in ours.items())
    texts: list[tuple[type, str, Callable[[Any], Any]]] = [
        (Path, "$path", str), (torch.dtype, "$dtype", lambda value: str(value)[6:]), (torch.device, "$device", str),
        (datetime, "$datetime", datetime.isoformat), (date, "$date", date.isoformat), (time, "$time", time.isoformat),
        (timedelta, "$timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
        (torch.Size, "$size", list),
    ]  # fmt: skip
    for kind, tag, text in texts:
        if isinstance(ours, kind):
            return bool(theirs == (tag, text(ours)))
    if isinstance(ours, (list, tuple)):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and (ours == theirs or ours != ours) and str(ours) == str(theirs)


@pytest.mark.parametrize("name", DTYPES)
def test_digests_are_those_that_the_page_describes(name: str) -> None:
    values = torch.linspace(-3, 90, 3 * 70).reshape(3, 2, 5, 7)
    tensor = (values > 0) if name == "bool" else values.to(DTYPES[name])
    raw = tensor.view(torch.int16) if name == "bfloat16" else tensor.view(torch.uint8) if "float8" in name else tensor
    assert digest_of(tensor) == format_reader.digest(raw.numpy())
    assert digest_of(tensor[0, 0, 0, 0]) == format_reader.digest(np.array(raw.numpy()[0, 0, 0, 0]))
    long = torch.arange(2**16 + 5, dtype=torch.int16)
    assert digest_of(long) == format_reader.digest(long.numpy())


def test_places_fit_the_schema(folders: dict[str, Path]) -> None:
    manifest = read_manifest(next(iter(folders.values())))
    places = group_places([("a", "/x")] * manifest.world_size)
    text = dataclasses.replace(manifest, places=places).to_json()
    VALIDATOR.validate(json.loads(text))
    assert Manifest.from_json(text).places == places


@pytest.mark.parametrize("name", STATES)
def test_the_independent_reader_reads_the_same(folders: dict[str, Path], name: str) -> None:
    folder = folders[name]
    verify(folder)
    theirs = Checkpoint(folder)
    nest = load(folder)
    assert same(nest, theirs.state)
    for key in theirs.manifest["tensors"]:
        whole = theirs.tensor(key)
        assert all(np.array_equal(theirs.element(key, i), whole[i], equal_nan=True) for i in theirs.indices(key))
    if "model" in nest and name != "left_out":  # which is not complete without its base
        weights = load_state_dict(folder)
        assert {f"model/{escaped(fqn)}" for fqn in weights} == {
            key for key in (*theirs.manifest["tensors"], *theirs.manifest["aliases"]) if key.startswith("model/")
        }
        assert all(same(weight, theirs.tensor(f"model/{escaped(fqn)}")) for fqn, weight in weights.items())


def escaped(key: str) -> str:
    return key.replace("%", "%25").replace("/", "%2F")


def test_the_comparison_sees_differences(folders: dict[str, Path]) -> None:
    theirs = Checkpoint(folders["every_tag"]).state
    for part in theirs:
        other = copy.deepcopy(theirs)
        other[part] = "something else"
        assert not same(load(folders["every_tag"]), other)
    assert not same(torch.zeros(1), np.array([-0.0], dtype=np.float32))
    assert not same([1], [1.0])


LONG = np.longdouble(1)
LONG_DOUBLES = [
    ({"x": LONG}, f"Python has no number for numpy's {LONG.dtype}; convert it"),
    ({"x": np.array([LONG])}, f"torch has no dtype for a numpy array of {LONG.dtype}; convert it"),
] * (LONG.dtype.itemsize > 8)  # on some platforms it is a double


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"__metadata__": chunked(torch.ones(2))}, "safetensors reserves this name; rename the tensor"),
        ({"\ud800": torch.ones(2)}, "a tensor's name must be encodable in UTF-8; rename it"),
        ({"model": {"\ud800": torch.ones(2)}}, "a tensor's name must be encodable in UTF-8; rename it"),
        *LONG_DOUBLES,
    ],
)
def test_names_and_numbers_outside_of_the_format_are_refused(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointValueError, match=message):
        save_alone(tmp_path / "c", state)
    assert not list(tmp_path.iterdir())


# --- What doesn't fit is refused by the schema, by us and by the independent reader -----------------------------------


def rewrite(folder: Path, content: dict[str, Any]) -> None:
    content.pop("checksum", None)
    content["checksum"] = checksum(canonical(content).encode())
    (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")


def changed(source: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a checkpoint whose manifest was changed by somebody who knows the format."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    content = content_of(target)
    change(content)
    rewrite(target, content)
    return target


def refused(folder: Path) -> list[bool]:
    """Whether we, and whether the independent reader, refuse a folder in the way of each."""
    outcomes = []
    for read, errors in ((load, (CheckpointFormatError,)), (Checkpoint, (ValueError, KeyError, TypeError))):
        try:
            read(folder)
            outcomes.append(False)
        except errors:
            outcomes.append(True)
    return outcomes


def weight(content: dict[str, Any]) -> Any:
    return content["tensors"]["model/wte.weight"]


def chunk(content: dict[str, Any]) -> Any:
    return weight(content)["chunks"][0]


def file(content: dict[str, Any]) -> Any:
    return next(iter(content["files"].values()))


def named(name: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["files"][name] = {"size": 1, "checksum": "xxh3:" + "0" * 16}

    return change


ABSENT = {"shape": [2], "dtype": "float32", "digest": "sum64:0123456789abcdef"}


def base_but_for(change: dict[str, Any]) -> dict[str, Any]:
    """A base with one member changed, or taken out."""
    base = {"source": None, "tensors": {"model/absent": ABSENT}, **change}
    return {name: value for name, value in base.items() if value is not ...}


BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"without_{field}": (lambda c, field=field: c.pop(field)) for field in SCHEMA["required"][:-1]},
    **{f"shape_{text}": (lambda c, value=value: weight(c).update(shape=value))
       for text, value in {"text": "43", "object": {}, "negative": [-4, 3], "true": [True, 3], "large": [2**53, 3],
                           "65": [1] * 65, "null": None}.items()},
    **{f"name_{index}": named(name) for index, name in enumerate(
        ["../x", "/x", "x/", "x//y", "./x", "x/..", "..", ".", "", "x\\y", "C:x", "x\ny", "x\n", "manifest.json",
         "model/../../x", "file:///x", "x\x00"])},
    "other_format": lambda c: c.update(format="other"),
    "version_3_without_base": lambda c: c.update(format_version=3),
    "version_4": lambda c: c.update(format_version=4),
    **{f"base_{name}": (lambda c, change=change: c.update(format_version=3, base=base_but_for(change)))
       for name, change in {"without_source": {"source": ...}, "of_no_type": {"source": {"type": "x", "name": "y"}},
                            "without_name": {"source": {"type": "hub", "name": ""}}, "empty": {"tensors": {}},
                            "of_no_digest": {"tensors": {"model/x": {**ABSENT, "digest": "xxh3:0123456789abcdef"}}},
                            "of_no_dtype": {"tensors": {"model/x": {**ABSENT, "dtype": "float31"}}}}.items()},
    "version_true": lambda c: c.update(format_version=True),
    "version_text": lambda c: c.update(format_version="1"),
    "save_id_short": lambda c: c.update(save_id="0123456789a"),
    "save_id_upper": lambda c: c.update(save_id="0123456789AB"),
    "save_id_line": lambda c: c.update(save_id="0123456789ab\n"),
    "created_number": lambda c: c.update(created=20261121),
    "strategy_null": lambda c: c.update(strategy=None),
    "versions_number": lambda c: c.update(versions={"torch": 2}),
    "versions_list": lambda c: c.update(versions=["torch"]),
    "world_size_0": lambda c: c.update(world_size=0),
    "world_size_text": lambda c: c.update(world_size="2"),
    "kind_unknown": lambda c: c.update(kinds={"model": "code"}),
    "state_text": lambda c: c.update(state="state.json"),
    "state_without_json": lambda c: c["state"].pop("json"),
    "state_without_tensors": lambda c: c["state"].pop("tensors"),
    "state_json_null": lambda c: c["state"].update(json=None),
    "state_leaves": lambda c: c["state"].update(json="../state.json"),
    "tensors_list": lambda c: c.update(tensors=[]),
    "tensor_without_shape": lambda c: weight(c).pop("shape"),
    "tensor_without_dtype": lambda c: weight(c).pop("dtype"),
    "tensor_without_chunks": lambda c: weight(c).pop("chunks"),
    "dtype_unknown": lambda c: weight(c).update(dtype="object"),
    "dtype_of_a_header": lambda c: weight(c).update(dtype="F32"),
    "chunks_object": lambda c: weight(c).update(chunks={}),
    "chunk_without_file": lambda c: chunk(c).pop("file"),
    "chunk_without_key": lambda c: chunk(c).pop("key"),
    "chunk_without_offsets": lambda c: chunk(c).pop("offsets"),
    "chunk_without_lengths": lambda c: chunk(c).pop("lengths"),
    "chunk_file_number": lambda c: chunk(c).update(file=1),
    "chunk_key_number": lambda c: chunk(c).update(key=1),
    "chunk_offsets_negative": lambda c: chunk(c).update(offsets=[-1, 0]),
    "chunk_lengths_zero": lambda c: chunk(c).update(lengths=[0, 3]),
    "aliases_list": lambda c: c.update(aliases=["model/x"]),
    "alias_number": lambda c: c.update(aliases={"model/x": 1}),
    "files_list": lambda c: c.update(files=[]),
    "file_without_size": lambda c: file(c).pop("size"),
    "file_without_checksum": lambda c: file(c).pop("checksum"),
    "file_size_negative": lambda c: file(c).update(size=-1),
    "file_size_large": lambda c: file(c).update(size=2**53),
    "file_checksum_upper": lambda c: file(c).update(checksum="xxh3:" + "A" * 16),
    "file_checksum_other": lambda c: file(c).update(checksum="sha256:" + "0" * 64),
    "file_checksum_line": lambda c: file(c).update(checksum=file(c)["checksum"] + "\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_readers_refuse_what_the_schema_refuses(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    folder = changed(folders["tied"], tmp_path, BROKEN[name])
    assert not VALIDATOR.is_valid(content_of(folder))
    assert refused(folder) == [True, True]


BEYOND_THE_SCHEMA: dict[str, Callable[[dict[str, Any]], object]] = {
    "hole": lambda c: chunk(c).update(lengths=[3, 3]),
    "overlap": lambda c: weight(c)["chunks"].append(chunk(c)),
    "right_sum": lambda c: weight(c).update(chunks=[{**chunk(c), "lengths": [2, 3]}] * 2),
    "outside": lambda c: chunk(c).update(offsets=[1, 0]),
    "other_dimensions": lambda c: chunk(c).update(offsets=[0], lengths=[4]),
    "no_chunks": lambda c: weight(c).update(chunks=[]),
    "product_too_large": lambda c: weight(c).update(shape=[2**30, 2**30]),
    "chunk_in_no_file": lambda c: chunk(c).update(file="model/x"),
    "state_in_no_file": lambda c: c["state"].update(json="x.json"),
    "state_tensors_in_no_file": lambda c: c["state"].update(tensors="x.safetensors"),
    "no_such_file": lambda c: named("model/x")(c),
    "alias_of_nothing": lambda c: c.update(aliases={"model/lm_head.weight": "model/x"}),
    "alias_of_an_alias": lambda c: c["aliases"].update({"model/x": "model/lm_head.weight"}),
    "another_dtype": lambda c: weight(c).update(dtype="int32"),
    "another_key": lambda c: chunk(c).update(key="model/norm.bias"),
    "another_size": lambda c: file(c).update(size=file(c)["size"] + 1),
    "another_checksum": lambda c: file(c).update(checksum="xxh3:" + "0" * 16),
    "format_not_first": lambda c: c.update(format=c.pop("format")),
    "left_out_and_there": lambda c: c.update(
        format_version=3, base=base_but_for({"tensors": {"model/wte.weight": ABSENT}})
    ),
}


@pytest.mark.parametrize("name", BEYOND_THE_SCHEMA)
def test_readers_refuse_more_than_the_schema(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    folder = changed(folders["tied"], tmp_path, BEYOND_THE_SCHEMA[name])
    assert VALIDATOR.is_valid(content_of(folder))
    assert refused(folder) == [True, True]


#: A manifest that parsers might take for something else.
AMBIGUOUS: dict[str, Callable[[str], str | bytes]] = {
    "fraction": lambda text: text.replace('"world_size": 1', '"world_size": 1.0'),
    "exponent": lambda text: text.replace('"world_size": 1', '"world_size": 1e0'),
    "nan": lambda text: text.replace('"world_size": 1', '"world_size": NaN'),
    "unknown_fraction": lambda text: text.replace('"world_size": 1', '"world_size": 1, "x": 0.5'),
    "twice": lambda text: text.replace('"world_size": 1', '"world_size": 1, "world_size": 1'),
    "surrogate": lambda text: text.replace('"strategy": "test"', '"strategy": "\\ud800"'),
    "bom": lambda text: "\ufeff" + text,
    "utf_16": lambda text: text.encode("utf-16"),
    "cut": lambda text: text[:-3],
    "more": lambda text: text + "{}",
    "edit": lambda text: text.replace('"size": ', '"size":  1'),
    "huge_integer": lambda text: text.replace('"world_size": 1', '"world_size": 1' + "0" * 5000),
    "empty": lambda text: "",
    "list": lambda text: "[]",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_json_is_refused(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    folder = changed(folders["tied"], tmp_path, lambda content: None)
    text = (folder / "manifest.json").read_text()
    other = AMBIGUOUS[name](text)
    assert other != text
    (folder / "manifest.json").write_bytes(other if isinstance(other, bytes) else other.encode())
    assert refused(folder) == [True, True]


@pytest.mark.parametrize("depth", [600, 900, 20_000])
def test_a_manifest_that_is_nested_too_deeply_is_refused(folders: dict[str, Path], tmp_path: Path, depth: int) -> None:
    folder = changed(folders["tied"], tmp_path, lambda content: None)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[:-1] + ', "x": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(CheckpointFormatError):
        load(folder)


def test_a_manifest_laid_out_otherwise_is_the_same(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("tied", "odd_names"):
        folder = changed(folders[name], tmp_path / name, lambda content: None)
        before = read_manifest(folder)
        for options in ({"indent": 4}, {"separators": (",", ":")}, {"ensure_ascii": False}):
            content = content_of(folder)
            ordered = {"format": content.pop("format"), **dict(sorted(content.items(), reverse=True))}
            (folder / "manifest.json").write_text(json.dumps(ordered, **options), encoding="utf-8")  # type: ignore[arg-type]
            assert is_checkpoint(folder)
            assert read_manifest(folder) == before
            assert same(load(folder), Checkpoint(folder).state)


@pytest.mark.parametrize(
    "plain",
    [
        '{"x": {"$import": "os"}}',
        '{"x": {"$tuple": [], "y": 1}}',
        '{"x": {"y": 1, "$tuple": []}}',
        '{"x": {"$saved": "model/x"}}',
        '{"x": {"$tensor": "x"}}',
        '{"x": {"$saved": ["a"]}}',
        '{"x": {"$tensor": {"$dict": []}}}',
        '{"x": {"$tuple": 1}}',
        '{"x": {"$bytes": "?"}}',
        '{"$tuple": []}',
        "[]",
        "null",
        "",
    ],
)
def test_meaningless_plain_data_is_refused(folders: dict[str, Path], tmp_path: Path, plain: str) -> None:
    folder = changed(folders["tied"], tmp_path, lambda content: None)
    content = content_of(folder)
    name = content["state"]["json"]
    (folder / name).write_text(plain)
    content["files"][name] = {"size": len(plain), "checksum": checksum(plain.encode())}
    rewrite(folder, content)
    assert refused(folder) == [True, True]


# --- The page says what is so ---------------------------------------------------------------------------------------


def section(title: str) -> str:
    found = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def first_cells(text: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def test_table_of_tags_is_complete() -> None:
    written = first_cells(section("Plain data"))
    assert len(set(written)) == len(written)
    assert set(written) == {*plain_data._READERS, "$saved", "$tensor"}


def test_every_tag_of_the_table_is_saved_and_read(folders: dict[str, Path]) -> None:
    text = "".join(path.read_text() for folder in folders.values() for path in folder.glob("state-*.json"))
    assert set(re.findall(r'\{"(\$\w+)":', text)) - {"$x"} == set(first_cells(section("Plain data")))


def test_table_of_dtypes_is_complete() -> None:
    cells = re.findall(r"\| `(\w+)` \| `(\w+)`[^|]*\| (\d) ", section("Tensor files"))
    assert {(name, stored, int(size)) for name, stored, size in cells} == {
        (name, stored, ITEM_BYTES[name]) for name, stored in STORED_NAMES.items()
    }
    assert SCHEMA["$defs"]["tensor"]["properties"]["dtype"]["enum"] == list(STORED_NAMES)


def test_the_tables_of_fields_are_those_of_the_schema() -> None:
    assert first_cells(section("The manifest")) == SCHEMA["required"]
    assert [name for name in SCHEMA["properties"] if name not in ("places", "base")] == SCHEMA["required"]
    definitions = SCHEMA["$defs"]
    tensors = first_cells(section("Tensors and chunks"))
    assert tensors == definitions["tensor"]["required"] + definitions["chunk"]["required"]
    assert first_cells(section("Files")) == definitions["file"]["required"]


def test_the_names_that_may_be_removed() -> None:
    block = re.search(r"```text\n(manifest\.json  .*?)```", section("Writing"), re.DOTALL)
    assert block is not None
    writer = new_writer("0123456789ab").mark.removeprefix(".writer-")
    for name in block[1].split():
        written = name.replace("SAVE", "0123456789ab").replace("-N.", "-00012.").replace("WRITER", writer)
        assert is_ours(written), name
        if "SAVE" in name:
            assert not is_ours(name.replace("SAVE", "x"))


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The folder that the page shows."""
    files = re.findall(r"^\*\*`([^`]+)`\*\* \((\d+) bytes\)\n\n```(\w+)\n(.*?)```", section("An example"), re.M | re.S)
    assert len(files) == 7
    for name, size, language, text in files:
        path = tmp_path / "example.ckpt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = text.encode() if language == "json" else base64.b64decode(text)
        assert len(data) == int(size), name
        path.write_bytes(data)
    return tmp_path / "example.ckpt"


def test_the_example_is_a_checkpoint(example: Path) -> None:
    VALIDATOR.validate(content_of(example))
    verify(example)
    nest = load(example)
    assert same(nest, Checkpoint(example).state)
    weights = load_state_dict(example)
    assert weights["wte.weight"].equal(torch.tensor([[1.0, 2], [3, 4], [5, 6]]))
    assert weights["lm_head.weight"] is weights["wte.weight"]
    assert weights["norm.bias"].equal(torch.tensor([0.5, -0.5, 2], dtype=torch.bfloat16))
    assert weights["scale"].equal(torch.tensor(1.5))
    momentum = nest["optimizer"][0]["state"]["wte.weight"]["momentum_buffer"].full()
    assert momentum.equal(weights["wte.weight"] * 0.1)
    assert nest["best"].equal(torch.tensor([7]))
    assert (nest["epoch"], nest["betas"]) == (3, (0.9, 0.95))
    assert nest["optimizer"][0]["param_groups"] == [{"lr": 0.1, "params": ["wte.weight"]}]
    there = {str(path.relative_to(example)) for path in example.rglob("*") if path.is_file()}
    assert there == {*read_manifest(example).files, "manifest.json"}


def test_the_canonical_form_of_the_example(example: Path) -> None:
    content = content_of(example)
    said = content.pop("checksum")
    told = re.search(r"`(xxh3:\w+)` is the hash, has (\d+) bytes and begins with\n\n```text\n(.*)…\n", PAGE)
    assert told is not None
    form = canonical(content)
    assert (told[1], int(told[2])) == (said, len(form.encode()))
    assert form.startswith(told[3])


def test_the_example_can_be_saved_over_and_removed_by_name(example: Path) -> None:
    assert all(map(is_ours, content_of(example)["files"]))
    state = {"model": {"w": torch.ones(2)}}
    save_alone(example, state)
    assert load_state_dict(example)["w"].equal(torch.ones(2))
    assert len(list(example.rglob("*.safetensors"))) == 1
