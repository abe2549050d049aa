"""Modules that a user has sharded with ``fully_shard`` and ``parallelize_module``: their units, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_core import Runtime, ShardingError, UnsupportedCapabilityError
from fsdp_core.sharding import Mesh, marked
from fsdp_core.state import clean_name
from fsdp_fsdp2.torch_private.parameter_groups import first_units_of_calls, has_run, parameters_of, reduces_gradients

__all__ = [
    "check_meshes",
    "check_no_context_parallel",
    "check_not_run",
    "check_reduces",
    "innermost_first",
    "is_divided",
    "is_sharded_by_user",
    "refuse_dtensors_outside_units",
    "refuse_options_with_own_sharding",
    "units_of_user",
]


def is_sharded_by_user(module: nn.Module) -> bool:
    """Whether the user has sharded a part of a module, or divided one among tensor-parallel ranks."""
    return any(isinstance(part, FSDPModule) for part in module.modules()) or any(
        isinstance(parameter, DTensor) for parameter in module.parameters()
    )


def units_of_user(module: nn.Module) -> list[nn.Module]:
    """The submodules to which the user has applied ``fully_shard``, innermost first, without the root.

    Of modules that were sharded together, by a list, the first stands for all.
    """
    sharded_parts = [part for part in innermost_first(module, set()) if isinstance(part, FSDPModule)]
    return [unit for unit in first_units_of_calls(sharded_parts) if unit is not module]


def innermost_first(module: nn.Module, visited: set[nn.Module]) -> Iterator[nn.Module]:
    """A module and all in it, each after what is in it, without those that were visited before."""
    if module not in visited:
        visited.add(module)
        for child in module.children():
            yield from innermost_first(child, visited)
        yield module


def refuse_options_with_own_sharding(module: nn.Module, options: Iterable[str]) -> None:
    """Refuse options that would shard modules which the user's own code has sharded.

    Args:
        module: The root, which the user has sharded or divided in part.
        options: The names of the strategy's options that were given.

    Raises:
        ShardingError: There is such an option, or a module is marked by ``wrap``.
    """
    name = type(module).__name__
    by_fully_shard = next((fqn for fqn, part in module.named_modules() if isinstance(part, FSDPModule)), None)
    first_dtensor = next(
        (clean_name(fqn) for fqn, parameter in module.named_parameters() if isinstance(parameter, DTensor)), ""
    )
    users_call = (
        f"fully_shard to {by_fully_shard or 'the root'!r}"
        if by_fully_shard is not None
        else f"parallelize_module to the module of {first_dtensor!r}"
    )
    for option in options:
        if by_fully_shard is None and option not in ("tp_plan", "parallelize_fn"):
            continue  # it is about units, which can still be chosen
        raise ShardingError(
            f"{option} was given, and {name} is already sharded in part: its code has applied {users_call}, in "
            "configure_model() or before fabric.setup(). Only one of the two can do it.\n"
            f"Leave {option} out, and give these options to fully_shard and parallelize_module where you call them; or "
            "remove those calls."
        )
    if by_fully_shard is not None and marked(module):
        raise ShardingError(
            f"{name} has layers that are marked by wrap(), and its code has applied {users_call}. Only one of the two "
            "can choose units.\n"
            "Leave wrap() out and call fully_shard on each unit; or remove the fully_shard calls."
        )


def check_not_run(module: nn.Module) -> None:
    """Refuse a unit that was called before the root was sharded: ``fully_shard`` takes it for a root from then on.

    Raises:
        ShardingError: There is such a unit.
    """
    for fqn, part in module.named_modules():
        if isinstance(part, FSDPModule) and has_run(part):
            raise ShardingError(
                f"{clean_name(fqn) or 'the root'!r} of {type(module).__name__} was called after fully_shard was "
                "applied to it, and before the strategy has sharded the rest: torch takes it for a root since.\n"
                "Call the model after the set-up: in a hook such as on_fit_start(), or after fabric.setup()."
            )


def check_reduces(module: nn.Module) -> None:
    """Refuse a unit for which the user has turned off the reduction of gradients: each rank would step with its own.

    Raises:
        ShardingError: There is such a unit.
    """
    for fqn, part in module.named_modules():
        if isinstance(part, FSDPModule) and not reduces_gradients(part):
            raise ShardingError(
                f"the gradients of {clean_name(fqn) or 'the root'!r} would not be reduced over ranks, since "
                "set_requires_gradient_sync(False) or set_requires_all_reduce(False) was called where the module was "
                "sharded: each rank would step with its own.\n"
                "Leave the call out. To reduce once for several batches, write accumulate_grad_batches to the Trainer, "
                "or use fabric.no_backward_sync(model)."
            )


def check_meshes(module: nn.Module, runtime: Runtime, fsdp_mesh: DeviceMesh) -> None:
    """Refuse parameters that are sharded over other ranks than those of the strategy's mesh.

    Args:
        module: The root.
        runtime: The ranks, and the strategy's mesh of them.
        fsdp_mesh: The axes that ``fully_shard`` shards and replicates over.

    Raises:
        ShardingError: A parameter is sharded over others.
    """
    mesh = runtime.mesh
    data_ranks = fsdp_mesh.mesh
    tensor_ranks = torch.tensor(mesh.peers(runtime.rank, ("tensor_parallel",)))
    peers_of_data_ranks = [mesh.peers(rank, ("tensor_parallel",)) for rank in data_ranks.flatten().tolist()]
    data_and_tensor_ranks = torch.tensor(peers_of_data_ranks).view(*data_ranks.shape, -1)
    ids_in_units = {id(p) for part in module.modules() if isinstance(part, FSDPModule) for p in parameters_of(part)}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            is_in_unit = id(parameter) in ids_in_units
            allowed = (data_ranks, data_and_tensor_ranks) if is_in_unit else (tensor_ranks,)
            if not any(_is_equal(parameter.device_mesh.mesh, ranks) for ranks in allowed):
                raise _wrong_mesh_error(clean_name(name), parameter, is_in_unit, fsdp_mesh, tensor_ranks)


def check_no_context_parallel(mesh: Mesh, sharding_code: str) -> None:
    """Refuse context parallelism for a module that the user shards: that would need a mesh of two joined axes.

    Args:
        mesh: The ranks.
        sharding_code: The code that shards, for the message.

    Raises:
        UnsupportedCapabilityError: There are context-parallel ranks.
    """
    if mesh.context_parallel > 1:
        raise UnsupportedCapabilityError(
            f"context_parallel_size={mesh.context_parallel} does not go together with {sharding_code}: "
            "context-parallel ranks shard parameters as well, over a mesh that only the strategy makes.\n"
            "Leave the calls of fully_shard and parallelize_module out, and name units by auto_wrap_policy and divided "
            "layers by tp_plan; or leave context_parallel_size out."
        )


def is_divided(module: nn.Module, runtime: Runtime) -> bool:
    """Whether a parameter of a module is on a mesh that has all tensor-parallel peers of this rank."""
    peers = set(runtime.mesh.peers(runtime.rank, ("tensor_parallel",)))
    meshes = (p.device_mesh.mesh.flatten().tolist() for p in module.parameters() if isinstance(p, DTensor))
    return any(peers.issubset(ranks) for ranks in meshes)


def _is_equal(ranks: Tensor, expected: Tensor) -> bool:
    return ranks.shape == expected.shape and bool((ranks == expected).all())


def _wrong_mesh_error(
    name: str, parameter: DTensor, is_in_unit: bool, fsdp_mesh: DeviceMesh, tensor_ranks: Tensor
) -> ShardingError:
    axes = ", ".join(map(repr, fsdp_mesh.mesh_dim_names or ()))
    call = (
        f"fully_shard(module, mesh=device_mesh[{axes}])"
        if is_in_unit
        else "parallelize_module(module, device_mesh['tensor_parallel'], plan)"
    )
    axis_name, ranks = ("data-parallel", fsdp_mesh.mesh) if is_in_unit else ("tensor-parallel", tensor_ranks)
    return ShardingError(
        f"{name!r} was {'sharded' if is_in_unit else 'divided'} over the ranks {parameter.device_mesh.mesh.tolist()}, "
        f"and the strategy trains it over its {axis_name} ranks {ranks.tolist()}: gradients would be summed over the "
        "wrong ones.\n"
        f"Write {call} with the strategy's own mesh: self.device_mesh in a LightningModule, "
        "fabric.strategy.device_mesh, or what parallelize_fn gets."
    )


def refuse_dtensors_outside_units(module: nn.Module, unsharded: Sequence[nn.Parameter], *, is_planned: bool) -> None:
    """Refuse parameters that tensor-parallel ranks divide, but that no unit shards.

    Args:
        module: The root, sharded.
        unsharded: The parameters that no unit holds.
        is_planned: Whether a plan has made them DTensors, and not the user's code.

    Raises:
        ShardingError: One of them is a DTensor.
    """
    names = {id(parameter): clean_name(name) for name, parameter in module.named_parameters()}
    for parameter in unsharded:
        if isinstance(parameter, DTensor):
            why, instead = (
                "fully_shard was told to ignore it",
                "Leave it out of ignored_params, or register it before fully_shard is called.",
            )
            if is_planned:
                why, instead = (
                    f"fully_shard can't take it, with its shape {tuple(parameter.shape)} and its dtype",
                    "Leave its module out of tp_plan, and give its neighbours layouts of whole tensors, such as "
                    "ColwiseParallel(output_layouts=Replicate()); or give the parameter one dimension of size 1.",
                )
            raise ShardingError(
                f"{names[id(parameter)]!r} is a DTensor of the tensor-parallel ranks, and {why}, so nothing would "
                f"average its gradients over the data-parallel ranks.\n{instead}"
            )
