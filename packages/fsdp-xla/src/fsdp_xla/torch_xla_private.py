"""The names of torch_xla that this package uses and that are private or not typed, each with its reason.

Checked on torch_xla 2.9.0.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

# Takes nests of tensors apart and puts them together again; torch has no public name for it.
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch_xla._internal import pjrt
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
from torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel import TrainingState

from fsdp_xla.meeting import Meeting, StoreMeeting, ThreadMeeting

__all__ = [
    "RankHere",
    "ShardedMember",
    "XlaFullyShardedDataParallel",
    "all_gather",
    "all_reduce",
    "compiled",
    "default_device",
    "end_step",
    "follow_freezing",
    "follow_requires_grad",
    "is_shard",
    "let_go_of_wholes",
    "meeting_of_ranks",
    "meetings",
    "no_reduction",
    "on_host",
    "parameter_of",
    "random_state",
    "rank_here",
    "reduce_scatter",
    "reduce_what_waits",
    "replace",
    "reset",
    "resume_forward",
    "run_on_processes",
    "run_on_threads",
    "runtime_is_started",
    "set_default_device",
    "set_random_state",
    "set_unreduced_gradients",
    "settle",
    "sharded_members",
    "shards_of",
    "start_alone",
    "suspend_forward",
    "sync",
    "tied_members",
    "tree_flatten",
    "tree_unflatten",
    "units_of",
    "unreduced_gradients",
]

#: torch_xla's compiled half, for what of it the lockstep of ranks on the CPU needs.
compiled: Any = torch_xla._XLAC

#: By thread: whether a rank runs in it (``rank``), and where it meets the others if they are threads too (``here``).
meetings = threading.local()


class RankHere(NamedTuple):
    """Which rank runs in this thread.

    Attributes:
        rank: Its index in the world.
        local_rank: Its index on this host.
        host: The index of this host.
        world_size: The number of ranks.
    """

    rank: int
    local_rank: int
    host: int
    world_size: int


def rank_here() -> RankHere | None:
    """Which rank runs in this thread; ``None`` before ranks are started."""
    if not getattr(meetings, "rank", False):
        return None
    return RankHere(xr.global_ordinal(), xr.local_ordinal(), xr.host_index(), xr.world_size())


def run_on_threads(
    function: Callable[[], object],
    interrupts: Sequence[Callable[[], None]] = (),
) -> None:
    """Call ``function`` on a thread for each device of this process, with replication over them.

    ``torch_xla.launch`` does this where there is one process; its own way to it sets no replication on the CPU, and its
    collectives then reduce nothing. Nor can its threads be interrupted.

    Args:
        function: Keeps its exceptions to itself.
        interrupts: What to do at the first interrupt from the keyboard, at the second, and so on, while going on to
            wait for the threads. One more, and they are left as they are.

    Raises:
        KeyboardInterrupt: There was an interrupt.
    """
    added = {"PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT"} - set(os.environ)
    ended: list[threading.Event] = []

    def rank(device: str, end: threading.Event) -> None:
        try:
            compiled._xla_set_default_device(device)
            xr._init_world_size_ordinal()
            meetings.rank = True
            function()
        finally:
            end.set()

    try:
        pjrt.initialize_multiprocess(0, 1)
        for device in xm.get_xla_supported_devices():
            ended.append(threading.Event())
            threading.Thread(target=rank, args=(device, ended[-1]), daemon=True).start()
        _wait_for(ended, interrupts)
    finally:
        for variable in added:
            os.environ.pop(variable, None)


def _wait_for(events: Sequence[threading.Event], interrupts: Sequence[Callable[[], None]]) -> None:
    told = iter(interrupts)
    interrupt: KeyboardInterrupt | None = None
    for event in events:
        while not event.is_set():
            try:
                event.wait()
            except KeyboardInterrupt as error:
                interrupt, how = error, next(told, None)
                if how is None:
                    raise
                how()
    if interrupt is not None:
        raise interrupt


def run_on_processes(function: Callable[[], object]) -> None:
    """Call ``function`` in a process for each TPU chip of this host, forked from this one."""
    xmp.spawn(_rank_of_process, args=(function,), start_method="fork")


def _rank_of_process(_: int, function: Callable[[], object]) -> None:
    meetings.rank = True
    function()


def default_device() -> torch.device:
    """The XLA device of this rank."""
    device: torch.device = torch_xla.device()
    return device


def set_default_device(device: torch.device) -> None:
    """Let ``device`` be the one that this thread means when it names none."""
    compiled._xla_set_default_device(str(device))


def start_alone() -> torch.device:
    """Take one device of this process, without peers."""
    pjrt.initialize_singleprocess()
    return default_device()


def replace(tensor: Tensor, value: Tensor) -> None:
    """Let a tensor of the device have a value of the host's. A copy into it would be a graph to compile."""
    torch_xla._XLAC._replace_xla_tensor(tensor, value.to(tensor.device))


