"""Freeing gathered parameters at other moments than FSDP1 does, and keeping them longer.

FSDP1 frees a unit in ``_post_forward_reshard`` and ``_post_backward_hook``. Some it leaves gathered: those of
``SHARD_GRAD_OP`` and the root, until a backward pass that may never come; after a step they would be used with old
values. Others it frees although they are needed: the graph that a backward pass with ``create_graph=True`` records
holds their memory. Here units can be freed at any moment, with what users have written kept, and be kept gathered until
then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._common_utils import HandleTrainingState

from fsdp_core.sharding import outside_of_compilation, without_torch_function
from fsdp_cuda_native.flattened_parts import refuse_use_while_freed
from fsdp_cuda_native.torch_private.flat_parameters.units import handle_of, shows_parameters
from fsdp_cuda_native.torch_private.flat_parameters.written_shards import count_writes

__all__ = ["free_idle_root", "is_kept", "keep_gathered", "release_views", "reshard", "was_kept", "write_back"]

#: The attribute of a handle that :func:`keep_gathered` has kept, with hooks of the modules that use it.
_HOOKS_OF_MODULES = "_fsdp_cuda_native_calls"
#: The attribute of a handle that was kept, and then freed.
_WAS_KEPT = "_fsdp_cuda_native_was_kept"


def reshard(unit: FSDP, *, keeps: bool = False) -> None:
    """Free a unit's parameters if they are gathered.

    FSDP1 keeps the root's after a forward pass without a backward pass, and would use them again after a step.

    Args:
        unit: The unit.
        keeps: Whether parameters stay that :func:`keep_gathered` keeps for a graph. Otherwise the graph raises when it
            is used.
    """
    handle = handle_of(unit)
    flat = handle.flat_param
    if is_kept(unit) and not keeps:
        del handle.reshard
        for hook in handle.__dict__.pop(_HOOKS_OF_MODULES):
            hook.remove()
        handle.__dict__[_WAS_KEPT] = True
        increment_version(flat)  # so that the graph raises
    is_at_rest = (
        # without sharding, modules may hold views although the memory is that of the shard
        (not handle._use_orig_params or shows_parameters(unit))
        and not handle._skipped_use_sharded_views
        and flat.data_ptr() == flat._local_shard.data_ptr()
        and (not handle.uses_sharded_strategy or handle.needs_unshard())
    )
    if not is_at_rest:
        write_back(unit)
        handle._training_state = HandleTrainingState.IDLE
        handle.reshard(handle.uses_sharded_strategy)
        handle.post_reshard()
        handle._prefetched = False


def write_back(unit: FSDP) -> None:
    """Copy to a unit's shard what was assigned to ``parameter.data`` since its last call, as its next call would.

    Args:
        unit: The unit. It may be gathered: the optimizer's parameters are pieces of the shard all the same.
    """
    handle = handle_of(unit)
    flat = handle.flat_param
    if flat._params is None or handle._training_state == HandleTrainingState.SUMMON_FULL_PARAMS:
        return
    shard = flat._local_shard
    with without_torch_function(), torch.no_grad():  # parameters may be guarded
        start, size = shard.data_ptr(), shard.element_size()
        for parameter, info in zip(flat._params, flat._shard_param_infos, strict=True):
            if info.in_shard and parameter.data_ptr() != start + info.offset_in_shard * size:
                part = shard[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
                part = part.view(part.shape if handle.uses_sharded_strategy else parameter.shape)
                part.copy_(parameter)  # raises if it has another shape
                parameter.data = part  # otherwise the next call would copy it again, over what is loaded until then


def free_idle_root(root: FSDP) -> None:
    """Free what an idle root has kept of its last call, unless a backward pass is running or a graph needs it."""
    if torch._C._current_graph_task_id() == -1 and not is_kept(root):
        reshard(root)


def keep_gathered(units: Iterable[FSDP], before_call: Callable[..., None]) -> None:
    """Keep the parameters of units from now on, until :func:`reshard`, once they are gathered.

    Args:
        units: The units.
        before_call: Called with a weak reference to the unit before each call of a module that has parameters of it,
            as activation checkpointing calls one in a backward pass.
    """
    for unit in units:
        handle = handle_of(unit)
        if handle is not None and not is_kept(unit):
            handle.reshard = partial(_show_shards, weakref.ref(handle))
            flat = handle.flat_param
            modules = dict.fromkeys(info.module for info in (*flat._param_infos, *flat._shared_param_infos))
            hook = partial(before_call, weakref.ref(unit))
            free_written = partial(_free_written, count_writes(unit))
            handle.__dict__[_HOOKS_OF_MODULES] = [
                unit.register_forward_pre_hook(free_written, prepend=True),
                *(module.register_forward_pre_hook(hook) for module in modules),
            ]


@outside_of_compilation
def _free_written(writes_when_kept: int, unit: FSDP, args: Any) -> None:
    """Free a unit before a call of it if its shards were written to since it is kept."""
    if torch._C._current_graph_task_id() == -1 and count_writes(unit) != writes_when_kept:
        reshard(unit)


def is_kept(unit: FSDP) -> bool:
    """Whether :func:`keep_gathered` holds for a unit."""
    return "reshard" in vars(handle_of(unit))


def was_kept(unit: FSDP) -> bool:
    """Whether a unit was freed after :func:`keep_gathered` had kept it."""
    return _WAS_KEPT in vars(handle_of(unit))


def _show_shards(handle_ref: weakref.ref[Any], free_unsharded_flat_param: bool) -> None:
    """Replaces ``handle.reshard``: modules hold the shards again, and what is gathered keeps its memory."""
    handle: Any = handle_ref()
    type(handle).reshard(handle, free_unsharded_flat_param=False)


def release_views(unit: FSDP) -> None:
    """Release views of the gathered flat parameter, unless a backward pass still needs them.

    They keep it alive through autograd, which Python's garbage collector can't see: no model would ever be freed.
    """
    handle = handle_of(unit)
    if handle._needs_pre_backward_unshard:
        return
    flat = handle.flat_param
    if flat._tensors is not None:
        flat._tensors[:] = [None] * len(flat._tensors)
    if handle._use_orig_params:  # modules hold parameters again, and no views
        return
    infos_and_names = zip(flat._param_infos, handle.user_names, strict=True)
    user_names = {(info.module, info.param_name): name for info, name in infos_and_names}
    for info in flat._shared_param_infos:
        user_names[info.module, info.param_name] = user_names[info.prim_module, info.prim_param_name]
    for (module, attribute), name in user_names.items():
        view = module.__dict__.get(attribute)
        if view is not None:
            with without_torch_function():
                module.__dict__[attribute] = view.data  # the same memory, without autograd
            refuse_use_while_freed(module.__dict__[attribute], name)
