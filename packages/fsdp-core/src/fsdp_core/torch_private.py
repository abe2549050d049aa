"""The private names of torch that this package uses, each with its reason. Tested with torch 2.9.0 and 2.13.0."""

from __future__ import annotations

import functools
import inspect
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType, MethodType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Whether torch.compile looks at what this thread calls, and how it is told to leave a function alone.
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code
from torch._functorch._aot_autograd import runtime_wrappers

# No public name tells which transforms of torch.func are running, or suspends them.
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters, temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import device_mesh

# Which groups there are, and how many torch has named; no public name counts those that were destroyed since.
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, _redistribute

# What fully_shard places a parameter as that tensor parallelism has sharded along the same dimension; no public name.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# The only way to intercept every operation and traverse its arguments; no public names exist.
from torch.distributed.utils import _cast_forward_inputs

# The base class of every batch norm, including SyncBatchNorm; no public name exists.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

# Hooks before the steps of all optimizers; no public name tells whether there are some.
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader

__all__ = [
    "BatchNorm",
    "Collective",
    "Place",
    "StridedShard",
    "TorchDispatchMode",
    "batches_yielded",
    "buffers_of",
    "call_before_parts",
    "call_before_passes",
    "cast_inputs",
    "check_inputs_of_backward",
    "check_missing_gradients",
    "checks_class_of_views",
    "default_store",
    "depends_on_other",
    "foreach_mul_",
    "foreach_norm",
    "forget_call_before_parts",
    "forget_meshes",
    "forget_unscaled",
    "has_hooks_before_steps",
    "hooks_on",
    "in_backward",
    "in_dual_level",
    "is_accumulated",
    "is_default_group",
    "is_exhausted",
    "is_first_slice",
    "is_flattened",
    "is_recomputing",
    "is_view",
    "iterates_as_torch",
    "last_collective",
    "let_compiled_graphs_take",
    "loads_in_its_own_way",
    "make_scaler_sharded",
    "not_managed",
    "note_meshes",
    "outside_of_compilation",
    "outside_transforms",
    "place_of",
    "plain_tensors_replicated",
    "process_groups",
    "queue_backward_callback",
    "reaches",
    "refuse_unreduced_values",
    "replace_step",
    "running_transforms",
    "skipped_initialiser",
    "times_written",
    "tree_flatten",
    "tree_map",
    "uncounted_writes",
    "users_of_storage",
    "watch_iterators",
    "without_dispatch_modes",
    "without_torch_function",
]

P = ParamSpec("P")
R = TypeVar("R")

#: What an optimizer's step calls to compute the loss again.
Closure = Callable[..., Any]


@dataclass(frozen=True)
class _CachedMeshes:
    """What is known of the meshes in DTensor's caches, all of which are of all ranks.

    Attributes:
        rank: This rank.
        world_size: The number of ranks.
        results: How many results were cached so far.
    """

    rank: int
    world_size: int
    results: tuple[int, ...]


_cached_meshes: _CachedMeshes | None = None
_group_with_clean_caches: weakref.ref[Any] | None = None


def forget_meshes() -> None:
    """Clear what DTensor has cached by mesh. Called when a process group was created.

    Meshes are equal if their ranks are, whatever their process groups. After a process group was destroyed and another
    was created, cached results would name groups of the former one, and torch gives the same names to other groups.

    Nothing is cleared if :func:`note_meshes` has found that there were no other groups than that of all ranks, whose
    name is always the same, and the new one is of as many: a process that trains often need not compute it all again.
    """
    global _cached_meshes, _group_with_clean_caches
    meshes = device_mesh._mesh_resources
    for joined in ("root_to_flatten_mapping", "flatten_name_to_root_dims"):  # only in torch 2.9: of joined axes
        getattr(meshes, joined, {}).clear()
    noted, _cached_meshes = _cached_meshes, None
    _group_with_clean_caches = weakref.ref(dist.group.WORLD)
    if noted == _CachedMeshes(dist.get_rank(), dist.get_world_size(), _cached_results()):
        return
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # not in torch 2.9
    if clear is not None:
        clear()
    _redistribute._gen_transform_infos.cache_clear()


