"""What several ranks hold is read by one of them, which sends it to the others."""

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

__all__ = ["Shared", "shared_boxes"]

_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The ranks that hold the same boxes of a tensor.

    Attributes:
        peers: These ranks.
        owner: Which of them reads.
    """

    peers: Runtime
    owner: int

    @property
    def reads(self) -> bool:
        """Whether this rank reads."""
        return self.peers.rank == self.owner

    def send(self, data: Tensor) -> None:
        """Copy the values of the rank that reads to its peers, in place. All of them must call it."""
        with torch.no_grad():
            if data.is_contiguous():
                self._send(data)
                return
            for offsets, lengths in cut(data.shape, data.dtype.itemsize, _BLOCK_BYTES):
                part = data[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
                copy = part.contiguous()
                self._send(copy)
                part.copy_(copy)

    def _send(self, data: Tensor) -> None:
        self.peers.broadcast(data.reshape(-1).view(torch.uint8), self.owner)  # which every library can send


def shared_boxes(runtime: Runtime, held: Mapping[str, ChunkedTensor]) -> dict[str, Shared]:
    """Find the tensors of which this rank's boxes are held by others too. All ranks must call it.

    Args:
        runtime: The ranks.
        held: What this rank holds, under the same names in the same order on every rank.

    Returns:
        By name, the ranks with the same boxes, where these are peers along axes of the mesh. What is not in it, a rank
        reads itself.
    """
    if runtime.world_size == 1:
        return {}
    boxes = [tuple((tuple(c.offsets), tuple(c.data.shape)) for c in tensor.chunks) for tensor in held.values()]
    by_rank = runtime.gather_objects(boxes)
    mesh = runtime.mesh
    axes = [axis for axis in MESH_AXES if mesh.size((axis,)) > 1]
    sets = [chosen for n in range(1, len(axes) + 1) for chosen in combinations(axes, n)]
    peers_of: dict[tuple[MeshAxis, ...], list[tuple[int, ...]]] = {
        chosen: [tuple(mesh.peers(rank, chosen)) for rank in range(runtime.world_size)] for chosen in sets
    }
    needed: dict[int, dict[int, tuple[MeshAxis, ...]]] = {}
    for at in range(len(held)):
        holders: dict[object, list[int]] = {}
        for rank, of_rank in enumerate(by_rank):
            if of_rank[at]:
                holders.setdefault(of_rank[at], []).append(rank)
        for ranks in holders.values():
            along = next((chosen for chosen in sets if peers_of[chosen][ranks[0]] == tuple(ranks)), None)
            if len(ranks) > 1 and along is not None:
                needed.setdefault(at, {}).update(dict.fromkeys(ranks, along))
    used = sorted({along for by in needed.values() for along in by.values()}, key=sets.index)
    groups: dict[tuple[MeshAxis, ...], Runtime] = {}
    for along in used:  # every rank, in the same order
        try:
            groups[along] = runtime.along(*along)
        except UnsupportedCapabilityError:  # it can't communicate among a part of the ranks
            continue
    found: dict[str, Shared] = {}
    for at, name in enumerate(held):
        chosen = needed.get(at, {}).get(runtime.rank)
        if chosen in groups:
            peers = groups[chosen]
            found[name] = Shared(peers=peers, owner=at % peers.world_size)
    return found
