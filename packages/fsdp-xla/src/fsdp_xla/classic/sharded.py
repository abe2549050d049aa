"""A module sharded by ``XlaFullyShardedDataParallel``: its steps and its state. Independent of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp_core import Sharded, UnsupportedCapabilityError
from fsdp_core.sharding import ParameterOrders, StepWrites, clip_grads_by_norm, is_recomputing
from fsdp_core.state import (
    HeldGradients,
    Layout,
    SavedTensor,
    aliases,
    clean_name,
    load_optimizer_state,
    optimizer_state,
    state_by_name,
)
from fsdp_xla.classic.accumulated_gradients import copy_gradients, restore_gradients, zero_unreduced
from fsdp_xla.classic.host_state import HostOptimizer, flat_on_host
from fsdp_xla.classic.lazy_state import DeviceFlat, read_late
from fsdp_xla.classic.unflattened import as_user_wrote, layout_of, named_members
from fsdp_xla.torch_xla_private import devices as xla
from fsdp_xla.torch_xla_private import units
from fsdp_xla.torch_xla_private.units import XlaFullyShardedDataParallel, is_shard

if TYPE_CHECKING:
    from fsdp_xla.classic.backend import XLABackend

__all__ = ["XLASharded", "call_in_backward_error"]


def call_in_backward_error() -> UnsupportedCapabilityError:
    """Return the error for a call inside a backward pass that would free what this pass still needs."""
    return UnsupportedCapabilityError(
        "the model was called inside a backward pass, and an earlier call still waits for its own: torch_xla's "
        "XlaFullyShardedDataParallel would free what that needs.\n"
        "Call backward() on the two losses one after the other, or use strategy='xla_fsdp_spmd'."
    )


class XLASharded(Sharded):
    """A module whose parameters are sharded into runs of consecutive elements, one for each rank.

    Args:
        root: torch_xla's wrapper of the user's module.
        module: The user's module.
        orders: The original order of parameters in modules.
    """

    backend: XLABackend

    def __init__(self, root: XlaFullyShardedDataParallel, module: nn.Module, orders: ParameterOrders) -> None:
        super().__init__(root, module)
        self._orders = orders
        #: Whether backward passes or optimizer steps run inside the forward pass.
        self._is_manual = False
        self._is_loading = False

    # -- structure -------------------------------------------------------------------------------------------------

    @contextmanager
    def unsharded_view(self) -> Iterator[None]:
        with as_user_wrote(self.root, self._orders) as by_name:
            self.remember(by_name.items())
            yield

    def layout(self) -> Layout:
        return layout_of(self.root)

    def holds_part(self, parameter: Tensor) -> bool:
        return is_shard(parameter)

    # -- steps -----------------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        return units.no_reduction(self.root)

    def reshard(self) -> None:
        if self._is_manual:
            self._is_manual = False
            units.end_step(self.root)
        units.free_gathered(self.root)

    def suspend_forward(self, loss: Tensor | None = None) -> None:
        self._is_manual = True
        if loss is not None:  # otherwise an optimizer step comes, which needs no change of state
            units.suspend_forward(self.root)

    def resume_forward(self) -> None:
        self._is_manual = True
        units.resume_forward(self.root)

    def follow_written_shards(self) -> None:
        units.follow_frozen_shards(self.root)
        if self._is_manual:  # in an automatic step, such writes are refused
            units.follow_written_shards(self.root)

    def watch_writes(self) -> StepWrites | None:
        return units.Writes(self.root, lambda: self._is_manual)

    def follow_requires_grad(self) -> None:
        self._is_manual = True
        units.follow_requires_grad(self.root)

    def gather_again(self) -> None:
        # During a recomputation the parameters are gathered, though torch_xla says otherwise once it has freed one of
        # them.
        if not self.root.has_full_params and not is_recomputing():
            raise call_in_backward_error()

    def reset(self) -> None:
        self._is_manual = False
        units.reset(self.root)

    def clip_norm(
        self,
        parameters: Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        return clip_grads_by_norm(
            parameters,
            max_norm,
            runtime=self.backend.runtime.in_graph(),
            is_sharded=self.holds_part,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    # -- state -----------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        self.reshard()
        xla.settle()
        reads_late = self.backend.options.sequential_save and not self._is_loading  # a load fills chunks in memory
        shards: dict[str, Any] = {}
        for shard, parts in self.layout().items():
            if reads_late:
                device_flat = DeviceFlat(shard, parts)
                shards.update((part.name, device_flat.part(part)) for part in parts)
            else:
                host_flat = flat_on_host(shard)
                shards.update((part.name, part.of(host_flat)) for part in parts)
        with self.unsharded_view():
            user_module = self.module
            state = {clean_name(name): value for name, value in type(user_module).state_dict(user_module).items()}
            first_names = aliases(user_module)
        values: dict[str, Any] = {}
        for name, value in state.items():
            first_name = first_names.get(name, name)
            if first_name in shards:
                values[name] = shards[first_name]
            else:
                values[name] = xla.on_host(value) if isinstance(value, Tensor) else value
        return values

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True, *, check_only: bool = False) -> None:
        self._is_loading = True
        try:
            super().load_model_state(state, strict, check_only=check_only)
        finally:
            self._is_loading = False

    def adopt_model_state(self, state: Mapping[str, Any]) -> None:
        flat_values: dict[nn.Parameter, Tensor] = {}
        for name, member in named_members(self.root):
            if name in state:
                if member.shard not in flat_values:
                    flat_values[member.shard] = flat_on_host(member.shard)
                position = member.offset
                for chunk in state[name].chunks:
                    flat_values[member.shard][position : position + chunk.data.numel()] = chunk.data.reshape(-1)
                    position += chunk.data.numel()
        for shard in xla.in_order(flat_values):  # so that the tensors' ids keep their order
            xla.replace(shard, flat_values[shard].view(shard.shape))
        for name, buffer in self.module.named_buffers():
            loaded = state.get(clean_name(name))
            if isinstance(loaded, Tensor):
                xla.replace(buffer, loaded)
        xla.settle()

    def accumulated_gradients(self) -> HeldGradients:
        self.reshard()
        xla.settle()
        return copy_gradients(self.root, self.layout())

    def forget_unreduced(self, names: Collection[str]) -> None:
        zero_unreduced(self.root, names)

    def restore_gradients(
        self, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        self.reshard()
        restore_gradients(self.root, self.layout(), own, reduced, self.runtime)
        xla.settle()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self.reshard()
        xla.settle()
        layout, reads_late = self.layout(), self.backend.options.sequential_save
        host_optimizer: Any = HostOptimizer(optimizer, layout, shapes_only=reads_late)
        named_state = optimizer_state(host_optimizer, host_optimizer.layout, self.runtime)
        return read_late(named_state, optimizer, layout) if reads_late else named_state

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, check_only: bool = False
    ) -> None:
        self.reshard()
        xla.settle()
        host_optimizer: Any = HostOptimizer(optimizer, self.layout(), with_state=False)
        load_optimizer_state(host_optimizer, host_optimizer.layout, state, check_only=check_only)
        if check_only:
            return
        host_optimizer.complete(state_by_name(host_optimizer, host_optimizer.layout, state)["state"])
        host_optimizer.load_into_optimizer()
        xla.settle()
