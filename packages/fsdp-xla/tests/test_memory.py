"""How much host memory ``xla_fsdp`` takes, over what its devices hold: measured, on two ranks that are one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memory_runs import BUILDS, DEEP, LAYERS, WEIGHTS, WIDTH
from xla_process import ok, run_script

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux resets a process's peak")

#: Weights and momentum of all ranks, and of one.
ALL, SHARD = 2 * WEIGHTS, WEIGHTS
#: The weights of the model that is built: what the shards of both ranks take, and each rank's whole model.
MODEL = WEIGHTS * DEEP // LAYERS


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_script("memory_runs.py", 2, tmp_path_factory.mktemp("builds"), "builds")


@pytest.mark.parametrize("case", ["built in parts", "built in parts by torch", "built empty", "configured in parts"])
def test_a_model_sharded_as_it_is_built_is_never_there_as_a_whole(builds: dict[str, Any], case: str) -> None:
    """Shards of both ranks and a few layers: less than one whole model beside them."""
    assert ok(builds, case)["peak"] < 1.5 * MODEL
    whole = "configured at once" if case.startswith("configured") else "built at once"
    assert ok(builds, whole)["peak"] > 1.9 * MODEL, "what is measured is not what a model takes"
    for name, value in ok(builds, whole)["rows"].items():
        assert torch.equal(ok(builds, case)["rows"][name], value), name


@pytest.mark.parametrize("case", ["built at once", "configured at once"])
def test_a_whole_model_is_freed_unit_by_unit_as_it_is_sharded(builds: dict[str, Any], case: str) -> None:
    """Each rank's on the host, and never those on the devices too, which torch_xla by itself keeps."""
    assert ok(builds, case)["peak"] < 2.5 * MODEL


def test_spmd_frees_a_model_parameter_by_parameter_as_it_is_sharded(tmp_path: Path) -> None:
    """Its one process has the model once: the shards, and what is on its way to them."""
    builds = run_script("memory_runs.py", 2, tmp_path, "spmd builds")
    for case in BUILDS:
        result = ok(builds, f"built {case}")
        assert result["peak"] < 1.3 * MODEL, case
        for name, value in ok(builds, "built at once")["rows"].items():
            assert torch.equal(result["rows"][name], value), (case, name)


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_script("memory_runs.py", 2, tmp_path_factory.mktemp("saves"), "saves")


@pytest.mark.parametrize("front_end", ["fabric", "trainer"])
def test_ranks_that_save_in_turn_need_memory_for_less_than_one_shard(saves: dict[str, Any], front_end: str) -> None:
    assert ok(saves, "fabric sharded")["peak"] > 0.9 * ALL, "what is measured is not what a save takes"
    assert ok(saves, f"{front_end} sharded in turn")["peak"] < 0.5 * SHARD


@pytest.mark.parametrize("front_end", ["fabric", "trainer"])
def test_a_full_file_in_turn_needs_no_memory_for_shards(saves: dict[str, Any], front_end: str) -> None:
    """What is left is rank 0's: the whole, and what Lightning's writer makes of it in memory."""
    assert ok(saves, f"{front_end} full in turn")["peak"] < ok(saves, "fabric full")["peak"] - 0.8 * ALL


@pytest.mark.parametrize("case", ["fabric sharded in turn", "fabric full in turn"])
def test_what_is_saved_in_turn_is_what_is_saved_at_once(saves: dict[str, Any], case: str) -> None:
    rows, want = ok(saves, case)["rows"], ok(saves, "fabric sharded")["rows"]
    assert list(rows) == list(want)
    for name, value in want.items():
        assert torch.equal(rows[name], value), name
    assert {value.numel() for name, value in rows.items() if name.endswith("weight")} == {WIDTH // 64}


def test_in_turn_and_behind_training_contradict_each_other(saves: dict[str, Any]) -> None:
    for front_end in ("fabric", "trainer"):
        told = ok(saves, f"{front_end} in turn and behind")
        for words in ("sequential_save=True can't be combined with async_save=True", "where host memory is short"):
            assert words in told


def test_a_rank_that_fails_in_its_turn_is_raised_on_all(saves: dict[str, Any]) -> None:
    told = ok(saves, "failing in turn")
    assert len(told) == 2
    for rank in told.values():
        assert "this rank can't be read" in rank
        assert "on rank 1 of 2" in rank
