"""``xla_fsdp`` where something goes wrong on its ranks: an error that says what, and no hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_core.testing.oracle import FP32_TOLERANCE
from xla_process import error, ok, run_script

SCRIPT = "rank_failures.py"
SECONDS = 200.0


def test_callbacks_are_told_of_an_error_in_their_ranks_and_can_save(tmp_path: Path) -> None:
    result = ok(run_script(SCRIPT, 2, tmp_path, "raises everywhere", timeout=SECONDS), "raises everywhere")
    assert result == {
        "error": "the user's own error",
        "told": [[0, 2, True, "ValueError"], [1, 2, True, "ValueError"]],
        "saved": True,
    }


def test_control_c_ends_a_fit_at_the_next_step_and_callbacks_can_save(tmp_path: Path) -> None:
    result = ok(run_script(SCRIPT, 2, tmp_path, "control-c", timeout=SECONDS), "control-c")
    assert result["code"] == 1
    assert result["steps"] in (2, 3)
    assert [[rank, inside, kind] for rank, _, inside, kind in result["told"]] == [
        [0, True, "KeyboardInterrupt"],
        [1, True, "KeyboardInterrupt"],
    ]
    assert result["saved"]


def test_a_second_control_c_ends_ranks_that_wait_for_another(tmp_path: Path) -> None:
    assert ok(run_script(SCRIPT, 2, tmp_path, "control-c twice", timeout=SECONDS), "control-c twice") == "interrupted"


#: What each says.
TOLD: dict[str, tuple[str, ...]] = {
    "late rank": ("RankLostError", "rank 1 did not come within 2 s", "rank 0 exchanges values", "timeout=timedelta("),
    "uneven": ("RankLostError", "rank 1 has ended, while rank 0 ends a step", "DistributedSampler"),
    "ended rank": (
        "RankLostError",
        "rank 1 has ended, while rank 0 exchanges values (barrier",
        "rank_failures.py line",
    ),
    "item of one": ("RankLostError", "ranks do different things", "rank 0 waits for a value", "rank 1 ends a step"),
    "barrier within building": ("RankLostError", "within building its model", "before or after init_module()"),
}


@pytest.mark.parametrize("case", TOLD)
def test_ranks_that_can_not_meet_are_told_why(case: str, tmp_path: Path) -> None:
    told = error(run_script(SCRIPT, 2, tmp_path, case, timeout=SECONDS), case)
    for words in TOLD[case]:
        assert words in told


#: Several of these in one process, for none leaves ranks within something but the last.
REFUSED: dict[str, tuple[str, ...]] = {
    "several hosts": ("num_nodes=2", "threads of one process", "devices="),
    "tuner": ("LearningRateFinder", "xla_fsdp_spmd"),
    "full on own disks": ("there is no checkpoint at host://full", "it is read on every host", "(on rank 1 of 2"),
    "sharded on own disks": ("-rank-00001.safetensors", "save to a file system that all ranks share"),
    "shared model": ("ShardingError: Module is set up by rank", "fabric.launch(train, model)"),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = ("passed model", *REFUSED)
    return run_script(SCRIPT, 2, tmp_path_factory.mktemp("refused"), *cases, timeout=SECONDS)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_what_to_write(refused: dict[str, Any], case: str) -> None:
    told = error(refused, case)
    for words in REFUSED[case]:
        assert words in told


def test_a_model_that_is_passed_is_each_ranks_own(refused: dict[str, Any]) -> None:
    result = ok(refused, "passed model")
    assert result["ranks"] == pytest.approx(result["plain"], abs=FP32_TOLERANCE)


def test_a_fitted_module_is_refused_and_a_loaded_one_is_not(tmp_path: Path) -> None:
    result = ok(run_script(SCRIPT, 2, tmp_path, "after a fit", timeout=SECONDS), "after a fit")
    assert list(result["refused"]) == ["same", "other"]
    for told in result["refused"].values():
        assert "trainer.test()" in told
        assert "load_from_checkpoint(path)" in told
    assert len(set(result["tested"])) == 1
    assert result["environment"] == ("1", None)  # what the user sets stays, what XLA's launch sets does not


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another number", "devices=4 was asked for, and XLA has 2 CPU devices since a run with devices=2"),
        ("backward before", "'xla_fsdp' can't start: this process took a backward pass before XLA was started"),
    ],
)
def test_what_came_before_in_the_process_is_told(case: str, words: str, tmp_path: Path) -> None:
    assert words in error(run_script(SCRIPT, 2, tmp_path, case, timeout=SECONDS), case)


def test_a_step_that_failed_on_all_ranks_leaves_nothing_to_the_next_fit(tmp_path: Path) -> None:
    assert ok(run_script(SCRIPT, 2, tmp_path, "again", timeout=SECONDS), "again") == "fitted"


def test_values_that_torch_fetches_by_itself(tmp_path: Path) -> None:
    result = ok(run_script(SCRIPT, 2, tmp_path, "fetches", timeout=SECONDS), "fetches")
    assert [loss for loss, _ in result["ranks"]] == pytest.approx(result["plain"], abs=FP32_TOLERANCE)


def test_rank_zero_goes_first(tmp_path: Path) -> None:
    assert ok(run_script(SCRIPT, 2, tmp_path, "in turn", timeout=SECONDS), "in turn") == [0, 1]
