"""The parameter groups that ``fully_shard`` makes of modules: their shards, gathered parameters and gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_core import ShardingError
from fsdp_core.sharding import without_torch_function

__all__ = [
    "SHARD",
    "AssignedData",
    "Gathering",
    "first_units_of_calls",
    "fsdp_params_of",
    "gathered_parameters",
    "has_gradient",
    "has_hooks",
    "has_run",
    "is_unshardable",
    "offloaded_parameters",
    "param_groups_in",
    "param_groups_of",
    "parameters_of",
    "reduces_gradients",
    "reset_sharded_params",
    "set_accumulated_gradient",
    "set_unreduced_gradients",
    "trainable_params",
    "unreduced_gradients",
]


def is_unshardable(parameter: nn.Parameter) -> bool:
    """Whether a parameter is of integers, and ``fully_shard`` can't shard these, as before torch 2.13.

    It would let shards require gradients first, which integers can't, and gather them in the dtype of the computation.
    """
    shards_integers = "is_floating_point" in FSDPParam.init_dtype_attrs.__code__.co_names
    return not (shards_integers or parameter.is_floating_point() or parameter.is_complex())


class Gathering:
    """The FSDP parameter groups of some units, checked after every step for parameters that are still gathered.

    ``unit.reshard()`` checks this too, but is a hundred times slower, which is noticeable for models of many blocks.

    Args:
        units: The units.
    """

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        self._groups = [group for unit in units for group in param_groups_of(unit)]

    def reshard(self) -> None:
        """Reshard the groups that are gathered, and those that were gathered ahead and not used.

        ``unit.reshard()`` leaves the latter as they are: their next forward pass would use the old values, even after
        a step.
        """
        for group in self._groups:
            if group._all_gather_result is not None:
                group.wait_for_unshard()
            if not group.is_sharded:
                type(group).reshard(group)  # not group.reshard(), with which RecordedGraphs keeps some


SHARD = operator.attrgetter("sharded_param")

_LOCAL_TENSOR = operator.attrgetter("sharded_param._local_tensor")

_STORAGE: Any = Tensor.untyped_storage


class AssignedData:
    """Detects ``parameter.data = …``, which has no effect on a DTensor, as opposed to updates of the shard.

    torch accepts the assignment silently: it replaces the storage of the DTensor itself, which has no memory, and
    leaves the local tensor as it was. An averaged teacher that is assigned this way would never change.

    Every parameter is checked before every forward pass of the root.

    Args:
        units: The units, which together hold all parameters to check.
    """

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        self._parameters = [parameter for unit in units for parameter in fsdp_params_of(unit)]
        self._last_shards: list[tuple[Any, Any, Any]] = [(None, None, None)] * len(self._parameters)
        self._last_storages: list[Any] = []
        self.check()

    def check(self) -> None:
        """Check the shards.

        Raises:
            ShardingError: A parameter's ``.data`` was assigned.
        """
        with without_torch_function():
            # compared without Python code for each: torch returns the same object for a storage while one is alive
            storages = [*map(_STORAGE, map(SHARD, self._parameters)), *map(_LOCAL_TENSOR, self._parameters)]
        if len(storages) == len(self._last_storages) and all(map(operator.is_, storages, self._last_storages)):
            return
        self._last_storages = storages
        for index, parameter in enumerate(self._parameters):
            shard = parameter.sharded_param
            # the storage is kept alive, or another could reuse its address
            storage, local = shard.untyped_storage(), shard._local_tensor
            last_shard, last_storage, last_local = self._last_shards[index]
            if shard is last_shard and local is last_local and storage._cdata != last_storage._cdata:
                name = parameter._param_fqn or parameter._module_info.param_name
                raise ShardingError(
                    f"{name!r} was given other values by an assignment to its .data, which changes nothing in a "
                    "sharded parameter: torch silently keeps the old values.\n"
                    "Write parameter.data.copy_(values) instead, or an in-place operation under torch.no_grad(), such "
                    "as average.lerp_(parameter, 0.1)."
                )
            self._last_shards[index] = (shard, storage, local)


def trainable_params(group: Any) -> list[Any]:
    """The parameters of a unit that were gathered and are trained: each takes part in a reduction."""
    return [p for p in group.fsdp_params if hasattr(p, "_unsharded_param") and p.sharded_param.requires_grad]


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks are registered on the module itself."""
    of_calls: Any = (module._forward_hooks, module._forward_pre_hooks)
    of_backward: Any = (module._backward_hooks, module._backward_pre_hooks)
    of_state: Any = (module._state_dict_hooks, module._load_state_dict_pre_hooks)
    return any((*of_calls, *of_backward, *of_state))


def has_gradient(parameter: Any) -> bool:
    """Whether a parameter has a gradient that is not reduced yet."""
    gathered = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None)


