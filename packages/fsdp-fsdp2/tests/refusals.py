"""How the tests of bad input read what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

import fsdp_fsdp2.fabric
from runs import full_state

_INSTEAD = "instead of a refusal:"


def refusal(error: type[Exception], call: Callable[[], Any]) -> str:
    """What a call raises, as text that :func:`assert_says` reads; a rank can return it, whatever comes."""
    try:
        call()
    except error as refused:
        return str(refused)
    except Exception as other:
        return f"{_INSTEAD} {type(other).__name__}: {other}"
    return f"{_INSTEAD} nothing was raised"


def assert_says(message: str, *words: str) -> None:
    """It was a refusal, and says all of this: what was asked, why it can't be, what to type next."""
    assert not message.startswith(_INSTEAD), message
    for word in words:
        assert word in message, f"{word!r} is not in:\n{message}"


def new_fabric(world_size: int = 1, **options: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=fsdp_fsdp2.fabric.FSDP2Strategy(**options))
    fabric.launch()
    return fabric


def copied_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_unchanged(strategy: Any, module: nn.Module, before: dict[str, Tensor]) -> None:
    now = full_state(strategy, module)
    assert now.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(now[name], tensor), f"{name} was changed by what was refused"
