"""FSDP1's units, and what is known of their flat parameters.

FSDP1 wraps each unit in a ``FullyShardedDataParallel``, whose ``FlatParamHandle`` holds the flat parameter: all
parameters of the unit, one after the other. The flat parameter is *sharded* while its data is ``_local_shard``, this
rank's consecutive elements, and *gathered* while it has the elements of all ranks. With ``use_orig_params=True``
optimizers hold the original parameters (``_params``), which are views of the shard; else they hold the flat parameter
itself. None of this can be asked by public names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

__all__ = [
    "FlatMember",
    "flat_members",
    "flat_parameter_of",
    "handle_of",
    "is_in_backward",
    "is_sharded",
    "is_trained",
    "set_user_names",
    "shard_group",
    "tied_members",
    "units_in_passes",
    "units_of",
    "user_names_of",
]

#: The attribute of a handle with the user's names of its parameters.
_USER_NAMES = "_fsdp_cuda_native_names"

#: Whether a parameter of the user's requires a gradient.
is_trained = attrgetter("requires_grad")


@dataclass(frozen=True, kw_only=True)
class FlatMember:
    """A user's parameter that is part of a flat parameter.

    Attributes:
        unit: The unit that has flattened it.
        owner: The module that holds it, under the name ``attribute``.
        shape: Its original shape.
        optimizer_param: The parameter that an optimizer holds for it: itself, or the flat one.
        offset: The offset of this rank's elements in the 1-D data of ``optimizer_param``.
        start: The index of the first of these elements in the flattened parameter.
        length: The number of these elements.
        local_shard: This rank's shard of the unit, 1-D.
        offset_in_shard: The offset of this rank's elements in ``local_shard``.
        replica: The index of the replica that this rank belongs to.
        is_flat: Whether ``optimizer_param`` is 1-D; without sharding a parameter keeps its shape.
    """

    unit: FullyShardedDataParallel
    owner: nn.Module
    attribute: str
    shape: tuple[int, ...]
    optimizer_param: nn.Parameter
    offset: int
    start: int
    length: int
    local_shard: Tensor
    offset_in_shard: int
    replica: int
    is_flat: bool


def units_of(root: FullyShardedDataParallel) -> Iterator[FullyShardedDataParallel]:
    """The units of a root that hold parameters, including the root itself."""
    # the same as FSDP1's own fsdp_modules(), which is several times slower
    units = [module for module in root.modules() if isinstance(module, FullyShardedDataParallel)]
    return (unit for unit in units if handle_of(unit) is not None)


def units_in_passes(root: FullyShardedDataParallel) -> list[FullyShardedDataParallel]:
    """The units that FSDP1 has found in a root when it initialised it: those that it visits at the end of a pass."""
    state: Any = root
    return [unit for unit in state._all_fsdp_states if unit._handle is not None]


def handle_of(unit: FullyShardedDataParallel) -> Any:
    """The handle of a unit's flat parameter; ``None`` for a unit without parameters."""
    return unit._handle


def flat_parameter_of(unit: FullyShardedDataParallel) -> Tensor:
    """The flat parameter of a unit that has one."""
    flat: Tensor = handle_of(unit).flat_param
    return flat


def is_sharded(unit: FullyShardedDataParallel) -> bool:
    """Whether ranks hold different parts of a unit's parameters."""
    return bool(handle_of(unit).uses_sharded_strategy)


def shard_group(root: FullyShardedDataParallel) -> Any:
    """The process group whose ranks together hold one copy of the parameters."""
    return root.process_group


def is_in_backward(root: FullyShardedDataParallel) -> bool:
    """Whether a backward pass of the root has begun and not ended: it runs, or an exception has interrupted it."""
    state: Any = root
    return bool(getattr(state, "_post_backward_callback_queued", False))


def set_user_names(handle: Any, names: Sequence[str]) -> None:
    """Record the user's names of the parameters in a flat parameter, in its order, for messages."""
    vars(handle)[_USER_NAMES] = names


def user_names_of(handle: Any) -> Sequence[str]:
    """What :func:`set_user_names` has recorded."""
    names: Sequence[str] = vars(handle)[_USER_NAMES]
    return names


def flat_members(unit: FullyShardedDataParallel) -> Iterator[FlatMember]:
    """The parameters that a unit has flattened. The unit must be sharded, not gathered.

    Yields:
        Each parameter; tied parameters once, under the first of their names.
    """
    handle = handle_of(unit)
    flat = handle.flat_param
    replica_group = getattr(unit, "_inter_node_pg", None)
    if not handle.uses_sharded_strategy:
        replica = shard_group(unit).rank()
    else:
        replica = replica_group.rank() if replica_group is not None else 0
    infos = zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True)
    for index, (param_info, shape, shard_info) in enumerate(infos):
        offset = shard_info.offset_in_shard or 0  # None where this rank has no element of the parameter
        yield FlatMember(
            unit=unit,
            owner=param_info.module,
            attribute=param_info.param_name,
            shape=tuple(shape),
            optimizer_param=flat._params[index] if handle._use_orig_params else flat,
            offset=0 if handle._use_orig_params else offset,
            start=shard_info.intra_param_start_idx or 0,
            length=shard_info.numel_in_shard or 0,
            local_shard=flat._local_shard,
            offset_in_shard=offset,
            replica=replica,
            is_flat=handle.uses_sharded_strategy or not handle._use_orig_params,
        )


def tied_members(unit: FullyShardedDataParallel) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    """A unit's tied parameters: each further module and name of one, then the module and name that come first."""
    for info in handle_of(unit).flat_param._shared_param_infos:
        yield info.module, info.param_name, info.prim_module, info.prim_param_name