def gathered_parameters(units: Iterable[FSDPModule]) -> list[Tensor]:
    """The gathered parameters of units that were gathered before, whether or not they have memory now."""
    parameters = (parameter for unit in units for parameter in fsdp_params_of(unit))
    return [parameter._unsharded_param for parameter in parameters if hasattr(parameter, "_unsharded_param")]


def unreduced_gradients(unit: FSDPModule) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The gradients that a unit has accumulated without reducing them, each with its shard.

    ``fully_shard`` keeps them at the unsharded parameters, which no public API exposes while they are sharded, or, if
    it reduces in a dtype other than the compute dtype, in tensors of its own.
    """
    for parameter in fsdp_params_of(unit):
        grad = parameter.unsharded_accumulated_grad
        if grad is None and hasattr(parameter, "_unsharded_param"):
            grad = parameter._unsharded_param.grad
        if isinstance(grad, DTensor):  # it may be a partial sum, where tensor-parallel ranks divide a sequence
            grad = grad.redistribute(placements=parameter._unsharded_param.placements)
        if grad is not None:
            yield parameter.sharded_param, grad


def set_unreduced_gradients(
    root: FSDPModule, unit: FSDPModule, gradients: Mapping[nn.Parameter, Callable[[], Tensor]]
) -> None:
    """Restore gradients that :func:`unreduced_gradients` returned. All ranks must call it.

    Args:
        root: The root.
        unit: One of its units, whose gradients are replaced. It is unsharded once, because the parameters that hold
            the gradients don't exist before.
        gradients: Functions that read a gradient, by its shard.
    """
    root._get_fsdp_state()._lazy_init()
    unit.unshard()
    for parameter in fsdp_params_of(unit):
        set_accumulated_gradient(parameter, None)
        parameter._unsharded_param.grad = None
        read = gradients.get(parameter.sharded_param)
        if read is None:
            continue
        gathered = parameter._unsharded_param
        grad = read().to(gathered.device, copy=True).view(gathered.shape)
        if isinstance(gathered, DTensor):
            grad = distribute_tensor(grad, gathered.device_mesh, gathered.placements, src_data_rank=None)
        if grad.dtype == gathered.dtype:
            gathered.grad = grad
        else:
            set_accumulated_gradient(parameter, grad.to(parameter.reduce_dtype or gathered.dtype))
    unit.reshard()


def set_accumulated_gradient(parameter: Any, grad: Tensor | None) -> None:
    """Set the gradient in which unreduced micro-batches accumulate in a dtype other than the parameter's.

    From torch 2.15 on that is the unsharded parameter's own gradient, whose ``grad_dtype`` may differ.
    """
    if isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
        gathered = parameter._unsharded_param
        gathered.grad = None if grad is None else grad.to(gathered.grad_dtype or gathered.dtype)
    else:
        parameter.unsharded_accumulated_grad = grad


def first_units_of_calls(units: Iterable[nn.Module]) -> list[nn.Module]:
    """The first module of each call of ``fully_shard``, which may have been given several to gather together."""
    first_units: dict[int, nn.Module] = {}  # by the id of the state that they share
    for unit in units:
        state: Any = unit._get_fsdp_state() if isinstance(unit, FSDPModule) else unit
        first_units.setdefault(id(state), unit)
    return list(first_units.values())


def has_run(unit: FSDPModule) -> bool:
    """Whether a unit was called, by itself or inside a root. From then on torch refuses another module as its root."""
    state: Any = unit._get_fsdp_state()
    return state._is_root is not None


def parameters_of(unit: FSDPModule) -> list[nn.Parameter]:
    """The sharded parameters that a unit gathers."""
    return [parameter.sharded_param for parameter in fsdp_params_of(unit)]


def reduces_gradients(unit: FSDPModule) -> bool:
    """Whether a unit's backward pass reduces its gradients over all ranks that have them."""
    return all(group.reduce_grads and group.all_reduce_grads for group in param_groups_of(unit))


def offloaded_parameters(unit: FSDPModule) -> list[nn.Parameter]:
    """Those of a unit's parameters that its offload policy keeps in host memory."""
    return [parameter.sharded_param for parameter in fsdp_params_of(unit) if parameter.offload_to_cpu]


def reset_sharded_params(unit: FSDPModule) -> None:
    """Let a unit use the shards that its modules hold now, with the padding that communication needs.

    ``fully_shard`` does so after methods such as ``module.to()``, and in the first forward pass.
    """
    for parameter in fsdp_params_of(unit):
        parameter.reset_sharded_param()


def param_groups_of(unit: FSDPModule) -> list[Any]:
    """The parameter groups of a unit; none if it has no parameters of its own."""
    return param_groups_in(unit._get_fsdp_state())


def param_groups_in(state: Any) -> list[Any]:
    """The parameter groups of a unit's state."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one group before torch 2.11
    return [group for group in groups if group is not None]


def fsdp_params_of(unit: FSDPModule) -> Iterator[Any]:
    """The ``FSDPParam`` of each parameter of a unit, with its shard and its gathered parameter."""
    return (parameter for group in param_groups_of(unit) for parameter in group.fsdp_params)
