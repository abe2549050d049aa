"""The private names of torch's FSDP1 that this package uses, and why. Tested with torch 2.9.0 and 2.13.0.

FSDP1 exposes neither its flat parameters nor the state of a forward pass through public names.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, register_multi_grad_hook
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._runtime_utils import (
    _post_backward_hook,
    _post_forward,
    _post_forward_reshard,
    _pre_backward_hook,
    _pre_forward,
    _pre_forward_unshard,
    _register_post_backward_hook,
    _register_pre_backward_hooks,
    _root_pre_forward,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_core import ShardingError, UnsupportedCapabilityError
from fsdp_core.sharding import (
    GatheredValue,
    KeptPart,
    PiecePlace,
    RefusedTransforms,
    UnitCalls,
    WrittenValues,
    cast_inputs,
    count_data_writes,
    count_piece_writes,
    guard_parameters,
    outside_of_compilation,
    place_piece,
    times_written,
    unguard_parameters,
    without_torch_function,
)
from fsdp_core.state import gathered_modules
from fsdp_cuda_native.flattened_parts import RunningParts, refuse_parts, refuse_use_while_freed
from fsdp_cuda_native.torch_private.handles import order_gathers, speed_up

__all__ = [
    "STAY_GATHERED",
    "FlatMember",
    "GatheredWrites",
    "Pending",
    "abandon_forward",
    "at_end_of_backward",
    "begin_inside",
    "check_unwritten",
    "expect_backward",
    "finish_frozen",
    "flat_members",
    "flat_parameter_of",
    "flattening_parts",
    "follow_frozen",
    "follow_requires_grad",
    "forget_pending",
    "forget_views",
    "free_before_call",
    "gathered_parameters",
    "handle_of",
    "is_interrupted",
    "is_kept",
    "is_sharded",
    "keep_gathered",
    "lacks_views",
    "leave_gradients",
    "no_reduction",
    "nodes_of",
    "place_pieces",
    "reduce_after_last",
    "reduce_at",
    "reduce_left_out",
    "reduce_unused",
    "reduce_waiting",
    "refuse_parts_of",
    "reset",
    "reshard",
    "resume_forward",
    "shard_group",
    "shows_parameters",
    "suspend_forward",
    "tensors_in",
    "tied_members",
    "times_each_written",
    "times_shards_written",
    "unguard_during_calls",
    "units_in_passes",
    "units_of",
    "was_kept",
    "watch_calls",
    "watch_hooks",
]

#: What leaves units gathered between their forward and their backward pass. The second has no public name.
STAY_GATHERED = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


@contextmanager
def flattening_parts(parts: Mapping[nn.Parameter, KeptPart]) -> Iterator[None]:
    """Context in which FSDP1 can flatten parameters without memory, of which each rank has kept a part.

    FSDP1 would copy full parameters into one flat tensor, so that a unit exists twice. Here the parts are gathered
    directly into the flat tensor.

    Args:
        parts: By parameter, the part that this rank has kept.
    """
    if not parts:
        yield
        return
    handles: Any = FlatParamHandle
    flatten = handles.flatten_tensors

    def flatten_from_parts(handle: FlatParamHandle, tensors: list[Tensor], aligned_numel: int) -> Tensor:
        # aligned_numel is 0 for parameters: FSDP1 passes what pads them as tensors
        flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
        for tensor, target in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            if isinstance(tensor, nn.Parameter) and tensor in parts:
                parts[tensor].gather(target)
            else:
                target.copy_(tensor.detach().as_strided((tensor.numel(),), (1,)))  # in memory order
        return flat

    handles.flatten_tensors = flatten_from_parts
    try:
        yield
    finally:
        handles.flatten_tensors = flatten


#: The attribute of a unit that says whether the running call is its first one since the last backward pass.
_FIRST_CALL = "_fsdp_first_call"
#: The attribute of a unit with the inputs of its running call that require gradients.
_INPUTS = "_fsdp_cuda_native_inputs"
#: The attribute of a handle with the user's names of its parameters.
_NAMES = "_fsdp_cuda_native_names"
#: The attribute of a handle that :func:`keep_gathered` has kept, with hooks of the modules that use it.
_CALLS = "_fsdp_cuda_native_calls"
#: The attribute of a handle that was kept, and then freed.
_WAS_KEPT = "_fsdp_cuda_native_was_kept"


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
        local: This rank's shard of the unit, 1-D, and the offset of these elements in it.
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
    local: tuple[Tensor, int]
    replica: int
    is_flat: bool


@dataclass(kw_only=True)
class Pending:
    """A unit that waits for a backward pass inside a running forward pass of the root.

    Attributes:
        unit: The unit.
        node: The autograd node that accumulates its flat parameter's gradient; ``None`` for a frozen unit.
        hook: Our hook at the node, which reduces the gradient. FSDP1 removes its own after the first backward pass.
    """

    unit: FullyShardedDataParallel
    node: Any | None
    hook: Any | None = None


def units_of(root: FullyShardedDataParallel) -> Iterator[FullyShardedDataParallel]:
    """The units of a root that hold parameters, including the root itself."""
    # the same as FSDP1's own fsdp_modules(), which is several times slower
    units = [module for module in root.modules() if isinstance(module, FullyShardedDataParallel)]
    return (unit for unit in units if handle_of(unit) is not None)


def units_in_passes(root: FullyShardedDataParallel) -> list[FullyShardedDataParallel]:
    """The units that FSDP1 has found in a root when it initialised it. The end of a pass is theirs alone."""
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
            local=(flat._local_shard, offset),
            replica=replica,
            is_flat=handle.uses_sharded_strategy or not handle._use_orig_params,
        )


def place_pieces(unit: FullyShardedDataParallel, names: Mapping[nn.Module, str]) -> None:
    """Note which elements of a unit's parameters ranks hold: core refuses to combine pieces that hold different ones.

    Args:
        unit: The unit, for which there are :class:`GatheredWrites`.
        names: The user's names of modules.
    """
    handle = handle_of(unit)
    flat, size = handle.flat_param, handle.flat_param._local_shard.numel()
    position: dict[str, Any] = {"shard": handle.rank, "replicas": getattr(unit, "_inter_node_pg", None)}
    if flat._params is None:
        layout = (size, *flat._shapes)  # units of the same shapes are divided alike
        place_piece(flat, PiecePlace(names[unit.module], layout, **position))
        return
    for parameter, info, shape, numel, start in zip(
        flat._params, flat._param_infos, flat._shapes, flat._numels, handle.offsets(), strict=True
    ):
        first_rank, last_rank = start // size, (start + max(numel, 1) - 1) // size
        # where in the parameter the elements of the next rank begin
        boundaries = tuple(rank * size - start for rank in range(first_rank + 1, last_rank + 1))
        layout = (tuple(shape), first_rank, boundaries)
        name = f"{names[info.module]}.{info.param_name}".removeprefix(".")
        place_piece(parameter, PiecePlace(name, layout, **position))


def unguard_during_calls(units: Sequence[FullyShardedDataParallel]) -> None:
    """Remove the guard of flat parameters that optimizers hold while a unit is called, for FSDP1 to gather from them.

    After the call, those that are freed again are guarded again, if any was guarded before it.
    """
    flat_refs = [weakref.ref(flat) for unit in units if (flat := handle_of(unit).flat_param)._params is None]
    if not flat_refs:
        return
    were_guarded: list[bool] = []  # for each running call
    for unit in units:
        unit.register_forward_pre_hook(partial(_unguard, flat_refs, were_guarded), prepend=True)
        unit.register_forward_hook(partial(_guard_again, flat_refs, were_guarded), always_call=True)


@outside_of_compilation
def _unguard(flat_refs: Iterable[weakref.ref[Any]], were_guarded: list[bool], *_: Any) -> None:
    guarded = unguard_parameters(flat for flat_ref in flat_refs if (flat := flat_ref()) is not None)
    were_guarded.append(bool(guarded))


@outside_of_compilation
def _guard_again(flat_refs: Iterable[weakref.ref[Any]], were_guarded: list[bool], *_: Any) -> None:
    if were_guarded and were_guarded.pop():
        flat_params = [flat for flat_ref in flat_refs if (flat := flat_ref()) is not None]
        guard_parameters(flat for flat in flat_params if flat.data_ptr() == flat._local_shard.data_ptr())


def refuse_parts_of(root: FullyShardedDataParallel, names: Mapping[nn.Module, str]) -> None:
    """Refuse to loop over the parameters of modules inside units, and to freeze them, under ``use_orig_params=False``.

    FSDP1 leaves such modules without parameters: ``module.requires_grad_(False)`` would silently freeze nothing.

    Args:
        root: The root. Nothing is refused in units that keep the original parameters.
        names: The user's names of modules.
    """
    lacking_by_part: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    running = RunningParts()
    for unit in units_of(root):
        flat = handle_of(unit).flat_param
        if flat._params is not None:
            continue
        flattened = [(info.module, info.param_name) for info in (*flat._param_infos, *flat._shared_param_infos)]
        for part in unit.module.modules():
            if part is not unit.module and not isinstance(part, FullyShardedDataParallel):
                inside = set(part.modules())
                lacking = [(owner, name) for owner, name in flattened if owner in inside]
                lacking_by_part.setdefault(part, []).extend(lacking)
        if unit is not root:
            running.count_calls(unit.module)
    for part, lacking in lacking_by_part.items():
        if part in names and lacking:
            refuse_parts(part, names[part], lacking, running)


def gathered_parameters(unit: FullyShardedDataParallel) -> Iterator[tuple[Tensor, nn.Parameter, bool]]:
    """The tensors that a unit's modules hold instead of parameters while the unit is gathered.

    Yields:
        The tensor, the optimizer's parameter, and whether that is this rank's shard of the parameter.
    """
    handle = handle_of(unit)
    flat = handle.flat_param
    for index, param_info in enumerate(flat._param_infos):
        gathered = param_info.module._parameters.get(param_info.param_name)
        if handle._use_orig_params and gathered is not None and gathered is not flat._params[index]:
            yield gathered, flat._params[index], handle.uses_sharded_strategy


class GatheredWrites:
    """Keeps what users write to a unit's gathered parameters: it is copied to the shard before they are freed.

    Args:
        unit: The unit.
        names: The user's names of modules.
        values: Receives what was written, for a comparison between ranks.
    """

    def __init__(self, unit: FullyShardedDataParallel, names: Mapping[nn.Module, str], values: WrittenValues) -> None:
        self._handle, self._values, self._unit = handle_of(unit), values, weakref.ref(unit)
        self._piece_writes = 0
        self._gathered: list[tuple[GatheredValue, nn.Module, str]] = []
        self_ref, handle_ref = weakref.ref(self), weakref.ref(self._handle)
        params = self._handle.flat_param._params
        for index, (attribute, module, _) in enumerate(self._handle.flat_param._param_infos):
            name = f"{names[module]}.{attribute}".removeprefix(".")
            optimizer_param = self._handle.flat_param if params is None else params[index]
            set_trained = None if params is None else partial(_set_trained, self_ref, index)
            value = GatheredValue(name, partial(getattr, optimizer_param, "requires_grad"), set_trained)
            if params is not None:
                value.shard = partial(_refuse_hook, name)
            self._gathered.append((value, module, attribute))
        own_names = {(module, attribute): value.name for value, module, attribute in self._gathered}
        self._tied = []
        for module, attribute, first_module, first_attribute in tied_members(unit):
            tied_to = own_names[first_module, first_attribute]
            value = GatheredValue(f"{attribute} of {type(module).__name__}, tied to {tied_to}")
            self._tied.append((value, module, attribute, first_module, first_attribute))
        vars(self._handle)[_NAMES] = [value.name for value, *_ in self._gathered]
        unit.register_forward_pre_hook(partial(_check_own, self_ref), prepend=True)
        self._handle._use_unsharded_views = partial(_follow_after, self_ref, handle_ref)
        self._handle._use_sharded_flat_param = partial(_keep_before, self_ref, handle_ref)
        speed_up(self._handle)
        order_gathers(self._handle, unit)

    def is_of(self, unit: FullyShardedDataParallel) -> bool:
        """Whether these are the writes to a unit's parameters."""
        return self._unit() is unit

    def check_own(self) -> None:
        """Refuse a call with other parameters than the unit's own."""
        params = self._handle.flat_param._params
        for index, (value, module, attribute) in enumerate(self._gathered):
            current = module._parameters.get(attribute)
            if params is None or current is not params[index]:
                value.check_own(current)
        for value, module, attribute, first_module, first_attribute in self._tied:
            value.check_own(module._parameters.get(attribute), first_module._parameters.get(first_attribute))

    def write_back(self) -> None:
        """Copy to the shard what was assigned to ``parameter.data`` of pieces, which FSDP1 is about to make anew."""
        times, unit = count_piece_writes(), self._unit()
        if times != self._piece_writes and unit is not None:
            self._piece_writes = times
            write_back(unit)

    def follow_requires_grad(self) -> None:
        """Let the flat parameter require a gradient if, when the unit is called, any of its parameters does.

        FSDP1 decides that when the root is called; parameters may be frozen or unfrozen after that. A flat parameter
        for whose gradient an earlier call waits goes on requiring it.
        """
        flat, unit = self._handle.flat_param, self._unit()
        if (
            flat._params is not None
            and unit is not None
            and (_is_between_calls(self._handle) or shows_parameters(unit))  # not in the middle of a call
        ):
            with without_torch_function():  # parameters may be guarded
                is_trained = any(map(_is_trained, flat._params))
            waits_for_gradient = len(getattr(flat, "_post_backward_hook_state", ())) == 2
            if is_trained or not waits_for_gradient:
                flat.requires_grad = is_trained
        _forget_unfit_hooks(flat)  # the end of the last backward pass leaves those of a unit that was frozen

    def freeze(self) -> None:
        """Let modules compute with detached views of the parameters that are frozen, and with views of the others."""
        if self._handle.flat_param._params is not None:
            for index in range(len(self._gathered)):
                self._freeze(index)

    def _freeze(self, index: int) -> None:
        """Let modules hold a detached view of a parameter if it is frozen, and its own view if it is not."""
        value, module, attribute = self._gathered[index]
        current: Any = module._parameters.get(attribute, module.__dict__.get(attribute))
        if getattr(current, "_fsdp_value", None) is not value:
            return
        own_view, is_trained = value.unfrozen(current), value.is_trained()
        is_detached = current is not own_view
        if is_trained and is_detached:
            self._replace_view(index, value.replaced(current, own_view))
        elif not is_trained and not is_detached:
            self._replace_view(index, value.frozen(own_view) if needs_gradient(own_view) else own_view)

    def _replace_view(self, index: int, view: Tensor) -> None:
        """Let modules hold another view. No name is removed: the user's loop over parameters may be running."""
        _, module, attribute = self._gathered[index]
        flat = self._handle.flat_param
        if flat._tensors[index] is not None:  # while a unit stays gathered, FSDP1 asserts that modules hold this one
            flat._tensors[index] = view
        tied = [
            (info.module, info.param_name)
            for info in flat._shared_param_infos
            if (info.prim_module, info.prim_param_name) == (module, attribute)
        ]
        for owner, name in [(module, attribute), *tied]:
            if name in owner._parameters:
                owner._parameters[name] = view
            else:
                owner.__dict__[name] = view

    def set_trained(self, index: int, is_trained: bool) -> None:
        """Freeze or unfreeze a parameter whose view the user holds."""
        flat = self._handle.flat_param
        flat._params[index].requires_grad_(is_trained)
        if is_trained and not flat.requires_grad and not _is_between_calls(self._handle):
            self._renew_views()
        self._freeze(index)

    def _renew_views(self) -> None:
        """Let a unit that was gathered while all of its parameters were frozen have a gradient from now on."""
        handle, flat = self._handle, self._handle.flat_param
        flat.requires_grad = True
        _forget_unfit_hooks(flat)
        with torch.enable_grad():
            views = list(handle._get_unflat_views())
        unit: Any = self._unit()
        _register_post_backward_hook(unit, handle)
        for index, (value, module, attribute) in enumerate(self._gathered):
            current: Any = module._parameters.get(attribute, module.__dict__.get(attribute))
            if getattr(current, "_fsdp_value", None) is value:
                flat._tensors[index] = value.replaced(current, views[index])
                self._replace_view(index, flat._tensors[index])
                self._freeze(index)

    def follow(self) -> None:
        """Notice writes to the views that modules hold now instead of parameters, and detach those of frozen ones."""
        times, params = None, self._handle.flat_param._params
        for value, module, attribute in self._gathered:
            attributes = module.__dict__
            parameters: Any = attributes["_parameters"]
            view: Any
            if attribute in parameters:
                view = parameters[attribute]
                attributes.pop(attribute, None)  # FSDP1 sets both; functional_call() replaces the one in _parameters
            else:
                view = attributes.get(attribute)
            # any tensor but a parameter; isinstance() of parameters takes several calls, so it is asked last
            if (
                type(view) is Tensor
                or getattr(view, "_fsdp_value", None) is value
                or (view is not None and not isinstance(view, nn.Parameter))
            ):
                times = times_written(view) if times is None else times
                value.follow(view, times)
        for info in self._handle.flat_param._shared_param_infos:
            if info.param_name in info.module._parameters:
                info.module.__dict__.pop(info.param_name, None)
        with without_torch_function():
            some_frozen = params is not None and not all(map(_is_trained, params))
        if some_frozen:
            self.freeze()

    def note_writes_to_flat(self) -> None:
        """Notice what was written to the ``data`` of a gathered flat parameter that optimizers hold."""
        flat = self._handle.flat_param
        if flat._params is not None or not self._handle.uses_sharded_strategy:
            return
        part = _gathered_part(self._handle)
        if part is not None and not torch.equal(part, flat._local_shard.to(part)):  # an offloaded shard is on the host
            for value, _, _ in self._gathered:
                value.note(has_changed=True)

    def keep(self, *, is_counted: bool) -> None:
        """Copy to the shard what was written to gathered parameters until now.

        Args:
            is_counted: Whether torch's count of writes tells. It does not after a step over the flat parameter, which
                is counted with the writes to its views.
        """
        if not self._may_be_written(is_counted=is_counted):
            return
        times = 0
        written_views: list[tuple[GatheredValue, Tensor, bool]] = []
        for value, module, attribute in self._gathered:
            view: Any = module._parameters.get(attribute)
            if view is None:
                view = module.__dict__.get(attribute)
            if isinstance(view, Tensor) and getattr(view, "_fsdp_value", None) is value:
                times = times or times_written(view)  # the same for all views: torch counts for their common memory
                is_certain = value.has_changed or (is_counted and value.is_counted(times))
                if is_certain or value.is_noted:
                    written_views.append((value, view, is_certain))
        if not written_views:
            return
        flat = self._handle.flat_param
        has_own_memory = self._handle.uses_sharded_strategy or flat.dtype != flat._local_shard.dtype
        part = _gathered_part(self._handle) if has_own_memory else flat._local_shard
        if part is None:  # FSDP1 has freed the memory of the views
            return
        for value, view, is_certain in written_views:
            value.mark_kept(view)
            value.keep(part, flat._local_shard, view, self._values, is_counted=is_certain)

    def refuse_use_of_views(self) -> None:
        """Refuse to compute with the views that modules go on holding once the unit is freed."""
        for value, module, attribute in self._gathered:
            view = module.__dict__.get(attribute)
            if isinstance(view, Tensor):
                refuse_use_while_freed(view, value.name)

    def _may_be_written(self, *, is_counted: bool) -> bool:
        """Whether :meth:`keep` has anything to look for: in most passes nobody writes."""
        times = None
        for value, module, attribute in self._gathered:
            if value.is_noted or value.has_changed:
                return True
            if is_counted:
                if times is None:  # the same for all views
                    attributes = module.__dict__
                    view: Any = attributes["_parameters"].get(attribute)
                    view = attributes.get(attribute) if view is None else view
                    if getattr(view, "_fsdp_value", None) is not value:
                        continue
                    times = times_written(view)
                if value.is_counted(times):
                    return True
        return False


