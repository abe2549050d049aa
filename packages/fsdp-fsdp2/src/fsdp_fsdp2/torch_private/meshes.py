"""Device meshes of several axes as one, or side by side."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["joined_axes", "side_by_side"]


def joined_axes(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a slice of a mesh as one axis, ``name``.

    ``fully_shard`` shards over one axis, but data-parallel and context-parallel ranks together. A new mesh for that
    would not do: torch combines the meshes of a DTensor, as with tensor parallelism, only if they are slices of one.
    """
    return mesh._flatten(name)


def side_by_side(outer: DeviceMesh, inner: DeviceMesh, root: DeviceMesh) -> DeviceMesh:
    """Two slices of one mesh as a mesh of two axes. Before torch 2.10, joined axes can be sliced by name instead."""
    if hasattr(DeviceMesh, "_concatenate"):
        return DeviceMesh._concatenate([outer, inner])
    joined: DeviceMesh = root[(*(outer.mesh_dim_names or ()), *(inner.mesh_dim_names or ()))]
    return joined
