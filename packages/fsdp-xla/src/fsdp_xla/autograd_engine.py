"""A check that torch's autograd engine has a place for the gradients of XLA's devices."""

from __future__ import annotations

import torch

from fsdp_core import StrategyUnavailableError

__all__ = ["check_autograd"]


def check_autograd(device: torch.device, strategy: str, instead: str) -> None:
    """Refuse a process whose autograd engine has started without XLA: it has no place for the device's gradients.

    Args:
        device: An XLA device.
        strategy: The strategy's name.
        instead: What to do about it, as a sentence.

    Raises:
        StrategyUnavailableError: A backward pass was taken before XLA was started.
    """
    probe = torch.zeros((), device=device, requires_grad=True)
    try:
        probe.clone().backward()  # recorded, and never run
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise StrategyUnavailableError(
            f"{strategy!r} can't start: this process took a backward pass before XLA was started, and torch asks only "
            f"once which devices there are.\n{instead}"
        ) from error
