"""Which tensors of an async save are copied behind the next forward and backward pass, and when none may be.

Between a save and the optimizer's next step, a forward and a backward pass only read shards and optimizer state. But
hooks of callbacks and of the LightningModule may write to them. If there are such hooks, everything is copied before
the save returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import chain
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.torch_private.optimizer_steps import has_hooks_before_steps

__all__ = ["copied_after", "copied_before_a_step", "hooks_that_may_write"]

#: Lightning's callbacks whose hooks write neither to parameters nor to optimizer state.
_READERS = (
    callbacks.Checkpoint,
    callbacks.DeviceStatsMonitor,
    callbacks.EarlyStopping,
    callbacks.GradientAccumulationScheduler,
    callbacks.LearningRateMonitor,
    callbacks.ModelSummary,
    callbacks.ProgressBar,
    callbacks.ThroughputMonitor,
    callbacks.Timer,
)

#: Hooks that are not called between a save, once training has begun, and the next step; saves finish the copies of
#: earlier ones before ``on_save_checkpoint``.
_ELSEWHERE = {"on_save_checkpoint", "on_load_checkpoint", "on_fit_start", "on_train_start"}

#: The hooks of a LightningModule that replace a part of a step, besides those that begin with ``on_``.
_OF_STEPS = (
    *("backward", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    *("transfer_batch_to_device", "log", "log_dict"),
)

#: Those of a LightningDataModule.
_OF_BATCHES = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

#: In bytes. What is smaller is copied at once: it takes no time, and training steps may well write to it, as to CLIP's
#: temperature, through ``.data``, which counts no writes.
_SMALL = 2**16


def hooks_that_may_write(trainer: pl.Trainer) -> list[str]:
    """The hooks, as ``Class.hook``, that may write to parameters or optimizer state before the optimizer's next step.

    Args:
        trainer: The Trainer with the callbacks and the module.

    Example:
        >>> class Clamping(pl.Callback):
        ...     def on_train_batch_end(self, *args):
        ...         ...
        >>> trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[Clamping(), callbacks.Timer()])
        >>> hooks_that_may_write(trainer)
        ['Clamping.on_train_batch_end']
    """
    hooks = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        is_reader = isinstance(callback, _READERS) and type(callback).__module__.startswith("lightning.")
        hooks += _overridden(callback, type(callback) if is_reader else pl.Callback, ())
    module = trainer.strategy.lightning_module
    if module is not None:
        hooks += _overridden(module, pl.LightningModule, _OF_STEPS)
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None:
            hooks += _overridden(datamodule, pl.LightningDataModule, _OF_BATCHES, is_all=False)
        if not module.automatic_optimization:
            hooks.append(f"{type(module).__name__}.training_step")
    return hooks


def _overridden(obj: object, base: type, more: Sequence[str], *, is_all: bool = True) -> list[str]:
    """The hooks that an object's class has, or the object itself, as ``LambdaCallback`` does."""
    cls = type(obj)
    own_attributes = vars(obj)
    names = [name for name in dir(base) if is_all and name.startswith("on_") and name not in _ELSEWHERE]
    return [
        f"{cls.__name__}.{name}"
        for name in (*names, *more)
        if name in own_attributes or getattr(cls, name) is not getattr(base, name)
    ]


def copied_before_a_step(
    trainer: pl.Trainer, sharded: Sharded, optimizers: Sequence[Optimizer]
) -> Callable[[Tensor], Sequence[Tensor] | None] | None:
    """Return which tensors of a state may be copied until the optimizer's next step; ``None`` if none may be.

    What is returned takes such a tensor and returns the tensors that count writes to it.

    They are large shards that are trained, and the optimizers' state of them. Buffers, which a forward pass may write
    to, unreduced gradients, and what is not trained, such as the weights of a teacher, are copied at once. A write
    through a DTensor is counted there, one to the part that this rank holds (``weight.to_local()[rows] = …``) at that
    part, and one to a parameter over a flat one at the parameter.

    Args:
        trainer: The Trainer.
        sharded: Its module.
        optimizers: Its optimizers.
    """
    if hooks_that_may_write(trainer):
        return None
    sharing: dict[int, dict[int, list[Tensor]]] = {}  # by where storages are, and by where tensors begin
    for tensor in _shards_and_state(sharded, optimizers):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type == "cpu":
            of_storage = sharing.setdefault(local.untyped_storage().data_ptr(), {})
            of_storage.setdefault(local.data_ptr(), []).extend([tensor] if local is tensor else [tensor, local])

    def watched(tensor: Tensor) -> Sequence[Tensor] | None:
        if tensor.nbytes < _SMALL or (same_storage := sharing.get(tensor.untyped_storage().data_ptr())) is None:
            return None
        return [tensor, *same_storage.get(tensor.data_ptr(), chain.from_iterable(same_storage.values()))]

    return watched


def copied_after(closure: Callable[[], Any], saves: AsyncSaves, optimizer: Optimizer) -> Callable[[], Any]:
    """Return a closure at the end of which the last save's tensors are copied.

    With automatic optimization the closure runs the forward and the backward pass. torch's optimizers write nothing
    before it; for others, and for those with hooks before their steps, the copies are finished now.

    Args:
        closure: What the optimizer is to call before it writes.
        saves: The saves.
        optimizer: The optimizer.
    """
    if not type(optimizer).__module__.startswith("torch.optim.") or has_hooks_before_steps(optimizer):
        saves.finish_copying()
        return closure

    @wraps(closure)
    def copied() -> Any:
        result = closure()
        saves.finish_copying()
        return result

    return copied


def _shards_and_state(sharded: Sharded, optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    yield from (parameter for parameter in sharded.layout() if parameter.requires_grad)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
