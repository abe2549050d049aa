"""The gradients of an unfinished accumulation, for checkpoints of Fabric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fsdp_core.errors import ShardingError
from fsdp_core.sharding.sharded import sharded_of
from fsdp_core.sharding.token_windows import current_window
from fsdp_core.state.held_gradients import describe_gradients, gradients_of_rank

__all__ = ["AccumulatedGradients"]


class AccumulatedGradients:
    """The gradients that a model has accumulated since its last optimizer step, on every rank.

    Needed for a checkpoint that is saved between the micro-batches of one step. Save it with the model:
    ``fabric.save(path, {"model": model, "gradients": AccumulatedGradients(model)})``, and load into such a dict before
    the next backward pass. With the same world size, each rank gets its own gradients back, bit for bit; with another
    one, each gets their mean, for which the reduction before the step has the same result.

    Args:
        model: What ``fabric.setup`` returned.

    Attributes:
        module: The user's module in it.

    Raises:
        ShardingError: The model was not set up with one of these strategies.
    """

    def __init__(self, model: nn.Module) -> None:
        sharded_modules = [sharded for sharded in map(sharded_of, model.modules()) if sharded is not None]
        if not sharded_modules:
            raise ShardingError(
                f"{type(model).__name__} is not sharded, so its gradients are its parameters' own .grad.\n"
                "Give AccumulatedGradients the model that fabric.setup(model) has returned under a sharded strategy."
            )
        self._sharded = sharded_modules[0]
        self.module = self._sharded.module

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients of all ranks. All ranks must call it."""
        state = describe_gradients(self._sharded.accumulated_gradients(), self._sharded.runtime) or {}
        tokens = current_window().common_state() if state else None
        return state if tokens is None else {**state, "tokens": tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the current gradients by saved ones."""
        if state:
            self._sharded.restore_gradients(gradients_of_rank(state, self._sharded.runtime), state["reduced"])
            window = current_window()
            optimizers = list(window.owners((), complete=False))
            window.load_state(optimizers, [state.get("tokens")] * len(optimizers))
