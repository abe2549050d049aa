"""Gradients inside a training step by hand: shown where torch's functions are right on them, and else refused."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

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
    OF_FIRST,
    PieceMixture,
    common_places,
    dimensions,
    place_of,
    set_place,
    shard_of,
)
from fsdp_core.torch_private.random_numbers import DRAWING_FUNCTIONS, draw_for_shard, send_to_replicas
from fsdp_core.torch_private.tensors import times_written, without_torch_function

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


#: Attributes whose shape is that of the whole parameter, turned.
_TURNED: dict[Any, str] = {getattr(Tensor, name).__get__: name for name in ("T", "H", "mT", "mH")}

_OF_GRADIENT = f"of a gradient would see this rank's piece of it alone.\n{_INSTEAD}"

_OF_PARAMETER = (
    "of a parameter would see this rank's piece of it alone: parameters are shards.\n"
    "A penalty over all parameters belongs into the optimizer (weight_decay); one on the parameters of a unit is right "
    "in the unit's own forward(), and one on what belongs to no unit in training_step(), under Fabric in a method that "
    "model.mark_forward_method() names. For values, write with fsdp_core.gathered(module): on all ranks, between "
    "steps; or let fsdp_core.full_state_dict(module) give them to rank 0."
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
    """What parameters that are gathered inside a root's forward pass show for their gradients, which are at the shards.

    A parameter that is gathered has no gradient of its own once a backward pass inside the forward pass has given it to
    the shard: ``torch.nn.utils.clip_grad_norm_(self.parameters())`` would clip nothing, without a word.

    Args:
        root: The root. When its forward pass is over, nothing is shown any more.

    Attributes:
        on: Whether the shards' gradients are shown. Off during backward passes, in which a library looks at what the
            gathered parameters have themselves.

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
            gathered: What modules hold; a parameter, or a tensor that a library has put in its place. Follows until it
                is gone.
            shard: What the optimizer holds.
            is_part: Whether the shard is this rank's piece, and no DTensor, so that torch's functions can't be right on
                its gradient: reading that is refused then.
        """
        if isinstance(gathered, _ShowsShardGradient):
            return
        instance: Any = gathered
        if isinstance(gathered, DTensor):  # tensor parallelism has divided it
            instance.__class__ = _ShowingDTensor
        else:
            instance.__class__ = _ShowingParameter if isinstance(gathered, nn.Parameter) else _ShowingTensor
        instance._fsdp_shows = (self, shard, is_part)


#: What a tensor's ``grad`` is without any of this.
_GRAD: Any = Tensor.grad


class _ShowsShardGradient:
    """A gathered parameter that shows the gradient of its shard."""

    _fsdp_shows: tuple[StepGradients, Tensor, bool] | None = None
    is_leaf: bool
    requires_grad: bool

    @property
    def grad(self) -> Tensor | None:
        own: Tensor | None = _GRAD.__get__(self) if self.is_leaf else None
        if own is not None or self._fsdp_shows is None or not self._fsdp_shows[0].on or not self.requires_grad:
            return own
        _, shard, is_part = self._fsdp_shows
        if is_part:
            if sys._getframe(1).f_code is nn.Module._apply.__code__:
                return None  # module.to(), which would convert it where it converts the parameter, and that is refused
            raise UnsupportedCapabilityError(
                "the gradients of parameters that are gathered inside training_step are with their shards, of which "
                f"each rank has a piece: torch's functions would see none of them, or a piece alone.\n{_INSTEAD}"
            )
        return shard.grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if grad is None or self._fsdp_shows is None or not self._fsdp_shows[0].on:
            _GRAD.__set__(self, grad)
        if self._fsdp_shows is not None and self._fsdp_shows[0].on:
            _, shard, is_part = self._fsdp_shows
            is_sharded = is_part or isinstance(shard, DTensor)
            if grad is not None and is_sharded and type(grad) is not type(shard.grad):
                raise UnsupportedCapabilityError(_ASSIGNED)
            shard.grad = grad  # torch refuses what does not fit the shard


def forget_shown(parameter: Tensor, set_to_none: bool) -> bool:
    """Forget the gradient that a gathered parameter shows, as ``module.zero_grad()`` does.

    Args:
        parameter: A parameter.
        set_to_none: Whether it has none then, or zeros.

    Returns:
        Whether it shows that of its shard. Otherwise nothing is done.
    """
    shows = parameter._fsdp_shows if isinstance(parameter, _ShowsShardGradient) else None
    if shows is None or not shows[0].on:
        return False
    if parameter.is_leaf:
        _GRAD.__set__(parameter, None)
    gradient = shows[1].grad
    if set_to_none or gradient is None:
        shows[1].grad = None
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


#: What a parameter's ``data`` is.
_DATA: Any = Tensor.data

#: Of a parameter, what has a shape of its own, or is no part of it.
_ATTRIBUTES: frozenset[Any] = frozenset([_GRAD.__get__, _GRAD.__set__, _DATA.__set__])


#: What asks for the number of dimensions. Users ask it of a parameter, which is a matrix, of which a piece is flat.
_DIMENSIONS: frozenset[Any] = frozenset([getattr(Tensor, "ndim").__get__, Tensor.dim, Tensor.ndimension])  # noqa: B009


#: On a piece without elements: whether its parameter has a gradient, of which other ranks hold the pieces.
_HAS_GRADIENT_ELSEWHERE = "_fsdp_has_gradient_elsewhere"

#: On a piece: what its ``data`` shares memory and the count of writes with, and the writes to others before it.
_SHOWN_DATA, _DATA_WRITES = "_fsdp_shown_data", "_fsdp_data_writes"


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
    """What a piece has in its memory, with one count of the writes to all that this returns."""
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


def _is_of_all(indexed: Tensor, index: Any) -> bool:
    """Whether an index looks at each element by itself: ``[:]``, ``[...]``, or a mask of all of them."""
    if isinstance(index, Tensor):
        with without_torch_function():
            return index.dtype == torch.bool and index.shape == indexed.shape
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


#: What gives one value, or is refused by what it is given: of two tensors it takes each element by itself.
_OF_TWO = frozenset({"max", "min"})

#: Where torch gathers an optimizer's state from pieces, as ``FullyShardedDataParallel.optim_state_dict`` does.
_FSDP = str(Path(torch.distributed.fsdp.__file__).parent)

#: It cuts pieces from a vector of the whole.
_VECTOR_TO_PARAMETERS = nn.utils.vector_to_parameters.__code__


def _is_of_each(name: str, args: Any) -> bool:
    """Whether a function looks at each element by itself."""
    if name == "__setitem__" and isinstance(args[1], Tensor):  # a mask, which counts what it lets through
        return _is_of_all(*args[:2]) and not (isinstance(args[2], Tensor) and args[2].dim())
    if name in _ITEMS:
        return not isinstance(args[1], Tensor) and _is_of_all(*args[:2])
    if name == "where":
        return len(args) > 1
    if name in _OF_TWO:
        return len(args) == 2 and isinstance(args[1], Tensor)
    return is_elementwise(name) and name not in RESHAPED_IN_PLACE


_GRAD_FN: Any = getattr(Tensor, "grad_fn").__get__  # noqa: B009  # which stubs take for a node


def _is_registered_by_pruning(func: Any) -> bool:
    """Whether a piece is being registered by torch's pruning, which goes on by what a rank's piece has.

    Of one without elements it has nothing to choose. It has changed nothing yet, and would not put all of it back.
    """
    if func != _GRAD_FN:
        return False
    registering = sys._getframe(2)
    caller = registering.f_back if registering.f_code is nn.Module.register_parameter.__code__ else None
    return caller is not None and caller.f_code.co_filename == prune.__file__


#: What an attribute's functions are called, in words.
_IN_WORDS = {"__set__": "an assignment", "numel": "vector_to_parameters"}


def _mixture_refusal(name: str, names: tuple[str, ...]) -> UnsupportedCapabilityError:
    first, second = (repr(each) if each else "a unit" for each in names)
    return UnsupportedCapabilityError(
        f"{_IN_WORDS.get(name, name)} of {first} and {second} would compute with this rank's pieces of the two, which "
        "hold different elements: a piece is flat, and begins where the shard does.\n"
        "Write with fsdp_core.gathered(module, modifier_rank=0): on all ranks, between steps; or compute it where "
        "both are gathered, in the forward() of a unit that holds both. What belongs together are a parameter, its "
        "gradient, and copies of these, also of a model that is sharded alike."
    )


_writes = [0]


def count_piece_writes() -> int:
    """How often users have written to pieces of parameters, gradients and optimizers' states in this process."""
    return _writes[0]


