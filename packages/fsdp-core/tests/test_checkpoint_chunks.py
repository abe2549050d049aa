"""Hand-made boxes from ranks that are threads: whole tensors, holes, overlaps, disagreement, failures."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_ranks import ThreadRuntime, on_threads
from chunked_tensors import in_boxes, in_pieces, slices_of, split
from fsdp_core import errors
from fsdp_core.checkpoint import Chunk, ChunkedTensor, chunked, fill, fill_all, load, load_state_dict, save, verify
from fsdp_core.checkpoint.storage.tensor_bytes import TensorBytes, open_files
from fsdp_core.state.boxes import copy_into
from fsdp_core.state.coverage import Box, find_fault
from fsdp_core.testing.refusals import assert_says, refusal

WHOLE = torch.arange(60.0).reshape(5, 4, 3)


def save_each(path: Path, states: list[dict[str, Any]], **options: Any) -> list[Any]:
    """Save on as many threads as there are states."""

    def work(runtime: ThreadRuntime) -> None:
        kinds = {key: "model" for key in states[runtime.rank] if key == "model"}
        save(path, states[runtime.rank], runtime=runtime, strategy="hand-made", kinds=kinds, **options)

    return on_threads(len(states), work)


@pytest.mark.parametrize("seed", range(10))
def test_any_boxes_on_any_ranks_load_into_any_others(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    parts: list[list[Any]] = [[] for _ in range(ranks)]
    for box in split((5, 4, 3), rng.randint(0, 14), rng):
        rng.choice(parts).append(box)
    states = [{"model": {"w": in_boxes(WHOLE, part)}, "elsewhere": [in_boxes(WHOLE, part)]} for part in parts]
    assert save_each(tmp_path / "c", states) == [None] * ranks
    verify(tmp_path / "c")
    nest = load(tmp_path / "c")
    assert nest["model"]["w"].full().equal(WHOLE)
    assert nest["elsewhere"][0].full().equal(WHOLE)
    target = torch.full_like(WHOLE, -1)
    for part in split((5, 4, 3), 9, rng):
        fill(in_boxes(target, [part]), nest["model"]["w"])
    assert target.equal(WHOLE)


#: The same tensor, cut in different ways; the last ones by a grid.
LAYOUTS: dict[str, Any] = {
    "whole": WHOLE,
    "rows": in_pieces(WHOLE, 0, 1, 4),
    "middle": in_pieces(WHOLE, 1, 3),
    "last": in_pieces(WHOLE, 2, 1, 2),
    "grid": in_boxes(WHOLE, [(offsets, (4, 2, 2)) for offsets in itertools.product((0, 4), (0, 2), (0, 2))]),
}


def bytes_of(tensor: Tensor) -> bytearray:
    return bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
def test_bytes_of_a_box_are_copied_to_its_place(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    for _ in range(500):
        shape = [rng.randint(1, 6) for _ in range(rng.randint(0, 4))]
        lengths = [rng.randint(1, size) for size in shape]
        offsets = [rng.randint(0, size - length) for size, length in zip(shape, lengths, strict=True)]
        box, expected = torch.randint(1, 100, lengths).to(dtype), torch.zeros(shape, dtype=dtype)
        expected[slices_of(offsets, lengths)] = box
        target = bytearray(expected.nbytes)
        copy_into(memoryview(target), shape, offsets, memoryview(bytes_of(box)), dtype.itemsize, lengths)
        assert target == bytes_of(expected), (shape, offsets, lengths)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_box_of_any_layout_is_read(tmp_path: Path, layout: str) -> None:
    """By a load, and as bytes, without torch."""
    save_each(tmp_path / "c", [{"model": {"w": LAYOUTS[layout]}}])
    saved, reader, rng = load(tmp_path / "c")["model"]["w"], TensorBytes(open_files(tmp_path / "c")), random.Random(1)
    for _ in range(100):
        lengths = [rng.randint(1, size) for size in WHOLE.shape]
        offsets = [rng.randint(0, size - length) for size, length in zip(WHOLE.shape, lengths, strict=True)]
        expected = WHOLE[slices_of(offsets, lengths)]
        assert saved.read(offsets, lengths).equal(expected)
        assert reader.read("model/w", offsets, lengths) == bytes_of(expected), (offsets, lengths)
    assert saved.read((5, 1, 0), (0, 2, 3)).shape == (0, 2, 3)
    reader.block_bytes = 20
    blocks = list(reader.source("model/w", (1, 5)).blocks())
    assert all(len(block) <= 20 for block in blocks)
    assert bytearray().join(blocks) == bytes_of(WHOLE[1:5])


@pytest.mark.parametrize(
    "box", [((0, 0, 0), (6, 4, 3)), ((-1, 0, 0), (1, 1, 1)), ((0, 0), (1, 1)), ((4, 0, 0), (2, 1, 1))]
)
def test_a_box_outside_of_the_tensor_is_refused(tmp_path: Path, box: Any) -> None:
    save_each(tmp_path / "c", [{"model": {"w": WHOLE}}])
    with pytest.raises(
        errors.CheckpointMismatchError, match=r"'model/w' has shape \(5, 4, 3\), so it has no box of shape"
    ):
        load(tmp_path / "c")["model"]["w"].read(*box)


def test_only_the_first_copy_is_written(tmp_path: Path) -> None:
    halves: list[list[Any]] = [[((0, 0, 0), (3, 4, 3))], [((3, 0, 0), (2, 4, 3))]]
    states = [
        {"model": {"w": in_boxes(WHOLE if copy == 0 else WHOLE * 0, half, copy)}} for copy in (0, 1) for half in halves
    ]
    assert save_each(tmp_path / "c", states) == [None] * 4
    assert load_state_dict(tmp_path / "c")["w"].equal(WHOLE)
    assert len(list((tmp_path / "c" / "model").iterdir())) == 2


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[((0, 0, 0), (2, 4, 3))], [((3, 0, 0), (2, 4, 3))]], r"'model/w': nothing covers \[2:3, 0:4, 0:3\]"),
        ([[((0, 0, 0), (3, 4, 3))], [((2, 0, 0), (3, 4, 3))]], r"'model/w': two chunks cover \[2:3, 0:4, 0:3\]"),
        # As many elements as the tensor has, but one box is there twice.
        ([[((0, 0, 0), (5, 2, 3))], [((0, 0, 0), (5, 2, 3))]], r"'model/w': two chunks cover \[0:5, 0:2, 0:3\]"),
        ([[((0, 0, 0), (5, 2, 3)), ((0, 0, 0), (5, 2, 3))], []], "'model/w': two chunks cover"),
        ([[], []], r"'model/w': nothing covers \[0:5, 0:4, 0:3\]"),
    ],
    ids=["hole", "overlap", "right_sum", "twice_on_a_rank", "nothing"],
)
def test_holes_and_overlaps_are_refused_on_every_rank(tmp_path: Path, parts: Any, message: str) -> None:
    assert save_each(tmp_path / "c", [{"model": {"w": WHOLE}}] * 2) == [None, None]
    before = sorted(tmp_path.rglob("*"))
    results = save_each(tmp_path / "c", [{"model": {"w": in_boxes(WHOLE, part)}} for part in parts])
    for result in results:
        assert isinstance(result, errors.CheckpointMismatchError)
        with pytest.raises(errors.CheckpointMismatchError, match=message):
            raise result
    assert sorted(tmp_path.rglob("*")) == before
    assert load_state_dict(tmp_path / "c")["w"].equal(WHOLE)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([{"w": torch.zeros(2)}, {"w": torch.zeros(3)}], r"rank 0 has \(2,\) float32, and rank 1 has \(3,\) float32"),
        ([{"w": torch.zeros(2)}, {"w": torch.zeros(2).half()}], r"and rank 1 has \(2,\) float16"),
        ([{}, {"w": torch.zeros(2)}], "rank 1 has it, and rank 0 does not"),
        ([{"w": in_boxes(WHOLE, [((0, 0, 0), (2, 4, 3))])}, {}], "nothing covers"),
    ],
    ids=["shape", "dtype", "only_on_rank_1", "only_on_rank_0"],
)
def test_ranks_that_disagree_are_refused(tmp_path: Path, states: Any, message: str) -> None:
    results = save_each(tmp_path / "c", [{"model": state} for state in states])
    for result in results:
        with pytest.raises(errors.CheckpointMismatchError, match=message):
            raise result
    assert not (tmp_path / "c").exists()


def test_at_most_twenty_faults_are_shown(tmp_path: Path) -> None:
    hole = in_boxes(WHOLE, [((0, 0, 0), (2, 4, 3))])
    (result,) = save_each(tmp_path / "c", [{"model": {f"w{i}": hole for i in range(25)}}])
    assert str(result).count("nothing covers") == 20
    assert "… and 5 more" in str(result)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk(offsets=(4,), data=torch.zeros(2)), "does not lie inside a tensor of shape"),
        (Chunk(offsets=(-1,), data=torch.zeros(2)), "does not lie inside"),
        (Chunk(offsets=(0, 0), data=torch.zeros(2)), "does not lie inside"),
        (Chunk(offsets=(0,), data=torch.zeros(2, 1)), "does not lie inside"),
    ],
)
def test_chunks_outside_of_their_tensor_are_refused(chunk: Chunk, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkedTensor(shape=(5,), dtype=torch.float32, chunks=(chunk,))


@pytest.mark.parametrize("shape", [(), (3,), (0, 2)], ids=str)
def test_a_plain_tensor_is_one_box_and_each_rank_has_another_copy(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, requires_grad=True)
    whole = chunked(tensor, rank=3)
    assert (whole.shape, whole.replica) == (shape, 3)
    assert [chunk.data.data_ptr() for chunk in whole.chunks] == ([tensor.data_ptr()] if tensor.numel() else [])
    assert chunked(whole) is whole


@pytest.mark.parametrize("kind", ["saved", "in_memory"])
def test_fill_compares_before_it_writes(tmp_path: Path, kind: str) -> None:
    save_each(tmp_path / "c", [{"model": {"w": WHOLE}}])
    source = load(tmp_path / "c")["model"]["w"] if kind == "saved" else WHOLE
    small, half, same = torch.zeros(4, 4, 3), torch.zeros(5, 4, 3).half(), torch.zeros(5, 4, 3, requires_grad=True)
    with pytest.raises(
        errors.CheckpointMismatchError, match=r"its shape is \(5, 4, 3\) in the checkpoint, and \(4, 4, 3\)"
    ):
        fill(small, source)
    with pytest.raises(
        errors.CheckpointMismatchError, match="its dtype is float32 in the checkpoint, and float16 here"
    ):
        fill(half, source)
    assert not half.any()
    fill(half, source, cast=True)
    assert half.equal(WHOLE.half())
    fill(same, source)
    assert same.equal(WHOLE)


def test_fill_all_changes_nothing_unless_everything_fits() -> None:
    targets = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(1)}
    sources = {"a": torch.ones(2), "b": torch.ones(3), "d": torch.ones(1)}
    message = refusal(errors.CheckpointMismatchError, lambda: fill_all(targets, sources, source_name="x.ckpt"))
    assert message.startswith("x.ckpt does not fit, so nothing was loaded from it:")
    assert "1 differ:\n    b: its shape is (3,) in the checkpoint, and (2,) here" in message
    assert_says(message, "1 are missing in it:\n    c", "1 are only in it:\n    d")
    assert not targets["a"].any()
    sources["b"] = torch.ones(2)
    with pytest.raises(errors.CheckpointMismatchError, match="pass strict=False, or in a LightningModule"):
        fill_all(targets, sources)
    differences = fill_all(targets, sources, strict=False)
    assert (differences.missing, differences.unexpected) == (("c",), ("d",))
    assert targets["a"].all()
    assert targets["b"].all()


def test_fill_all_shows_at_most_twenty_of_each() -> None:
    caught = refusal(errors.CheckpointMismatchError, lambda: fill_all({f"a{i}": torch.zeros(1) for i in range(30)}, {}))
    assert_says(caught, "30 are missing in it:", "… and 10 more")


class _Source:
    """A tensor that is read when it is written."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def read(self, offsets: Any, lengths: Any) -> Tensor:
        return self.tensor[slices_of(offsets, lengths)]


