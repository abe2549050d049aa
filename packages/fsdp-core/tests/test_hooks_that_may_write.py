"""Which hooks of callbacks and LightningModules make an async save copy everything before it returns."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, Timer

from fsdp_core.lightning.checkpoints.deferred_copies import hooks_that_may_write
from fsdp_core.testing.training import Lit
from quiet_trainer import quiet_trainer


def nothing(*args: Any) -> None: ...


class Hooked(Lit):
    def on_after_backward(self) -> None: ...


class Clips(Lit):
    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None: ...


class ByHand(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Logs(Lit):
    def log(self, *args: Any, **options: Any) -> None: ...


class Moves(pl.LightningDataModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def on_exception(self, exception: BaseException) -> None: ...


class Ends(pl.Callback):
    def on_train_epoch_end(self, *args: Any) -> None: ...


def replaced(obj: Any, name: str) -> Any:
    """With a hook of the object itself, and not of its class."""
    setattr(obj, name, nothing)
    return obj


@pytest.mark.parametrize(
    ("module", "callbacks", "found"),
    [
        (Lit(), [Timer(), ModelCheckpoint()], []),
        (Lit(), [Ends()], ["Ends.on_train_epoch_end"]),
        (Lit(), [LambdaCallback(on_train_batch_end=nothing)], ["LambdaCallback.on_train_batch_end"]),
        (Lit(), [LambdaCallback(setup=nothing, on_save_checkpoint=nothing)], []),
        (Lit(), [LambdaCallback(on_exception=nothing)], ["LambdaCallback.on_exception"]),
        (Lit(), [replaced(Timer(), "on_before_zero_grad")], ["Timer.on_before_zero_grad"]),
        (replaced(Lit(), "on_train_batch_end"), [], ["Lit.on_train_batch_end"]),
        (Hooked(), [], ["Hooked.on_after_backward"]),
        (Clips(), [], ["Clips.configure_gradient_clipping"]),
        (Logs(), [], ["Logs.log"]),
        (ByHand(), [], ["ByHand.training_step"]),
    ],
)
def test_hooks_of_classes_and_of_objects(module: pl.LightningModule, callbacks: Any, found: list[str]) -> None:
    trainer = quiet_trainer(callbacks=callbacks)
    trainer.strategy.connect(module)
    assert hooks_that_may_write(trainer) == found


def test_hooks_of_data_modules() -> None:
    trainer: Any = quiet_trainer(callbacks=[])
    trainer.strategy.connect(Lit())
    trainer.datamodule = pl.LightningDataModule()
    assert hooks_that_may_write(trainer) == []
    trainer.datamodule = Moves()
    assert hooks_that_may_write(trainer) == ["Moves.on_after_batch_transfer"]
