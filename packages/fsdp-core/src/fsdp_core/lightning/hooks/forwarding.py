"""What Fabric calls instead of a root that is sharded in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from fsdp_core.lightning.hooks.redirection import called_as_written, normal_tensors
from fsdp_core.sharding.backend import Backend
from fsdp_core.state.full_tensor import gathered_modules

__all__ = ["ShardedForward", "root_of"]


class ShardedForward(nn.Module):
    """Calls a sharded root, and is another object than it.

    Fabric sends a step method through the wrapper's forward, and so through the root's hooks, only if the strategy's
    module is not the user's own. It holds no parameters itself, so names stay the user's. But torch's functions that
    walk down a module, such as ``FullyShardedDataParallel.summon_full_params``, find the root as its child.

    Args:
        root: The sharded root.
        backend: The backend that has sharded it.
    """

    root: nn.Module

    def __init__(self, root: nn.Module, backend: Backend) -> None:
        super().__init__()
        object.__setattr__(self, "root", root)
        self._backend = backend

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.root in gathered_modules:
            return self._backend.written_module(self.root)(*args, **kwargs)
        try:
            with called_as_written(self.root), normal_tensors():
                output = self.root(*args, **kwargs)
        except BaseException:
            self._backend.abandon_forward(self.root)
            self._backend.reshard(self.root)
            raise
        if not torch.is_grad_enabled():
            self._backend.reshard(self.root)
        return output

    def children(self) -> Iterator[nn.Module]:
        yield self.root

    # what walks down by children() and changes parameters reaches them by the user's own module, and once

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        fn(self)
        return self

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return self


def root_of(module: nn.Module) -> nn.Module:
    """The sharded root that a module of Fabric's stands for."""
    return module.root if isinstance(module, ShardedForward) else module
