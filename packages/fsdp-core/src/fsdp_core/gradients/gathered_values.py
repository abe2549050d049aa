"""Keeps or refuses what users write to gathered parameters, in a step or in a forward pass."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core import devices
from fsdp_core.errors import ShardingError
from fsdp_core.runtime import Runtime
from fsdp_core.torch_private.dtensors import checks_class_of_views
from fsdp_core.torch_private.dynamo import let_compiled_graphs_take
from fsdp_core.torch_private.tensors import (
    give_class,
    times_written,
    tree_flatten,
    tree_map,
    uncounted_writes,
    without_torch_function,
)

__all__ = [
    "RESHAPED_IN_PLACE",
    "GatheredDTensor",
    "GatheredParameter",
    "GatheredTensor",
    "GatheredValue",
    "WrittenValues",
    "differs",
    "forget_writes",
    "is_gathered",
    "other_tensor_refusal",
]

#: By parameter, the sum and the norm of what was written; or the error message, if what was written can't be kept.
Written = dict[str, tuple[float, float] | str]


class WrittenValues:
    """What this rank has written to gathered parameters since ranks have last compared it.

    Each rank keeps its own part of what it has written, so all must write the same. They compare a sum and a norm.

    Attributes:
        are_compared: Whether ranks will compare the values. If so, what can't be kept is refused then, on all ranks;
            else at once.

    Example:
        >>> values = WrittenValues()
        >>> values.add("weight", torch.ones(2))
        >>> values.take()
        {'weight': (2.0, 1.4142135623730951)}
        >>> values.take()
        {}
    """

    def __init__(self) -> None:
        self.are_compared = True
        self._values: dict[str, Tensor] = {}
        self._refusals: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._values or self._refusals)

    def refuse(self, name: str, message: str) -> None:
        """Refuse to keep what was written to a parameter, when ranks compare what they have written.

        Raises:
            ShardingError: Ranks will not compare.
        """
        if not self.are_compared:
            raise ShardingError(message)
        self._refusals[name] = message

    def add(self, name: str, value: Tensor) -> None:
        """Add the value of a parameter that was written to."""
        flat = value.detach().reshape(-1)
        flat = torch.view_as_real(flat) if flat.is_complex() else flat
        flat = flat if devices.has_float64(flat.device.type) else flat.cpu()
        self._values[name] = torch.stack([flat.sum(dtype=torch.float64), flat.to(torch.float64).norm()])

    def take(self) -> Written:
        """Return the sum and the norm of each value, and forget them. Waits for the device, if there are values."""
        values, refusals = self._values, self._refusals
        self._values, self._refusals = {}, {}
        numbers = torch.stack(list(values.values())).tolist() if values else []
        return {**{name: (total, norm) for name, (total, norm) in zip(values, numbers, strict=True)}, **refusals}

    @staticmethod
    def digest(written: Written, rank: int) -> int:
        """24 bits that are the same on ranks that have written the same; 0 where nothing was written."""
        texts = [
            f"{rank} {value}" if isinstance(value, str) else f"{value[0]:.4g} {value[1]:.4g}"
            for value in written.values()
        ]
        return zlib.crc32(" ".join([*written, *texts]).encode()) >> 8 if written else 0

    @staticmethod
    def check_same(written: Written, ranks: Runtime, by: str) -> None:
        """Refuse what ranks have written differently, or could not keep. All ranks must call it.

        Args:
            written: What :meth:`take` has returned.
            ranks: The ranks.
            by: What has written, for the error.

        Raises:
            ShardingError: A rank has written other values than rank 0, by more than rounding; or what can't be kept.
        """
        values_by_rank: list[Written] = ranks.gather_objects(dict(written))
        refusals = [value for values in values_by_rank for value in values.values() if isinstance(value, str)]
        if refusals:
            raise ShardingError(refusals[0])
        for rank, values in enumerate(values_by_rank):
            for name in {**values_by_rank[0], **values}:
                first = values_by_rank[0].get(name)
                second = values.get(name)
                if isinstance(first, tuple) and isinstance(second, tuple) and _is_close(first, second):
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
    """Whether a gathered tensor, maybe in another dtype, is no copy of the one that it was gathered from."""
    expected = before.to(gathered.device).to(gathered.dtype)
    a, b = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (gathered, expected))
    return bool(((a != b) & ~(a.isnan() & b.isnan())).any())


def _is_close(first: tuple[float, float], second: tuple[float, float]) -> bool:
    scale = max(first[1], second[1])
    return all(abs(a - b) <= 1e-5 * scale or a == b or (a != a and b != b) for a, b in zip(first, second, strict=True))


class GatheredValue:
    """Whether a gathered parameter was written to.

    torch counts the in-place operations on a tensor, and on what shares its memory. It doesn't count those on
    ``.data``, so a parameter whose ``.data`` was read may have been written to.

    Args:
        name: The user's name of the parameter.
        is_trained: For a view of a flat parameter, whether the user's parameter requires a gradient: torch knows that
            of the flat parameter alone.
        train: For such a view, freezes or unfreezes the user's parameter. ``None`` if torch can do that.

    Attributes:
        is_noted: Whether the parameter's ``data`` was read, or :meth:`note` was called.
        has_changed: Whether the parameter was written to without being counted by torch.
        times: How often it had been written to, by torch's count, when what was written was last kept.
        is_data_assignable: Whether the ``.data`` of gathered parameters may be assigned to now, by a library; users'
            assignments are refused.
        shard: Returns the optimizer's parameter, with which hooks are registered.

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

    is_data_assignable: ClassVar[bool] = False

    def __init__(
        self, name: str, is_trained: Callable[[], bool] = lambda: True, train: Callable[[bool], None] | None = None
    ) -> None:
        self.name = name
        self.is_trained = is_trained
        self.train = train
        self.shard: Callable[[], nn.Parameter] | None = None
        self.is_noted = self.has_changed = False
        self.times = 0

    def follow(self, tensor: Tensor, times: int | None = None) -> None:
        """Notice writes to a tensor from now on, until it is gone.

        Args:
            tensor: The tensor.
            times: torch's count of writes to the tensor, if it is known: views of one tensor share the count.
        """
        instance: Any = tensor
        if type(tensor) is Tensor:
            instance.__class__ = GatheredTensor
        elif not isinstance(tensor, _Gathered):
            if isinstance(tensor, DTensor):
                instance.__class__ = GatheredDTensor
            else:
                give_class(tensor, GatheredParameter if isinstance(tensor, nn.Parameter) else GatheredTensor)
        instance._fsdp_value = self
        self.times = times_written(tensor) if times is None else times
        self.is_noted = self.has_changed = False

    def frozen(self, view: Tensor) -> Tensor:
        """What stands for a gathered view while the user's parameter is frozen: the same memory, without a gradient."""
        frozen = self.replaced(view, view.detach())
        vars(frozen)["_fsdp_trained"] = view
        return frozen

    def replaced(self, view: Tensor, new: Tensor) -> Tensor:
        """Let another view of the same memory be followed as this one is."""
        instance: Any = new
        instance.__class__ = type(view)
        vars(new).update((name, value) for name, value in vars(view).items() if name != "_fsdp_trained")
        return new

    def unfrozen(self, view: Tensor) -> Tensor:
        """The view for which one stands that :meth:`frozen` has returned; any other is returned as it is."""
        trained: Tensor = vars(view).get("_fsdp_trained", view)
        return trained

    def mark_kept(self, tensor: Tensor) -> None:
        """Record that what was written until now is kept."""
        self.times = times_written(tensor)
        self.is_noted = False
        self.has_changed = False

    def leave(self, tensor: Tensor, let_go: Callable[[], Tensor]) -> None:
        """Mark a parameter that stays gathered after its unit has been left.

        An operation on it and on shards of other parameters, such as one over ``model.parameters()``, then gets its
        shard instead.

        Args:
            tensor: The parameter.
            let_go: Frees the gathered parameter, and returns its shard.
        """
        instance: Any = tensor
        if not isinstance(tensor, _OutsideUnit):
            instance.__class__ = _outside_unit_class(type(tensor))
        self.let_go = let_go

    def enter(self, tensor: Tensor) -> None:
        """Undo :meth:`leave`, as the unit is entered."""
        instance: Any = tensor
        if type(tensor) is not GatheredParameter and isinstance(tensor, _OutsideUnit):
            instance.__class__ = type(tensor).__bases__[1]

    def note(self, *, has_changed: bool = False) -> None:
        """Record that the user has read the parameter's ``data``, or has written to it without being counted."""
        self.is_noted = True
        self.has_changed = self.has_changed or has_changed

    def is_written(self, tensor: Tensor) -> bool:
        """Whether the parameter was written to, or may have been."""
        if self.is_noted:  # which it also is where has_changed is true
            return True
        try:
            return tensor._version != self.times
        except RuntimeError:  # of an inference tensor
            return self.times != 0

    def is_counted(self, times: int) -> bool:
        """Whether the parameter was written to, and not by way of its ``data`` alone.

        Args:
            times: torch's count of writes to the parameter, or to the tensor that it is a view of.
        """
        return self.has_changed or times != self.times

    def check_own(self, current: Tensor | None, *allowed: Tensor | None) -> None:
        """Refuse to gather a parameter for a module that holds another tensor in its place.

        Args:
            current: What the module holds under the parameter's name; ``None`` if nothing.
            *allowed: The tensors that the library itself puts there.

        Raises:
            ShardingError: The module holds another tensor.
        """
        is_allowed = any(current is tensor for tensor in allowed)
        if current is None or is_allowed or getattr(current, "_fsdp_value", None) is self:
            return
        raise other_tensor_refusal(self.name)

    def keep(
        self, part: Tensor | None, shard: Tensor, whole: Tensor, values: WrittenValues, *, is_counted: bool
    ) -> None:
        """Copy this rank's part of what was written to its shard.

        Args:
            part: The part, in the shape of the shard; ``None`` if the gathered tensor can't be divided like the shard.
            shard: The shard.
            whole: The gathered tensor that was written to.
            values: Gets what was written; or the reason, if it can't be kept: the parameter is gathered in another
                dtype, or form, than that of the shard.
            is_counted: Whether the parameter was certainly written to; else its ``.data`` may only have been read.
        """
        if part is not None and part.dtype != shard.dtype and not is_counted and not differs(part, shard):
            return  # .data was read, and not written to
        if part is None or part.dtype != shard.dtype:
            how = "in a form of its own" if part is None else f"in {part.dtype}, and its shards are in {shard.dtype}"
            values.refuse(
                self.name,
                f"{self.name!r} was written to while it is gathered {how}: what is written would be lost, or "
                "rounded.\nWrite in on_train_batch_end(), under Fabric after optimizer.step(), where parameters are "
                'shards in the dtype that they are stored in. Or train with precision="32-true", where writes inside '
                "a step are kept.",
            )
            return
        with torch.no_grad():
            shard.copy_(part)
        values.add(self.name, whole)


