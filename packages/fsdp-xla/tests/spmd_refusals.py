"""What is refused, and with what words; each case in one process, for they need no more than a start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import nn

from fsdp_core.testing.oracle import Block, new_net, sgd
from fsdp_core.testing.training import Lit, loader
from spmd_runs import NAME, fit, new_fabric, new_trainer


def shard(options: dict[str, Any], net: nn.Module | None = None) -> None:
    new_fabric(options).setup(net or new_net())


def foreign_optimizer() -> None:
    fabric = new_fabric()
    net, other = new_net(), new_net()
    fabric.setup(net, sgd(other))


def other_terms(tmp: str) -> None:
    module = Lit()
    fit(tmp, 1, module=module, max_steps=1)
    new_trainer(tmp, {"auto_wrap_policy": None}).fit(module, loader(1, 1))


def main(out: str, tmp: str) -> None:
    cases: dict[str, Callable[[], Any]] = {
        "devices": lambda: Trainer(strategy=NAME, devices=3).fit(Lit(), loader(1, 1)),
        "nodes": lambda: Trainer(strategy=NAME, devices=4, num_nodes=2, use_distributed_sampler=False).fit(
            Lit(), loader(1, 1)
        ),
        "mesh": lambda: shard({"tensor_parallel_size": 3, "tensor_plan": {"*.up.weight": 0}}),
        "size": lambda: shard({"tensor_parallel_size": 0}),
        "plan without an axis": lambda: shard({"tensor_plan": {"*.up.weight": 0}}),
        "plan of nothing": lambda: shard({"tensor_parallel_size": 2, "tensor_plan": {"*.top.weight": 0}}),
        "plan of no dimension": lambda: shard({"tensor_parallel_size": 2, "tensor_plan": {"*.up.*": 1}}),
        "16-true": lambda: new_trainer(tmp, precision="16-true"),
        "16-mixed": lambda: new_trainer(tmp, precision="16-mixed"),
        "cpu_offload": lambda: shard({"cpu_offload": True}),
        "reshard_after_forward": lambda: new_trainer(tmp, {"reshard_after_forward": True}),
        "unknown option": lambda: new_trainer(tmp, {"process_group_backend": "nccl"}),
        "cuda": lambda: Trainer(strategy=NAME, accelerator="cuda", devices=1),
        "policy": lambda: shard({"auto_wrap_policy": {nn.LSTM}}),
        "checkpointing": lambda: shard({"activation_checkpointing_policy": Block}),
        "foreign optimizer": foreign_optimizer,
        "other terms": lambda: other_terms(tmp),
    }
    results = {}
    for name, run in cases.items():
        try:
            run()
        except Exception as error:
            results[name] = (type(error).__name__, str(error))
        else:
            results[name] = ("nothing", "was raised")
    torch.save(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
