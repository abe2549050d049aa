"""Changes a checkpoint's manifest, plain data and safetensors headers at random, and reads it in every way; a script.

``python fuzz_checkpoints.py FIRST COUNT`` runs the inputs of ``COUNT`` seeds from ``FIRST`` on. Whatever was changed is
sealed again with sizes and checksums, as by somebody who knows the format. Each reader must succeed or raise one of our
errors, and readers that succeed must have read the same content.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from click.testing import CliRunner
from torch import Tensor

from cli_checkpoints import save_trained
from damaged_folders import reseal, rewrite
from fsdp_core.checkpoint import (
    compare,
    consolidate_huggingface,
    consolidate_safetensors,
    load,
    read_manifest,
    reshard,
    verify,
)
from fsdp_core.checkpoint.format.plain_form import MAX_DEPTH
from fsdp_core.checkpoint.format.state_paths import find_part
from fsdp_core.checkpoint.tools.listing import find_checkpoints
from fsdp_core.cli import fsdp
from fsdp_core.errors import CheckpointError, CheckpointValueError
from fsdp_core.lightning.checkpoints.full.consolidation import consolidate_lightning
from nests import read_all

#: What may stand anywhere in JSON.
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 2**31, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 10**30, 1.5, -0.0, 1e308),
    *("", "model", "w", "model/wte.weight", "../x", "\x00", "\ud800", "é" * 99, "a" * 5000, "F32", "float32", "NaN"),
    *([], {}, [[]], [0, 2**53 - 1, 2**53 - 1], [2] * 70, {"a": 1}, [["a", 1]], [[[], 1]], {"$saved": "model/none"}),
]
TAGS = [
    *("$tuple", "$set", "$frozenset", "$size", "$dict", "$ordered", "$counter", "$defaultdict", "$namespace", "$float"),
    *("$complex", "$bytes", "$path", "$timedelta", "$datetime", "$date", "$time", "$dtype", "$device", "$ndarray"),
    *("$numpy", "$saved", "$tensor", "$unknown", "$"),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a nest of JSON with each of its keys or indices."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        node = waiting.pop()
        entries = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
        found += [(node, key) for key, _ in entries]
        waiting += [item for _, item in entries if isinstance(item, dict | list)]
    return found


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def changed(value: Any, draw: random.Random) -> None:
    """Change a nest of JSON in one place."""
    found = places(value)
    if not found:
        return
    node, key = draw.choice(found)
    other, other_key = draw.choice(found)
    how = draw.randrange(10)
    if how == 0:
        del node[key]
    elif how == 1:
        node[key], other[other_key] = copied(other[other_key]), copied(node[key])
    elif how == 2:
        node[key] = copied(other[other_key])
    elif how == 3 and isinstance(node, dict):
        node[draw.choice([*TAGS, "a/b", "", "%", str(other_key)])] = node.pop(key)
    elif how == 3 or how == 4:
        node[key] = {draw.choice(TAGS): copied(draw.choice([node[key], *VALUES]))}
    elif how == 5 and isinstance(node, list):
        node.insert(key, copied(draw.choice([node[key], *VALUES])))
    elif how == 5 or how == 6:
        for _ in range(draw.choice([1, 3, MAX_DEPTH // 3])):
            node[key] = [node[key]] if draw.random() < 0.5 else {"$tuple": [node[key]]}
    elif how == 7 and type(node[key]) is int:
        node[key] += draw.choice([-1, 1, 2**53, -(2**53)])
    else:
        node[key] = copied(draw.choice(VALUES))


def change_manifest(folder: Path, draw: random.Random) -> None:
    def change(content: dict[str, Any]) -> None:
        part = (
            content if draw.random() < 0.2 else content[draw.choice(["tensors", "aliases", "files", "kinds", "state"])]
        )
        for _ in range(draw.choice([1, 1, 2])):
            changed(part, draw)

    rewrite(folder, change)


def change_plain(folder: Path, draw: random.Random) -> None:
    (path,) = folder.glob("state-*.json")
    state = json.loads(path.read_text())
    for _ in range(draw.choice([1, 1, 2, 4])):
        changed(state, draw)
    path.write_text(json.dumps(state))
    reseal(folder, path)


def change_header(folder: Path, draw: random.Random) -> None:
    path = draw.choice(sorted(folder.rglob("*.safetensors")))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for _ in range(draw.choice([0, 1, 1, 2])):
        changed(header, draw)
    text, rest = json.dumps(header).encode(), data[8 + length :]
    if draw.random() < 0.2:
        rest = rest[: draw.randrange(len(rest) + 1)] + bytes(draw.choice([0, 1, 64]))
    if draw.random() < 0.1:
        text = text[: draw.randrange(len(text))] + bytes([draw.randrange(256)]) + text[draw.randrange(len(text)) :]
    said = draw.choice([len(text)] * 9 + [0, len(text) + 8, 2**62, 2**64 - 1])
    path.write_bytes(said.to_bytes(8, "little") + text + rest)
    reseal(folder, path)


CHANGES: list[Callable[[Path, random.Random], None]] = [change_manifest, change_plain, change_header]


def models(folder: Path) -> list[dict[str, Tensor]]:
    """The tensors of each model, by name."""
    nest, found = read_all(load(folder)), []
    for path in [path for path, kind in read_manifest(folder).kinds.items() if kind == "model"]:
        part: Any = None
        with suppress(CheckpointValueError):  # it names nothing in the state, which not all readers look at
            part = find_part(nest, path)
        tensors = part.items() if isinstance(part, dict) else ()
        found.append({str(name): item for name, item in tensors if isinstance(item, Tensor)})
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Assert that the tensors are the same, bit by bit; ``b`` may lack further names of tied ones."""
    for name, tensor in b.items():
        assert tensor.dtype == a[name].dtype, name
        assert tensor.shape == a[name].shape, name
        assert tensor.contiguous().view(-1).view(torch.uint8).equal(a[name].contiguous().view(-1).view(torch.uint8)), (
            name
        )


