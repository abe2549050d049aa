"""What a unit has gathered: how modules get it and lose it, faster than by torch, and which writes are counted."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.utils
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState, alloc_storage

from fsdp_core.sharding import outside_transforms, times_written, without_torch_function
from fsdp_fsdp2.torch_private import frozen_shards
from fsdp_fsdp2.torch_private.data_writes import count_data_writes
from fsdp_fsdp2.torch_private.frozen_shards import LAST_REQUIRES_GRAD, SHARD_REQUIRES_GRAD, SHOWN_REQUIRES_GRAD
from fsdp_fsdp2.torch_private.parameter_groups import param_groups_of

__all__ = [
    "ENTER_UNIT",
    "KEEP_WRITES",
    "SHARD_WRITES",
    "count_writes",
    "end_anyway",
    "follow_gathered",
    "is_written_since_gathered",
    "register_with_gathered",
    "written_since",
]


# Attributes of parameter groups.

#: How often each shard was written to when it was last gathered.
SHARD_WRITES = "_fsdp_fsdp2_times_written"

#: The same of writes to the ``data`` of shards, all together.
_DATA_WRITES = "_fsdp_fsdp2_times_written_by_data"

#: The parameters whose shards were written to between the last two all-gathers.
_OUTDATED = "_fsdp_fsdp2_outdated"

#: Called before the group is freed: it keeps what users have written to gathered parameters.
KEEP_WRITES = "_fsdp_fsdp2_keep"

#: Called before a backward pass computes with the group's parameters.
ENTER_UNIT = "_fsdp_fsdp2_enter"

#: The group's parameters and the modules that hold them, or ``None``: see :func:`_find_places`.
_PLACES = "_fsdp_fsdp2_places"

#: The group's parameters while it has none for torch, because they are gathered already.
_COPIED = "_fsdp_fsdp2_copied"


def follow_gathered(group: Any, root: Any | None) -> None:
    """Follow what a step does to a unit's gathered parameters.

    Args:
        group: The unit's parameter group.
        root: The root's state, if the unit is the root.
    """
    root_ref = None if root is None else weakref.ref(root)
    vars(group)[_PLACES] = _find_places(group)
    group._to_unsharded = partial(_note_gathered, weakref.ref(group), root_ref)
    group._to_sharded = partial(_carry_and_free, weakref.ref(group), "_to_sharded")
    if _is_of_one_rank(group):
        group.wait_for_unshard = partial(_wait_for_copies, weakref.ref(group))
    group._to_sharded_post_forward = partial(_carry_and_free, weakref.ref(group), "_to_sharded_post_forward")


#: By method of torch, the names in its code if it does what :func:`_show_at_once` or :func:`_free_at_once` does in its
#: place. A method with further names, in another version of torch, does more, and is called itself.
_NAMES_DONE_AT_ONCE = {
    FSDPParam.to_unsharded: {
        *("set_requires_grad_if_needed", "sharded_param", "_unsharded_param", "_setattr_on_modules", "sharded_state"),
        *("ShardedState", "SHARDED_POST_FORWARD", "_sharded_post_forward_param", "_sharded_post_forward_param_data"),
        "UNSHARDED",
    },
    FSDPParam.to_sharded: {
        *("_setattr_on_modules", "sharded_param", "free_unsharded_param", "ShardedState", "SHARDED", "sharded_state"),
        "keep_unsharded_storage",  # from torch 2.15 on
    },
    FSDPParam.free_unsharded_param: {
        *("compiled_autograd_enabled", "_unsharded_param", "untyped_storage", "resize_"),
        *("itertools", "chain", "all_gather_outputs", "_unsharded_inner_tensors", "free_storage"),
        "free_all_gather_outputs",  # from torch 2.15 on, a method that frees them
    },
}


def _find_places(group: Any) -> list[tuple[Any, list[tuple[nn.Module, str]]]] | None:
    """A unit's parameters, each with the modules that hold it and its names there.

    Returns:
        ``None`` if torch must set and free parameters by itself: it does more than is known here, or a module's class
        sets attributes in a way of its own. torch asks for the latter each time; here it is settled once.
    """
    if any(not names >= set(method.__code__.co_names) for method, names in _NAMES_DONE_AT_ONCE.items()):
        return None
    places = []
    for parameter in group.fsdp_params:
        module_info = parameter._module_info
        owners = [
            (module_info.module, module_info.param_name),
            *zip(module_info.shared_modules, module_info.shared_param_names, strict=True),
        ]
        owner_classes: list[Any] = [type(module) for module, _ in owners]
        if any(owner_class.__setattr__ is not nn.Module.__setattr__ for owner_class in owner_classes):
            return None
        if type(parameter) is not FSDPParam:
            return None
        places.append((parameter, owners))
    return places


#: Whether autograd's graphs are being compiled, for which torch frees in another way. Gone from torch 2.13 or so on.
_compiles_autograd: Callable[[], bool] = getattr(_fsdp_common, "compiled_autograd_enabled", lambda: False)


def _can_show_at_once(group: Any) -> bool:
    """Whether a unit is sharded, was gathered before, and has nothing unusual."""
    attributes = vars(group)
    places = attributes[_PLACES]
    was_gathered = places and LAST_REQUIRES_GRAD in attributes and "to_unsharded" not in vars(places[0][0])
    return was_gathered and group._sharded_state is ShardedState.SHARDED


def _show_at_once(group: Any) -> bool:
    """Let modules hold the gathered parameters of a unit, in one loop.

    Returns:
        Whether it was done; if there is more to do than that, nothing was.
    """
    if not _can_show_at_once(group):
        return False
    attributes = vars(group)
    places = attributes[_PLACES]
    with without_torch_function():
        required = list(map(SHARD_REQUIRES_GRAD, group.fsdp_params))
        if required != list(map(SHOWN_REQUIRES_GRAD[ShardedState.UNSHARDED], group.fsdp_params)):
            return False
    for parameter, owners in places:
        for module, name in owners:
            module._parameters[name] = parameter._unsharded_param
        parameter.sharded_state = ShardedState.UNSHARDED
    group._sharded_state = ShardedState.UNSHARDED
    attributes[LAST_REQUIRES_GRAD] = required
    return True


def _free_at_once(group: Any) -> bool:
    """Let modules hold the shards of a unit, and free what is gathered, in one loop.

    Returns:
        Whether it was done; if there is more to do than that, nothing was.
    """
    places = vars(group)[_PLACES]
    if not places or group._sharded_state is not ShardedState.UNSHARDED or _compiles_autograd():
        return False
    if any(getattr(parameter, "keep_unsharded_storage", False) for parameter, _ in places):
        return False
    for parameter, owners in places:
        for module, name in owners:
            module._parameters[name] = parameter.sharded_param
        for tensor in (*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors):
            storage = tensor.untyped_storage()
            if storage.size():
                storage.resize_(0)
        parameter.sharded_state = ShardedState.SHARDED
    group._sharded_state = ShardedState.SHARDED
    return True


def _is_of_one_rank(group: Any) -> bool:
    """Whether a unit is sharded over this rank alone, and torch gathers it by a copy of each parameter."""
    names_of_copying = {"all_gather_inputs", "init_all_gather_outputs", "alloc_storage", "copy_"}
    method = inspect.unwrap(type(group).wait_for_unshard)
    return names_of_copying <= set(method.__code__.co_names) and getattr(group.mesh_info, "shard_mesh_size", 1) == 1


def _wait_for_copies(group_ref: weakref.ref[Any]) -> None:
    """Gather a unit that is sharded over this rank alone, by one kernel for all parameters instead of two for each."""
    group: Any = group_ref()
    if group._all_gather_result is None or not _copy_at_once(group):
        type(group).wait_for_unshard(group)
        return
    vars(group)[_COPIED], group.fsdp_params = group.fsdp_params, []
    try:
        type(group).wait_for_unshard(group)  # it finds no parameter to copy, waits for events, calls _note_gathered()
    finally:
        _put_back_copied(group)


def _copy_at_once(group: Any) -> bool:
    """Copy the shards of a unit to its gathered parameters, in their dtype.

    Returns:
        Whether it was done; if there is more to do than that, nothing was.
    """
    if not _can_show_at_once(group) or _compiles_autograd() or torch._C._functorch.maybe_current_level() is not None:
        return False
    outputs, shards = [], []
    for parameter in group.fsdp_params:
        gathers_by_itself = hasattr(parameter.sharded_param._local_tensor, "fsdp_pre_all_gather")
        if gathers_by_itself or parameter.offload_to_cpu or len(parameter.all_gather_outputs) != 1:
            return False
        outputs.append(parameter.all_gather_outputs[0])
        shards.append(parameter._sharded_param_data)
    for output in outputs:
        alloc_storage(output)
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(outputs)):
        torch._foreach_copy_(outputs, shards)
    return True


def _put_back_copied(group: Any) -> None:
    """Give a group the parameters back that :func:`_wait_for_copies` has taken."""
    if (parameters := vars(group).pop(_COPIED, None)) is not None:
        group.fsdp_params = parameters


def _note_gathered(group_ref: weakref.ref[Any], root_ref: weakref.ref[Any] | None) -> None:
    """Replaces ``group._to_unsharded``."""
    group: Any = group_ref()
    _put_back_copied(group)
    frozen_shards.carry_requires_grad(group)
    if not _show_at_once(group):
        type(group)._to_unsharded(group)
        if root_ref is not None and LAST_REQUIRES_GRAD not in vars(group):  # the root, gathered for the first time
            for parameter in group.fsdp_params:
                gathered = parameter._unsharded_param
                if gathered.is_floating_point() or gathered.is_complex():
                    required = gathered.requires_grad
                    with outside_transforms():
                        gathered.requires_grad_(True)  # torch places no hook otherwise
                        register_with_gathered(gathered, partial(_end_inside_forward, root_ref))
                        gathered.requires_grad_(required)
        vars(group)[LAST_REQUIRES_GRAD] = list(map(SHOWN_REQUIRES_GRAD[ShardedState.UNSHARDED], group.fsdp_params))
    _follow_written(group)


_WRITES_OF_SHARD = operator.attrgetter("sharded_param._version", "sharded_param._local_tensor._version")


def count_writes(group: Any) -> list[tuple[int, int]]:
    """How often each shard of a unit was written to: by operations on the DTensor, and on what it holds."""
    try:
        return list(map(_WRITES_OF_SHARD, group.fsdp_params))
    except RuntimeError:  # inference tensors have no count of writes
        return []


def is_written_since_gathered(group: Any) -> bool:
    """Whether shards of a unit were written to since it was gathered."""
    attributes = vars(group)
    before: list[tuple[int, int]] | None = attributes.get(SHARD_WRITES)
    if before is None:
        return False
    data_writes_before: int = attributes.get(_DATA_WRITES, 0)
    return count_writes(group) != before or count_data_writes(group) != data_writes_before


def _follow_written(group: Any) -> None:
    """Count writes to shards since the last all-gather as writes to the gathered parameters.

    A graph that has saved these then raises, as in one process, instead of computing with other values. Writes to
    ``.data`` don't count, as in one process.
    """
    attributes = vars(group)
    if data_writes := count_data_writes(group):
        attributes[_DATA_WRITES] = data_writes
    before, current = attributes.get(SHARD_WRITES), count_writes(group)
    if current == before:
        return
    attributes[SHARD_WRITES] = current
    if before:
        written_params = [
            parameter
            for parameter, count_before, count in zip(group.fsdp_params, before, current, strict=False)
            if count_before != count
        ]
        gathered_params = [parameter._unsharded_param for parameter in written_params]
        increment_version(gathered_params)
        for gathered in gathered_params:
            if (value := getattr(gathered, "_fsdp_value", None)) is not None:
                value.times += 1  # not to be taken for a user's write to the gathered parameter
        attributes[_OUTDATED] = written_params


def written_since(unit: FSDPModule, numel: int, times: int) -> Iterator[nn.Parameter]:
    """The shards of a unit that were written to before its last all-gather, and after the one before that.

    Args:
        unit: The unit.
        numel: The number of elements of the full parameter.
        times: torch's count of writes to the gathered parameter.
    """
    for group in param_groups_of(unit):
        for parameter in vars(group).get(_OUTDATED, ()):
            gathered = parameter._unsharded_param
            if gathered.numel() == numel and times_written(gathered) == times:
                yield parameter.sharded_param


def register_with_gathered(gathered: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Register a hook with a gathered parameter, whose own method registers users' hooks with the shard."""
    register: Any = Tensor.register_post_accumulate_grad_hook
    return register(gathered, hook)