def note_meshes() -> None:
    """Note for :func:`forget_meshes` whether all meshes in DTensor's caches are of all ranks.

    Called before all process groups are destroyed. torch counts the groups that it gives a name; it begins anew after
    their destruction.
    """
    global _cached_meshes
    _cached_meshes = None
    clean = _group_with_clean_caches is not None and _group_with_clean_caches() is dist.group.WORLD
    if clean and _world.group_count == len(_world.pg_names) == 1:
        _cached_meshes = _CachedMeshes(dist.get_rank(), dist.get_world_size(), _cached_results())


def _cached_results() -> tuple[int, ...]:
    """How many results were computed because they were in none of the caches."""
    propagated = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache
    found = getattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats", None)  # not in torch 2.9
    computed = propagated.cache_info().misses, _redistribute._gen_transform_infos.cache_info().misses
    return computed if found is None else (*computed, found()[1])


def is_first_slice(mesh: device_mesh.DeviceMesh) -> bool:
    """Whether a mesh is the first of the slices of a larger one along its axes; true for a mesh that is no slice.

    A DTensor on a slice has a copy on each of the others, which only the larger mesh knows of. torch 2.9 keeps it
    elsewhere than later versions.
    """
    find = getattr(mesh, "_get_root_mesh", None)
    root: device_mesh.DeviceMesh = find() if find is not None else device_mesh._mesh_resources.get_root_mesh(mesh)
    return root is mesh or int(root.mesh.min()) == int(mesh.mesh.min())


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors on one device in place, with as few kernels as torch's own optimizers use.

    torch has no public fused multiplication over a list.
    """
    torch._foreach_mul_(tensors, factor)


def foreach_norm(tensors: list[Tensor], norm_type: float) -> list[Tensor]:
    """Norms of tensors of the same device and dtype, accumulated in fp32, in one kernel.

    ``torch.nn.utils.get_total_norm`` is public, but rounds the norms of bf16 gradients to bf16.
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype))


def refuse_unreduced_values(refusal: Callable[[], Exception] | None) -> None:
    """Make ``float()`` and the like raise for a DTensor with an unreduced (``Partial``) value, such as a norm.

    torch silently reads this rank's own part of the result. DTensor has no public hook for this.

    Args:
        refusal: Creates the exception to raise; ``None`` to restore torch's behaviour.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    op: Any = torch.ops.aten._local_scalar_dense.default
    if refusal is None:
        handlers.pop(op, None)
        return

    def read(op_call: Any, args: Any, kwargs: Any) -> Any:
        (value,) = args
        if any(
            one.is_partial() and size > 1 for one, size in zip(value.placements, value.device_mesh.shape, strict=True)
        ):
            raise refusal()
        return op_call(value._local_tensor)

    handlers[op] = read


def hooks_on(parameter: Tensor) -> bool:
    """Whether gradient hooks are registered on a parameter. There is no public way to check."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_flattened(parameter: Tensor) -> bool:
    """Whether FSDP1 manages a parameter, by itself or as part of a flat one. There is no public way to check."""
    return isinstance(parameter, FlatParameter) or bool(getattr(parameter, "_fsdp_flattened", False))


#: The identity of a storage, and a tensor's offset in it.
Place = tuple[int, int]


def place_of(tensor: Tensor) -> Place:
    """The storage and offset of a tensor: equal for a tensor and views at the same offset, while one of them is alive.

    ``data_ptr()`` is public, but is not an address on devices such as XLA's, where all tensors return the same value.
    """
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def users_of_storage(tensor: Tensor) -> int:
    """The number of tensors that share this tensor's storage, itself included.

    No public API counts them.
    """
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # without the `storage` object above


