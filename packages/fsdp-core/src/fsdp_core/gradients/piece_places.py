"""Whether ranks hold the same elements of two parameters, so that their pieces may be computed together.

A piece is what a rank holds of a flattened parameter, as a plain tensor. Its place says which elements these are.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

__all__ = [
    "READS_FIRST_ALONE",
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
        name: The user's name of the parameter.
        layout: Equal for parameters of one shape of which each rank holds the same elements. If it is a tuple that
            begins with a tuple, that is the parameter's shape.
        shard: The number of the shard that this rank holds.
        replicas: The process group of the ranks that hold the same shard; ``None`` if no other rank does.
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
        names: The user's names of the parameters.
    """

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.names = names


#: The attribute of a tensor that holds its :class:`PiecePlace`.
_PLACE = "_fsdp_place"

#: The place of a gradient that belongs to no parameter any more. Its layout, ``None``, goes with any.
_UNKNOWN = PiecePlace("", None)

_placed_parameters: dict[int, weakref.ref[Tensor]] = {}
_places_of_gradients: dict[int, tuple[weakref.ref[Tensor], PiecePlace]] = {}


def place_piece(piece: Tensor, place: PiecePlace) -> None:
    """Note which elements of a parameter ranks hold.

    Args:
        piece: This rank's piece of the parameter, whose gradients are placed with it.
        place: Which they are.
    """
    set_place(piece, place)
    key = id(piece)
    _placed_parameters[key] = weakref.ref(piece, lambda _: _placed_parameters.pop(key, None))


def set_place(tensor: Tensor, place: PiecePlace | None) -> None:
    """Record of a tensor that was computed of a piece, which elements of which parameter it has."""
    vars(tensor)[_PLACE] = place or _UNKNOWN


def common_places(name: str, pieces: type[Tensor], args: Any, kwargs: Any) -> Sequence[PiecePlace | None]:
    """Where the pieces are that a function is called with. Tensor functions must be off.

    Args:
        name: The function's name.
        pieces: The class of pieces.
        args: Its arguments.
        kwargs: Its arguments by name.

    Returns:
        The place of its result; for a function of lists of tensors, the place of each tensor in its result.

    Raises:
        PieceMixture: It would compute element by element of pieces that hold different elements.
    """
    values = [*args, *(kwargs.values() if isinstance(kwargs, Mapping) else ())]
    if name in READS_FIRST_ALONE:
        values = values[:1]
    if name.startswith("_foreach_"):
        lists = [value for value in values if isinstance(value, list | tuple)]
        return [_common(operands, pieces) for operands in zip(*lists, strict=False)]
    return [_common(values, pieces)]


#: Functions that only ask the second tensor for its dtype, device or shape.
READS_FIRST_ALONE = frozenset(
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
    if place is None:  # a gradient; looking for its parameter only now costs nothing in steps without such computations
        entry = _places_of_gradients.get(id(piece))
        if entry is None or entry[0]() is not piece:
            _find_gradients()
            entry = _places_of_gradients.get(id(piece))
        place = _UNKNOWN if entry is None else entry[1]
        set_place(piece, place)
    return place


class FindsParameters(Protocol):
    """Finds the parameter that an optimizer keeps a tensor for."""

    def parameter_of(self, state: Tensor) -> Tensor | None:
        """The parameter; ``None`` if none of its optimizers keeps the tensor."""


_finders: weakref.WeakSet[FindsParameters] = weakref.WeakSet()


def find_parameters_by(finder: FindsParameters) -> None:
    """Add a finder of the parameters that optimizers' states belong to. It is not kept alive."""
    _finders.add(finder)


def shard_of(place: PiecePlace | None, piece: Tensor) -> tuple[int, Any]:
    """Which shard this rank holds where a piece is, and the process group of the ranks that hold the same one.

    Args:
        place: The piece's place. If that is not known, as of an optimizer's state, its parameter's place is taken, or
            the one that all parameters have.
        piece: The piece.

    Raises:
        PieceMixture: This rank holds different shards of two parameters, and nothing says of which the piece is.
    """
    if place is None or place.layout is None:
        owners = [parameter for finder in _finders if (parameter := finder.parameter_of(piece)) is not None]
        parameters = owners[:1] or [
            parameter for reference in _placed_parameters.values() if (parameter := reference()) is not None
        ]
        places = [place_of(parameter) for parameter in parameters]
        for other in places[1:]:
            if (other.shard, other.replicas) != (places[0].shard, places[0].replicas):
                raise PieceMixture(places[0].name, other.name)
        place = places[0] if places else _UNKNOWN
    return place.shard, place.replicas


def _find_gradients() -> None:
    _places_of_gradients.clear()
    for reference in list(_placed_parameters.values()):
        parameter = reference()
        gradient = None if parameter is None else parameter.grad
        if parameter is not None and gradient is not None:
            _places_of_gradients[id(gradient)] = weakref.ref(gradient), vars(parameter)[_PLACE]
