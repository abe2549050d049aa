"""A rank's state in host memory, for checkpoints, and its way back to the device.

Slices and copies of state are made on the host, because on the device each would be a graph to compile. For the same
reason a sharded root can adopt tensors into which a checkpoint was read (``Sharded.adopt_model_state``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.state import Layout, SavedTensor
from fsdp_xla.torch_xla_private.devices import on_host

__all__ = ["HostOptimizer", "flat_on_host"]


def flat_on_host(tensor: Tensor) -> Tensor:
    """A shard's elements in host memory, as a 1-D tensor that a layout's ranges index."""
    return on_host(tensor).reshape(-1)


class HostOptimizer:
    """A stand-in for an optimizer, with its shards in host memory, for core's state functions.

    Args:
        optimizer: The optimizer on the device.
        layout: The parts of the user's parameters in its parameters.
        with_state: Whether to hold its state.
        shapes_only: Whether to hold state with the layout of a shard on the meta device, without values.

    Attributes:
        param_groups: The optimizer's param groups, over stand-in parameters.
        state: The optimizer's state, by stand-in parameter.
        layout: The parts of the user's parameters in the stand-in parameters.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, layout: Layout, *, with_state: bool = True, shapes_only: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._stand_ins: dict[nn.Parameter, nn.Parameter] = {}
        self.layout: dict[nn.Parameter, Any] = {}
        for parameter, parts in layout.items():
            self.layout[self._stand_in(parameter)] = parts
        self.param_groups = [
            {**group, "params": [self._stand_in(p) for p in group["params"]]} for group in optimizer.param_groups
        ]
        self.state: dict[nn.Parameter, dict[str, Any]] = {}
        if with_state:
            state: Any = optimizer.state
            for parameter, values in state.items():
                self.state[self._stand_in(parameter)] = {
                    key: _host_value(value, parameter, shapes_only) if isinstance(value, Tensor) else value
                    for key, value in values.items()
                }

    def _stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in self._stand_ins:
            data = torch.zeros((), dtype=parameter.dtype).expand(parameter.numel())
            self._stand_ins[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        return self._stand_ins[parameter]

    def complete(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the state that other ranks' shards have to shards that consist of padding only.

        Its values don't matter. But an optimizer creates missing state at its next step, in a graph that the other
        ranks don't have, and ranks with different graphs deadlock.

        Args:
            saved: The state to restore, by parameter name and key.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                parts = self.layout[parameter]
                values = saved.get(parts[0].name)
                if parameter in self.state or not values:
                    continue
                self.state[parameter] = {
                    key: _padding(value, parts[0].shape, parameter, key) for key, value in values.items()
                }

    def load_into_optimizer(self) -> None:
        """Load this state into the optimizer."""
        device_of = {stand_in: parameter for parameter, stand_in in self._stand_ins.items()}
        for group, host_group in zip(self._optimizer.param_groups, self.param_groups, strict=True):
            group.update({key: value for key, value in host_group.items() if key != "params"})
        self._optimizer.state.clear()
        for stand_in, values in self.state.items():
            parameter = device_of[stand_in]
            self._optimizer.state[parameter] = {
                key: value.view(parameter.shape).to(parameter.device)
                if isinstance(value, Tensor) and value.shape == stand_in.shape and value.ndim
                else value
                for key, value in values.items()
            }


def _host_value(value: Tensor, parameter: nn.Parameter, shapes_only: bool) -> Tensor:
    if value.shape != parameter.shape:
        return on_host(value)
    return torch.empty(value.numel(), dtype=value.dtype, device="meta") if shapes_only else flat_on_host(value)


def _padding(value: Any, shape: tuple[int, ...], parameter: nn.Parameter, key: str) -> Any:
    if not isinstance(value, SavedTensor | Tensor):
        return value
    if tuple(value.shape) == shape and (shape or key != "step"):
        return torch.zeros(parameter.shape, dtype=value.dtype)
    return value.full() if isinstance(value, SavedTensor) else value