def _end_inside_forward(state_ref: weakref.ref[Any], gathered: Tensor) -> None:
    """Let torch end a backward pass inside the root's forward pass: it may have reached the output of no unit."""
    state = state_ref()
    if state is not None and state._training_state.name == "FORWARD":
        state._register_root_post_backward_final_callback()


def end_anyway(state_ref: weakref.ref[Any], gathered: Tensor) -> None:
    """Let torch end any backward pass that reaches a parameter: it may have reached the output of no unit."""
    if (state := state_ref()) is not None:
        state._register_root_post_backward_final_callback()


def _carry_and_free(group_ref: weakref.ref[Any], name: str) -> None:
    """Replaces the method of a group, ``name``, by which modules get its shards."""
    group: Any = group_ref()
    frozen_shards.carry_requires_grad(group)
    if (keep := vars(group).get(KEEP_WRITES)) is not None:
        keep()
    if name != "_to_sharded" or not _free_at_once(group):
        getattr(type(group), name)(group)
        if name == "_to_sharded_post_forward" and _FORGETS_FROZEN:
            for parameter in group.fsdp_params:
                parameter._sharded_post_forward_param.requires_grad_(parameter.sharded_param.requires_grad)


#: Whether shards over fewer ranks, which modules hold after the forward pass, all require gradients, as before torch
#: 2.13 or so. :func:`frozen_shards.carry_requires_grad` would take the frozen ones for unfrozen.
_FORGETS_FROZEN = "requires_grad" not in FSDPParam.to_sharded_post_forward.__code__.co_names
