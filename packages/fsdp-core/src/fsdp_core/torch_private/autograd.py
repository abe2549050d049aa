"""How autograd is asked what it does: its graphs, passes and transforms."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

# No public name tells which transforms of torch.func are running, or suspends them.
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters, temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = [
    "as_tuple",
    "call_around_backward",
    "call_before_passes",
    "check_inputs_of_backward",
    "check_missing_gradients",
    "depends_on_other",
    "graph_nodes",
    "in_backward",
    "in_dual_level",
    "is_accumulated",
    "is_recomputing",
    "is_view",
    "outside_transforms",
    "queue_backward_callback",
    "reaches",
    "running_transforms",
]


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread. There is no public way to check."""
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def outside_transforms() -> Iterator[None]:
    """A context that the transforms of ``torch.func`` don't see, such as ``grad`` and ``vmap``. No public API has it.

    For what a library does in a call besides computing, such as registering a hook: it must not be transformed.
    """
    if torch._C._functorch.maybe_current_level() is None:
        yield
        return
    with temporarily_clear_interpreter_stack():
        yield


def running_transforms() -> list[str]:
    """The transforms of ``torch.func`` that are running, the outermost first: ``grad``, ``jvp``, ``vmap``.

    ``vjp`` and ``jacrev`` run as ``grad``, ``jacfwd`` as ``jvp`` in ``vmap``.
    """
    if torch._C._functorch.maybe_current_level() is None:
        return []
    return [interpreter.key().name.lower() for interpreter in retrieve_all_functorch_interpreters()]


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another. There is no public way to ask."""
    return tensor._is_view()


def in_dual_level() -> bool:
    """Whether a level of ``torch.autograd.forward_ad`` is entered. There is no public way to check."""
    return bool(forward_ad._current_level >= 0)


def is_recomputing() -> bool:
    """Whether activation checkpointing has called this to compute again. There is no public way to check.

    Libraries for a device have their own checkpointing, in a module with the same name as torch's but for the prefix.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        name: str = frame.f_globals.get("__name__", "")
        if name.startswith("torch") and name.endswith(".utils.checkpoint") and frame.f_code.co_name != "checkpoint":
            return True
        frame = frame.f_back
    return False


def is_accumulated(parameter: Tensor) -> bool:
    """Whether the backward pass that runs on this thread adds to a leaf's gradient. There is no public way to check.

    ``torch.autograd.grad`` only returns gradients, and so adds to none.
    """
    if not (parameter.requires_grad and parameter.is_leaf):
        return False
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:  # torch.autograd.grad runs, and returns this leaf's gradient
        return False


def depends_on_other(outputs: Any, tensor: Tensor, is_same: Callable[[Tensor], bool]) -> bool:
    """Whether outputs depend on the same parameter as a tensor, but not by way of the tensor.

    They do so by way of another leaf for the parameter, or another view of the leaf that the tensor is a view of. There
    is no public way to learn which leaf a node of a graph adds to.

    Args:
        outputs: Tensors, or edges of a graph.
        tensor: A leaf that stands for a parameter, or a view of one.
        is_same: Whether another leaf stands for the same parameter.

    Example:
        >>> flat = torch.ones(4, requires_grad=True)
        >>> first, second = flat.split(2)
        >>> again, _ = flat.split(2)
        >>> [depends_on_other(view.sum(), first, lambda leaf: False) for view in (second, again)]
        [False, True]
    """
    nodes_of_tensor = set(graph_nodes([tensor])) if tensor.grad_fn is not None else set[Any]()
    leaves_of_tensor = {id(node.variable) for node in nodes_of_tensor if hasattr(node, "variable")}
    for node in graph_nodes(as_tuple(outputs)):
        if node in nodes_of_tensor:
            continue
        for next_node, _ in node.next_functions:
            leaf: Any = getattr(next_node, "variable", None)  # which nodes that add to a leaf have
            if leaf is None or leaf is tensor:
                continue
            if is_same(leaf) or id(leaf) in leaves_of_tensor:
                return True
    return False


