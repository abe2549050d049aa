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
from fsdp_fsdp2.torch_private.gathered_values import ENTER, KEEP, WRITTEN, count_writes
from fsdp_fsdp2.torch_private.parameter_groups import SHARD, fsdp_params_of, param_groups_of

__all__ = ["GatheredWrites"]


class GatheredWrites:
    """Keeps what users write to a unit's parameters while they are gathered: it goes to the shards when they are freed.

    Args:
        unit: The unit.
        root: The root.
        names: What the user calls its parameters.
        values: Gets what was written.

    Attributes:
        is_of_root: Whether the unit is the root.
        stays_gathered: Whether it is another that stays gathered, or sharded over fewer ranks, between its forward and
            its backward pass.
    """

    def __init__(
        self, unit: FSDPModule, root: FSDPModule, names: Mapping[nn.Parameter, str], values: WrittenValues
    ) -> None:
        self._values = values
        self._gathered = [(p, GatheredValue(names[p.sharded_param])) for p in fsdp_params_of(unit)]
        self._parameters = [parameter for parameter, _ in self._gathered]
        self._places = [parameter._module_info for parameter in self._parameters]
        for parameter, value in self._gathered:
            value.shard = partial(_shard_of, weakref.ref(parameter))
        self_ref = weakref.ref(self)
        for index, (parameter, _) in enumerate(self._gathered):
            # by weak references, or a cycle would delay the release of memory
            parameter.to_unsharded = partial(_follow_after, self_ref, weakref.ref(parameter), index)
        self._by_group: list[tuple[Any, list[Any], list[GatheredValue]]] = []
        values_of = dict(self._gathered)
        for index, group in enumerate(param_groups_of(unit)):
            self._by_group.append((group, list(group.fsdp_params), [values_of[p] for p in group.fsdp_params]))
            vars(group)[KEEP] = partial(_keep_before, self_ref, index)
        module = cast("nn.Module", unit)
        self.is_of_root = unit is root
        self.stays_gathered = not self.is_of_root and any(
            not group._reshard_after_forward or group._use_post_forward_mesh for group in param_groups_of(unit)
        )
        self._staying_gathered = (
            [] if unit is root else [group for group in param_groups_of(unit) if not group._reshard_after_forward]
        )
        for group in self._staying_gathered:
            vars(group)[ENTER] = partial(_enter_before, self_ref)
        if self._staying_gathered:
            module.register_forward_hook(partial(_leave, self_ref))

    def check_own(self) -> None:
        """Refuse a call with other parameters than the unit's own."""
        current = [owner.module._parameters.get(owner.param_name) for owner in self._places]
        if all(map(operator.is_, current, map(SHARD, self._parameters))):
            return
        for (parameter, value), parameter_there in zip(self._gathered, current, strict=True):
            if parameter_there is not parameter.sharded_param:
                gathered_forms = (
                    getattr(parameter, name, None) for name in ("_unsharded_param", "_sharded_post_forward_param")
                )
                value.check_own(parameter_there, *gathered_forms)

    def enter(self) -> None:
        """Take parameters back for the unit, at the beginning of a pass, or to free them."""
        for parameter, value in self._gathered if self._staying_gathered else ():
            if hasattr(parameter, "_unsharded_param"):
                value.enter(parameter._unsharded_param)

    def leave(self) -> None:
        """End one, after which its parameters stay gathered."""
        for group in self._staying_gathered:
            for parameter, value in self._gathered:
                if parameter not in group.fsdp_params or parameter.sharded_state is not ShardedState.UNSHARDED:
                    continue
                if not isinstance(parameter._unsharded_param, DTensor):  # tensor parallelism's meet others anyway
                    let_go = partial(_let_go, weakref.ref(group), weakref.ref(parameter))
                    value.leave(parameter._unsharded_param, let_go)

    def follow(self, index: int) -> None:
        """Follow a parameter that was gathered for the first time. The object is the same from now on."""
        parameter, value = self._gathered[index]
        del parameter.to_unsharded
        value.follow(parameter._unsharded_param)

    def keep(self, group: int | None = None) -> None:
        """Keep what was written until now.

        Args:
            group: The index of the only group of parameters to look at.
        """
        for param_group, parameters, values in self._by_group[
            slice(None) if group is None else slice(group, group + 1)
        ]:
            if not parameters or parameters[0].sharded_state is not ShardedState.UNSHARDED:
                continue  # all of a group are in one state
            if _is_unwritten(parameters, values):
                continue
            for parameter, value in zip(parameters, values, strict=True):
                if value.is_written(parameter._unsharded_param):
                    self._keep_of(parameter, value)
            if WRITTEN in vars(param_group):
                # by what is gathered, which need not be gathered again
                vars(param_group)[WRITTEN] = count_writes(param_group)

    def _keep_of(self, parameter: Any, value: GatheredValue) -> None:
        gathered = parameter._unsharded_param
        is_counted = value.is_counted(times_written(gathered))
        value.mark_kept(gathered)
        local_tensor = gathered._local_tensor if isinstance(gathered, DTensor) else gathered
        shard = parameter.sharded_param._local_tensor
        # of a part that tensor parallelism has left to this rank, ranks compare the name
        compared = local_tensor.new_zeros(1) if isinstance(gathered, DTensor) else local_tensor
        value.keep(_own_part(parameter, local_tensor), shard, compared, self._values, is_counted=is_counted)


