"""The parameters of XlaFullyShardedDataParallel's units, and the states that units go through in a step.

torch_xla has no public API for any of this. Tested with torch_xla 2.9.0.

The full parameters that torch_xla has sharded are freed here (``free_originals``), because it was observed to keep
the whole model on every device.

In a manual step, a backward pass runs inside the root's forward pass. It is ended here as torch_xla ends one that
follows a forward pass, and then its hooks are put back on the same autograd nodes. These have the shapes of full
parameters; new nodes would have the shapes of the placeholders, to which torch would silently reduce the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
from torch_xla.distributed.fsdp.xla_flatten_params_wrapper import XlaFlattenParamsWrapper
from torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel import TrainingState

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.sharding import OutsideAttributes, UnitCalls, in_backward
from fsdp_xla.torch_xla_private.devices import compiled

__all__ = [
    "ShardedMember",
    "WrappedUnit",
    "Writes",
    "XlaFullyShardedDataParallel",
    "end_step",
    "follow_freezing",
    "follow_frozen_shards",
    "follow_requires_grad",
    "follow_written_shards",
    "free_gathered",
    "free_originals",
    "is_shard",
    "no_reduction",
    "parameter_of",
    "reduce_pending",
    "reset",
    "resume_forward",
    "set_unreduced_gradients",
    "sharded_members",
    "shards_of",
    "show_shards",
    "suspend_forward",
    "tied_members",
    "units_of",
    "unreduced_gradients",
    "waits_for_backward",
    "watch_calls",
]


class WrappedUnit(OutsideAttributes, XlaFullyShardedDataParallel):  # type: ignore[misc]
    """A unit, or the root."""

    def _rebuild_full_params(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to gather for a graph that would outlive what is gathered.

        Raises:
            UnsupportedCapabilityError: A backward pass outside of the root's forward pass has create_graph=True.
        """
        is_recorded = torch.is_grad_enabled() and in_backward() and self.training_state != TrainingState.FORWARD
        root = self.__dict__[_ROOT]() if is_recorded else None
        if root is not None:
            if root.training_state != TrainingState.FORWARD:
                raise UnsupportedCapabilityError(
                    "create_graph=True records a graph that holds parameters, which torch_xla's "
                    "XlaFullyShardedDataParallel frees outside of a training_step.\n"
                    "Use strategy='xla_fsdp_spmd'; or the Trainer, and call the model and torch.autograd.grad() in "
                    "training_step()."
                )
            self.__dict__[_KEPT_FOR_GRAPH] = True
        super()._rebuild_full_params(*args, **kwargs)

    def _free_full_params(self, params: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        """Free gathered parameters, unless a backward pass still needs them.

        A graph that ``create_graph=True`` has recorded holds them, and may run before torch_xla gathers again: the
        order depends on the threads that have recorded it.

        A parameter that was frozen in one call of a forward pass and trained in a later one is needed by the backward
        pass of both. torch_xla would free it when the later call has its gradient.
        """
        if _KEPT_FOR_GRAPH in self.__dict__:
            return
        full_params: Any = self.full_params
        has_its_gradient = params is not None and any(params[0] is full for full in full_params)
        if has_its_gradient and _FREEZING_CHANGED in self.__dict__:
            return
        super()._free_full_params(params, *args, **kwargs)

    def _post_backward_hook(self, param: Any, *unused: Any) -> None:
        """Refuse to reduce the gradient of a parameter that was frozen after the forward pass.

        Raises:
            UnsupportedCapabilityError: The parameter is frozen.
        """
        if not (param.requires_grad and param._sharded_param.requires_grad):
            raise UnsupportedCapabilityError(
                "a parameter was frozen between a forward pass and its backward pass, and torch_xla's "
                "XlaFullyShardedDataParallel would train it.\n"
                "Freeze it before the forward pass, or after the backward pass; or use strategy='xla_fsdp_spmd'."
            )
        super()._post_backward_hook(param, *unused)

    def assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """Raise an error about the user's step where torch_xla's assertion would fail.

        Raises:
            UnsupportedCapabilityError: The unit is in another state.
        """
        if self.training_state not in (state if isinstance(state, list) else [state]):
            raise UnsupportedCapabilityError(
                "a step runs a backward pass where torch_xla's XlaFullyShardedDataParallel expects none "
                f"({self.training_state}): inside a forward pass, inside another backward pass, or through parts of "
                "what was called.\n"
                "Use strategy='xla_fsdp_spmd', under which a step may run any. Or, in a training_step, set "
                "self.automatic_optimization = False, and write self.manual_backward(loss) for each backward pass that "
                "adds to gradients."
            )


class ShardedMember(NamedTuple):
    """A user's parameter and the location of this rank's elements of it.

    Attributes:
        owner: The user's module that holds it.
        attribute: Its name there.
        shape: Its original shape.
        shard: The sharded parameter that an optimizer holds.
        start: The index of its first element on this rank, in C order.
        offset: The offset of that element in the flattened shard.
        length: The number of its elements on this rank.
    """

    owner: nn.Module
    attribute: str
    shape: tuple[int, ...]
    shard: nn.Parameter
    start: int
    offset: int
    length: int


def units_of(root: nn.Module) -> Iterator[XlaFullyShardedDataParallel]:
    """The root and the units in it."""
    for module in root.modules():
        if isinstance(module, XlaFullyShardedDataParallel):
            yield module


def free_gathered(root: nn.Module) -> None:
    """Free parameters that units have gathered and kept."""
    for unit in units_of(root):
        unit.__dict__.pop(_FREEZING_CHANGED, None)
        unit.__dict__.pop(_KEPT_FOR_GRAPH, None)
        # has_full_params becomes false when torch_xla frees the first parameter, so all are looked at.
        if unit.has_full_params or any(map(_is_gathered, unit.full_params)):
            unit._free_full_params()


_is_gathered = attrgetter("_has_full_param")


def reset(root: nn.Module) -> None:
    """Reset units to the beginning of a step, after an exception within one.

    The hooks of a forward pass would keep the full parameters, and all that the pass recorded, alive forever.
    """
    for unit in units_of(root):
        for parameter in unit.full_params:
            parameter.grad = None
    end_step(root)


def end_step(root: nn.Module) -> None:
    """Reset units to the beginning of a step, when no backward pass through the recorded graph follows."""
    for unit in units_of(root):
        for parameter in unit.full_params:
            hook = parameter.__dict__.pop("_shard_bwd_hook", None)
            if hook is not None:
                hook[1].remove()
        unit.training_state = TrainingState.IDLE
        unit._pre_backward_hook_has_run = unit._post_backward_callback_queued = False
        unit.__dict__.pop(_FREEZING_CHANGED, None)
        unit.__dict__.pop(_KEPT_FOR_GRAPH, None)
        unit._free_full_params(apply_opt_barrier=False)
        if unit._output_pre_backward_hook_registered is not None:
            unit._output_pre_backward_hook_registered.clear()
            unit._clear_backward_opt_barrier_lists()


class Writes:
    """Detects writes to parameters while they are gathered, by their XLA tensor ids.

    Each write creates a new id, so that detection computes nothing and waits for nothing. The user's ``parameters()``
    are always shards. Writes to them persist, but a running step continues with the values gathered before; a manual
    step gathers again after each backward pass and each optimizer step.

    Args:
        root: The root.
        is_manual: Returns whether the step is manual.
    """

    is_agreed_on = False  # exchanging names would break steps in which another rank waits for a value

    def __init__(self, root: nn.Module, is_manual: Callable[[], bool]) -> None:
        self._units, self._is_manual = list(units_of(root)), is_manual
        self._written_name: str | None = None
        for unit in self._units:
            unit._rebuild_full_params = partial(_gather_and_note_ids, unit)
        self._hooks = [  # compared after a unit's own forward pass, since the unit then frees its parameters
            unit.module.register_forward_hook(partial(self._compare_ids, unit)) for unit in self._units
        ]

    def renew(self) -> None:
        """Nothing to do: after an optimizer step, parameters are gathered again."""

    def written(self) -> str | None:
        """The name of the first parameter that was written since it was gathered."""
        for unit in self._units:
            self._compare_ids(unit)
        return self._written_name

    def stop(self) -> None:
        """Look no longer."""
        for hook in self._hooks:
            hook.remove()

    def _compare_ids(self, unit: Any, *_: Any) -> None:
        if not unit.has_full_params:
            return
        for attribute, gathered_ids in unit.__dict__.get(_GATHERED, {}).items():
            is_gathered_again = attribute == "sharded_params" and self._is_manual()
            if self._written_name or is_gathered_again:
                continue
            ids = _tensor_ids(getattr(unit, attribute))
            infos = unit.full_param_infos
            for tensor_id, gathered_id, (module_name, _, name) in zip(ids, gathered_ids, infos, strict=True):
                if tensor_id != gathered_id:
                    self._written_name = f"{module_name}.{name}".removeprefix(".")
                    break


#: A unit's attribute with the tensor ids that its parameters had when it gathered them, by name of their list.
_GATHERED = "_fsdp_xla_gathered"

#: A unit's attribute with a weak reference to the root.
_ROOT = "_fsdp_xla_root"

#: The mark of a unit that stays gathered until the end of the next backward pass that adds to gradients.
_KEPT_FOR_GRAPH = "_fsdp_xla_recorded"


def watch_calls(root: nn.Module) -> None:
    """Register the hooks of each unit's calls, around what torch_xla does in its forward pass."""
    for unit in units_of(root):
        unit_ref = weakref.ref(unit)

        def register_backward_hooks(tensors: list[Tensor], unit_ref: weakref.ref[Any] = unit_ref) -> None:
            unit = unit_ref()
            if unit is not None:
                unit._register_pre_backward_hooks(tensors)

        calls = UnitCalls(register_backward_hooks)
        if unit is not root:  # within a step, parameters of units may be frozen and unfrozen
            unit.register_forward_pre_hook(lambda unit, _: follow_freezing(unit), prepend=True)
        unit.register_forward_pre_hook(calls.enter, with_kwargs=True, prepend=True)
        unit.module.register_forward_pre_hook(calls.begin, with_kwargs=True, prepend=True)
        unit.register_forward_hook(calls.leave, always_call=True)


def _gather_and_note_ids(unit: Any, *args: Any, **kwargs: Any) -> None:
    was_gathered = unit.has_full_params
    type(unit)._rebuild_full_params(unit, *args, **kwargs)
    if not was_gathered:
        attributes = ("full_params", "sharded_params")
        unit.__dict__[_GATHERED] = {attribute: _tensor_ids(getattr(unit, attribute)) for attribute in attributes}


def _tensor_ids(tensors: Iterable[Tensor]) -> list[int]:
    """XLA's ids of tensors. Each write to a tensor changes its id."""
    return list(map(compiled._xla_get_tensor_id, tensors))


@contextmanager
def no_reduction(root: nn.Module) -> Iterator[None]:
    """Like ``root.no_sync()``, which does not allow a backward pass inside the root's forward pass."""
    units = list(units_of(root))
    previous_sync = [unit._require_backward_grad_sync for unit in units]
    for unit in units:
        unit._require_backward_grad_sync = False
    try:
        yield
    finally:
        for unit, was_synced in zip(units, previous_sync, strict=True):
            unit._require_backward_grad_sync = was_synced


def suspend_forward(root: Any) -> None:
    """Let a backward pass begin inside the root's forward pass, as if the root had returned its loss."""
    root.training_state = TrainingState.BACKWARD_PRE
    root._pre_backward_hook_has_run = True


def resume_forward(root: Any) -> None:
    """Continue the root's forward pass, with current values, after a backward pass or a step inside it.

    Args:
        root: The root. Another backward pass may visit any of its units through the graph recorded so far.
    """
    units = list(units_of(root))
    if root._pre_backward_hook_has_run:
        pending_hooks = [
            (u, p, p._shard_bwd_hook[0]) for u in units for p in u.full_params if hasattr(p, "_shard_bwd_hook")
        ]
        _end_backward(root, units)
        for unit, parameter, node in pending_hooks:  # on the same node: a new one would have the placeholder's shape
            hook = node.register_hook(partial(unit._post_backward_hook, parameter))
            parameter._shard_bwd_hook = (node, hook)
    for unit in units:
        if unit is root or not unit.reshard_after_forward:  # the other units gather when they are called
            unit.__dict__.pop(_KEPT_FOR_GRAPH, None)
            unit._free_full_params(apply_opt_barrier=unit.optimization_barrier_in_forward)
            unit._rebuild_full_params(apply_opt_barrier=unit.optimization_barrier_in_forward)
    root._register_post_backward_hooks()
    _show_gathered(root)
    root.training_state = TrainingState.FORWARD


def follow_written_shards(root: Any) -> None:
    """Continue the root's forward pass with what was written to its shards since it gathered them."""
    if not root.has_full_params or _GATHERED not in root.__dict__:
        return
    if root.__dict__[_GATHERED]["sharded_params"] != _tensor_ids(root.sharded_params):
        resume_forward(root)


def _end_backward(root: Any, units: list[Any]) -> None:
    for unit in units:
        unit.reduce_scatter_op.flush()  # does not wait for hooks that have run before this backward pass
        if unit._pre_backward_hook_has_run:
            # torch_xla asserts these states below, and a pass that has not reached all parameters of the unit leaves
            # it in another one.
            is_trained = any(map(_is_trained, unit.full_params)) and any(map(_is_trained, unit.parameters()))
            unit.training_state = TrainingState.BACKWARD_POST if is_trained else TrainingState.BACKWARD_PRE
    root._wait_for_post_backward()


def reduce_pending(root: Any) -> None:
    """Reduce gradients of earlier micro-batches too if the last one did not use their parameters.

    torch_xla reduces a gradient only when the backward pass of the last micro-batch reaches its parameter.

    Args:
        root: The root. From now on, each of its backward passes ends with this reduction.
    """
    end_backward = root._wait_for_post_backward
    for unit in units_of(root):
        unit.__dict__[_ROOT] = weakref.ref(root)

    def reduce_then_end() -> None:
        if _end_without_gradients(root):
            return
        for unit in units_of(root):
            for parameter in unit.full_params:
                if parameter.grad is not None and unit._require_backward_grad_sync:
                    state, unit.training_state = unit.training_state, TrainingState.BACKWARD_POST
                    unit._post_backward_hooks_to_call += 1  # the hook decrements it
                    unit._post_backward_hook(parameter)
                    unit.reduce_scatter_op.flush()
                    unit.training_state = state
        end_backward()
        for unit in units_of(root):
            if unit.__dict__.pop(_KEPT_FOR_GRAPH, False):
                unit._free_full_params()

    root._wait_for_post_backward = reduce_then_end


def _end_without_gradients(root: Any) -> bool:
    """End the backward pass here if it has added to no gradient, such as one of ``torch.autograd.grad``.

    torch_xla's own end would assert that the pass has reached the parameters of all units that it visited, and would
    forget the nodes at which it reduces their gradients, which the next pass through the same graph needs.

    Returns:
        Whether the pass was ended.
    """
    units = list(units_of(root))
    has_gradients = any(parameter.grad is not None for unit in units for parameter in unit.full_params)
    if has_gradients or any(unit.training_state == TrainingState.BACKWARD_POST for unit in units):
        return False
    for unit in units:
        if unit._pre_backward_hook_has_run and unit.reshard_after_forward:
            unit._free_full_params(apply_opt_barrier=unit.optimization_barrier_in_backward)
        unit.training_state, unit._pre_backward_hook_has_run = TrainingState.IDLE, False
        unit._clear_backward_opt_barrier_lists()
    root._post_backward_callback_queued = False
    root._output_pre_backward_hook_registered.clear()
    return True


def waits_for_backward(root: Any) -> bool:
    """Whether the root was called, and no backward pass through what it has returned has ended since."""
    return bool(root._output_pre_backward_hook_registered)


def _show_gathered(root: Any) -> None:
    """Update modules' views of a flattened root's parameters."""
    if root.module.is_flattened:
        root.module._unflatten_params_as_views()


def follow_frozen_shards(root: Any) -> None:
    """Copy ``requires_grad`` from the root's shards to its gathered parameters, before a call inside a step."""
    if root.has_full_params and list(map(_is_trained, root.full_params)) != list(map(_is_trained, root.sharded_params)):
        for full, shard in zip(root.full_params, root.sharded_params, strict=True):
            full.requires_grad_(shard.requires_grad)
            shard._was_trained = shard.requires_grad
        root.__dict__[_FREEZING_CHANGED] = True
        root._register_post_backward_hooks()


_is_trained = attrgetter("requires_grad")

#: The mark of a root whose parameters were frozen or unfrozen in a step. Inner units need none: they are gathered
#: again.
_FREEZING_CHANGED = "_fsdp_xla_unfrozen"


def follow_requires_grad(root: Any) -> None:
    """Let full parameters require gradients as their shards do, inside a forward pass of the root."""
    for unit in units_of(root):
        for full, shard in zip(unit.full_params, unit.sharded_params, strict=True):
            full.requires_grad_(shard.requires_grad)
    root._register_post_backward_hooks()
    _show_gathered(root)


def free_originals(unit: Any) -> None:
    """Free the full parameters from which a unit was sharded, which torch_xla 2.9 only hides.

    torch_xla replaces the value of each parameter. The tensor from which the parameter was created keeps the full
    value, as the base of views, so that every device would hold the whole model. Here that value is replaced too. A
    flattened parameter is left alone: the user's parameters are views of it, and ranks on CPU devices were observed to
    deadlock.

    Args:
        unit: The sharded unit. Only parameters that :func:`parameter_of` has created are freed.
    """
    for parameter in unit.full_params:
        source_tensor = parameter.__dict__.pop(_SOURCE_TENSOR, None)
        if source_tensor is not None and not hasattr(parameter, "_param_infos"):
            compiled._replace_xla_tensor(source_tensor, unit._dummy_data_placeholder)


_SOURCE_TENSOR = "_fsdp_xla_made_of"


def parameter_of(tensor: Tensor, requires_grad: bool) -> nn.Parameter:
    """Create a parameter that keeps its source tensor for :func:`free_originals`. The tensor must not be reused."""
    parameter = nn.Parameter(tensor, requires_grad=requires_grad)
    parameter.__dict__[_SOURCE_TENSOR] = tensor
    return parameter


def follow_freezing(root: nn.Module) -> None:
    """Synchronize ``requires_grad`` between full parameters and shards: users may freeze either.

    torch_xla reads it from the full parameters, created with their units, and never checks the shards again.
    """
    for unit in units_of(root):
        trained_before = list(map(_is_trained, unit.full_params))
        for shard, full in zip(unit.sharded_params, unit.full_params, strict=True):
            was_trained = shard.__dict__.get("_was_trained", shard.requires_grad)
            is_trained = shard.requires_grad if shard.requires_grad != was_trained else full.requires_grad
            shard.requires_grad_(is_trained)
            full.requires_grad_(is_trained)
            shard._was_trained = is_trained
        if unit._is_root and trained_before != list(map(_is_trained, unit.full_params)):
            unit.__dict__[_FREEZING_CHANGED] = True


def show_shards(root: nn.Module, module: nn.Module) -> None:
    """Let modules in units have their shards as parameters, which torch_xla registers at units alone.

    Otherwise ``block.down.requires_grad_(False)`` would silently freeze nothing, and ``block.down.parameters()`` be
    empty.

    Args:
        root: The root.
        module: The user's module in it, where the root's shards are registered.
    """
    for unit in units_of(root):
        for shard, (_, owner, attribute) in zip(unit.sharded_params, unit.full_param_infos, strict=True):
            if owner is unit._fsdp_wrapped_module:  # which holds flattened parameters only
                flat = getattr(owner, attribute)
                _refuse_freezing_parts(unit, {user_owner for _, user_owner, _ in flat._param_infos})
            else:
                owner.__dict__.setdefault(_SHARDS, {})[attribute] = shard
        for owner, attribute, first_owner, first_attribute in tied_members(unit):
            if _SHARDS in vars(first_owner):
                owner.__dict__.setdefault(_SHARDS, {})[attribute] = vars(first_owner)[_SHARDS][first_attribute]
    for part in module.modules():
        is_user_module = not isinstance(part, XlaFullyShardedDataParallel | XlaFlattenParamsWrapper)
        if is_user_module and part is not module and any(_SHARDS in vars(inner) for inner in part.modules()):
            part.__dict__["named_parameters"] = _named_parameters.__get__(part)


def _refuse_freezing_parts(unit: Any, owners: set[nn.Module]) -> None:
    """Make ``requires_grad_()`` raise for modules in a unit whose parameters are parts of a flattened one.

    Args:
        unit: The unit.
        owners: The modules whose own parameters were flattened.
    """
    user_module = unit.module.module
    for name, part in user_module.named_modules():
        if part is not user_module and not owners.isdisjoint(part.modules()):
            part.__dict__["requires_grad_"] = partial(_refuse_freezing, name)


def _refuse_freezing(name: str, requires_grad: bool = True) -> NoReturn:
    raise UnsupportedCapabilityError(
        f"requires_grad_() of {name!r} would freeze or unfreeze a part of a flat parameter, which is trained as a "
        "whole or not at all.\n"
        "Leave flatten_parameters out; or let it be a unit of its own, with auto_wrap_policy."
    )


_SHARDS = "_fsdp_xla_shards"


def _named_parameters(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    yielded: set[nn.Parameter] = set()
    for name, parameter in type(module).named_parameters(module, prefix, recurse, remove_duplicate):
        yielded.add(parameter)
        yield name, parameter
    for path, owner in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        for attribute, shard in vars(owner).get(_SHARDS, {}).items():
            if shard not in yielded and attribute not in owner._parameters:  # unless a stand-in replaces the shard
                yielded.add(shard)
                yield f"{path}.{attribute}".removeprefix("."), shard


def shards_of(unit: Any) -> list[Any]:
    """A unit's own sharded parameters, without those of inner units."""
    return list(unit.sharded_params)


def is_shard(parameter: Tensor) -> bool:
    """Whether a tensor is a unit's sharded parameter."""
    return bool(getattr(parameter, "_is_sharded", False))


def sharded_members(unit: XlaFullyShardedDataParallel) -> Iterator[ShardedMember]:
    """Yield the parameters that a unit has sharded, each once, under the first of its names."""
    for shard, (_, owner, attribute) in zip(unit.sharded_params, unit.full_param_infos, strict=True):
        shard_begin = unit.rank * shard.numel()
        if owner is unit._fsdp_wrapped_module:  # which holds flattened parameters only
            yield from _members_of_flattened(getattr(owner, attribute), shard, shard_begin)
            continue
        shape = tuple(shard._orig_size)
        size = torch.Size(shape).numel()
        yield ShardedMember(
            owner=owner,
            attribute=attribute,
            shape=shape,
            shard=shard,
            start=min(shard_begin, size),
            offset=0,
            length=max(0, min(shard.numel(), size - shard_begin)),
        )


def _members_of_flattened(flat: Any, shard: nn.Parameter, shard_begin: int) -> Iterator[ShardedMember]:
    shard_end = shard_begin + shard.numel()
    begin = 0  # of the user's parameter in the flattened one
    infos = zip(flat._param_infos, flat._param_shapes, flat._param_numels, strict=True)
    for (_, owner, attribute), shape, size in infos:
        local_begin = max(shard_begin, begin)
        length = max(0, min(shard_end, begin + size) - local_begin)
        yield ShardedMember(
            owner=owner,
            attribute=attribute,
            shape=tuple(shape),
            shard=shard,
            start=local_begin - begin if length else 0,
            offset=local_begin - shard_begin if length else 0,
            length=length,
        )
        begin += size


def unreduced_gradients(unit: Any) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The gradients that a unit has accumulated without reducing them: module, parameter name, and gradient."""
    for full, (_, owner, attribute) in zip(unit.full_params, unit.full_param_infos, strict=True):
        if full.grad is not None:
            pieces = _split_by_user_parameter(owner, attribute, full.grad)
            for (module, name), piece in zip(_user_parameters(owner, attribute), pieces, strict=True):
                yield module, name, piece


def set_unreduced_gradients(unit: Any, gradients: Mapping[tuple[int, str], Callable[[], Tensor]]) -> None:
    """Restore gradients that :func:`unreduced_gradients` returned. All ranks must call it.

    Args:
        unit: The unit, whose gradients are replaced.
        gradients: Functions that return a gradient, by the id of the parameter's module and the name in that module.
    """
    unit._rebuild_full_params()
    for full, (_, owner, attribute) in zip(unit.full_params, unit.full_param_infos, strict=True):
        full.grad = None
        readers = [gradients.get((id(module), name)) for module, name in _user_parameters(owner, attribute)]
        if any(readers):
            grad = torch.zeros(full.shape, dtype=full.dtype)
            pieces = _split_by_user_parameter(owner, attribute, grad)
            for read_gradient, piece in zip(readers, pieces, strict=True):
                if read_gradient is not None:
                    piece.copy_(read_gradient())
            full.grad = grad.to(full.device)
    unit._free_full_params()


def _user_parameters(owner: Any, attribute: str) -> list[tuple[nn.Module, str]]:
    """Return the user's parameters in a full parameter, as modules and names: several if it is a flattened one."""
    flat = getattr(owner, attribute)
    return [(module, name) for _, module, name in getattr(flat, "_param_infos", ())] or [(owner, attribute)]


def _split_by_user_parameter(owner: Any, attribute: str, tensor: Tensor) -> list[Tensor]:
    """Split a tensor with the layout of a full parameter into views of the user's shapes."""
    flat = getattr(owner, attribute)
    if not hasattr(flat, "_param_infos"):
        return [tensor]
    pieces = tensor.split(flat._param_numels)
    return [piece.view(shape) for piece, shape in zip(pieces, flat._param_shapes, strict=True)]


def tied_members(unit: XlaFullyShardedDataParallel) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    """Yield the further names of a unit's tied parameters: module and name, then module and name of the first one."""
    for _, _, owner, attribute, first_owner, first_attribute in unit.shared_full_param_infos:
        yield owner, attribute, first_owner, first_attribute
    for _, _, owner, attribute, first_owner, first_attribute in unit._fsdp_wrapped_module._shared_param_infos:
        yield owner, attribute, first_owner, first_attribute
