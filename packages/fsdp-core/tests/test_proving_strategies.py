"""A proof of strategies that are wrong, each in a way that strategies have been: it says which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fsdp_core.proving.proof import BATCHES, Row, prove_fit
from fsdp_core.rehearsal.script import CaughtFit


class Net(pl.LightningModule):
    """Its layers have an odd number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(x, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Sharded(DDPStrategy):
    """Right: shards each layer by torch's ``fully_shard``, with which nothing of this project has to do."""

    def configure_ddp(self) -> None:
        for layer in self.layers:
            fully_shard(layer, **self.options())
        self.model = self.lightning_module

    @property
    def layers(self) -> Any:
        module: Any = self.lightning_module
        return module.layers

    def options(self) -> dict[str, Any]:
        return {}

    def block_backward_sync(self) -> Any:
        return nullcontext()


class Sums(Sharded):
    def configure_ddp(self) -> None:
        super().configure_ddp()
        for layer in self.layers:
            layer.set_gradient_divide_factor(1.0)


class LeavesALayerOut(DDPStrategy):
    def configure_ddp(self) -> None:
        assert self.model is not None
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            self.model, ["layers.1.weight", "layers.1.bias"]
        )
        super().configure_ddp()


class KeepsGathered(Sharded):
    """Over the optimizer's step too."""

    def options(self) -> dict[str, Any]:
        return {"reshard_after_forward": False}

    def configure_ddp(self) -> None:
        super().configure_ddp()
        for layer in self.layers:
            layer.set_reshard_after_backward(False)


class LosesAMicroBatch(DDPStrategy):
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        is_last = (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0
        is_lost = self.global_rank == 1 and not is_last
        return super().backward(closure_loss * (0 if is_lost else 1), *args, **kwargs)


class ReducesInHalf(Sharded):
    def options(self) -> dict[str, Any]:
        return {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}


class ComputesInHalf(Sharded):
    def options(self) -> dict[str, Any]:
        return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)}


class NormOfShards(Precision):
    def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> None:
        shards = [parameter.grad.to_local() for group in optimizer.param_groups for parameter in group["params"]]
        norm = torch.linalg.vector_norm(torch.cat([shard.reshape(-1) for shard in shards]))
        for shard in shards:
            shard.mul_(torch.clamp(clip_val / (norm + 1e-6), max=1.0))


class Replicates(Sharded):
    """Without averaging over the replicas."""

    def options(self) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (self.world_size, 1), mesh_dim_names=("replicas", "shards"))
        return {"mesh": mesh["shards"]}


class KeepsTheOptimizer(Sharded):
    """That of the parameters before they were sharded."""

    def configure_ddp(self) -> None:
        assert self.lightning_module is not None
        super().setup_optimizers(self.lightning_module.trainer)
        super().configure_ddp()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        pass


class DropsRemainders(DDPStrategy):
    """Each rank steps a part of each parameter, and gives it to the others."""

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = optimizer.param_groups[0]["params"]
        earlier = [parameter.detach().clone() for parameter in parameters]
        output = super().optimizer_step(optimizer, *args, **kwargs)
        for parameter, old in zip(parameters, earlier, strict=True):
            divides = parameter.numel() // self.world_size * self.world_size
            old.view(-1)[:divides] = parameter.detach().view(-1)[:divides]
            with torch.no_grad():
                parameter.copy_(old)
        return output


class ForgetsState(DDPStrategy):
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, *args, **kwargs)
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()
        return output


class ChangesTheRate(DDPStrategy):
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        self.optimizers[0].param_groups[0]["lr"] *= self.world_size


class AddsToAWeight(DDPStrategy):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        assert self.lightning_module is not None
        if self.global_rank == 1:
            with torch.no_grad():
                next(self.lightning_module.parameters()).add_(1e-6)
        return output


class StaleGather(DDPStrategy):
    """Weights read right, and the second step computes with the first one's."""

    @contextmanager
    def _old_weights(self) -> Iterator[None]:
        assert self.lightning_module is not None
        parameters = list(self.lightning_module.parameters())
        new = [parameter.data for parameter in parameters]
        old = vars(self).setdefault("_old", [data.clone() for data in new])
        for parameter, data in zip(parameters, old, strict=True):
            parameter.data = data
        yield
        for parameter, data in zip(parameters, new, strict=True):
            parameter.data = data

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._old_weights():
            return super().training_step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._old_weights():
            return super().backward(*args, **kwargs)


#: By strategy: options, Trainer's arguments, the fault's name, and what is said of it.
WRONG: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "Sums": (Sums, {}, "shares", "ranks have shares of 1, 1 in it, and should have 0.5 each"),
    "LeavesALayerOut": (LeavesALayerOut, {}, "unreduced", "gradient of layers.1.weight"),
    "KeepsGathered": (KeepsGathered, {}, "stale", "from before the optimizer's step"),
    "StaleGather": (StaleGather, {}, "stale", "gradient of layers.0.weight in step 2"),
    "LosesAMicroBatch": (
        *(LosesAMicroBatch, {"accumulate_grad_batches": 2}, "shares"),
        "of rank 0 0.25, 0.25 and of rank 1 0, 0.25",
    ),
    "ReducesInHalf": (ReducesInHalf, {}, "rounding", "to bfloat16"),
    "NormOfShards": (lambda: Sharded(precision_plugin=NormOfShards()), {}, "clipping", "without gradient_clip_val"),
    "Replicates": (Replicates, {}, "unreduced", "gradient of layers.0.weight"),
    "KeepsTheOptimizer": (KeepsTheOptimizer, {}, "left-out", "others than those that have gradients"),
    "DropsRemainders": (DropsRemainders, {}, "elements", "the last 1 of 25"),
    "ForgetsState": (ForgetsState, {}, "optimizer", "weight of layers.0.weight in step 2"),
    "ChangesTheRate": (ChangesTheRate, {}, "settings", "lr of parameter group 0 is 0.2, and should be 0.1"),
    "AddsToAWeight": (AddsToAWeight, {}, "backend", "on rank 1: gradients are the same, so it is the optimizer's step"),
}


def prove_strategy(strategy: pl.strategies.Strategy, options: dict[str, Any]) -> Row:
    torch.manual_seed(0)
    fit = CaughtFit(
        module=Net(),
        drawn=[(torch.randn(4, 5), torch.randint(0, 3, (4,))) for _ in range(BATCHES)],
        batches=None,
        datamodule=None,
        trainer_keywords={"callbacks": [], "strategy": strategy, "gradient_clip_val": 0.05},
        seconds_for_batch=0.0,
        location="train.py:1",
    )
    references, row = prove_fit(fit, only="script", options=options).rows
    assert references.verdict == "same"
    return row


@pytest.mark.parametrize("name", WRONG)
def test_a_strategy_that_is_wrong_is_named_with_its_fault(name: str) -> None:
    strategy, options, fault, words = WRONG[name]
    row = prove_strategy(strategy(), options)
    assert (row.verdict, row.cause) == ("differs", fault), row.words
    assert words in row.words
    assert row.repeated_by.startswith("--only script")


def test_a_strategy_of_a_stranger_that_is_right() -> None:
    row = prove_strategy(Sharded(), {})
    assert row.verdict == "same", row.words


def test_a_strategy_that_computes_in_half_precision_can_not_be_told() -> None:
    row = prove_strategy(ComputesInHalf(), {})
    assert row.verdict == "can't tell"
    assert "the strategy computes in bfloat16" in row.words
