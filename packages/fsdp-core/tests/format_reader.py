"""A reader of checkpoints written from docs/checkpoint-format.md alone. It imports nothing of this project."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

__all__ = ["Checkpoint", "canonical", "checksum", "digest"]

MAX_BYTES, MAX_HEADER_BYTES, MAX_NUMBER = 2**28, 100_000_000, 2**53 - 1
# The names in the manifest and in a safetensors header, and how numpy reads the elements.
DTYPES = {
    "float64": ("F64", "<f8"), "float32": ("F32", "<f4"), "float16": ("F16", "<f2"), "bfloat16": ("BF16", "<u2"),
    "float8_e4m3fn": ("F8_E4M3", "u1"), "float8_e5m2": ("F8_E5M2", "u1"), "int64": ("I64", "<i8"),
    "int32": ("I32", "<i4"), "int16": ("I16", "<i2"), "int8": ("I8", "i1"), "uint64": ("U64", "<u8"),
    "uint32": ("U32", "<u4"), "uint16": ("U16", "<u2"), "uint8": ("U8", "u1"), "bool": ("BOOL", "?"),
    "complex64": ("C64", "<c8"),
}  # fmt: skip
ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def need(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def canonical(value: Any) -> str:
    """A JSON value as RFC 8785 writes it; of numbers, whole ones alone."""
    if isinstance(value, dict):
        members = sorted(value, key=lambda name: name.encode("utf-16-be"))
        return "{" + ",".join(f"{canonical(name)}:{canonical(value[name])}" for name in members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(ESCAPES.get(c, c if c >= " " else f"\\u{ord(c):04x}") for c in value) + '"'
    return "null" if value is None else str(value).lower()


def checksum(data: bytes) -> str:
    return f"xxh3:{xxhash.xxh3_64_intdigest(data):016x}"


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    need(len(dict(members)) == len(members), "two members of one name")
    return dict(members)


def _refuse_number(text: str) -> None:
    raise ValueError(f"{text} is no whole number")


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value <= MAX_NUMBER


def _numbers(value: Any, least: int = 0) -> list[int]:
    need(isinstance(value, list) and all(_is_whole(number, least) for number in value), f"{value} are no numbers")
    return list(value)


def _text(value: Any) -> str:
    need(isinstance(value, str), f"{value!r} is no string")
    return str(value)


def _map(value: Any) -> dict[str, Any]:
    need(isinstance(value, dict), f"{value!r} is no object")
    return dict(value)


def _counted(pairs: Any) -> list[int]:
    """Lengths, each of which is written once with how many times it follows."""
    found: list[int] = []
    for pair in pairs:
        length, count = _numbers(pair, 1)
        found += [length] * count
    return found


def _expanded(key: str, shape: list[int], pattern: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks that a pattern stands for."""
    need(("grid" in pattern) != ("runs" in pattern) and 0 not in shape, "neither grid nor runs")
    stem, star, suffix = _text(pattern["files"]).partition("*")
    need(star == "*" and stem.endswith("-rank-") and suffix == ".safetensors", "names without a rank")
    ranks: list[int] = []
    for run in pattern["ranks"]:
        first, step, count = _numbers(run)
        need(count >= 1, "no pieces")
        ranks += [first + step * number for number in range(count)]
    if "grid" in pattern:
        axes = []
        for lengths in map(_counted, pattern["grid"]):
            begins = [sum(lengths[:number]) for number in range(len(lengths))]
            axes.append(list(zip(begins, lengths, strict=True)))
        need([sum(length for _, length in axis) for axis in axes] == shape, "a grid of another shape")
        pieces = [[([begin for begin, _ in cell], [length for _, length in cell])] for cell in product(*axes)]
    else:
        counts = _counted(pattern["runs"])
        need(sum(counts) == math.prod(shape), "runs of another number of elements")
        pieces = [_boxes_of_run(shape, sum(counts[:number]), count) for number, count in enumerate(counts)]
    need(len(ranks) == len(pieces), "another number of ranks")
    return [
        {
            "file": f"{stem}{rank:05d}{suffix}",
            "key": key if lengths == shape and "@" not in key else f"{key}@{','.join(map(str, offsets))}",
            "offsets": offsets,
            "lengths": lengths,
        }
        for rank, boxes in zip(ranks, pieces, strict=True)
        for offsets, lengths in boxes
    ]


