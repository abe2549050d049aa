"""Whether ranks hold the same elements of two parameters, so that their pieces may be computed together."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

__all__ = [
    "OF_FIRST",
    "FindsParameters",
    "PieceMixture",
    "PiecePlace",
    "common_places",
    "dimensions",
    "find_parameters_by",
    "place_of",
    "place_piece",
    "set_place",
    "shard_of",
]


class PiecePlace(NamedTuple):
    """Which elements of a parameter ranks hold.

    Attributes:
        name: What the user calls the parameter.
        layout: Equal for parameters of one shape of which each rank holds the same elements. If it is a tuple that
            begins with a tuple, that is the parameter's shape.
        shard: Which of the shards this rank holds.
        replicas: The process group of the ranks that hold the same one; ``None`` if no other does.
    """

    name: str
    layout: Hashable
    shard: int = 0
    replicas: Any = None


def dimensions(piece: Tensor) -> int:
    """The number of dimensions of the parameter that a piece is of: ``if p.ndim > 1`` asks for a matrix."""
    layout = place_of(piece).layout
    if isinstance(layout, tuple) and isinstance(layout[0], tuple):
        return len(layout[0])
    return piece.ndim


class PieceMixture(Exception):
    """Pieces are computed together that hold different elements.

    Args:
        names: What the user calls the parameters.
    """

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.names = names


#: Where a tensor keeps its place. Of one that has none, nothing is known: it goes with any.
_PLACE = "_fsdp_place"

#: Of a gradient that belongs to no parameter any more.
_UNKNOWN = PiecePlace("", None)

_placed: dict[int, weakref.ref[Tensor]] = {}
_of_gradients: dict[int, tuple[weakref.ref[Tensor], PiecePlace]] = {}


def place_piece(piece: Tensor, place: PiecePlace) -> None:
    """Note which elements of a parameter ranks hold.

    Args:
        piece: This rank's piece of the parameter, whose gradients are placed with it.
        place: Which they are.
    """
    set_place(piece, place)
    key = id(piece)
    _placed[key] = weakref.ref(piece, lambda _: _placed.pop(key, None))


def set_place(tensor: Tensor, place: PiecePlace | None) -> None:
    """Let a tensor that was computed of a piece be placed as that."""
    vars(tensor)[_PLACE] = place or _UNKNOWN


def common_places(name: str, pieces: type[Tensor], args: Any, kwargs: Any) -> Sequence[PiecePlace | None]:
    """Where the pieces are that a function is called with. Tensor functions must be off.

    Args:
        name: The function's name.
        pieces: The class of pieces.
        args: Its arguments.
        kwargs: Its arguments by name.

    Returns:
        The place of what it computes; of each tensor, for a function of lists of tensors.

    Raises:
        PieceMixture: It would compute element by element of pieces that hold different elements.
    """
    values = [*args, *(kwargs.values() if isinstance(kwargs, Mapping) else ())]
    if name in OF_FIRST:
        values = values[:1]
    if name.startswith("_foreach_"):
        columns: Iterable[Any] = zip(*(each for each in values if isinstance(each, list | tuple)), strict=False)
        return [_common(column, pieces) for column in columns]
    return [_common(values, pieces)]


#: What asks another tensor for its dtype, device or shape alone.
OF_FIRST = frozenset(
    {"to", "type_as", "result_type", "is_same_size", "is_set_to", "view_as", "reshape_as", "new_tensor"}
)


def _common(values: Iterable[Any], pieces: type[Tensor]) -> PiecePlace | None:
    common: PiecePlace | None = None
    for value in values:
        if issubclass(type(value), pieces):
            place = place_of(value)
            if common is None or common.layout is None:
                common = place
            elif place.layout is not None and place.layout != common.layout:
                raise PieceMixture(common.name, place.name)
    return common


def place_of(piece: Tensor) -> PiecePlace:
    """Which elements of a parameter ranks hold in a piece."""
    place: PiecePlace | None = vars(piece).get(_PLACE)
    if place is None:  # a gradient, which is placed when something is computed of it: a plain step has no part in it
        entry = _of_gradients.get(id(piece))
        if entry is None or entry[0]() is not piece:
            _find_gradients()
            entry = _of_gradients.get(id(piece))
        place = _UNKNOWN if entry is None else entry[1]
        set_place(piece, place)
    return place


class FindsParameters(Protocol):
    """Finds the parameter that an optimizer keeps a tensor for."""

    def parameter_of(self, state: Tensor) -> Tensor | None:
        """The parameter; ``None`` if none of its optimizers keeps the tensor."""


_finders: weakref.WeakSet[FindsParameters] = weakref.WeakSet()


def find_parameters_by(finder: FindsParameters) -> None:
    """Let the parameters that optimizers' states belong to be found by this too, as long as it is there."""
    _finders.add(finder)


def shard_of(place: PiecePlace | None, piece: Tensor) -> tuple[int, Any]:
    """Which shard this rank holds where a piece is, and the process group of the ranks that hold the same one.

    Args:
        place: Where it is. If nothing is known of that, as of an optimizer's state, it is where its parameter is; or
            where all parameters are.
        piece: The piece.

    Raises:
        PieceMixture: This rank holds different shards of two parameters, and nothing says of which the piece is.
    """
    if place is None or place.layout is None:
        owners = [parameter for finder in _finders if (parameter := finder.parameter_of(piece)) is not None]
        placed = owners[:1] or [parameter for reference in _placed.values() if (parameter := reference()) is not None]
        places = [place_of(parameter) for parameter in placed]
        different = [each for each in places if (each.shard, each.replicas) != (places[0].shard, places[0].replicas)]
        if different:
            raise PieceMixture(places[0].name, different[0].name)
        place = places[0] if places else _UNKNOWN
    return place.shard, place.replicas


def _find_gradients() -> None:
    _of_gradients.clear()
    for of in list(_placed.values()):
        parameter = of()
        gradient = None if parameter is None else parameter.grad
        if parameter is not None and gradient is not None:
            _of_gradients[id(gradient)] = weakref.ref(gradient), vars(parameter)[_PLACE]
