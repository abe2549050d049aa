"""What a unit exchanges with its caller besides tensors: containers and objects that it changes or returns.

Libraries that gather for a unit's forward pass copy the containers that the unit is called with, to cast what is in
them or to put it into the autograd graph: what the unit then appends or sets is lost, without a word. And they find
the tensors that it returns only in containers that they know: for others they gather nothing in the backward pass.
What a unit returns to be computed later, as a generator, would find its parameters freed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from types import AsyncGeneratorType, CellType, CoroutineType, GeneratorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from fsdp_core.devices import has_addresses
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.gradients.gathered_values import is_gathered
from fsdp_core.sharding.units.outside_attributes import users_module
from fsdp_core.state.full_tensor import gathered_modules
from fsdp_core.torch_private.autograd import in_dual_level, is_view, running_transforms
from fsdp_core.torch_private.dynamo import outside_of_compilation
from fsdp_core.torch_private.tensors import tree_flatten

__all__ = ["RefusedTransforms", "UnitCalls"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefusedTransforms:
    """The transforms of ``torch.func`` in which a library can't gather for a unit's call.

    Args:
        transforms: Their names: ``"grad"``, also of ``vjp`` and ``jacrev``; ``"jvp"``; ``"vmap"``.
        duals: Whether it can't gather for dual tensors of ``torch.autograd.forward_ad`` either, if they require
            gradients.
        instead: What to write, for the error.

    Example:
        >>> refused = RefusedTransforms(transforms=frozenset({"vmap"}), instead="Call it with the batch.")
        >>> refused.check(nn.Identity(), [])
        >>> torch.func.vmap(lambda x: refused.check(nn.Identity(), [x]) or x)(torch.ones(2))
        Traceback (most recent call last):
            ...
        fsdp_core.errors.UnsupportedCapabilityError: a unit, Identity, was called in torch.func's vmap: ...
    """

    transforms: frozenset[str]
    duals: bool = False
    instead: str

    def check(self, unit: nn.Module, values: Iterable[Any]) -> None:
        """Refuse a call.

        Args:
            unit: The unit.
            values: Its arguments.

        Raises:
            UnsupportedCapabilityError: It is in such a transform.
        """
        running = running_transforms()
        transform = next((name for name in running if name in self.transforms), None)
        if transform is not None:
            names = "grad, vjp, jacrev or hessian" if transform == "grad" else transform
            context = f"torch.func's {names}"
        elif self.duals and not running and in_dual_level() and any(map(_is_dual_in_graph, tree_flatten(values)[0])):
            context = "a dual_level() of torch.autograd.forward_ad, while gradients are recorded"
        else:
            return
        raise UnsupportedCapabilityError(
            f"a unit, {_class_name(unit)}, was called in {context}: its parameters can't be gathered and "
            "freed in there.\n"
            f"{self.instead} Or use auto_wrap_policy=None, for one unit, and call torch.func inside training_step()."
        )


def _is_dual_in_graph(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.requires_grad or not torch.is_grad_enabled():
        return False
    return forward_ad.unpack_dual(value).tangent is not None


class UnitCalls:
    """Lets a unit's caller get what the unit puts into its arguments, and a library see all tensors that it returns.

    Its methods are hooks of the unit, in this order: :meth:`enter`, what the library does before the unit computes,
    :meth:`begin`, the unit, what the library does with its output, :meth:`leave`.

    Args:
        show: Called with the tensors that require gradients and leave the unit elsewhere than in its output, or in
            objects that the library doesn't look into. It lets the library gather before their backward pass.
        modules: Those in whose attributes the unit may leave tensors, such as a part of the loss.
        refused: The transforms in which the library can't gather.
        end_without_output: Called when a call has ended that has returned ``None``, or raised.
    """

    def __init__(
        self,
        show: Callable[[list[Tensor]], None],
        modules: Iterable[nn.Module] = (),
        refused: RefusedTransforms | None = None,
        end_without_output: Callable[[], None] | None = None,
    ) -> None:
        self._show = show
        self._refused = refused
        self._end_without_output = end_without_output
        attributes = list(map(vars, modules))
        self._attributes = [module_attributes.values() for module_attributes in attributes]
        self._skipped_counts = list(map(_count_skipped, attributes))
        #: Types of attributes that are no tensors.
        self._tensorless_types: set[type] = {type(None), bool, int, float, str}
        #: For each call that runs, the innermost last: its containers, if it has any, and the tensors that were hidden
        #: in its arguments before.
        self._open_calls: list[tuple[_Call | None, list[Tensor]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitCalls:
        return UnitCalls(_ignore_tensors)  # of a copy, which is not sharded

    @outside_of_compilation
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the caller's arguments. A forward pre-hook with keyword arguments.

        Raises:
            UnsupportedCapabilityError: A function is transformed in a way in which the library can't gather.
        """
        arguments = [*args, *kwargs.values()]
        if self._refused is not None and module not in gathered_modules:
            self._refused.check(module, arguments)
        if _are_plain(arguments):
            self._open_calls.append((None, []))
            return
        call = _Call(arguments) if any(map(_holds_container, arguments)) else None
        hidden_before = list(_hidden_tensors(arguments)) if torch.is_grad_enabled() else []
        self._open_calls.append((call, hidden_before))

    @outside_of_compilation
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take what the library passes on. A forward pre-hook with keyword arguments."""
        call = self._open_calls[-1][0] if self._open_calls else None
        if call is not None:
            call.begin([*args, *kwargs.values()])

    @outside_of_compilation
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Return to the caller. A forward hook that is called after an exception too.

        Raises:
            ShardingError: What the unit returns would compute with its parameters later.
        """
        if output is None and self._end_without_output is not None:
            self._end_without_output()
        call, hidden_before = self._open_calls.pop() if self._open_calls else (None, [])
        new_values = [] if call is None else tree_flatten(call.give_back())[0]
        _refuse_use_of_freed_parameters(module, output)
        if not torch.is_grad_enabled():
            return
        tensors = [value for value in new_values if isinstance(value, Tensor)]
        mutable_args = [] if call is None and not hidden_before and _are_plain(args) else [args]
        if not isinstance(output, Tensor) or mutable_args:
            ids_before = set(map(id, hidden_before))
            tensors += [value for value in _hidden_tensors([output, *mutable_args]) if id(value) not in ids_before]
        # compare types first: map loops over the attributes of all modules in C
        attributes = chain.from_iterable(self._attributes_by_module())
        if not self._tensorless_types.issuperset(map(type, attributes)):
            for attributes_of_module in self._attributes_by_module():
                tensors += self._tensors_among(attributes_of_module)
        computed_tensors = [value for value in tensors if value.requires_grad and value.grad_fn is not None]
        if computed_tensors:
            self._show(computed_tensors)

    def _attributes_by_module(self) -> Iterable[Iterable[Any]]:
        return map(islice, self._attributes, self._skipped_counts, repeat(None))

    def _tensors_among(self, attributes: Iterable[Any]) -> list[Tensor]:
        """The tensors among a module's attributes that are no parameters. Notes the types of other attributes."""
        tensors = []
        for value in attributes:
            if not isinstance(value, Tensor):
                self._tensorless_types.add(type(value))
            elif not is_gathered(value):
                tensors.append(value)
        return tensors


