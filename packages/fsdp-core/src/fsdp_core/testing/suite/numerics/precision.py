"""The dtypes that a precision string selects for shards, computation and reduction; gradient scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import FEATURES, HALF_TOLERANCE
from fsdp_core.testing.state import full_state, local, poison_gradient, trained_by
from fsdp_core.testing.suite.base_class import Clauses, on_ranks, precisions, requires
from fsdp_core.testing.training import Lit, fit_module, loader, means, new_trainer

__all__ = ["DTYPES", "PrecisionSuite", "seen_by_a_block"]

#: By precision string, the dtypes in which shards are stored and blocks compute.
DTYPES = {
    "32-true": (torch.float32, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
    "16-true": (torch.float16, torch.float16),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
}


class DtypeRecorder(Lit):
    """Records the dtypes of a block's weight, input, output, shards and gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dtypes: dict[str, Any] = {}
        self.net.blocks[1].register_forward_pre_hook(self.record_inputs)
        self.net.blocks[1].up.register_forward_hook(self.record_output)

    def record_inputs(self, block: Any, args: Any) -> None:
        """Called before a forward pass of the block."""
        self.dtypes |= {"weight": block.up.weight.dtype, "input": args[0].dtype}

    def record_output(self, layer: Any, args: Any, output: Any) -> None:
        """Called after a forward pass of a layer of the block."""
        self.dtypes["output"] = output.dtype

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parameters = trained_by(optimizer)
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        assert all(torch.isfinite(grad.cpu()).all() for grad in grads)  # on XLA, each check would be a program
        self.dtypes |= {"shards": {p.dtype for p in parameters}, "grads": {grad.dtype for grad in grads}}


