"""What a unit has gathered: shown and freed at once, copied on one rank, and counted writes to it."""

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
from fsdp_fsdp2.torch_private.frozen_shards import HELD, REQUIRED, SEEN
from fsdp_fsdp2.torch_private.parameter_groups import param_groups_of

__all__ = [
    "ENTER",
    "KEEP",
    "WRITTEN",
    "count_writes",
    "end_anyway",
    "follow_gathered",
    "is_written_since_gathered",
    "register_with_gathered",
    "written_since",
]


WRITTEN = "_fsdp_fsdp2_times_written"

_DATA_WRITES = "_fsdp_fsdp2_times_written_by_data"

_OUTDATED = "_fsdp_fsdp2_outdated"

KEEP = "_fsdp_fsdp2_keep"

ENTER = "_fsdp_fsdp2_enter"

_PLACES = "_fsdp_fsdp2_places"

_COPIED = "_fsdp_fsdp2_copied"


def follow_gathered(group: Any, root: Any | None) -> None:
    """Follow what a step does to a unit's gathered parameters.

    Args:
        group: The unit's parameter group.
        root: The root's state, if the unit is the root.
    """
    of_root = None if root is None else weakref.ref(root)
    vars(group)[_PLACES] = _places(group)
    group._to_unsharded = partial(_note_gathered, weakref.ref(group), of_root)
    group._to_sharded = partial(_carry_and_free, weakref.ref(group), "_to_sharded")
    if _is_of_one_rank(group):
        group.wait_for_unshard = partial(_wait_for_copies, weakref.ref(group))
    group._to_sharded_post_forward = partial(_carry_and_free, weakref.ref(group), "_to_sharded_post_forward")


#: What torch's methods do for each parameter that :func:`_show_at_once` and :func:`_free_at_once` do in one loop.
_DONE_AT_ONCE = {
    FSDPParam.to_unsharded: {
        *("set_requires_grad_if_needed", "sharded_param", "_unsharded_param", "_setattr_on_modules", "sharded_state"),
        *("ShardedState", "SHARDED_POST_FORWARD", "_sharded_post_forward_param", "_sharded_post_forward_param_data"),
        "UNSHARDED",
    },
    FSDPParam.to_sharded: {
        *("_setattr_on_modules", "sharded_param", "free_unsharded_param", "ShardedState", "SHARDED", "sharded_state"),
    },
    FSDPParam.free_unsharded_param: {
        *("compiled_autograd_enabled", "_unsharded_param", "untyped_storage", "resize_"),
        *("itertools", "chain", "all_gather_outputs", "_unsharded_inner_tensors", "free_storage"),
    },
}


def _places(group: Any) -> list[tuple[Any, list[tuple[nn.Module, str]]]] | None:
    """A unit's parameters, each with the modules that hold it and its names there; ``None`` if torch is to replace it.

    torch looks each time whether a module's class sets attributes in a way of its own, which is settled when the module
    is sharded.
    """
    if any(not does >= set(method.__code__.co_names) for method, does in _DONE_AT_ONCE.items()):
        return None
    places = []
    for parameter in group.fsdp_params:
        module_info = parameter._module_info
        held_by = [
            (module_info.module, module_info.param_name),
            *zip(module_info.shared_modules, module_info.shared_param_names, strict=True),
        ]
        module_classes: list[Any] = [type(module) for module, _ in held_by]
        sets_as_all = all(module_class.__setattr__ is nn.Module.__setattr__ for module_class in module_classes)
        if not sets_as_all or type(parameter) is not FSDPParam:
            return None
        places.append((parameter, held_by))
    return places


#: Whether autograd's graphs are being compiled, where torch frees in another way. Not from torch 2.13 or so on.
_compiles_autograd: Callable[[], bool] = getattr(_fsdp_common, "compiled_autograd_enabled", lambda: False)


def _is_shown_at_once(group: Any) -> bool:
    """Whether a unit is sharded that was gathered before, and of which nothing is unusual."""
    attributes = vars(group)
    places = attributes[_PLACES]
    was_gathered = places and SEEN in attributes and "to_unsharded" not in vars(places[0][0])
    return was_gathered and group._sharded_state is ShardedState.SHARDED


