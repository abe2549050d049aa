"""Gradients in a training step of manual optimization: shown where torch's functions are right on them, else refused.

Where a library exposes shards as plain tensors, they are pieces: a function that looks at each element by itself is
right on a piece, and any other would take the piece for the whole parameter or gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.gradients.elementwise import is_elementwise, writes_to_first
from fsdp_core.gradients.gathered_values import (
    RESHAPED_IN_PLACE,
    GatheredDTensor,
    GatheredParameter,
    GatheredTensor,
)
from fsdp_core.gradients.piece_places import (
    READS_FIRST_ALONE,
    PieceMixture,
    common_places,
    dimensions,
    place_of,
    set_place,
    shard_of,
)
from fsdp_core.torch_private.random_numbers import DRAWING_FUNCTIONS, draw_for_shard, send_to_replicas
from fsdp_core.torch_private.tensors import give_class, times_written, without_torch_function

__all__ = [
    "PIECE_CLASSES",
    "StepGradients",
    "count_data_writes",
    "count_piece_writes",
    "forget_shown",
    "guard",
    "guard_parameters",
    "guard_states",
    "plain",
    "show_gradient_elsewhere",
    "unguard",
    "unguard_parameters",
    "unguard_states",
]

_INSTEAD = (
    "Write self.clip_gradients(optimizer, gradient_clip_val=..., gradient_clip_algorithm='norm') to clip, or under "
    "Fabric fabric.clip_gradients(model, optimizer, max_norm=...), and optimizer.zero_grad() to forget. For the norm "
    "of the whole gradient, self.trainer.strategy.sharded.clip_norm(parameters, float('inf')) takes the optimizer's "
    "parameters; under Fabric it is a method of fabric.strategy.sharded_of(model). Under a strategy whose sharded "
    "parameters are DTensors, torch's own functions are right on the model's parameters(). Rows of a weight are frozen "
    "by torch.nn.Embedding(padding_idx=...), or where it is used, by torch.cat([weight[:n].detach(), weight[n:]])."
)


#: Attributes that transpose, by their getters.
_TRANSPOSES: dict[Any, str] = {getattr(Tensor, name).__get__: name for name in ("T", "H", "mT", "mH")}

_OF_GRADIENT = f"of a gradient would see this rank's piece of it alone.\n{_INSTEAD}"

_OF_PARAMETER = (
    "of a parameter would see this rank's piece of it alone: parameters are shards.\n"
    "A penalty over all parameters belongs into the optimizer (weight_decay); one on the parameters of a unit is right "
    "in the unit's own forward(), and one on what belongs to no unit in training_step(), under Fabric in a method that "
    "model.mark_forward_method() names. A layer inside of a unit is called by the unit; auto_wrap_policy={MyBlock} "
    "names other units, and with None all layers belong to none. For values, write with fsdp_core.gathered(module): on "
    "all ranks, between steps; or let fsdp_core.full_state_dict(module) give them to rank 0."
)


_OF_STATE = (
    "of an optimizer's state would see this rank's piece of it alone.\n"
    "Under a strategy whose sharded parameters are DTensors, torch's own functions are right on it. Here, sum over the "
    "ranks what value.as_subclass(torch.Tensor) gives of the piece: "
    "self.all_gather(value.as_subclass(torch.Tensor).square().sum()).sum() is the square of the norm, under Fabric by "
    "fabric.all_gather. Where ranks hold replicas, count each once."
)


_ASSIGNED = (
    "a gradient was assigned to a parameter that is gathered inside training_step. Its gradient is with its shards, "
    "of which each rank has a piece, and is the average over the ranks; what was assigned is this rank's alone.\n"
    "Write self.manual_backward((parameter * gradient.detach()).sum()), of the sum over all parameters, which adds the "
    "average of these gradients; optimizer.zero_grad() before forgets what is there. Or write self.manual_backward() "
    "of a loss that has this gradient."
)


class StepGradients:
    """Lets parameters that are gathered inside a root's forward pass show the gradients of their shards.

    A backward pass inside the forward pass moves the gradient of a gathered parameter to its shard. Without this,
    ``torch.nn.utils.clip_grad_norm_(self.parameters())`` would silently clip nothing after it.

    Args:
        root: The root. When its forward pass is over, nothing is shown any more.

    Attributes:
        on: Whether the shards' gradients are shown. Off during backward passes, in which a library looks for gradients
            of the gathered parameters themselves.

    Example:
        >>> import torch
        >>> gathered, shard = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        >>> step = StepGradients(nn.Identity())
        >>> step.follow(gathered, shard, is_part=False)
        >>> shard.grad = torch.ones(2)
        >>> gathered.grad
        >>> step.on = True
        >>> gathered.grad
        tensor([1., 1.])
    """

    def __init__(self, root: nn.Module) -> None:
        self.on = False
        self._depth = 0  # a step may call the root in whose forward pass it is
        root.register_forward_pre_hook(self._begin)
        root.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: Any) -> None:
        self._depth += 1

    def _end(self, *_: Any) -> None:
        self._depth -= 1
        self.on = self.on and self._depth > 0

    def follow(self, gathered: Tensor, shard: Tensor, *, is_part: bool) -> None:
        """Let a gathered parameter show the gradient of its shard.

        Args:
            gathered: What modules hold: a parameter, or a tensor that a library has put in its place. It shows the
                gradient as long as it exists.
            shard: What the optimizer holds.
            is_part: Whether the shard is this rank's piece as a plain tensor: torch's functions can't be right on its
                gradient then, and reading the gradient is refused.
        """
        if isinstance(gathered, _ShowsShardGradient):
            return
        instance: Any = gathered
        if isinstance(gathered, DTensor):  # tensor parallelism has divided it
            instance.__class__ = _ShowingDTensor
        else:
            give_class(gathered, _ShowingParameter if isinstance(gathered, nn.Parameter) else _ShowingTensor)
        instance._fsdp_shows = _ShownGradient(self, shard, is_part)


class _ShownGradient(NamedTuple):
    """The gradient that a gathered parameter shows.

    Attributes:
        step: The object that says whether gradients are shown now.
        shard: The shard that has the gradient.
        is_part: Whether the shard is this rank's piece as a plain tensor.
    """

    step: StepGradients
    shard: Tensor
    is_part: bool


#: torch's own descriptor of ``grad``, which this module's classes override.
_GRAD: Any = Tensor.grad


class _ShowsShardGradient:
    """A gathered parameter that shows the gradient of its shard."""

    _fsdp_shows: _ShownGradient | None = None
    is_leaf: bool
    requires_grad: bool

    @property
    def grad(self) -> Tensor | None:
        own: Tensor | None = _GRAD.__get__(self) if self.is_leaf else None
        shown = self._fsdp_shows
        if own is not None or shown is None or not shown.step.on or not self.requires_grad:
            return own
        if shown.is_part:
            # module.to() converts gradients of parameters that it converts, which is refused for gathered ones
            if sys._getframe(1).f_code is nn.Module._apply.__code__:
                return None
            raise UnsupportedCapabilityError(
                "the gradients of parameters that are gathered inside training_step are with their shards, of which "
                f"each rank has a piece: torch's functions would see none of them, or a piece alone.\n{_INSTEAD}"
            )
        return shown.shard.grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        shown = self._fsdp_shows
        if shown is None or not shown.step.on:
            _GRAD.__set__(self, grad)
            return
        if grad is None:  # also forget a gradient that the gathered parameter has itself
            _GRAD.__set__(self, None)
        is_sharded = shown.is_part or isinstance(shown.shard, DTensor)
        if grad is not None and is_sharded and type(grad) is not type(shown.shard.grad):
            raise UnsupportedCapabilityError(_ASSIGNED)
        shown.shard.grad = grad  # torch refuses what does not fit the shard


def forget_shown(parameter: Tensor, set_to_none: bool) -> bool:
    """Forget the gradient that a gathered parameter shows, as ``module.zero_grad()`` does.

    Args:
        parameter: A parameter.
        set_to_none: Whether the gradient is removed, instead of filled with zeros.

    Returns:
        Whether the parameter shows the gradient of its shard. If not, nothing is done.
    """
    shown = parameter._fsdp_shows if isinstance(parameter, _ShowsShardGradient) else None
    if shown is None or not shown.step.on:
        return False
    if parameter.is_leaf:
        _GRAD.__set__(parameter, None)
    gradient = shown.shard.grad
    if set_to_none or gradient is None:
        shown.shard.grad = None
    else:
        with without_torch_function() if isinstance(gradient, Piece) else nullcontext():
            gradient.detach_().zero_()
    return True


class _ShowingParameter(_ShowsShardGradient, GatheredParameter):
    pass


class _ShowingTensor(_ShowsShardGradient, GatheredTensor):
    pass


class _ShowingDTensor(_ShowsShardGradient, GatheredDTensor):
    pass


#: torch's own descriptor of ``data``.
_DATA: Any = Tensor.data

#: What is done to a parameter's attributes, and computes nothing of it.
_ATTRIBUTES: frozenset[Any] = frozenset([_GRAD.__get__, _GRAD.__set__, _DATA.__set__])


#: What asks for the number of dimensions: that of the parameter, which may be a matrix, though a piece of it is flat.
_DIMENSIONS: frozenset[Any] = frozenset([getattr(Tensor, "ndim").__get__, Tensor.dim, Tensor.ndimension])  # noqa: B009


#: On a piece without elements: whether its parameter has a gradient, of which other ranks hold the pieces.
_HAS_GRADIENT_ELSEWHERE = "_fsdp_has_gradient_elsewhere"

#: On a piece: a tensor that shares its memory and its count of writes with all that the piece's ``data`` has returned.
_SHOWN_DATA = "_fsdp_shown_data"
#: On a piece: how often the tensors were written to that were under :data:`_SHOWN_DATA` before.
_DATA_WRITES = "_fsdp_data_writes"


def show_gradient_elsewhere(piece: Tensor, has_gradient: bool) -> None:
    """Let a piece without elements show a gradient without elements, to users, while other ranks show theirs.

    Steps by hand skip parameters that have no gradient: all ranks must then skip, and write to, the same.

    Args:
        piece: A parameter, of which this rank holds no element.
        has_gradient: Whether the other ranks' pieces have a gradient.
    """
    vars(piece)[_HAS_GRADIENT_ELSEWHERE] = has_gradient


#: Whether anybody has read the ``.data`` of a guarded piece: where nobody has, there are no writes to look for.
_is_data_read = False


def count_data_writes(pieces: Iterable[Tensor]) -> int:
    """How often pieces that were guarded were written to through their ``.data``, which torch does not count."""
    return sum(map(_count_data_writes, pieces)) if _is_data_read else 0


def _count_data_writes(piece: Tensor) -> int:
    attributes = vars(piece)
    data_view: Tensor | None = attributes.get(_SHOWN_DATA)
    earlier: int = attributes.get(_DATA_WRITES, 0)
    return earlier + (0 if data_view is None else times_written(data_view))


def _shown_data(piece: Tensor) -> Tensor:
    """The ``data`` of a piece: tensors that share one count of writes, which torch does not have for ``data``."""
    global _is_data_read
    _is_data_read = True
    attributes = vars(piece)
    data_view: Tensor | None = attributes.get(_SHOWN_DATA)
    if data_view is None or not data_view.is_set_to(piece):
        attributes[_DATA_WRITES] = _count_data_writes(piece)
        data_view = attributes[_SHOWN_DATA] = piece.data
    return data_view.detach()


def _shown_gradient(piece: Tensor) -> Tensor | None:
    gradient = piece.grad
    if gradient is None and vars(piece).get(_HAS_GRADIENT_ELSEWHERE) and not piece.numel():
        gradient = torch.empty_like(piece, requires_grad=False)
        guard([gradient])
        set_place(gradient, place_of(piece))
    return gradient


_ITEMS = frozenset({"__getitem__", "__setitem__"})


def _selects_all(indexed: Tensor, index: Any) -> bool:
    """Whether an index treats all elements alike: ``[:]``, ``[...]``, or a mask with an entry for each."""
    if isinstance(index, Tensor):
        with without_torch_function():
            return index.dtype == torch.bool and index.shape == indexed.shape
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


#: Functions that reduce one tensor to a value, and compare two tensors element by element.
_ELEMENTWISE_FOR_TWO = frozenset({"max", "min"})

#: Where torch gathers an optimizer's state from pieces, as ``FullyShardedDataParallel.optim_state_dict`` does.
_FSDP = str(Path(torch.distributed.fsdp.__file__).parent)

#: A function of torch's that cuts a vector by the parameters' numbers of elements, which those of pieces are not.
_VECTOR_TO_PARAMETERS = nn.utils.vector_to_parameters.__code__


def _is_elementwise_call(name: str, args: Any) -> bool:
    """Whether a function looks at each element by itself."""
    if name == "__setitem__" and isinstance(args[1], Tensor):
        # A mask takes a number. A tensor would have one element for each that the mask selects, on all ranks together.
        return _selects_all(*args[:2]) and not (isinstance(args[2], Tensor) and args[2].dim())
    if name in _ITEMS:
        return not isinstance(args[1], Tensor) and _selects_all(*args[:2])
    if name == "where":
        return len(args) > 1
    if name in _ELEMENTWISE_FOR_TWO:
        return len(args) == 2 and isinstance(args[1], Tensor)
    return is_elementwise(name) and name not in RESHAPED_IN_PLACE


_GRAD_FN: Any = getattr(Tensor, "grad_fn").__get__  # noqa: B009  # which stubs take for a node


def _refuse_pruning(func: Any) -> None:
    """Refuse that torch's pruning registers a piece: it would choose among the elements of this rank's alone.

    Called by :meth:`Piece.__torch_function__` at this moment of the registration, when pruning has changed nothing yet:
    it would not undo what it changes afterwards.

    Raises:
        UnsupportedCapabilityError: Pruning registers a piece.
    """
    if func != _GRAD_FN:
        return
    registering = sys._getframe(2)
    caller = registering.f_back if registering.f_code is nn.Module.register_parameter.__code__ else None
    if caller is not None and caller.f_code.co_filename == prune.__file__:
        raise UnsupportedCapabilityError(
            "torch.nn.utils.prune chooses elements by all of a parameter, and registers another for it, and this "
            "rank has a piece of it.\n"
            "Prune the model before it is sharded: in __init__ or configure_model, under Fabric before "
            "fabric.setup(). Or set elements to zero within fsdp_core.gathered(module, modifier_rank=0)."
        )


#: What messages call functions whose names would tell users nothing.
_IN_WORDS = {"__set__": "an assignment", "numel": "vector_to_parameters"}


def _mixture_refusal(name: str, names: tuple[str, ...]) -> UnsupportedCapabilityError:
    first, second = (repr(name_of_parameter) if name_of_parameter else "a unit" for name_of_parameter in names)
    return UnsupportedCapabilityError(
        f"{_IN_WORDS.get(name, name)} of {first} and {second} would compute with this rank's pieces of the two, which "
        "hold different elements: a piece is flat, and begins where the shard does.\n"
        "Write with fsdp_core.gathered(module, modifier_rank=0): on all ranks, between steps; or compute it where "
        "both are gathered, in the forward() of a unit that holds both. What belongs together are a parameter, its "
        "gradient, and copies of these, also of a model that is sharded alike."
    )


def _devices_refusal(name: str, pieces: Sequence[Tensor]) -> UnsupportedCapabilityError:
    names = dict.fromkeys(place_of(piece).name for piece in pieces)
    devices = dict.fromkeys(str(piece.device) for piece in pieces)
    return UnsupportedCapabilityError(
        f"{_IN_WORDS.get(name, name)} of {' and '.join(map(repr, filter(None, names))) or 'pieces'} would compute with "
        f"tensors on {' and '.join(devices)}: cpu_offload keeps gradients in host memory, and parameters too, but "
        "those that are gathered while a step runs, such as what belongs to no unit, are on the device.\n"
        "Write parameter.add_(parameter.grad.to(parameter.device)), which is right in either place; or leave "
        "cpu_offload out."
    )


#: In a list of one element, how often users have written to pieces: assigned to without a ``global`` statement.
_piece_writes = [0]


def count_piece_writes() -> int:
    """How often users have written to pieces of parameters, gradients and optimizers' states in this process."""
    return _piece_writes[0]


