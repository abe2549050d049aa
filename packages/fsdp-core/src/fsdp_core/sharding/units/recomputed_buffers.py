"""Buffers of modules that compute their forward pass again: the second time, they see what the first has seen.

torch's checkpoint calls a forward pass twice, and what that adds to a buffer is added twice: a batch norm counts each
batch twice, and its running statistics move twice as fast. And where what is computed depends on a buffer that the
forward pass writes to, as on the vectors of a spectral norm, gradients would be those of another forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.torch_private.modules import buffers_of
from fsdp_core.torch_private.tensors import times_written, without_dispatch_modes

__all__ = ["recomputing"]

#: In bytes. Smaller buffers are copied before each forward pass: kernels of batch norms count no writes. Larger ones,
#: such as masks, are copied until a forward pass has left them as they were, and again once a write was counted.
_SMALL = 2**20

#: The buffers of some modules, each module's by name.
_Values = Sequence[dict[str, Tensor | None]]


def recomputing(module: nn.Module, recompute: Callable[..., Any]) -> Callable[..., Any]:
    """The forward pass of a module that recomputes, so that only the first computation of a call writes to buffers.

    Args:
        module: The module. Buffers of its submodules are meant too.
        recompute: Calls its first argument with the others, and again in the backward pass.
    """
    return partial(_forward, recompute, module.forward, module, _Buffers(module))


def _forward(
    recompute: Callable[..., Any],
    forward: Callable[..., Any],
    module: nn.Module,
    buffers: _Buffers,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return recompute(forward, *args, **kwargs)
    return recompute(_Call(forward, module, buffers), *args, **kwargs)


class _Buffers:
    """The buffers of a module and its submodules.

    Args:
        module: The module.

    Attributes:
        by_module: The registered buffers of each module, by name. These are the modules' own dictionaries.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.by_module: _Values = [buffers_of(submodule) for submodule in module.modules()]
        self._unwritten: dict[tuple[int, str], tuple[Tensor, int]] = {}  # large ones, and how often they were written
        self._shared: frozenset[int] = frozenset()  # the ids of those that share memory with others

    def copies(self) -> _Values:
        """What they are now. Of large ones that no forward pass has written to, the buffers themselves."""
        shared = _copies_of_shared(self.by_module)
        self._shared = frozenset(shared)
        return [
            {
                name: shared[id(buffer)] if id(buffer) in shared else self._copy((i, name), buffer)
                for name, buffer in buffers_of_module.items()
            }
            for i, buffers_of_module in enumerate(self.by_module)
        ]

    def look_at(self, before: _Values) -> None:
        """Look, after a forward pass, at which large ones it has written to.

        Args:
            before: What :meth:`copies` returned before it. Copies that nobody needs are left out.

        Raises:
            UnsupportedCapabilityError: It has written to one that is not among the copies.
        """
        for i, (now, then) in enumerate(zip(self.by_module, before, strict=True)):
            for name, copied in then.items():
                if copied is None or copied.nbytes <= _SMALL or copied.device.type == "xla":
                    continue
                buffer = now.get(name)
                key = (i, name)
                if id(buffer) in self._shared:
                    self._unwritten.pop(key, None)
                elif key in self._unwritten:
                    if not self._is_as_noted(key, buffer):
                        raise _late_write_refusal(self._module, name)
                elif type(buffer) is Tensor and torch.equal(buffer, copied):
                    self._unwritten[key] = buffer, times_written(buffer)
                    then[name] = buffer

    def _copy(self, key: tuple[int, str], buffer: Tensor | None) -> Tensor | None:
        if buffer is None or self._is_as_noted(key, buffer):
            return buffer
        self._unwritten.pop(key, None)  # it was written to between two calls
        return buffer.detach().clone().requires_grad_(buffer.requires_grad)

    def _is_as_noted(self, key: tuple[int, str], buffer: Tensor | None) -> bool:
        known_buffer, count = self._unwritten.get(key, (None, 0))
        return known_buffer is not None and known_buffer is buffer and times_written(known_buffer) == count


def _copies_of_shared(values: _Values) -> dict[int, Tensor]:
    """Copies of those buffers that share memory with another one, as these copies then do, by the ids of the former."""
    by_memory: dict[int, dict[int, Tensor]] = {}
    for buffers_of_module in values:
        for buffer in buffers_of_module.values():
            if type(buffer) is Tensor and buffer.layout == torch.strided and buffer.device.type != "xla":
                by_memory.setdefault(buffer.untyped_storage().data_ptr(), {})[id(buffer)] = buffer
    by_memory.pop(0, None)  # of those without elements
    copied: dict[int, Tensor] = {}
    for buffers in by_memory.values():
        if len(buffers) > 1:
            storage = next(iter(buffers.values())).untyped_storage().clone()
            for key, buffer in buffers.items():
                geometry = buffer.storage_offset(), buffer.shape, buffer.stride()
                copy = torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(storage, *geometry)
                copied[key] = copy.requires_grad_(buffer.requires_grad)
    return copied


class _Call:
    """A call of a module: the first time as it is, and then over what the buffers were the first time.

    Args:
        forward: The module's forward pass.
        module: The module.
        buffers: Its buffers.
    """

    def __init__(self, forward: Callable[..., Any], module: nn.Module, buffers: _Buffers) -> None:
        self.__self__ = module  # as a method has, which tells whose weights are used
        self._forward, self._buffers = forward, buffers
        self._before: _Values | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is compiled writes to buffers once, however often it computes
            return self._forward(*args, **kwargs)
        by_module = self._buffers.by_module
        if self._before is None:
            self._before = ()  # none, of a module that has none yet
            if any(by_module):
                with without_dispatch_modes():  # one of which counts operations, to find the results that it has kept
                    self._before = self._buffers.copies()
            output = self._forward(*args, **kwargs)
            if self._before:
                self._buffers.look_at(self._before)
            return output
        if not self._before and not any(by_module):
            return self._forward(*args, **kwargs)
        now = [dict(of) for of in by_module]
        before = self._before or [{} for _ in by_module]
        same: dict[int, Tensor | None] = {}  # a buffer of two modules stays one
        with without_dispatch_modes():
            shared = _copies_of_shared(before)
            for of, current, then in zip(by_module, now, before, strict=True):
                of.clear()  # also of what the first computation has registered
                for name, value in then.items():
                    key = id(current.get(name))
                    if key not in same:
                        if value is None or value is current.get(name):
                            same[key] = value
                        else:
                            same[key] = shared[id(value)] if id(value) in shared else value.clone()
                    of[name] = same[key]
        try:
            return self._forward(*args, **kwargs)
        finally:  # torch leaves it early, by an exception
            for of, current in zip(by_module, now, strict=True):
                of.clear()
                of.update(current)


def _late_write_refusal(module: nn.Module, name: str) -> UnsupportedCapabilityError:
    return UnsupportedCapabilityError(
        f"a forward pass of {type(module).__name__}, which recomputes its activations, has written to the buffer "
        f"{name!r}, which it did not do at first: no copy was kept for the recomputation.\n"
        "Leave the module out of activation_checkpointing_policy, or let it write to the buffer from the first step on."
    )