def runtime_is_started() -> bool:
    """Whether XLA has been used in this process, so that its devices can't be chosen any more."""
    return bool(torch_xla._XLAC._xla_runtime_is_initialized())


def sync(wait: bool = False) -> None:
    """Run what has been recorded. By attribute, since ranks that are threads put another in its place."""
    torch_xla.sync(wait=wait)


def settle() -> None:
    """Run what is pending, and return when nothing is: only then can state be read or replaced.

    Random numbers go on as they would have without: to XLA, running something is a step, with a seed of its own.
    """
    seed = xm.get_rng_state()
    sync(wait=True)
    xm.set_rng_state(seed)


def on_host(tensor: Tensor) -> Tensor:
    """The tensor's values in host memory."""
    return tensor.detach().cpu()


def all_reduce(tensor: Tensor, op: str) -> Tensor:
    """Reduce over all ranks, in the graph."""
    reductions = {"sum": xm.REDUCE_SUM, "max": xm.REDUCE_MAX, "min": xm.REDUCE_MIN, "mean": xm.REDUCE_SUM}
    scale = 1.0 / xr.world_size() if op == "mean" else 1.0
    reduced: Tensor = xm.all_reduce(reductions[op], tensor, scale=scale, pin_layout=False)
    return reduced


def all_gather(tensor: Tensor) -> Tensor:
    """Concatenate the ranks' tensors along the first axis, in the graph."""
    gathered: Tensor = xm.all_gather(tensor, dim=0, pin_layout=False)
    return gathered


def reduce_scatter(tensor: Tensor, world_size: int) -> Tensor:
    """Sum over all ranks and keep this rank's row, in the graph, which is the same on every rank."""
    row: Tensor = xm.reduce_scatter(
        xm.REDUCE_SUM, tensor, scale=1.0, scatter_dim=0, shard_count=world_size, pin_layout=False
    )
    return row


def random_state(device: torch.device) -> int:
    """Where the device's generator is: its seed, which every draw moves on."""
    return int(xm.get_rng_state(str(device)))


def set_random_state(device: torch.device, state: int) -> None:
    """Set the device's generator."""
    xm.set_rng_state(int(state), str(device))


def meeting_of_ranks(rank: int, world_size: int, address: str, port: int, timeout: timedelta | None) -> Meeting:
    """Where this rank meets the others: in this process if they are its threads, else at rank 0's address."""
    here: ThreadMeeting | None = getattr(meetings, "here", None)
    if here is not None:
        if timeout is not None:
            here.rendezvous.timeout = timeout
        return here
    store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout or timedelta(minutes=30))
    return StoreMeeting(store, world_size)


# -- what XlaFullyShardedDataParallel knows of its parameters ----------------------------------------------------------


class ShardedMember(NamedTuple):
    """A parameter of the user's and where this rank's elements of it lie.

    Attributes:
        owner: The user's module that holds it.
        attribute: Its name there.
        shape: Its shape as written.
        shard: The sharded parameter that an optimizer holds.
        start: The index of its first element here, in C order.
        offset: Where that is in the shard, flattened.
        length: How many elements of it are here.
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


def reset(root: nn.Module) -> None:
    """Bring units back to where a step begins, after an exception amid one.

    What a forward pass has hung on the full parameters would keep them, and all that the pass recorded, for ever.
    """
    for unit in units_of(root):
        for parameter in unit.full_params:
            parameter.grad = None
    end_step(root)


def end_step(root: nn.Module) -> None:
    """Bring units to where a step begins, when no backward pass comes any more through what they have recorded."""
    for unit in units_of(root):
        for parameter in unit.full_params:
            hook = parameter.__dict__.pop("_shard_bwd_hook", None)
            if hook is not None:
                hook[1].remove()
        unit.training_state = TrainingState.IDLE
        unit._pre_backward_hook_has_run = unit._post_backward_callback_queued = False
        unit._free_full_params(apply_opt_barrier=False)
        if unit._output_pre_backward_hook_registered is not None:
            unit._output_pre_backward_hook_registered.clear()
            unit._clear_backward_opt_barrier_lists()


@contextmanager
def no_reduction(root: nn.Module) -> Iterator[None]:
    """As ``root.no_sync()``, which refuses a backward pass inside the root's forward pass."""
    units = list(units_of(root))
    before = [unit._require_backward_grad_sync for unit in units]
    for unit in units:
        unit._require_backward_grad_sync = False
    try:
        yield
    finally:
        for unit, synced in zip(units, before, strict=True):
            unit._require_backward_grad_sync = synced