def forget_writes(tensor: Tensor) -> None:
    """Record that what was written to a gathered parameter until now was a library's, and no write of the user's."""
    value: GatheredValue | None = getattr(tensor, "_fsdp_value", None)
    if value is not None:
        value.mark_kept(tensor)


def other_tensor_refusal(name: str) -> ShardingError:
    """The error to raise where a module holds another tensor than its parameter, for a call.

    Args:
        name: What the user calls the parameter.
    """
    return ShardingError(
        f"{name!r} was replaced by another tensor for a call, as torch.func.functional_call() does, or by an "
        "assignment of a parameter in a step. The unit that it belongs to gathers its own parameters, would compute "
        "with these, and would train these.\n"
        "Use auto_wrap_policy=None, and call it inside training_step(): what belongs to no unit takes other weights "
        "there. To train other values from now on, write parameter.data.copy_(values)."
    )


#: torch's own descriptors of ``data`` and ``requires_grad``, which this module's classes override.
_DATA: Any = Tensor.data
_REQUIRES_GRAD: Any = Tensor.requires_grad


class _Gathered:
    """What the classes of gathered parameters have in common: they note how their ``data`` is used."""

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
        if value is not None and not GatheredValue.is_data_assignable:
            if _is_same(data, _DATA.__get__(self)):
                return  # as module.to() assigns where nothing changes
            raise ShardingError(
                f"{value.name!r} would be written to by an assignment to its .data while it is gathered, and the "
                "library would go on with the memory that it has gathered.\n"
                "Write parameter.data.copy_(values), or another in-place operation under torch.no_grad(). To swap the "
                "weights of two modules, write in on_train_batch_end(), within fsdp_core.gathered(module, "
                "modifier_rank=0)."
            )
        _DATA.__set__(self, data)