def _show_at_once(group: Any) -> bool:
    """Let modules hold the gathered parameters of a unit, in one loop. Nothing if there is more to do than that."""
    if not _is_shown_at_once(group):
        return False
    attributes = vars(group)
    places = attributes[_PLACES]
    with without_torch_function():
        required = list(map(REQUIRED, group.fsdp_params))
        if required != list(map(HELD[ShardedState.UNSHARDED], group.fsdp_params)):
            return False
    for parameter, held_by in places:
        for module, name in held_by:
            module._parameters[name] = parameter._unsharded_param
        parameter.sharded_state = ShardedState.UNSHARDED
    group._sharded_state = ShardedState.UNSHARDED
    attributes[SEEN] = required
    return True


def _free_at_once(group: Any) -> bool:
    """Let modules hold the shards of a unit, and free what is gathered, in one loop. Otherwise nothing."""
    places = vars(group)[_PLACES]
    if not places or group._sharded_state is not ShardedState.UNSHARDED or _compiles_autograd():
        return False
    for parameter, held_by in places:
        for module, name in held_by:
            module._parameters[name] = parameter.sharded_param
        for tensor in (*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors):
            storage = tensor.untyped_storage()
            if storage.size():
                storage.resize_(0)
        parameter.sharded_state = ShardedState.SHARDED
    group._sharded_state = ShardedState.SHARDED
    return True


def _is_of_one_rank(group: Any) -> bool:
    """Whether torch gathers a unit by a copy of each parameter, since it is sharded over no other rank."""
    copies = {"all_gather_inputs", "init_all_gather_outputs", "alloc_storage", "copy_"}
    waits = inspect.unwrap(type(group).wait_for_unshard)
    return copies <= set(waits.__code__.co_names) and getattr(group.mesh_info, "shard_mesh_size", 1) == 1


def _wait_for_copies(of: weakref.ref[Any]) -> None:
    """Gather a unit that is sharded over no other rank: by one copy of all parameters, not two kernels for each."""
    group: Any = of()
    if group._all_gather_result is None or not _copy_at_once(group):
        type(group).wait_for_unshard(group)
        return
    vars(group)[_COPIED], group.fsdp_params = group.fsdp_params, []
    try:
        type(group).wait_for_unshard(group)  # what else it does: events, and _note_gathered()
    finally:
        _take_copied(group)


def _copy_at_once(group: Any) -> bool:
    """Copy the shards of a unit to what is gathered of it, in its dtype. Nothing if that is not all there is to do."""
    if not _is_shown_at_once(group) or _compiles_autograd() or torch._C._functorch.maybe_current_level() is not None:
        return False
    outputs, shards = [], []
    for parameter in group.fsdp_params:
        is_extended = hasattr(parameter.sharded_param._local_tensor, "fsdp_pre_all_gather")
        if is_extended or parameter.offload_to_cpu or len(parameter.all_gather_outputs) != 1:
            return False
        outputs.append(parameter.all_gather_outputs[0])
        shards.append(parameter._sharded_param_data)
    for output in outputs:
        alloc_storage(output)
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(outputs)):
        torch._foreach_copy_(outputs, shards)
    return True


def _take_copied(group: Any) -> None:
    if (parameters := vars(group).pop(_COPIED, None)) is not None:
        group.fsdp_params = parameters


def _note_gathered(of: weakref.ref[Any], of_root: weakref.ref[Any] | None) -> None:
    group: Any = of()
    _take_copied(group)
    frozen_shards.carry_requires_grad(group)
    if not _show_at_once(group):
        type(group)._to_unsharded(group)
        if of_root is not None and SEEN not in vars(group):
            for parameter in group.fsdp_params:
                gathered = parameter._unsharded_param
                if gathered.is_floating_point() or gathered.is_complex():
                    required = gathered.requires_grad
                    with outside_transforms():
                        gathered.requires_grad_(True)  # a hook can't be placed otherwise
                        register_with_gathered(gathered, partial(_end_inside, of_root))
                        gathered.requires_grad_(required)
        vars(group)[SEEN] = list(map(HELD[ShardedState.UNSHARDED], group.fsdp_params))
    _follow_written(group)


