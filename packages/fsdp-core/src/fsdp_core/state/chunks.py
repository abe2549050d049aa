"""This rank's part of a tensor, as boxes at their offsets. The only form in which state crosses a boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from fsdp_core.errors import ShardingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

__all__ = ["CONVERSIONS", "Chunk", "ChunkedTensor", "TensorSource", "chunked", "own_part"]


@runtime_checkable
class TensorSource(Protocol):
    """A tensor stored elsewhere that is read box by box, such as a :class:`~fsdp_core.checkpoint.SavedTensor`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read a box: a contiguous CPU tensor of shape ``lengths`` that begins at ``offsets``."""
        ...


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a larger tensor.

    Attributes:
        offsets: Where the box begins in the larger tensor, one number per dimension; ``()`` for a 0-dim tensor.
        data: The box itself, at its own shape. For saving, it may be a source, which is read when the box is written.
            For loading, it is a tensor that is written in place.
    """

    offsets: tuple[int, ...]
    data: Tensor | TensorSource


class ChunkedTensor:
    """This rank's part of a tensor: zero or more boxes that don't overlap.

    The boxes of all ranks with ``replica == 0`` cover the tensor exactly. A rank that holds nothing of the tensor (more
    ranks than rows) has no chunks.

    It is not a tensor. Methods that a user's hook calls are applied to the boxes if that is equivalent to applying them
    to the full tensor (:data:`CONVERSIONS`), and refused otherwise.

    Args:
        shape: The shape of the whole tensor.
        dtype: Its dtype.
        chunks: The boxes that this rank holds.
        replica: Which copy of the tensor these boxes belong to. Only copy 0 is written; every copy is read into.

    Raises:
        ValueError: A chunk does not lie inside the tensor.
    """

    # Not a dataclass, because Lightning searches dataclasses for tensors to replace.
    __slots__ = ("chunks", "dtype", "replica", "shape")

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    replica: int

    def __init__(
        self, *, shape: tuple[int, ...], dtype: torch.dtype, chunks: tuple[Chunk, ...], replica: int = 0
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.chunks = chunks
        self.replica = replica
        for chunk in chunks:
            if not _lies_inside(chunk, shape):
                raise ValueError(
                    f"a chunk of shape {tuple(chunk.data.shape)} at {chunk.offsets} does not lie inside a tensor of "
                    f"shape {shape}"
                )

    def copied(self, copies: Mapping[int, Tensor]) -> ChunkedTensor:
        """Return the same boxes over copies of their data; no boxes if this is not copy 0.

        Args:
            copies: Tensors of the same shape, by the id of the original. Data without a copy is kept.
        """
        copy = object.__new__(ChunkedTensor)  # the boxes have been checked
        copy.shape = self.shape
        copy.dtype = self.dtype
        copy.replica = self.replica
        copy.chunks = ()
        if self.replica == 0:
            copies_of_data = [copies.get(id(chunk.data), chunk.data) for chunk in self.chunks]
            copy.chunks = tuple(
                Chunk(offsets=chunk.offsets, data=data) for chunk, data in zip(self.chunks, copies_of_data, strict=True)
            )
        return copy

    def numel(self) -> int:
        """Return the number of elements of the full tensor."""
        return prod(self.shape)

    def is_floating_point(self) -> bool:
        """Return whether its dtype is a floating-point one."""
        return self.dtype.is_floating_point

    if not TYPE_CHECKING:  # type checkers see the declared attributes only

        def __getattr__(self, name: str) -> Any:
            if name in CONVERSIONS:
                return partial(self._convert, name)
            if name.startswith("__"):  # the copy module, among others, looks such names up
                raise AttributeError(name)
            raise _not_supported(f".{name}")

    def _convert(self, method: str, *args: Any, **kwargs: Any) -> ChunkedTensor:
        dtype = getattr(torch.empty(0, dtype=self.dtype), method)(*args, **kwargs).dtype

        def convert(data: Tensor | TensorSource) -> Tensor | TensorSource:
            if isinstance(data, Tensor):
                converted: Tensor = getattr(data, method)(*args, **kwargs)
                return converted
            return _Converted(data, dtype)

        chunks = tuple(Chunk(offsets=chunk.offsets, data=convert(chunk.data)) for chunk in self.chunks)
        return ChunkedTensor(shape=self.shape, dtype=dtype, chunks=chunks, replica=self.replica)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise _not_supported(f"torch's {getattr(function, '__name__', function)}()")

    def _refuse_arithmetic(self, *_: Any) -> NoReturn:
        raise _not_supported("arithmetic")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse_arithmetic
    __pow__ = __matmul__ = __rmatmul__ = __neg__ = __abs__ = __getitem__ = __float__ = _refuse_arithmetic

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkedTensor:
        chunks = tuple(Chunk(offsets=chunk.offsets, data=deepcopy(chunk.data, memo)) for chunk in self.chunks)
        return ChunkedTensor(shape=self.shape, dtype=self.dtype, chunks=chunks, replica=self.replica)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _not_supported("pickling")

    def __repr__(self) -> str:
        return f"ChunkedTensor(shape={self.shape}, dtype={self.dtype}, chunks={self.chunks}, replica={self.replica})"


#: Tensor methods that a :class:`ChunkedTensor` has too: they treat every element alike, wherever it is.
CONVERSIONS = frozenset({"to", "half", "bfloat16", "float", "double", "clone", "detach", "cpu", "contiguous"})


class _Converted:
    """A source whose elements are converted as they are read."""

    def __init__(self, source: TensorSource, dtype: torch.dtype) -> None:
        self._source, self.dtype = source, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._source.shape

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        return self._source.read(offsets, lengths).to(self.dtype)


class _NotWholeError(ShardingError, AttributeError, TypeError):
    """A part of a tensor was used like the full tensor."""


def _not_supported(usage: str) -> _NotWholeError:
    return _NotWholeError(
        f"{usage} is not supported by a ChunkedTensor, which holds this rank's part of a tensor. It can only be "
        f"renamed, removed, copied or converted ({', '.join(f'.{name}()' for name in sorted(CONVERSIONS))}).\n"
        "In a hook such as on_save_checkpoint(), call fsdp_core.full_state_dict(self) on all ranks, which returns full "
        'tensors on rank 0; or pass state_dict_type="full" to the strategy: checkpoint["state_dict"] is then full on '
        "rank 0 and empty elsewhere."
    )


def _lies_inside(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    box = chunk.data.shape
    if not len(box) == len(chunk.offsets) == len(shape):
        return False
    for offset, length, size in zip(chunk.offsets, box, shape, strict=True):  # a save does this for every tensor
        if offset < 0 or offset + length > size:
            return False
    return True


def chunked(tensor: Tensor | ChunkedTensor | TensorSource, *, rank: int = 0) -> ChunkedTensor:
    """Describe this rank's part of ``tensor``.

    Args:
        tensor: A :class:`~torch.distributed.tensor.DTensor` (its mesh and placements determine this rank's box; its
            local tensor may be on another device than the mesh, as under CPU offload), a plain tensor or a source
            (assumed to be the same on every rank), or a :class:`ChunkedTensor`, which is returned unchanged.
        rank: This rank. A plain tensor on rank *n* is its *n*-th copy.

    Returns:
        The boxes, sharing memory with ``tensor``.

    Raises:
        ValueError: ``tensor`` is a DTensor with a pending (partial) reduction, or placed such that ranks hold no boxes.

    Example:
        >>> whole = chunked(torch.zeros(4, 2), rank=1)
        >>> whole.shape, whole.replica, whole.chunks[0].offsets
        ((4, 2), 1, (0, 0))
    """
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, ChunkedTensor):
        return tensor
    if isinstance(tensor, DTensor):
        return _chunk_of_dtensor(tensor)
    shape = tuple(tensor.shape)
    chunk = Chunk(offsets=(0,) * len(shape), data=tensor.detach() if isinstance(tensor, Tensor) else tensor)
    return ChunkedTensor(shape=shape, dtype=tensor.dtype, chunks=() if 0 in shape else (chunk,), replica=rank)


def _chunk_of_dtensor(tensor: DTensor) -> ChunkedTensor:
    from fsdp_core.torch_private.dtensors import is_first_slice

    if torch.is_grad_enabled():  # to_local() would then create a new tensor, tracked by autograd
        with torch.no_grad():
            return _chunk_of_dtensor(tensor)
    shape = tuple(tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not part of the tensor's mesh
        return ChunkedTensor(shape=shape, dtype=tensor.dtype, chunks=())
    offsets, lengths, replica = _box_at(shape, tensor.placements, tuple(mesh.shape), tuple(coordinate))
    replica = replica or int(not is_first_slice(mesh))
    local = tensor.to_local().detach()
    if not all(lengths):
        return ChunkedTensor(shape=shape, dtype=tensor.dtype, chunks=(), replica=replica)
    if tuple(local.shape) != lengths:
        raise ValueError(
            f"this rank's part of a DTensor of shape {shape} placed as {tensor.placements} should have shape "
            f"{lengths}, but it has {tuple(local.shape)}: build the DTensor with its true shape and stride"
        )
    chunk = Chunk(offsets=offsets, data=local)
    return ChunkedTensor(shape=shape, dtype=tensor.dtype, chunks=(chunk,), replica=replica)


def own_part(tensor: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """Return this rank's part of a tensor that all ranks of a mesh have.

    Before torch 2.13 or so, :func:`~torch.distributed.tensor.distribute_tensor` returned other parts where
    ``fully_shard`` divides the pieces of tensor parallelism, and these have two sizes.

    Args:
        tensor: The whole tensor.
        mesh: The mesh.
        placements: Placements of boxes.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the tensor's mesh"
    offsets, lengths, _ = _box_at(tuple(tensor.shape), placements, tuple(mesh.shape), tuple(coordinate))
    return tensor[tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))]


@lru_cache(maxsize=1024)  # a model repeats its shapes, and a save looks up each of them three times
def _box_at(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the offsets and lengths of the box at a mesh coordinate, and which copy of the tensor it belongs to."""
    from torch.distributed.tensor import Replicate, Shard

    from fsdp_core.torch_private.dtensors import StridedShard

    offsets = [0] * len(shape)
    lengths = list(shape)
    replica = 0
    # For each sharding mesh axis: the tensor's dimension, the number of this rank's piece, and how many pieces there
    # are.
    sharded_axes: list[tuple[int, int, int]] = []
    strided_axes: list[tuple[int, int, int]] = []
    for mesh_dim, (placement, index, peers) in enumerate(zip(placements, coordinate, mesh, strict=True)):
        # By exact type: torch's strided shard has been a subclass of Shard.
        if type(placement) is Shard:
            sharded_axes.append((placement.dim % len(shape), index, peers))
        elif type(placement) is Replicate:
            replica = replica * peers + index
        elif type(placement) is StridedShard and placement.split_factor == _count_pieces(
            placement.dim, placements[mesh_dim + 1 :], mesh[mesh_dim + 1 :]
        ):
            # Applied after the mesh axes that follow this one: it divides the pieces that they leave.
            strided_axes.insert(0, (placement.dim, index, peers))
        else:
            raise ValueError(
                f"a DTensor placed as {placements} does not consist of boxes, so it can't be saved or loaded as it "
                "is: redistribute it to Shard(dim) and Replicate() first"
            )
    for dim, index, peers in (*sharded_axes, *strided_axes):
        # As torch.chunk splits: equal pieces, then a smaller one, then empty ones.
        piece = -(-lengths[dim] // peers)
        start = min(index * piece, lengths[dim])
        offsets[dim] = offsets[dim] + start
        lengths[dim] = min(piece, lengths[dim] - start)
    return tuple(offsets), tuple(lengths), replica


def _count_pieces(dim: int, placements: tuple[Placement, ...], mesh: tuple[int, ...]) -> int:
    """Return into how many pieces the placements that are not strided divide a dimension."""
    from torch.distributed.tensor import Shard

    return prod(n for p, n in zip(placements, mesh, strict=True) if type(p) is Shard and p.dim == dim)
