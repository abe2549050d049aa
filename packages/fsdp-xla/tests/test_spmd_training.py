"""xla_fsdp_spmd trains as one unsharded process of plain torch does, with a quarter of everything on each device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from fsdp_core.testing.oracle import (
    BATCH,
    FP32_TOLERANCE,
    HALF_TOLERANCE,
    Block,
    adamw_groups,
    dataset,
    global_batches,
    momentum,
    new_net,
    sgd,
    train_plain,
)
from spmd_training import OfKeywords, of_keywords
from xla_process import results_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("spmd_training")
    found: dict[str, Any] = results_of("spmd_training.py", folder / "results.pt", str(folder))
    return found


def assert_same_training(
    found: dict[str, Any], losses: list[float], state: dict[str, Tensor], tolerance: float = FP32_TOLERANCE
) -> None:
    torch.testing.assert_close(found["losses"], losses, rtol=0, atol=tolerance)
    assert found["state"].keys() == state.keys()
    for name, value in state.items():
        difference = float((found["state"][name].float() - value.float()).abs().max())
        assert difference <= tolerance, f"{name} differs by {difference}"


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("fabric", {}),
        ("trainer", {}),
        ("fabric accumulation, clipped by norm", {"accumulate": 2, "clip_norm": 0.1}),
        ("trainer accumulation, clipped by norm", {"accumulate": 2, "clip_norm": 0.1}),
        ("fabric clipped by value", {"clip_value": 0.01}),
        ("trainer clipped by value", {"clip_value": 0.01}),
        ("trainer manual", {"clip_norm": 0.1}),
        ("units of a class, momentum", {"make_optimizer": momentum}),
        ("recomputed", {}),
        ("recomputed, no units, accumulation", {"accumulate": 2}),
        ("two axes", {}),
    ],
)
def test_it_trains_as_one_process_does(results: dict[str, Any], case: str, options: dict[str, Any]) -> None:
    make_optimizer = options.pop("make_optimizer", adamw_groups)
    assert_same_training(results[case], *train_plain(4, make_optimizer, **options))


@pytest.mark.parametrize("case", ["bf16-mixed", "trainer bf16-mixed", "trainer bf16-true"])
def test_half_precision_trains_as_fp32_but_for_rounding(results: dict[str, Any], case: str) -> None:
    found = results[case]
    assert_same_training(found, *train_plain(4, adamw_groups), HALF_TOLERANCE)
    dtypes = {value.dtype for value in found["state"].values()}
    assert dtypes == {torch.bfloat16 if case.endswith("true") else torch.float32}
    assert found["losses"] != results["fabric"]["losses"], "nothing was computed in bf16"


@pytest.mark.parametrize(
    "case", ["fabric", "recomputed, no units, accumulation", "bf16-mixed"], ids=["plain", "recomputed", "bf16"]
)
def test_each_device_holds_a_quarter(results: dict[str, Any], case: str) -> None:
    after = results[case]["after"]
    for name, shards in {**after["parameters"], **after["moments"]}.items():
        written = after["written"][name.split("/")[0]]
        assert len(shards) == 4
        assert len(set(shards)) == 1, f"{name}: {shards}"
        if not written:
            assert shards[0] == ()
        else:
            differing = [(w, s) for w, s in zip(written, shards[0], strict=True) if w != s]
            assert len(differing) == 1, f"{name}: of {written} each holds {shards[0]}"
            ((whole, part),) = differing
            assert part == -(-whole // 4), f"{name}: of {written} each holds {shards[0]}"
    assert any(name.endswith("/exp_avg_sq") for name in after["moments"])
    assert not any(name.startswith("frozen") for name in after["moments"])


def test_tied_parameters_stay_one(results: dict[str, Any]) -> None:
    assert results["fabric"]["after"]["tied"]
    assert "out.weight" not in results["fabric"]["after"]["parameters"]


def test_a_tensor_plan_cuts_weights_along_the_second_axis(results: dict[str, Any]) -> None:
    after = results["two axes"]["after"]
    for of in (after["parameters"], {n.rpartition("/")[0]: s for n, s in after["moments"].items()}):
        assert of["blocks.0.up.weight"] == [(4, 3)] * 4, "7 × 6: its rows along 'model', its columns along 'fsdp'"
        assert of["blocks.0.down.weight"] == [(3, 4)] * 4, "6 × 7: its columns along 'model', its rows along 'fsdp'"
        assert of["blocks.0.up.bias"] == [(2,)] * 4, "its 7 elements along both"
        assert of["blocks.0.norm.weight"] == [(3,)] * 4, "not in the plan: along 'fsdp' alone"


def test_a_batch_that_does_not_divide_trains_rightly(results: dict[str, Any]) -> None:
    rows = dataset(BATCH + 7)
    net = new_net()
    optimizer, losses = sgd(net), []
    for part in (rows[:BATCH], rows[BATCH:]):
        loss = mse_loss(net(torch.stack([x for x, _ in part])), torch.stack([y for _, y in part]))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_training(results["uneven"], losses, net.state_dict())


def test_what_is_recomputed_draws_the_same_dropout(results: dict[str, Any]) -> None:
    once, twice = results["dropout"], results["dropout recomputed"]
    assert_same_training(twice, once["losses"], once["state"])
    assert abs(once["losses"][0] - results["fabric"]["losses"][0]) > 1e-3, "nothing was dropped"


def test_a_seed_counts_on_the_devices_too(results: dict[str, Any]) -> None:
    first, other, again = results["seeds"]
    assert first == again
    assert first != other


def test_units_may_take_keywords_and_give_nests_that_are_changed_in_place(results: dict[str, Any]) -> None:
    net: OfKeywords = of_keywords()
    optimizer, losses = sgd(net), []
    for x, y in global_batches(4):
        loss = mse_loss(net(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = results["keywords"]
    # torch itself updates batch statistics once more when it recomputes a BatchNorm; so does XLA
    statistics = {name for name in net.state_dict() if "running_" in name or "num_batches" in name}
    state = {name: value for name, value in net.state_dict().items() if name not in statistics}
    found = {**found, "state": {name: value for name, value in found["state"].items() if name not in statistics}}
    assert_same_training(found, losses, state)
    assert {m for m in net.modules() if isinstance(m, Block)}, "the case has blocks with 0-dim parameters"


def test_a_module_from_the_meta_device_is_initialised(results: dict[str, Any]) -> None:
    assert_same_training({**results["meta"], "losses": []}, [], results["meta"]["expected"])


def test_averaged_weights_are_in_shards_and_tied(results: dict[str, Any]) -> None:
    net = new_net()
    optimizer, seen = sgd(net), []
    for x, y in global_batches(3):
        mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append({name: value.clone() for name, value in net.state_dict().items()})
    mean = {name: sum(one[name] for one in seen) / 3 for name in seen[0]}
    found = results["averaged"]
    assert_same_training(found, train_plain(3, sgd)[0], mean)
    assert found["tied"]
    assert found["parts"] == [(2, 6)] * 4


def test_stages_follow_each_other(results: dict[str, Any]) -> None:
    found = results["stages"]
    net = new_net()
    losses, optimizer = [], sgd(net)
    for epoch in range(2):
        for x, y in global_batches(2):
            loss = mse_loss(net(x), y)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0:
            with torch.no_grad():
                mean = sum(mse_loss(net(x), y).item() for x, y in global_batches(2)) / 2
                predicted = torch.cat([net(x) for x, _ in global_batches(2)])
    assert_same_training(found, losses, net.state_dict())
    assert found["tested"] == pytest.approx(mean, abs=FP32_TOLERANCE)
    assert found["validated"] == pytest.approx(mean, abs=FP32_TOLERANCE)
    torch.testing.assert_close(found["predicted"], predicted, rtol=0, atol=FP32_TOLERANCE)
    assert not found["log"], "what the strategy puts on the module is left there"
