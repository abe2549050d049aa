"""The state of a rank's random-number generators: what it holds, how it is saved, and whose it is."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import fsdp_core
from fsdp_core import checkpoint
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.state.random_state import random_state, set_random_state, state_of_rank
from fsdp_core.testing import RankPool


def _drawn() -> list[float]:
    """A number of each generator, and the second of the pairs that Gaussian ones draw."""
    gauss = [random.gauss(0, 1), float(numpy.random.randn()), float(torch.randn(())), random.gauss(0, 1)]
    return [*gauss, random.random(), float(numpy.random.rand()), float(torch.rand(())), float(numpy.random.randn())]


@pytest.fixture
def runtime() -> ProcessGroupRuntime:
    return ProcessGroupRuntime()


@pytest.mark.parametrize("begun", [0, 1])
@pytest.mark.parametrize("way", ["memory", "folder", "file"])
def test_every_generator_goes_on_where_it_was(
    runtime: ProcessGroupRuntime, tmp_path: Path, way: str, begun: int
) -> None:
    for _ in range(begun):  # a Gaussian of a pair, whose other one waits
        random.gauss(0, 1)
        numpy.random.randn()
    state: Any = random_state(runtime)
    drawn = _drawn()
    if way == "folder":
        checkpoint.save(tmp_path / "it", {"random": state}, runtime=runtime, strategy="none", kinds={})
        state = checkpoint.load(tmp_path / "it")["random"]
    elif way == "file":
        torch.save(state, tmp_path / "it")
        state = torch.load(tmp_path / "it", weights_only=True)
    assert _drawn() != drawn
    set_random_state(state, runtime)
    assert _drawn() == drawn


def test_other_generators_of_numpy_are_left_out(runtime: ProcessGroupRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    other = numpy.random.RandomState(numpy.random.PCG64(1))
    monkeypatch.setattr(numpy.random, "get_state", other.get_state)
    assert "numpy" not in random_state(runtime)


class OtherDevice(ProcessGroupRuntime):
    """Has a generator of its own, as an accelerator has."""

    device = torch.device("meta")

    def __init__(self) -> None:
        super().__init__()
        self.state = 7

    def device_random_state(self) -> int:
        return self.state

    def set_device_random_state(self, state: int) -> None:
        self.state = state


def test_generator_of_the_device(runtime: ProcessGroupRuntime) -> None:
    there = OtherDevice()
    state = random_state(there)
    there.state = 8
    set_random_state(state, there)
    assert there.state == 7
    drawn = _drawn()
    set_random_state(state, runtime)  # another kind of device: the rest is restored
    assert _drawn() == drawn
    assert "device" not in random_state(runtime)


def test_another_number_of_ranks_is_told_of(runtime: ProcessGroupRuntime) -> None:
    states: list[Any] = [random_state(runtime)]
    assert state_of_rank(states, runtime) is states[0]
    with pytest.warns(UserWarning, match=r"of 2 ranks, and this run has 1 rank:[^\n]*\n.*resume on 2 ranks\."):
        assert state_of_rank(states * 2, runtime) is None
    runtime.rank = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert state_of_rank(states * 3, runtime) is None


def _on_each_rank(seed: int, saved: Any) -> tuple[Any, list[float]]:
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)
    numpy.random.seed(seed + rank)
    if saved is not None:
        fsdp_core.RandomState().load_state_dict(saved)
    return fsdp_core.RandomState().state_dict(), _drawn()


def test_each_rank_gets_its_own() -> None:
    with RankPool() as ranks:
        (saved, first), (same, second) = ranks.run(2, _on_each_rank, 0, None)
        assert first != second
        assert len(saved["ranks"]) == len(same["ranks"]) == 2
        assert [drawn for _, drawn in ranks.run(2, _on_each_rank, 5, saved)] == [first, second]
