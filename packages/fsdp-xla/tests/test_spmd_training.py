"""xla_fsdp_spmd trains as one unsharded process of plain torch does, with a quarter of everything on each device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from fsdp_core.testing.oracle import (
    BATCH,
    FP32_TOLERANCE,
    HALF_TOLERANCE,
    Block,
    adamw_groups,
    dataset,
    global_batches,
    new_net,
    sgd,
    train_plain,
)
from fsdp_core.testing.short_runs import run_steps
from fsdp_core.testing.training import Lit, loader
from launching import LaunchingSPMD
from spmd_runs import fabric_fit, fit, moments, new_fabric, new_trainer, shapes, whole_state

DEVICES = 4
RECOMPUTED: dict[str, Any] = {"activation_checkpointing_policy": {Block}}


def assert_same_training(
    found: dict[str, Any], losses: list[float], state: dict[str, Tensor], tolerance: float = FP32_TOLERANCE
) -> None:
    torch.testing.assert_close(found["losses"], losses, rtol=0, atol=tolerance)
    assert found["state"].keys() == state.keys()
    for name, value in state.items():
        difference = float((found["state"][name].float() - value.float()).abs().max())
        assert difference <= tolerance, f"{name} differs by {difference}"


def looked_at(fabric: Any, net: nn.Module, optimizer: Any) -> dict[str, Any]:
    parameters = dict(net.named_parameters())
    return {
        "parameters": shapes(parameters),
        "moments": shapes(moments(net, optimizer)),
        "written": {name: tuple(p.shape) for name, p in parameters.items()},
        "tied": net.get_submodule("out").weight is net.get_submodule("inp").weight,
    }


def under_fabric(arguments: dict[str, Any]) -> dict[str, Any]:
    return fabric_fit(**arguments, after=looked_at)


def gradients_read_after_clipping() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The gradients as they are after clipping, and the weights after the step, of two orders of the norm."""
    found = []
    for order in (2.0, float("inf")):
        fabric = new_fabric()
        net = new_net()
        model, optimizer = fabric.setup(net, sgd(net))
        x, y = (fabric.to_device(one) for one in global_batches(1)[0])
        fabric.backward(mse_loss(model(x), y))
        fabric.clip_gradients(model, optimizer, max_norm=0.05, norm_type=order)
        named = dict(net.named_parameters())
        gradients = {name: p.grad.cpu() for name, p in named.items() if p.grad is not None}  # one by one
        optimizer.step()
        found.append((gradients, {name: p.detach().cpu() for name, p in named.items()}))
    return found


def test_gradients_that_are_read_after_clipping(spmd: LaunchingSPMD) -> None:
    """torch_xla mixed them up, and the step took what was read."""
    found = spmd.call(DEVICES, gradients_read_after_clipping)
    for order, (gradients, weights) in zip((2.0, float("inf")), found, strict=True):
        net = new_net()
        optimizer = sgd(net)
        x, y = global_batches(1)[0]
        mse_loss(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05, order)
        want = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        torch.testing.assert_close(gradients, want, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)
        optimizer.step()
        want = {name: p.detach() for name, p in net.named_parameters()}
        torch.testing.assert_close(weights, want, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)


def assert_quarters(after: dict[str, Any]) -> None:
    """Each device holds a quarter of each parameter and moment."""
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


@pytest.fixture(scope="module")
def plain(spmd: LaunchingSPMD) -> dict[str, Any]:
    """A run under Fabric without options."""
    found: dict[str, Any] = spmd.call(DEVICES, under_fabric, {})
    return found


def test_each_device_holds_a_quarter(plain: dict[str, Any]) -> None:
    assert_quarters(plain["after"])


def test_each_device_holds_a_quarter_of_what_is_recomputed_without_units(spmd: LaunchingSPMD) -> None:
    options = {**RECOMPUTED, "auto_wrap_policy": None}
    found = spmd.call(DEVICES, under_fabric, {"options": options, "accumulate": 2})
    assert_same_training(found, *train_plain(4, adamw_groups, accumulate=2))
    assert_quarters(found["after"])


def test_tied_parameters_stay_one(plain: dict[str, Any]) -> None:
    assert plain["after"]["tied"]
    assert "out.weight" not in plain["after"]["parameters"]


