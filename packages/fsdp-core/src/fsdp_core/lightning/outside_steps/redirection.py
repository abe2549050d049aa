"""Runs what needs gathered parameters inside the forward pass of a root: step methods, and calls of a part of it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.lightning.private import DtypeContext
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.sharding.sharded import Sharded, sharded_of
from fsdp_core.state.fqn import clean_name
from fsdp_core.state.full_tensor import check_not_gathered, gathered_modules, running_forwards
from fsdp_core.torch_private.autograd import in_backward, is_recomputing
from fsdp_core.torch_private.dynamo import outside_of_compilation
from fsdp_core.torch_private.modules import CALL_OF_MODULES

__all__ = [
    "call_inside_forward",
    "called_as_written",
    "compute_context",
    "follow_calls",
    "is_inside_forward",
    "mend_caught",
    "outside_inference_mode",
]

#: By module whose calls need parameters of a root: the root, and the module's FQN in it.
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

    The call's own arguments don't pass through the root's hooks, in which a sharding library casts arguments to the
    compute dtype. A batch must not be cast: a target of 100001 is 99840 in bf16.

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
    with called_as_written(root, module), outside_inference_mode():
        try:
            return root()
        finally:
            restore_forward()


def compute_context(precision: ShardPrecision, device: str) -> AbstractContextManager[Any]:
    """A context in which forward passes run.

    Args:
        precision: The dtypes.
        device: The type of the device.
    """
    if precision.autocast:
        # without the cache of casts: a cast cached under no_grad() would cut the graph of a later call in the same
        # step, and a cast cached before a write to a weight would be stale
        return torch.autocast(device, dtype=precision.compute, cache_enabled=False)
    return nullcontext() if precision.storage is torch.float32 else DtypeContext(precision.storage)


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
def outside_inference_mode() -> Iterator[None]:
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
    for name, part in user_modules.items():
        if part not in in_units and sharded.plan.has_parameters(name):
            _parts[part] = ref(root), clean_name(name)
            _redirect_forward(part)
    for name, unit in units.items():
        called_module = wrappers.get(clean_name(name), unit)  # what users call: a library's wrapper, if there is one
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
    is_outside_step = root not in running_forwards and module not in gathered_modules
    if module is root:
        _count_forward(root)
    if is_outside_step:
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
    if exception_before is not None:  # the call was outside of a step
        _end_outside_call(root, has_failed=sys.exc_info()[1] is not exception_before[0])


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
    """Call a part of a root as it is inside a pass of the root, and elsewhere inside a forward pass made for it."""
    root = None if torch.compiler.is_compiling() else _root_of(module)
    if root is None or module in gathered_modules:
        return forward(*args, **kwargs)
    sharded = _sharded_root(root)
    if in_backward() and (root in running_forwards or not sharded.is_idle()):
        sharded.gather_again()
        is_repeated = root in running_forwards or root in _called_in_backward or is_recomputing()
        return forward(*args, **kwargs) if is_repeated else _call_in_backward(root, forward, args, kwargs)
    if root in running_forwards:
        if sharded.is_interrupted:  # by an exception that the step has caught
            sharded.mend_inside()
        sharded.follow_written_shards()
        return _of_calling_copy(module, forward)(*args, **kwargs)
    _begin_outside_call(root, module)
    has_failed = True
    try:
        with compute_context(sharded.precision, sharded.runtime.device.type):
            call = functools.partial(forward, *args, **kwargs)
            output = call_inside_forward(root, sharded.module, call)
        has_failed = False
    finally:
        _end_outside_call(root, has_failed=has_failed)
    return output


def _of_calling_copy(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The ``forward`` of the module that calls: of another one of the same class, if it has this one's attributes.

    Libraries such as learn2learn and higher make modules with weights of their own by copying the attributes of one.
    ``forward`` is among them here, bound to that one, whose weights it would compute with.

    Args:
        module: The module that ``forward`` is bound to, as :func:`_call_or_redirect`'s caller calls it.
        forward: What it computes.

    Raises:
        UnsupportedCapabilityError: Another module calls it, and it is not a method of their class.
    """
    frame = sys._getframe(3)
    if frame.f_code is not CALL_OF_MODULES:
        return forward
    caller = frame.f_locals["self"]
    if caller is module or not isinstance(caller, type(module)) or caller._parameters is module._parameters:
        return forward
    if isinstance(forward, functools.partial) and forward.args == (module,):
        return functools.partial(forward.func, caller)
    raise UnsupportedCapabilityError(
        f"{type(caller).__name__} has the attributes of {_parts[module][1] or 'a sharded module'}, and weights of its "
        "own, which its forward() would ignore: it was set on the module that it is copied from.\n"
        "Define forward() in the class; or write torch.func.functional_call(module, weights, inputs) with "
        "auto_wrap_policy=None in place of a copy."
    )


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


def _end_outside_call(root: nn.Module, *, has_failed: bool) -> None:
    """End a call outside of a step. A later backward pass gathers again what it needs."""
    sharded = _sharded_root(root)
    if has_failed:
        sharded.abandon_forward()
    sharded.end_call()