def graph_nodes(outputs: Any, is_end: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """The nodes of a graph that lead to outputs, each once; those at which ``is_end`` is true, without what is before.

    Args:
        outputs: Tensors, or edges of the graph.
        is_end: Whether a node's own inputs are left out.
    """
    edges = [output for output in outputs if isinstance(output, GradientEdge)]
    edges += [get_gradient_edge(output) for output in outputs if isinstance(output, Tensor) and output.requires_grad]
    pending = list(dict.fromkeys(edge.node for edge in edges))
    visited = set(pending)
    while pending:
        node: Any = pending.pop()
        yield node
        if is_end(node):
            continue
        next_nodes = [next_node for next_node, _ in node.next_functions if next_node is not None]
        unvisited = dict.fromkeys(next_node for next_node in next_nodes if next_node not in visited)
        visited.update(unvisited)
        pending += unvisited


def as_tuple(outputs: Any) -> tuple[Tensor | GradientEdge, ...]:
    """What autograd's functions take as a tensor, an edge of a graph, or several, as a tuple of them."""
    return (outputs,) if isinstance(outputs, Tensor | GradientEdge) else tuple(outputs)


#: Parts of errors about an input that is not in the graph. The second is raised where a hook asks whether a backward
#: pass adds to a leaf, as an adapter of FSDP1 does, while ``torch.autograd.grad`` computes this leaf's gradient.
_UNUSED_INPUT = ("not have been used in the graph", "currently running autograd.grad()")


def check_missing_gradients(check: Callable[[Tensor, Any], None]) -> None:
    """Let ``torch.autograd.grad`` call a function with each parameter that it has no gradient of. Idempotent.

    torch has no hook there: autograd, which calls those on its nodes, does nothing for a leaf that no graph holds.

    Args:
        check: Called with the parameter and the outputs before torch returns, or raises that the parameter was not
            used.
    """
    original: Any = getattr(torch.autograd.grad, "_fsdp_core_wraps", torch.autograd.grad)

    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, materialize_grads: bool = False, **options: Any) -> Any:
        _call_before_passes(outputs)
        inputs = as_tuple(inputs)
        # plain tensors are neither parameters nor gathered: there is nothing to check
        if torch.compiler.is_compiling() or all(type(tensor) is Tensor for tensor in inputs):
            return original(outputs, inputs, *args, materialize_grads=materialize_grads, **options)
        if materialize_grads:  # done below, after a look at which gradients are missing
            options["allow_unused"] = True
        try:
            gradients = original(outputs, inputs, *args, **options)
        except RuntimeError as error:
            if any(message in str(error) for message in _UNUSED_INPUT):
                for tensor in inputs:
                    check(tensor, outputs)
            raise
        for tensor, gradient in zip(inputs, gradients, strict=True):
            if gradient is None:
                check(tensor, outputs)
        if not materialize_grads:
            return gradients
        pairs = zip(inputs, gradients, strict=True)
        return tuple(torch.zeros_like(tensor) if gradient is None else gradient for tensor, gradient in pairs)

    patched: Any = grad
    patched._fsdp_core_wraps = original
    torch.autograd.grad = patched


def check_inputs_of_backward(check: Callable[[Sequence[Tensor | GradientEdge], Sequence[Tensor]], None]) -> None:
    """Let ``torch.autograd.backward`` call a function with the inputs that it is given. Idempotent.

    ``Tensor.backward(inputs=...)`` calls it too. torch has no hook there, and says nothing of inputs that it does not
    reach.

    Args:
        check: Called before anything is computed, with the outputs and the inputs, if there are inputs.
    """
    original: Any = getattr(torch.autograd.backward, "_fsdp_core_wraps", torch.autograd.backward)

    @functools.wraps(original)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        _call_before_passes(tensors)
        is_outermost = not in_backward() and not torch.compiler.is_compiling()
        if is_outermost:
            for before, _ in _around_backward:
                before(as_tuple(tensors))
        if inputs is not None:
            inputs = as_tuple(inputs)
            leaves = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
            if leaves and not torch.compiler.is_compiling():
                check(as_tuple(tensors), leaves)
        original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        if is_outermost:
            for _, after in _around_backward:
                after()

    patched: Any = backward
    patched._fsdp_core_wraps = original
    torch.autograd.backward = patched


_around_backward: list[tuple[Callable[[Sequence[Any]], None], Callable[[], None]]] = []


def call_around_backward(before: Callable[[Sequence[Any]], None], after: Callable[[], None]) -> None:
    """Call functions around each ``torch.autograd.backward`` that is not inside another pass, ``Tensor.backward`` too.

    torch has no hook there: those on nodes know neither where a pass begins nor that it has ended.

    Args:
        before: Called with the outputs.
        after: Called when the pass has ended, with gradients at their leaves.
    """
    if not hasattr(torch.autograd.backward, "_fsdp_core_wraps"):
        check_inputs_of_backward(lambda outputs, inputs: None)
    _around_backward.append((before, after))


_before_passes = threading.local()


def call_before_passes(call: weakref.WeakMethod[Callable[[Sequence[Tensor | GradientEdge]], None]]) -> None:
    """Call a method in this thread, with the outputs, before each backward pass that is not inside another one.

    It is called while its object lives, by the functions that :func:`check_missing_gradients` and
    :func:`check_inputs_of_backward` put in place of torch's.
    """
    alive = [reference for reference in getattr(_before_passes, "calls", ()) if reference() is not None]
    _before_passes.calls = [*(reference for reference in alive if reference != call), call]


def _call_before_passes(outputs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for reference in getattr(_before_passes, "calls", ()):
        if not in_backward() and (call := reference()) is not None:
            call(as_tuple(outputs))


def reaches(outputs: Iterable[Tensor | GradientEdge], leaves: Iterable[Tensor]) -> set[int]:
    """The ids of the leaves that the graphs of outputs lead to. There is no public way to ask.

    Args:
        outputs: Where a backward pass is to begin.
        leaves: Leaves that require gradients.
    """
    nodes = {get_gradient_edge(leaf).node: id(leaf) for leaf in leaves}
    reached = set(graph_nodes([*outputs]))
    return {leaf for node, leaf in nodes.items() if node in reached}


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass in progress has finished.

    There is no public hook at the end of a backward pass; FSDP1, FSDP2 and DDP use this one.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