_is_trained = attrgetter("requires_grad")
_version = attrgetter("_version")


def _refuse_hook(name: str) -> NoReturn:
    raise UnsupportedCapabilityError(
        f"a hook on the gradient of {name!r} while it is gathered: FSDP1 reduces it to the shard without a call of the "
        "hook.\n"
        "Write parameter.register_post_accumulate_grad_hook(hook) before training: in on_fit_start(), under Fabric "
        "after fabric.setup(); or use strategy='fsdp2'."
    )


def _set_trained(writes_ref: weakref.ref[GatheredWrites], index: int, is_trained: bool) -> None:
    if (writes := writes_ref()) is not None:
        writes.set_trained(index, is_trained)


@outside_of_compilation
def _check_own(writes_ref: weakref.ref[GatheredWrites], unit: FullyShardedDataParallel, args: Any) -> None:
    if (writes := writes_ref()) is not None and unit not in gathered_modules:
        writes.check_own()
        writes.follow_requires_grad()


def needs_gradient(tensor: Any) -> bool:
    """Whether a view requires a gradient for autograd; its own ``requires_grad`` is that of the user's parameter."""
    required: bool = Tensor.requires_grad.__get__(tensor)  # type: ignore[attr-defined]
    return required


@outside_of_compilation
def _follow_after(writes_ref: weakref.ref[GatheredWrites], handle_ref: weakref.ref[Any], as_params: bool) -> None:
    writes, handle = writes_ref(), handle_ref()
    assert handle is not None  # it is the caller
    training_state = handle._training_state
    if training_state == HandleTrainingState.BACKWARD_PRE and lacks_views(handle):  # FSDP1 gathers this unit ahead
        handle._training_state = HandleTrainingState.FORWARD  # in which it makes views, instead of using those it saved
    GatheredValue.is_data_assignable = True
    try:
        type(handle)._use_unsharded_views(handle, as_params)
    finally:
        GatheredValue.is_data_assignable = False
    handle._training_state = training_state
    if writes is not None and not as_params:
        writes.follow()


