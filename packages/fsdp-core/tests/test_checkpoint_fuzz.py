"""Whatever is changed in a checkpoint: each reader reads the same, or one of our errors says what is wrong."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from cli_checkpoints import run
from damaged_folders import rewrite, save_alone
from fsdp_core.checkpoint import describe, load, verify
from fsdp_core.checkpoint.tools import run_facts
from fsdp_core.errors import CheckpointError, CheckpointFormatError
from fuzz_checkpoints import READERS, run_inputs
from test_checkpoint_hostile import change_tensor, folder, write_header, write_state

__all__ = ["folder"]

EMPTY = [0, 2**53 - 1, 2**53 - 1]  # whose strides no integer of torch holds

DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor that is not there": (
        lambda f: write_state(f, '{"model": {"w": {"$saved": "model/none"}}}'),
        "refers to a tensor 'model/none' that does not exist",
    ),
    "an empty shape": (lambda f: change_tensor(f, shape=EMPTY, chunks=[]), "no tensor has the shape"),
    "an empty shape in a header": (
        lambda f: write_header(f, {"model/w": {"dtype": "F32", "shape": EMPTY, "data_offsets": [0, 0]}}, 0),
        "has a shape that no tensor has|is damaged",
    ),
    "pairs that are none": (lambda f: write_state(f, '{"a": {"$dict": 5}}'), "holds '.dict' with an invalid value"),
    "a small tensor without a file": (
        lambda f: rewrite(f, lambda content: content["state"].update(tensors=None)),
        "refers to a tensor 'callbacks/best' that does not exist",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damage_is_named_by_every_reader(folder: Path, tmp_path: Path, what: str) -> None:
    change, says = DAMAGED[what]
    change(folder)
    for name in READERS.keys() - {"verify", "list", "inspect"}:  # which look at less
        with pytest.raises(CheckpointFormatError, match=says):
            READERS[name](folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run("consolidate", folder, tmp_path / "out", "--to", "safetensors", status=1)


@pytest.mark.parametrize(("first", "count"), [(0, 12), (444, 1), (7068, 1), (18447, 1)])  # single ones found a fault
def test_random_changes(tmp_path: Path, first: int, count: int) -> None:
    assert run_inputs(tmp_path, first, count)[1] == []


@pytest.mark.everything
def test_many_random_changes(tmp_path: Path) -> None:
    ended, wrong = run_inputs(tmp_path, 0, 300)
    assert wrong == []
    assert {how for how, count in ended.items() if count > 3} >= {
        f"{name} {how}" for name in READERS.keys() - {"list"} for how in ("read", "refused")
    }


# -- work that grows with the length of names --------------------------------------------------------------------------

#: The regular expressions that readers may apply to what a folder holds. Each takes time in proportion to its length.
LINEAR = {
    r"[\\:\x00-\x1f]",
    r"xxh3:[0-9a-f]{16}",
    r"[0-9a-f]{12}",
    r"[0-9]{1,9}[./]?",
    r"[ \t\n\r]*",  # json's
    r"\033\[[0-?]*[ -/]*[@-~]",  # click's
    run_facts._FACT_PATH.pattern,
    run_facts._CALLBACK_PATH.pattern,
    r".*-rank-\*\.safetensors",
    r"(.*-rank-)(\d{5,15})(\.safetensors)",
    r"state-[0-9a-f]{12}\.(json|safetensors)",
}


class Work:
    """Counts the characters that Python's functions take while it is entered, and notes regular expressions."""

    def __init__(self) -> None:
        self.characters = 0
        self.patterns: set[str] = set()

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            for value in map(frame.f_locals.get, names):
                texts = value if type(value) is list else [value]
                self.characters += sum(len(text) for text in texts if type(text) in (str, bytes))
        elif event == "c_call" and isinstance(getattr(argument, "__self__", None), re.Pattern):
            self.patterns.add(argument.__self__.pattern)

    def __enter__(self) -> Work:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


@pytest.mark.parametrize("sign", ["a", ".", "1", "/", "-v1", "%"])
def test_readers_do_twice_the_work_for_names_of_twice_the_length(tmp_path: Path, sign: str) -> None:
    work = Counter[int]()
    for length in (2000, 4000):
        name = "w" + (sign * length)[:length]
        path = tmp_path / f"{length}.ckpt"
        save_alone(
            path, {"model": {name: torch.ones(2), name[1:] + "b": torch.ones(2)}, "data": {name: {name: [1, 2]}}}
        )
        for read in (load, describe, verify, lambda path: run("inspect", path), lambda path: run("diff", path, path)):
            with Work() as seen:
                read(path)
            work[length] += seen.characters
            assert {pattern for pattern in seen.patterns if pattern not in LINEAR} == set()
    assert work[4000] < 2.2 * work[2000]


def test_paths_that_repeat_a_long_key_are_not_made(tmp_path: Path) -> None:
    state: Any = {"a" * 10_000: [0] * 40_000}  # 400 MB of paths
    save_alone(tmp_path / "a", {"model": {"w": torch.ones(1)}, "data": state})
    assert "10000" not in run("inspect", tmp_path / "a").output
    with pytest.raises(CheckpointError, match="have more than 268435456 characters together"):
        READERS["diff"](tmp_path / "a", tmp_path / "out")
