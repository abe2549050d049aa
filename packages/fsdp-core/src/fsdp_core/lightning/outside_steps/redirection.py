"""Runs what needs gathered parameters inside the forward pass of a root: step methods, and calls of a part of it."""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed.tensor
from torch import nn
from torch.autograd.function import BackwardCFunction

from fsdp_core.lightning.precision_plugins import compute_context
from fsdp_core.sharding.sharded import Sharded, sharded_of
from fsdp_core.state.fqn import clean_name
from fsdp_core.state.full_tensor import check_not_gathered, gathered_modules, running_forwards
from fsdp_core.torch_private.autograd import in_backward, is_recomputing
from fsdp_core.torch_private.dynamo import outside_of_compilation

__all__ = [
    "call_inside_forward",
    "called_as_written",
    "explain_shards",
    "explain_uncaught_error",
    "explain_views",
    "follow_calls",
    "is_inside_forward",
    "mend_caught",
    "normal_tensors",
]

#: By module that needs parameters of a root: the root, and the module's FQN there.
_parts: WeakKeyDictionary[nn.Module, tuple[ref[nn.Module], str]] = WeakKeyDictionary()

#: By root that :func:`follow_calls` follows: whether all ranks must make calls outside of a step.
_needs_all_ranks: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

#: By module with a running call outside of a step: the exception that was already being handled when it began.
_exceptions_before: WeakKeyDictionary[nn.Module, tuple[BaseException | None]] = WeakKeyDictionary()

#: Roots of which the user's code calls a part during a backward pass that follows their forward pass.
_called_in_backward: WeakSet[nn.Module] = WeakSet()

#: The attribute that keeps a ``forward`` that was set on the module itself, while ours is in its place.
_OWN_FORWARD = "_fsdp_core_forward"


def call_inside_forward(root: nn.Module, module: nn.Module, call: Callable[[], Any]) -> Any:
    """Run a call where ``root`` would call ``module.forward``.

    Its arguments don't pass through the root's hooks, in which a sharding library casts them to the compute dtype. A
    batch must not be cast: a target of 100001 is 99840 in bf16.

    Args:
        root: The module to call, with no arguments.
        module: The module inside it, or the root itself, whose forward the call replaces.
        call: The call.

    Returns:
        The result of the call, as the root's hooks passed it on.

    Example:
        >>> class Model(nn.Module):
        ...     def training_step(self, batch):
        ...         return 2 * batch
        >>> model = Model()
        >>> call_inside_forward(model, model, lambda: model.training_step(21))
        42
    """
    forward: Callable[..., Any] = module.forward
    has_own_forward = "forward" in module.__dict__

    def restore_forward() -> None:
        if has_own_forward:
            module.forward = forward
        else:
            module.__dict__.pop("forward", None)

    def call_once() -> Any:
        restore_forward()  # because the call may itself call forward
        return call()

    module.forward = call_once
    with called_as_written(root, module), normal_tensors():
        try:
            return root()
        finally:
            restore_forward()


def is_inside_forward(module: nn.Module) -> bool:
    """Whether a forward pass is running of a root, given the root or the user's module in it."""
    return module in running_forwards


def mend_caught(sharded: Sharded) -> None:
    """Mend a root before a backward pass or an optimizer's step if an exception has ended the last backward pass.

    Raises:
        ShardingError: There are gradients, which may be from a part of that backward pass.
    """
    if not sharded.is_interrupted or in_backward():
        return
    if is_inside_forward(sharded.root):
        sharded.mend_inside()
    else:
        sharded.mend_interrupted()


@contextmanager
def called_as_written(*modules: nn.Module) -> Iterator[None]:
    """A context in which the parts of roots are called as the user wrote them, whatever their parameters are.

    Args:
        *modules: Roots, and the modules that these stand for.
    """
    for module in modules:
        _count_forward(module)
    try:
        yield
    finally:
        for module in modules:
            _uncount_forward(module)


