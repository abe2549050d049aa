"""FSDP1's units, and what is known of their flat parameters.

FSDP1 wraps each unit in a ``FullyShardedDataParallel``, whose ``FlatParamHandle`` holds the flat parameter: all
parameters of the unit, one after the other. The flat parameter is *sharded* while its data is ``_local_shard``, this
rank's consecutive elements, and *gathered* while it has the elements of all ranks. With ``use_orig_params=True``
optimizers hold the original parameters (``_params``), which are views of the shard; else they hold the flat parameter
itself. While a unit is gathered, its modules hold views of the flat parameter instead of parameters: FSDP1 puts them
there in ``_use_unsharded_views``, as plain tensors, and puts the parameters back in ``_use_sharded_views``. None of
this can be asked by public names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from fsdp_core.sharding import GatheredValue

__all__ = [
    "FlatMember",
    "ParameterView",
    "flat_members",
    "gathered_views",
    "handle_of",
    "is_in_backward",
    "is_sharded",
    "is_trained",
    "lacks_views",
    "needs_gradient",
    "shows_parameters",
    "tied_members",
    "units_in_passes",
    "units_of",
]

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
        shard_offset: The offset of this rank's elements in ``local_shard``.
        replica: The index of the replica that this rank belongs to.
        is_flat: Whether ``optimizer_param`` is 1-D; without sharding a parameter keeps its shape.
    """

    unit: FSDP
    owner: nn.Module
    attribute: str
    shape: tuple[int, ...]
    optimizer_param: nn.Parameter
    offset: int
    start: int
    length: int
    local_shard: Tensor
    shard_offset: int
    replica: int
    is_flat: bool


def units_of(root: FSDP) -> Iterator[FSDP]:
    """The units of a root that hold parameters, including the root itself."""
    # the same as FSDP1's own fsdp_modules(), which is several times slower
    units = [module for module in root.modules() if isinstance(module, FSDP)]
    return (unit for unit in units if handle_of(unit) is not None)


def units_in_passes(root: FSDP) -> list[FSDP]:
    """The units that FSDP1 has found in a root when it initialised it: those that it visits at the end of a pass."""
    state: Any = root
    return [unit for unit in state._all_fsdp_states if unit._handle is not None]


def handle_of(unit: FSDP) -> Any:
    """The handle of a unit's flat parameter; ``None`` for a unit without parameters."""
    return unit._handle


def is_sharded(unit: FSDP) -> bool:
    """Whether ranks hold different parts of a unit's parameters."""
    return bool(handle_of(unit).uses_sharded_strategy)


def is_in_backward(root: FSDP) -> bool:
    """Whether a backward pass of the root has begun and not ended: it runs, or an exception has interrupted it."""
    state: Any = root
    return bool(getattr(state, "_post_backward_callback_queued", False))


def flat_members(unit: FSDP) -> Iterator[FlatMember]:
    """The parameters that a unit has flattened. The unit must be sharded, not gathered.

    Yields:
        Each parameter; tied parameters once, under the first of their names.
    """
    handle = handle_of(unit)
    flat = handle.flat_param
    # without sharding each rank has a replica; hybrid sharding has a group of those that hold the same elements
    replica_group = getattr(unit, "_inter_node_pg", None) if handle.uses_sharded_strategy else unit.process_group
    replica = 0 if replica_group is None else replica_group.rank()
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
            shard_offset=offset,
            replica=replica,
            is_flat=handle.uses_sharded_strategy or not handle._use_orig_params,
        )


def tied_members(unit: FSDP) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    """A unit's tied parameters: each further module and name of one, then the module and name that come first."""
    for info in handle_of(unit).flat_param._shared_param_infos:
        yield info.module, info.param_name, info.prim_module, info.prim_param_name


@dataclass(frozen=True)
class ParameterView:
    """Where a module holds a view of one of its parameters while the unit is gathered.

    Attributes:
        value: What core knows of the gathered parameter: whether it was written to, and whether it is trained.
        module: The module.
        attribute: The name of the parameter in the module.
    """

    value: GatheredValue
    module: nn.Module
    attribute: str

    def find(self) -> Any:
        """What the module holds under the name: a view, the parameter, a user's tensor, or ``None``."""
        attributes = self.module.__dict__
        tensor: Any = attributes["_parameters"].get(self.attribute)
        return attributes.get(self.attribute) if tensor is None else tensor

    def is_followed(self, tensor: Any) -> bool:
        """Whether core follows a tensor as a view of this parameter."""
        return getattr(tensor, "_fsdp_value", None) is self.value


def shows_parameters(unit: FSDP) -> bool:
    """Whether a unit's modules hold the optimizer's parameters, and not views of the gathered flat parameter."""
    handle = handle_of(unit)
    flat = handle.flat_param
    first = flat._param_infos[0]
    return bool(handle._use_orig_params and first.module._parameters.get(first.param_name) is flat._params[0])


def gathered_views(unit: FSDP) -> Iterator[tuple[Tensor, nn.Parameter]]:
    """The views that a unit's modules hold instead of the original parameters; none where FSDP1 keeps no originals.

    Yields:
        The view, and the optimizer's parameter that it stands for.
    """
    handle = handle_of(unit)
    flat = handle.flat_param
    for index, info in enumerate(flat._param_infos):
        view = info.module._parameters.get(info.param_name)
        if handle._use_orig_params and view is not None and view is not flat._params[index]:
            yield view, flat._params[index]


def lacks_views(handle: Any) -> bool:
    """Whether FSDP1 has dropped the views that the forward pass has computed with, at the end of another pass."""
    return handle._use_orig_params and any(tensor is None for tensor in handle.flat_param._tensors)


def needs_gradient(view: Any) -> bool:
    """Whether autograd records what is computed with a view; its ``requires_grad`` is that of the user's parameter."""
    return bool(Tensor.requires_grad.__get__(view))  # type: ignore[attr-defined]
