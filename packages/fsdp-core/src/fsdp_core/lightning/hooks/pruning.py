"""Lightning's pruning callback, which puts other parameters instead of those that are trained."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning

from fsdp_core.errors import UnsupportedCapabilityError

__all__ = ["check_pruning"]


def check_pruning(trainer: pl.Trainer, strategy: str) -> None:
    """Refuse a callback that would prune each rank's shards by themselves, and replace them unseen by the optimizer.

    Args:
        trainer: Whose callbacks to look at.
        strategy: The name that users type.

    Raises:
        UnsupportedCapabilityError: There is such a callback.
    """
    asked = [one for one in trainer.callbacks if isinstance(one, ModelPruning)]  # type: ignore[attr-defined]
    if asked:
        raise UnsupportedCapabilityError(
            f"{type(asked[0]).__name__} can't be used with {strategy!r}: it chooses among elements of whole weights, "
            "and puts masks and parameters of its own in their place, where each rank has a part of a weight.\n"
            "Leave it out, and prune what was trained: load the checkpoint in one process with "
            "load_from_checkpoint(), and use torch.nn.utils.prune there. To prune while training, use strategy='ddp'."
        )
