"""xla_fsdp_spmd compiles what a run repeats once, and then nothing more, whatever is logged, shown and saved."""

from __future__ import annotations

from typing import Any

import pytest

from xla_process import results_of

#: Of the script.
BATCHES, EPOCHS = 8, 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("spmd_compiles")
    found: dict[str, Any] = results_of("spmd_compiles.py", folder / "results.pt", str(folder))
    return found


@pytest.mark.parametrize("case", ["plain", "accumulating", "often"])
def test_nothing_is_compiled_after_the_second_epochs_first_step(results: dict[str, Any], case: str) -> None:
    batches = results[case]["batches"]
    assert len(batches) == BATCHES * EPOCHS
    assert results[case]["last"] == batches[BATCHES], f"programs compiled by the end of each batch: {batches}"


@pytest.mark.parametrize(("case", "cycle"), [("plain", 1), ("accumulating", 2), ("often", 2)])
def test_the_first_epoch_compiles_one_cycle_of_steps(results: dict[str, Any], case: str, cycle: int) -> None:
    """With momentum of SGD they are two: its first step copies gradients, and the others add to what is there."""
    batches = results[case]["batches"]
    # half of an epoch lies before the first validation
    assert batches[BATCHES // 2 - 1] == batches[cycle - 1], f"programs compiled by the end of each batch: {batches}"
    assert results[case]["epochs"][1] == batches[cycle - 1], "after a validation of one batch, one of two"


def test_it_counts(results: dict[str, Any]) -> None:
    assert results["plain"]["batches"][0] > 0


@pytest.mark.parametrize("case", ["plain", "accumulating", "often"])
def test_numbers_are_logged_as_they_are(results: dict[str, Any], case: str) -> None:
    logged = results[case]["logged"]
    assert logged["epoch_number"] == [0.0, 1.0, 2.0, 3.0]
    assert len(logged["val_loss"]) == EPOCHS * (2 if case == "often" else 1)
    assert logged["best"] == pytest.approx(min(logged["val_loss"]))
