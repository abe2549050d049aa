"""What the user's module is called with, in the dtype that units compute in."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecision

from fsdp_core.state import gathered_modules
from fsdp_cuda_native.torch_private import flat_parameters as torch_private

__all__ = ["cast_inputs_of"]


def cast_inputs_of(module: nn.Module, policy: MixedPrecision) -> None:
    """Cast what the user's module is called with, as the root does where it is called itself.

    Under the Trainer a step method is what the root calls, and it calls the module.

    Args:
        module: The one that the root wraps.
        policy: Says to which dtype, and whether at all.
    """
    dtype = policy.param_dtype
    if dtype is None or not policy.cast_root_forward_inputs:
        return

    def cast_all(called: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if called in gathered_modules:
            return None  # its parameters are in the dtype of the shards
        return torch_private.cast_inputs(dtype, args, kwargs)

    module.register_forward_pre_hook(cast_all, with_kwargs=True, prepend=True)