def test_a_part_is_copied_and_converted_and_else_taken_for_no_tensor() -> None:
    data = torch.arange(6.0).view(3, 2)
    chunks = (Chunk(offsets=(1, 0), data=data), Chunk(offsets=(0, 0), data=_Source(data[:1])))
    part = ChunkedTensor(shape=(4, 2), dtype=torch.float32, chunks=chunks, replica=1)
    for convert in (lambda p: p.half(), lambda p: p.to(torch.float16), lambda p: p.to("cpu", dtype=torch.float16)):
        made = convert(part)
        assert (made.dtype, made.shape, made.replica) == (torch.float16, (4, 2), 1)
        assert torch.equal(made.chunks[0].data, data.half())
        assert made.chunks[0].offsets == (1, 0)
        assert torch.equal(made.chunks[1].data.read((0, 1), (1, 1)), data[:1, 1:].half())
    for copied in (part.clone(), copy.deepcopy(part)):
        assert copied.chunks[0].data is not data
        assert torch.equal(copied.chunks[0].data, data)
    assert (part.numel(), part.is_floating_point(), hasattr(part, "norm"), bool(part)) == (8, True, False, True)
    uses = [
        lambda: part.norm(),
        lambda: torch.isfinite(part),
        lambda: 0.5 * part,
        lambda: data + part,
        lambda: float(part),
        lambda: part[0],
        lambda: pickle.dumps(part),
    ]
    for use in uses:
        with pytest.raises(errors.ShardingError, match=r"is not supported by a ChunkedTensor.*\n.*full_state_dict"):
            use()


