"""Buffers of modules that recompute their forward pass: the recomputation sees what the first computation has seen.

torch's checkpoint calls a forward pass twice, and what that adds to a buffer is added twice: a batch norm counts each
batch twice, and its running statistics move twice as fast. And where the result depends on a buffer that the forward
pass writes to, such as the vectors of a spectral norm, gradients would be those of another forward pass.
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

__all__ = ["recompute_with_buffers"]

#: In bytes. Smaller buffers are copied before each forward pass: kernels of batch norms count no writes. Larger ones,
#: such as masks, are copied until a forward pass has left them as they were, and again once a write was counted.
_SMALL = 2**20

#: The buffers of some modules, each module's by name.
_BuffersByModule = Sequence[dict[str, Tensor | None]]


def recompute_with_buffers(module: nn.Module, recompute: Callable[..., Any]) -> Callable[..., Any]:
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
    return recompute(_RecomputedCall(forward, module, buffers), *args, **kwargs)


class _Buffers:
    """The buffers of a module and its submodules.

    Args:
        module: The module.

    Attributes:
        by_module: The registered buffers of each module, by name. These are the modules' own dictionaries.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.by_module: _BuffersByModule = [buffers_of(submodule) for submodule in module.modules()]
        #: Large buffers that the last forward pass has not written to, each with torch's count of earlier writes; by
        #: the module's index and the buffer's name.
        self._unwritten: dict[tuple[int, str], tuple[Tensor, int]] = {}
        #: The ids of buffers that share memory with others.
        self._shared: frozenset[int] = frozenset()

    def copy_current(self) -> _BuffersByModule:
        """Copies of the buffers as they are now; large ones that no forward pass has written to are not copied."""
        shared = _copies_of_shared(self.by_module)
        self._shared = frozenset(shared)
        return [
            {
                name: shared[id(buffer)] if id(buffer) in shared else self._copy((index, name), buffer)
                for name, buffer in buffers_of_module.items()
            }
            for index, buffers_of_module in enumerate(self.by_module)
        ]

    def check_written(self, copies: _BuffersByModule) -> None:
        """Find out, after a forward pass, which large buffers it has written to.

        Args:
            copies: What :meth:`copy_current` returned before the forward pass. Copies that are not needed, because it
                has written nothing, are replaced with the buffers.

        Raises:
            UnsupportedCapabilityError: It has written to a buffer that was not copied.
        """
        for index, (buffers, copies_of_module) in enumerate(zip(self.by_module, copies, strict=True)):
            for name, copied in copies_of_module.items():
                if copied is None or copied.nbytes <= _SMALL or copied.device.type == "xla":
                    continue
                buffer = buffers.get(name)
                key = (index, name)
                if id(buffer) in self._shared:
                    self._unwritten.pop(key, None)
                elif key in self._unwritten:
                    if not self._is_unwritten(key, buffer):
                        raise _late_write_refusal(self._module, name)
                elif type(buffer) is Tensor and torch.equal(buffer, copied):
                    self._unwritten[key] = buffer, times_written(buffer)
                    copies_of_module[name] = buffer

    def _copy(self, key: tuple[int, str], buffer: Tensor | None) -> Tensor | None:
        if buffer is None or self._is_unwritten(key, buffer):
            return buffer
        self._unwritten.pop(key, None)  # it was written to between two calls
        return buffer.detach().clone().requires_grad_(buffer.requires_grad)

    def _is_unwritten(self, key: tuple[int, str], buffer: Tensor | None) -> bool:
        known_buffer, count = self._unwritten.get(key, (None, 0))
        return known_buffer is not None and known_buffer is buffer and times_written(known_buffer) == count


def _copies_of_shared(values: _BuffersByModule) -> dict[int, Tensor]:
    """Copies of the buffers that share memory with each other, by the id of the buffer; the copies share memory too."""
    by_memory: dict[int, dict[int, Tensor]] = {}
    for buffers_of_module in values:
        for buffer in buffers_of_module.values():
            if type(buffer) is Tensor and buffer.layout == torch.strided and buffer.device.type != "xla":
                by_memory.setdefault(buffer.untyped_storage().data_ptr(), {})[id(buffer)] = buffer
    by_memory.pop(0, None)  # the address of all that have no elements
    copied: dict[int, Tensor] = {}
    for buffers in by_memory.values():
        if len(buffers) > 1:
            storage = next(iter(buffers.values())).untyped_storage().clone()
            for key, buffer in buffers.items():
                geometry = buffer.storage_offset(), buffer.shape, buffer.stride()
                copy = torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(storage, *geometry)
                copied[key] = copy.requires_grad_(buffer.requires_grad)
    return copied


class _RecomputedCall:
    """A call of a module. When it is computed again, the buffers have the values of its first computation.

    Args:
        forward: The module's forward pass.
        module: The module.
        buffers: Its buffers.
    """

    def __init__(self, forward: Callable[..., Any], module: nn.Module, buffers: _Buffers) -> None:
        self.__self__ = module  # as a method has, which tells whose weights are used
        self._forward, self._buffers = forward, buffers
        self._copies: _BuffersByModule | None = None  # made at the first computation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is compiled writes to buffers once, however often it computes
            return self._forward(*args, **kwargs)
        by_module = self._buffers.by_module
        if self._copies is None:
            self._copies = ()  # a module may have no buffers yet
            if any(by_module):
                # a mode of selective checkpointing counts operations, to find the results that it has kept
                with without_dispatch_modes():
                    self._copies = self._buffers.copy_current()
            output = self._forward(*args, **kwargs)
            if self._copies:
                self._buffers.check_written(self._copies)
            return output
        if not self._copies and not any(by_module):
            return self._forward(*args, **kwargs)
        current_by_module = [dict(buffers) for buffers in by_module]
        self._restore_copies(self._copies or [{} for _ in by_module], current_by_module)
        try:
            return self._forward(*args, **kwargs)
        finally:  # torch ends a recomputation early, by an exception
            for buffers, current in zip(by_module, current_by_module, strict=True):
                buffers.clear()
                buffers.update(current)

    def _restore_copies(self, copies_by_module: _BuffersByModule, current_by_module: _BuffersByModule) -> None:
        """Let modules hold copies of what their buffers were at the first computation, and nothing else."""
        # by the id of the current buffer, so that modules which share a buffer share its copy
        restored: dict[int, Tensor | None] = {}
        with without_dispatch_modes():
            shared = _copies_of_shared(copies_by_module)
            modules = zip(self._buffers.by_module, current_by_module, copies_by_module, strict=True)
            for buffers, current, copies in modules:
                buffers.clear()  # also of what the first computation has registered
                for name, copied in copies.items():
                    key = id(current.get(name))
                    if key not in restored:
                        if copied is None or copied is current.get(name):
                            restored[key] = copied
                        else:
                            restored[key] = shared[id(copied)] if id(copied) in shared else copied.clone()
                    buffers[name] = restored[key]


def _late_write_refusal(module: nn.Module, name: str) -> UnsupportedCapabilityError:
    return UnsupportedCapabilityError(
        f"a forward pass of {type(module).__name__}, which recomputes its activations, has written to the buffer "
        f"{name!r}, which it did not do at first: no copy was kept for the recomputation.\n"
        "Leave the module out of activation_checkpointing_policy, or let it write to the buffer from the first step on."
    )