def seen_by_a_block(strategy: str, tmp: str, precision: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Fit on two ranks; return the losses, and the dtypes that :class:`DtypeRecorder` has recorded."""
    module = DtypeRecorder("sgd")
    losses, _ = fit_module(strategy, tmp, module, 3, options=options, precision=precision, gradient_clip_val=10.0)
    return {"losses": losses, **module.dtypes}


class CalledInParts(Lit):
    """A module whose step calls the module itself, its net, or each layer of the net."""

    def __init__(self, callee: str) -> None:
        super().__init__("momentum")
        self.callee = callee
        with oracle.seeded(1):
            self.net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Only inputs are cast: targets stay in fp32."""
        x, y = batch
        if self.callee == "the module":
            x = self(x)
        elif self.callee == "its net":
            x = self.net(x)
        else:
            for layer in self.net:
                x = layer(x)
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert y.dtype is torch.float32
        loss = mse_loss(x.to(y.dtype), y)  # before torch 2.13, mse_loss of two dtypes has no backward pass
        self.losses.append(loss.detach())
        return loss


def trained_by_parts(strategy: str, tmp: str, options: dict[str, Any]) -> dict[str, tuple[list[float], dict[str, Any]]]:
    """For each callee of the step, the losses and weights after training on fp32 inputs."""
    calls = ("the module", "its net", "each layer")
    return {callee: fit_module(strategy, tmp, CalledInParts(callee), 3, options=options) for callee in calls}


def assert_parts_equal(trained: dict[str, tuple[list[float], dict[str, Any]]]) -> None:
    """Whatever the step called, losses and weights must be the same to the bit."""
    losses, weights = trained["the module"]
    for callee, (other_losses, state) in trained.items():
        assert other_losses == losses, callee
        assert all(torch.equal(state[name], tensor) for name, tensor in weights.items()), callee


def _train_under_fabric(strategy: str, precision: Any) -> dict[str, Any]:
    loop = Loop(strategy, oracle.sgd, precision=precision)
    losses = []
    for x, y in loop.whole_batches(3):
        with loop.fabric.autocast():
            ones = loop.fabric.to_device(torch.ones(2, 2))
            assert (ones @ ones).dtype is DTYPES[precision][1]
        output = loop.model(x)
        assert output.dtype is torch.float32
        loss = mse_loss(output, y)
        losses.append(loss.detach())
        loop.backward(loss)
        loop.fabric.clip_gradients(loop.model, loop.optimizer, max_norm=10.0)
        loop.step()
    return {"losses": means(losses), "shards": {p.dtype for p in loop.net.blocks[1].parameters()}}


class SummedLayer(nn.Module):
    """A linear layer. If a loss sums rows of its output times factors, its bias's gradient is the factors' sum."""

    #: Two such factors. bf16 can represent 256, 1, 512 and 2, but neither 256 + 1 nor 512 + 2.
    LARGE, SMALL = 256.0, 1.0

    fine: Tensor  # its value has more digits than bf16

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        for parameter in self.layer.parameters():
            nn.init.zeros_(parameter)
        self.register_buffer("fine", torch.tensor([1.0 + 2.0**-10]))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def _train_summed(strategy: str, accumulated: bool) -> dict[str, Tensor]:
    net = SummedLayer()
    loop = Loop(strategy, lambda module: torch.optim.SGD(module.parameters(), lr=1.0), net, precision="bf16-mixed")
    row = loop.fabric.to_device(torch.ones(1, FEATURES))
    if accumulated:
        with loop.unreduced():
            loop.backward((loop.model(row) * net.LARGE).sum())
        loop.backward((loop.model(row) * net.SMALL).sum())
    else:
        factor = net.LARGE if loop.fabric.global_rank == 0 else net.SMALL
        doubled = torch.tensor([2 * factor])  # the mean over two ranks halves it
        loop.backward((loop.model(row) * loop.fabric.to_device(doubled)).sum())
    loop.step()
    return loop.state()


class Overflowing(DtypeRecorder):
    """Has a gradient with one infinite element in the first step, in the last rank's shard."""

    is_poisoned = False

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 0 and not self.is_poisoned:
            self.is_poisoned = True
            block = self.net.blocks[1]
            parameters = [*block.up.parameters(), *block.down.parameters()]
            is_last_rank = self.global_rank == self.trainer.world_size - 1
            poison_gradient(parameters, float("inf"), on_this_rank=is_last_rank)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass  # the base class would assert that all gradients are finite


def _overflow(strategy: str, tmp: str) -> tuple[list[float], list[float], float]:
    module = Overflowing("sgd")
    run = new_trainer(tmp, strategy, 2, precision="16-mixed")
    run.fit(module, loader(2, 2))
    weights = torch.cat([tensor.flatten() for tensor in full_state(run.strategy).values()])
    scaler: Any = run.precision_plugin
    return means(module.losses), weights.tolist(), scaler.scaler.get_scale()


def _scaler_state(strategy: str, tmp: str) -> tuple[float, float]:
    trainer = new_trainer(tmp, strategy, 2, precision="16-mixed")
    trainer.fit(Overflowing("sgd"), loader(2, 2))
    trainer.save_checkpoint(f"{tmp}/scaled")
    resumed = new_trainer(tmp, strategy, 2, precision="16-mixed")
    resumed.fit(Lit("sgd"), loader(2, 2), ckpt_path=f"{tmp}/scaled")
    plugin: Any = trainer.precision_plugin
    resumed_plugin: Any = resumed.precision_plugin
    return plugin.scaler.get_scale(), resumed_plugin.scaler.get_scale()


class PrecisionSuite(Clauses):
    """Dtypes are those that the precision string selects, and training in half precision works."""

    @requires(Capability.CLIP_BY_NORM)
    @precisions(*DTYPES)
    def test_dtypes_under_trainer(self, ranks: Ranks, tmp_path: Path, precision: str) -> None:
        """Shards and gradients must have the storage dtype, and blocks must compute in the compute dtype."""
        want, _ = oracle.train_plain(3, oracle.sgd)
        storage, compute = DTYPES[precision]
        for got in ranks.run(2, seen_by_a_block, self.strategy, str(tmp_path), precision, {}):
            assert got["losses"] == pytest.approx(want, rel=HALF_TOLERANCE)
            assert (got["shards"], got["grads"]) == ({storage}, {storage})
            assert got["output"] is compute

    # Without units, autocast alone may cast, inside the block.
    @requires(Capability.CLIP_BY_NORM, Capability.WRAP_POLICY)
    @precisions("bf16-mixed", "16-mixed")
    def test_weights_and_inputs_are_cast_before_a_block_sees_them(
        self, ranks: Ranks, tmp_path: Path, precision: str
    ) -> None:
        """In mixed precision, a block's weights and inputs must be cast before its forward pass."""
        _, compute = DTYPES[precision]
        for got in ranks.run(2, seen_by_a_block, self.strategy, str(tmp_path), precision, {}):
            assert (got["weight"], got["input"]) == (compute, compute)

    @requires(Capability.CLIP_BY_NORM)
    @precisions(*DTYPES)
    def test_dtypes_under_fabric(self, ranks: Ranks, precision: str) -> None:
        """Under Fabric, shards must have the storage dtype, and outputs must be float32."""
        want, _ = oracle.train_plain(3, oracle.sgd)
        storage, _ = DTYPES[precision]
        for got in ranks.run(2, _train_under_fabric, self.strategy, precision):
            assert got["losses"] == pytest.approx(want, rel=HALF_TOLERANCE)
            assert got["shards"] == {storage}

    @requires(Capability.MIXED_PRECISION)
    @pytest.mark.parametrize(
        "accumulated",
        [
            pytest.param(False, marks=on_ranks("processes", "threads")),  # one controller's data are not divided
            pytest.param(True, marks=requires(Capability.GRADIENT_ACCUMULATION)),
        ],
        ids=["over ranks", "over micro-batches"],
    )
    def test_gradients_are_added_in_full_precision(self, ranks: Ranks, accumulated: bool) -> None:
        """Gradients must be summed in float32, over ranks and micro-batches, and buffers must keep their dtype."""
        for state in ranks.run(2, _train_summed, self.strategy, accumulated):
            assert torch.equal(state["layer.bias"], torch.full((FEATURES,), -(SummedLayer.LARGE + SummedLayer.SMALL)))
            buffer = state["fine"].item()
            assert buffer == 1.0 + 2.0**-10, f"a buffer of {1.0 + 2.0**-10} became {buffer}"

    @requires(Capability.MIXED_PRECISION, Capability.GRADIENT_SCALING)
    def test_overflow_in_one_shard_skips_the_step_everywhere(self, ranks: Ranks, tmp_path: Path) -> None:
        """An overflow in one rank's shard must skip the step and lower the loss scale on every rank."""
        (losses, weights, scale), other = ranks.run(2, _overflow, self.strategy, str(tmp_path))
        assert (losses, weights, scale) == other
        assert scale == 2.0**15, f"the scale is {scale}, not half of torch's initial {2.0**16}"
        assert all(torch.isfinite(torch.tensor(weights)))
        # The first step was skipped, so the second loss is that of the initial weights.
        net = oracle.new_net()
        x, y = oracle.global_batches(2)[1]
        assert losses[1] == pytest.approx(mse_loss(net(x), y).item(), rel=HALF_TOLERANCE)

    @requires(Capability.MIXED_PRECISION, Capability.GRADIENT_SCALING, Capability.SHARDED_CHECKPOINT)
    def test_scaler_state_is_restored(self, ranks: Ranks, tmp_path: Path) -> None:
        """The gradient scaler's state must be restored from a checkpoint."""
        assert ranks.run(2, _scaler_state, self.strategy, str(tmp_path)) == [(2.0**15, 2.0**15)] * 2