#: The attributes that any module has, none of which a unit sets to a tensor.
_MODULE_ATTRIBUTES = list(vars(nn.Module()))


def _count_skipped(attributes: dict[str, Any]) -> int:
    """How many attributes of a module to skip: those that every module has, if they come first."""
    count = len(_MODULE_ATTRIBUTES)
    return count if list(islice(attributes, count)) == _MODULE_ATTRIBUTES else 0


def _refuse_use_of_freed_parameters(module: nn.Module, output: Any) -> None:
    """Refuse what a unit returns if it is a parameter, which is freed now, or would compute with one later."""
    if isinstance(output, Tensor):
        returns_freed = _is_freed(output)
    else:
        deferred = _describe_deferred(output)
        if deferred is not None:
            raise ShardingError(
                f"a unit, {_class_name(module)}, returned {deferred}: it would compute after the unit's "
                "parameters are freed.\nReturn what it computes; or let it belong to no unit: name other classes "
                "in auto_wrap_policy={MyBlock}, or write auto_wrap_policy=None, for one unit."
            )
        returns_freed = any(map(_is_freed, _returned_tensors(output)))
    if returns_freed:
        raise ShardingError(
            f"a unit, {_class_name(module)}, returned one of its parameters, or a part of one, which is freed when "
            "its forward() has ended.\nReturn a copy, self.weight.clone(), through which gradients flow too; or "
            "let it belong to no unit: name other classes in auto_wrap_policy={MyBlock}, or write "
            "auto_wrap_policy=None, for one unit."
        )