class Piece(Tensor):
    """A rank's piece of a gradient: for each element by itself it is as good as any, and for a norm it is not."""

    #: Why something can't be computed of it, and what to write instead.
    _fsdp_reason = _OF_GRADIENT

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _TURNED.get(func) or str(getattr(func, "__name__", func))
        reason = cls._fsdp_reason
        if not _is_of_each(name, args) or (name == "numel" and sys._getframe(1).f_code is _VECTOR_TO_PARAMETERS):
            if issubclass(cls, StatePiece) and sys._getframe(1).f_code.co_filename.startswith(_FSDP):
                with without_torch_function():
                    return func(*args, **(kwargs or {}))
            raise UnsupportedCapabilityError(f"{_IN_WORDS.get(name, name)} {reason}")
        if _is_registered_by_pruning(func):
            raise UnsupportedCapabilityError(
                "torch.nn.utils.prune chooses elements by all of a parameter, and registers another for it, and this "
                "rank has a piece of it.\n"
                "Prune the model before it is sharded: in __init__ or configure_model, under Fabric before "
                "fabric.setup(). Or set elements to zero within fsdp_core.gathered(module, modifier_rank=0)."
            )
        with without_torch_function():
            if func in _DIMENSIONS:
                return dimensions(args[0])
            if name in OF_FIRST and not isinstance(args[0], Piece):
                return func(*args, **(kwargs or {}))
            try:
                places = common_places(name, Piece, args, kwargs)
                shard, replicas = shard_of(places[0], args[0]) if name in DRAWING_FUNCTIONS else (None, None)
            except PieceMixture as mixture:
                raise _mixture_refusal(name, mixture.names) from None
            shapes = {piece.shape for piece in _tensors((args, kwargs)) if isinstance(piece, Piece)}
            is_assignment = func == _DATA.__set__
            is_of_lists = name[: len(_OF_LISTS)] == _OF_LISTS
            targets: list[Tensor | None] = [*_tensors((kwargs or {}).get("out"))]
            if is_assignment or writes_to_first(name):
                targets += _beside_pieces(args, _tensors(args[:1])) if is_of_lists else _tensors(args[:1])
            assigned = args[1:] if is_assignment else ()
            if targets:
                _writes[0] += 1
            if any(tensor is not None and tensor.shape not in shapes for tensor in (*targets, *assigned)):
                raise UnsupportedCapabilityError(f"{_IN_WORDS.get(name, name)} {reason}")
            moves = is_assignment and not args[0].is_set_to(args[1])  # and module.to() of its own device does not
            if func == _GRAD.__get__:
                return _shown_gradient(args[0])
            if func == _GRAD.__set__:
                vars(args[0]).pop(_HAS_GRADIENT_ELSEWHERE, None)
            is_data = func == _DATA.__get__ and issubclass(cls, ParameterPiece)
            if shard is not None:
                generator = (kwargs or {}).get("generator")
                with draw_for_shard(shard, args[0].device) if generator is None else nullcontext():
                    result = func(*args, **(kwargs or {}))
            else:
                result = _shown_data(args[0]) if is_data else func(*args, **(kwargs or {}))
            if moves:
                increment_version(args[0])  # a unit that is still gathered is gathered anew, as after other writes
            if issubclass(cls, ParameterPiece) and func in _ATTRIBUTES:
                return result
            computed: list[Tensor | None] = [*_tensors(result)]
            if is_of_lists:
                computed = _beside_pieces(args, _tensors(result))
            if any(tensor is not None and tensor.shape not in shapes for tensor in computed):
                raise UnsupportedCapabilityError(f"{name} {reason}")
            if replicas is not None:
                send_to_replicas(_tensors(result), replicas)
            piece_class = ParameterPiece if issubclass(cls, ParameterPiece) else cls
            for new in (computed, targets):  # a plain tensor that a piece is written to is one from now on
                for index, tensor in enumerate(new):
                    if tensor is not None and type(tensor) is Tensor:
                        guard([tensor], piece_class)
                        set_place(tensor, places[index if len(places) == len(new) else 0] if places else None)
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


def guard(gradients: Iterable[Tensor | None], of: type[Piece] = Piece) -> None:
    """Refuse, from now on, what is computed of these pieces and is not elementwise."""
    for gradient in gradients:
        if gradient is not None and type(gradient) is Tensor:
            gradient.__class__ = of


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
_OF_LISTS = "_foreach_"


def _beside_pieces(args: Any, tensors: list[Tensor]) -> list[Tensor | None]:
    """Those of the tensors that a function of lists computes of pieces, or writes to beside pieces; else ``None``."""
    lists = [value for value in args if isinstance(value, list | tuple)]
    if any(len(each) != len(tensors) for each in lists):
        return [*tensors]
    columns = zip(tensors, *lists, strict=True)
    return [t if any(isinstance(each, Piece) for each in column) else None for t, *column in columns]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for inner in value for tensor in _tensors(inner)]
