"""What users write to gathered parameters, in a step or in a ``forward()``, is kept.

FSDP1 frees the gathered flat parameter in ``_use_sharded_flat_param``, and with it all that was written to the views
which modules hold: it gathers again what is in the shards. In plain torch such writes stay, and normalisations of
weights, clamps and moving averages rely on that. So each view is followed from the moment on at which
``_use_unsharded_views`` has put it into a module, by core's :class:`~fsdp_core.sharding.GatheredValue`; and before the
flat parameter is freed, this rank's part of what was written is copied to its shard. Ranks compare later what they have
written, since each keeps a part of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._common_utils import HandleTrainingState

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.sharding import (
    GatheredValue,
    WrittenValues,
    count_piece_writes,
    outside_of_compilation,
    times_written,
    unguard_parameters,
    without_torch_function,
)
from fsdp_core.state import gathered_modules
from fsdp_cuda_native.flattened_parts import refuse_use_while_freed
from fsdp_cuda_native.torch_private.flat_parameters.frozen import FrozenViews
from fsdp_cuda_native.torch_private.flat_parameters.resharding import write_back
from fsdp_cuda_native.torch_private.flat_parameters.units import (
    ParameterView,
    handle_of,
    is_trained,
    lacks_views,
    tied_members,
)

__all__ = ["GatheredWrites"]


class GatheredWrites:
    """Keeps what users write to a unit's gathered parameters: it is copied to the shard before they are freed.

    Args:
        unit: The unit.
        names: The user's names of modules.
        values: Receives what was written, for a comparison between ranks.

    Attributes:
        frozen_views: Lets the gathered parameters follow what users freeze and unfreeze.
    """

    def __init__(self, unit: FSDP, names: Mapping[nn.Module, str], values: WrittenValues) -> None:
        self._unit_ref = weakref.ref(unit)
        self._handle = handle_of(unit)
        self._values = values
        self._views: list[ParameterView] = []
        self._last_piece_writes = 0
        self.frozen_views = FrozenViews(unit, self._views)  # the list is filled below
        flat = self._handle.flat_param
        for index, info in enumerate(flat._param_infos):
            name = f"{names[info.module]}.{info.param_name}".removeprefix(".")
            if flat._params is None:
                value = GatheredValue(name, is_trained=partial(getattr, flat, "requires_grad"))
            else:
                value = GatheredValue(
                    name,
                    is_trained=partial(getattr, flat._params[index], "requires_grad"),
                    train=partial(_set_requires_grad, weakref.ref(self.frozen_views), index),
                )
                value.shard = partial(_refuse_hook, name)  # core asks for it where a user registers a hook
            self._views.append(ParameterView(value, info.module, info.param_name))
        self._tied_views = list(self._views_of_tied(unit))
        self._handle.user_names = [view.value.name for view in self._views]
        self_ref = weakref.ref(self)
        handle_ref = weakref.ref(self._handle)
        unit.register_forward_pre_hook(partial(_check_own, self_ref), prepend=True)
        self._handle._use_unsharded_views = partial(_use_unsharded_views, self_ref, handle_ref)
        self._handle._use_sharded_flat_param = partial(_use_sharded_flat_param, self_ref, handle_ref)

    def _views_of_tied(self, unit: FSDP) -> Iterator[tuple[ParameterView, ParameterView]]:
        """For each further name of a tied parameter, the view there, and that under its first name."""
        first_views = {(view.module, view.attribute): view for view in self._views}
        for module, attribute, first_module, first_attribute in tied_members(unit):
            first = first_views[first_module, first_attribute]
            value = GatheredValue(f"{attribute} of {type(module).__name__}, tied to {first.value.name}")
            yield ParameterView(value, module, attribute), first

    def is_of(self, unit: FSDP) -> bool:
        """Whether these are the writes to a unit's parameters."""
        return self._unit_ref() is unit

    def check_own(self) -> None:
        """Refuse a call with other parameters than the unit's own."""
        params = self._handle.flat_param._params  # modules may hold these, or the views
        for index, view in enumerate(self._views):
            current = view.module._parameters.get(view.attribute)
            if params is None or current is not params[index]:
                view.value.check_own(current)
        for tied, first in self._tied_views:
            allowed = first.module._parameters.get(first.attribute)
            tied.value.check_own(tied.module._parameters.get(tied.attribute), allowed)

    def write_pieces_back(self) -> None:
        """Copy to the shard what was assigned to ``parameter.data``: FSDP1 is about to point it at the shard again."""
        writes, unit = count_piece_writes(), self._unit_ref()
        if writes != self._last_piece_writes and unit is not None:
            self._last_piece_writes = writes
            write_back(unit)

    def follow(self) -> None:
        """Notice writes to the views that modules hold now instead of parameters; detach views of frozen parameters."""
        flat = self._handle.flat_param
        times: int | None = None  # torch counts writes for the memory that all views share: read once
        for view in self._views:
            if view.attribute in view.module._parameters:
                # FSDP1 sets an attribute too, which would hide what functional_call() puts into _parameters
                view.module.__dict__.pop(view.attribute, None)
            tensor = view.find()
            # any tensor but a parameter: the first two tests pass for nearly all, and isinstance() is slow
            if (
                type(tensor) is Tensor
                or view.is_followed(tensor)
                or (tensor is not None and not isinstance(tensor, nn.Parameter))
            ):
                times = times_written(tensor) if times is None else times
                view.value.follow(tensor, times)
        for info in flat._shared_param_infos:
            if info.param_name in info.module._parameters:
                info.module.__dict__.pop(info.param_name, None)
        with without_torch_function():
            some_frozen = flat._params is not None and not all(map(is_trained, flat._params))
        if some_frozen:
            self.frozen_views.detach_frozen()

    def note_writes_to_flat(self) -> None:
        """Notice what was written to the ``data`` of a gathered flat parameter that optimizers hold.

        torch counts no writes to ``data``. That the ``data`` of a view was read is noted, but the flat parameter itself
        is none: so its values are compared with the shard's.
        """
        flat = self._handle.flat_param
        if flat._params is not None or not self._handle.uses_sharded_strategy:
            return
        part = _gathered_part(self._handle)
        if part is not None and not torch.equal(part, flat._local_shard.to(part)):  # an offloaded shard is on the host
            for view in self._views:
                view.value.note(has_changed=True)

    def keep(self, *, trusts_count: bool) -> None:
        """Copy to the shard what was written to gathered parameters until now.

        Args:
            trusts_count: Whether torch's count of writes is one of the user's writes to views. After an optimizer's
                step over the flat parameter it is not: the views have the same count.
        """
        written_views = list(self._find_written(trusts_count=trusts_count))
        if not written_views:
            return
        flat = self._handle.flat_param
        # without sharding, and in the shard's dtype, the views have the memory of the shard
        has_own_memory = self._handle.uses_sharded_strategy or flat.dtype != flat._local_shard.dtype
        part = _gathered_part(self._handle) if has_own_memory else flat._local_shard
        if part is None:  # FSDP1 has freed the memory of the views
            return
        for value, tensor, is_certain in written_views:
            value.mark_kept(tensor)
            value.keep(part, flat._local_shard, tensor, self._values, is_counted=is_certain)

    def _find_written(self, *, trusts_count: bool) -> Iterator[tuple[GatheredValue, Tensor, bool]]:
        """Each value that was written to, or whose ``data`` was read; its view; and whether a write is certain."""
        times: int | None = None  # torch's count, which is the same for all views
        for view in self._views:
            value = view.value
            may_be_counted = trusts_count and (times is None or value.is_counted(times))
            if not value.is_noted and not may_be_counted:  # most views in most passes
                continue
            tensor = view.find()
            if isinstance(tensor, Tensor) and view.is_followed(tensor):
                times = times_written(tensor) if times is None else times
                is_certain = value.has_changed or (trusts_count and value.is_counted(times))
                if is_certain or value.is_noted:
                    yield value, tensor, is_certain

    def refuse_use_of_views(self) -> None:
        """Refuse to compute with the views that modules go on holding once the unit is freed."""
        for view in self._views:
            tensor = view.module.__dict__.get(view.attribute)
            if isinstance(tensor, Tensor):
                refuse_use_while_freed(tensor, view.value.name)