def lacks_views(handle: Any) -> bool:
    """Whether FSDP1 has dropped the views that the forward pass has computed with, at the end of another pass."""
    return handle._use_orig_params and any(tensor is None for tensor in handle.flat_param._tensors)


@outside_of_compilation
def _keep_before(writes_ref: weakref.ref[GatheredWrites], handle_ref: weakref.ref[Any]) -> None:
    writes, handle = writes_ref(), handle_ref()
    assert handle is not None  # it is the caller
    if writes is not None:
        writes.keep(is_counted=handle._training_state == HandleTrainingState.FORWARD)
        writes.write_back()
    if not handle._use_orig_params:
        unguard_parameters([handle.flat_param])  # FSDP1 assigns to it; it is guarded still after an exception in a step
    type(handle)._use_sharded_flat_param(handle)
    if writes is not None and not handle._use_orig_params:
        writes.refuse_use_of_views()


def _gathered_part(handle: Any) -> Tensor | None:
    """This rank's part of the unit's gathered flat parameter, in the shape of its shard; ``None`` if it is freed."""
    local = handle.flat_param._local_shard
    if not handle.uses_sharded_strategy:
        unsharded: Tensor = handle.flat_param.detach()
        return unsharded.view_as(local)
    padded: Tensor = handle._get_padded_unsharded_flat_param().detach()
    if not padded.untyped_storage().size():
        return None
    return padded.view(-1)[handle.rank * local.numel() : (handle.rank + 1) * local.numel()]


