"""What the tests of ``fsdp checkpoint`` share: running it, and checkpoints to run it on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

from chunked_tensors import in_pieces
from damaged_folders import save_alone
from fsdp_core.cli import fsdp


def run(*arguments: object, status: int | None = 0) -> Result:
    """Run ``fsdp checkpoint`` in this process; it must end with this status, if one is given, and with no traceback."""
    result = CliRunner().invoke(fsdp, ["checkpoint", *map(str, arguments)], prog_name="fsdp")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert status is None or result.exit_code == status, result.output
    return result


def state_by_name(
    optimizer: torch.optim.Optimizer, module: nn.Module, part: Callable[[Tensor], Any] = lambda tensor: tensor
) -> dict[str, Any]:
    """An optimizer's state as sharded strategies give it."""
    name_of = {p: name for name, p in module.named_parameters()}
    names = [name_of[p] for group in optimizer.param_groups for p in group["params"]]
    plain = optimizer.state_dict()
    state = {names[n]: {key: part(value) for key, value in values.items()} for n, values in plain["state"].items()}
    groups = [{**group, "params": [names[n] for n in group["params"]]} for group in plain["param_groups"]]
    return {"state": state, "param_groups": groups}


def trained(*, seed: int = 0) -> dict[str, Any]:
    """A state of every kind: pieces by rows and columns, a tied name, param groups, plain data and a small tensor."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    wte = in_pieces(normal(6, 4), 0, 2, 5)
    return {
        "model": {
            "wte.weight": wte,
            "blocks.0.up.weight": in_pieces(normal(4, 6), 1, 1, 4),
            "blocks.1.up.weight": in_pieces(normal(4, 6), 1, 3),
            "scale": normal(),
            "steps": torch.arange(3),
            "nothing": torch.empty(0, 4),
        },
        "optimizer": [
            {
                "state": {"wte.weight": {"step": torch.tensor(3.0), "exp_avg": in_pieces(normal(6, 4), 0, 3)}},
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "fused": None, "params": ["wte.weight"]}],
            }
        ],
        "trainer": {"pytorch-lightning_version": "2.6.6"},
        "epoch": 3,
        "callbacks": {"best": torch.tensor([0.5, 0.25]), "path": Path("/runs/a"), "scores": [float("nan"), 1.5]},
    }


ALIASES = {"model/head.weight": "model/wte.weight"}


def save_trained(path: Path, change: Callable[[dict[str, Any]], object] = lambda state: None, *, seed: int = 0) -> Path:
    """Save :func:`trained`, perhaps with a change; gives the path."""
    state = trained(seed=seed)
    change(state)
    save_alone(path, state, aliases=ALIASES)
    return path