_VERSION = operator.attrgetter("_unsharded_param._version")

_TIMES = operator.attrgetter("times")

_IS_NOTED = operator.attrgetter("is_noted")


def _is_unwritten(parameters: list[Any], values: list[GatheredValue]) -> bool:
    """Whether none of a group's gathered parameters can have been written to, without a call of Python for each."""
    try:
        with without_torch_function():
            counted = list(map(_VERSION, parameters))
    except RuntimeError:  # of inference tensors
        return False
    return counted == list(map(_TIMES, values)) and not any(map(_IS_NOTED, values))


def _follow_after(of: weakref.ref[GatheredWrites], of_parameter: weakref.ref[Any], index: int) -> None:
    writes, parameter = of(), of_parameter()
    assert parameter is not None  # it is the caller
    type(parameter).to_unsharded(parameter)
    if writes is not None:
        writes.follow(index)


def _keep_before(of: weakref.ref[GatheredWrites], group: int) -> None:
    if (writes := of()) is not None:
        writes.keep(group)
        writes.enter()


def _enter_before(of: weakref.ref[GatheredWrites]) -> None:
    if (writes := of()) is not None:
        writes.enter()


@outside_of_compilation
def _leave(of: weakref.ref[GatheredWrites], *_: Any) -> None:
    if (writes := of()) is not None and not recomputes():
        writes.leave()


def _shard_of(of: weakref.ref[Any]) -> nn.Parameter:
    parameter: Any = of()
    shard: nn.Parameter = parameter.sharded_param
    return shard


def _let_go(of: weakref.ref[Any], of_parameter: weakref.ref[Any]) -> nn.Parameter:
    group, parameter = of(), of_parameter()
    assert group is not None and parameter is not None
    group.reshard()
    shard: nn.Parameter = parameter.sharded_param
    return shard


def _own_part(parameter: Any, full: Tensor) -> Tensor | None:
    """This rank's part of a gathered parameter; ``None`` for another library's class, which gathers in its own way."""
    if hasattr(parameter._sharded_local_tensor, "fsdp_post_all_gather"):
        return None
    mesh, dim = parameter.mesh_info, parameter.fsdp_placement.dim
    parts = torch.chunk(full.detach(), mesh.shard_mesh_size, dim)
    if mesh.shard_mesh_rank < len(parts):
        part: Tensor = parts[mesh.shard_mesh_rank]
        return part
    shard: Tensor = parameter.sharded_param._local_tensor
    return torch.empty_like(shard, dtype=full.dtype)  # no elements