def _returned_tensors(output: Any) -> Iterator[Tensor]:
    """The tensors that a unit returns in containers, at any depth, and in closures and objects."""
    yield from (value for value in tree_flatten(output)[0] if isinstance(value, Tensor))
    yield from _hidden_tensors(output)


def _is_freed(tensor: Tensor) -> bool:
    """Whether a library has freed the memory of a tensor. Subclasses may have their memory elsewhere."""
    if tensor.grad_fn is not None and not is_view(tensor):
        return False  # it was computed
    is_plain = type(tensor) is Tensor or (is_gathered(tensor) and not isinstance(tensor, DTensor))
    if not is_plain or not has_addresses(tensor) or tensor.layout != torch.strided:
        return False
    try:
        return bool(tensor.numel()) and not tensor.untyped_storage().size()
    except NotImplementedError:  # of torch.func
        return False


def _class_name(unit: nn.Module) -> str:
    """The name of the user's class: libraries put one of their own around it, or in front of it."""
    classes = type(users_module(unit)).__mro__
    return next(cls.__name__ for cls in classes if not cls.__module__.startswith("torch.distributed"))


def _ignore_tensors(tensors: list[Tensor]) -> None:
    pass


_EMPTY = CellType()

#: The types of most arguments. They are compared by themselves first, since a tensor's class makes isinstance() slow.
_PLAIN_TYPES: frozenset[type] = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str})


class _PassedContainer(NamedTuple):
    """A container that the caller has passed, and what the library passes on: the same container, or a copy.

    ``before`` are the keys and values of the latter before the unit computes.
    """

    original: Any
    passed: Any
    before: list[tuple[Any, Any]]


class _Call:
    """The containers of one call.

    Args:
        arguments: Those that the caller has passed.
    """

    def __init__(self, arguments: list[Any]) -> None:
        self._arguments = arguments
        self._containers = list[_PassedContainer]()
        self._original_by_id: dict[int, Any] = {}

    def begin(self, passed: list[Any]) -> None:
        """Compare with the arguments that the library passes on, before the unit computes."""
        for original, passed_argument in zip(self._arguments, passed, strict=False):
            self._pair(original, passed_argument)

    def _pair(self, original: Any, passed: Any) -> None:
        self._original_by_id[id(passed)] = original
        if type(original) is not type(passed) or not _is_container(original):
            return
        before = _items(passed)
        if not isinstance(original, tuple):
            self._containers.append(_PassedContainer(original, passed, before))
        for (_, original_item), (_, passed_item) in zip(_items(original), before, strict=False):
            self._pair(original_item, passed_item)

    def give_back(self) -> list[Any]:
        """Update the caller's containers with what the unit has put into the library's copies.

        Returns:
            The new values.
        """
        new: list[Any] = []
        for container in self._containers:
            items = _items(container.passed)
            if _ids(items) == _ids(container.before):
                continue
            new += [value for _, value in items if id(value) not in self._original_by_id]
            if container.original is not container.passed:
                items_of_caller = [(key, self._original_by_id.get(id(value), value)) for key, value in items]
                _set_items(container.original, items_of_caller)
        return new


