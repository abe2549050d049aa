"""Trains in every way, for test_spmd_training.py to compare with the oracle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torch.nn.functional import mse_loss

from fsdp_core.testing.oracle import Block, new_net, sgd
from fsdp_core.testing.training import Lit, loader
from spmd_runs import fabric_fit, fit, moments, new_fabric, new_trainer, shapes, uneven_batches, whole_state

PLAN = {"blocks.*.up.*": 0, "blocks.*.down.weight": 1}


class Manual(Lit):
    """Takes its steps by itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = mse_loss(self(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        self.losses.append(loss.detach())


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


def looked_at(fabric: Any, net: nn.Module, optimizer: Any) -> dict[str, Any]:
    parameters = dict(net.named_parameters())
    return {
        "parameters": shapes(parameters),
        "moments": shapes(moments(net, optimizer)),
        "written": {name: tuple(p.shape) for name, p in parameters.items()},
        "tied": net.get_submodule("out").weight is net.get_submodule("inp").weight,
    }


def with_dropout(options: dict[str, Any]) -> dict[str, Any]:
    fabric: Any = new_fabric(options)
    fabric.strategy.runtime.set_device_random_state(5)
    net = new_net(dropout=0.5)
    model, optimizer = fabric.setup(net, sgd(net))
    losses = []
    for x, y in fabric.setup_dataloaders(loader(1, 1)):
        loss = mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": [x.item() for x in losses], "state": whole_state(fabric.strategy, net)}


def seeded(seed: int) -> float:
    fabric, net = new_fabric(), new_net(dropout=0.5)  # which seeds, too
    torch.manual_seed(seed)
    model = fabric.setup(net)
    ((x, y),) = fabric.setup_dataloaders(loader(1, 1))
    return mse_loss(model(x), y).item()


def from_meta() -> dict[str, Any]:
    fabric = new_fabric()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))

    with fabric.init_module(empty_init=True):
        net = build()
    torch.manual_seed(7)
    fabric.setup(net)
    torch.manual_seed(7)
    return {"state": whole_state(fabric.strategy, net), "expected": build().state_dict()}


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


def main(out: str, tmp: str) -> None:
    recompute = {"activation_checkpointing_policy": {Block}}
    keywords = {"auto_wrap_policy": {Keywords}, "activation_checkpointing_policy": {Keywords}}
    cases: dict[str, Callable[[], Any]] = {
        "fabric": lambda: fabric_fit(after=looked_at),
        "trainer": lambda: fit(tmp),
        "fabric accumulation, clipped by norm": lambda: fabric_fit(accumulate=2, clip={"max_norm": 0.1}),
        "trainer accumulation, clipped by norm": lambda: fit(
            tmp, accumulate_grad_batches=2, gradient_clip_val=0.1, data=loader(4, 1)
        ),
        "fabric clipped by value": lambda: fabric_fit(clip={"clip_val": 0.01}),
        "trainer clipped by value": lambda: fit(tmp, gradient_clip_val=0.01, gradient_clip_algorithm="value"),
        "trainer manual": lambda: fit(tmp, module=Manual("adamw_groups")),
        "units of a class, momentum": lambda: fabric_fit(optimizer="momentum", options={"auto_wrap_policy": {Block}}),
        "recomputed": lambda: fabric_fit(options=recompute),
        "recomputed, no units, accumulation": lambda: fabric_fit(
            options={**recompute, "auto_wrap_policy": None}, accumulate=2, after=looked_at
        ),
        "two axes": lambda: fabric_fit(
            options={"tensor_parallel_size": 2, "tensor_plan": PLAN, **recompute}, after=looked_at
        ),
        "bf16-mixed": lambda: fabric_fit(precision="bf16-mixed", after=looked_at),
        "trainer bf16-mixed": lambda: fit(tmp, precision="bf16-mixed"),
        "trainer bf16-true": lambda: fit(tmp, precision="bf16-true"),
        "uneven": lambda: fit(tmp, optimizer="sgd", data=uneven_batches(), use_distributed_sampler=False),
        "dropout": lambda: with_dropout({}),
        "dropout recomputed": lambda: with_dropout(recompute),
        "seeds": lambda: [seeded(seed) for seed in (21, 22, 21)],
        "keywords": lambda: fabric_fit(optimizer="sgd", net=of_keywords(), options=keywords),
        "meta": from_meta,
        "averaged": lambda: averaged(tmp),
        "stages": lambda: stages(tmp),
    }
    results = {}
    for name, run in cases.items():
        results[name] = run()
        print(name, flush=True)
    torch.save(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
