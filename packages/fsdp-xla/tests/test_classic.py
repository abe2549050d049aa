"""``xla_fsdp`` on XLA's CPU devices, against one unsharded process of plain torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.precision import XLAPrecision as FabricXLAPrecision
from lightning.pytorch.plugins.precision import XLAPrecision
from torch import nn
from torch.utils.data import DataLoader

import fsdp_core
from fsdp_core import load_state_dict
from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.testing.oracle import (
    FEATURES,
    FP32_TOLERANCE,
    HALF_TOLERANCE,
    Block,
    Trained,
    global_batches,
    momentum,
    new_net,
    train_plain,
)
from fsdp_core.testing.short_runs import run_steps
from fsdp_core.testing.state import full_state
from fsdp_xla.torch_xla_private.devices import compiled
from launching import STEPS, Launching, Module, devices, launch, loader, seen, trained, trainer


def assert_same(result: dict[str, Any], expected: Trained, tolerance: float = FP32_TOLERANCE) -> None:
    losses, weights = expected
    assert result["losses"] == pytest.approx(losses, abs=tolerance)
    got = {name.removeprefix("net."): value for name, value in result["weights"].items()}
    assert list(got) == list(weights)
    for name, value in weights.items():
        torch.testing.assert_close(
            got[name], value, atol=tolerance, rtol=0, msg=lambda told, name=name: f"{name}: {told}"
        )


def train(
    path: Path, options: dict[str, Any] | None = None, module: dict[str, Any] | None = None, more: Any = None
) -> Any:
    """What comes of a fit, with options of the strategy, and with arguments of the module and of the trainer."""
    return trained(path, options, module, **(more or {}))


#: Options of the strategy with which it trains as plain torch does; the conformance suite has others.
SAME: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "options": {"auto_wrap_policy": None, "reshard_after_forward": False},
    "flat": {"flatten_parameters": True, "auto_wrap_policy": {Block}},
    "root checkpointed": {"activation_checkpointing_policy": {Block}, "auto_wrap_policy": None},
    "async": {"async_save": True},
}


def assert_equal_shares(held: list[int], case: str) -> None:
    """Padded to 128 elements for each rank: of each parameter, or of all of a unit's together."""
    assert held[0] == held[1]
    sizes = [p.numel() for p in new_net().parameters()]
    want = sum(128 * -(-size // 256) for size in sizes)
    assert held[0] == want if case == "plain" else held[0] < want


@pytest.mark.parametrize("case", SAME)
def test_it_trains_as_plain_torch_does(launching: Launching, tmp_path: Path, case: str) -> None:
    result = launching.call(2, train, tmp_path / "run", SAME[case])
    assert_same(result, train_plain(STEPS, momentum))
    if case in ("plain", "flat"):
        assert_equal_shares(result["held"], case)
    if case == "plain":  # losses are logged as the mean over ranks
        assert result["metrics"]["loss"] == pytest.approx(result["losses"][-1], abs=FP32_TOLERANCE)


@pytest.mark.parametrize("world_size", [1, 4])
def test_accumulated_and_clipped_on_one_rank_and_on_four(launching: Launching, tmp_path: Path, world_size: int) -> None:
    """Of four, the last hold nothing but padding."""
    both = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    result = launching.call(world_size, train, tmp_path / "run", None, {}, both)
    assert_same(result, train_plain(STEPS, momentum, accumulate=2, clip_norm=0.1))


def by_full_name(path: Path) -> Any:
    trainer(path.parent, strategy="xla_fsdp_full", max_steps=1).fit(Module(path))


def test_the_name_for_full_checkpoints_saves_one_file_with_the_optimizer(launching: Launching, tmp_path: Path) -> None:
    launching.call(2, by_full_name, tmp_path / "run")
    saved = torch.load(tmp_path / "run", weights_only=True)
    assert [name.removeprefix("net.") for name in saved["state_dict"]] == list(new_net().state_dict())
    assert len(saved["optimizer_states"][0]["state"]) == sum(p.requires_grad for p in new_net().parameters())


class Changes(Module):
    """Batches of four shapes."""

    def train_dataloader(self) -> Any:
        batches: Any = [[one[:rows] for one in global_batches(1)[0]] for rows in (6, 5, 4, 3)]
        return DataLoader(batches, batch_size=None)


def changing_shapes(path: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(path.parent).fit(Changes(path))
    return [str(one.message) for one in caught if "different shapes" in str(one.message)]


def test_batches_that_keep_changing_shape_are_warned_of(launching: Launching, tmp_path: Path) -> None:
    warned = launching.call(2, changing_shapes, tmp_path / "run")
    assert len(warned) == 2  # once on each rank
    for words in ("'train' have had 4 different shapes", "(6, 6) and (6, 6), (5, 6)", "drop_last=True"):
        assert words in warned[0]


def test_bf16_mixed_computes_in_bf16_over_fp32_shards(launching: Launching, tmp_path: Path) -> None:
    result = launching.call(2, train, tmp_path / "run", None, {}, {"precision": "bf16-mixed"})
    losses, _ = train_plain(STEPS, momentum)
    assert result["losses"] == pytest.approx(losses, abs=HALF_TOLERANCE)
    assert result["losses"] != pytest.approx(losses, abs=FP32_TOLERANCE)  # or nothing was computed in bf16
    assert {weight.dtype for weight in result["weights"].values()} == {torch.float32}


def test_dropout_repeats_itself_when_activations_are_recomputed(launching: Launching, tmp_path: Path) -> None:
    module = {"optimizer": "sgd", "dropout": 0.5}
    result = launching.call(2, train, tmp_path / "run", {"activation_checkpointing_policy": {Block}}, module)
    plain = launching.call(2, train, tmp_path / "without", {}, module)
    assert_same(result, (plain["losses"], {n.removeprefix("net."): v for n, v in plain["weights"].items()}))
    assert result["losses"] != pytest.approx(train_plain(STEPS, momentum)[0], abs=1e-3)


def mlp() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, FEATURES))


def rows(path: Path) -> Any:
    def train(fabric: L.Fabric) -> Any:
        with fabric.init_module():
            net = mlp()
        net = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(momentum(net))
        run_steps(
            net,
            optimizer,
            fabric.setup_dataloaders(loader(fabric.global_rank, STEPS), use_distributed_sampler=False),
            fabric.backward,
        )
        fabric.save(path, {"model": net, "optimizer": optimizer})

    launch(train, auto_wrap_policy={nn.Linear}, shard_param_on_dim_0=True)


def test_shards_of_whole_rows(launching: Launching, tmp_path: Path) -> None:
    """Of which 7 and 6 are not divided evenly."""
    launching.call(2, rows, tmp_path / "rows")
    _, want = train_plain(STEPS, momentum, net=mlp())
    torch.testing.assert_close(dict(load_state_dict(tmp_path / "rows")), want, atol=FP32_TOLERANCE, rtol=0)


def gathered_weights() -> Any:
    def gather(fabric: L.Fabric) -> Any:
        with fabric.init_module():
            net = new_net()
        fabric.setup_module(net)
        return full_state(fabric.strategy), compiled._get_executed_fallback_ops()

    return launch(gather)


def test_gathering_weights_falls_back_to_no_operator_of_the_cpu(launching: Launching) -> None:
    """Where torch_xla has no kernel, its fallback counts the calls in a map that crashes if threads share it."""
    weights, fallbacks = launching.call(2, gathered_weights)
    torch.testing.assert_close(weights, dict(new_net().state_dict()), atol=0, rtol=0)
    assert "aten::view_copy.dtype" not in fallbacks


def collectives() -> Any:
    def talk(fabric: L.Fabric) -> Any:
        rank, ranks = fabric.global_rank, fabric.world_size
        fabric.setup_module(nn.Linear(2, 2))
        own = torch.tensor([float(rank), 1.0], device=fabric.device)
        mine = torch.tensor([2.0, 3.0]).to(fabric.device).requires_grad_()
        gathered = fabric.all_gather(mine, sync_grads=True)
        weights = torch.arange(2.0 * ranks).view(ranks, 2).to(fabric.device)
        (gathered * weights).sum().backward()
        return {
            "mean": fabric.all_reduce(own.clone()).tolist(),
            "sum": fabric.all_reduce(own.clone(), reduce_op="sum").tolist(),
            "gathered": fabric.all_gather(own).tolist(),
            "grad": mine.grad.tolist(),
            "path": str(fabric.broadcast(Path(f"rank-{rank}"), src=ranks - 1)),
            "object": fabric.broadcast({"rank": rank}),
        }

    return launch(talk)


def test_collectives(launching: Launching) -> None:
    assert launching.call(2, collectives) == {
        "mean": [0.5, 1.0],
        "sum": [1.0, 2.0],
        "gathered": [[0.0, 1.0], [1.0, 1.0]],
        # each rank weighs what it gathered by 0, 1 and 2, 3; the gradient is the sum of what both made of it
        "grad": [0.0, 2.0],
        "path": "rank-1",
        "object": {"rank": 0},
    }


def as_lightnings(path: Path) -> Any:
    """Written for Fabric's own XLAFSDPStrategy: its precision object, contexts and signatures."""
    from torch.distributed.fsdp.wrap import wrap

    def train(fabric: L.Fabric) -> Any:
        strategy: Any = fabric.strategy
        rank = fabric.global_rank
        with strategy.module_init_context(), strategy.module_sharded_context():
            net: Any = mlp()
            net[2] = wrap(net[2])
        strategy.barrier("built", "whatever", timeout=1)
        fabric.save(path, {"model": fabric.setup_module(net)})
        own = torch.tensor([float(rank), 1.0], device=fabric.device)
        return {
            "summed": strategy.all_reduce(output=own.clone()).tolist(),
            "in place": strategy.all_reduce(own, None, "mean") is own,
            "numbers": [strategy.all_reduce(rank + 1).item(), strategy.all_reduce(output=0.5, reduce_op=None).item()],
            "means": [strategy.all_reduce(rank, reduce_op="avg").item(), strategy.all_reduce(rank, None, "max").item()],
            "precision": strategy.precision.precision,
        }

    return launch(train, precision=FabricXLAPrecision("32-true"), auto_wrap_policy=None)


def test_what_is_written_for_lightnings_strategy_of_this_name(launching: Launching, tmp_path: Path) -> None:
    assert launching.call(2, as_lightnings, tmp_path / "as-lightnings") == {
        "summed": [1.0, 2.0],
        "in place": True,
        "numbers": [3, 1.0],
        "means": [0.5, 1],
        "precision": "32-true",
    }
    weights, plain = load_state_dict(tmp_path / "as-lightnings"), mlp().state_dict()
    assert weights.keys() == plain.keys()
    assert all(torch.equal(weights[name], value) for name, value in plain.items())


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


class Buffers(nn.Module):
    """Buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            self.register_buffer(f"in_{dtype}".replace("torch.", ""), torch.arange(3).to(dtype))

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)


def buffers(path: Path) -> None:
    def save(fabric: L.Fabric) -> None:
        fabric.save(path, {"model": fabric.setup_module(Buffers())})

    L.Fabric(strategy="xla_fsdp", devices=devices(), precision="bf16-mixed").launch(save)


def test_buffers_keep_their_dtypes(launching: Launching, tmp_path: Path) -> None:
    launching.call(2, buffers, tmp_path / "buffers")
    found = {name: value for name, value in load_state_dict(tmp_path / "buffers").items() if "linear" not in name}
    assert len(found) == 3
    for name, value in found.items():
        assert value.dtype == getattr(torch, name.removeprefix("in_"))
        assert value.tolist() == [0, 1, 2]


class SavesAmid(Module):
    """Saves when one of two micro-batches has been accumulated."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.save_checkpoint(f"{self.path}-amid")


def amid(folder: Path, options: dict[str, Any]) -> Any:
    """A whole run, and one that goes on from what it saved amid an accumulation."""
    results = []
    for path, start in ((folder / "whole", None), (folder / "on", str(folder / "whole-amid"))):
        L.seed_everything(3, verbose=False)
        trainer(folder, options, accumulate_grad_batches=2).fit(SavesAmid(path), ckpt_path=start)
        results.append({**seen[str(path)][0], "weights": load_state_dict(path)})
    return results


@pytest.mark.parametrize("options", [{}, {"flatten_parameters": True}], ids=["amid", "amid-flat"])
def test_a_checkpoint_amid_an_accumulation_holds_what_waits(
    launching: Launching, tmp_path: Path, options: dict[str, Any]
) -> None:
    whole, on = launching.call(2, amid, tmp_path, options)
    assert on["losses"] == whole["losses"][3:]
    for name, value in whole["weights"].items():
        assert torch.equal(on["weights"][name], value), name


class Compiles(L.Callback):
    """How many programs had been compiled after each batch, and after each validation."""

    def __init__(self) -> None:
        self.after: list[tuple[str, int]] = []

    def note(self, what: str) -> None:
        import torch_xla.debug.metrics as metrics

        self.after.append((what, metrics.counter_value("UncachedCompile") or 0))

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.note(f"epoch {trainer.current_epoch} batch {args[-1]}")

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.note(f"epoch {trainer.current_epoch} validation")

    def on_fit_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_rank == 0:
            seen["compiles"] = {0: self.after}


class Logs(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss


def compiles(folder: Path) -> Any:
    """With progress bar, logging, accumulation, validation and checkpoints on."""
    stage = trainer(
        folder,
        max_epochs=3,
        accumulate_grad_batches=2,
        limit_val_batches=1.0,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
        enable_progress_bar=True,
        log_every_n_steps=1,
        callbacks=[Compiles(), L.pytorch.callbacks.ModelCheckpoint(folder / "of-compiles", save_top_k=-1)],
    )
    stage.fit(Logs(folder / "end", "adamw_groups", 6))
    return seen["compiles"][0]


def test_nothing_is_compiled_after_the_second_epochs_first_batch(afresh: Launching, tmp_path: Path) -> None:
    counts = dict(afresh.call(2, compiles, tmp_path))
    assert counts["epoch 2 validation"] == counts["epoch 1 batch 0"]
    assert counts["epoch 0 batch 5"] == counts["epoch 0 batch 1"], "a cycle is two micro-batches and a step"


def lost_weights(path: Path) -> None:
    stage, module = trainer(path.parent), Module(path)
    stage.fit(module)
    stage.test(module)


def saved_too_late(path: Path) -> None:
    stage = trainer(path.parent)
    stage.fit(Module(path))
    stage.save_checkpoint(f"{path}-too-late")


def in_bf16(path: Path) -> None:
    trained(path, precision="bf16-true")


def on_another_number(_: Path) -> None:
    L.Trainer(strategy="xla_fsdp", devices=devices() + 1)


def foreign_optimizer(_: Path) -> None:
    def train(fabric: L.Fabric) -> Any:
        fabric.setup_module(new_net())
        fabric.setup_optimizers(momentum(new_net()))

    launch(train)


def set_up(_: Path, new_module: Callable[[], nn.Module] = new_net, **options: Any) -> None:
    net = new_module()
    launch(lambda fabric: fabric.setup_module(net) and None, **options)


def without_forward() -> nn.Module:
    return nn.ModuleDict({"linear": nn.Linear(2, 2)})


def in_half() -> nn.Module:
    return new_net().half()


def no_function(_: Path) -> None:
    L.Fabric(strategy="xla_fsdp", devices=devices()).launch()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (lost_weights, ["trainer.test()", "ckpt_path='best'"]),
        (saved_too_late, ["outside the ranks", "on_train_end()"]),
        (in_bf16, ["keeps its shards in fp32", "precision='bf16-mixed'", "xla_fsdp_spmd"]),
        (on_another_number, ["devices=3 was requested", "CPU_NUM_DEVICES=2", "devices=2"]),
        (foreign_optimizer, ["none of the sharded model's", "fabric.setup(model, optimizer)"]),
        (partial(set_up, auto_wrap_policy={nn.Conv2d}), ["matches no submodule of Net", "{MyBlock}"]),
        (partial(set_up, new_module=without_forward), ["ModuleDict has no forward()", "Write a forward()"]),
        (partial(set_up, new_module=in_half), ["torch.float16", "precision='bf16-mixed'"]),
        (partial(set_up, shard_param_on_dim_0=True), ["'blocks.0.gain' is 0-dim", "Leave shard_param_on_dim_0 out"]),
        (
            partial(set_up, sharding_strategy="FULL_SHARD"),
            ["no option 'sharding_strategy'", "reshard_after_forward=True"],
        ),
        (
            partial(set_up, auto_wrapper_callable=None),
            ["no option 'auto_wrapper_callable'", "activation_checkpointing_policy={MyBlock}"],
        ),
        (no_function, ["needs to be called with a function"]),
    ],
)
def test_what_is_refused_says_what_to_write(launching: Launching, tmp_path: Path, case: Any, words: list[str]) -> None:
    launching.assert_error(2, words, case, tmp_path / "run")


class Raises(Module):
    """Fails on the last rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.trainer.global_rank == devices() - 1:
            raise ValueError("this rank has had enough")
        return super().training_step(batch, batch_idx)


def raising_rank(path: Path) -> None:
    trainer(path.parent).fit(Raises(path))


def test_when_a_rank_has_failed_alone_no_rank_runs_in_its_process_again(afresh: Launching, tmp_path: Path) -> None:
    assert "ValueError: this rank has had enough" in afresh.error(2, raising_rank, tmp_path / "raises")
    words = ("has failed in this process before", "Restart Python")
    afresh.assert_error(2, words, train, tmp_path / "after-that")