@contextmanager
def normal_tensors() -> Iterator[None]:
    """A context that replaces ``torch.inference_mode()``, if that is on, by ``no_grad()``, so tensors can outlive it.

    Shards, and tensors that libraries gather and keep, are used in training later.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def follow_calls(sharded: Sharded, *, on_all_ranks: bool) -> None:
    """Let a root, and parts of it, be called outside of its forward pass: in hooks, and after training.

    The root's own parameters are gathered only for its forward pass. So a call of a part that may need them is made
    inside a forward pass of the root, and so is a call of a unit that a library has wrapped. Calls of roots and of
    units that are the user's own modules are left as they are, and watched. After each call, parameters are resharded,
    because hooks may read them. Idempotent.

    Args:
        sharded: The sharded root.
        on_all_ranks: Whether all ranks must make such a call. They need not if each has the full model.
    """
    root, user_modules = sharded.root, sharded.user_modules
    if root in _needs_all_ranks:
        return
    _needs_all_ranks[root] = on_all_ranks
    unwrapped = set(user_modules.values())
    wrappers: dict[str, nn.Module] = {}
    for full_name, module in root.named_modules():
        if module not in unwrapped:
            wrappers.setdefault(clean_name(full_name), module)
    units = {name: user_modules[name] for name in sharded.plan.units}
    in_units = {inner for unit in units.values() for inner in unit.modules()}
    for name, message_part in user_modules.items():
        if message_part not in in_units and sharded.plan.has_parameters(name):
            _parts[message_part] = ref(root), clean_name(name)
            _redirect_forward(message_part)
    for name, unit in units.items():
        called_module = wrappers.get(clean_name(name), unit)
        _parts[called_module] = ref(root), clean_name(name)
        if called_module is unit:
            _watch(unit)
        else:
            _redirect_forward(called_module)
    _parts[root] = ref(root), ""
    _watch(root)


def _watch(module: nn.Module) -> None:
    module.register_forward_pre_hook(_before_watched_call, prepend=True)
    module.register_forward_hook(_after_watched_call, always_call=True)


@outside_of_compilation
def _before_watched_call(module: nn.Module, args: Any) -> None:
    root = _root_of(module)
    if root is None or in_backward():
        return
    is_outside = root not in running_forwards and module not in gathered_modules
    if module is root:
        _count_forward(root)
    if is_outside:
        _exceptions_before[module] = (sys.exc_info()[1],)
        _begin_outside_call(root, module)
    if module is root and root not in gathered_modules:
        _sharded_root(root).mend_interrupted()


@outside_of_compilation
def _after_watched_call(module: nn.Module, args: Any, output: Any) -> None:
    root = _root_of(module)
    if root is None or in_backward():
        return
    if module is root:
        _uncount_forward(root)
    exception_before = _exceptions_before.pop(module, None)
    if exception_before is not None:
        _end_outside_call(root, failed=sys.exc_info()[1] is not exception_before[0])


def _count_forward(module: nn.Module) -> None:
    running_forwards[module] = running_forwards.get(module, 0) + 1


def _uncount_forward(module: nn.Module) -> None:
    depth = running_forwards.pop(module, 0)
    if depth > 1:
        running_forwards[module] = depth - 1


def _root_of(module: nn.Module) -> nn.Module | None:
    """The root that a module is a part of; ``None`` for a copy."""
    root_and_name = _parts.get(module)
    return None if root_and_name is None else root_and_name[0]()


def _sharded_root(root: nn.Module) -> Sharded:
    sharded = sharded_of(root)
    assert sharded is not None
    return sharded


#: Torch's errors when a shard is used as if it were the parameter: a DTensor, or a rank's piece as a plain tensor.
_SHARD_ERRORS = re.compile(
    "mixed torch.Tensor and DTensor|Contracting dimension sizes|must be a matrix|must be 2-D|size mismatch"
    "|same shape as normalized_shape|must match the size of tensor|inconsistent tensor size"
    "|doesn't match the broadcast shape"
    "|out of bounds for dimension with size 0|setStorage"
    "|does not have a sharding strategy registered|Cannot flatten unevenly sharded"
)


#: Torch's error when a tensor is written to a DTensor, or a DTensor to a tensor.
_MIXED_WRITE_ERROR = re.compile(r"aten\.\w*[a-z]_\.\w+ got mixed torch.Tensor and DTensor")

#: The folder of torch's code for DTensors.
_DTENSOR_FOLDER = Path(torch.distributed.tensor.__file__).parent


#: Torch's errors when a function's backward pass differentiates with respect to a unit's parameters.
_FUNCTION_ERRORS = re.compile("mixed torch.Tensor and DTensor|setStorage|not have been used in the graph")


#: Torch's errors when a unit's input, which fully_shard has made a view, is written to in place.
_VIEW_ERRORS = re.compile(
    "RegisterPostBackwardFunction.* inplace|inplace.* created inside a custom Function", re.DOTALL
)


#: Torch's errors when a graph needs a tensor that was written to or freed after the graph had recorded it.
_GRAPH_ERRORS = re.compile("modified by an inplace operation|modified inplace|setStorage")

#: In torch's error about a saved tensor that was written to: the tensor's shape, and the number of writes.
_VERSION_ERROR = re.compile(r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\].* is at version (\d+);")

_RESIZE_NOTE = (
    "fsdp-core: a parameter gets another shape after sharding, as resize_token_embeddings() of transformers gives it: "
    "the optimizer and the other ranks hold parts of the old one.\n"
    "Do it before sharding: where the model is made, in __init__ or configure_model; under Fabric, before "
    "fabric.setup()."
)

#: Notes for errors that torch raises in a step because of its own limits, by a part of the error's message.
_NOTES_BY_MESSAGE = {
    "Cannot writeback when the parameter shape changes": _RESIZE_NOTE,
    "setStorage: sizes": (
        "fsdp-core: this may be FSDP1's limit for bf16-mixed and 16-mixed without sharding: with NO_SHARD, and on one "
        "rank with every strategy, it frees what a second graph still needs.\n"
        "On several ranks write sharding_strategy='SHARD_GRAD_OP'; on one, precision='bf16-true'."
    ),
    "resize storage that is not resizable": (
        "fsdp-core: this may be about a gathered parameter of which parameter.detach().numpy() was taken, also by "
        "np.asarray(): torch never frees the memory of an array, and a unit frees its parameters.\n"
        "Write parameter.detach().clone().numpy()."
    ),
    "only change requires_grad flags of leaf variables": (
        "fsdp-core: this may be about a parameter that is frozen or unfrozen in a step while it is gathered, as a part "
        "of one tensor: one of no unit, or of a unit that is gathered ahead.\n"
        "Freeze it before the step; or let it belong to a unit, by auto_wrap_policy, that is not gathered ahead."
    ),
    "backward once on any region computed under selective": (
        "fsdp-core: activation_checkpointing_saves keeps results for one backward pass, and this is another one "
        "through the same call, as retain_graph=True and create_graph=True need it.\n"
        "Leave activation_checkpointing_saves out: then any number of backward passes compute all results again."
    ),
    "in-place operations that require placement changes": (
        "fsdp-core: this may be about a value that is not reduced over the ranks yet, as the norm of a shard, to which "
        "code writes in place, as timm's dispatch_clip_grad(mode='agc') does.\n"
        "Write norm.full_tensor() before, on all ranks; or clip with gradient_clip_val, or fabric.clip_gradients()."
    ),
    **dict.fromkeys(
        ("SyncBatchNorm expected input tensor to be on", "aten::batch_norm_stats"),
        "fsdp-core: SyncBatchNorm, which sync_batchnorm=True of the Trainer puts in the place of batch norms, computes "
        "by torch.batch_norm_stats and others, which torch has for GPUs, and packages for other devices may lack.\n"
        "Leave sync_batchnorm out: each rank then normalises by its own batch; or write GroupNorm or LayerNorm.",
    ),
    "no longer exists (was garbage collected)": (
        "fsdp-core: when a module is sharded, other parameters take the place of those that it was built with; what "
        "was made of these before, as torch_ema's ExponentialMovingAverage, has lost them.\n"
        "Make it in on_fit_start(), under Fabric after fabric.setup(), where it takes shards."
    ),
    "`tasks_params` should contain no tensor in common": (
        "fsdp-core: parameters of a unit, and all that belong to no unit, are views of one tensor in a step, which is "
        "what torchjd finds in the graph of each loss.\n"
        "Use Lightning's strategy='ddp' for it; or weigh the losses by torch.autograd.grad(loss, features), and call "
        "backward() once for their sum."
    ),
}

#: The error of a library that has set an attribute on a parameter, and looks for it on the gathered one.
_OBJECT_ERROR = re.compile(r"'(_Shown|Gathered)(Tensor|Parameter|DTensor)' object has no attribute")


def explain_views(exception: BaseException) -> bool:
    """Add a note to an error of torch that says what to write if it is about views that a library has made.

    Args:
        exception: The error.

    Returns:
        Whether it is.
    """
    if "inplace" in str(exception) and "returns multiple views" in str(exception):
        exception.add_note(
            "fsdp-core: this may be about parameters that are gathered for a step: they may be views of one tensor, to "
            "which torch's foreach functions can't write.\n"
            "Write to one after the other, average.lerp_(parameter, 0.1); or to shards, in on_train_batch_end()."
        )
        return True
    if _VIEW_ERRORS.search(str(exception)) is None:
        return False
    exception.add_note(
        "fsdp-core: what a unit is called with reaches its forward() as a view that fully_shard has made, and torch "
        "allows no in-place operation on that, nor on what the unit returns of it.\n"
        "Write x = x.relu() instead of x.relu_(), inplace=False, or x = x.clone() before."
    )
    return True


def explain_uncaught_error(exception: BaseException) -> None:
    """Add a note as :func:`explain_shards` does to an error that nothing has caught, unless it has one."""
    if not any(note.startswith("fsdp-core:") for note in getattr(exception, "__notes__", ())):
        explain_shards(exception)


def explain_shards(exception: BaseException, sharded: Iterable[Sharded] = (), *, is_inside: bool = False) -> None:
    """Add a note to an error of torch that says what to write if it is about a shard.

    Args:
        exception: The error.
        sharded: The roots that it may be about.
        is_inside: Whether it was raised in a root's forward pass, also one without :func:`call_inside_forward`.

    Example:
        >>> error = RuntimeError("'weight' must be 2-D")
        >>> explain_shards(error)
        >>> error.__notes__[0].splitlines()[0]
        'fsdp-core: outside of a step, parameters are shards, and this may be about one.'
    """
    for message_part, note in _NOTES_BY_MESSAGE.items():
        if message_part in str(exception):
            exception.add_note(note)
            return
    if _OBJECT_ERROR.search(str(exception)):
        exception.add_note(
            "fsdp-core: in a step a module holds gathered parameters, which are not the objects at which a library has "
            "left something, as opacus and BackPACK leave gradients of examples.\n"
            "Use Lightning's strategy='ddp' for it; what is computed of activations and of losses works."
        )
        return
    codes = [frame.f_code for frame, _ in traceback.walk_tb(exception.__traceback__)]
    if any(code.co_name == "resize_token_embeddings" for code in codes):
        exception.add_note(_RESIZE_NOTE)
        return
    if _GRAPH_ERRORS.search(str(exception)) and any(root.has_freed_graph for root in sharded):
        exception.add_note(
            "fsdp-core: a graph that create_graph=True has recorded holds parameters, which were freed since: at the "
            "end of the next backward pass, or by a step.\n"
            "Add what was computed with it to the loss of that backward pass: one backward() for both."
        )
        return
    is_in_engine = any(code.co_name == "_engine_run_backward" for code in codes)
    names = _parameters_written_since(str(exception), sharded) if is_in_engine else []
    if names:
        exception.add_note(
            f"fsdp-core: {_list_names(names)} was written to between the forward pass and this backward "
            "pass, which computes with its values: by an optimizer's step, a checkpoint that was loaded, or by hand.\n"
            "Run the backward pass before that, or the forward pass again after it."
        )
        return
    if explain_views(exception):
        return
    if _FUNCTION_ERRORS.search(str(exception)) and any(code is BackwardCFunction.apply.__code__ for code in codes):
        exception.add_note(
            "fsdp-core: this was raised in the backward() of a torch.autograd.Function, as that of torchdiffeq's "
            "odeint_adjoint and of reversible blocks, and may be about parameters of a unit, which are shards there.\n"
            "Let the modules that it runs belong to no unit: name other classes in auto_wrap_policy={MyBlock}, or "
            "write auto_wrap_policy=None, for one unit; and let it keep parameters by ctx.save_for_backward()."
        )
        return
    if is_in_engine and _is_raised_by_torch(codes[-1]) and "mixed torch.Tensor and DTensor" in str(exception):
        exception.add_note(
            "fsdp-core: the loss was computed with a parameter, or a value of one, outside of the unit that it belongs "
            "to: there it is a DTensor, a shard.\n"
            "A penalty over all parameters belongs into the optimizer (weight_decay); one on the parameters of a unit "
            "is right in the unit's own forward(), and one on what belongs to no unit in training_step(), under Fabric "
            "in a method that model.mark_forward_method() names."
        )
        return
    is_in_step = is_inside or any(code is call_inside_forward.__code__ for code in codes)
    # For tensors of one element, torch raises an AssertionError without a message.
    is_of_dtensors = bool(codes) and Path(codes[-1].co_filename).is_relative_to(_DTENSOR_FOLDER)
    is_silent = isinstance(exception, AssertionError) and not str(exception) and is_of_dtensors
    if is_in_step and (is_silent or _MIXED_WRITE_ERROR.search(str(exception))):
        exception.add_note(
            "fsdp-core: a tensor and a DTensor were mixed in a write: in a step a parameter of no unit is gathered, "
            "and its gradient is a shard, as of self.parameters() in p.add_(p.grad).\n"
            "Write to what the optimizer holds, for p in optimizer.param_groups[0]['params'], which are shards too; or "
            "to self.parameters() in on_train_batch_end()."
        )
        return
    if is_silent:
        exception.add_note(
            "fsdp-core: a tensor was written to with a DTensor: a parameter without dimensions is no DTensor, and a "
            "norm or a sum over parameters or gradients is one.\n"
            "Write norm = norm.full_tensor(), on all ranks, and compute with that."
        )
        return
    if not _SHARD_ERRORS.search(str(exception)) or any(code.co_name == "_engine_run_backward" for code in codes[-1:]):
        return  # raised by autograd's engine, so its cause is in an earlier forward pass and not a shard here
    if is_in_step:
        exception.add_note(
            "fsdp-core: this may be about a layer or a parameter inside a unit, such as self.blocks[0].norm, that is "
            "used from outside of the unit: there it is a shard.\n"
            "Call the unit and use it in the unit's own forward(); or let it belong to no unit: name other classes in "
            "auto_wrap_policy={MyBlock}, or write auto_wrap_policy=None, for one unit."
        )
        return
    if "mixed torch.Tensor and DTensor" in str(exception):
        exception.add_note(
            "fsdp-core: outside of a step, and of the model's calls, parameters are shards (DTensors), and this may be "
            "about a penalty on them.\n"
            "A penalty over all parameters belongs into the optimizer (weight_decay); one on the parameters of a unit "
            "is right in the unit's own forward(), and one on what belongs to no unit in a method that "
            "model.mark_forward_method() names. For values, write on all ranks: with fsdp_core.gathered(module):"
        )
        return
    exception.add_note(
        "fsdp-core: outside of a step, parameters are shards, and this may be about one.\n"
        "Call the model, or a part of it that is not a layer inside a unit, which gathers what it needs; or write, on "
        "all ranks,\n    with fsdp_core.gathered(module):\nin which it has full parameters."
    )


def _list_names(names: list[str]) -> str:
    listing = " or ".join(map(repr, names[:3]))
    return listing if len(names) <= 3 else f"{listing} or one of {len(names) - 3} more"


def _parameters_written_since(message: str, sharded: Iterable[Sharded]) -> list[str]:
    """Return the parameters that torch's error about a saved tensor that was written to may be about."""
    match = _VERSION_ERROR.search(message)
    if match is None:
        return []
    numel = math.prod(map(int, re.findall(r"\d+", match[1])))
    times = int(match[2])
    return [name for root in sharded for name in root.written_since_gathered(numel, times)]