def _ids(items: list[tuple[Any, Any]]) -> list[tuple[Any, int]]:
    return [(key, id(value)) for key, value in items]


def _set_items(container: Any, items: list[tuple[Any, Any]]) -> None:
    if isinstance(container, dict):
        new_items = dict(items)
        for key in [key for key in container if key not in new_items]:
            del container[key]
        for key, value in items:
            container[key] = value
    elif isinstance(container, list | deque):
        container.clear()
        container.extend(value for _, value in items)
    else:
        vars(container).update(items)


def _is_container(value: Any) -> bool:
    """Whether a value is one that a library may copy, with what is in it."""
    return isinstance(value, list | tuple | dict | deque) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")
    )


def _holds_container(value: Any) -> bool:
    """Whether a value is a container that a unit can change, or holds one."""
    return any(map(_holds_container, value)) if isinstance(value, tuple) else _is_container(value)


def _items(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, dict):
        return list(container.items())
    if isinstance(container, list | tuple | deque):
        return list(enumerate(container))
    return list(vars(container).items())


def _are_plain(values: Iterable[Any]) -> bool:
    """Whether all values are of types with which most units are called, which hide nothing that a unit can change."""
    for value in values:
        value_type = type(value)
        if value_type in _PLAIN_TYPES or (value_type is tuple and _PLAIN_TYPES.issuperset(map(type, value))):
            continue
        if not isinstance(value, Tensor | bool | int | float | str):
            return False
    return True


def _hidden_tensors(value: Any, *, depth: int = 3, is_hidden: bool = False) -> Iterator[Tensor]:
    """The tensors in objects that are no containers, such as a distribution or a closure.

    Args:
        value: The object.
        depth: How many objects deep to look.
        is_hidden: Whether ``value`` itself is in such an object.
    """
    if isinstance(value, Tensor):
        if is_hidden:
            yield value
        return
    if isinstance(value, nn.Module | type | str | bytes | int | float | None) or depth < 0:
        return
    if _is_container(value):
        for _, item in _items(value):
            yield from _hidden_tensors(item, depth=depth, is_hidden=is_hidden)
        return
    slots = (name for cls in type(value).__mro__ for name in _names(getattr(cls, "__slots__", ())))
    attribute_values = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    for item in [*attribute_values, *_enclosed_values(value)]:
        yield from _hidden_tensors(item, depth=depth - 1, is_hidden=True)


def _enclosed_values(function: Any) -> list[Any]:
    """The values that a function encloses: its cells, defaults, bound arguments and receiver."""
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != _EMPTY]
    defaults = getattr(function, "__defaults__", None) or ()
    receiver = getattr(function, "__self__", None) if callable(function) else None
    return [*cells, *defaults, *([] if receiver is None else [receiver])]


def _describe_deferred(output: Any) -> str | None:
    """A description of a returned value that uses a module later, such as a generator; ``None`` if there is none."""
    if isinstance(output, GeneratorType | CoroutineType | AsyncGeneratorType | map | filter):
        return f"a {type(output).__name__}"
    if _is_container(output):
        for _, value in _items(output):
            description = _describe_deferred(value)
            if description is not None:
                return description
        return None
    if callable(output) and not isinstance(output, nn.Module | type):
        pending = [output]
        for function in pending:
            enclosed = _enclosed_values(function)
            if any(isinstance(value, nn.Module) for value in enclosed):  # a library may keep its parameters elsewhere
                return f"a function, {getattr(output, '__name__', output)}, that uses a module of its own"
            pending += [value for value in enclosed if callable(value) and not any(value is other for other in pending)]
    return None


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