def _refuse_hook(name: str) -> NoReturn:
    raise UnsupportedCapabilityError(
        f"a hook on the gradient of {name!r} while it is gathered: FSDP1 reduces it to the shard without a call of the "
        "hook.\n"
        "Write parameter.register_post_accumulate_grad_hook(hook) before training: in on_fit_start(), under Fabric "
        "after fabric.setup(); or use strategy='fsdp2'."
    )


def _set_requires_grad(views_ref: weakref.ref[FrozenViews], index: int, requires_grad: bool) -> None:
    if (frozen_views := views_ref()) is not None:
        frozen_views.set_requires_grad(index, requires_grad=requires_grad)


@outside_of_compilation
def _check_own(writes_ref: weakref.ref[GatheredWrites], unit: FSDP, args: Any) -> None:
    if (writes := writes_ref()) is not None and unit not in gathered_modules:
        writes.check_own()
        writes.frozen_views.follow_requires_grad()


@outside_of_compilation
def _use_unsharded_views(
    writes_ref: weakref.ref[GatheredWrites], handle_ref: weakref.ref[Any], as_params: bool
) -> None:
    """Replaces the handle's method: follows the views that FSDP1 has put into modules."""
    writes, handle = writes_ref(), handle_ref()
    assert handle is not None  # it is the caller
    training_state = handle._training_state
    if training_state == HandleTrainingState.BACKWARD_PRE and lacks_views(handle):  # FSDP1 gathers this unit ahead
        handle._training_state = HandleTrainingState.FORWARD  # in which FSDP1 makes views: those it saved are gone
    GatheredValue.is_data_assignable = True  # FSDP1 assigns in a backward pass, to views that it saved
    try:
        type(handle)._use_unsharded_views(handle, as_params)
    finally:
        GatheredValue.is_data_assignable = False
    handle._training_state = training_state
    if writes is not None and not as_params:
        writes.follow()


@outside_of_compilation
def _use_sharded_flat_param(writes_ref: weakref.ref[GatheredWrites], handle_ref: weakref.ref[Any]) -> None:
    """Replaces the handle's method: keeps what was written before FSDP1 goes back to the shard."""
    writes, handle = writes_ref(), handle_ref()
    assert handle is not None  # it is the caller
    if writes is not None:
        # outside of a forward pass, the count may be that of an optimizer's step over the flat parameter
        writes.keep(trusts_count=handle._training_state == HandleTrainingState.FORWARD)
        writes.write_pieces_back()
    if not handle._use_orig_params:
        unguard_parameters([handle.flat_param])  # it is still guarded after an exception, and FSDP1 assigns to it
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