def tied_members(unit: FullyShardedDataParallel) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    """A unit's tied parameters: each further module and name of one, then the module and name that come first."""
    for info in handle_of(unit).flat_param._shared_param_infos:
        yield info.module, info.param_name, info.prim_module, info.prim_param_name


def reshard(unit: FullyShardedDataParallel, *, keeps: bool = False) -> None:
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
        for hook in handle.__dict__.pop(_CALLS):
            hook.remove()
        handle.__dict__[_WAS_KEPT] = True
        increment_version(flat)
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


def write_back(unit: FullyShardedDataParallel) -> None:
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


def shows_parameters(unit: FullyShardedDataParallel) -> bool:
    """Whether a unit's modules hold the optimizer's parameters, and not views of the gathered flat parameter."""
    handle = handle_of(unit)
    flat = handle.flat_param
    module, name = flat._param_infos[0].module, flat._param_infos[0].param_name
    return bool(handle._use_orig_params and module._parameters.get(name) is flat._params[0])


def times_shards_written(unit: FullyShardedDataParallel) -> int:
    """How often the optimizer's parameters of a unit were written to, writes through ``.data`` of pieces included."""
    flat = handle_of(unit).flat_param
    params = flat._params or [flat]
    with without_torch_function():
        return sum(map(times_written, params)) + count_data_writes(params)


def times_each_written(unit: FullyShardedDataParallel) -> list[int]:
    """As :func:`times_shards_written`, for each parameter."""
    flat = handle_of(unit).flat_param
    with without_torch_function():  # parameters may be guarded
        return list(map(_version, flat._params or ()))


def check_unwritten(unit: FullyShardedDataParallel, times_at_call: list[int]) -> None:
    """Refuse a backward pass that would gather other values than its graph was computed with.

    Args:
        unit: The unit, whose output the pass has reached.
        times_at_call: What :func:`times_each_written` returned at the end of the unit's call.

    Raises:
        ShardingError: A parameter that the graph needs was written to since. In one process torch raises then.
    """
    current_times = times_each_written(unit)
    if current_times == times_at_call:
        return
    written_indices = [index for index, times in enumerate(times_at_call) if times != current_times[index]]
    if needed := _saved_among(unit, written_indices):
        names = [repr(vars(handle_of(unit))[_NAMES][index]) for index in needed]
        were = f"{names[0]} was" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} were"
        raise ShardingError(
            f"{were} written to between the forward pass and this backward pass, which computes with the values: by an "
            "optimizer's step, a checkpoint that was loaded, or by hand. In one process torch raises that a variable "
            "was modified by an in-place operation.\n"
            "Run the backward pass before that, or the forward pass again after it."
        )


def _saved_among(unit: FullyShardedDataParallel, indices: Sequence[int]) -> list[int]:
    """Which of a unit's parameters are saved by the running node or by those that run after it.

    Parameters that the graph has saved by hooks, such as copies on the host, are not among them.
    """
    handle = handle_of(unit)
    flat = handle.flat_param
    gathered = handle._get_padded_unsharded_flat_param() if handle.uses_sharded_strategy else flat
    offsets, storage = handle.offsets(), gathered.untyped_storage()._cdata
    spans = {index: (offsets[index], offsets[index] + flat._numels[index]) for index in indices}  # in the flat one
    saved_indices: set[int] = set()
    nodes: list[Any] = [torch._C._current_autograd_node()]
    visited: set[Any] = set(nodes)
    while nodes:
        node = nodes.pop()
        for tensor in _saved_by(node):
            if tensor.layout == torch.strided and tensor.untyped_storage()._cdata == storage:
                start = tensor.storage_offset()
                end = start + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
                saved_indices.update(index for index, (first, last) in spans.items() if start < last and first < end)
        next_nodes = {next_node for next_node, _ in node.next_functions if next_node is not None} - visited
        visited |= next_nodes
        nodes += next_nodes
    return sorted(saved_indices)


#: Whether a node's saved tensors can be read without unpacking them, which hooks may do. Not on torch 2.9.
_SHOWS_SAVED = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


def _saved_by(node: Any) -> Iterator[Tensor]:
    """The tensors that an autograd node has saved; without those that hooks have packed, if that can be told."""
    for name in dir(node):
        if _SHOWS_SAVED and name.startswith("_raw_saved_"):
            for saved in _as_tuple(getattr(node, name)):
                if saved is not None and saved.unpack_hook is None and isinstance(saved.data, Tensor):
                    yield saved.data
        elif not _SHOWS_SAVED and name.startswith("_saved_"):
            with suppress(RuntimeError):  # freed, or of a custom function
                yield from (saved for saved in _as_tuple(getattr(node, name)) if isinstance(saved, Tensor))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def free_before_call(root: FullyShardedDataParallel) -> None:
    """Free what an idle root has kept of its last call, unless a backward pass is running or a graph needs it."""
    if torch._C._current_graph_task_id() == -1 and not is_kept(root):
        reshard(root)


def keep_gathered(units: Iterable[FullyShardedDataParallel], before_call: Callable[..., None]) -> None:
    """Keep the parameters of units from now on, until :func:`reshard`, once they are gathered.

    Args:
        units: The units.
        before_call: Called with a weak reference to the unit before each call of a module that has parameters of it,
            as activation checkpointing calls one in a backward pass.
    """
    for unit in units:
        handle = handle_of(unit)
        if handle is not None and not is_kept(unit):
            handle.reshard = partial(_reshard_and_keep, weakref.ref(handle))
            flat = handle.flat_param
            modules = dict.fromkeys(info.module for info in (*flat._param_infos, *flat._shared_param_infos))
            hook = partial(before_call, weakref.ref(unit))
            handle.__dict__[_CALLS] = [module.register_forward_pre_hook(hook) for module in modules]


def is_kept(unit: FullyShardedDataParallel) -> bool:
    """Whether :func:`keep_gathered` holds for a unit."""
    return "reshard" in vars(handle_of(unit))


