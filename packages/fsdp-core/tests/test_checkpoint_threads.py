"""Ranks that are threads, with ranges of flattened and padded parameters; and one controller that holds all shards."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_ranks import ThreadRuntime, bits, on_threads
from chunked_tensors import in_boxes
from damaged_folders import save_alone
from fsdp_core.checkpoint import fill, fill_all, load, load_state_dict, read_manifest, verify
from fsdp_core.errors import CheckpointError, CheckpointValueError
from fsdp_core.lightning.checkpoints.full.file import write_full
from fsdp_core.state.layout import FlatRange, Part
from fsdp_core.testing.refusals import assert_says

ALIASES = {"model/lm_head.weight": "model/wte.weight"}
PADDING = 128


def whole_tensors() -> dict[str, Tensor]:
    """The parameters of a model, the same on every call."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "wte.weight": normal(33, 17),
        "conv": normal(5, 3, 7, 11),
        "cube": normal(9, 8, 7),
        "bias": normal(7),
        "long": normal(3 * PADDING + 1),
        "row": normal(1, 200),
        "column": normal(200, 1),
        "exact": normal(2, 2 * PADDING),
        "scale": normal(),
        "half": normal(12, 13).to(torch.bfloat16),
        "special": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
    }


def padded_cuts(size: int, ranks: int) -> list[tuple[int, int]]:
    """Each rank's range when the flattened parameter is padded so that all have as much, a multiple of 128."""
    shard = -(-size // (ranks * PADDING)) * PADDING
    return [(min(rank * shard, size), min((rank + 1) * shard, size)) for rank in range(ranks)]


def uneven_cuts(size: int, ranks: int) -> list[tuple[int, int]]:
    """Ranges of which each is about twice the one before."""
    ends = [0, *(size * (2**rank - 1) // (2**ranks - 1) for rank in range(1, ranks)), size]
    return list(itertools.pairwise(ends))


def first_has_nothing(size: int, ranks: int) -> list[tuple[int, int]]:
    return [(0, 0), *padded_cuts(size, ranks - 1)] if ranks > 1 else [(0, size)]


Cuts = Callable[[int, int], list[tuple[int, int]]]
CUTS: list[Cuts] = [padded_cuts, uneven_cuts, first_has_nothing]


@dataclass(kw_only=True)
class Shard:
    """What a rank holds of the model, as classic XLA FSDP has it: one flat, padded tensor for each parameter."""

    parts: dict[str, Part]
    flat: dict[str, Tensor]

    def state(self) -> dict[str, Any]:
        return {name: part.of(self.flat[name]) for name, part in self.parts.items()}


def shard_of(tensors: dict[str, Tensor], rank: int, ranks: int, cuts: Cuts) -> Shard:
    parts, flat = {}, {}
    for name, whole in tensors.items():
        start, end = cuts(whole.numel(), ranks)[rank]
        held = torch.full((-(-max(end - start, 1) // PADDING) * PADDING,), -7.0, dtype=whole.dtype)
        held[: end - start] = whole.reshape(-1)[start:end]
        parts[name] = Part(
            name=name, shape=tuple(whole.shape), range=FlatRange(offset=0, start=start, length=end - start)
        )
        flat[name] = held
    return Shard(parts=parts, flat=flat)


def moments(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor * 3 for name, tensor in tensors.items()}


def save_shards(path: Path, runtime: ThreadRuntime, cuts: Cuts, scale: float = 1.0) -> None:
    """Save on one rank: weights and moments in ranges, step counts whole, and a tied name."""
    tensors = {name: tensor * scale for name, tensor in whole_tensors().items()}
    weights = shard_of(tensors, runtime.rank, runtime.world_size, cuts)
    averages = shard_of(moments(tensors), runtime.rank, runtime.world_size, cuts).state()
    optimizer = {
        "state": {name: {"exp_avg": average, "step": torch.tensor(5.0)} for name, average in averages.items()},
        "param_groups": [{"lr": 0.1, "params": list(averages)}],
    }
    state = {"model": weights.state(), "optimizer": [optimizer], "step": 5}
    save_alone(path, state, runtime=runtime, aliases=ALIASES)


def load_shards(path: Path, rank: int, ranks: int, cuts: Cuts) -> None:
    """Load on one rank and compare every bit, padding included, with what this rank would hold."""
    nest = load(path)
    empty = {name: torch.zeros_like(tensor) for name, tensor in whole_tensors().items()}
    weights, averages = shard_of(empty, rank, ranks, cuts), shard_of(empty, rank, ranks, cuts)
    tied = weights.state()["wte.weight"]
    fill_all({**weights.state(), "lm_head.weight": tied}, nest["model"])
    for name, average in averages.state().items():
        values = nest["optimizer"][0]["state"][name]
        fill(average, values["exp_avg"])
        assert values["step"].full().equal(torch.tensor(5.0))
    for shard, expected in ((weights, whole_tensors()), (averages, moments(whole_tensors()))):
        original = shard_of(expected, rank, ranks, cuts)
        for name, held in shard.flat.items():
            assert bits(held) == bits(original.flat[name]), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, Cuts], Path]:
    folders = {}
    for ranks, cuts in itertools.product((1, 2, 3, 4), CUTS):
        path = tmp_path_factory.mktemp("saved") / f"{cuts.__name__}{ranks}"
        assert (
            on_threads(ranks, lambda runtime, path=path, cuts=cuts: save_shards(path, runtime, cuts)) == [None] * ranks
        )
        folders[ranks, cuts] = path
    return folders


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranges_load_into_the_ranges_of_any_other_number_of_ranks(
    saved: dict[tuple[int, Cuts], Path], ranks: int, cuts: Cuts
) -> None:
    for path in saved.values():
        results = on_threads(ranks, lambda runtime, path=path: load_shards(path, runtime.rank, ranks, cuts))
        assert results == [None] * ranks, path.name


def test_one_process_reads_the_whole_model(saved: dict[tuple[int, Cuts], Path]) -> None:
    expected = whole_tensors()
    for path in saved.values():
        verify(path)
        state_dict = load_state_dict(path)
        assert {name: bits(state_dict[name]) for name in expected} == {name: bits(t) for name, t in expected.items()}
        assert state_dict["lm_head.weight"] is state_dict["wte.weight"]


def test_manifest_and_files_of_flat_ranges(saved: dict[tuple[int, Cuts], Path]) -> None:
    for (ranks, cuts), path in saved.items():
        manifest = read_manifest(path)
        assert (manifest.world_size, manifest.aliases) == (ranks, ALIASES)
        assert "model/lm_head.weight" not in manifest.tensors
        for key, tensor in manifest.tensors.items():
            by_file: dict[str, int] = {}
            for chunk in tensor.chunks:
                by_file[chunk.file] = by_file.get(chunk.file, 0) + 1
            # A contiguous range is at most 2d-1 boxes.
            assert max(by_file.values()) <= max(1, 2 * len(tensor.shape) - 1), key
        writers = {name for name in manifest.files if name.startswith("model/")}
        assert len(writers) == ranks - (cuts is first_has_nothing and ranks > 1)
        if cuts is padded_cuts:  # what fits into 128 elements is the first rank's alone
            assert {chunk.file[-17:-12] for chunk in manifest.tensors["model/bias"].chunks} == {"00000"}


def test_several_parameters_in_one_flat_tensor(tmp_path: Path) -> None:
    """With ``flatten_parameters`` a rank's range begins and ends in the middle of parameters."""
    shapes = {"weight": (5, 7), "bias": (5,), "scale": (), "head": (3, 2, 4)}
    numbered = torch.arange(float(sum(map(prod, shapes.values()))))
    ranks = 3

    def state_of(flat: Tensor, rank: int) -> dict[str, Any]:
        start, end = uneven_cuts(len(numbered), ranks)[rank]
        state, at = {}, 0
        for name, shape in shapes.items():
            low, high = max(start, at), min(end, at + prod(shape))
            length = max(high - low, 0)
            run = FlatRange(offset=max(low - start, 0) if length else 0, start=low - at if length else 0, length=length)
            state[name] = Part(name=name, shape=shape, range=run).of(flat)
            at += prod(shape)
        return state

    def held(runtime: ThreadRuntime) -> Tensor:
        start, end = uneven_cuts(len(numbered), ranks)[runtime.rank]
        return numbered[start:end].clone()

    def save_one(runtime: ThreadRuntime) -> None:
        state = {"model": state_of(held(runtime), runtime.rank)}
        save_alone(tmp_path / "c", state, runtime=runtime)

    def load_one(runtime: ThreadRuntime) -> None:
        flat = torch.zeros_like(held(runtime))
        fill_all(state_of(flat, runtime.rank), load(tmp_path / "c")["model"])
        assert flat.equal(held(runtime))

    assert on_threads(ranks, save_one) == [None] * ranks
    assert on_threads(ranks, load_one) == [None] * ranks
    state_dict = load_state_dict(tmp_path / "c")
    assert torch.cat([state_dict[name].reshape(-1) for name in shapes]).equal(numbered)


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_refusal_on_one_thread_is_raised_on_all(tmp_path: Path, bad: int) -> None:
    path = tmp_path / "c"
    assert on_threads(4, lambda runtime: save_shards(path, runtime, padded_cuts)) == [None] * 4
    before = sorted(path.rglob("*"))

    def work(runtime: ThreadRuntime) -> None:
        state = {"model": {"w": torch.ones(3)}, "hook": print if runtime.rank == bad else None}
        save_alone(path, state, runtime=runtime)

    errors = on_threads(4, work)
    assert {type(error) for error in errors} == {CheckpointValueError}
    (message,) = set(map(str, errors))
    assert_says(message, "'hook': builtins.builtin_function_or_method", f"(on rank {bad} of 4, while ")
    assert sorted(path.rglob("*")) == before
    load_shards(path, 0, 1, padded_cuts)


def device_boxes(shape: tuple[int, ...], grid: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes of a grid of devices, as SPMD cuts: equal pieces of the padded tensor, here without the padding."""
    pieces = [-(-size // devices) for size, devices in zip(shape, grid, strict=True)]
    for index in itertools.product(*map(range, grid)):
        offsets = tuple(min(i * piece, size) for i, piece, size in zip(index, pieces, shape, strict=True))
        lengths = tuple(min(p, s - o) for p, s, o in zip(pieces, shape, offsets, strict=True))
        if all(lengths):
            yield offsets, lengths


def controlled(tensors: dict[str, Tensor], devices: int) -> dict[str, Any]:
    """What one controller of several devices holds: a copy of every device's shard; vectors and scalars are whole."""
    state: dict[str, Any] = {}
    for name, whole in tensors.items():
        if whole.ndim < 2:
            state[name] = whole.clone()
            continue
        boxes = device_boxes(tuple(whole.shape), (2, devices // 2, *(1,) * (whole.ndim - 2)))
        state[name] = in_boxes(whole.clone(), boxes)
    return state


@pytest.mark.parametrize("devices", [4, 8])
def test_one_controller_that_holds_all_boxes(tmp_path: Path, devices: int) -> None:
    whole = whole_tensors()
    optimizer = {
        "state": {
            name: {"exp_avg": average, "step": torch.tensor(5.0)}
            for name, average in controlled(moments(whole), devices).items()
        },
        "param_groups": [{"lr": 0.1, "params": list(whole)}],
    }
    state = {"model": controlled(whole, devices), "optimizer": [optimizer], "step": 5}
    save_alone(tmp_path / "c", state, aliases=ALIASES)
    manifest = read_manifest(tmp_path / "c")
    assert (manifest.world_size, len(manifest.tensors["model/wte.weight"].chunks)) == (1, devices)
    for ranks in (1, 3):  # into the flat ranges of threads
        assert (
            on_threads(
                ranks, lambda runtime, ranks=ranks: load_shards(tmp_path / "c", runtime.rank, ranks, padded_cuts)
            )
            == [None] * ranks
        )
    # And the other way: from flat ranges into the boxes of other devices.
    assert on_threads(3, lambda runtime: save_shards(tmp_path / "flat", runtime, uneven_cuts)) == [None] * 3
    targets = controlled({name: torch.zeros_like(tensor) for name, tensor in whole.items()}, 12 - devices)
    targets["lm_head.weight"] = targets["wte.weight"]
    fill_all(targets, load(tmp_path / "flat")["model"])
    for name, expected in controlled(whole, 12 - devices).items():
        if isinstance(expected, Tensor):
            assert bits(targets[name]) == bits(expected)
        else:
            boxes = zip(targets[name].chunks, expected.chunks, strict=True)
            assert all(bits(target.data) == bits(chunk.data) for target, chunk in boxes)


def test_a_full_file_on_a_full_disk_is_told_on_every_rank(tmp_path: Path) -> None:
    def no_room(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = str(tmp_path / "full.ckpt")
    results = on_threads(
        2, lambda runtime: write_full(path, {}, gathered_from={}, write=no_room, runtime=runtime, async_saves=None)
    )
    for error in results:
        assert isinstance(error, CheckpointError), error
        assert str(error).startswith(f"writing {path} failed: OSError: [Errno {errno.ENOSPC}]"), error
        assert "There is no space left: free some, or use another path." in str(error), error
