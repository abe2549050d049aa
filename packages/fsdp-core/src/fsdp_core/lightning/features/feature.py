"""The moments of a stage that several features share."""

from __future__ import annotations

import lightning.pytorch as pl

from fsdp_core.sharding.sharded import Sharded

__all__ = ["Feature"]


class Feature:
    """Something that a Trainer's stages have beside steps. It overrides the moments that it needs.

    A moment with one thing to do has no method here: the strategy calls the feature itself.
    """

    def setup(self, trainer: pl.Trainer, *, fitting: bool) -> None:
        """A stage begins; its module is not sharded yet, or was by an earlier stage. All ranks call it.

        Args:
            trainer: The Trainer.
            fitting: Whether the stage trains.
        """

    def module_sharded(self, trainer: pl.Trainer, sharded: Sharded, *, fitting: bool) -> None:
        """The module is sharded, and the optimizers are not made yet. All ranks call it."""

    def train_start(self, trainer: pl.Trainer, sharded: Sharded) -> None:
        """Lightning has restored everything, and the first batch of a fit comes next. All ranks call it."""

    def teardown(self, trainer: pl.Trainer | None) -> None:
        """A stage has ended, perhaps by an exception.

        Args:
            trainer: The Trainer; ``None`` if the stage ran elsewhere, or never began.
        """