def was_kept(unit: FullyShardedDataParallel) -> bool:
    """Whether a unit was freed after :func:`keep_gathered` had kept it."""
    return _WAS_KEPT in vars(handle_of(unit))


def _reshard_and_keep(handle_ref: weakref.ref[Any], free_unsharded_flat_param: bool) -> None:
    """Replaces ``handle.reshard``: modules hold the shards again, and what is gathered keeps its memory."""
    handle: Any = handle_ref()
    type(handle).reshard(handle, False)


def forget_views(unit: FullyShardedDataParallel) -> None:
    """Release views of the gathered flat parameter, unless a backward pass still needs them.

    They keep it alive through autograd, which Python's garbage collector can't see: no model would ever be freed.
    """
    handle = handle_of(unit)
    if handle._needs_pre_backward_unshard:
        return
    flat = handle.flat_param
    if flat._tensors is not None:
        flat._tensors[:] = [None] * len(flat._tensors)
    if not handle._use_orig_params:
        names: list[str] = vars(handle)[_NAMES]
        user_names = {(i.module, i.param_name): name for i, name in zip(flat._param_infos, names, strict=True)}
        for info in flat._shared_param_infos:
            user_names[info.module, info.param_name] = user_names[info.prim_module, info.prim_param_name]
        for (module, attribute), name in user_names.items():
            view = module.__dict__.get(attribute)
            if view is not None:
                with without_torch_function():
                    module.__dict__[attribute] = view.data
                refuse_use_while_freed(module.__dict__[attribute], name)


#: These transforms wrap the flat parameter. FSDP1 then resizes the memory of a wrapper, on which torch crashes.
_REFUSED = RefusedTransforms(
    transforms=frozenset({"grad", "jvp", "vmap"}),
    instead=(
        "Write torch.autograd.grad(), or torch.autograd.functional.vjp(), jvp(), jacobian() or hessian(), with "
        "create_graph=True if a loss is computed with it; and instead of vmap(), call it with the batch. "
        "strategy='fsdp2' gathers in torch.func.jvp(), jacfwd() and vmap()."
    ),
)


def watch_calls(
    unit: FullyShardedDataParallel, before_hooks: Callable[[FullyShardedDataParallel, list[Tensor]], None]
) -> None:
    """Register the hooks of a unit's calls, around what FSDP1 does in its forward pass.

    Args:
        unit: The unit.
        before_hooks: Called with the unit and tensors that leave its call where FSDP1 does not look, such as in
            objects, before FSDP1's hooks are registered with these.
    """
    unit_ref = weakref.ref(unit)

    def register_hooks(tensors: list[Tensor]) -> None:
        unit = unit_ref()
        if unit is not None:
            before_hooks(unit, tensors)
            _register_pre_backward_hooks(unit, unit.module, tensors, handle_of(unit))

    def abandon() -> None:
        unit = unit_ref()
        if unit is not None:
            _abandon_call(unit)

    calls = UnitCalls(register_hooks, unit.module.modules(), _REFUSED, abandon)
    unit.register_forward_pre_hook(calls.enter, with_kwargs=True, prepend=True)
    unit.module.register_forward_pre_hook(calls.begin, with_kwargs=True, prepend=True)
    unit.register_forward_hook(calls.leave, always_call=True)


def _abandon_call(unit: FullyShardedDataParallel) -> None:
    """Make a unit idle that an exception has left in the middle of a call: a backward pass may reach an earlier call.

    A call of the root that ends by an exception makes all units idle elsewhere.
    """
    handle, state = handle_of(unit), unit.training_state
    is_running = handle is not None and handle._training_state == HandleTrainingState.FORWARD
    if is_running and state == TrainingState.FORWARD_BACKWARD and not unit._is_root:
        _post_forward_reshard(unit, handle)
        unit.training_state, handle._training_state = TrainingState.IDLE, HandleTrainingState.IDLE


def reduce_unused(unit: FullyShardedDataParallel) -> None:
    """Let a unit take part in the reduction of its gradients even if this rank has used none of its parameters.

    FSDP1 reduces when the flat parameter gets a gradient. A rank whose backward pass goes through the unit but reaches
    none of its parameters would leave the other ranks waiting, or exchange the next unit's gradients with them. Here it
    reduces zeros when the backward pass arrives at the unit's inputs, where it has a hook.

    An input may be the output of another unit, or of the same one, as of a layer that is skipped. One tensor would have
    two hooks then, which run in the order of the forward pass, not of the backward pass. Therefore inputs are replaced
    by views. Outputs that are inputs are replaced as well: their hook gathers the parameters, and at the input it would
    run too late, after the backward pass of all else that the unit computes from that input.
    """
    if handle_of(unit) is not None:
        unit.register_forward_pre_hook(_view_inputs, with_kwargs=True)
        unit.module.register_forward_pre_hook(partial(_reduce_after_all_calls, weakref.ref(unit)))
        unit.module.register_forward_hook(_view_returned_inputs, with_kwargs=True)
        unit.register_forward_hook(_reduce_when_passed, with_kwargs=True)


def _view_inputs(unit: FullyShardedDataParallel, args: Any, kwargs: Any) -> Any:
    # the flat parameter has no hook of FSDP1 before the first call, at which the unit's backward pass ends
    handle = handle_of(unit)
    unit.__dict__[_FIRST_CALL] = not hasattr(handle.flat_param, "_post_backward_hook_state")
    if not torch.is_grad_enabled():
        return None
    inputs: list[Tensor] = []
    unit.__dict__[_INPUTS] = inputs
    if handle._training_state == HandleTrainingState.BACKWARD_PRE:
        # FSDP1 casts nothing in a recomputation, which it expects to begin inside of the unit, not around the root
        dtype = unit.mixed_precision.param_dtype
        if dtype is not None and unit.mixed_precision.cast_forward_inputs and not handle._force_full_precision:
            args, kwargs = cast_inputs(dtype, args, kwargs)
            return (
                tuple([_viewed(value, inputs) for value in args]),
                {name: _viewed(value, inputs) for name, value in kwargs.items()},
            )
    if all(map(_needs_no_view, args)) and all(map(_needs_no_view, kwargs.values())):
        return None
    return (
        tuple([_viewed(value, inputs) for value in args]),
        {name: _viewed(value, inputs) for name, value in kwargs.items()} if kwargs else kwargs,
    )


def _viewed(value: Any, inputs: list[Tensor]) -> Any:
    """A value with views of its tensors that require gradients, which are appended to ``inputs``."""
    if _needs_no_view(value):
        return value

    def view(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        inputs.append(tensor.view_as(tensor))
        return inputs[-1]

    return view(value) if isinstance(value, Tensor) else tree_map_only(Tensor, view, value)


#: What most modules are called with besides tensors.
_PLAIN = frozenset({type(None), bool, int, float, str})


def _needs_no_view(value: Any) -> bool:
    """Whether a value certainly holds no tensor that requires a gradient, from a look at tensors and tuples alone."""
    if isinstance(value, Tensor):
        return not value.requires_grad
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_needs_no_view, value)))


