"""What users write to gathered parameters, in a step or in a forward pass: it is kept, or refused."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.errors import ShardingError
from fsdp_core.runtime import Runtime
from fsdp_core.torch_private import times_written, uncounted_writes

__all__ = ["GatheredDTensor", "GatheredParameter", "GatheredTensor", "GatheredValue", "WrittenValues", "differs"]


class WrittenValues:
    """What this rank has written to gathered parameters since ranks have last compared it.

    Each rank keeps its own part of what it has written, so all must write the same. They compare a sum and a norm.

    Example:
        >>> values = WrittenValues()
        >>> values.add("weight", torch.ones(2))
        >>> values.take()
        {'weight': (2.0, 1.4142135623730951)}
        >>> values.take()
        {}
    """

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, name: str, value: Tensor) -> None:
        """Add the value of a parameter that was written to."""
        flat = value.detach().reshape(-1)
        flat = torch.view_as_real(flat) if flat.is_complex() else flat
        self._values[name] = torch.stack([flat.sum(dtype=torch.float64), flat.to(torch.float64).norm()])

    def take(self) -> dict[str, tuple[float, float]]:
        """Read the sum and the norm of each, and forget them. It waits for the device, if there are any."""
        values, self._values = self._values, {}
        numbers = torch.stack(list(values.values())).tolist() if values else []
        return {name: (total, norm) for name, (total, norm) in zip(values, numbers, strict=True)}

    @staticmethod
    def digest(values: Mapping[str, tuple[float, float]]) -> int:
        """24 bits that are the same on ranks that have written the same; 0 where nothing was written."""
        told = " ".join(f"{name} {total:.4g} {norm:.4g}" for name, (total, norm) in values.items())
        return zlib.crc32(told.encode()) >> 8 if told else 0

    @staticmethod
    def check_same(values: Mapping[str, tuple[float, float]], ranks: Runtime, by: str) -> None:
        """Refuse what ranks have written differently. All ranks must call it.

        Args:
            values: What :meth:`take` has returned.
            ranks: The ranks.
            by: What has written, for the error.

        Raises:
            ShardingError: A rank has written other values than rank 0, by more than rounding.
        """
        everyones = ranks.gather_objects(dict(values))
        for rank, other in enumerate(everyones):
            for name in {**everyones[0], **other}:
                first, second = everyones[0].get(name), other.get(name)
                if first is not None and second is not None and _is_close(first, second):
                    continue
                wrote = "no values" if first is None else "values"
                raise ShardingError(
                    f"{by} has written to {name!r} on rank {rank} {'nothing' if second is None else 'other values'}, "
                    f"and {wrote} on rank 0. Each rank keeps a part of the parameter, which would be a mixture.\n"
                    "Write the same on every rank: average what it is computed from over the ranks before, with "
                    "self.all_gather(value).mean(0), or torch.distributed.all_reduce; or make it a buffer, of which "
                    "each rank has its own."
                )


def differs(gathered: Tensor, before: Tensor) -> bool:
    """Whether what is gathered, maybe in another dtype, is no copy of what it was gathered from."""
    expected = before.to(gathered.device).to(gathered.dtype)
    a, b = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (gathered, expected))
    return bool(((a != b) & ~(a.isnan() & b.isnan())).any())


def _is_close(first: tuple[float, float], second: tuple[float, float]) -> bool:
    scale = max(first[1], second[1])
    return all(abs(a - b) <= 1e-5 * scale or a == b or (a != a and b != b) for a, b in zip(first, second, strict=True))


class GatheredValue:
    """Whether a gathered parameter was written to.

    torch counts the in-place operations on a tensor, and on what shares its memory. It doesn't count those on
    ``.data``, so who reads that counts as one who may have written.

    Args:
        name: What the user calls it.
        is_trained: Whether the user's parameter requires a gradient; for views of a flat parameter, which may differ.

    Attributes:
        replaces: Whether a library is about to assign to ``.data``, which is refused otherwise.

    Example:
        >>> value = GatheredValue("weight")
        >>> weight = nn.Parameter(torch.ones(2))
        >>> value.follow(weight)
        >>> value.is_written(weight)
        False
        >>> _ = weight.data.mul_(2.0)
        >>> value.is_written(weight)
        True
    """

    def __init__(self, name: str, is_trained: Callable[[], bool] = lambda: True) -> None:
        self.name, self.is_trained = name, is_trained
        self.replaces = False
        self._is_read = False
        self._version = 0

    def follow(self, tensor: Tensor) -> None:
        """Notice writes to a tensor from now on, until it is gone."""
        instance: Any = tensor
        if not isinstance(tensor, _Gathered):
            if isinstance(tensor, DTensor):
                instance.__class__ = GatheredDTensor
            else:
                instance.__class__ = GatheredParameter if isinstance(tensor, nn.Parameter) else GatheredTensor
        instance._fsdp_value = self
        self.taken(tensor)

    def taken(self, tensor: Tensor) -> None:
        """What was written until now is kept."""
        self._version, self._is_read = times_written(tensor), False

    def note(self) -> None:
        """What shares its memory was given to the user."""
        self._is_read = True

    def is_written(self, tensor: Tensor) -> bool:
        """Whether it was written to, or may have been."""
        return self._is_read or times_written(tensor) != self._version

    def keep(self, part: Tensor | None, shard: Tensor, whole: Tensor, values: WrittenValues) -> None:
        """Copy this rank's part of what was written to its shard.

        Args:
            part: The part, in the shape of the shard; ``None`` if there is no such part.
            shard: The shard.
            whole: What was written to.
            values: Gets what was written.

        Raises:
            ShardingError: The parameter is gathered in another dtype, or form, than that of the shard.
        """
        may_differ = part is None or part.dtype != shard.dtype
        if may_differ and part is not None and not differs(part, shard):
            return
        if part is None or may_differ:
            how = "in a form of its own" if part is None else f"in {part.dtype}, and its shards are in {shard.dtype}"
            raise ShardingError(
                f"{self.name!r} was written to while it is gathered {how}: what is written would be lost, or "
                "rounded.\nWrite in on_train_batch_end(), under Fabric after optimizer.step(), where parameters are "
                'shards in the dtype that they are stored in. Or train with precision="32-true", where writes inside '
                "a step are kept."
            )
        with torch.no_grad():
            shard.copy_(part)
        values.add(self.name, whole)


#: What a tensor's ``data`` is without any of this.
_DATA: Any = Tensor.data


class _Gathered:
    _fsdp_value: GatheredValue | None = None

    @property
    def data(self) -> Tensor:
        if self._fsdp_value is not None:
            self._fsdp_value.note()
        data: Tensor = _DATA.__get__(self)
        return data

    @data.setter
    def data(self, data: Tensor) -> None:
        value = self._fsdp_value
        if value is not None and not value.replaces:
            raise ShardingError(
                f"{value.name!r} was given other memory by an assignment to its .data, while it is gathered: the "
                "library would go on with what it has gathered.\n"
                "Write parameter.data.copy_(values), or another in-place operation under torch.no_grad(). To swap the "
                "weights of two modules, do it in a hook between steps, within fsdp_core.gathered(module, "
                "modifier_rank=0)."
            )
        _DATA.__set__(self, data)


class GatheredParameter(_Gathered, nn.Parameter):
    """A parameter that a library has gathered."""


class GatheredDTensor(_Gathered, DTensor):
    """A part of a parameter, which tensor parallelism has divided, that a library has gathered."""


class GatheredTensor(_Gathered, Tensor):
    """A view of a gathered flat parameter, which takes in-place operations as a parameter does.

    torch refuses them on one of several views that were made together, and on each view after one of them was written
    to. They are not counted here: nothing that autograd has saved of other views was changed.
    """

    __torch_function__ = nn.Parameter.__torch_function__  # what is computed with it is a plain tensor


#: What ends with an underscore and writes no values.
_NOT_WRITES = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_", "retain_grad_", "names_"})


def _in_place(name: str) -> Callable[..., Any]:
    operation = getattr(Tensor, name)

    @functools.wraps(operation)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = self._fsdp_value
        if value is None or (torch.is_grad_enabled() and value.is_trained()):
            return operation(self, *args, **kwargs)  # torch refuses it, as for any parameter
        with torch.no_grad(), uncounted_writes(self):
            result = operation(self, *args, **kwargs)
        value.note()
        return result

    return method


for _name in dir(Tensor):
    _is_operator = _name.startswith("__i") and _name not in (
        "__init__",
        "__init_subclass__",
        "__int__",
        "__invert__",
        "__index__",
        "__iter__",
    )
    _is_method = _name.endswith("_") and not _name.startswith("_")
    if _name == "__setitem__" or _is_operator or (_is_method and _name not in _NOT_WRITES):
        setattr(GatheredTensor, _name, _in_place(_name))