#: Functions of ``torch.nn.init`` that fill each element by itself: the tensor's method, and its arguments' names there.
_INITIALIZERS: dict[Any, tuple[str, tuple[str, ...]]] = {
    nn.init.constant_: ("fill_", ("val",)),
    nn.init.normal_: ("normal_", ("mean", "std", "generator")),
    nn.init.uniform_: ("uniform_", ("a", "b", "generator")),
}


def _initialize(func: Any, arguments: dict[str, Any]) -> Tensor:
    """Call a function of ``torch.nn.init`` on a piece, as the method of the piece that it stands for."""
    method, names = _INITIALIZERS[func]
    values = [arguments[name] for name in names if name != "generator"]
    generator = {"generator": arguments["generator"]} if arguments.get("generator") is not None else {}
    with torch.no_grad():
        filled: Tensor = getattr(arguments["tensor"], method)(*values, **generator)
    return filled


class Piece(Tensor):
    """A rank's piece of a gradient: right to compute with element by element, and wrong for a norm, say."""

    #: Why something can't be computed of it, and what to write instead.
    _fsdp_reason = _OF_GRADIENT

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _INITIALIZERS:
            return _initialize(func, kwargs)
        name = _TRANSPOSES.get(func) or str(getattr(func, "__name__", func))
        caller = sys._getframe(1).f_code
        if not _is_elementwise_call(name, args) or (name == "numel" and caller is _VECTOR_TO_PARAMETERS):
            if issubclass(cls, StatePiece) and caller.co_filename.startswith(_FSDP):
                with without_torch_function():
                    return func(*args, **kwargs)
            raise cls._refusal(name)
        _refuse_pruning(func)
        with without_torch_function():
            if func in _DIMENSIONS:
                return dimensions(args[0])
            if func == _GRAD.__get__:
                return _shown_gradient(args[0])
            if name in READS_FIRST_ALONE and not isinstance(args[0], Piece):
                return func(*args, **kwargs)
            return cls._compute(func, name, args, kwargs)

    @classmethod
    def _refusal(cls, name: str) -> UnsupportedCapabilityError:
        return UnsupportedCapabilityError(f"{_IN_WORDS.get(name, name)} {cls._fsdp_reason}")

    @classmethod
    def _compute(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call an elementwise function, and make pieces of what it returns and writes to.

        Raises:
            UnsupportedCapabilityError: Pieces of several parameters would be mixed; or the result, or what is written
                to, has another shape than the pieces, so that the function was not elementwise for these arguments.
        """
        try:
            places = common_places(name, Piece, args, kwargs)
            shard, replicas = shard_of(places[0], args[0]) if name in DRAWING_FUNCTIONS else (None, None)
        except PieceMixture as mixture:
            raise _mixture_refusal(name, mixture.names) from None
        piece_shapes = {piece.shape for piece in _tensors((args, kwargs)) if isinstance(piece, Piece)}
        is_foreach = name.startswith(_FOREACH)
        is_assignment = func == _DATA.__set__
        written: list[Tensor | None] = [*_tensors(kwargs.get("out"))]
        if is_assignment or writes_to_first(name):
            written += _beside_pieces(args, _tensors(args[:1])) if is_foreach else _tensors(args[:1])
        if written:
            _piece_writes[0] += 1
        assigned = args[1:] if is_assignment else ()
        if any(tensor is not None and tensor.shape not in piece_shapes for tensor in (*written, *assigned)):
            raise cls._refusal(name)
        # module.to() of the same device assigns the memory that is there already
        is_moved = is_assignment and not args[0].is_set_to(args[1])
        if func == _GRAD.__set__:
            vars(args[0]).pop(_HAS_GRADIENT_ELSEWHERE, None)
        is_data = func == _DATA.__get__ and issubclass(cls, ParameterPiece)
        has_generator = kwargs.get("generator") is not None
        # replicas of a shard draw the same, other shards do not
        drawing = nullcontext() if shard is None or has_generator else draw_for_shard(shard, args[0].device)
        try:
            with drawing:
                result = _shown_data(args[0]) if is_data else func(*args, **kwargs)
        except RuntimeError as error:
            pieces = [tensor for tensor in _tensors((args, kwargs)) if isinstance(tensor, Piece)]
            if len({piece.device.type for piece in pieces}) > 1:  # one of them is offloaded
                raise _devices_refusal(name, pieces) from error
            raise
        if is_moved:
            increment_version(args[0])  # a unit that is still gathered is gathered anew, as after other writes
        if issubclass(cls, ParameterPiece) and func in _ATTRIBUTES:
            return result
        computed: list[Tensor | None] = [*_tensors(result)]
        if is_foreach:
            computed = _beside_pieces(args, _tensors(result))
        if any(tensor is not None and tensor.shape not in piece_shapes for tensor in computed):
            raise cls._refusal(name)
        if replicas is not None:
            send_to_replicas(_tensors(result), replicas)
        piece_class = ParameterPiece if issubclass(cls, ParameterPiece) else cls
        for tensors in (computed, written):  # a plain tensor that a piece is written to is a piece from now on
            for index, tensor in enumerate(tensors):
                if tensor is not None and type(tensor) is Tensor:
                    guard([tensor], piece_class)
                    has_own_place = len(places) == len(tensors)  # else all tensors have the first place, or none
                    set_place(tensor, places[index if has_own_place else 0] if places else None)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with without_torch_function():
            if not self.is_leaf:
                return Tensor.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]  # torch says why not
            copied = memo.get(id(self))
            if copied is None:
                copied = self.detach().as_subclass(Tensor).clone().requires_grad_(self.requires_grad)
                copied.__class__ = type(self)
                vars(copied).update(vars(self))
                memo[id(self)] = copied
            return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a tensor: what is saved is read without this class."""
        return plain(self).__reduce_ex__(protocol)


class ParameterPiece(Piece):
    """What was computed of a rank's piece of a parameter, element by element."""

    _fsdp_reason = _OF_PARAMETER


class StatePiece(Piece):
    """What an optimizer keeps for a rank's piece of a parameter."""

    _fsdp_reason = _OF_STATE


class _ParameterPiece(ParameterPiece, nn.Parameter):
    """A rank's piece of a parameter."""

    __deepcopy__, __reduce_ex__ = nn.Parameter.__deepcopy__, nn.Parameter.__reduce_ex__


def guard_parameters(pieces: Iterable[Tensor]) -> None:
    """Refuse, from now on, what is computed of these pieces of parameters and is not elementwise."""
    for piece in pieces:
        if type(piece) is nn.Parameter:
            piece.__class__ = _ParameterPiece


def unguard_parameters(pieces: Iterable[Tensor]) -> list[Tensor]:
    """Let these be parameters as any again.

    Args:
        pieces: Parameters.

    Returns:
        Those that were guarded.
    """
    guarded: list[Tensor] = [p for p in pieces if type(p) is _ParameterPiece]  # isinstance() takes torch several calls
    for piece in guarded:
        instance: Any = piece
        instance.__class__ = nn.Parameter
    return guarded


def guard(pieces: Iterable[Tensor | None], piece_class: type[Piece] = Piece) -> None:
    """Refuse, from now on, what is computed of these pieces and is not elementwise."""
    for piece in pieces:
        if piece is not None and type(piece) is Tensor:
            piece.__class__ = piece_class


def unguard(gradients: Iterable[Tensor | None]) -> None:
    """Let these be plain tensors again, for an optimizer's step or a backward pass."""
    for gradient in gradients:
        if type(gradient) is not Tensor and isinstance(gradient, Piece):
            instance: Any = gradient
            instance.__class__ = Tensor


#: What users may have put into an optimizer's state, besides plain tensors.
PIECE_CLASSES = frozenset({Piece, ParameterPiece, StatePiece})


def guard_states(states: Iterable[Tensor]) -> None:
    """Refuse, from now on, what is computed of these and is not elementwise."""
    instance: Any
    for instance in states:
        instance.__class__ = StatePiece


def unguard_states(states: Iterable[Tensor]) -> None:
    """Let these be plain tensors again."""
    instance: Any
    for instance in states:
        instance.__class__ = Tensor


def plain(tensor: Tensor) -> Tensor:
    """A tensor that computes as any does, sharing memory with this one, which may be guarded."""
    if not isinstance(tensor, Piece):
        return tensor
    with without_torch_function():
        return tensor.as_subclass(Tensor)


#: How the names of functions of lists begin.
_FOREACH = "_foreach_"


def _beside_pieces(args: Any, tensors: list[Tensor]) -> list[Tensor | None]:
    """Of the tensors that a function of lists returns or writes to, those for whose index a list has a piece.

    Args:
        args: The function's arguments.
        tensors: What it returns or writes to. If the lists have another length, all of these are returned.

    Returns:
        A list as long as ``tensors``, with ``None`` in place of the others.
    """
    lists = [value for value in args if isinstance(value, list | tuple)]
    if any(len(operands) != len(tensors) for operands in lists):
        return [*tensors]
    with_operands = zip(tensors, *lists, strict=True)
    return [t if any(isinstance(operand, Piece) for operand in operands) else None for t, *operands in with_operands]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for inner in value for tensor in _tensors(inner)]