def _is_raised_by_torch(code: CodeType) -> bool:
    """Whether an error comes from autograd's engine or DTensor's operations, by the code that raised it."""
    return code.co_name == "_engine_run_backward" or Path(code.co_filename).is_relative_to(_DTENSOR_FOLDER)


def _redirect_forward(module: nn.Module) -> None:
    """Replace a module's ``forward`` by a method of the same signature that calls it inside the root's forward pass."""
    own_forward = module.__dict__.get("forward")
    if own_forward is None:
        function = _redirected_method(type(module).forward)
    else:
        module.__dict__[_OWN_FORWARD] = own_forward

        def function(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _call_or_redirect(self, self.__dict__[_OWN_FORWARD], args, kwargs)

        signature = inspect.signature(own_forward)
        self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        function.__dict__["__signature__"] = signature.replace(
            parameters=[self_parameter, *signature.parameters.values()]
        )
        function.__name__ = "forward"  # pickle finds it by this name
    module.__dict__["forward"] = function.__get__(module)


@functools.cache
def _redirected_method(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _call_or_redirect(self, functools.partial(method, self), args, kwargs)

    forward.__name__ = "forward"
    return forward


def _call_or_redirect(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    root = _root_of(module)
    if root is None or module in gathered_modules:
        return forward(*args, **kwargs)
    if root in running_forwards or (in_backward() and not _sharded_root(root).is_idle()):
        if in_backward():  # activation checkpointing repeats a call, or the user's code makes a new one
            _sharded_root(root).gather_again()
            if root not in running_forwards and root not in _called_in_backward and not is_recomputing():
                return _call_in_backward(root, forward, args, kwargs)
        else:
            sharded = _sharded_root(root)
            if sharded.is_interrupted:  # by an exception that the step has caught
                sharded.mend_inside()
            sharded.follow_written_shards()
        return forward(*args, **kwargs)
    _begin_outside_call(root, module)
    sharded = _sharded_root(root)
    failed = True
    try:
        with compute_context(sharded.precision, sharded.runtime.device.type):
            call = functools.partial(forward, *args, **kwargs)
            output = call_inside_forward(root, sharded.module, call)
        failed = False
    finally:
        _end_outside_call(root, failed=failed)
    return output


def _call_in_backward(root: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make a new call in the backward pass that follows a step, in the units' compute dtype."""
    sharded = _sharded_root(root)
    _called_in_backward.add(root)
    try:
        with compute_context(sharded.precision, sharded.runtime.device.type):
            return forward(*args, **kwargs)
    finally:
        _called_in_backward.discard(root)


def _begin_outside_call(root: nn.Module, module: nn.Module) -> None:
    """Begin a call outside of a step."""
    path = _parts[module][1]
    name = f"{type(module).__name__} ({path!r})" if path else type(module).__name__
    check_not_gathered(root, f"a call of {name}, which is not gathered,")
    if _needs_all_ranks.get(root):
        call = f"a call of {name} outside of a step, which gathers shards of all ranks,"
        _sharded_root(root).runtime.rendezvous(call)


def _end_outside_call(root: nn.Module, *, failed: bool) -> None:
    """End a call outside of a step. A later backward pass gathers again what it needs."""
    sharded = _sharded_root(root)
    if failed:
        sharded.abandon_forward()
    sharded.end_call()
