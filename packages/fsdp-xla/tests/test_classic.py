"""``xla_fsdp`` on XLA's CPU devices, against one unsharded process of plain torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.precision import XLAPrecision as FabricXLAPrecision
from lightning.pytorch.plugins.precision import XLAPrecision
from torch import nn
from torch.nn.functional import mse_loss

import fsdp_core
from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.testing.oracle import (
    FEATURES,
    FP32_TOLERANCE,
    HALF_TOLERANCE,
    RESUME_TOLERANCE,
    Trained,
    adamw_groups,
    global_batches,
    momentum,
    new_net,
    train_plain,
)
from xla_process import error, ok, run_script

STEPS = 4

#: What trains as plain torch does, and with what arguments of :func:`train_plain`.
SAME: dict[str, dict[str, Any]] = {
    "plain": {},
    "options": {},
    "flat": {},
    "checkpointed": {},
    "root checkpointed": {},
    "full": {},
    "async": {},
    "accumulated": {"accumulate": 2},
    "clipped": {"clip_norm": 0.1},
    "clipped by value": {"clip_value": 0.01},
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case, on two ranks."""
    return run_script("classic_runs.py", 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module", params=[1, 4])
def other_worlds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, Any]]:
    """Some cases, on one rank and on four, of which the last hold nothing but padding."""
    cases = ("plain", "accumulated", "clipped", "resumed", "fabric")
    folder = tmp_path_factory.mktemp(f"world-{request.param}")
    return request.param, run_script("classic_runs.py", request.param, folder, *cases)


def assert_same(result: dict[str, Any], expected: Trained, tolerance: float = FP32_TOLERANCE) -> None:
    losses, weights = expected
    assert result["losses"] == pytest.approx(losses, abs=tolerance)
    got = {name.removeprefix("net."): value for name, value in result["weights"].items()}
    assert list(got) == list(weights)
    for name, value in weights.items():
        torch.testing.assert_close(
            got[name], value, atol=tolerance, rtol=0, msg=lambda told, name=name: f"{name}: {told}"
        )


@pytest.mark.parametrize("case", SAME)
def test_it_trains_as_plain_torch_does(two: dict[str, Any], case: str) -> None:
    assert_same(ok(two, case), train_plain(STEPS, momentum, **SAME[case]))


@pytest.mark.parametrize("case", ["plain", "accumulated", "clipped"])
def test_on_one_rank_and_on_four(other_worlds: tuple[int, dict[str, Any]], case: str) -> None:
    assert_same(ok(other_worlds[1], case), train_plain(STEPS, momentum, **SAME[case]))


@pytest.mark.parametrize("case", ["plain", "flat"])
def test_ranks_hold_equal_shares(two: dict[str, Any], case: str) -> None:
    """Padded to 128 elements for each rank: of each parameter, or of all of a unit's together."""
    held = ok(two, case)["held"]
    assert held[0] == held[1]
    sizes = [p.numel() for p in new_net().parameters()]
    want = sum(128 * -(-size // 256) for size in sizes)
    assert held[0] == want if case == "plain" else held[0] < want


def test_the_name_for_full_checkpoints_saves_one_file_with_the_optimizer(two: dict[str, Any]) -> None:
    result = ok(two, "full name")
    assert [name.removeprefix("net.") for name in result["weights"]] == list(new_net().state_dict())
    assert result["optimizer"] == sum(p.requires_grad for p in new_net().parameters())


def test_batches_that_keep_changing_shape_are_warned_of(two: dict[str, Any]) -> None:
    warned = ok(two, "changing shapes")
    assert len(warned) == 2  # once on each rank
    for words in ("'train' have had 4 different shapes", "(6, 6) and (6, 6), (5, 6)", "drop_last=True"):
        assert words in warned[0]


def test_losses_are_logged_as_the_mean_over_ranks(two: dict[str, Any]) -> None:
    result = ok(two, "plain")
    assert result["metrics"]["loss"] == pytest.approx(result["losses"][-1], abs=FP32_TOLERANCE)


def test_bf16_mixed_computes_in_bf16_over_fp32_shards(two: dict[str, Any]) -> None:
    result, (losses, _) = ok(two, "bf16"), train_plain(STEPS, momentum)
    assert result["losses"] == pytest.approx(losses, abs=HALF_TOLERANCE)
    assert result["losses"] != pytest.approx(losses, abs=FP32_TOLERANCE)  # or nothing was computed in bf16
    assert {weight.dtype for weight in result["weights"].values()} == {torch.float32}


def test_dropout_repeats_itself_when_activations_are_recomputed(two: dict[str, Any]) -> None:
    result, plain = ok(two, "dropout"), ok(two, "dropout without")
    assert_same(result, (plain["losses"], {n.removeprefix("net."): v for n, v in plain["weights"].items()}))
    assert result["losses"] != pytest.approx(train_plain(STEPS, momentum)[0], abs=1e-3)


def test_shards_of_whole_rows(two: dict[str, Any]) -> None:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, FEATURES))
    optimizer = momentum(net)
    for x, y in global_batches(STEPS):
        mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in ok(two, "rows")["weights"].items():
        torch.testing.assert_close(value, net.state_dict()[name], atol=FP32_TOLERANCE, rtol=0)