def _is_same(data: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one memory that is read in one way."""
    return (
        data.device == other.device
        and data.dtype == other.dtype
        and data.shape == other.shape
        and data.stride() == other.stride()
        and data.data_ptr() == other.data_ptr()
    )


def _hook_at_shard(name: str) -> Callable[..., Any]:
    """A method that registers a hook with the shard, where hooks see reduced gradients, or are refused."""
    method = getattr(Tensor, name)

    @functools.wraps(method, assigned=("__module__", "__name__", "__qualname__"))
    def register_at_shard(self: Any, hook: Callable[..., Any]) -> Any:
        value: GatheredValue | None = self._fsdp_value
        if value is None or value.shard is None:
            return method(self, hook)
        return getattr(value.shard(), name)(hook)

    return register_at_shard


for _name in ("register_hook", "register_post_accumulate_grad_hook"):
    setattr(_Gathered, _name, _hook_at_shard(_name))


#: In-place methods after which a tensor has another shape, other strides or other memory.
RESHAPED_IN_PLACE = frozenset(
    {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "resize_", "resize_as_"}
    | {"set_"}
)


def _refuse_in_place(name: str) -> Callable[..., Any]:
    """A method in place of one that changes the shape or the memory of a tensor: it refuses that while gathered."""
    method = getattr(Tensor, name)

    @functools.wraps(method, assigned=("__module__", "__name__", "__qualname__"))
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        value: GatheredValue | None = self._fsdp_value
        if value is None:
            return method(self, *args, **kwargs)
        raise ShardingError(
            f"{name}() of {value.name!r} while it is gathered would give it another shape or other memory, and its "
            "shards, and the backward pass, go on with its own.\n"
            "Write what it changes where the parameter is used, such as parameter.t(); or give it other values of its "
            "own shape, with parameter.copy_(parameter.t().clone()) under torch.no_grad()."
        )

    return refuse


for _name in RESHAPED_IN_PLACE:
    setattr(_Gathered, _name, _refuse_in_place(_name))


class _OutsideUnit:
    """A gathered parameter outside of its unit, or its ``data``. The parameters of other units are shards there."""

    _fsdp_value: GatheredValue | None

    @property
    def data(self) -> Tensor:
        data: Any = super().data  # type: ignore[misc]
        give_class(data, _outside_unit_class(Tensor))
        data._fsdp_value = self._fsdp_value
        tensor: Tensor = data
        return tensor

    @data.setter
    def data(self, data: Tensor) -> None:
        _Gathered.data.fset(self, data)  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            arguments = args, kwargs or {}
            leaves = tree_flatten(arguments)[0]
            if any(isinstance(leaf, DTensor) and not isinstance(leaf, _OutsideUnit) for leaf in leaves):
                arguments = tree_map(_shard_of, arguments)
            return func(*arguments[0], **arguments[1])


def _shard_of(value: Any) -> Any:
    if not isinstance(value, _OutsideUnit) or value._fsdp_value is None:
        return value
    shard = value._fsdp_value.let_go()
    return shard if isinstance(value, nn.Parameter) else shard.data


@functools.cache
def _outside_unit_class(tensor_class: type[Tensor]) -> type:
    return type(tensor_class.__name__, (_OutsideUnit, tensor_class), {})


def is_gathered(tensor: Tensor) -> bool:
    """Whether a module holds a tensor that a library has gathered."""
    return isinstance(tensor, _Gathered)


class GatheredParameter(_Gathered, nn.Parameter):
    """A parameter that a library has gathered."""


class GatheredDTensor(_Gathered, DTensor):
    """A part of a parameter, which tensor parallelism has divided, that a library has gathered."""

    @classmethod
    def __tensor_unflatten__(cls, *parts: Any) -> DTensor:
        """A tensor of this class: ``torch.compile`` traces with one, and takes no other class in later calls."""
        tensor: Any = DTensor.__tensor_unflatten__(*parts)
        tensor.__class__ = cls
        result: DTensor = tensor
        return result

    if checks_class_of_views():

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return _as_plain_dtensors(super().__torch_dispatch__, func, types, args, kwargs or {})


def _as_plain_dtensors(dispatch: Callable[..., Any], func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Compute with gathered DTensors as with plain ones: torch makes views of them plain, and checks the class."""
    leaves: list[Any] = tree_flatten((args, kwargs))[0]
    gathered: list[tuple[Any, Any]] = [(leaf, type(leaf)) for leaf in leaves if isinstance(leaf, GatheredDTensor)]
    for leaf, _ in gathered:
        leaf.__class__ = DTensor
    try:
        return dispatch(func, types, args, kwargs)
    finally:
        for leaf, tensor_class in gathered:
            leaf.__class__ = tensor_class


class GatheredTensor(_Gathered, Tensor):
    """A view of a gathered flat parameter, which takes in-place operations as a parameter does.

    torch refuses them on a view that was made together with others, and on all of these after one was written to. Here
    they are let through, and torch does not count them: autograd has saved nothing of the other views that they change.
    """

    __torch_function__ = nn.Parameter.__torch_function__  # what is computed with it is a plain tensor

    @property
    def requires_grad(self) -> bool:
        """That of the user's parameter. torch refuses to change a view's."""
        value = getattr(self, "_fsdp_value", None)
        required: bool = _REQUIRES_GRAD.__get__(self)
        return required if value is None or value.train is None else value.is_trained()

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        value = getattr(self, "_fsdp_value", None)
        if value is None or value.train is None:
            return Tensor.requires_grad_(self, requires_grad)
        value.train(requires_grad)
        return self


#: Methods whose names end with an underscore, and which write no values.
_NOT_WRITES = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_", "retain_grad_", "names_"})


def _make_uncounted(name: str) -> Callable[..., Any]:
    """A method in place of an in-place operation: it writes without torch's count, and notes the write."""
    operation = getattr(Tensor, name)

    @functools.wraps(operation, assigned=("__module__", "__name__", "__qualname__"))  # torch's examples are no doctests
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = self._fsdp_value
        if value is None or (torch.is_grad_enabled() and value.is_trained()):
            return operation(self, *args, **kwargs)  # torch refuses it, as for any parameter
        with torch.no_grad(), uncounted_writes(self):
            result = operation(self, *args, **kwargs)
        value.note(has_changed=True)
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
    if _name == "__setitem__" or _is_operator or (_is_method and _name not in _NOT_WRITES | RESHAPED_IN_PLACE):
        setattr(GatheredTensor, _name, _make_uncounted(_name))

let_compiled_graphs_take(GatheredTensor)
