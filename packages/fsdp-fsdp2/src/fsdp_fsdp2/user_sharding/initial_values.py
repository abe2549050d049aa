"""Gives the parameters of modules that a user has sharded their initial values: those of the unsharded model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_core import Runtime, ShardingError
from fsdp_core.sharding import MESH_AXES, MeshAxis, place
from fsdp_core.state import chunked, clean_name
from fsdp_fsdp2.meshes import ranks_along
from fsdp_fsdp2.user_sharding.built_parameters import has_noted, is_dtensor, noted_parameter

__all__ = ["materialize_sharded", "refuse_changed_on_meta"]

#: By the id of a parameter, the modules that hold it, each with the parameter's name in that module.
Owners = dict[int, list[tuple[nn.Module, str]]]


def materialize_sharded(
    modules: Iterable[nn.Module], root: nn.Module, runtime: Runtime, offloaded: Collection[int] = ()
) -> None:
    """Move what ``modules`` own to the device with rank 0's values, and fill their shards that have no memory.

    A shard on the meta device gets its part of the value that the parameter has in the unsharded model; for this, one
    module at a time is initialised unsharded. A shard with memory keeps its values; where several ranks hold the same
    part, they take over the first rank's. All ranks must call it.

    Args:
        modules: The modules, each without its children, in the order in which they draw random numbers.
        root: The model that they are parts of.
        runtime: The ranks.
        offloaded: The ids of parameters whose shards are in host memory.

    Raises:
        ShardingError: How a parameter on the meta device was initialised is not known.
    """
    owners = _find_owners(root)
    for module in modules:
        on_meta: dict[str, Any] = {name: p for name, p in module._parameters.items() if p is not None and p.is_meta}
        sharded = {name: parameter for name, parameter in on_meta.items() if is_dtensor(parameter)}
        unsharded = {name: _find_unsharded(module, name, p, root, owners) for name, p in sharded.items()}
        module._parameters.update(unsharded)
        place([module], runtime, leave=lambda _, parameter: is_dtensor(parameter))
        for name, meta_parameter in on_meta.items():
            parameter: Any = module._parameters[name]
            if name in sharded:
                device = torch.device("cpu") if id(meta_parameter) in offloaded else runtime.device
                parameter = _shard_like(meta_parameter, parameter, device)
                parameter.__dict__.update(meta_parameter.__dict__)
            tied = [(owner, attribute) for owner, attribute in owners[id(meta_parameter)] if owner is not module]
            for owner, attribute in (*tied, (module, name)):
                setattr(owner, attribute, parameter)  # not in _parameters alone: LSTMs have a list of them too
        with_memory: dict[str, Any] = {name: p for name, p in module._parameters.items() if name not in on_meta}
        for parameter in with_memory.values():
            if is_dtensor(parameter):
                _broadcast_first_copy(parameter, runtime)


def _find_unsharded(module: nn.Module, name: str, sharded: DTensor, root: nn.Module, owners: Owners) -> nn.Parameter:
    """The parameter from which the user has made a shard: unsharded, on the meta device."""
    # the parameters that modules were built with, as noted where the model was built without memory
    built_by_owners = [noted_parameter(owner, attribute) for owner, attribute in owners[id(sharded)]]
    built = noted_parameter(module, name)
    if built is None and not has_noted(root):
        return nn.Parameter(torch.empty(sharded.shape, dtype=sharded.dtype, device="meta"), sharded.requires_grad)
    if built is None or built.shape != sharded.shape or any(parameter is not built for parameter in built_by_owners):
        history = "was tied or replaced" if built is not None else "was made"
        fqn = next(clean_name(n) for n, p in root.named_parameters() if id(p) == id(sharded))
        raise ShardingError(
            f"{fqn!r} is sharded and has no memory, and {history} where it was not noted how it is initialised.\n"
            "Build the model under trainer.init_module(empty_init=True) or fabric.init_module(empty_init=True), "
            "tie and replace its parameters there, and apply fully_shard and parallelize_module afterwards; or build "
            "it with memory."
        )
    return built


def _shard_like(sharded: DTensor, full: nn.Parameter, device: torch.device) -> nn.Parameter:
    """This rank's part of a full parameter, with the mesh and the placements of a shard on the meta device."""
    local = torch.empty(sharded.to_local().shape, dtype=sharded.dtype, device=device)
    filled = DTensor.from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
    with torch.no_grad():
        for chunk in chunked(filled).chunks:
            assert isinstance(chunk.data, torch.Tensor)
            index = tuple(slice(start, start + n) for start, n in zip(chunk.offsets, chunk.data.shape, strict=True))
            chunk.data.copy_(full[index])
    return nn.Parameter(filled, requires_grad=sharded.requires_grad)


def _find_owners(root: nn.Module) -> Owners:
    """The modules that hold each parameter of a model; for all at once, since the search for one takes as long."""
    owners: Owners = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            owners.setdefault(id(parameter), []).append((module, name))
    return owners


def _broadcast_first_copy(parameter: DTensor, runtime: Runtime) -> None:
    """Broadcast a shard along the axes over which ranks hold copies of it: each may have drawn its own values."""
    ranks_with_other_parts = set[int]()
    for axis, placement in enumerate(parameter.placements):
        if not isinstance(placement, Replicate):
            ranks_with_other_parts |= ranks_along(parameter.device_mesh, axis)
    copy_axes: tuple[MeshAxis, ...] = tuple(
        axis for axis in MESH_AXES if not ranks_with_other_parts.issuperset(runtime.mesh.peers(runtime.rank, (axis,)))
    )
    if ranks_with_other_parts and runtime.mesh.size(copy_axes) == 1:
        return
    with torch.no_grad():
        local = parameter.to_local()
    if local.numel():
        runtime.along(*copy_axes).broadcast(local)


def refuse_changed_on_meta(root: nn.Module) -> None:
    """Refuse a model whose shards were written to on the meta device, which had no effect.

    Raises:
        ShardingError: There is such a shard.
    """
    for name, parameter in root.named_parameters():
        if isinstance(parameter, DTensor) and parameter.is_meta and parameter._version:
            raise ShardingError(
                f"{clean_name(name)!r} was changed after it was sharded on the meta device, where it has no memory: "
                "that did nothing.\nInitialise the model before fully_shard and parallelize_module, or write to it "
                "after the set-up."
            )
