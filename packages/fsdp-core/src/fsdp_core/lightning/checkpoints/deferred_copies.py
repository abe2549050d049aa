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

__all__ = ["choose_deferred", "finish_copies_after", "hooks_that_may_write"]

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

#: Hooks that are not called between a save and the next step. ``on_save_checkpoint`` is called by the next save, which
#: finishes the copies of the last one first.
_HARMLESS_HOOKS = {"on_save_checkpoint", "on_load_checkpoint", "on_fit_start", "on_train_start"}

#: The hooks of a LightningModule that replace a part of a step, besides those that begin with ``on_``.
_MODULE_HOOKS = (
    *("backward", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    *("transfer_batch_to_device", "log", "log_dict"),
)

#: The hooks of a LightningDataModule that are called between a save and the next step.
_DATAMODULE_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

#: In bytes. A smaller tensor is copied at once, which takes no time. Training steps may well write to such a tensor
#: through ``.data``, which counts no writes, as models do to CLIP's temperature.
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
        # a reader's own class is the base, so that only hooks which were set on the instance are overrides
        base = type(callback) if is_reader else pl.Callback
        hooks += _find_overrides(callback, base, _event_hooks(base))
    module = trainer.strategy.lightning_module
    if module is not None:
        hooks += _find_overrides(module, pl.LightningModule, [*_event_hooks(pl.LightningModule), *_MODULE_HOOKS])
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None:
            hooks += _find_overrides(datamodule, pl.LightningDataModule, _DATAMODULE_HOOKS)
        if not module.automatic_optimization:
            hooks.append(f"{type(module).__name__}.training_step")
    return hooks


def _event_hooks(base: type) -> list[str]:
    """The hooks of a class that begin with ``on_`` and may be called between a save and the next step."""
    return [name for name in dir(base) if name.startswith("on_") and name not in _HARMLESS_HOOKS]


def _find_overrides(obj: object, base: type, names: Sequence[str]) -> list[str]:
    """Which hooks of a base an object's class overrides, or the object itself, as ``LambdaCallback`` does."""
    cls = type(obj)
    own_attributes = vars(obj)
    return [
        f"{cls.__name__}.{name}"
        for name in names
        if name in own_attributes or getattr(cls, name) is not getattr(base, name)
    ]


def choose_deferred(
    trainer: pl.Trainer, sharded: Sharded, optimizers: Sequence[Optimizer]
) -> Callable[[Tensor], Sequence[Tensor] | None] | None:
    """Choose the tensors of a state that may be copied after the save returns, until the optimizer's next step.

    They are large shards that are trained, and the optimizers' state of them. Buffers, which a forward pass may write
    to, unreduced gradients, and what is not trained, such as the weights of a teacher, are copied at once.

    Args:
        trainer: The Trainer.
        sharded: Its module.
        optimizers: Its optimizers.

    Returns:
        A function that is called with a tensor of the state. For a tensor that is copied at once, it returns ``None``.
        For another, it returns all tensors whose version counter a write to the same memory may raise. That may be a
        DTensor's counter, the counter of the part that this rank holds (``weight.to_local()[rows] = …``), or that of a
        parameter over a flat one. If all tensors are copied at once, ``None`` is returned in place of the function.
    """
    if hooks_that_may_write(trainer):
        return None
    # by the address of the storage, and in it by the address of the first element
    tensors_by_storage: dict[int, dict[int, list[Tensor]]] = {}
    for tensor in _shards_and_state(sharded, optimizers):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type == "cpu":  # a save copies what is on a device to the host at once
            tensors_by_address = tensors_by_storage.setdefault(local.untyped_storage().data_ptr(), {})
            tensors_by_address.setdefault(local.data_ptr(), []).extend([tensor] if local is tensor else [tensor, local])

    def find_write_counters(tensor: Tensor) -> Sequence[Tensor] | None:
        tensors_by_address = tensors_by_storage.get(tensor.untyped_storage().data_ptr())
        if tensor.nbytes < _SMALL or tensors_by_address is None:
            return None
        in_same_storage = chain.from_iterable(tensors_by_address.values())
        return [tensor, *tensors_by_address.get(tensor.data_ptr(), in_same_storage)]

    return find_write_counters


def finish_copies_after(closure: Callable[[], Any], saves: AsyncSaves, optimizer: Optimizer) -> Callable[[], Any]:
    """Return a closure at the end of which the last save's tensors are copied.

    With automatic optimization the closure runs the forward and the backward pass. torch's optimizers write nothing
    before it; for others, and for those with hooks before their steps, the copies are finished now.

    Args:
        closure: What the optimizer is to call before it writes.
        saves: The saves in the background.
        optimizer: The optimizer.
    """
    if not type(optimizer).__module__.startswith("torch.optim.") or has_hooks_before_steps(optimizer):
        saves.finish_copying()
        return closure

    @wraps(closure)
    def closure_and_copies() -> Any:
        result = closure()
        saves.finish_copying()
        return result

    return closure_and_copies


def _shards_and_state(sharded: Sharded, optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    yield from (parameter for parameter in sharded.layout() if parameter.requires_grad)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