def as_safetensors(folder: Path, out: Path) -> None:
    consolidate_safetensors(folder, out, copy_tied=True)
    (model,) = models(folder)
    written = safetensors.torch.load_file(out)
    assert written.keys() == model.keys()
    same(model, written)


def as_huggingface(folder: Path, out: Path) -> None:
    consolidate_huggingface(folder, out)
    (model,) = models(folder)
    same(model, safetensors.torch.load_file(out / "model.safetensors"))


def as_lightning(folder: Path, out: Path) -> None:
    consolidate_lightning(folder, out)
    file = torch.load(out, weights_only=False)
    if "state_dict" in file:
        (model,) = models(folder)[:1] or [{}]
        same({str(name): tensor for name, tensor in file["state_dict"].items()}, model)


def in_other_files(folder: Path, out: Path) -> None:
    reshard(folder, out, files=2)
    assert not compare(folder, out)
    assert [*map(sorted, models(out))] == [*map(sorted, models(folder))]
    for before, after in zip(models(folder), models(out), strict=True):
        same(before, after)


def compared(folder: Path, out: Path) -> None:
    assert not compare(folder, folder)


def inspected(folder: Path, out: Path) -> None:
    done = CliRunner().invoke(fsdp, ["checkpoint", "inspect", str(folder), "--tensors"], prog_name="fsdp")
    if done.exit_code == 1 and isinstance(done.exception, SystemExit):
        raise CheckpointError(done.stderr)
    if done.exception is not None:
        raise done.exception


READERS: dict[str, Callable[[Path, Path], object]] = {
    "load": lambda folder, out: read_all(load(folder)),
    "verify": lambda folder, out: verify(folder),
    "inspect": inspected,
    "list": lambda folder, out: find_checkpoints(folder.parent),
    "diff": compared,
    "safetensors": as_safetensors,
    "huggingface": as_huggingface,
    "lightning": as_lightning,
    "reshard": in_other_files,
}


def run_inputs(place: Path, first: int, count: int) -> tuple[Counter[str], list[str]]:
    """Run the inputs of several seeds; how often each reader ended how, and what must not be."""
    good = save_trained(place / "good")
    ended: Counter[str] = Counter()
    wrong = []
    for seed in range(first, first + count):
        draw, folder = random.Random(seed), place / "runs" / "changed.ckpt"
        shutil.copytree(good, folder)
        with suppress(RecursionError, UnicodeEncodeError):  # what this script can not write
            draw.choice(CHANGES)(folder, draw)
        for name in draw.sample(sorted(READERS), 4):
            try:
                READERS[name](folder, place / "out")
                how = "read"
            except CheckpointError:
                how = "refused"
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                how = "wrong"
                if __name__ == "__main__":
                    traceback.print_exc(limit=-3)
                wrong.append(f"seed {seed}, {name}: {type(error).__name__}: {str(error)[:300]}{_line(error)}")
            ended[f"{name} {how}"] += 1
            out = place / "out"
            shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
        shutil.rmtree(folder.parent)
    return ended, wrong


def _line(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({Path(frame.filename).name}:{frame.lineno})"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        told, faults = run_inputs(Path(folder), int(sys.argv[1]), int(sys.argv[2]))
    print(*faults, *(f"{name}: {count}" for name, count in sorted(told.items())), sep="\n")
    sys.exit(1 if faults else 0)