def _view_returned_inputs(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Replace outputs that are inputs by views of them."""
    if not torch.is_grad_enabled():
        return None
    leaves = [output] if type(output) is Tensor else tree_leaves(output)
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs:
        return None
    arguments = [*args, *kwargs.values()]
    inputs = arguments if all(map(_is_leaf, arguments)) else tree_leaves(arguments)
    returned_ids = {id(tensor) for tensor in outputs if _is_among(tensor, inputs)}
    if not returned_ids:
        return None
    return tree_map_only(Tensor, lambda leaf: leaf.view_as(leaf) if id(leaf) in returned_ids else leaf, output)


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors in what a module returns, also those in dataclasses and sets, where FSDP1 finds them too."""
    if isinstance(output, Tensor):
        return [output]
    tensors: list[Tensor] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif isinstance(leaf, set):
            tensors += tensors_in(list(leaf))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            tensors += tensors_in([getattr(leaf, field.name) for field in fields(leaf)])
    return tensors


def _is_leaf(value: Any) -> bool:
    """Whether a value is a tensor, or holds none that requires a gradient: it need not be searched for more."""
    return isinstance(value, Tensor) or _needs_no_view(value)


def _is_among(tensor: Tensor, values: Iterable[Any]) -> bool:
    return any(tensor is value for value in values)


def _reduce_after_all_calls(unit_ref: weakref.ref[FullyShardedDataParallel], module: nn.Module, args: Any) -> None:
    """Reduce a unit's gradients when a backward pass has visited all of the unit's calls that it goes through.

    FSDP1 registers the reduction on the autograd node that accumulates the flat parameter's gradient when the unit is
    first called, and removes it after a backward pass. Under mixed precision every all-gather of the parameter creates
    another node: a backward pass through a later call alone would reduce nothing, and one through both calls only half
    of the gradient.
    """
    unit = unit_ref()
    if unit is None or not torch.is_grad_enabled():
        return
    if handle_of(unit)._training_state == HandleTrainingState.IDLE:  # called within gathered(), by itself
        return
    if not unit.__dict__.get(_FIRST_CALL, True):
        reduce_after_last(unit)


def reduce_after_last(unit: FullyShardedDataParallel) -> None:
    """Reduce a unit's gradient at the last of several nodes that add to it, among them that of what is gathered now.

    Args:
        unit: The unit, which is gathered.
    """
    flat = handle_of(unit).flat_param
    _register_post_backward_hook(unit, handle_of(unit))
    hooks: tuple[Any, ...] = getattr(flat, "_post_backward_hook_state", ())
    if len(hooks) != 2 or not flat.requires_grad:
        return
    grad_fn: Any = flat.expand_as(flat).grad_fn
    node = grad_fn.next_functions[0][0]
    if node is hooks[0]:
        return
    first_node, hook = hooks
    if not isinstance(hook, _LastOfNodes):
        hook.remove()
        hook = _LastOfNodes(unit, first=hook)
        hook.add(first_node)
    hook.add(node)
    flat._post_backward_hook_state = (node, hook)


class _LastOfNodes:
    """A hook on several autograd nodes, which reduces a unit's gradients at the last of those that a pass runs.

    Args:
        unit: The unit.
        first: The hook of FSDP1 that this one replaces.

    Attributes:
        nodes: The nodes.
    """

    def __init__(self, unit: FullyShardedDataParallel, first: Any) -> None:
        self._unit = weakref.ref(unit)
        self.first = first
        self.nodes: list[Any] = []
        self._hooks: list[Any] = []
        self._reached: set[int] = set()

    def add(self, node: Any) -> None:
        """Add a node to wait for."""
        self._hooks.append(node.register_hook(partial(self._reach, len(self.nodes))))
        self.nodes.append(node)

    def remove(self) -> None:
        """Remove the hook."""
        for hook in self._hooks:
            hook.remove()

    def _reach(self, index: int, *gradients: Any) -> None:
        self._reached.add(index)
        if all(
            node_index in self._reached or not torch._C._will_engine_execute_node(node)
            for node_index, node in enumerate(self.nodes)
        ):
            self._reached.clear()
            unit = self._unit()
            if unit is not None:
                _post_backward_hook(unit, handle_of(unit), *gradients)


def _reduce_when_passed(unit: FullyShardedDataParallel, args: Any, kwargs: Any, output: Any) -> None:
    """Let a backward pass that has arrived at the unit's inputs reduce its gradients, if nothing else does."""
    handle = handle_of(unit)
    inputs = unit.__dict__.pop(_INPUTS, [])  # not args: the unit may have put outputs into a list that is one of them
    if torch.is_grad_enabled() and handle.flat_param.requires_grad and unit.__dict__[_FIRST_CALL]:
        reduce = partial(_reduce_nothing, unit, handle)
        if len(inputs) == 1:  # the usual call; torch's hook on several tensors costs more
            inputs[0].register_hook(reduce)
        elif inputs:
            register_multi_grad_hook(inputs, reduce)


def _reduce_nothing(unit: FullyShardedDataParallel, handle: Any, _: Any) -> None:
    """Reduce zeros, or what earlier micro-batches left, if the backward pass reaches none of a unit's parameters."""
    if handle._training_state != HandleTrainingState.BACKWARD_PRE:
        return  # the pass has reduced its gradient, or not reached its output
    if any(map(torch._C._will_engine_execute_node, nodes_of(unit))):
        return  # the pass will still reach its parameters through another call
    if unit._sync_gradients:
        _reduce(unit, handle)
    else:  # wait for a reduction with a gradient of zeros, as ranks that have used the parameters wait with theirs
        _fill_gradient(handle)
        handle.flat_param._post_backward_called = True
        if handle._use_orig_params:
            handle._use_unsharded_grad_views()


def _reduce(unit: FullyShardedDataParallel, handle: Any) -> None:
    """Reduce what a unit has accumulated, or zeros if it has accumulated nothing."""
    _fill_gradient(handle)
    with torch.no_grad():
        _post_backward_hook(unit, handle, handle.flat_param)


def _fill_gradient(handle: Any) -> None:
    """Give a gathered flat parameter a gradient of zeros, unless earlier micro-batches have left one."""
    flat = handle.flat_param
    if flat.grad is None:
        dtype = handle._fwd_bwd_param_dtype
        flat.grad = torch.zeros(flat._unpadded_unsharded_size, dtype=dtype, device=handle.device)


def reduce_left_out(root: FullyShardedDataParallel) -> None:
    """Let a backward pass that reduces gradients also reduce those of units that it does not visit.

    Their gradients come from an earlier micro-batch. FSDP1 would fail an assertion; or, if such a unit also has reduced
    gradients, or is not sharded, ranks would silently go on with different gradients.
    """
    root.module.register_forward_hook(partial(_queue_left_out, weakref.ref(root)))


def _queue_left_out(root_ref: weakref.ref[FullyShardedDataParallel], module: nn.Module, args: Any, output: Any) -> None:
    root = root_ref()
    if root is not None and torch.is_grad_enabled():
        _before_end_of_backward(root, output)


def _before_end_of_backward(root: FullyShardedDataParallel, output: Any) -> None:
    """Let a backward pass that begins at an output reduce what waits, before FSDP1's own end of the pass.

    FSDP1 queues that in hooks of the same tensors, which it registers after these.
    """

    def queue(_: Tensor) -> None:
        if not is_interrupted(root):
            reduce_waiting(root)
            torch.autograd.Variable._execution_engine.queue_callback(partial(finish_frozen, root))

    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(queue)


def reduce_at(unit: FullyShardedDataParallel, node: Any) -> None:
    """Let a node reduce a unit's gradient that FSDP1 has forgotten, after another backward pass.

    Args:
        unit: The unit.
        node: A node that is about to add to the gradient of its flat parameter.
    """
    flat = handle_of(unit).flat_param
    if not hasattr(flat, "_post_backward_hook_state"):
        hook = node.register_hook(partial(_post_backward_hook, unit, handle_of(unit)))
        flat._post_backward_hook_state = node, hook


def _reduce_once(unit: FullyShardedDataParallel, node: Any, *gradients: Any) -> None:
    """Reduce a unit's gradient at a node, unless FSDP1's hook at the same node must be the only one.

    Usually a second reduction finds nothing to reduce. But where users' hooks are called, FSDP1 has already given
    parameters their gradients.
    """
    handle = handle_of(unit)
    if not (handle._has_optim_in_backward and any(last_node is node for last_node in nodes_of(unit))):
        _post_backward_hook(unit, handle, *gradients)


def reduce_waiting(root: FullyShardedDataParallel) -> None:
    """Queue the reduction of units with accumulated gradients, which the running backward pass may not visit."""
    state: Any = root
    waiting = [unit for unit in units_in_passes(root) if _has_waiting(unit)]
    if state._sync_gradients and waiting and _accumulates(root):
        torch.autograd.Variable._execution_engine.queue_callback(partial(_reduce_unvisited, waiting))


def _accumulates(root: FullyShardedDataParallel) -> bool:
    """Whether the backward pass that runs adds to gradients of flat parameters: ``torch.autograd.grad`` does not."""
    return any(torch._C._will_engine_execute_node(node) for unit in units_in_passes(root) for node in nodes_of(unit))


def nodes_of(unit: FullyShardedDataParallel) -> Sequence[Any]:
    """The autograd nodes that add to the gradient of a unit's flat parameter."""
    handle = handle_of(unit)
    hooks: tuple[Any, ...] = () if handle is None else getattr(handle.flat_param, "_post_backward_hook_state", ())
    if len(hooks) != 2:
        return ()
    return tuple(hooks[1].nodes) if isinstance(hooks[1], _LastOfNodes) else hooks[:1]


def _has_waiting(unit: FullyShardedDataParallel) -> bool:
    """Whether a unit has gradients that no backward pass has reduced, and ``zero_grad()`` has not cleared.

    The answer is the same on all ranks.
    """
    handle = handle_of(unit)
    flat = handle.flat_param
    if not getattr(flat, "_post_backward_called", False):
        return False
    if handle._training_state != HandleTrainingState.BACKWARD_POST:  # the pass that runs has not visited it
        handle._reset_flat_param_grad_info_if_needed()
        flat._post_backward_called = flat.grad is not None
    return bool(flat._post_backward_called)


def _is_reduced(handle: Any) -> bool:
    """Whether a backward pass has reduced the gradient of a unit for which :func:`_has_waiting` was true.

    FSDP1's training state does not always tell: a call of the unit inside the pass changes it.
    """
    flat = handle.flat_param
    if not flat.requires_grad:  # frozen since then: the pass itself reduces nothing
        return flat.grad is None
    if handle._training_state == HandleTrainingState.BACKWARD_POST:
        return True
    if not handle.uses_sharded_strategy:  # a reduced gradient looks the same, and may be averaged again
        return False
    return bool(flat.grad is None or flat.grad.shape != flat._unpadded_unsharded_size)


def _reduce_unvisited(units: Sequence[FullyShardedDataParallel]) -> None:
    for unit in units:
        handle: Any = handle_of(unit)
        if _is_reduced(handle):
            continue
        unit.training_state = TrainingState.FORWARD_BACKWARD
        handle._training_state = HandleTrainingState.BACKWARD_PRE
        handle.prepare_gradient_for_backward()
        _reduce(unit, handle)


def suspend_forward(root: FullyShardedDataParallel, loss: Tensor | None, pending: list[Pending]) -> None:
    """End the root's part of a running forward pass, as if the root had returned ``loss``.

    Args:
        root: The root.
        loss: The tensor from which a backward pass starts, if one follows.
        pending: The units that wait for a backward pass; those that wait since the last call are appended.
    """
    for unit in units_of(root):
        handle = handle_of(unit)
        handle._reset_flat_param_grad_info_if_needed()
        _forget_unfit_hooks(handle.flat_param)
        hooks: tuple[Any, ...] = getattr(handle.flat_param, "_post_backward_hook_state", ())
        node = hooks[0] if len(hooks) == 2 else None
        is_pending = any(entry.unit is unit and entry.node is node for entry in pending)
        if not is_pending and (node is not None or handle._needs_pre_backward_unshard):
            pending.append(Pending(unit=unit, node=node))
    if root.training_state == TrainingState.FORWARD_BACKWARD:
        leave_gradients(root)
        _before_end_of_backward(root, loss)
        _post_forward(root, handle_of(root), _post_forward_reshard, root, None, loss)


def begin_inside(
    root: FullyShardedDataParallel, suspend: Callable[[Tensor | None], None], resume: Callable[[], None]
) -> None:
    """Begin a backward pass of the root inside its forward pass, when the root has no output yet for hooks.

    Args:
        root: The root.
        suspend: Suspends the forward pass.
        resume: Lets the forward pass go on. Called at the end of the backward pass, after FSDP1's own end.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    with torch.enable_grad():  # a backward pass disables gradients
        suspend(None)
    expect_backward(root)
    reduce_waiting(root)
    queue(partial(finish_frozen, root))
    _pre_backward_hook(root, root.module, handle_of(root), None)

    def go_on() -> None:
        with torch.enable_grad():
            resume()

    queue(go_on)


def expect_backward(root: FullyShardedDataParallel) -> None:
    """Let a root whose forward pass is suspended begin a backward pass."""
    handle = handle_of(root)
    if handle is not None:
        handle._ran_pre_backward_hook = False
        handle._needs_pre_backward_unshard = True


def at_end_of_backward(root: FullyShardedDataParallel, output: Any, call: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass of the root that begins at what it has returned."""

    def queue(_: Tensor) -> None:
        if not is_interrupted(root) and _accumulates(root):
            torch.autograd.Variable._execution_engine.queue_callback(call)

    for tensor in tensors_in(output) if torch.is_grad_enabled() else ():
        if tensor.requires_grad:
            tensor.register_hook(queue)


def follow_frozen(unit: FullyShardedDataParallel) -> None:
    """Let a backward pass add no gradient to a unit that was frozen after its forward pass, as in plain torch."""
    handle = handle_of(unit)
    params = None if handle is None else handle.flat_param._params
    if params is not None:
        with without_torch_function():
            handle.flat_param.requires_grad = any(map(_is_trained, params))
        if hasattr(handle.flat_param, "_post_backward_hook_state"):
            _forget_unfit_hooks(handle.flat_param)


def _is_between_calls(handle: Any) -> bool:
    """Whether a unit is not being called: it is freed, or stays gathered for a backward pass."""
    return bool(handle.needs_unshard() or handle._skipped_use_sharded_views)


def _forget_unfit_hooks(flat: Any) -> None:
    """Forget FSDP1's hooks of a flat parameter that was frozen or unfrozen since they were placed.

    FSDP1 keeps a node and its hook for a trained one, and a hook alone for a frozen one.
    """
    if len(getattr(flat, "_post_backward_hook_state", ())) != 1 + flat.requires_grad:
        _forget_hooks(flat)


def watch_hooks(loss: Tensor) -> Callable[[], None]:
    """Note which hooks a tensor has.

    Returns:
        A function that removes the hooks that were added since. FSDP1's, on the root's output, would begin a backward
        pass of the root each time that a retained graph is used again.
    """
    keys_before, loss_ref = set(loss._backward_hooks or ()), weakref.ref(loss)

    def remove_added() -> None:
        tensor = loss_ref()
        hooks = {} if tensor is None else tensor._backward_hooks or {}
        for key in set(hooks) - keys_before:
            del hooks[key]

    return remove_added


def finish_frozen(root: FullyShardedDataParallel) -> None:
    """Do what FSDP1's end of a backward pass leaves out for units that were frozen, or that the pass did not visit.

    Args:
        root: The root. FSDP1's own end of the backward pass is still to come.
    """
    state: Any = root
    units = units_in_passes(root)
    flat_params = [handle_of(unit).flat_param for unit in units]
    for flat in flat_params:
        _forget_unfit_hooks(flat)
        is_set_aside = hasattr(flat, "_saved_grad_shard")  # an earlier gradient
        if is_set_aside and flat._params is None and flat.requires_grad and state._sync_gradients:
            # let FSDP1 take the unit for visited: only then it gives a flat parameter that optimizers hold its gradient
            # back; original parameters hold theirs themselves
            flat._post_backward_called = True
    if gathered_frozen := [
        unit for unit in units if not (is_sharded(unit) or handle_of(unit).flat_param.requires_grad)
    ]:
        # without sharding they always have the memory of their shards, so FSDP1 takes them for resharded and leaves
        # modules without parameters: optimizers would hold others than those that the next call computes with
        torch.autograd.Variable._execution_engine.queue_callback(partial(_reshard_all, gathered_frozen))
    if saved := [flat for flat in flat_params if not flat.requires_grad and hasattr(flat, "_saved_grad_shard")]:
        # after FSDP1's end has freed the parameters: a gradient must have the size of its parameter, the shard's
        torch.autograd.Variable._execution_engine.queue_callback(partial(_restore_saved_gradients, saved))


def _reshard_all(units: Iterable[FullyShardedDataParallel]) -> None:
    for unit in units:
        reshard(unit)


def _restore_saved_gradients(flat_params: Iterable[Any]) -> None:
    """Give frozen flat parameters back the reduced gradients that FSDP1 has set aside for a backward pass.

    FSDP1 does so for trained ones only. A gradient that stays aside would not be cleared by ``zero_grad()``, and the
    first backward pass after unfreezing would add to it.
    """
    for flat in flat_params:
        if not flat.requires_grad and flat.grad is None and hasattr(flat, "_saved_grad_shard"):
            flat.grad = getattr(flat, "_cpu_grad", flat._saved_grad_shard)  # offloaded, it has a copy on the host
            del flat._saved_grad_shard
            flat._post_backward_called = False


def _forget_hooks(flat: Any) -> None:
    if hasattr(flat, "_post_backward_hook_state"):
        flat._post_backward_hook_state[-1].remove()
        del flat._post_backward_hook_state


def resume_forward(root: FullyShardedDataParallel, pending: list[Pending]) -> None:
    """Begin the root's part of a forward pass again, with the parameters' current values.

    Args:
        root: The root.
        pending: The units that another backward pass may still visit.
    """
    for unit in units_of(root):
        reshard(unit)  # a unit that was prefetched for a backward pass but not used would look modified
        _restore_saved_gradients([handle_of(unit).flat_param])
    if handle_of(root) is not None:
        _forget_hooks(handle_of(root).flat_param)
    _root_pre_forward(root, root, (), {})
    _pre_forward(root, handle_of(root), _pre_forward_unshard, root, (), {})
    for entry in pending:
        if entry.unit is not root:
            handle_of(entry.unit)._needs_pre_backward_unshard = True
        if entry.node is not None and entry.hook is None:
            entry.hook = entry.node.register_hook(partial(_reduce_once, entry.unit, entry.node))


def leave_gradients(root: FullyShardedDataParallel) -> None:
    """Keep the end of a forward pass from restoring gradients that ``zero_grad()`` has cleared during it."""
    if handle_of(root) is not None:
        handle_of(root)._training_state = HandleTrainingState.IDLE


@contextmanager
def no_reduction(root: FullyShardedDataParallel) -> Iterator[None]:
    """Like ``root.no_sync()``, which does not allow a backward pass inside the root's forward pass."""
    units: list[Any] = FullyShardedDataParallel.fsdp_modules(root)
    settings = [unit._sync_gradients for unit in units]
    for unit in units:
        unit._sync_gradients = False
    try:
        yield
    finally:
        for unit, setting in zip(units, settings, strict=True):
            unit._sync_gradients = setting


def forget_pending(root: FullyShardedDataParallel, pending: list[Pending]) -> None:
    """Stop all units from waiting for a backward pass.

    The next forward pass would reuse the nodes that they wait at, but under mixed precision it has other nodes.
    """
    for unit in units_of(root):
        _forget_hooks(handle_of(unit).flat_param)
        handle_of(unit)._needs_pre_backward_unshard = False
    for entry in pending:
        if entry.hook is not None:
            entry.hook.remove()


def follow_requires_grad(root: FullyShardedDataParallel) -> bool:
    """Let flat parameters require gradients if any of their parameters does.

    Returns:
        Whether the root must be gathered again: only then do views of its flat parameter follow that.
    """
    required_gradient = handle_of(root) is not None and handle_of(root).flat_param.requires_grad
    for unit in units_of(root):
        handle_of(unit)._reset_flat_param_grad_info_if_needed()
        _forget_unfit_hooks(handle_of(unit).flat_param)
    if handle_of(root) is None:
        return False
    flat = handle_of(root).flat_param
    views = [getattr(param_info.module, param_info.param_name) for param_info in flat._param_infos]
    # a detached view of a frozen parameter stands for this one
    views = [vars(view).get("_fsdp_trained", view) for view in views]
    # views that were made of a frozen tensor may require a gradient by now, but FSDP1 has registered no hook for it
    views_require = required_gradient and any(map(needs_gradient, views))
    return views_require != bool(flat.requires_grad)


def abandon_forward(root: FullyShardedDataParallel) -> None:
    """Make units idle after an exception in a forward pass, and leave gradients unchanged."""
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        unit.training_state = TrainingState.IDLE
        if handle_of(unit) is not None:
            handle_of(unit)._training_state = HandleTrainingState.IDLE


def is_interrupted(root: FullyShardedDataParallel) -> bool:
    """Whether a backward pass has begun and not ended."""
    state: Any = root
    return bool(getattr(state, "_post_backward_callback_queued", False))


def reset(root: FullyShardedDataParallel) -> None:
    """Make every unit idle and sharded after an exception in any pass. Gradients must have been dropped."""
    state: Any = root
    state._post_backward_callback_queued = False
    state._exec_order_data.next_iter()
    units: list[Any] = FullyShardedDataParallel.fsdp_modules(root)
    for unit in units:
        unit.training_state = TrainingState.IDLE
        unit._sync_gradients = True
        handle = handle_of(unit)
        if handle is None:
            continue
        flat = handle.flat_param
        _forget_hooks(flat)
        flat._post_backward_called = False
        handle._ran_pre_backward_hook = False
        handle._needs_pre_backward_unshard = False
        handle._post_forward_index = None
        handle._training_state = HandleTrainingState.IDLE
        reshard(unit)
        with torch.no_grad():
            handle._reset_flat_param_grad_info_if_needed()
