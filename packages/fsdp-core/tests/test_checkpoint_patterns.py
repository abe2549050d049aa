"""Chunks in a pattern: what is recognised, looked up, written and refused, beside the list that it stands for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

import format_reader
from checkpoint_ranks import ThreadRuntime, on_threads
from chunked_tensors import in_boxes
from damaged_folders import refused, rewrite, save_alone
from fsdp_core.checkpoint import (
    ChunkedTensor,
    compare,
    describe,
    indexes,
    load,
    load_state_dict,
    merging,
    read_manifest,
    reshard,
    verify,
)
from fsdp_core.checkpoint.format.manifest import FileEntry, Manifest, StoredTensor
from fsdp_core.checkpoint.format.patterns import PatternedChunks
from fsdp_core.checkpoint.recognising import pattern_of
from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.state.boxes import boxes, overlap
from fsdp_core.state.coverage import Box

PINWHEEL = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((1, 0), (2, 1)), ((1, 1), (1, 1)), ((2, 1), (1, 2))]
VERSION_1 = (Path(__file__).parent / "manifest_of_version_1.json").read_text(encoding="utf-8")
FILES = "model/0123456789ab-rank-*.safetensors"
Held = list[tuple[int, tuple[Box, ...]]]


def drawn(choice: random.Random) -> tuple[tuple[int, ...], Held]:
    """A tensor in a grid or in runs, over ranks in some order."""
    shape = tuple(choice.randint(1, 6) for _ in range(choice.randint(0, 3)))
    size = torch.Size(shape).numel()
    pieces: list[tuple[Box, ...]]
    if choice.random() < 0.5:
        ends = sorted({size, *(choice.randint(1, size) for _ in range(choice.randint(0, 5)))})
        runs = zip([0, *ends], ends, strict=False)
        pieces = [tuple((o, n) for o, n, _ in boxes(shape, begin, end - begin)) for begin, end in runs]
    else:
        axes = []
        for length in shape:
            cuts = sorted({0, length, *(choice.randint(0, length) for _ in range(2))})
            axes.append([(begin, end - begin) for begin, end in pairwise(cuts)])
        pieces = [((tuple(b for b, _ in cell), tuple(n for _, n in cell)),) for cell in product(*axes)]
    ranks = list(range(0, 2 * len(pieces), choice.choice([1, 2])))[: len(pieces)]
    if choice.random() < 0.3:
        choice.shuffle(ranks)
    return shape, sorted(zip(ranks, pieces, strict=True))


def test_pattern_equals_its_list_of_chunks() -> None:
    choice = random.Random(3)
    patterned = 0
    for _ in range(300):
        shape, held = drawn(choice)
        pattern = pattern_of(shape, held)
        if pattern is None:
            continue
        patterned += 1
        chunks = PatternedChunks("model/a@b", FILES, pattern)
        listed = list(chunks)
        assert len(chunks) == len(listed)
        assert chunks == tuple(listed)
        assert chunks[-1:] == tuple(listed[-1:])
        assert chunks[0] == listed[0]
        assert {(c.file, c.offsets, c.lengths) for c in listed} == {
            (FILES.replace("*", f"{rank:05d}"), *box) for rank, of_rank in held for box in of_rank
        }
        expanded = format_reader._expanded("model/a@b", list(shape), json.loads(json.dumps(pattern_json(chunks))))
        assert [(c.file, c.key, [*c.offsets], [*c.lengths]) for c in listed] == [
            (c["file"], c["key"], c["offsets"], c["lengths"]) for c in expanded
        ]
        for name in chunks.file_names():
            assert list(chunks.in_file(name)) == [c for c in listed if c.file == name]
        assert list(chunks.in_file(FILES.replace("*", "00999"))) == []
        begin = tuple(choice.randrange(size) for size in shape)
        box = begin, tuple(choice.randint(1, size - at) for at, size in zip(begin, shape, strict=True))
        found = list(chunks.overlapping(box))
        assert found == [c for c in listed if overlap((c.offsets, c.lengths), box) is not None]
    assert patterned > 280  # a rank's pieces that follow each other are one box for another rank


def pattern_json(chunks: PatternedChunks) -> dict[str, Any]:
    return {"files": chunks.files, **chunks.pattern.to_json()}


def test_irregular_chunks_have_no_pattern() -> None:
    rows: Held = [(rank, (((rank, 0), (1, 4)),)) for rank in range(4)]
    assert pattern_of((4, 4), rows) is not None
    assert pattern_of((4, 4), rows[:-1]) is None
    assert pattern_of((4, 4), [*rows, rows[0]]) is None
    wrong: Held = [*rows[:-1], (3, (((3, 1), (1, 3)),))]
    assert pattern_of((4, 4), wrong) is None
    assert pattern_of((3, 3), [(rank, (box,)) for rank, box in enumerate(PINWHEEL)]) is None  # type: ignore[misc]
    assert pattern_of((0, 3), []) is None


# --- Saved and loaded -----------------------------------------------------------------------------------------------

WHOLE = {
    "rows": torch.arange(28.0).view(7, 4),
    "more_rows": torch.arange(28.0).view(7, 4) * 2,
    "columns": torch.arange(24).view(2, 12),
    "flat": torch.arange(210.0).view(5, 6, 7),
    "on_rank_0": torch.tensor(3.0),
    "pinwheel": torch.arange(9.0).view(3, 3),
    "empty": torch.empty(0, 4),
}


def state_of(rank: int, ranks: int, change: float = 0.0) -> dict[str, Any]:
    """This rank's parts, with a tensor that is in no pattern."""

    whole = {name: tensor + change if tensor.is_floating_point() else tensor for name, tensor in WHOLE.items()}
    piece = -(-7 // ranks)
    begin = min(rank * piece, 7)
    rows = [((begin, 0), (min(piece, 7 - begin), 4))] if begin < 7 else []
    start, end = 210 * rank // ranks, 210 * (rank + 1) // ranks
    return {
        "rows": in_boxes(whole["rows"], rows),
        "more_rows": in_boxes(whole["more_rows"], rows),
        "columns": in_boxes(whole["columns"], [((0, 12 * rank // ranks), (2, 12 // ranks))]),
        "flat": in_boxes(whole["flat"], [(o, n) for o, n, _ in boxes((5, 6, 7), start, end - start)]),
        "on_rank_0": whole["on_rank_0"],
        "pinwheel": in_boxes(whole["pinwheel"], PINWHEEL[rank::ranks]),
        "empty": in_boxes(whole["empty"], []),
    }


def save_parts(path: Path, runtime: ThreadRuntime, change: float = 0.0, **options: Any) -> None:
    state = {"model": state_of(runtime.rank, runtime.world_size, change), "step": 3}
    save_alone(path, {**state, **options}, runtime=runtime)


@pytest.fixture
def patterns_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MOST_LISTED", 0)


@pytest.mark.usefixtures("patterns_always")
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_saved_in_patterns_and_loaded(tmp_path: Path, ranks: int) -> None:
    assert on_threads(ranks, lambda runtime: save_parts(tmp_path / "c", runtime)) == [None] * ranks
    manifest = read_manifest(tmp_path / "c")
    assert manifest.format_version == 2
    kinds = {key.partition("/")[2]: type(tensor.chunks) for key, tensor in manifest.tensors.items()}
    assert {name for name, kind in kinds.items() if kind is tuple} <= {"pinwheel", "empty"}
    assert len(manifest.tensors["model/columns"].chunks) == ranks
    assert Manifest.from_json(manifest.to_json()) == manifest
    verify(tmp_path / "c")
    weights = load_state_dict(tmp_path / "c")
    theirs = format_reader.Checkpoint(tmp_path / "c")
    for name, whole in WHOLE.items():
        assert torch.equal(weights[name], whole), name
        assert torch.equal(torch.from_numpy(theirs.tensor(f"model/{name}").copy()), whole), name
    loaded = on_threads(2, lambda runtime: load(tmp_path / "c", runtime=runtime)["model"]["flat"].full())
    assert all(torch.equal(one, WHOLE["flat"]) for one in loaded)
    box = load(tmp_path / "c")["model"]["flat"].read((1, 2, 3), (3, 3, 2))
    assert torch.equal(box, WHOLE["flat"][1:4, 2:5, 3:5])


@pytest.mark.usefixtures("patterns_always")
def test_holes_and_disagreements_are_named_as_without_patterns(tmp_path: Path) -> None:
    def lacking(runtime: ThreadRuntime) -> None:
        state = state_of(runtime.rank, 3)
        if runtime.rank == 1:
            state["rows"] = ChunkedTensor(shape=(7, 4), dtype=torch.float32, chunks=())
            state["columns"] = ChunkedTensor(shape=(2, 12), dtype=torch.float32, chunks=())
            state["extra"] = torch.ones(2)
        save_alone(tmp_path / "c", {"model": state}, runtime=runtime)

    for error in on_threads(3, lacking):
        assert isinstance(error, CheckpointMismatchError)
        for message in (
            "'model/rows': nothing covers [3:6, 0:4] of shape [7, 4]",
            "'model/columns': rank 0 has (2, 12) int64, and rank 1 has (2, 12) float32",
            "'model/extra': rank 1 has it, and rank 0 does not",
        ):
            assert message in str(error)


def test_ranks_may_have_their_tensors_in_another_order(tmp_path: Path) -> None:
    def work(runtime: ThreadRuntime) -> None:
        state = state_of(runtime.rank, 3)
        if runtime.rank == 2:
            state = dict(reversed(state.items()))
        save_alone(tmp_path / "c", {"model": state}, runtime=runtime)

    assert on_threads(3, work) == [None] * 3
    weights = load_state_dict(tmp_path / "c")
    assert list(weights) == list(WHOLE)
    assert all(torch.equal(weights[name], whole) for name, whole in WHOLE.items())


# --- A plan that was saved before -----------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [0, 10**6], ids=["patterns", "lists"])
def test_a_plan_that_was_saved_before_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: int
) -> None:
    monkeypatch.setattr(merging, "MOST_LISTED", listed)
    sent: list[list[bool]] = [[], [], []]
    gather = ThreadRuntime.gather_objects_to

    def noting(self: ThreadRuntime, obj: Any, dst: int = 0) -> list[Any] | None:
        if isinstance(obj, indexes.Message):
            sent[self.rank].append(obj.boxes is not None)
        return gather(self, obj, dst)

    monkeypatch.setattr(ThreadRuntime, "gather_objects_to", noting)

    def work(runtime: ThreadRuntime) -> None:
        def step(change: float, path: str = "c", **options: Any) -> None:
            save_parts(tmp_path / path, runtime, change, **options)
            if runtime.rank == 0:
                weights = load_state_dict(tmp_path / path)
                assert all(torch.equal(weights[n], w + change * w.is_floating_point()) for n, w in WHOLE.items())
            runtime.barrier()

        step(0.0)
        step(1.0)  # the same plan
        step(2.0, "elsewhere")
        # fails when all have sent: a tensor of which no rank holds anything
        lacks = ChunkedTensor(shape=(2,), dtype=torch.float32, chunks=())
        with pytest.raises(CheckpointMismatchError):
            save_parts(tmp_path / "c", runtime, more=lacks)
        step(3.0)  # what is known is from before the failure
        if runtime.rank == 1:  # as after an interrupt of this rank alone
            indexes.save_memory_of(runtime).last = None
        step(4.0)
        if runtime.rank == 0:
            indexes.save_memory_of(runtime).last = None
        step(5.0)
        step(6.0)

    assert on_threads(3, work) == [None] * 3
    of_saves = list(zip(*sent, strict=True))
    nothing, everything = (False,) * 3, (True,) * 3
    assert of_saves == [
        *(everything, nothing, nothing, everything, nothing),
        *((False, True, False), everything, nothing),
    ]


# --- Read -----------------------------------------------------------------------------------------------------------


def test_a_manifest_of_version_1_is_read_and_written_as_it_was() -> None:
    manifest = Manifest.from_json(VERSION_1)
    assert (manifest.format_version, manifest.to_json()) == (1, VERSION_1)
    assert [chunk.offsets for chunk in manifest.tensors["model/wte.weight"].chunks] == [(0, 0), (2, 0)]


@pytest.fixture
def folder(tmp_path: Path, patterns_always: None) -> Path:
    assert on_threads(3, lambda runtime: save_parts(tmp_path / "c", runtime)) == [None] * 3
    return tmp_path / "c"


def test_tools_read_patterns(folder: Path, tmp_path: Path) -> None:
    description = describe(folder)
    assert description["format_version"] == 2
    assert [description["tensors"][f"model/{name}"]["chunks"] for name in ("rows", "flat", "empty")] == [3, 7, 0]
    assert reshard(folder, tmp_path / "in 2", files=2).format_version == 1
    assert not compare(folder, tmp_path / "in 2").tensors
    weights = load_state_dict(tmp_path / "in 2")
    assert all(torch.equal(weights[name], whole) for name, whole in WHOLE.items())


def chunks_of(content: dict[str, Any], name: str = "rows") -> Any:
    return content["tensors"][f"model/{name}"]["chunks"]


def add_tensor(content: dict[str, Any], shape: list[int], **pattern: Any) -> None:
    content["tensors"]["large"] = {"shape": shape, "dtype": "int8", "chunks": {**chunks_of(content), **pattern}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format_version=1), "tensor 'model/rows': .* is not a list"),
        (lambda c: chunks_of(c).pop("ranks"), "it lacks 'ranks'"),
        (lambda c: chunks_of(c).pop("grid"), "either a grid or runs"),
        (lambda c: chunks_of(c).update(runs=[[28, 1]]), "either a grid or runs"),
        (lambda c: chunks_of(c).update(grid=[[[3, 2]], [[4, 1]]]), r"do not cover the shape \[7, 4\]"),
        (lambda c: chunks_of(c).update(grid=[[[7, 1]]]), r"do not cover the shape \[7, 4\]"),
        (lambda c: chunks_of(c).update(grid=[[[3, 2], [1, 1], [0, 5]], [[4, 1]]]), "no lengths with counts"),
        (lambda c: chunks_of(c).update(grid=[[[3, 2], [1, -1], [1, 2]], [[4, 1]]]), "no lengths with counts"),
        (lambda c: chunks_of(c).update(grid=[[[3, 2], [1]], [[4, 1]]]), "not enough values"),
        (lambda c: chunks_of(c).update(grid=[[[3, 2], "11"], [[4, 1]]]), "is not a list"),
        (lambda c: chunks_of(c).update(grid=[[[3, 2], [1, True]], [[4, 1]]]), "is not an integer"),
        (lambda c: chunks_of(c).update(ranks=[[0, 1, 2]]), "cut into 3 pieces, which 2 ranks hold"),
        (lambda c: chunks_of(c).update(ranks=[[0, 1, 4]]), "cut into 3 pieces, which 4 ranks hold"),
        (lambda c: chunks_of(c).update(ranks=[[1, 1, 3]]), "rank-00003.safetensors', which is not among the files"),
        (lambda c: chunks_of(c).update(ranks=[[0, 2**60, 3]]), "is not among the files"),
        (lambda c: chunks_of(c).update(ranks=[[2, -1, 3]]), "no ranks with steps"),
        (lambda c: chunks_of(c).update(files="model/x-rank-*.safetensors"), "which is not among the files"),
        (lambda c: chunks_of(c).update(files="../x*"), "does not end in '-rank-"),
        (lambda c: chunks_of(c).update(files=3), "is not a string"),
        (lambda c: chunks_of(c, "flat").update(runs=[[70, 2], [69, 1]]), "do not cover the shape"),
        (lambda c: chunks_of(c, "flat").update(runs=[[1, 210]]), "cut into 210 pieces, which 3 ranks hold"),
        (
            lambda c: add_tensor(c, [2**50], grid=[[[1, 2**50]]], ranks=[[0, 0, 2**50]]),
            "cut into 1125899906842624 pieces, and the limit is 4194304",
        ),
        (
            lambda c: add_tensor(c, [2**20] * 2, grid=[[[1, 2**20]]] * 2, ranks=[[0, 0, 2**40]]),
            "cut into 1099511627776 pieces",
        ),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    rewrite(folder, change)
    refused(folder, message)
    if not message.startswith("cut into 1"):  # the other reader expands patterns
        with pytest.raises((ValueError, KeyError, TypeError)):
            format_reader.Checkpoint(folder)


def test_a_pattern_over_files_with_other_contents_is_refused(folder: Path) -> None:
    rewrite(folder, lambda c: chunks_of(c, "more_rows").update(ranks=[[0, 2, 2], [1, 1, 1]]))
    refused(folder, "should hold a chunk of 'model/more_rows'")


def test_ranks_without_a_file_are_looked_up() -> None:
    old = Manifest.from_json(VERSION_1)

    def manifest(present: list[int], ranks: list[int]) -> Manifest:
        held: Held = [(rank, (((at,), (1,)),)) for at, rank in enumerate(ranks)]
        pattern = pattern_of((len(ranks),), held)
        assert pattern is not None
        entry = FileEntry(size=1, checksum="xxh3:" + "0" * 16)
        names = [FILES.replace("*", f"{rank:05d}") for rank in present]
        tensor = StoredTensor(shape=(len(ranks),), dtype_name="int8", chunks=PatternedChunks("model/w", FILES, pattern))
        files = dict.fromkeys([old.state_file, *names], entry)
        return replace(old, state_tensors=None, tensors={"model/w": tensor}, kinds={}, aliases={}, files=files)

    assert manifest([0, 2, 4, 6], [0, 2, 4, 6]).format_version == 2
    assert manifest([6, 4, 0], [0, 6]).format_version == 2
    assert manifest([1, 100000], [1, 100000]).format_version == 2
    with pytest.raises(ValueError, match=r"rank-00002\.safetensors', which is not among"):
        manifest([0, 1, 3, 4], [0, 2, 4])
    with pytest.raises(ValueError, match=r"rank-00005\.safetensors', which is not among"):
        manifest([0, 1, 3, 4], [0, 1, 5])
