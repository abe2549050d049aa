"""The mesh: how the ranks of a run are arranged along axes, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from fsdp_core.errors import UnsupportedCapabilityError

__all__ = ["DATA_AXES", "GRADIENT_AXES", "MESH_AXES", "Mesh", "MeshAxis"]

MeshAxis = Literal[
    "data_parallel_replicate",
    "data_parallel",
    "expert_data_parallel",
    "expert_parallel",
    "context_parallel",
    "tensor_parallel",
]

#: All axes, the outermost first. ``"data_parallel"`` consists of ``"expert_data_parallel"`` and, inside of it,
#: ``"expert_parallel"``, which are not named again.
MESH_AXES: tuple[MeshAxis, ...] = ("data_parallel_replicate", "data_parallel", "context_parallel", "tensor_parallel")

#: The axes along which ranks get different batches.
DATA_AXES: tuple[MeshAxis, ...] = MESH_AXES[:2]

#: The axes along which ranks compute gradients of different samples, or parts of samples, which are averaged.
GRADIENT_AXES: tuple[MeshAxis, ...] = MESH_AXES[:3]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The number of ranks along each axis.

    Ranks are numbered in row-major order, the last axis innermost: tensor-parallel peers, which communicate most, are
    neighbours on a host.

    Expert parallelism adds no ranks: :attr:`expert_parallel` neighbours among the data-parallel ranks divide experts
    among them, and the :attr:`expert_data_parallel` ranks that have the same experts shard these.

    Attributes:
        data_parallel_replicate: Replicas of the model. They get different batches.
        data_parallel: Ranks that shard parameters, gradients and optimizer state among them, and get different batches.
        context_parallel: Ranks that divide a batch along its sequence dimension.
        tensor_parallel: Ranks that divide the computation of a layer among them, for the same batch.
        expert_parallel: Data-parallel ranks that divide the experts of a layer among them; a divisor of
            :attr:`data_parallel`.

    Raises:
        UnsupportedCapabilityError: A size is not a positive integer, or ``expert_parallel`` is no such divisor.

    Example:
        >>> mesh = Mesh(data_parallel=2, tensor_parallel=2)
        >>> mesh.world_size, mesh.coordinate(3, DATA_AXES), mesh.peers(3, DATA_AXES)
        (4, 1, (1, 3))
        >>> mesh.described()
        'data_parallel 2 × tensor_parallel 2'
        >>> mesh = Mesh(data_parallel=4, expert_parallel=2)
        >>> mesh.peers(3, ("expert_parallel",)), mesh.peers(3, ("expert_data_parallel",)), mesh.described()
        ((2, 3), (1, 3), 'data_parallel 4, of which expert_parallel 2')
    """

    data_parallel_replicate: int = 1
    data_parallel: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_size(field.name, getattr(self, field.name))
        if self.data_parallel % self.expert_parallel:
            raise UnsupportedCapabilityError(
                f"expert_parallel_size={self.expert_parallel} does not divide the {_ranks(self.data_parallel)} of "
                "data_parallel_size, among which experts are divided.\n"
                f"Write a divisor of {self.data_parallel}, such as expert_parallel_size="
                f"{max(n for n in range(1, self.expert_parallel) if not self.data_parallel % n)}."
            )

    @property
    def expert_data_parallel(self) -> int:
        """The number of data-parallel ranks of a replica that have the same experts, and shard these."""
        return self.data_parallel // self.expert_parallel

    @classmethod
    def of(
        cls,
        world_size: int,
        *,
        data_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_replicate_size: int | Literal["auto"] = "auto",
        context_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int | Literal["auto"] = "auto",
        expert_parallel_size: int | Literal["auto"] = "auto",
    ) -> Mesh:
        """The mesh of so many ranks with these sizes.

        Args:
            world_size: The number of ranks.
            data_parallel_size: As :attr:`data_parallel`; ``"auto"`` for the ranks that remain.
            data_parallel_replicate_size: As :attr:`data_parallel_replicate`; ``"auto"`` for 1.
            context_parallel_size: As :attr:`context_parallel`; ``"auto"`` for 1.
            tensor_parallel_size: As :attr:`tensor_parallel`; ``"auto"`` for 1.
            expert_parallel_size: As :attr:`expert_parallel`; ``"auto"`` for 1.

        Raises:
            UnsupportedCapabilityError: The sizes don't multiply to ``world_size``, or the experts' does not divide that
                of data-parallel ranks.

        Example:
            >>> Mesh.of(4, tensor_parallel_size=2).data_parallel
            2
            >>> Mesh.of(4, tensor_parallel_size=3)
            Traceback (most recent call last):
                ...
            fsdp_core.errors.UnsupportedCapabilityError: tensor_parallel_size=3 does not divide 4 ranks.
            Write sizes whose product divides 4, such as tensor_parallel_size=2.
        """
        requested = {
            "data_parallel_replicate": data_parallel_replicate_size,
            "data_parallel": data_parallel_size,
            "context_parallel": context_parallel_size,
            "tensor_parallel": tensor_parallel_size,
        }
        sizes = {axis: 1 if size == "auto" else _check_size(f"{axis}_size", size) for axis, size in requested.items()}
        other_ranks = math.prod(size for axis, size in sizes.items() if axis != "data_parallel")
        size_texts = [f"{axis}_size={size}" for axis, size in requested.items() if size != "auto"]
        if data_parallel_size == "auto":
            if world_size % other_ranks:
                fitting = _fitting(sizes, world_size)
                raise UnsupportedCapabilityError(
                    f"{', '.join(size_texts)} {'does' if len(size_texts) == 1 else 'together do'} not divide "
                    f"{_ranks(world_size)}.\n"
                    f"Write sizes whose product divides {world_size}, such as {fitting}."
                )
            sizes["data_parallel"] = world_size // other_ranks
        elif other_ranks * sizes["data_parallel"] != world_size:
            product = other_ranks * sizes["data_parallel"]
            if world_size % other_ranks == 0:
                instead = f"Write data_parallel_size={world_size // other_ranks}, or leave it out"
            else:
                instead = f"Write sizes whose product is {world_size}, such as {_fitting(sizes, world_size)}"
            raise UnsupportedCapabilityError(
                f"{', '.join(size_texts)} {'is' if len(size_texts) == 1 else 'are'} for {_ranks(product)}, and there "
                f"{'is' if world_size == 1 else 'are'} {world_size}.\n{instead}; or start {_ranks(product)}."
            )
        experts = 1 if expert_parallel_size == "auto" else _check_size("expert_parallel_size", expert_parallel_size)
        return cls(**sizes, expert_parallel=experts)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.size(MESH_AXES)

    def size(self, axes: tuple[MeshAxis, ...]) -> int:
        """The number of ranks along some axes together."""
        return math.prod(getattr(self, axis) for axis in axes)

    def coordinate(self, rank: int, axes: tuple[MeshAxis, ...]) -> int:
        """A rank's index among its peers along some axes."""
        return self.peers(rank, axes).index(rank)

    def peers(self, rank: int, axes: tuple[MeshAxis, ...]) -> tuple[int, ...]:
        """The ranks that differ from a rank along these axes only, itself included, in ascending order."""
        return next(group for group in self.groups(axes) if rank in group)

    def groups(self, axes: tuple[MeshAxis, ...]) -> Iterator[tuple[int, ...]]:
        """All groups of peers along some axes, by their lowest ranks."""
        grouped_ranks: set[int] = set()
        strides: dict[MeshAxis, int] = dict(zip(MESH_AXES, self._strides(), strict=True))
        strides["expert_parallel"] = strides["data_parallel"]
        strides["expert_data_parallel"] = strides["data_parallel"] * self.expert_parallel
        for first in range(self.world_size):
            if first not in grouped_ranks:
                group = [first]
                for axis in axes:
                    group = [rank + step * strides[axis] for rank in group for step in range(getattr(self, axis))]
                grouped_ranks.update(group)
                yield tuple(sorted(group))

    def _strides(self) -> list[int]:
        """How far the ranks of neighbours along each axis are apart."""
        sizes = [getattr(self, axis) for axis in MESH_AXES]
        return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]

    def described(self) -> str:
        """The axes with more than one rank, and their sizes, in words."""
        sizes = [f"{axis} {getattr(self, axis)}" for axis in MESH_AXES if getattr(self, axis) > 1]
        described = " × ".join(sizes) or "data_parallel 1"
        experts = f", of which expert_parallel {self.expert_parallel}" if self.expert_parallel > 1 else ""
        return described + experts


def _check_size(name: str, size: object) -> int:
    if type(size) is not int or size < 1:
        raise UnsupportedCapabilityError(
            f"{name}={size!r} is not a number of ranks.\nWrite a positive integer, or 'auto'. The latter is 1, and of "
            "data_parallel_size the ranks that remain."
        )
    return size


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def _fitting(sizes: dict[str, int], world_size: int) -> str:
    """Sizes close to those asked for whose product divides the world size."""
    remaining = world_size
    fitting = []
    for axis, size in reversed(sizes.items()):
        if axis != "data_parallel" and size > 1:
            fits = max(n for n in range(1, min(size, remaining) + 1) if not remaining % n)
            remaining //= fits
            fitting.append(f"{axis}_size={fits}")
    return ", ".join(fitting) or f"data_parallel_size={world_size}"
