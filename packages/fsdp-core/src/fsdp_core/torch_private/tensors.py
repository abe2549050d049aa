"""Tensors: their memory, their versions, and the modes that see operations on them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

__all__ = [
    "StorageAddress",
    "TorchDispatchMode",
    "foreach_mul_",
    "foreach_norm",
    "give_class",
    "hooks_on",
    "is_fake",
    "skipped_initialiser",
    "storage_address",
    "times_written",
    "tree_flatten",
    "tree_map",
    "uncounted_writes",
    "users_of_storage",
    "without_dispatch_modes",
    "without_torch_function",
]


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors on one device in place, with as few kernels as torch's own optimizers use.

    torch has no public fused multiplication over a list.
    """
    torch._foreach_mul_(tensors, factor)


def foreach_norm(tensors: list[Tensor], norm_type: float) -> list[Tensor]:
    """Norms of tensors of the same device and dtype, accumulated in fp32, in one kernel.

    ``torch.nn.utils.get_total_norm`` is public, but rounds the norms of bf16 gradients to bf16.
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype))


def hooks_on(parameter: Tensor) -> bool:
    """Whether gradient hooks are registered on a parameter. There is no public way to check."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def give_class(tensor: Tensor, tensor_class: type[Tensor]) -> None:
    """Change the class of a tensor; a fake one, which has no memory, stays fake.

    Args:
        tensor: A plain tensor, or one whose class was changed so before.
        tensor_class: A class whose tensors have no more memory than plain ones.
    """
    instance: Any = tensor
    instance.__class__ = _fake_class(tensor_class) if is_fake(tensor) else tensor_class


@functools.cache
def _fake_class(tensor_class: type[Tensor]) -> type[Tensor]:
    return type(tensor_class.__name__, (tensor_class, FakeTensor), {})


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is one of a rehearsal: it has a shape and a device, and no values."""
    return isinstance(tensor, FakeTensor)


#: The identity of a storage, and a tensor's offset in it.
StorageAddress = tuple[int, int]


def storage_address(tensor: Tensor) -> StorageAddress:
    """The storage and offset of a tensor: equal for a tensor and views at the same offset, while one of them is alive.

    ``data_ptr()`` is public, but is not an address on devices such as XLA's, where all tensors return the same value.
    """
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def users_of_storage(tensor: Tensor) -> int:
    """The number of tensors that share this tensor's storage, itself included.

    No public API counts them.
    """
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # without the `storage` object above


def without_torch_function() -> AbstractContextManager[Any]:
    """A context in which a ``Tensor`` subclass behaves as a plain tensor; the public APIs return the subclass again."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return context


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """A context in which no mode sees operations, such as the one that keeps results for a selective checkpoint."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def skipped_initialiser(attribute: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The function of ``torch.nn.init`` that is about to skip a meta tensor, and its arguments.

    From torch 2.13 on, some of these functions return at once if ``tensor.is_meta``. Called from
    ``__torch_function__`` when that attribute is read. Callers may hold references to the functions, so patching
    ``torch.nn.init`` would not reach all of them.
    """
    if getattr(attribute, "__self__", None) is not Tensor.is_meta:
        return None
    frame: FrameType | None = sys._getframe(2)
    if frame is None or frame.f_globals.get("__name__") != "torch.nn.init":
        return None
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return frame.f_globals[code.co_name], {name: frame.f_locals[name] for name in names}


def times_written(tensor: Tensor) -> int:
    """How often a tensor, or one that shares its memory, was written in place; 0 for inference tensors.

    Autograd counts it to detect writes to what a backward pass needs. No public name exists.
    """
    try:
        return tensor._version
    except RuntimeError:  # of an inference tensor
        return 0


def uncounted_writes(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which writes to a tensor are not counted; sharding libraries gather parameters in such a context."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