def _boxes_of_run(shape: list[int], start: int, count: int) -> list[tuple[list[int], list[int]]]:
    """The chunks of consecutive elements, in row-major order."""
    if not shape:
        return [([], [])]
    if len(shape) == 1:
        return [([start], [count])]
    row = math.prod(shape[1:])
    found: list[tuple[list[int], list[int]]] = []
    end = start + count
    while start < end:
        if start % row == 0 and end - start >= row:
            whole = (end - start) // row
            found.append(([start // row, *[0] * (len(shape) - 1)], [whole, *shape[1:]]))
            start += whole * row
            continue
        inner = min(end, (start // row + 1) * row) - start
        parts = _boxes_of_run(shape[1:], start % row, inner)
        found += [([start // row, *offsets], [1, *lengths]) for offsets, lengths in parts]
        start += inner
    return found


def digest(elements: np.ndarray[Any, Any]) -> str:
    """The digest of a whole tensor: each word by itself, as the page says it."""
    if elements.dtype.itemsize == 8:
        elements = elements.reshape(*elements.shape, 1).view("<i4")
    words = elements.view({1: "i1", 2: "<i2", 4: "<i4"}[elements.dtype.itemsize])
    total = 0
    for index in product(*map(range, words.shape)):
        weight = math.prod(_weight(dim, i) for dim, i in enumerate(index))
        total += int(words[index]) * weight
    return f"sum64:{total % 2**64:016x}"


def _weight(dim: int, index: int) -> int:
    high, low = divmod(index, 2**16)
    return _mixed(dim * 2**48 + low) * _mixed(dim * 2**48 + 2**40 + high)


def _mixed(number: int) -> int:
    state = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return (state ^ state >> 31) | 1


class Checkpoint:
    """A checkpoint in a local folder; everything is checked before the first tensor can be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = self._read_manifest()
        self._check_manifest()
        self.headers: dict[str, dict[str, tuple[str, list[int], int]]] = {}
        for name, entry in self.manifest["files"].items():
            path = (folder / name).resolve()
            need(path.is_relative_to(folder.resolve()) and path.is_file(), f"{name} is no file in the folder")
            need(path.stat().st_size == entry["size"], f"{name} has another size")
            need(checksum(path.read_bytes()) == entry["checksum"], f"{name} has another checksum")
        for tensor in self.manifest["tensors"].values():
            for chunk in tensor["chunks"]:
                dtype, shape, _ = self._header(chunk["file"])[chunk["key"]]
                need(dtype == DTYPES[tensor["dtype"]][0] and shape == chunk["lengths"], "a chunk differs in its file")
        self.state = self._read_state()

    def _read_manifest(self) -> dict[str, Any]:
        path = self.folder / "manifest.json"
        need(path.is_file() and path.stat().st_size <= MAX_BYTES, "no manifest")
        found = json.loads(
            path.read_bytes().decode("utf-8"),
            object_pairs_hook=_object,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
        )
        content = _map(found)
        need(next(iter(content.items())) == ("format", "fsdp-checkpoint"), "another format")
        need(type(content["format_version"]) is int and content["format_version"] in (1, 2, 3), "another version")
        said = content.pop("checksum", None)
        need(said == checksum(canonical(content).encode("utf-8")), "the manifest was changed")
        for key, tensor in content["tensors"].items() if content["format_version"] >= 2 else ():
            if isinstance(tensor["chunks"], dict):
                tensor["chunks"] = _expanded(key, tensor["shape"], tensor["chunks"])
        return content

    def _check_manifest(self) -> None:
        manifest = self.manifest
        fields = {"save_id", "created", "strategy", "versions", "world_size"}
        fields |= {"kinds", "state", "tensors", "aliases", "files"}
        need(fields <= set(manifest), "a field is missing")
        need(re.fullmatch("[0-9a-f]{12}", _text(manifest["save_id"])) is not None, "no save id")
        need(_is_whole(manifest["world_size"], 1), "no world size")
        for field in ("created", "strategy"):
            _text(manifest[field])
        for field in ("versions", "kinds", "aliases"):
            for value in _map(manifest[field]).values():
                _text(value)
        need(set(manifest["kinds"].values()) <= {"model", "optimizer"}, "an unknown kind")
        for name, entry in _map(manifest["files"]).items():
            bad = any(step in ("", ".", "..") for step in name.split("/")) or re.search(r"[\\:\x00-\x1f]", name)
            need(not bad and name != "manifest.json", f"{name} leads out of the folder")
            need(_is_whole(entry["size"]), "no size")
            need(re.fullmatch("xxh3:[0-9a-f]{16}", _text(entry["checksum"])) is not None, "no checksum")
        state = _map(manifest["state"])
        need("tensors" in state and _text(state["json"]) in manifest["files"], "no plain data")
        need(state["tensors"] is None or _text(state["tensors"]) in manifest["files"], "no small tensors")
        for tensor in _map(manifest["tensors"]).values():
            self._check_tensor(_map(tensor))
        left_out = self._check_base(manifest["base"]) if manifest["format_version"] == 3 else set()
        need(not left_out & set(manifest["tensors"]), "a tensor that is there, and left out")
        need(set(manifest["aliases"].values()) <= {*manifest["tensors"], *left_out}, "an alias of nothing")

    def _check_base(self, base: dict[str, Any]) -> set[str]:
        source = base["source"]
        if source is not None:
            need(source["type"] in ("folder", "file", "hub"), "an unknown source")
            need(1 <= len(_text(source["name"])) <= 4096, "a source without a name")
        need(len(_map(base["tensors"])) > 0, "an empty base")
        for tensor in base["tensors"].values():
            shape = _numbers(tensor["shape"])
            need(len(shape) <= 64 and math.prod(max(n, 1) for n in shape) <= MAX_NUMBER, "no shape")
            need(_text(tensor["dtype"]) in DTYPES, "an unknown dtype")
            need(re.fullmatch("sum64:[0-9a-f]{16}", _text(tensor["digest"])) is not None, "no digest")
        return set(base["tensors"])

    def _check_tensor(self, tensor: dict[str, Any]) -> None:
        shape = _numbers(tensor["shape"])
        need(len(shape) <= 64 and math.prod(max(n, 1) for n in shape) <= MAX_NUMBER, "no shape")
        need(_text(tensor["dtype"]) in DTYPES, "an unknown dtype")
        covered = np.zeros(shape, dtype=np.int64)  # this reader is for small tensors
        need(isinstance(tensor["chunks"], list), "no chunks")
        for chunk in tensor["chunks"]:
            offsets, lengths = _numbers(chunk["offsets"]), _numbers(chunk["lengths"], 1)
            need(len(offsets) == len(lengths) == len(shape), "a chunk of other dimensions")
            need(all(o + n <= size for o, n, size in zip(offsets, lengths, shape, strict=True)), "a chunk outside")
            need(_text(chunk["file"]) in self.manifest["files"] and bool(_text(chunk["key"]) or True), "no file")
            covered[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] += 1
        need(bool((covered == 1).all()), "chunks leave a hole or overlap")

    def _header(self, name: str) -> dict[str, tuple[str, list[int], int]]:
        """Dtype, shape and first byte of each tensor in a safetensors file."""
        if name in self.headers:
            return self.headers[name]
        data = (self.folder / name).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        need(length <= min(MAX_HEADER_BYTES, len(data) - 8), "a header that is too long")
        header = json.loads(data[8 : 8 + length].decode("utf-8"), object_pairs_hook=_object)
        header.pop("__metadata__", None)
        sizes = {stored: np.dtype(read).itemsize for stored, read in DTYPES.values()}
        at, found = 0, {}
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            need(
                begin == at and end - begin == math.prod(entry["shape"]) * sizes[entry["dtype"]], "bytes that don't fit"
            )
            found[key], at = (entry["dtype"], entry["shape"], 8 + length + begin), end
        need(8 + length + at == len(data), "bytes that are no tensor's")
        self.headers[name] = found
        return found

    def _stored(self, name: str, key: str) -> np.ndarray[Any, Any]:
        stored, shape, start = self._header(name)[key]
        read = next(read for other, read in DTYPES.values() if other == stored)
        data = (self.folder / name).read_bytes()
        elements = np.frombuffer(data, dtype=read, count=math.prod(shape), offset=start).reshape(shape)
        # A bfloat16 is the first half of a float32.
        return (elements.astype(np.uint32) << 16).view(np.float32) if stored == "BF16" else elements

    def tensor(self, key: str) -> np.ndarray[Any, Any]:
        """A whole tensor; bfloat16 as float32, 8-bit floats as bytes."""
        tensor = self.manifest["tensors"][self.manifest["aliases"].get(key, key)]
        dtype = tensor["dtype"]
        whole = np.empty(tensor["shape"], dtype="<f4" if dtype == "bfloat16" else DTYPES[dtype][1])
        for chunk in tensor["chunks"]:
            box = tuple(slice(o, o + n) for o, n in zip(chunk["offsets"], chunk["lengths"], strict=True))
            whole[box] = self._stored(chunk["file"], chunk["key"])
        return whole

    def element(self, key: str, index: tuple[int, ...]) -> Any:
        """One element, from the one chunk that holds it."""
        tensor = self.manifest["tensors"][key]
        for chunk in tensor["chunks"]:
            inside = tuple(i - o for i, o in zip(index, chunk["offsets"], strict=True))
            if all(0 <= i < n for i, n in zip(inside, chunk["lengths"], strict=True)):
                return self._stored(chunk["file"], chunk["key"])[inside]
        raise IndexError(index)

    def indices(self, key: str) -> product[tuple[int, ...]]:
        return product(*map(range, self.manifest["tensors"][key]["shape"]))

    def _read_state(self) -> Any:
        name = self.manifest["state"]["json"]
        need(self.manifest["files"][name]["size"] <= MAX_BYTES, "too much plain data")
        self._used: set[str] = set()
        state = json.loads((self.folder / name).read_bytes().decode("utf-8"), object_pairs_hook=_object)
        nest = self._plain(_map(state))
        need(isinstance(nest, dict), "the state is no map")
        return nest

    def _plain(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._plain(item) for item in value]
        if not isinstance(value, dict):
            return value
        tags = [name for name in value if name.startswith("$")]
        if not tags:
            return {name: self._plain(item) for name, item in value.items()}
        need(len(value) == 1, "a tag among other members")
        return self._tagged(tags[0], value[tags[0]])

    def _tagged(self, tag: str, held: Any) -> Any:
        if tag == "$saved":
            key = self.manifest["aliases"].get(held, held)
            if self.manifest["format_version"] == 3 and key in self.manifest["base"]["tensors"]:
                return ("$left out", self.manifest["base"]["tensors"][key])
            need(key in self.manifest["tensors"], "no such tensor")
            return self.tensor(held)
        if tag == "$tensor":
            need(held not in self._used, "a tensor that is referred to twice")
            self._used.add(held)
            return self._stored(self.manifest["state"]["tensors"], held)
        if tag in ("$tuple", "$set", "$frozenset"):
            return {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag](map(self._plain, held))
        if tag in ("$dict", "$ordered", "$counter", "$namespace"):
            pairs = [(self._plain(key), self._plain(item)) for key, item in held]
            return {"$ordered": OrderedDict, "$counter": lambda p: Counter(dict(p))}.get(tag, dict)(pairs)
        if tag == "$defaultdict":
            names = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
            pairs = [(self._plain(key), self._plain(item)) for key, item in held[1]]
            return defaultdict(None if held[0] is None else names[held[0]], pairs)
        if tag == "$complex":
            return complex(float(held[0]), float(held[1]))
        if tag == "$bytes":
            return base64.b64decode(held, validate=True)
        if tag == "$ndarray":
            return self._plain(held)
        if tag == "$numpy":
            return np.dtype(held[0]).type(self._plain(held[1]))
        if tag == "$float":
            need(held in ("nan", "inf", "-inf"), "no float")
            return float(held)
        if tag in ("$path", "$datetime", "$date", "$time", "$dtype", "$device"):
            return (tag, _text(held))  # another language's own values would stand here
        if tag in ("$timedelta", "$size"):
            return (tag, list(held))
        raise ValueError(f"an unknown tag {tag}")