def test_a_saved_tensor_says_how_it_is_read(tmp_path: Path) -> None:
    save_each(tmp_path / "it", [{"model": {"w": torch.ones(2)}}])
    saved = load(tmp_path / "it")["model"]["w"]
    with pytest.raises(AttributeError, match=r"\.half is not supported by a SavedTensor.*\nCall value\.full\(\)"):
        saved.half()
    assert torch.equal(copy.copy(saved).full(), torch.ones(2))
    with pytest.raises(errors.CheckpointMismatchError, match="To convert it, pass strict=False"):
        fill_all({"w": torch.ones(2).half()}, {"w": saved})
    with pytest.raises(errors.CheckpointMismatchError) as raised:
        fill_all({"w": torch.ones(3)}, {"w": saved})
    assert "To convert" not in str(raised.value)


# -- whether boxes cover a tensor exactly, against counting every element ----------------------------------------------


def count(shape: tuple[int, ...], boxes: list[Box]) -> torch.Tensor:
    counted = torch.zeros(shape, dtype=torch.int32)
    for offsets, lengths in boxes:
        counted[slices_of(offsets, lengths)] += 1
    return counted


@pytest.mark.parametrize("seed", range(300))
def test_agrees_with_counting(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
    boxes = split(shape, rng.randint(0, 12), rng)
    assert find_fault(shape, boxes) is None
    missing = boxes.pop(rng.randrange(len(boxes)))
    assert "nothing covers" in str(find_fault(shape, boxes))
    twice = [*boxes, missing, rng.choice([*boxes, missing])]
    assert "two chunks cover" in str(find_fault(shape, twice))
    # As many boxes, of which some may be there twice, others not at all, and one lies anywhere.
    begin = tuple(rng.randrange(size) for size in shape)
    anywhere = begin, tuple(rng.randint(1, size - at) for at, size in zip(begin, shape, strict=True))
    drawn = [*rng.choices([*boxes, missing], k=len(boxes)), anywhere]
    assert (count(shape, drawn) == 1).all().item() == (find_fault(shape, drawn) is None)


@pytest.mark.parametrize(
    ("shape", "boxes", "message"),
    [
        ((), [], "nothing covers []"),
        ((), [((), ()), ((), ())], "two chunks cover []"),
        ((4,), [((0,), (2,)), ((3,), (1,))], "nothing covers [2:3]"),
        ((4,), [((0,), (2,)), ((2,), (1,))], "nothing covers [3:4]"),
        ((4,), [((1,), (3,))], "nothing covers [0:1]"),
        ((2, 2), [((0, 0), (1, 2)), ((1, 1), (1, 1))], "nothing covers [1:2, 0:1]"),
        ((2, 2), [((0, 0), (2, 2)), ((1, 1), (1, 1))], "two chunks cover [1:2, 1:2]"),
        ((2,), [((1,), (2,))], "does not lie inside"),
        ((2,), [((-1,), (2,))], "does not lie inside"),
        ((2,), [((0,), (0,))], "does not lie inside"),
        ((0, 3), [((0, 0), (0, 3))], "does not lie inside"),
        ((2,), [((0, 0), (2, 1))], "does not have 1 dimensions"),
    ],
)
def test_says_what_is_wrong_and_where(shape: tuple[int, ...], boxes: list[Box], message: str) -> None:
    assert message in str(find_fault(shape, boxes))