def suspend_forward(root: Any) -> None:
    """Let a backward pass begin inside the root's forward pass, as if the root had returned its loss."""
    root.training_state = TrainingState.BACKWARD_PRE
    root._pre_backward_hook_has_run = True


def resume_forward(root: Any) -> None:
    """Go on with the root's forward pass, with current values, after a backward pass or a step inside it.

    Args:
        root: The root. Another backward pass may come to any of its units, through what has been recorded already.
    """
    units = list(units_of(root))
    if root._pre_backward_hook_has_run:
        waiting = [(u, p, p._shard_bwd_hook[0]) for u in units for p in u.full_params if hasattr(p, "_shard_bwd_hook")]
        _end_backward(root, units)
        for unit, parameter, node in waiting:  # the same: one made now would be of what has taken the parameter's place
            hook = node.register_hook(partial(unit._post_backward_hook, parameter))
            parameter._shard_bwd_hook = (node, hook)
    for unit in units:
        if unit is root or not unit.reshard_after_forward:
            unit._free_full_params(apply_opt_barrier=unit.optimization_barrier_in_forward)
            unit._rebuild_full_params(apply_opt_barrier=unit.optimization_barrier_in_forward)
    root._register_post_backward_hooks()
    _show_gathered(root)
    root.training_state = TrainingState.FORWARD


def _end_backward(root: Any, units: list[Any]) -> None:
    for unit in units:
        unit.reduce_scatter_op.flush()  # it counts hooks, which a unit may have had before this backward pass
        if unit._pre_backward_hook_has_run:
            # torch_xla asserts that a backward pass reaches each parameter of a unit that it comes to
            trained = any(p.requires_grad for p in unit.full_params) and any(p.requires_grad for p in unit.parameters())
            unit.training_state = TrainingState.BACKWARD_POST if trained else TrainingState.BACKWARD_PRE
    root._wait_for_post_backward()


def reduce_what_waits(root: Any) -> None:
    """Have gradients of earlier micro-batches reduced too where the last one has left their parameters out.

    torch_xla reduces a gradient as its backward pass arrives at the parameter, and so never one that waits for another.

    Args:
        root: From now on, each backward pass through it ends so.
    """
    end = root._wait_for_post_backward

    def reduce_and_end() -> None:
        for unit in units_of(root):
            for parameter in unit.full_params:
                if parameter.grad is not None and unit._require_backward_grad_sync:
                    state, unit.training_state = unit.training_state, TrainingState.BACKWARD_POST
                    unit._post_backward_hooks_to_call += 1  # which counts this one off
                    unit._post_backward_hook(parameter)
                    unit.reduce_scatter_op.flush()
                    unit.training_state = state
        end()

    root._wait_for_post_backward = reduce_and_end


def _show_gathered(root: Any) -> None:
    """Let modules show a flattened root's parameters as they are now."""
    if root.module.is_flattened:
        root.module._unflatten_params_as_views()


def follow_requires_grad(root: Any) -> None:
    """Let full parameters require gradients as their shards do, inside a forward pass of the root."""
    for unit in units_of(root):
        for full, shard in zip(unit.full_params, unit.sharded_params, strict=True):
            full.requires_grad_(shard.requires_grad)
    root._register_post_backward_hooks()
    _show_gathered(root)


def let_go_of_wholes(unit: Any) -> None:
    """Free what a unit was sharded from, which torch_xla 2.9 only hides.

    It puts another value in the place of a parameter's. But the tensor that the parameter was made of keeps the first
    one, as the base that views would be made from anew, and so the whole model on every device. So it is given another
    too. A flattened parameter is left alone: those of the user are views of it, and ranks on CPU devices were seen to
    wait for each other for ever.

    Args:
        unit: What has been sharded; of its parameters, those that :func:`parameter_of` has made.
    """
    for parameter in unit.full_params:
        made_of = parameter.__dict__.pop(_MADE_OF, None)
        if made_of is not None and not hasattr(parameter, "_param_infos"):
            compiled._replace_xla_tensor(made_of, unit._dummy_data_placeholder)


_MADE_OF = "_fsdp_xla_made_of"