def cast_inputs(dtype: torch.dtype, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast floating-point tensors at any depth of a module's arguments, as FSDP's roots do.

    Args:
        dtype: The dtype.
        args: Arguments by position.
        kwargs: Arguments by keyword.
    """
    cast: tuple[Any, Any] = _cast_forward_inputs(dtype, *args, **kwargs)
    return cast


def loads_in_its_own_way(module: nn.Module) -> bool:
    """Whether a module has its own method or hooks to load a state dict, of which the latter can't be asked for."""
    is_own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return is_own or bool(module._load_state_dict_pre_hooks)


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread. There is no public way to check."""
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def outside_transforms() -> Iterator[None]:
    """A context that the transforms of ``torch.func`` don't see, such as ``grad`` and ``vmap``. No public API has it.

    What a library does for itself in a call that is transformed, as placing a hook, is no part of the function.
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
    return [one.key().name.lower() for one in retrieve_all_functorch_interpreters()]


def outside_of_compilation(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``torch.compile`` compile neither a function nor what it calls, as :func:`torch.compiler.disable` does.

    That sets the compiler's state four times in each call, which takes as long as a small kernel's launch. Here it
    does so where something is being compiled, and otherwise there is nothing to set.

    Args:
        function: The function, such as a hook of a unit's forward pass.

    Example:
        >>> @outside_of_compilation
        ... def double(x):
        ...     return 2 * x
        >>> double(3)
        6
    """
    disabled: Any = torch.compiler.disable(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if get_eval_frame_callback() is None:
            return function(*args, **kwargs)
        result: R = disabled(*args, **kwargs)
        return result

    skip_code(call.__code__)
    functools.update_wrapper(call, function)
    vars(call).update({name: value for name, value in vars(disabled).items() if name.startswith("_torchdynamo_")})
    vars(call)["_torchdynamo_wrapper_id"] = id(call)
    return call


def let_compiled_graphs_take(kind: type[Tensor]) -> None:
    """Let the graphs of ``torch.compile`` take a class of tensors that compute as plain ones do.

    From torch 2.11 on, the first call of a graph checks what custom operators return, and fails for arguments whose
    class that check does not know ("Multiple dispatch failed"). There is no public way to name one.

    Args:
        kind: The class.
    """
    known = getattr(runtime_wrappers, "HANDLED_TYPES", None)
    if known is not None and kind not in known:
        runtime_wrappers.HANDLED_TYPES = (*known, kind)  # type: ignore[attr-defined]


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another. There is no public way to ask."""
    return tensor._is_view()


def in_dual_level() -> bool:
    """Whether a level of ``torch.autograd.forward_ad`` is entered. There is no public way to check."""
    return bool(forward_ad._current_level >= 0)


def is_recomputing() -> bool:
    """Whether activation checkpointing has called this to compute again. There is no public way to check.

    Libraries for a device have their own, in a module of the same name as torch's.
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
    except RuntimeError:  # autograd.grad returns that of this leaf
        return False


def depends_on_other(outputs: Any, tensor: Tensor, is_same: Callable[[Tensor], bool]) -> bool:
    """Whether outputs depend on something else that stands for a tensor: on another leaf, or another view of its leaf.

    There is no public way to learn which leaf a node of a graph adds to.

    Args:
        outputs: Tensors, or edges of a graph.
        tensor: A leaf, or a view of one.
        is_same: Whether a leaf stands for the tensor.

    Example:
        >>> flat = torch.ones(4, requires_grad=True)
        >>> first, second = flat.split(2)
        >>> again, _ = flat.split(2)
        >>> [depends_on_other(one.sum(), first, lambda leaf: False) for one in (second, again)]
        [False, True]
    """
    own = set(_nodes_before([tensor])) if tensor.grad_fn is not None else set[Any]()
    leaves = [node.variable for node in own if hasattr(node, "variable")]
    for node in _nodes_before((outputs,) if isinstance(outputs, Tensor | GradientEdge) else outputs):
        if node in own:
            continue
        for following, _ in node.next_functions:
            leaf: Any = getattr(following, "variable", None)
            if leaf is not None and leaf is not tensor and (is_same(leaf) or any(leaf is one for one in leaves)):
                return True
    return False


def _nodes_before(outputs: Any) -> Iterator[Any]:
    """The nodes of a graph that lead to outputs, each once."""
    edges = (one if isinstance(one, GradientEdge) else get_gradient_edge(one) for one in outputs if _has_edge(one))
    pending = list(dict.fromkeys(edge.node for edge in edges))
    known = set(pending)
    while pending:
        node: Any = pending.pop()
        yield node
        following = [one for one, _ in node.next_functions if one is not None and one not in known]
        known.update(following)
        pending += dict.fromkeys(following)


def _has_edge(output: Any) -> bool:
    return isinstance(output, GradientEdge) or output.requires_grad


def check_missing_gradients(check: Callable[[Tensor, Any], None]) -> None:
    """Let ``torch.autograd.grad`` call a function with each parameter that it has no gradient of. Called once or again.

    torch has no hook there: autograd, which calls those on its nodes, does nothing for a leaf that no graph holds.

    Args:
        check: Called with the parameter and the outputs before torch returns, or raises that the parameter was not
            used.
    """
    own: Any = getattr(torch.autograd.grad, "_fsdp_core_wraps", torch.autograd.grad)

    @functools.wraps(own)
    def grad(outputs: Any, inputs: Any, *args: Any, materialize_grads: bool = False, **options: Any) -> Any:
        _call_before_passes(outputs)
        is_one = isinstance(inputs, Tensor | GradientEdge)
        given = (inputs,) if is_one else tuple(inputs)
        if torch.compiler.is_compiling() or all(type(one) is Tensor for one in given):  # not parameters, nor gathered
            return own(outputs, given, *args, materialize_grads=materialize_grads, **options)
        if materialize_grads:
            options["allow_unused"] = True
        try:
            found = own(outputs, given, *args, **options)
        except RuntimeError as error:
            # the second is of code that asks autograd about a leaf that is returned, as an adapter of FSDP1 does
            if any(
                part in str(error) for part in ("not have been used in the graph", "currently running autograd.grad()")
            ):
                for one in given:
                    check(one, outputs)
            raise
        for one, gradient in zip(given, found, strict=True):
            if gradient is None:
                check(one, outputs)
        if materialize_grads:
            found = tuple(
                torch.zeros_like(one) if gradient is None else gradient
                for one, gradient in zip(given, found, strict=True)
            )
        return found

    patched: Any = grad
    patched._fsdp_core_wraps = own
    torch.autograd.grad = patched


def check_inputs_of_backward(check: Callable[[Sequence[Tensor | GradientEdge], Sequence[Tensor]], None]) -> None:
    """Let ``torch.autograd.backward`` call a function with the inputs that it is given. Called once or again.

    ``Tensor.backward(inputs=...)`` calls it too. torch has no hook there, and says nothing of inputs that it does not
    reach.

    Args:
        check: Called before anything is computed, with the outputs and the inputs, if there are inputs.
    """
    own: Any = getattr(torch.autograd.backward, "_fsdp_core_wraps", torch.autograd.backward)

    @functools.wraps(own)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        _call_before_passes(tensors)
        if inputs is not None:
            inputs = (inputs,) if isinstance(inputs, Tensor | GradientEdge) else tuple(inputs)
            given = [one for one in inputs if isinstance(one, Tensor)]
            if given and not torch.compiler.is_compiling():
                check((tensors,) if isinstance(tensors, Tensor | GradientEdge) else tuple(tensors), given)
        own(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

    patched: Any = backward
    patched._fsdp_core_wraps = own
    torch.autograd.backward = patched


_before_passes = threading.local()


def call_before_passes(call: weakref.WeakMethod[Callable[[Sequence[Tensor | GradientEdge]], None]]) -> None:
    """Call a method in this thread before each backward pass that begins outside of others, while its object lives.

    It is given the outputs. Done by what :func:`check_missing_gradients` and :func:`check_inputs_of_backward` have set.
    """
    calls = [one for one in getattr(_before_passes, "calls", ()) if one() is not None and one != call]
    _before_passes.calls = [*calls, call]


def _call_before_passes(outputs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for one in getattr(_before_passes, "calls", ()):
        if not in_backward() and (call := one()) is not None:
            call((outputs,) if isinstance(outputs, Tensor | GradientEdge) else tuple(outputs))


def reaches(outputs: Iterable[Tensor | GradientEdge], leaves: Iterable[Tensor]) -> set[int]:
    """The ids of the leaves that the graphs of outputs lead to. There is no public way to ask.

    Args:
        outputs: Where a backward pass is to begin.
        leaves: Leaves that require gradients.
    """
    nodes = {get_gradient_edge(leaf).node: id(leaf) for leaf in leaves}
    waiting: list[Any] = [one.node if isinstance(one, GradientEdge) else one.grad_fn for one in outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(after for after, _ in node.next_functions)
    return {leaf for node, leaf in nodes.items() if node in seen}


def default_store() -> Any:
    """The store of the default process group; ``None`` without a process group.

    There is no public way to get it. Unlike a collective, it can be used while other ranks wait in a collective.
    """
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


@dataclass(frozen=True, kw_only=True)
class Collective:
    """What torch's flight recorder holds of a collective.

    Attributes:
        name: Such as ``"gloo:all_reduce"``.
        shapes: The shapes and dtypes of its inputs, such as ``"(2, 3) float"``.
        group: The group, in torch's words; empty for the group of all ranks.
        sequence: The number of collectives of all ranks that this rank has entered, this one included.
        has_ended: Whether it is over.
        seconds_ago: The seconds since this rank entered it.
    """

    name: str
    shapes: str
    group: str
    sequence: int
    has_ended: bool
    seconds_ago: float


_c10d: Any = torch._C._distributed_c10d  # whose stubs lack the recorder

#: How torch calls the group of all ranks.
_ALL_RANKS = "default_pg"


#: torch's flight recorders: that of gloo, and that of NCCL, which only builds with CUDA have.
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def last_collective() -> Collective | None:
    """The last collective that this process has entered; ``None`` if torch's flight recorders hold none.

    A recorder keeps the newest ``TORCH_FR_BUFFER_SIZE`` collectives of all groups, one those of NCCL and another those
    of gloo: a group for GPUs has both. No public name reads them while the process runs: torch writes NCCL's to a file
    when NCCL gives up.
    """
    recorded = [_recorded(name) for name in _RECORDERS] if dist.is_initialized() else []
    entries = [one for of_recorder in recorded for one in of_recorder]
    if not entries:
        return None
    last = max(entries, key=lambda one: (int(one["time_created_ns"]), int(one["record_id"])))
    # NCCL and gloo each count their own
    of_all = [
        [int(one["collective_seq_id"]) for one in of_recorder if _ALL_RANKS in one["process_group"]]
        for of_recorder in recorded
    ]
    shapes = [
        f"({', '.join(map(str, size))}) {dtype.lower()}"
        for size, dtype in zip(last["input_sizes"], last["input_dtypes"], strict=False)
    ]
    return Collective(
        name=str(last["profiling_name"]),
        shapes=", ".join(shapes) or "nothing",
        group="" if _ALL_RANKS in last["process_group"] else " ".join(map(str, last["process_group"])),
        sequence=sum(map(max, filter(None, of_all))) if any(of_all) else -1,
        has_ended=bool(last["retired"]),
        seconds_ago=max(0.0, time.time() - int(last["time_created_ns"]) / 1e9),
    )


def _recorded(name: str) -> list[dict[str, Any]]:
    """What a flight recorder holds; nothing if torch was built without it."""
    dump = getattr(_c10d, name, None)
    return [] if dump is None else json.loads(dump()).get("entries") or []


def is_default_group(group: Any) -> bool:
    """Whether this is the group of all ranks that exists now; no public name returns the group itself."""
    return dist.is_initialized() and dist.distributed_c10d._get_default_group() is group


@contextmanager
def not_managed(module: nn.Module) -> Iterator[None]:
    """A context in which no submodule is marked as managed by FSDP; other libraries check the mark.

    torch marks modules for its compiler; transformers synchronizes ranks if it finds the mark.
    """
    marked = [inner for inner in module.modules() if inner.__dict__.pop("_is_fsdp_managed_module", False)]
    try:
        yield
    finally:
        for inner in marked:
            inner.__dict__["_is_fsdp_managed_module"] = True


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass in progress has finished.

    There is no public hook at the end of a backward pass; FSDP1, FSDP2 and DDP use this one.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def checks_class_of_views() -> bool:
    """Whether torch refuses views of a DTensor of a subclass, as it did before it computed with DTensors in C++."""
    return "_op_dispatcher" in inspect.unwrap(DTensor.__torch_dispatch__).__code__.co_names


def without_torch_function() -> AbstractContextManager[Any]:
    """A context in which a ``Tensor`` subclass behaves as a plain tensor; the public APIs return the subclass again."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return context


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """A context in which no mode sees operations, such as the one that keeps results for a selective checkpoint."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def make_scaler_sharded(scaler: torch.amp.GradScaler, all_reduce_max: Callable[[Tensor], Tensor]) -> None:
    """Make ``scaler`` detect overflow in other ranks' shards.

    ``GradScaler`` decides on each rank separately whether to skip a step; with shards, the ranks would diverge. It also
    can't unscale sharded and replicated gradients in one list. Both happen in ``_unscale_grads_``, the method that
    torch's own ``ShardedGradScaler`` overrides; it is replaced on the instance, so that the class of a user's scaler
    does not change.

    Args:
        scaler: The scaler, changed in place.
        all_reduce_max: All-reduces a tensor of shape ``(1,)`` to its maximum over the ranks.
    """

    def unscale(
        optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad = parameter.grad
                with without_torch_function():  # it may be guarded, see step_gradients
                    local = grad.to_local() if hasattr(grad, "to_local") else grad.as_subclass(Tensor)
                by_kind.setdefault((local.device, local.dtype), []).append(local)
        found: dict[torch.device, Tensor] = {inv_scale.device: found_inf.clone()}
        for (device, _), grads in by_kind.items():
            flag = found.setdefault(device, found_inf.to(device, copy=True))
            filled = [g for g in grads if g.numel()]
            if filled:
                torch._amp_foreach_non_finite_check_and_unscale_(filled, flag, inv_scale.to(device))
        return {device: all_reduce_max(flag) for device, flag in found.items()}

    instance: Any = scaler
    instance._unscale_grads_ = unscale


@contextmanager
def plain_tensors_replicated(optimizer: torch.optim.Optimizer) -> Iterator[Callable[[Closure], Closure]]:
    """A context for a step of one of torch's optimizers over DTensors and plain tensors that all ranks hold whole.

    On a GPU torch's optimizers compute with lists of tensors (``foreach``) unless told not to, and DTensor refuses a
    list with plain tensors of more than one element, such as the weights of a batch norm. Here it takes them as
    replicated, which they are. torch's own ``implicit_replication()`` would also hold for what a closure computes.

    Args:
        optimizer: The optimizer. For the steps of other libraries, which may mix what is not replicated, the context
            changes nothing.

    Yields:
        A function that makes of a closure one that runs as outside of the context.
    """
    dispatcher: Any = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication

    def as_outside(closure: Closure) -> Closure:
        @functools.wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            inside = dispatcher._allow_implicit_replication
            dispatcher._allow_implicit_replication = before
            try:
                return closure(*args, **kwargs)
            finally:
                dispatcher._allow_implicit_replication = inside

        return call

    dispatcher._allow_implicit_replication = before or type(optimizer).step.__module__.startswith("torch.optim.")
    try:
        yield as_outside
    finally:
        dispatcher._allow_implicit_replication = before


def forget_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Let ``scaler`` unscale an optimizer's gradients again, which were discarded since.

    ``GradScaler`` remembers whose gradients it has unscaled until its ``update()``, which only a step allows.

    Args:
        scaler: The scaler.
        optimizer: The optimizer, which has no gradients.
    """
    instance: Any = scaler
    instance._per_optimizer_states.pop(id(optimizer), None)


def iterates_as_torch(loader: DataLoader[Any]) -> bool:
    """Whether a dataloader creates its iterators with ``_get_iterator``, and they yield batches in sampler order."""
    makes = getattr(type(loader).__iter__, "__module__", "")
    return makes.startswith(("torch.utils.data.", "torchdata.")) and getattr(loader, "in_order", True)


def watch_iterators(loader: DataLoader[Any], told: Callable[[Any], None]) -> None:
    """Call ``told`` with each iterator that a dataloader creates. A plain ``DataLoader`` keeps no reference to them."""
    place = weakref.ref(loader)

    def create_and_report() -> Any:
        own: Any = place()
        iterator = type(own)._get_iterator(own)
        told(iterator)
        return iterator

    instance: Any = loader
    instance._get_iterator = create_and_report


def batches_yielded(iterator: Any) -> int:
    """The number of batches that a dataloader's iterator has yielded, without those that its workers have prefetched.

    No public API counts them in the main process.
    """
    return int(iterator._num_yielded)


def is_exhausted(iterator: Any) -> bool:
    """Whether a torchdata iterator has signalled that no batch is left; torch's own iterators don't record it."""
    return bool(getattr(iterator, "_finished", False))


def process_groups() -> int:
    """The number of process groups, the default one included; torch has no public count."""
    return len(torch.distributed.distributed_c10d._world.pg_map)


def skipped_initialiser(asked: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The function of ``torch.nn.init`` that is about to skip a meta tensor, and its arguments.

    From torch 2.13 on, some of these functions return at once if ``tensor.is_meta``. Called from
    ``__torch_function__`` when that attribute is read. Callers may hold references to the functions, so patching
    ``torch.nn.init`` would not reach all of them.
    """
    if getattr(asked, "__self__", None) is not Tensor.is_meta:
        return None
    frame: FrameType | None = sys._getframe(2)
    if frame is None or frame.f_globals.get("__name__") != "torch.nn.init":
        return None
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return frame.f_globals[code.co_name], {name: frame.f_locals[name] for name in names}


def has_hooks_before_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of the user's run before an optimizer's ``step()`` calls its closure. No public name tells."""
    return bool(optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """Put a function in the place of an optimizer's ``step``.

    A learning-rate scheduler wraps ``step`` at the instance, to note the first call in ``_opt_called``, recognises its
    wrapper by ``_wrapped_by_lr_sched``, and warns if there is another. torch wraps the method of the class to call
    hooks, and marks it ``hooked``.

    Args:
        optimizer: The optimizer, before or after a scheduler was made for it.
        step: Called with the optimizer and the arguments of ``step()``.

    Returns:
        What ``step`` was, as a function of the optimizer and the arguments; and whether torch called hooks around it,
        which it does not call.
    """
    there: Any = optimizer.step
    is_followed = hasattr(there, "_wrapped_by_lr_sched")
    own: Any = there.__wrapped__ if is_followed else getattr(there, "__func__", None)
    of_class: Any = type(optimizer).step
    is_hooked = own is of_class and bool(getattr(own, "hooked", False))

    def note_and_step(self: Any, *args: Any, **options: Any) -> Any:
        self._opt_called = True
        return step(self, *args, **options)

    note_and_step.__dict__["_wrapped_by_lr_sched"] = True
    instance: Any = optimizer
    instance.step = MethodType(note_and_step if is_followed else step, optimizer)
    if own is None:  # a function that the user has put there, without the optimizer among its arguments
        return (lambda _, *args, **options: there(*args, **options)), False
    return (own.__wrapped__ if is_hooked else own), is_hooked


#: What is called before somebody gets the part of a DTensor that this rank holds.
_before_parts: list[Callable[[], Any]] = []
_to_local = DTensor.to_local


def call_before_parts(call: Callable[[], Any]) -> None:
    """Call this once, before ``DTensor.to_local()`` is next called, unless it is forgotten.

    ``weight.detach().to_local()`` shares memory with the weight, and writes to it are counted nowhere else. There is no
    hook for it; the method is replaced only as long as something waits for it.
    """
    _before_parts.append(call)
    DTensor.to_local = _to_local_after_calls  # type: ignore[method-assign]


def forget_call_before_parts(call: Callable[[], Any]) -> None:
    """Don't call this any more. Nothing is done if it waits no longer."""
    _before_parts[:] = [one for one in _before_parts if one != call]
    if not _before_parts:
        DTensor.to_local = _to_local  # type: ignore[method-assign]


@functools.wraps(_to_local)
def _to_local_after_calls(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
    for call in [*_before_parts]:
        call()
        forget_call_before_parts(call)
    return _to_local(self, *args, **kwargs)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The dictionary in which a module itself holds its buffers, by name; it may be changed."""
    return module._buffers


def times_written(tensor: Tensor) -> int:
    """How often a tensor, or one that shares its memory, was written in place; 0 for inference tensors.

    Autograd counts it to detect writes to what a backward pass needs. No public name exists.
    """
    try:
        return tensor._version
    except RuntimeError:  # of an inference tensor
        return 0


def uncounted_writes(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which writes to a tensor are not counted, as those of libraries that gather are not."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
