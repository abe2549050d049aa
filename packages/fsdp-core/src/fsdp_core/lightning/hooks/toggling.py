"""``toggle_optimizer`` inside a step, where parameters are gathered."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import lightning.pytorch as pl

__all__ = ["watch_toggling"]


def watch_toggling(module: pl.LightningModule) -> None:
    """Have the strategy told when a module toggles an optimizer, which only sees the shards that it holds.

    The strategy is asked for then, for another Trainer's may have replaced this one's: one of Lightning's,
    which has no ``follow_toggling``, for one.

    Args:
        module: Its ``toggle_optimizer`` and ``untoggle_optimizer`` are wrapped, on the instance.
    """

    def followed(toggle: Callable[..., None]) -> Callable[..., None]:
        @wraps(toggle)
        def toggle_and_follow(optimizer: Any) -> None:
            toggle(optimizer)
            follow = getattr(module.trainer.strategy, "follow_toggling", None)
            if follow is not None:
                follow()

        return toggle_and_follow

    if "toggle_optimizer" not in module.__dict__:
        module.toggle_optimizer = followed(module.toggle_optimizer)  # type: ignore[method-assign]
        module.untoggle_optimizer = followed(module.untoggle_optimizer)  # type: ignore[method-assign]