def test_a_model_built_on_the_meta_device_is_filled_as_it_is_elsewhere(two: dict[str, Any]) -> None:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, FEATURES))
    for name, value in ok(two, "from meta")["weights"].items():
        assert torch.equal(value, net.state_dict()[name]), name


def assert_fabric(result: dict[str, Any]) -> None:
    assert_same(result, train_plain(STEPS, momentum, clip_norm=0.5))
    assert (result["step"], result["same"]) == (STEPS, 0.0)


def test_fabric_trains_saves_and_loads(two: dict[str, Any]) -> None:
    assert_fabric(ok(two, "fabric"))


def test_fabric_on_one_rank_and_on_four(other_worlds: tuple[int, dict[str, Any]]) -> None:
    assert_fabric(ok(other_worlds[1], "fabric"))


def test_an_optimizer_from_before_the_set_up_follows_its_parameters(two: dict[str, Any]) -> None:
    assert ok(two, "joint setup") == pytest.approx(train_plain(STEPS, momentum)[0], abs=FP32_TOLERANCE)


def test_collectives(two: dict[str, Any]) -> None:
    assert ok(two, "collectives") == {
        "mean": [0.5, 1.0],
        "sum": [1.0, 2.0],
        "gathered": [[0.0, 1.0], [1.0, 1.0]],
        # each rank weighs what it gathered by 0, 1 and 2, 3; the gradient is the sum of what both made of it
        "grad": [0.0, 2.0],
        "path": "rank-1",
        "object": {"rank": 0},
    }


def test_what_is_written_for_lightnings_strategy_of_this_name(two: dict[str, Any]) -> None:
    result = ok(two, "as Lightning's")
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, FEATURES)).state_dict()
    weights = result.pop("weights")
    assert weights.keys() == plain.keys()
    assert all(torch.equal(weights[name], value) for name, value in plain.items())
    assert result == {
        "summed": [1.0, 2.0],
        "in place": True,
        "numbers": [3, 1.0],
        "means": [0.5, 1],
        "precision": "32-true",
    }


@pytest.mark.parametrize("made", [FabricXLAPrecision, XLAPrecision])
def test_lightnings_xla_precision_means_its_string(monkeypatch: pytest.MonkeyPatch, made: type[Any]) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    front_end = "fabric" if made is FabricXLAPrecision else "trainer"
    option = "precision" if front_end == "fabric" else "precision_plugin"
    strategy: Any = fsdp_core.resolve("xla_fsdp_spmd", front_end)(**{option: made("bf16-true")})
    assert strategy.shard_precision.storage is torch.bfloat16
    with pytest.raises(UnsupportedCapabilityError, match="precision='bf16-true' can't be used with 'xla_fsdp'"):
        fsdp_core.resolve("xla_fsdp", front_end)(precision=made("bf16-true"))
    assert "XLA_USE_BF16" not in os.environ  # XLA would compute all that is fp32 in bf16


