"""The module that Fabric calls in place of a root that is sharded in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.lightning.outside_steps.error_notes import explain_shards
from fsdp_core.lightning.outside_steps.exporting import users_module_in
from fsdp_core.lightning.outside_steps.redirection import called_as_written, outside_inference_mode
from fsdp_core.sharding.sharded import Sharded, sharded_around, sharded_of
from fsdp_core.state.full_tensor import gathered_modules
from fsdp_core.torch_private.autograd import in_backward
from fsdp_core.torch_private.tensors import tree_flatten

__all__ = ["ShardedForward", "root_around", "set_up_model", "sharded_in"]


class ShardedForward(nn.Module):
    """Calls a sharded root, as a module of its own.

    Fabric sends a step method through its wrapper's forward, and so through the root's hooks, only if the module that
    the strategy returned is not the user's own. This module holds no parameters itself, so that FQNs stay the user's,
    and shows the user's parameters as its own. Functions of torch that traverse a module, such as
    ``FullyShardedDataParallel.summon_full_params``, find the root as its child.

    Args:
        sharded: The sharded root.
        is_stepping: Whether ``fabric.backward()`` is running.
    """

    sharded: Sharded

    def __init__(self, sharded: Sharded, is_stepping: Callable[[], bool]) -> None:
        super().__init__()
        self.sharded = sharded
        self._is_stepping = is_stepping

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        root = self.sharded.root
        if root in gathered_modules:
            return self.sharded.module(*args, **kwargs)
        # If a hook or a recomputation calls the root, the rest of the backward pass needs the gathered parameters.
        is_in_backward = in_backward()
        if is_in_backward:
            self.sharded.is_called_in_backward = True
        try:
            with called_as_written(root), outside_inference_mode():
                output = root(*args, **kwargs)
        except BaseException as error:
            explain_shards(error, [self.sharded], is_inside=True)
            if not is_in_backward:
                self.sharded.abandon_forward()
                self.sharded.end_call()
            raise
        if not torch.is_grad_enabled() and not is_in_backward:  # no backward pass follows that would free parameters
            self.sharded.end_call()
        for tensor in tree_flatten(output)[0]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._check_backward)
        return output

    def _check_backward(self, _: Tensor) -> None:
        if not self._is_stepping() and self.sharded.accumulates():
            raise UnsupportedCapabilityError(
                f"loss.backward() of {self.sharded.plan.class_name} bypasses Fabric, which then does not know of "
                "gradients to reduce, unscale and check.\n"
                "Write fabric.backward(loss). torch.autograd.grad(...), which adds to no gradient, needs nothing else."
            )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the user's module, for code that calls ``strategy.setup_module()`` itself.

        Fabric's own wrapper takes them from the user's module, and does not call this.
        """
        return self.sharded.module.named_parameters(prefix, recurse, remove_duplicate)

    def children(self) -> Iterator[nn.Module]:
        yield self.sharded.root

    # The methods below change parameters of children(). Fabric's wrapper also calls them on the user's module, so here
    # they do nothing, and no parameter is changed twice.

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        fn(self)
        return self

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return self


def sharded_in(module: nn.Module) -> Sharded | None:
    """The sharded root of a module that Fabric passes to its strategy; ``None`` if it is not sharded."""
    return module.sharded if isinstance(module, ShardedForward) else sharded_of(module)


def set_up_model(module: nn.Module) -> Sharded:
    """The sharded state of a model that was set up.

    Args:
        module: What ``fabric.setup`` returned, or the user's module.

    Raises:
        ShardingError: The module was not set up, or is only a part of a model that was.
    """
    sharded = sharded_in(users_module_in(module))
    if sharded is not None:
        return sharded
    owner_and_prefix = sharded_around(users_module_in(module))
    if owner_and_prefix is not None:
        owner, _ = owner_and_prefix
        raise ShardingError(
            f"{type(module).__name__} is a part of {owner.plan.class_name}, which is sharded as a whole.\n"
            "Pass the model that fabric.setup() returned."
        )
    raise ShardingError(
        f"{type(module).__name__} is not sharded.\n"
        "Write `model = fabric.setup(model)` first, and pass what that returns."
    )


def root_around(module: nn.Module) -> Sharded:
    """The root of a model that was set up, given the model, a part of it, or a module around it."""
    owner_and_prefix = sharded_around(users_module_in(module))
    if owner_and_prefix is not None:
        return owner_and_prefix[0]
    for part in module.modules():
        sharded = sharded_in(part)
        if sharded is not None:
            return sharded
    return set_up_model(module)
