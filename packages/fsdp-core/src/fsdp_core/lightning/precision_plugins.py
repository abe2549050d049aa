"""Lightning's precision plugins for shards: one for Trainer, one for Fabric, both built from a ``ShardPrecision``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.plugins.precision.amp import MixedPrecision as FabricMixedPrecision
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision as FabricFSDPPrecision
from lightning.fabric.plugins.precision.half import HalfPrecision as FabricHalfPrecision
from lightning.fabric.plugins.precision.xla import XLAPrecision as FabricXLAPrecision
from lightning.pytorch.plugins.precision import (
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    XLAPrecision,
)
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.initialization.deferred_init import continue_deferred
from fsdp_core.lightning.capability_checks import check_precision
from fsdp_core.lightning.outside_steps.redirection import compute_context
from fsdp_core.lightning.private import DtypeContext, convert_fp_tensor
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.torch_private.optimizer_steps import (
    forget_unscaled,
    is_disabled_for_device,
    make_scaler_sharded,
    plain_tensors_replicated,
)

if TYPE_CHECKING:
    from fsdp_core.lightning.strategy import ShardedStrategy
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["ShardedFabricPrecision", "ShardedTrainerPrecision", "read_precision", "shard_dtypes"]

#: Plugins that are fully described by their precision string, and possibly a gradient scaler.
_TRANSLATED = (
    Precision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    XLAPrecision,
    FabricPrecision,
    FabricFSDPPrecision,
    FabricHalfPrecision,
    FabricMixedPrecision,
    FabricXLAPrecision,
)


def read_precision(strategy: ShardedStrategy, plugin: Any) -> tuple[ShardPrecision, torch.amp.GradScaler | None]:
    """Return the dtypes that one of Lightning's plugins asks a strategy for, and the user's own gradient scaler.

    Raises:
        UnsupportedCapabilityError: The plugin does something that does not work with shards, or the strategy does not
            declare what it asks for.
    """
    if type(plugin) not in _TRANSLATED:
        raise UnsupportedCapabilityError(
            f"the precision plugin {type(plugin).__name__} can't be used with a sharded strategy, which casts shards "
            "itself.\nWrite precision='bf16-mixed' (or another precision string) instead."
        )
    if isinstance(plugin, XLAPrecision | FabricXLAPrecision):
        plugin.teardown()  # its environment variables would make XLA compute fp32 in another dtype
    # Lightning creates FSDPPrecision's scaler itself and drops the user's; ours is created for the device in use
    scaler = None if isinstance(plugin, FSDPPrecision | FabricFSDPPrecision) else getattr(plugin, "scaler", None)
    precision = ShardPrecision.named(str(plugin.precision))
    check_precision(strategy.strategy_name, precision)
    return strategy.backend.effective_precision(precision), scaler


def shard_dtypes(plugin: Any) -> ShardPrecision:
    """The dtypes of shards under a strategy's plugin; fp32 for one of Lightning's, which is not replaced yet."""
    return plugin.dtypes if isinstance(plugin, _ShardedPrecision) else ShardPrecision()


class _ShardedPrecision:
    """What both plugins share: dtypes, casting and the gradient scaler. Comes before Lightning's class in the MRO.

    Args:
        precision: The dtypes.
        strategy: The strategy that it belongs to.
        scaler: The user's gradient scaler.

    Raises:
        UnsupportedCapabilityError: A gradient scaler was given, but the precision does not need one.
    """

    def __init__(self, precision: ShardPrecision, strategy: Any, scaler: torch.amp.GradScaler | None = None) -> None:
        if scaler is not None and not precision.scaled:
            raise UnsupportedCapabilityError(
                f"precision={precision.name!r} needs no gradient scaler, but got {type(scaler).__name__}.\n"
                "Leave it out, or write precision='16-mixed'."
            )
        self.dtypes = precision
        self.precision: Any = precision.name
        self._strategy = strategy
        self._users_scaler = scaler
        self._scaler: torch.amp.GradScaler | None = None
        #: By id, optimizers whose gradients are unscaled, and which have not stepped yet.
        self._unscaled_optimizers: dict[int, torch.optim.Optimizer] = {}
        #: The ids of optimizers that have stepped since the scale was updated.
        self._stepped_ids: set[int] = set()

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, if fp16 needs one; created once the device is known."""
        if self._scaler is None and self.dtypes.scaled:
            device = self._strategy.root_device.type
            if self._users_scaler is not None and is_disabled_for_device(self._users_scaler, device):
                raise UnsupportedCapabilityError(
                    f"the precision plugin's gradient scaler is disabled, and not for {device!r}, where this run is: "
                    "torch disables a scaler whose device is not there, and small gradients would be lost.\n"
                    f"Write precision='16-mixed' to Trainer or Fabric and no plugin; or "
                    f"MixedPrecision('16-mixed', {device!r}, torch.amp.GradScaler({device!r}))."
                )
            self._scaler = self._users_scaler or torch.amp.GradScaler(device)
            make_scaler_sharded(self._scaler, lambda flag: self._strategy.runtime.all_reduce(flag, "max"))
        return self._scaler

    def _scale(self, loss: Tensor) -> Tensor:
        """Scale the loss that a backward pass begins with."""
        if self.scaler is None:
            return loss
        for key, optimizer in list(self._unscaled_optimizers.items()):
            if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
                forget_unscaled(self.scaler, optimizer)  # its gradients were discarded, without a step
                del self._unscaled_optimizers[key]
        self._update_scale()
        return self.scaler.scale(loss)

    def _unscale(self, optimizer: Any) -> None:
        """Unscale gradients, once per step: clipping comes before the step that would unscale them."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if self.scaler is not None and id(optimizer) not in self._unscaled_optimizers:
            if id(optimizer) in self._stepped_ids:
                self._update_scale()
            self.scaler.unscale_(optimizer)
            self._unscaled_optimizers[id(optimizer)] = optimizer

    def _step_scaled(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Step unless gradients overflowed. Of several optimizers, none may change the scale of the others' gradients.

        ``GradScaler.update()`` also makes it forget whose gradients are unscaled: between the steps of two optimizers
        that were clipped before, it would divide those of the second twice. So the scale changes when all have stepped,
        before the next backward pass.
        """
        assert self.scaler is not None
        self._unscale(optimizer)
        with plain_tensors_replicated(optimizer):
            output = self.scaler.step(optimizer, **kwargs)
        del self._unscaled_optimizers[id(optimizer)]
        self._stepped_ids.add(id(optimizer))
        if len(self._strategy.optimizers) < 2:
            self._update_scale()
        return output

    def _update_scale(self) -> None:
        if self._stepped_ids and not self._unscaled_optimizers and self.scaler is not None:
            self.scaler.update()
            self._stepped_ids.clear()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast a module that is sharded later to the dtype of shards."""
        with continue_deferred(module):
            return module if self.dtypes.storage is torch.float32 else module.to(self.dtypes.storage)

    def convert_input(self, data: Any) -> Any:
        """Cast a batch, if shards are not fp32; casting it to the compute dtype is up to the backend."""
        if self.dtypes.storage is torch.float32:
            return data
        return apply_to_collection(data, Tensor, convert_fp_tensor, dst_type=self.dtypes.storage)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """A context in which tensors are created in the dtype of shards."""
        return DtypeContext(self.dtypes.storage)

    def module_init_context(self) -> AbstractContextManager[Any]:
        """A context in which modules are built with parameters in the dtype of shards."""
        return self.tensor_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        """A context in which forward passes run."""
        return compute_context(self.dtypes, self._strategy.root_device.type)

    def state_dict(self) -> dict[str, Any]:
        """The gradient scaler's state, if there is one."""
        self._update_scale()
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the gradient scaler's state."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)