_TIMES_WRITTEN = operator.attrgetter("sharded_param._version", "sharded_param._local_tensor._version")


def count_writes(group: Any) -> list[tuple[int, int]]:
    """How often each shard of a unit was written to: by operations on the DTensor, and on what it holds."""
    try:
        return list(map(_TIMES_WRITTEN, group.fsdp_params))
    except RuntimeError:  # of inference tensors, whose writes nobody counts
        return []


def is_written_since_gathered(group: Any) -> bool:
    """Whether shards of a unit were written to since it was gathered."""
    attributes = vars(group)
    before: list[tuple[int, int]] | None = attributes.get(WRITTEN)
    if before is None:
        return False
    data_writes_before: int = attributes.get(_DATA_WRITES, 0)
    return count_writes(group) != before or count_data_writes(group) != data_writes_before


def _follow_written(group: Any) -> None:
    """Count writes to shards as writes to what is gathered of them now, after it was gathered from others before.

    A graph that has saved that raises in torch, as in one process, instead of computing with other values. Writes by
    way of ``.data`` don't count, as in one process.
    """
    attributes = vars(group)
    if data_writes := count_data_writes(group):
        attributes[_DATA_WRITES] = data_writes
    before, current = attributes.get(WRITTEN), count_writes(group)
    if current == before:
        return
    attributes[WRITTEN] = current
    if before:
        written_params = [
            p
            for p, count_before, count in zip(group.fsdp_params, before, current, strict=False)
            if count_before != count
        ]
        gathered = [parameter._unsharded_param for parameter in written_params]
        increment_version(gathered)
        for each in gathered:
            if (value := getattr(each, "_fsdp_value", None)) is not None:
                value.times += 1  # no write of the user's that the shards lack
        attributes[_OUTDATED] = written_params


def written_since(unit: FSDPModule, numel: int, times: int) -> Iterator[nn.Parameter]:
    """The shards of a unit that were written to between its last two all-gathers of different values.

    Args:
        unit: The unit.
        numel: The number of elements of the whole parameter.
        times: How often what is gathered was written to.
    """
    for group in param_groups_of(unit):
        for parameter in vars(group).get(_OUTDATED, ()):
            gathered = parameter._unsharded_param
            if gathered.numel() == numel and times_written(gathered) == times:
                yield parameter.sharded_param


def register_with_gathered(gathered: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Register a hook of what is gathered: the method of the tensor itself registers the user's with its shard."""
    register: Any = Tensor.register_post_accumulate_grad_hook
    return register(gathered, hook)


def _end_inside(of: weakref.ref[Any], gathered: Tensor) -> None:
    """Let torch end a backward pass inside the root's forward pass that reaches the output of no unit."""
    state = of()
    if state is not None and state._training_state.name == "FORWARD":
        state._register_root_post_backward_final_callback()


def end_anyway(of: weakref.ref[Any], gathered: Tensor) -> None:
    """Let torch end a backward pass that reaches parameters and may reach no output."""
    if (state := of()) is not None:
        state._register_root_post_backward_final_callback()


def _carry_and_free(of: weakref.ref[Any], name: str) -> None:
    group: Any = of()
    frozen_shards.carry_requires_grad(group)
    if (keep := vars(group).get(KEEP)) is not None:
        keep()
    if name != "_to_sharded" or not _free_at_once(group):
        getattr(type(group), name)(group)
        if name == "_to_sharded_post_forward" and _FORGETS_FROZEN:
            for parameter in group.fsdp_params:
                parameter._sharded_post_forward_param.requires_grad_(parameter.sharded_param.requires_grad)


#: Whether shards over fewer ranks, which modules hold after the forward pass, all require gradients, as before torch
#: 2.13 or so: the frozen ones too, which :func:`frozen_shards.carry_requires_grad` would take for unfrozen.
_FORGETS_FROZEN = "requires_grad" not in FSDPParam.to_sharded_post_forward.__code__.co_names