def assert_same_but_for_rounding(found: dict[str, Any], plain: dict[str, Any], stored: torch.dtype) -> None:
    assert_same_training(found, *train_plain(4, adamw_groups), HALF_TOLERANCE)
    assert {value.dtype for value in found["state"].values()} == {stored}
    assert found["losses"] != plain["losses"], "nothing was computed in bf16"


def test_fabric_trains_in_half_precision_over_quarters_in_fp32(spmd: LaunchingSPMD, plain: dict[str, Any]) -> None:
    found = spmd.call(DEVICES, under_fabric, {"precision": "bf16-mixed"})
    assert_same_but_for_rounding(found, plain, torch.float32)
    assert_quarters(found["after"])


def test_a_tensor_plan_cuts_weights_along_the_second_axis(spmd: LaunchingSPMD) -> None:
    plan = {"blocks.*.up.*": 0, "blocks.*.down.weight": 1}
    options = {"tensor_parallel_size": 2, "tensor_plan": plan, **RECOMPUTED}
    found = spmd.call(DEVICES, under_fabric, {"options": options})
    assert_same_training(found, *train_plain(4, adamw_groups))
    after = found["after"]
    for of in (after["parameters"], {n.rpartition("/")[0]: s for n, s in after["moments"].items()}):
        assert of["blocks.0.up.weight"] == [(4, 3)] * 4, "7 × 6: its rows along 'model', its columns along 'fsdp'"
        assert of["blocks.0.down.weight"] == [(3, 4)] * 4, "6 × 7: its columns along 'model', its rows along 'fsdp'"
        assert of["blocks.0.up.bias"] == [(2,)] * 4, "its 7 elements along both"
        assert of["blocks.0.norm.weight"] == [(3,)] * 4, "not in the plan: along 'fsdp' alone"


def uneven(tmp: str) -> dict[str, Any]:
    """A batch of 12 rows, and one of 7: no multiple of 4."""
    data: Any = dataset(BATCH + 7)
    return fit(tmp, optimizer="sgd", data=DataLoader(data, batch_size=BATCH), use_distributed_sampler=False)


def test_a_batch_that_does_not_divide_trains_rightly(spmd: LaunchingSPMD, tmp_path: Any) -> None:
    found = spmd.call(DEVICES, uneven, str(tmp_path))
    rows = dataset(BATCH + 7)
    parts = rows[:BATCH], rows[BATCH:]
    batches = [(torch.stack([x for x, _ in part]), torch.stack([y for _, y in part])) for part in parts]
    net = new_net()
    losses = [loss.item() for loss in run_steps(net, sgd(net), batches)]
    assert_same_training(found, losses, net.state_dict())


def with_dropout(options: dict[str, Any]) -> dict[str, Any]:
    fabric: Any = new_fabric(options)
    fabric.strategy.runtime.set_device_random_state(5)
    net = new_net(dropout=0.5)
    model, optimizer = fabric.setup(net, sgd(net))
    losses = run_steps(model, optimizer, fabric.setup_dataloaders(loader(1, 1)), fabric.backward)
    return {"losses": [x.item() for x in losses], "state": whole_state(fabric.strategy, net)}


def test_what_is_recomputed_draws_the_same_dropout(spmd: LaunchingSPMD, plain: dict[str, Any]) -> None:
    once, twice = (spmd.call(DEVICES, with_dropout, options) for options in ({}, RECOMPUTED))
    assert_same_training(twice, once["losses"], once["state"])
    assert abs(once["losses"][0] - plain["losses"][0]) > 1e-3, "nothing was dropped"


def seeded(seed: int) -> float:
    fabric, net = new_fabric(), new_net(dropout=0.5)  # which seeds, too
    torch.manual_seed(seed)
    model = fabric.setup(net)
    ((x, y),) = fabric.setup_dataloaders(loader(1, 1))
    return mse_loss(model(x), y).item()


def test_a_seed_counts_on_the_devices_too(spmd: LaunchingSPMD) -> None:
    first, other, again = [spmd.call(DEVICES, seeded, seed) for seed in (21, 22, 21)]
    assert first == again
    assert first != other


