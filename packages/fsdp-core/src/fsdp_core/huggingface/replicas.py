"""Boxes that several ranks hold: one rank reads them, and sends them to the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.mesh import MESH_AXES, MeshAxis
from fsdp_core.runtime import Runtime
from fsdp_core.state.boxes import cut
from fsdp_core.state.chunks import ChunkedTensor

__all__ = ["SharedBoxes", "find_shared_boxes"]

_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class SharedBoxes:
    """The ranks that hold the same boxes of a tensor.

    Attributes:
        peers: These ranks.
        owner: The one of them that reads, by its number among them.
    """

    peers: Runtime
    owner: int

    @property
    def is_owner(self) -> bool:
        """Whether this rank reads."""
        return self.peers.rank == self.owner

    def broadcast_from_owner(self, data: Tensor) -> None:
        """Copy the owner's values to its peers, in place. All of these ranks must call it."""
        with torch.no_grad():
            if data.is_contiguous():
                self._broadcast(data)
                return
            for offsets, lengths in cut(data.shape, data.dtype.itemsize, _BLOCK_BYTES):
                part = data[tuple(slice(o, o + size) for o, size in zip(offsets, lengths, strict=True))]
                copy = part.contiguous()
                self._broadcast(copy)
                part.copy_(copy)

    def _broadcast(self, data: Tensor) -> None:
        # As bytes, since not every library can send every dtype.
        self.peers.broadcast(data.reshape(-1).view(torch.uint8), self.owner)


def find_shared_boxes(runtime: Runtime, state: Mapping[str, ChunkedTensor]) -> dict[str, SharedBoxes]:
    """Find the tensors of which this rank's boxes are held by others too. All ranks must call it.

    Args:
        runtime: The ranks.
        state: What this rank holds, under the same names in the same order on every rank.

    Returns:
        By name, the ranks with the same boxes, if these are peers along axes of the mesh. Tensors that are left out are
        read by every rank itself.
    """
    if runtime.world_size == 1:
        return {}
    boxes = [tuple((tuple(c.offsets), tuple(c.data.shape)) for c in tensor.chunks) for tensor in state.values()]
    boxes_by_rank = runtime.gather_objects(boxes)
    mesh = runtime.mesh
    axes = [axis for axis in MESH_AXES if mesh.size((axis,)) > 1]
    axis_sets = [axis_set for size in range(1, len(axes) + 1) for axis_set in combinations(axes, size)]
    peers_by_rank: dict[tuple[MeshAxis, ...], list[tuple[int, ...]]] = {
        axis_set: [tuple(mesh.peers(rank, axis_set)) for rank in range(runtime.world_size)] for axis_set in axis_sets
    }
    # By a tensor's index and by rank: the axes along which the rank's peers hold the same boxes.
    axis_set_by_rank: dict[int, dict[int, tuple[MeshAxis, ...]]] = {}
    for index in range(len(state)):
        holders: dict[object, list[int]] = {}
        for rank, boxes_of_rank in enumerate(boxes_by_rank):
            if boxes_of_rank[index]:
                holders.setdefault(boxes_of_rank[index], []).append(rank)
        for ranks in holders.values():
            axis_set_of_ranks = next((a for a in axis_sets if peers_by_rank[a][ranks[0]] == tuple(ranks)), None)
            if len(ranks) > 1 and axis_set_of_ranks is not None:
                axis_set_by_rank.setdefault(index, {}).update(dict.fromkeys(ranks, axis_set_of_ranks))
    used_axis_sets = {axis_set for by_rank in axis_set_by_rank.values() for axis_set in by_rank.values()}
    groups: dict[tuple[MeshAxis, ...], Runtime] = {}
    for axis_set in sorted(used_axis_sets, key=axis_sets.index):  # every rank, in the same order
        try:
            groups[axis_set] = runtime.along(*axis_set)
        except UnsupportedCapabilityError:  # the runtime can't communicate among a part of the ranks
            continue
    shared: dict[str, SharedBoxes] = {}
    for index, name in enumerate(state):
        own_axis_set = axis_set_by_rank.get(index, {}).get(runtime.rank)
        if own_axis_set in groups:
            peers = groups[own_axis_set]
            shared[name] = SharedBoxes(peers=peers, owner=index % peers.world_size)
    return shared
