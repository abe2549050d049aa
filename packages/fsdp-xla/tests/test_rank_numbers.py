"""What ranks on XLA's CPU devices log, reduce, send each other and bring back, against one process of plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_core.testing.oracle import BATCH, FEATURES, FP32_TOLERANCE, dataset, sgd, train_plain
from rank_numbers import STEPS
from xla_process import error, ok, run_script


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case, on two ranks."""
    return run_script("rank_numbers.py", 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Random numbers on one rank, which runs in the script's own thread."""
    return run_script("rank_numbers.py", 1, tmp_path_factory.mktemp("one"), "masks")


def test_lightnings_logger_writes_each_steps_loss_once(two: dict[str, Any]) -> None:
    result = ok(two, "logged")
    assert len(result["folders"]) == 1
    assert result["losses"] == pytest.approx(train_plain(STEPS, sgd)[0], abs=FP32_TOLERANCE)


def test_the_trainer_that_started_ranks_knows_how_far_they_came(two: dict[str, Any]) -> None:
    result, losses = ok(two, "logged"), train_plain(STEPS, sgd)[0]
    assert (result["global_step"], result["current_epoch"]) == (STEPS, 1)
    assert result["logged"] == {"loss": pytest.approx(losses[-1], abs=FP32_TOLERANCE)}
    by_loss = sorted(range(STEPS), key=losses.__getitem__)[:2]
    assert sorted(result["best"]) == sorted(f"epoch=0-step={step + 1}.ckpt" for step in by_loss)
    assert result["folders"] == [result["folder"]]  # and the test that followed has gone on with the same file
    assert [step for step, _ in result["test"]] == [STEPS]


def test_a_reduced_loss_still_gives_its_gradients(two: dict[str, Any]) -> None:
    result = ok(two, "reduced loss")
    plain, reduced = result["norms"]
    assert reduced == plain > 0
    assert result["means"][0] == result["means"][1]


def test_a_broadcast_tensor_is_on_the_receivers_device(two: dict[str, Any]) -> None:
    """Rank 0's row is 2 in both places, rank 1's is 4; in turn rank 1's was sent, rank 0's, and rank 0's again."""
    for rank, (values, on_own_device, sums) in enumerate(ok(two, "broadcast")):
        assert values == [[[4.0, 4.0]], [[2.0, 2.0]], [[2.0, 2.0]]]
        assert on_own_device == [True, True, True]
        assert sums == [[12.0, 8.0], [16.0, 12.0]][rank]


def test_metrics_of_torchmetrics_are_those_of_all_ranks(two: dict[str, Any]) -> None:
    x, y = (torch.stack(one) for one in zip(*dataset(2 * BATCH), strict=True))
    confusion = torch.zeros(FEATURES, FEATURES, dtype=torch.int64)
    for given, wanted in zip(x.argmax(1), y.argmax(1), strict=True):
        confusion[wanted, given] += 1
    for rank in ok(two, "measured")["ranks"]:
        assert rank["metrics"]["mean"] == pytest.approx(x.sum(1).mean().item(), abs=FP32_TOLERANCE)
        assert len(rank["seen"]) == 2
        for counts, total in rank["seen"]:  # of two epochs, of which the second goes on with the same metrics
            assert counts == confusion.tolist()
            assert total == pytest.approx(x.sum().item(), abs=FP32_TOLERANCE)


def test_what_is_written_to_callback_metrics_stays_there(two: dict[str, Any]) -> None:
    result = ok(two, "measured")
    assert [rank["metrics"]["mine"] for rank in result["ranks"]] == [7.0, 7.0]
    assert result["told"] == result["ranks"][0]["metrics"]


def test_seed_everything_on_a_rank_seeds_its_device(two: dict[str, Any]) -> None:
    masks = ok(two, "masks")
    assert masks["again"] == masks["0, 1"]
    assert masks["other way round"] == masks["0, 1"][::-1]
    assert len({str(mask) for masks in (masks["0, 1"], masks["far"]) for mask in masks}) == 4


def test_seed_everything_seeds_the_device_of_a_single_rank(one: dict[str, Any]) -> None:
    masks = ok(one, "masks")
    assert masks["again"] == masks["0, 1"] != masks["other way round"]


def test_a_tensor_of_the_device_is_saved_beside_the_model(two: dict[str, Any]) -> None:
    result = ok(two, "saved from the device")
    assert (result["scale"], result["more"]) == ([2.0, 3.0], 3)


def test_a_shard_of_the_device_is_not_saved_as_a_whole_tensor(two: dict[str, Any]) -> None:
    parameter, detached, of_optimizer = ok(two, "saved from the device")["refused"]
    for told in (parameter, detached):
        assert "a rank's own shard of parameter 'inp.weight'" in told
    assert "a rank's own shard of the optimizer's state of 'inp.weight'" in of_optimizer


@pytest.mark.parametrize("case", ["sync_batchnorm", "SyncBatchNorm"])
def test_batch_norm_over_ranks_is_refused(two: dict[str, Any], case: str) -> None:
    told = error(two, case)
    for words in ("UnsupportedCapabilityError", case, "several ranks of 'xla_fsdp'", "strategy='xla_fsdp_spmd'"):
        assert words in told