def parameter_of(tensor: Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter that knows what it was made of, for :func:`let_go_of_wholes`. Nobody else may need the tensor."""
    parameter = nn.Parameter(tensor, requires_grad=requires_grad)
    parameter.__dict__[_MADE_OF] = tensor
    return parameter


def follow_freezing(root: nn.Module) -> None:
    """Let full parameters be trained or frozen as their shards are now, or the other way round: users may see either.

    torch_xla asks the full ones, which it makes as units are, and never looks at the shards again.
    """
    for unit in units_of(root):
        for shard, full in zip(unit.sharded_params, unit.full_params, strict=True):
            was = shard.__dict__.get("_was_trained", shard.requires_grad)
            trained = shard.requires_grad if shard.requires_grad != was else full.requires_grad
            shard.requires_grad_(trained)
            full.requires_grad_(trained)
            shard._was_trained = trained


def shards_of(unit: Any) -> list[Any]:
    """What a unit itself, without those in it, has left of its parameters."""
    return list(unit.sharded_params)


def is_shard(parameter: Tensor) -> bool:
    """Whether a tensor is what a unit has left of a parameter."""
    return bool(getattr(parameter, "_is_sharded", False))


def sharded_members(unit: XlaFullyShardedDataParallel) -> Iterator[ShardedMember]:
    """The parameters that a unit has sharded; each once, under the first of its places."""
    for shard, (_, owner, attribute) in zip(unit.sharded_params, unit.full_param_infos, strict=True):
        local = shard.numel()
        first = unit.rank * local
        if owner is unit._fsdp_wrapped_module:
            yield from _flattened(owner, attribute, shard, first, local)
            continue
        shape = tuple(shard._orig_size)
        size = torch.Size(shape).numel()
        yield ShardedMember(owner, attribute, shape, shard, min(first, size), 0, max(0, min(local, size - first)))


def _flattened(
    wrapper: nn.Module, flat_name: str, shard: nn.Parameter, first: int, local: int
) -> Iterator[ShardedMember]:
    flat: Any = getattr(wrapper, flat_name)
    begin = 0
    for (owner, attribute), shape, size in zip(
        [(m, n) for _, m, n in flat._param_infos], flat._param_shapes, flat._param_numels, strict=True
    ):
        start, end = max(first, begin), min(first + local, begin + size)
        length = max(0, end - start)
        yield ShardedMember(
            owner,
            attribute,
            tuple(shape),
            shard,
            start - begin if length else 0,
            start - first if length else 0,
            length,
        )
        begin += size


def unreduced_gradients(unit: Any) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The gradients that a unit has accumulated without reducing them: whose they are, and each at its own shape."""
    for full, (_, owner, attribute) in zip(unit.full_params, unit.full_param_infos, strict=True):
        if full.grad is not None:
            for place, of_place in zip(_places(owner, attribute), _pieces(owner, attribute, full.grad), strict=True):
                yield *place, of_place


def set_unreduced_gradients(unit: Any, gradients: Mapping[tuple[int, str], Callable[[], Tensor]]) -> None:
    """Let a unit go on from gradients that :func:`unreduced_gradients` has found. All ranks must call it.

    Args:
        unit: The unit, whose gradients are replaced.
        gradients: Functions that read a gradient, by the id of the module that holds the parameter, and its name there.
    """
    unit._rebuild_full_params()
    for full, (_, owner, attribute) in zip(unit.full_params, unit.full_param_infos, strict=True):
        full.grad = None
        read = [gradients.get((id(module), name)) for module, name in _places(owner, attribute)]
        if any(read):
            grad = torch.zeros(full.shape, dtype=full.dtype)
            for one, piece in zip(read, _pieces(owner, attribute, grad), strict=True):
                if one is not None:
                    piece.copy_(one())
            full.grad = grad.to(full.device)
    unit._free_full_params()


def _places(owner: Any, attribute: str) -> list[tuple[nn.Module, str]]:
    """The user's parameters that a full one is made of."""
    flat = getattr(owner, attribute)
    return [(module, name) for _, module, name in getattr(flat, "_param_infos", ())] or [(owner, attribute)]


def _pieces(owner: Any, attribute: str, tensor: Tensor) -> list[Tensor]:
    """A tensor laid out as a full parameter, as views of the user's shapes."""
    flat = getattr(owner, attribute)
    if not hasattr(flat, "_param_infos"):
        return [tensor]
    runs = tensor.split(flat._param_numels)
    return [run.view(shape) for run, shape in zip(runs, flat._param_shapes, strict=True)]


def tied_members(unit: XlaFullyShardedDataParallel) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    """The further places of a unit's parameters: owner and name, and those of the first place."""
    for _, _, owner, attribute, first_owner, first_attribute in unit.shared_full_param_infos:
        yield owner, attribute, first_owner, first_attribute
    for _, _, owner, attribute, first_owner, first_attribute in unit._fsdp_wrapped_module._shared_param_infos:
        yield owner, attribute, first_owner, first_attribute
