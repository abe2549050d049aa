"""Writes of users to gathered parameters, kept for their shards."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch.utils
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor

from fsdp_core.sharding import (
    GatheredValue,
    WrittenValues,
    outside_of_compilation,
    times_written,
    without_torch_function,
)
from fsdp_fsdp2.torch_private.forward_passes import recomputes
from fsdp_fsdp2.torch_private.gathered_values import ENTER_UNIT, KEEP_WRITES, SHARD_WRITES, count_writes
from fsdp_fsdp2.torch_private.parameter_groups import SHARD, fsdp_params_of, param_groups_of

__all__ = ["GatheredWrites"]


class GatheredWrites:
    """Keeps what users write to a unit's gathered parameters: it is copied to the shards before they are freed.

    Args:
        unit: The unit.
        root: The root.
        names: By shard, the user's name of the parameter.
        values: Receives what was written, for a comparison between ranks.

    Attributes:
        is_of_root: Whether the unit is the root.
        stays_gathered: Whether it is not the root, and stays gathered, or sharded over fewer ranks, between its forward
            and its backward pass.
    """

    def __init__(
        self, unit: FSDPModule, root: FSDPModule, names: Mapping[nn.Parameter, str], values: WrittenValues
    ) -> None:
        self._values = values
        self._gathered = [(p, GatheredValue(names[p.sharded_param])) for p in fsdp_params_of(unit)]
        self._parameters = [parameter for parameter, _ in self._gathered]
        self._module_infos = [parameter._module_info for parameter in self._parameters]
        #: Further modules that hold a parameter, its name there, and what stands for it in an error.
        self._tied: list[tuple[nn.Module, str, Any, GatheredValue]] = [
            (module, name, parameter, GatheredValue(f"{name} of {type(module).__name__}, tied to {value.name}"))
            for parameter, value in self._gathered
            for module, name in zip(
                parameter._module_info.shared_modules, parameter._module_info.shared_param_names, strict=True
            )
        ]
        for parameter, value in self._gathered:
            value.shard = partial(_shard_of, weakref.ref(parameter))
        self_ref = weakref.ref(self)
        for index, (parameter, _) in enumerate(self._gathered):
            # with weak references: a cycle would delay the release of memory
            parameter.to_unsharded = partial(_follow_after, self_ref, weakref.ref(parameter), index)
        self._by_group: list[tuple[Any, list[Any], list[GatheredValue]]] = []
        value_of_param = dict(self._gathered)
        for index, group in enumerate(param_groups_of(unit)):
            self._by_group.append((group, list(group.fsdp_params), [value_of_param[p] for p in group.fsdp_params]))
            vars(group)[KEEP_WRITES] = partial(_keep_before, self_ref, index)
        self.is_of_root = unit is root
        groups = [] if self.is_of_root else param_groups_of(unit)
        self.stays_gathered = any(not g._reshard_after_forward or g._use_post_forward_mesh for g in groups)
        self._groups_staying_gathered = [group for group in groups if not group._reshard_after_forward]
        for group in self._groups_staying_gathered:
            vars(group)[ENTER_UNIT] = partial(_enter, self_ref)
        if self._groups_staying_gathered:
            cast("nn.Module", unit).register_forward_hook(partial(_leave, self_ref))

    def check_own(self) -> None:
        """Refuse a call with other parameters than the unit's own."""
        for module, name, parameter, value in self._tied:
            value.check_own(module._parameters.get(name), *_own_tensors(parameter))
        current_params = [info.module._parameters.get(info.param_name) for info in self._module_infos]
        if all(map(operator.is_, current_params, map(SHARD, self._parameters))):
            return
        for (parameter, value), current in zip(self._gathered, current_params, strict=True):
            if current is not parameter.sharded_param:
                value.check_own(current, *_own_tensors(parameter))

    def enter(self) -> None:
        """Undo :meth:`leave`, before a pass computes with the parameters, or they are freed."""
        for parameter, value in self._gathered if self._groups_staying_gathered else ():
            if hasattr(parameter, "_unsharded_param"):
                value.enter(parameter._unsharded_param)

    def leave(self) -> None:
        """Mark the parameters that stay gathered when the unit's forward pass has ended: users meet them outside."""
        for group in self._groups_staying_gathered:
            for parameter, value in self._gathered:
                if parameter not in group.fsdp_params or parameter.sharded_state is not ShardedState.UNSHARDED:
                    continue
                if not isinstance(parameter._unsharded_param, DTensor):  # DTensors can be combined with shards anyway
                    free = partial(_free, weakref.ref(group), weakref.ref(parameter))
                    value.leave(parameter._unsharded_param, free)

    def follow(self, index: int) -> None:
        """Notice writes to a parameter, gathered for the first time. Each gathering reuses the same object."""
        parameter, value = self._gathered[index]
        del parameter.to_unsharded
        value.follow(parameter._unsharded_param)

    def keep(self, group_index: int | None = None) -> None:
        """Copy to the shards what was written to gathered parameters until now.

        Args:
            group_index: The only group of parameters to look at; ``None`` for all.
        """
        by_group = self._by_group if group_index is None else self._by_group[group_index : group_index + 1]
        for group, parameters, values in by_group:
            if not parameters or parameters[0].sharded_state is not ShardedState.UNSHARDED:
                continue  # all parameters of a group are in the same state
            if _is_unwritten(parameters, values):
                continue
            for parameter, value in zip(parameters, values, strict=True):
                if value.is_written(parameter._unsharded_param):
                    self._keep_parameter(parameter, value)
            if SHARD_WRITES in vars(group):
                # what is gathered has these values already, and need not be gathered again
                vars(group)[SHARD_WRITES] = count_writes(group)

    def _keep_parameter(self, parameter: Any, value: GatheredValue) -> None:
        gathered = parameter._unsharded_param
        is_counted = value.is_counted(times_written(gathered))
        value.mark_kept(gathered)
        local_tensor = gathered._local_tensor if isinstance(gathered, DTensor) else gathered
        shard = parameter.sharded_param._local_tensor
        # tensor-parallel ranks hold different parts, and have only the name to compare
        compared = local_tensor.new_zeros(1) if isinstance(gathered, DTensor) else local_tensor
        value.keep(_own_part(parameter, local_tensor), shard, compared, self._values, is_counted=is_counted)


