"""Preparing modules for FSDP1: the module to wrap, new parameters instead of the user's, and casts of inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

from fsdp_core.sharding import KeptPart, OutsideAttributes, cast_inputs, let_go_of
from fsdp_core.state import gathered_modules

__all__ = ["WrappedUnit", "called_for", "cast_inputs_of", "renew_parameters"]


class WrappedUnit(OutsideAttributes, FullyShardedDataParallel):
    """A unit, or the root.

    Its modules, parameters and buffers have the user's names: libraries select by them, and FSDP1's are in the middle
    of them, where it wraps. It strips them itself wherever it compares names.
    """

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for wrapped in self.children():
            yield from wrapped.named_modules(memo, prefix, remove_duplicate)


def called_for(root: nn.Module, module: nn.Module) -> nn.Module:
    """The module inside ``root`` to wrap for ``module``: itself, or its compiled version by :func:`torch.compile`.

    A compiled module calls its original directly, and would bypass a wrapper that replaced the original.
    """
    compiled = [parent for parent in root.modules() if dict(parent.named_children()).get("_orig_mod") is module]
    return called_for(root, compiled[0]) if compiled else module


def renew_parameters(
    modules: Iterable[nn.Module], replicated: Sequence[nn.Parameter], device: torch.device
) -> dict[nn.Parameter, KeptPart]:
    """Replace the parameters that modules own with new ones of the same data and attributes.

    FSDP1 would turn the old parameters into shards in place. An optimizer that has stepped over them would then
    continue with state of the old shapes; for new parameters it has to be re-pointed, and is refused if it has stepped.

    Args:
        modules: The modules, each without its children.
        replicated: Parameters to leave as they are.
        device: The device of the units.

    Returns:
        The parts of new parameters that were sharded while they were built; these parameters have no memory.
    """
    renewed: dict[int, nn.Parameter] = {id(p): p for p in replicated}
    parts: dict[nn.Parameter, KeptPart] = {}
    for module in modules:
        for name, old in list(module.named_parameters(recurse=False)):
            if id(old) not in renewed:
                part = let_go_of(old)
                data = old.data if part is None else _unfilled(part, device)
                new = nn.Parameter(data, requires_grad=old.requires_grad)
                new.__dict__.update(old.__dict__)
                renewed[id(old)] = renewed[id(new)] = new
                if part is not None:
                    parts[new] = part
                # an optimizer that is re-pointed later still holds it: keep its shape, but free its memory
                old.data = old.data.new_empty(()).expand(old.shape)
            module._parameters[name] = renewed[id(old)]
    return parts


def _unfilled(part: KeptPart, device: torch.device) -> torch.Tensor:
    tensor = part.part.new_empty(part.shape, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def cast_inputs_of(module: nn.Module, policy: MixedPrecision) -> None:
    """Cast the arguments of the user's module, as the root does with its own.

    Under the Trainer the root calls a step method, and that calls the module.

    Args:
        module: The module that the root wraps.
        policy: The dtype, and whether to cast at all.
    """
    dtype = policy.param_dtype
    if dtype is None or not policy.cast_root_forward_inputs:
        return

    def cast_all(called: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if called in gathered_modules:
            return None  # its parameters are in the dtype of the shards
        return cast_inputs(dtype, args, kwargs)

    module.register_forward_pre_hook(cast_all, with_kwargs=True, prepend=True)