class ShardedTrainerPrecision(_ShardedPrecision, Precision):
    """Precision of sharded training under the Trainer. Clips over all ranks.

    Args:
        precision: The dtypes.
        strategy: The strategy that it belongs to.
        scaler: The user's gradient scaler.
    """

    _strategy: ShardedTrainerStrategy

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        scaled = self._scale(tensor)
        with self._strategy.guarding_gradients():
            return super().pre_backward(scaled, module)

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        with self._strategy.guarding_gradients():
            return super().post_backward(tensor, module)

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        with self._strategy.guarding_gradients():
            super()._after_closure(model, optimizer)

    def optimizer_step(  # type: ignore[override]  # as Lightning's own plugins for the Trainer have it
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None:
            with plain_tensors_replicated(optimizer) as as_outside:
                return super().optimizer_step(optimizer, model=model, closure=as_outside(closure), **kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedCapabilityError(
                "LBFGS evaluates its closure several times a step, which a gradient scaler can't follow.\n"
                "Write precision='bf16-mixed' or '32-true'."
            )
        result = closure()
        if model.automatic_optimization and result is None:
            return result  # the backward pass was skipped
        self._unscale(optimizer)  # before clipping, and before hooks that look at gradients
        self._after_closure(model, optimizer)
        return self._step_scaled(optimizer, **kwargs)

    def _clip_gradients(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._strategy.check_gradients(optimizer)  # after the user's hooks; clipping would spread what is not finite
        super()._clip_gradients(model, optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        self._strategy.require(Capability.CLIP_BY_NORM, f"clip_gradients by norm, {clip_val}")
        self._unscale(optimizer)
        if self._strategy.is_stepping_by_hand:
            self._strategy.check_gradients(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._strategy.sharded.clip_norm(parameters, float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        self._strategy.require(Capability.CLIP_BY_VALUE, f"clip_gradients by value, {clip_val}")
        self._unscale(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._strategy.sharded.clip_value(parameters, float(clip_val))


class ShardedFabricPrecision(_ShardedPrecision, FabricPrecision):
    """Precision of sharded training under Fabric."""

    def convert_output(self, data: Any) -> Any:
        if self.dtypes.input_dtype is torch.float32:
            return data  # as the module computes it, which may be in fp64
        return apply_to_collection(data, Tensor, convert_fp_tensor, dst_type=torch.get_default_dtype())

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        super().backward(self._scale(tensor), model, *args, **kwargs)

    # With this mark, Lightning does not take the method for an override: with one, it refuses torch.autograd.grad.
    backward.__wrapped__ = FabricPrecision.backward  # type: ignore[attr-defined]

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if self.scaler is None:
            with plain_tensors_replicated(optimizer) as as_outside:
                if kwargs.get("closure") is not None:
                    kwargs["closure"] = as_outside(kwargs["closure"])
                return super().optimizer_step(optimizer, **kwargs)
        return self._step_scaled(optimizer, **kwargs)

    def unscale_gradients(self, optimizer: Any) -> None:
        self._unscale(optimizer)