_VERSION = operator.attrgetter("_unsharded_param._version")

_TIMES = operator.attrgetter("times")

_IS_NOTED = operator.attrgetter("is_noted")


def _is_unwritten(parameters: list[Any], values: list[GatheredValue]) -> bool:
    """Whether none of a group's gathered parameters can have been written to. Makes no call of Python for each."""
    try:
        with without_torch_function():
            counted = list(map(_VERSION, parameters))
    except RuntimeError:  # inference tensors have no count of writes
        return False
    return counted == list(map(_TIMES, values)) and not any(map(_IS_NOTED, values))


def _follow_after(writes_ref: weakref.ref[GatheredWrites], parameter_ref: weakref.ref[Any], index: int) -> None:
    writes, parameter = writes_ref(), parameter_ref()
    assert parameter is not None  # it is the caller
    type(parameter).to_unsharded(parameter)
    if writes is not None:
        writes.follow(index)


def _keep_before(writes_ref: weakref.ref[GatheredWrites], group_index: int) -> None:
    if (writes := writes_ref()) is not None:
        writes.keep(group_index)
        writes.enter()


def _enter(writes_ref: weakref.ref[GatheredWrites]) -> None:
    if (writes := writes_ref()) is not None:
        writes.enter()


@outside_of_compilation
def _leave(writes_ref: weakref.ref[GatheredWrites], *_: Any) -> None:
    if (writes := writes_ref()) is not None and not recomputes():
        writes.leave()


def _shard_of(parameter_ref: weakref.ref[Any]) -> nn.Parameter:
    parameter: Any = parameter_ref()
    shard: nn.Parameter = parameter.sharded_param
    return shard


def _own_tensors(parameter: Any) -> list[Tensor | None]:
    """What ``fully_shard`` puts into modules for a parameter."""
    return [
        parameter.sharded_param,
        getattr(parameter, "_unsharded_param", None),
        getattr(parameter, "_sharded_post_forward_param", None),
    ]


def _free(group_ref: weakref.ref[Any], parameter_ref: weakref.ref[Any]) -> nn.Parameter:
    """Free a gathered parameter with its group, and return its shard."""
    group, parameter = group_ref(), parameter_ref()
    assert group is not None and parameter is not None
    group.reshard()
    shard: nn.Parameter = parameter.sharded_param
    return shard


def _own_part(parameter: Any, full: Tensor) -> Tensor | None:
    """This rank's part of a gathered parameter; ``None`` if its class gathers in a way of its own."""
    if hasattr(parameter._sharded_local_tensor, "fsdp_post_all_gather"):
        return None
    mesh, dim = parameter.mesh_info, parameter.fsdp_placement.dim
    parts = torch.chunk(full.detach(), mesh.shard_mesh_size, dim)
    if mesh.shard_mesh_rank < len(parts):
        part: Tensor = parts[mesh.shard_mesh_rank]
        return part
    shard: Tensor = parameter.sharded_param._local_tensor
    return torch.empty_like(shard, dtype=full.dtype)  # no elements