def test_stages_from_a_checkpoint(two: dict[str, Any]) -> None:
    result = ok(two, "stages")
    assert result["validate"] == result["fit"] == result["test"]


def assert_resumed(result: dict[str, Any]) -> None:
    on, whole = result["on"], result["whole"]
    assert on["losses"] == whole["losses"][3:]  # bit for bit on the same layout
    for name, value in whole["weights"].items():
        assert torch.equal(on["weights"][name], value), name
    assert whole["losses"][:3] == pytest.approx(train_plain(3, adamw_groups)[0], abs=RESUME_TOLERANCE)


def test_resuming_repeats_the_very_same_losses(two: dict[str, Any]) -> None:
    assert_resumed(ok(two, "resumed"))


def test_resuming_goes_on_with_the_random_numbers_of_dropout(two: dict[str, Any]) -> None:
    result = ok(two, "resumed with dropout")
    assert result["on"]["losses"] == result["whole"]["losses"][3:]


def test_buffers_keep_their_dtypes(two: dict[str, Any]) -> None:
    for name, value in ok(two, "buffers").items():
        assert value.dtype == getattr(torch, name.removeprefix("in_"))
        assert value.tolist() == [0, 1, 2]


def test_resuming_on_one_rank_and_on_four(other_worlds: tuple[int, dict[str, Any]]) -> None:
    assert_resumed(ok(other_worlds[1], "resumed"))


@pytest.mark.parametrize("run", ["amid", "amid-flat"])
def test_a_checkpoint_amid_an_accumulation_holds_what_waits(two: dict[str, Any], run: str) -> None:
    whole, on = (ok(two, "amid")[f"{run}-{stage}"] for stage in ("whole", "on"))
    assert on["losses"] == whole["losses"][3:]
    for name, value in whole["weights"].items():
        assert torch.equal(on["weights"][name], value), name


def test_nothing_is_compiled_after_the_second_epochs_first_batch(two: dict[str, Any]) -> None:
    counts = dict(ok(two, "compiles")["after"])
    assert counts["epoch 2 validation"] == counts["epoch 1 batch 0"]
    assert counts["epoch 0 batch 5"] == counts["epoch 0 batch 1"], "a cycle is two micro-batches and a step"


REFUSED: dict[str, tuple[str, ...]] = {
    "lost weights": ("trainer.test()", "ckpt_path='best'"),
    "saved too late": ("where no rank runs", "on_train_end()"),
    "bf16-true": ("keeps its shards in fp32", "precision='bf16-mixed'", "xla_fsdp_spmd"),
    "other number": ("devices=3 was asked for", "CPU_NUM_DEVICES=2", "devices=2"),
    "foreign optimizer": ("none of the sharded model's", "fabric.setup(model, optimizer)"),
    "no match": ("matches no submodule of Net", "{MyBlock}"),
    "no forward": ("ModuleDict has no forward()", "Write a forward()"),
    "half": ("torch.float16", "precision='bf16-mixed'"),
    "0-dim rows": ("'blocks.0.gain' is 0-dim", "Leave shard_param_on_dim_0 out"),
    "torch's option": ("no option 'sharding_strategy'", "reshard_after_forward=True"),
    "wrapper": ("no option 'auto_wrapper_callable'", "activation_checkpointing_policy={MyBlock}"),
    "no function": ("needs to be called with a function",),
    "raising rank": ("ValueError: this rank has had enough",),
    "after that": ("has failed in this process before", "Start Python anew"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_what_to_write(two: dict[str, Any], case: str) -> None:
    told = error(two, case)
    for words in REFUSED[case]:
        assert words in told