class Keywords(nn.Module):
    """A block with keyword arguments, a nested output, and an input that requires no gradient; and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Block(), nn.BatchNorm1d(6)

    def forward(self, *, x: torch.Tensor, scale: float) -> dict[str, Any]:
        return {"out": [self.norm(self.inner(x)) * scale], "scale": scale}


class OfKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Keywords(), Keywords()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x=x, scale=2.0)["out"][0]
            x.add_(1)  # in place, on what a unit has returned
        return x


def of_keywords() -> OfKeywords:
    torch.manual_seed(3)
    return OfKeywords()


def with_keywords() -> dict[str, Any]:
    options = {"auto_wrap_policy": {Keywords}, "activation_checkpointing_policy": {Keywords}}
    return fabric_fit(optimizer="sgd", net=of_keywords(), options=options)


def test_units_may_take_keywords_and_give_nests_that_are_changed_in_place(spmd: LaunchingSPMD) -> None:
    net = of_keywords()
    losses, want = train_plain(4, sgd, net=net)
    found = spmd.call(DEVICES, with_keywords)
    # torch itself updates batch statistics once more when it recomputes a BatchNorm; so does XLA
    statistics = {name for name in want if "running_" in name or "num_batches" in name}
    state = {name: value for name, value in want.items() if name not in statistics}
    found = {**found, "state": {name: value for name, value in found["state"].items() if name not in statistics}}
    assert_same_training(found, losses, state)
    assert {m for m in net.modules() if isinstance(m, Block)}, "the case has blocks with 0-dim parameters"


def averaged(tmp: str) -> dict[str, Any]:
    """The mean of the weights after each step, which Lightning keeps in a copy and swaps in at the end."""
    average = WeightAveraging()
    module = Lit("sgd")
    trainer = new_trainer(tmp, callbacks=[average])
    trainer.fit(module, loader(3, 1))
    state = whole_state(trainer.strategy, module)
    copy: Any = average._average_model
    return {
        "losses": [x.item() for x in module.losses],
        "state": {name.removeprefix("net."): value for name, value in state.items()},
        "tied": copy.module.net.out.weight is copy.module.net.inp.weight,
        "parts": shapes({"up": copy.module.net.blocks[0].up.weight})["up"],
    }


def test_averaged_weights_are_in_shards_and_tied(spmd: LaunchingSPMD, tmp_path: Any) -> None:
    net = new_net()
    optimizer, seen = sgd(net), []
    for batch in global_batches(3):
        run_steps(net, optimizer, [batch])
        seen.append({name: value.clone() for name, value in net.state_dict().items()})
    mean = {name: sum(one[name] for one in seen) / 3 for name in seen[0]}
    found = spmd.call(DEVICES, averaged, str(tmp_path))
    assert_same_training(found, train_plain(3, sgd)[0], mean)
    assert found["tied"]
    assert found["parts"] == [(2, 6)] * 4


def stages(tmp: str) -> dict[str, Any]:
    """Several stages with one module and one Trainer, and a second Trainer."""
    module, data = Lit("sgd"), loader(2, 1)
    trainer = new_trainer(tmp)
    trainer.fit(module, data, loader(1, 1))
    tested = trainer.test(module, data, verbose=False)[0]["test_loss"]
    validated = trainer.validate(module, data, verbose=False)[0]["val_loss"]
    predicted: Any = trainer.predict(module, data)
    again = new_trainer(tmp, max_epochs=1)
    again.fit(module, data)
    return {
        "losses": [x.item() for x in module.losses],
        "tested": tested,
        "validated": validated,
        "predicted": torch.cat([p.cpu() for p in predicted]),
        "state": {name.removeprefix("net."): v for name, v in whole_state(again.strategy, module).items()},
        "log": "log" in vars(module),
    }


def test_stages_follow_each_other(spmd: LaunchingSPMD, tmp_path: Any) -> None:
    found = spmd.call(DEVICES, stages, str(tmp_path))
    net = new_net()
    optimizer, batches = sgd(net), global_batches(2)
    losses = run_steps(net, optimizer, batches)
    with torch.no_grad():
        mean = sum(mse_loss(net(x), y).item() for x, y in batches) / 2
        predicted = torch.cat([net(x) for x, _ in batches])
    losses = [loss.item() for loss in [*losses, *run_steps(net, optimizer, batches)]]
    assert_same_training(found, losses, net.state_dict())
    assert found["tested"] == pytest.approx(mean, abs=FP32_TOLERANCE)
    assert found["validated"] == pytest.approx(mean, abs=FP32_TOLERANCE)
    torch.testing.assert_close(found["predicted"], predicted, rtol=0, atol=FP32_TOLERANCE)
    assert not found["log"], "what the strategy puts on the module is left there"
